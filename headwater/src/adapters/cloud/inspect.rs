//! Looks into a version before it is published to Azure: which firmware boots it, and whether it reports to Azure that it has
//! booted. Azure restarts a machine that does not report, and gives it up after some time. A version of Windows is refused.
//!
//! | program | found by |
//! |---|---|
//! | cloud-init | `/usr/bin/cloud-init`, unless its configuration lists data sources without Azure |
//! | Azure Linux agent | `/usr/sbin/waagent` or `/usr/bin/waagent` |
//! | a unit of the user | a file in `/etc/systemd/system` that names Azure's address for reports |
//!
//! Files are read with [`small_files`], which reads ext2, ext3, ext4, FAT and NTFS, but no LVM, XFS or Btrfs.

use std::sync::Arc;

use headwater_api::{ImageVersion, ProblemKind};
use headwater_block::Device;
use headwater_filesystems::{ReadAt, efi};
use headwater_image::{Cancel, ChunkCache, SmallFile, SmallFiles, VersionReader, small_files};
use headwater_service::backend::{BackendError, CloudFacts, ProvisioningAgent};
use headwater_store::Store;

use crate::adapters::images::{hash_of, image_failed};

/// Memory for chunks while a version is looked into.
const CHUNKS_BYTES: u64 = 32 << 20;

const CLOUD_INIT: &str = "/usr/bin/cloud-init";
const AGENTS: [&str; 2] = ["/usr/sbin/waagent", "/usr/bin/waagent"];
const WINDOWS: &str = "/Windows/System32/ntoskrnl.exe";
/// A root file system of Linux has one of these.
const ROOTS: [&str; 2] = ["/usr/lib/os-release", "/etc/os-release"];

/// The configuration files of cloud-init, and units. `*` stands for any part of a name.
const FILES: [&str; 3] =
    ["/etc/cloud/cloud.cfg", "/etc/cloud/cloud.cfg.d/*.cfg", "/etc/systemd/system/*.service"];
const UNITS: &str = "/etc/systemd/system/";

/// The address at which Azure expects the report of a machine.
const REPORT_ADDRESS: &str = "168.63.129.16";

/// The properties of a version that Azure must know. Azure calls machines that boot with BIOS generation 1, and machines that boot with UEFI
/// generation 2. Fails for Windows.
pub fn inspect(store: &dyn Store, version: &ImageVersion) -> Result<CloudFacts, BackendError> {
    let reader = VersionReader::open(store, hash_of(version)?, ChunkCache::new(CHUNKS_BYTES));
    let reader = reader.map_err(image_failed)?;
    let (is_uefi_only, sector_bytes) =
        (reader.outline().is_uefi_only(), u64::from(reader.outline().sector_bytes()));
    let device: Arc<dyn Device> = reader;
    // These reads are not recorded in the boot trace.
    let device = Arc::clone(&device).unrecorded().unwrap_or(device);
    let disk: Arc<dyn ReadAt> = Arc::new(Arc::clone(&device));
    // A disk with a loader for UEFI, signed or not, boots as generation 2.
    let is_uefi = is_uefi_only || efi::is_loader_signed(&disk, sector_bytes).is_some();
    let present: Vec<&str> = [CLOUD_INIT, WINDOWS].into_iter().chain(AGENTS).chain(ROOTS).collect();
    let found = small_files(&device, &FILES, &present, &Cancel::new()).map_err(image_failed)?;
    if found.iter().any(|place| place.present.iter().any(|path| path == WINDOWS)) {
        let what = format!(
            "{}@{} is a Windows system, which cannot be published yet",
            version.image, version.number
        );
        return Err(BackendError::new(ProblemKind::Invalid, what));
    }
    Ok(CloudFacts { generation: if is_uefi { 2 } else { 1 }, agent: agent_in(&found) })
}

/// The program that reports to Azure.
fn agent_in(found: &[SmallFiles]) -> ProvisioningAgent {
    let has = |path: &str| found.iter().any(|place| place.present.iter().any(|it| it == path));
    if let Some(agent) = AGENTS.into_iter().find(|path| has(path)) {
        return ProvisioningAgent::Found(format!("the Azure Linux agent ({agent})"));
    }
    let files = || found.iter().flat_map(|place| &place.files);
    let reports = |file: &&SmallFile| {
        file.path.starts_with(UNITS) && String::from_utf8_lossy(&file.contents).contains(REPORT_ADDRESS)
    };
    if let Some(unit) = files().find(reports) {
        return ProvisioningAgent::Found(format!("the unit {}", unit.path));
    }
    if has(CLOUD_INIT) {
        let mut settings: Vec<&SmallFile> = files().filter(|file| !file.path.starts_with(UNITS)).collect();
        // As cloud-init reads them: the file itself, then those of the directory by name. The last one counts.
        settings.sort_by(|one, other| one.path.cmp(&other.path));
        let list = settings
            .iter()
            .rev()
            .find_map(|file| Some((file, data_sources(&String::from_utf8_lossy(&file.contents))?)));
        return match list {
            Some((file, list)) if !list.contains("Azure") => ProvisioningAgent::Missing(format!(
                "its cloud-init has no data source for Azure: {} lists {}",
                file.path,
                list.trim()
            )),
            _ => ProvisioningAgent::Found("cloud-init".to_owned()),
        };
    }
    if !ROOTS.into_iter().any(has) {
        let unread: Vec<String> =
            found.iter().filter_map(|it| Some(format!("{}: {}", it.place, it.unread.as_ref()?))).collect();
        let why = if unread.is_empty() { String::new() } else { format!(" ({})", unread.join("; ")) };
        return ProvisioningAgent::Unreadable(format!(
            "it has no root file system that can be read{why}, so it is not known whether it reports to Azure"
        ));
    }
    ProvisioningAgent::Missing(
        "it has no program that reports to Azure: neither cloud-init nor waagent, nor a unit in /etc/systemd/system"
            .to_owned(),
    )
}

/// The value of `datasource_list` in a file of cloud-init: in one line, or a line for each entry.
fn data_sources(text: &str) -> Option<String> {
    let mut lines = text.lines();
    let first = lines.find_map(|line| line.strip_prefix("datasource_list:"))?;
    let more = lines.take_while(|line| line.starts_with([' ', '-', '\t']) || line.trim().is_empty());
    let list: Vec<&str> = std::iter::once(first).chain(more).map(str::trim).collect();
    Some(list.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(present: &[&str], files: &[(&str, &str)]) -> SmallFiles {
        let file = |(path, text): &(&str, &str)| SmallFile {
            path: (*path).to_owned(),
            contents: text.as_bytes().to_vec(),
        };
        SmallFiles {
            place: "partition 1".to_owned(),
            files: files.iter().map(file).collect(),
            present: present.iter().chain(&[ROOTS[0]]).map(|it| (*it).to_owned()).collect(),
            unread: None,
        }
    }

    fn is_found(place: SmallFiles) -> bool {
        matches!(agent_in(&[place]), ProvisioningAgent::Found(_))
    }

    #[test]
    fn programs_that_report_to_azure_are_found() {
        assert!(is_found(root(&[AGENTS[0]], &[])));
        assert!(is_found(root(&[CLOUD_INIT], &[])));
        let unit = "ExecStart=/usr/bin/curl http://168.63.129.16/machine";
        assert!(is_found(root(&[], &[("/etc/systemd/system/report.service", unit)])));
        assert!(!is_found(root(&[], &[("/etc/systemd/system/other.service", "ExecStart=/bin/true")])));
        assert!(!is_found(root(&[], &[])));
    }

    #[test]
    fn the_last_list_of_data_sources_counts() {
        let (all, local) =
            ("datasource_list: [NoCloud, Azure]\n", "a: 1\ndatasource_list:\n  - NoCloud\n  - None\nb: 2\n");
        let (first, second) = ("/etc/cloud/cloud.cfg", "/etc/cloud/cloud.cfg.d/90_dpkg.cfg");
        assert!(is_found(root(&[CLOUD_INIT], &[(second, all), (first, local)])));
        assert!(!is_found(root(&[CLOUD_INIT], &[(second, local), (first, all)])));
        assert_eq!(data_sources(local).as_deref(), Some(" - NoCloud - None"));
        assert_eq!(data_sources("x: 1\n"), None);
    }

    #[test]
    fn a_disk_without_a_readable_root_is_unknown() {
        let unread = SmallFiles {
            place: "partition 2".to_owned(),
            files: Vec::new(),
            present: Vec::new(),
            unread: Some("it is XFS, which headwater cannot read".to_owned()),
        };
        let ProvisioningAgent::Unreadable(why) = agent_in(&[unread]) else { panic!("it is known") };
        assert!(why.contains("partition 2: it is XFS"), "{why}");
    }
}
