//! Warnings about a cloud scheme that could work: for example no temp disk is left, or a backup size is
//! slower. They do not refuse the scheme.

use super::{Landing, PageFile, Scheme, Scratch};
use crate::place::Placement;
use crate::question::Question;
use crate::size::{Generation, MachineSize, OsDiskPlace};

/// A size gets a warning if it is retired within this many days.
const RETIREMENT_NOTICE_DAYS: i64 = 180;

/// All warnings: of each size in turn, then of the scheme as a whole.
pub fn of(scheme: &Scheme, question: &Question, sizes: &[&MachineSize], landings: &[Landing]) -> Vec<String> {
    let mut warnings = Vec::new();
    let first = landings.first().and_then(|landing| landing.placement.as_ref());
    for (size, landing) in sizes.iter().zip(landings) {
        if let Some(placement) = &landing.placement {
            warnings.extend(of_size(scheme, question, size, placement));
            if let Some(first) = first.filter(|_| landing.is_backup) {
                warnings.extend(of_backup(size, placement, first));
            }
        }
    }
    if let [first, backups @ ..] = sizes
        && !backups.is_empty()
        && backups.iter().all(|size| size.series == first.series)
    {
        warnings.push(format!(
            "all sizes belong to the series {}, and quota is counted for each series: add a backup size of another series",
            first.series
        ));
    }
    if scheme.full_copy {
        warnings.push(
            "copying the whole image to the host takes hours after each start of a machine: until then the machine still \
             depends on remote storage"
                .to_owned(),
        );
    }
    warnings.push(not_checked(scheme));
    warnings
}

fn of_size(scheme: &Scheme, question: &Question, size: &MachineSize, placement: &Placement) -> Vec<String> {
    let name = &size.name;
    let mut warnings = Vec::new();
    if let Some(on) = size.retired.filter(|on| question.today.days_until(*on) <= RETIREMENT_NOTICE_DAYS) {
        warnings.push(format!("{name} is retired on {on}: choose another size before that day"));
    }
    if question.generation().is_none() && size.generations.len() == 1 {
        let only = size.generations.first().map(Generation::to_string).unwrap_or_default();
        warnings.push(format!(
            "{name} boots only images of generation {only}, and the image's generation was not checked: give it with --generation"
        ));
    }
    if size.vcpus_available < size.vcpus {
        warnings.push(format!("{name} gives a guest {} of its {} vCPUs", size.vcpus_available, size.vcpus));
    }
    if scheme.ephemeral && placement.place == OsDiskPlace::Managed {
        warnings.push(format!(
            "--ephemeral has no effect on {name}: its OS disk is a managed disk, because no earlier place in --places fits; \
             choose a size with more local disk, or leave --ephemeral out"
        ));
    }
    if placement.left.is_nothing() {
        if scheme.page_file == PageFile::Temp {
            warnings.push(format!(
                "{name} has no temp disk left beside the OS disk, so the page file would be on the OS disk: choose another size, \
                 or the page file on the OS disk"
            ));
        }
        if scheme.scratch == Scratch::Temp {
            warnings.push(format!(
                "{name} has no temp disk left beside the OS disk, so scratch space would be on the OS disk: choose another size"
            ));
        }
    } else if (scheme.page_file == PageFile::Temp || scheme.scratch == Scratch::Temp)
        && placement.left.temp_bytes.unwrap_or(0) == 0
    {
        warnings.push(format!("the NVMe disks of {name} are raw at each start: the guest must format them"));
    }
    if placement.place == OsDiskPlace::Nvme {
        warnings.push(format!("{name} has its OS disk on NVMe: the image must have a driver for NVMe"));
    }
    if !size.note.is_empty() {
        warnings.push(format!("the table says of {name}: {}", size.note));
    }
    warnings
}

/// Warns if the OS disk is slower on a backup size than on the first size.
fn of_backup(size: &MachineSize, placement: &Placement, first: &Placement) -> Option<String> {
    let (has, wanted) = (placement.read.iops?, first.read.iops?);
    (has < wanted)
        .then(|| format!("the backup size {} has {has} IOPS for the OS disk instead of {wanted}", size.name))
}

fn not_checked(scheme: &Scheme) -> String {
    let zones = if scheme.zones.is_empty() { "" } else { "zones, " };
    format!(
        "not checked, because that needs a connection to the cloud: {zones}region, capacity, quota, rights, price"
    )
}
