//! The sizes of virtual machines that a region offers to a subscription now, and the quota that is left.
//!
//! [`table`] writes the sizes as a table of `headwater size advise`, so live figures and the built-in table are read by
//! the same code. Azure's figures have traps:
//!
//! - `MaxResourceVolumeMB` counts MiB. `CachedDiskBytes` counts bytes.
//! - A size lists places for an OS disk without publishing their space (`Standard_E4d_v5`), and has space at places that it
//!   does not list (`Standard_NC24ads_A100_v4`). Both facts are kept apart.
//! - A missing figure is unknown. It is never zero.
//! - A restriction of type `Zone` concerns only the zones that it names: a size that is restricted in all zones may still
//!   be had without a zone.
//!
//! Spaces are rounded down to 16 MiB.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use crate::arm::Arm;
use crate::arm::resources::Scope;
use crate::error::{AzureError, AzureErrorKind};

const SKU_API: &str = "2021-07-01";
const USAGE_API: &str = "2025-04-01";

/// The columns of the table, except the price.
const HEADER: &str = "size,series,vcpus,vcpus_available,memory_gib,architecture,cache_gib,temp_gib,nvme_disks,nvme_gib_each,\
                      nvme_gib_total,cached_temp_iops,cached_temp_mbps,nvme_read_iops,nvme_read_mbps,nvme_write_iops,\
                      nvme_write_mbps,uncached_iops,uncached_mbps,ephemeral,placements,full_caching,hyperv_generations,\
                      retired,source,note";

/// Spaces in units of 16 MiB, which have a decimal fraction of a GiB with six digits.
const UNIT_MIB: u64 = 16;
const UNITS_PER_GIB: u64 = 64;

/// Local places for an OS disk, by Azure's names.
const PLACES: [&str; 3] = ["CacheDisk", "ResourceDisk", "NvmeDisk"];

/// A size that Azure lists for a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfferedSize {
    /// Its name, such as `Standard_D8ds_v5`.
    pub name: String,
    /// Its family, whose sizes share a quota.
    pub family: String,
    /// Its vCPUs.
    pub vcpus: u64,
    /// The vCPUs that a guest gets.
    pub vcpus_available: u64,
    /// Its memory in GiB, as a decimal number.
    pub memory_gib: String,
    /// Whether its processors are Arm.
    pub is_arm: bool,
    /// The space of the cache, in MiB.
    pub cache_mib: Option<u64>,
    /// The space of the temp disk, in MiB.
    pub temp_mib: Option<u64>,
    /// The number of NVMe disks, and the space of each in MiB.
    pub nvme: Option<(u64, u64)>,
    /// Rates in operations and in bytes per second: cache and temp disk, NVMe reads, NVMe writes, managed disks.
    pub rates: [(Option<u64>, Option<u64>); 4],
    /// Whether the size supports ephemeral OS disks.
    pub is_ephemeral: bool,
    /// The local places that Azure lists, by its names.
    pub placements: Vec<String>,
    /// The generations of machines: `1`, `2`.
    pub generations: Vec<String>,
    /// Whether trusted launch is possible.
    pub has_trusted_launch: bool,
    /// Whether the size has accelerated networking.
    pub has_accelerated_networking: bool,
    /// The controllers of its disks, such as `NVMe`; empty: SCSI.
    pub controllers: Vec<String>,
    /// The day of its retirement, as `YYYY-MM-DD`.
    pub retired: Option<String>,
    /// The zones in which the subscription can use the size.
    pub zones: Vec<String>,
    /// Why the subscription cannot use the size in the region.
    pub refusal: Option<String>,
}

/// The answer of Azure about a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offers {
    /// All sizes that Azure lists, with those that the subscription cannot use.
    pub sizes: Vec<OfferedSize>,
    /// Names of records that lack vCPUs or memory.
    pub incomplete: Vec<String>,
}

/// The quota of a family in a region, in vCPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The family.
    pub family: String,
    /// The vCPUs of existing machines.
    pub used: u64,
    /// The most vCPUs.
    pub limit: u64,
}

/// Reads all sizes of a region. The answer has some megabytes, so it is worth keeping for an hour, not for a day:
/// restrictions come and go.
pub async fn offers(arm: &Arm, scope: &Scope) -> Result<Offers, AzureError> {
    let path = format!("/subscriptions/{}/providers/Microsoft.Compute/skus", scope.subscription);
    let filter = format!("$filter=location%20eq%20%27{}%27", scope.region);
    let records = arm.list(&path, SKU_API, &filter).await?;
    let offers = Offers::of(&records, &scope.region);
    if offers.sizes.is_empty() {
        let what = format!("cannot list sizes: Azure offers none in region '{}'", scope.region);
        let error = AzureError::new(AzureErrorKind::NotFound, what);
        return Err(error.advise("check the name of the region, such as westeurope"));
    }
    Ok(offers)
}

/// Reads the quota of all families in a region.
pub async fn quotas(arm: &Arm, scope: &Scope) -> Result<Vec<Quota>, AzureError> {
    let Scope { subscription, region, .. } = scope;
    let path = format!("/subscriptions/{subscription}/providers/Microsoft.Compute/locations/{region}/usages");
    let records = arm.list(&path, USAGE_API, "").await?;
    let quota = |record: &Value| {
        Some(Quota {
            family: record.pointer("/name/value")?.as_str()?.to_owned(),
            used: record.get("currentValue")?.as_u64()?,
            limit: record.get("limit")?.as_u64()?,
        })
    };
    Ok(records.iter().filter_map(quota).collect())
}

impl Offers {
    /// The sizes among records of the Resource SKUs API.
    pub fn of(records: &[Value], region: &str) -> Self {
        let (mut offers, mut names) = (Self::default(), BTreeSet::new());
        for record in records {
            let text = |field: &str| record.get(field).and_then(Value::as_str).unwrap_or_default();
            let name = text("name");
            if text("resourceType") != "virtualMachines" || !is_in(record, region) || !names.insert(name) {
                continue;
            }
            match OfferedSize::of(record, region) {
                Some(size) => offers.sizes.push(size),
                None => offers.incomplete.push(name.to_owned()),
            }
        }
        offers
    }
}

fn strings(value: Option<&Value>) -> impl Iterator<Item = &str> {
    value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

fn objects<'a>(record: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    record.get(field).and_then(Value::as_array).into_iter().flatten()
}

fn is_in(record: &Value, region: &str) -> bool {
    strings(record.get("locations")).any(|it| it.eq_ignore_ascii_case(region))
}

/// The capabilities of a record by name, in any order.
struct Capabilities<'a>(&'a Value);

impl Capabilities<'_> {
    fn text(&self, name: &str) -> Option<&str> {
        let is_named = |it: &&Value| it.get("name").and_then(Value::as_str) == Some(name);
        objects(self.0, "capabilities").find(is_named)?.get("value")?.as_str()
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    fn is_true(&self, name: &str) -> bool {
        self.text(name).is_some_and(|it| it.eq_ignore_ascii_case("true"))
    }

    /// The parts of a list with commas. The whole text must not be compared: `ResourceDisk,NvmeDisk` has two parts.
    fn list(&self, name: &str) -> Vec<String> {
        let parts = self.text(name).unwrap_or_default().split(',').map(str::trim);
        parts.filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }
}

impl OfferedSize {
    fn of(record: &Value, region: &str) -> Option<Self> {
        let can = Capabilities(record);
        let vcpus = can.number("vCPUs").filter(|vcpus| *vcpus > 0)?;
        let memory_gib = can.text("MemoryGB").filter(|text| is_decimal(text))?.to_owned();
        let rate = |iops: &str, bytes: &str| (can.number(iops), can.number(bytes));
        let (zones, refusal) = availability(record, region);
        let placements = can.list("SupportedEphemeralOSDiskPlacements");
        let is_ephemeral = can.is_true("EphemeralOSDiskSupported");
        let generations = can.list("HyperVGenerations");
        let nvme = can.number("NvmeDiskSizeInMiB").zip(can.number("NvmeSizePerDiskInMiB"));
        Some(Self {
            name: record.get("name")?.as_str()?.to_owned(),
            family: record.get("family").and_then(Value::as_str).unwrap_or_default().to_owned(),
            vcpus,
            vcpus_available: can
                .number("vCPUsAvailable")
                .filter(|it| (1..=vcpus).contains(it))
                .unwrap_or(vcpus),
            memory_gib,
            is_arm: can.text("CpuArchitectureType").is_some_and(|it| it.eq_ignore_ascii_case("arm64")),
            cache_mib: can.number("CachedDiskBytes").map(|bytes| bytes >> 20),
            temp_mib: can.number("MaxResourceVolumeMB"),
            // Disks of unequal sizes are unknown space.
            nvme: nvme
                .filter(|(total, each)| *each > 0 && total % each == 0)
                .map(|(total, each)| (total / each, each)),
            rates: [
                rate("CombinedTempDiskAndCachedIOPS", "CombinedTempDiskAndCachedReadBytesPerSecond"),
                rate("NvmeMaxReadIops", "NvmeMaxReadBytesPerSecond"),
                rate("NvmeMaxWriteIops", "NvmeMaxWriteBytesPerSecond"),
                rate("UncachedDiskIOPS", "UncachedDiskBytesPerSecond"),
            ],
            is_ephemeral,
            placements: placements
                .into_iter()
                .filter(|place| is_ephemeral && PLACES.contains(&place.as_str()))
                .collect(),
            generations: generations
                .iter()
                .filter_map(|it| it.strip_prefix('V'))
                .map(str::to_owned)
                .collect(),
            has_trusted_launch: !can.is_true("TrustedLaunchDisabled")
                && generations.iter().any(|it| it == "V2"),
            has_accelerated_networking: can.is_true("AcceleratedNetworkingEnabled"),
            controllers: can.list("DiskControllerTypes"),
            retired: can.text("RetirementDateUtc").and_then(day),
            zones,
            refusal,
        })
    }

    /// Whether Microsoft documents a full copy for the series: N, L, M, H; D, DC, E, Eb and EC of v5 to v7; F of v6 and
    /// v7; from 8 vCPUs on.
    pub fn has_full_copy(&self) -> bool {
        let name = self.name.strip_prefix("Standard_").unwrap_or(&self.name);
        let letters: String = name.chars().take_while(char::is_ascii_uppercase).collect();
        let version =
            name.rsplit_once("_v").and_then(|(_, version)| version.parse::<u32>().ok()).unwrap_or(1);
        let is_documented = match letters.as_str() {
            "D" | "DC" | "E" | "EC" => (5..=7).contains(&version),
            "F" => (6..=7).contains(&version),
            letters => letters.starts_with(['N', 'L', 'M', 'H']),
        };
        is_documented && self.is_ephemeral && self.vcpus >= 8
    }

    fn row(&self, source: &str) -> String {
        let (count, each) = self.nvme.unwrap_or_default();
        let each_units = each / UNIT_MIB;
        let nvme = match self.nvme {
            Some(_) if count > 0 => {
                format!("{count},{},{}", gib(each_units), gib(each_units.saturating_mul(count)))
            }
            _ => ",,".to_owned(),
        };
        let space = |mib: Option<u64>| mib.map_or(String::new(), |mib| gib(mib / UNIT_MIB));
        let rates: Vec<String> = self.rates.iter().map(|(iops, bytes)| rate(*iops, *bytes)).collect();
        let yes = |it: bool| if it { "yes" } else { "no" };
        let series: String = self.family.chars().filter(|c| is_name(*c)).collect();
        let series = if series.is_empty() { "unknown" } else { &series };
        let note = self.refusal.as_deref().unwrap_or_default().replace('"', "'");
        [
            self.name.clone(),
            series.to_owned(),
            self.vcpus.to_string(),
            self.vcpus_available.to_string(),
            self.memory_gib.clone(),
            if self.is_arm { "arm64" } else { "x64" }.to_owned(),
            space(self.cache_mib),
            space(self.temp_mib),
            nvme,
            rates.join(","),
            yes(self.is_ephemeral).to_owned(),
            self.placements.join("|"),
            yes(self.has_full_copy()).to_owned(),
            // Sizes without the figure are older than generation 2.
            if self.generations.is_empty() { "1".to_owned() } else { self.generations.join("|") },
            self.retired.clone().unwrap_or_default(),
            source.to_owned(),
            format!("\"{note}\""),
        ]
        .join(",")
    }
}

/// The sizes that the subscription can use, as a table of `headwater size advise`. `date`: the day of the answer, as
/// `YYYY-MM-DD`.
pub fn table(offers: &Offers, region: &str, date: &str) -> String {
    let mut text = format!("# source: Resource SKUs API of Azure, {region}\n# date: {date}\n{HEADER}\n");
    for size in offers.sizes.iter().filter(|size| size.refusal.is_none()) {
        // Writing to a text does not fail.
        let _ = writeln!(text, "{}", size.row("resource-skus-api"));
    }
    text
}

const fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

fn is_decimal(text: &str) -> bool {
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    is_digits(whole) && is_digits(fraction) && fraction.len() <= 6
}

/// Units of 16 MiB as GiB.
fn gib(units: u64) -> String {
    decimal(units / UNITS_PER_GIB, units % UNITS_PER_GIB * 1_000_000 / UNITS_PER_GIB)
}

/// Operations and 10^6 bytes per second; 0 bytes count as unknown.
fn rate(iops: Option<u64>, bytes: Option<u64>) -> String {
    let mbps = bytes.filter(|bytes| *bytes > 0).map(|bytes| decimal(bytes / 1_000_000, bytes % 1_000_000));
    format!("{},{}", iops.map_or(String::new(), |it| it.to_string()), mbps.unwrap_or_default())
}

fn decimal(whole: u64, millionths: u64) -> String {
    let text = format!("{whole}.{millionths:06}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `YYYY-MM-DD` of `2026-09-30T00:00:00Z` or of `09/30/2026`.
fn day(text: &str) -> Option<String> {
    let date = text.split(['T', ' ']).next().unwrap_or_default();
    let parts: Vec<&str> = date.split(['-', '/']).collect();
    let is_number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
    match parts.as_slice() {
        [year, month, day] if year.len() == 4 && parts.iter().all(is_number) => {
            Some(format!("{year}-{month:0>2}-{day:0>2}"))
        }
        [month, day, year] if year.len() == 4 && parts.iter().all(is_number) => {
            Some(format!("{year}-{month:0>2}-{day:0>2}"))
        }
        _ => None,
    }
}

/// The zones that the subscription can use, and why it cannot use the size at all.
fn availability(record: &Value, region: &str) -> (Vec<String>, Option<String>) {
    let is_here = |it: &str| it.eq_ignore_ascii_case(region);
    let info = objects(record, "locationInfo")
        .find(|info| info.get("location").and_then(Value::as_str).is_some_and(is_here));
    let mut zones: Vec<String> =
        info.map(|info| strings(info.get("zones")).map(str::to_owned).collect()).unwrap_or_default();
    let mut refusal = None;
    for restriction in objects(record, "restrictions") {
        let reason = restriction.get("reasonCode").and_then(Value::as_str).unwrap_or("restricted");
        match restriction.get("type").and_then(Value::as_str) {
            Some("Location") if strings(restriction.get("values")).any(is_here) => {
                refusal = Some(reason.to_owned());
            }
            Some("Zone") => {
                let refused: Vec<&str> = strings(restriction.pointer("/restrictionInfo/zones")).collect();
                zones.retain(|zone| !refused.contains(&zone.as_str()));
            }
            _ => {}
        }
    }
    zones.sort_unstable();
    (zones, refusal)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(name: &str, capabilities: &[(&str, &str)]) -> Value {
        let capabilities: Vec<Value> =
            capabilities.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        json!({
            "resourceType": "virtualMachines", "name": name, "family": "standardFamily", "locations": ["westeurope"],
            "locationInfo": [{"location": "westeurope", "zones": ["3", "1", "2"]}], "capabilities": capabilities,
            "restrictions": [],
        })
    }

    fn size(name: &str, capabilities: &[(&str, &str)]) -> OfferedSize {
        let basic = [("MemoryGB", "8"), ("vCPUs", "8")];
        let all: Vec<(&str, &str)> = capabilities.iter().copied().chain(basic).collect();
        let offers = Offers::of(&[record(name, &all)], "westeurope");
        offers.sizes.into_iter().next().unwrap()
    }

    #[test]
    fn listed_places_and_their_space_are_kept_apart() {
        let listed = size(
            "Standard_E4d_v5",
            &[
                ("EphemeralOSDiskSupported", "True"),
                ("SupportedEphemeralOSDiskPlacements", "ResourceDisk,CacheDisk"),
                ("MaxResourceVolumeMB", "153600"),
            ],
        );
        assert_eq!(listed.placements, ["ResourceDisk", "CacheDisk"]);
        assert_eq!((listed.cache_mib, listed.temp_mib), (None, Some(150 << 10)));
        assert!(listed.row("x").contains(",x64,,150,,,,"), "{}", listed.row("x"));
        let unlisted = size(
            "Standard_NC24ads_A100_v4",
            &[
                ("NvmeDiskSizeInMiB", "915456"),
                ("NvmeSizePerDiskInMiB", "915456"),
                ("EphemeralOSDiskSupported", "True"),
                ("SupportedEphemeralOSDiskPlacements", "ResourceDisk, CacheDisk"),
            ],
        );
        assert_eq!(unlisted.nvme, Some((1, 915_456)));
        assert_eq!(unlisted.placements, ["ResourceDisk", "CacheDisk"]);
        assert!(unlisted.row("x").contains(",1,894,894,"), "{}", unlisted.row("x"));
        // A size without ephemeral OS disks has no places, whatever else it lists.
        let no = size("Standard_D2_v5", &[("CombinedTempDiskAndCachedIOPS", "9000")]);
        assert!(no.placements.is_empty() && !no.is_ephemeral && no.cache_mib.is_none());
        // Two parts, one of them NVMe.
        let both = [
            ("EphemeralOSDiskSupported", "True"),
            ("SupportedEphemeralOSDiskPlacements", "ResourceDisk,NvmeDisk"),
        ];
        assert_eq!(size("Standard_X8_v6", &both).placements, ["ResourceDisk", "NvmeDisk"]);
    }

    #[test]
    fn spaces_are_rounded_down_and_nvme_disks_are_whole() {
        let six = size(
            "Standard_D128ds_v6",
            &[
                ("NvmeDiskSizeInMiB", "7208960"),
                ("NvmeSizePerDiskInMiB", "1802240"),
                ("MaxResourceVolumeMB", "0"),
            ],
        );
        assert_eq!(six.nvme, Some((4, 1_802_240)));
        assert!(six.row("x").contains(",0,4,1760,7040,"), "{}", six.row("x"));
        let odd = [
            ("CachedDiskBytes", "92341796863"),
            ("NvmeDiskSizeInMiB", "100"),
            ("NvmeSizePerDiskInMiB", "33"),
        ];
        let odd = size("Standard_DS2_v2", &odd);
        assert_eq!(odd.nvme, None);
        assert!(odd.row("x").contains(",x64,85.984375,,,,,"), "{}", odd.row("x"));
        let fraction = [("NvmeDiskSizeInMiB", "3027"), ("NvmeSizePerDiskInMiB", "1009")];
        assert!(size("Standard_A", &fraction).row("x").contains(",3,0.984375,2.953125,"));
        assert_eq!(rate(Some(9000), Some(127_926_272)), "9000,127.926272");
    }

    #[test]
    fn zonal_and_regional_restrictions_are_different() {
        let basic = [("MemoryGB", "218.75"), ("vCPUs", "8"), ("vCPUsAvailable", "2")];
        let mut zonal = record("Standard_M8-2ms", &basic);
        zonal["restrictions"] = json!([{
            "type": "Zone", "values": ["westeurope"], "reasonCode": "NotAvailableForSubscription",
            "restrictionInfo": {"locations": ["westeurope"], "zones": ["1", "2", "3"]},
        }]);
        let mut regional = record("Standard_D8", &basic);
        regional["restrictions"] = json!([{"type": "Location", "values": ["WestEurope"], "reasonCode": "NotAvailableForSubscription"}]);
        let mut elsewhere = record("Standard_D9", &basic);
        elsewhere["locations"] = json!(["eastus"]);
        let incomplete = record("Standard_D10", &[("vCPUs", "8")]);
        let offers = Offers::of(&[zonal, regional, elsewhere, incomplete], "westeurope");
        let [zonal, regional] = offers.sizes.as_slice() else { panic!("{offers:?}") };
        assert!(zonal.zones.is_empty() && zonal.refusal.is_none());
        assert_eq!((zonal.vcpus, zonal.vcpus_available), (8, 2));
        assert_eq!(regional.zones, ["1", "2", "3"]);
        assert_eq!(regional.refusal.as_deref(), Some("NotAvailableForSubscription"));
        assert_eq!(offers.incomplete, ["Standard_D10"]);
        let text = table(&offers, "westeurope", "2026-11-30");
        assert!(
            text.contains("Standard_M8-2ms,standardFamily,8,2,218.75,") && !text.contains("Standard_D8,"),
            "{text}"
        );
    }

    #[test]
    fn a_full_copy_is_documented_for_some_series() {
        let has = |name: &str| size(name, &[("EphemeralOSDiskSupported", "True")]).has_full_copy();
        for name in ["D8ds_v5", "E8bds_v5", "DC8ds_v6", "NC16as_T4_v3", "L8s_v3", "M8-2ms", "F8ads_v6"] {
            assert!(has(&format!("Standard_{name}")), "{name}");
        }
        for name in ["D8s_v3", "D8ds_v4", "F8s_v2", "B8ms", "DS4_v2"] {
            assert!(!has(&format!("Standard_{name}")), "{name}");
        }
    }

    #[test]
    fn days_are_read_in_both_ways() {
        assert_eq!(day("2026-09-30T00:00:00Z").as_deref(), Some("2026-09-30"));
        assert_eq!(day("9/3/2026 12:00:00 AM").as_deref(), Some("2026-09-03"));
        assert_eq!(day("soon"), None);
    }
}
