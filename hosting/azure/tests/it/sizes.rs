//! Tests that live sizes become the same figures as the built-in table, and that quota is read.

use headwater_azure::sizes::{offers, quotas, table};
use headwater_testkit_azure::arm::{Family, Size};

use crate::lab::{Lab, scope};

/// The built-in table of `headwater size advise`.
const BUILT_IN: &str = include_str!("../../../../control/sizes/src/azure-sizes.csv");

/// The columns from `vcpus` to `nvme_gib_total`, and from `ephemeral` to `hyperv_generations`, of a size.
fn columns(table: &str, size: &str) -> Vec<String> {
    let row = table.lines().find(|line| line.starts_with(&format!("{size},"))).unwrap();
    let fields: Vec<&str> = row.split(',').collect();
    // The order of the places does not matter.
    let sorted = |field: &str| {
        let mut parts: Vec<&str> = field.split('|').collect();
        parts.sort_unstable();
        parts.join("|")
    };
    fields[2..11].iter().chain(&fields[19..23]).map(|field| sorted(field)).collect()
}

fn sized(name: &str, vcpus: u64, capabilities: &[(&str, &str)]) -> Size {
    let mut size = Size::new(name, "standardFamily", vcpus, "");
    size.capabilities =
        capabilities.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    size
}

/// Records of the API, whose figures the sources of the built-in table give.
fn records() -> Vec<Size> {
    let both = ("SupportedEphemeralOSDiskPlacements", "ResourceDisk,CacheDisk");
    let (yes, v12) = (("EphemeralOSDiskSupported", "True"), ("HyperVGenerations", "V1,V2"));
    vec![
        sized(
            "Standard_DS2_v2",
            2,
            &[
                ("MemoryGB", "7"),
                yes,
                both,
                v12,
                ("CachedDiskBytes", "92341796864"),
                ("MaxResourceVolumeMB", "14336"),
            ],
        ),
        sized(
            "Standard_D64s_v3",
            64,
            &[
                ("MemoryGB", "256"),
                yes,
                both,
                v12,
                ("CachedDiskBytes", "1717986918400"),
                ("MaxResourceVolumeMB", "524288"),
            ],
        ),
        sized(
            "Standard_B20ms",
            20,
            &[
                ("MemoryGB", "80"),
                yes,
                both,
                v12,
                ("CachedDiskBytes", "32212254720"),
                ("MaxResourceVolumeMB", "163840"),
            ],
        ),
        sized("Standard_E4d_v5", 4, &[("MemoryGB", "32"), yes, both, v12, ("MaxResourceVolumeMB", "153600")]),
        sized(
            "Standard_M8-2ms",
            8,
            &[
                ("vCPUsAvailable", "2"),
                ("MemoryGB", "218.75"),
                yes,
                both,
                v12,
                ("CachedDiskBytes", "851477266432"),
                ("MaxResourceVolumeMB", "262144"),
            ],
        ),
        sized(
            "Standard_D128ds_v6",
            128,
            &[
                ("MemoryGB", "512"),
                yes,
                ("SupportedEphemeralOSDiskPlacements", "NvmeDisk"),
                ("HyperVGenerations", "V2"),
                ("CachedDiskBytes", "0"),
                ("MaxResourceVolumeMB", "0"),
                ("NvmeDiskSizeInMiB", "7208960"),
                ("NvmeSizePerDiskInMiB", "1802240"),
            ],
        ),
        sized(
            "Standard_D16plds_v5",
            16,
            &[
                ("MemoryGB", "32"),
                yes,
                both,
                ("HyperVGenerations", "V2"),
                ("CpuArchitectureType", "Arm64"),
                ("CachedDiskBytes", "429496729600"),
                ("MaxResourceVolumeMB", "614400"),
            ],
        ),
    ]
}

#[tokio::test]
async fn live_sizes_have_the_figures_of_the_built_in_table() {
    let lab = Lab::new(1).await;
    {
        let mut management = lab.server.management();
        management.sizes = records();
        management.page_max = 3;
        management.sizes[0].is_restricted = true;
        management.families.insert("standardFamily".to_owned(), Family { limit: 100 });
    }
    let arm = lab.arm();
    let offers = offers(&arm, &scope()).await.unwrap();
    assert_eq!(offers.sizes.len(), 7);
    let live = table(&offers, "westeurope", "2026-11-30");
    assert!(!live.contains("Standard_DS2_v2"), "{live}");
    for size in records().iter().skip(1) {
        assert_eq!(columns(&live, &size.name), columns(BUILT_IN, &size.name), "{}", size.name);
    }
    let header = |table: &str| table.lines().find(|line| line.starts_with("size,")).map(str::to_owned);
    assert_eq!(header(&live), header(BUILT_IN));
    let quotas = quotas(&arm, &scope()).await.unwrap();
    assert_eq!((quotas[0].family.as_str(), quotas[0].used, quotas[0].limit), ("standardFamily", 0, 100));
}

#[tokio::test]
async fn a_region_without_sizes_is_an_error() {
    let lab = Lab::new(1).await;
    let error = offers(&lab.arm(), &scope()).await.unwrap_err();
    assert!(error.to_string().contains("westeurope") && error.advice().is_some(), "{error}");
}
