//! Defines the cases: each is one load and the systems that run it in turn.
//!
//! Words: the *working set* (short: set) is the part of the disk that a case reads and writes. The *VDI mix* is 4 KiB
//! requests, 80 % writes, 80 % at random offsets and the others in sequence; in its random variant, all offsets are
//! random.

use crate::fio::{Job, Requests};
use crate::systems::{Cache, System};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The contents of a system's disk when it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The whole working set has been written once. The systems run from the first to the last round.
    Filled,
    /// Nothing has been written, as after a machine's boot. The systems are started again for each round.
    Fresh,
}

/// One load, and the systems that run it.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name for `--only` and for results.
    pub name: &'static str,
    /// The title of the case.
    pub title: &'static str,
    /// Size of the working set, in bytes.
    pub set_bytes: u64,
    /// Requests in flight.
    pub depth: u32,
    /// Alignment and length of requests.
    pub requests: Requests,
    /// Percentage of random offsets: 80 for the VDI mix, 100 for its random variant.
    pub percentage_random: u8,
    /// The state of the disks at the start.
    pub state: State,
    /// The systems: Headwater first, then its peers.
    pub systems: Vec<System>,
}

impl Case {
    /// The size of a system's working set. [`System::HeadwaterFits`] uses a set that fits in RAM; all others use the
    /// case's set.
    pub fn set_bytes_of(&self, system: System, quick: bool) -> u64 {
        match system {
            System::HeadwaterFits(_) => fitting_set_bytes(quick),
            _ => self.set_bytes,
        }
    }

    /// The fio job of the case for a system. [`System::HeadwaterAligned`] gets block-aligned requests; all others get
    /// the case's requests.
    pub fn job_of(&self, system: System, seconds: u32) -> Job {
        let requests = match system {
            System::HeadwaterAligned(_) => Requests::Blocks,
            _ => self.requests,
        };
        Job::Mix { requests, percentage_random: self.percentage_random, depth: self.depth, seconds }
    }
}

/// Size of the overflow disk as a multiple of the working set, for cases in which the disk must not become full.
/// Segment cleaning starts when it is full. At 80,000 to 120,000 IOPS with 80 % writes, a round of 10 s writes 3 to 4
/// GB: twice the set would be full in round 3 or 4 of 5, three times never is. Four times would need 50 GiB of disk
/// space on every host.
const DISK_FACTOR: u64 = 3;

/// Size of the disk that systems offer. A case may use only a part of it.
pub fn device_bytes(quick: bool) -> u64 {
    if quick { GIB } else { 10 * GIB }
}

/// All cases that fio measures.
pub fn all(quick: bool) -> Vec<Case> {
    let mut all = vec![
        fits("fits-qd1", "VDI mix, set fits in RAM, depth 1", 1, quick),
        fits("fits-qd16", "VDI mix, set fits in RAM, depth 16", 16, quick),
        fits("fits-qd64", "VDI mix, set fits in RAM, depth 64", 64, quick),
    ];
    let device = device_bytes(quick);
    let (small, large) = if quick { (16 * MIB, 410 * MIB) } else { (64 * MIB, 4 * GIB) };
    let with =
        |ram_bytes| Cache { mode: "ram+disk", ram_bytes: Some(ram_bytes), disk_bytes: DISK_FACTOR * device };
    let on_disk = Cache { mode: "disk", ram_bytes: None, disk_bytes: DISK_FACTOR * device };
    let tight = Cache { disk_bytes: device / 4 * 5, ..with(small) };
    let mut against_disk = |name: &'static str, title, cache, percentage_random, state| {
        let ours = if name.starts_with(VHOST) { System::HeadwaterVhost } else { System::Headwater };
        let systems = vec![ours(cache), System::RawDisk];
        let (set_bytes, depth, requests) = (device, 16, Requests::Blocks);
        let systems = match name {
            "overflow-4g" => [systems, vec![System::HeadwaterFits(fitting(quick))]].concat(),
            _ => systems,
        };
        all.push(Case { name, title, set_bytes, depth, requests, percentage_random, state, systems });
    };
    let title = "VDI mix, 64 MB RAM, 10 GB set, depth 16";
    against_disk("overflow-64m", title, with(small), 80, State::Filled);
    let title = "VDI mix, 64 MB RAM, 10 GB set, depth 16, cache empty at the start";
    against_disk("overflow-64m-fresh", title, with(small), 80, State::Fresh);
    let title = "random mix, 64 MB RAM, 10 GB set, depth 16";
    against_disk("overflow-64m-random", title, with(small), 100, State::Filled);
    let title = "random mix, 64 MB RAM, 10 GB set, depth 16, overflow disk 80 % full";
    against_disk("overflow-64m-tight", title, tight, 100, State::Filled);
    let title = "VDI mix, 4 GB RAM, 10 GB set, depth 16";
    against_disk("overflow-4g", title, with(large), 80, State::Filled);
    let title = "random mix, 4 GB RAM, 10 GB set, depth 16";
    against_disk("overflow-4g-random", title, with(large), 100, State::Filled);
    let title = "VDI mix, disk mode, 10 GB set, depth 16";
    against_disk("disk", title, on_disk, 80, State::Filled);
    let title = "random mix, disk mode, 10 GB set, depth 16";
    against_disk("disk-random", title, on_disk, 100, State::Filled);
    let title = "over vhost-user: VDI mix, 64 MB RAM, 10 GB set, depth 16";
    against_disk("vhost-overflow-64m", title, with(small), 80, State::Filled);
    let title = "over vhost-user: VDI mix, disk mode, 10 GB set, depth 16";
    against_disk("vhost-disk", title, on_disk, 80, State::Filled);
    all.push(vhost_fits("vhost-fits-qd1", "over vhost-user: VDI mix, set fits in RAM, depth 1", 1, quick));
    all.push(vhost_fits("vhost-fits-qd16", "over vhost-user: VDI mix, set fits in RAM, depth 16", 16, quick));
    all.push(vhost_fits("vhost-fits-qd64", "over vhost-user: VDI mix, set fits in RAM, depth 64", 64, quick));
    all.extend(unaligned(quick));
    all
}

/// Suffix of the names of cases whose requests may begin at any sector.
pub const UNALIGNED: &str = "-512";

/// Cases whose requests may begin at any sector. The set is only 1 GiB, so every round writes it several times; the
/// overflow disk has space for the writes of rounds of ten seconds, as above.
fn unaligned(quick: bool) -> Vec<Case> {
    let set_bytes = fitting_set_bytes(quick);
    let ram_bytes = if quick { 16 * MIB } else { 64 * MIB };
    let disk_bytes = 16 * set_bytes;
    let small = Cache { mode: "ram+disk", ram_bytes: Some(ram_bytes), disk_bytes };
    let on_disk = Cache { mode: "disk", ram_bytes: None, disk_bytes };
    let case = |name, title, ours, requests, percentage_random| Case {
        name,
        title,
        set_bytes,
        depth: 16,
        requests,
        percentage_random,
        state: State::Filled,
        systems: vec![ours, System::RawDisk],
    };
    let (sectors, sizes) = (Requests::Sectors, Requests::Sizes);
    let ours = System::Headwater;
    let mut all = vec![
        case(
            "overflow-512",
            "VDI mix at any sector, 64 MB RAM, 1 GiB set, depth 16",
            ours(small),
            sectors,
            80,
        ),
        case(
            "overflow-random-512",
            "random mix at any sector, 64 MB RAM, 1 GiB set, depth 16",
            ours(small),
            sectors,
            100,
        ),
        case(
            "overflow-sizes-512",
            "random mix, 512 B to 64 KiB at any sector, 64 MB RAM, 1 GiB set, depth 16",
            ours(small),
            sizes,
            100,
        ),
        case("disk-512", "VDI mix at any sector, disk mode, 1 GiB set, depth 16", ours(on_disk), sectors, 80),
        case(
            "disk-random-512",
            "random mix at any sector, disk mode, 1 GiB set, depth 16",
            ours(on_disk),
            sectors,
            100,
        ),
        case(
            "persistent-512",
            "persistent: VDI mix at any sector, 64 MB RAM, 1 GiB set, depth 16",
            System::HeadwaterKept(small),
            sectors,
            80,
        ),
        case(
            "vhost-overflow-512",
            "over vhost-user: VDI mix at any sector, 64 MB RAM, 1 GiB set, depth 16",
            System::HeadwaterVhost(small),
            sectors,
            80,
        ),
    ];
    let (ours, aligned) = (System::Headwater(fitting(quick)), System::HeadwaterAligned(fitting(quick)));
    let systems = vec![ours, aligned];
    let mut fits = fits("fits-512", "VDI mix at any sector, set fits in RAM, depth 16", 16, quick);
    (fits.requests, fits.systems) = (sectors, systems);
    all.push(fits);
    all
}

/// The size of a set that fits in the RAM of [`fitting`], with some space left.
fn fitting_set_bytes(quick: bool) -> u64 {
    if quick { 256 * MIB } else { GIB }
}

/// A write cache with twice the RAM of [`fitting_set_bytes`].
fn fitting(quick: bool) -> Cache {
    let ram_bytes = Some(2 * fitting_set_bytes(quick));
    Cache { mode: "ram+disk", ram_bytes, disk_bytes: DISK_FACTOR * fitting_set_bytes(quick) }
}

/// Prefix of the names of cases over vhost-user.
pub const VHOST: &str = "vhost-";

fn vhost_fits(name: &'static str, title: &'static str, depth: u32, quick: bool) -> Case {
    let mut case = fits(name, title, depth, quick);
    let ours = case.systems.iter().filter_map(|system| system.cache()).map(System::HeadwaterVhost);
    case.systems = ours.chain([System::QsdNull, System::QsdQcow2, System::QsdMemory]).collect();
    case
}

fn fits(name: &'static str, title: &'static str, depth: u32, quick: bool) -> Case {
    Case {
        name,
        title,
        set_bytes: fitting_set_bytes(quick),
        depth,
        requests: Requests::Blocks,
        percentage_random: 80,
        state: State::Filled,
        systems: vec![
            System::Headwater(fitting(quick)),
            System::NbdkitNull,
            System::NbdkitMemory,
            System::NbdkitCow,
            System::QemuNbdWriteback,
            System::QemuNbdDirect,
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::systems::HEADWATER_FITS;

    #[test]
    fn names_are_unique_and_every_case_has_ours_first() {
        for quick in [false, true] {
            let all = all(quick);
            for (index, case) in all.iter().enumerate() {
                assert!(case.systems[0].cache().is_some(), "{}", case.name);
                assert!(all[..index].iter().all(|other| other.name != case.name), "{}", case.name);
                assert!(case.set_bytes <= device_bytes(quick), "{}", case.name);
            }
        }
    }

    #[test]
    fn a_set_fits_or_overflows_as_the_name_says() {
        for case in all(false) {
            let cache = case.systems[0].cache().expect("ours is first");
            let ram = cache.ram_bytes.unwrap_or(0);
            assert_eq!(ram > case.set_bytes, case.name.contains("fits"), "{}", case.name);
            // The same case also measures a set that fits, in the same rounds.
            let fits = case.systems.iter().find(|system| system.name() == HEADWATER_FITS);
            assert_eq!(fits.is_some(), case.name == "overflow-4g", "{}", case.name);
            if let Some(fits) = fits {
                let (set_bytes, cache) = (case.set_bytes_of(*fits, false), fits.cache().expect("it is ours"));
                assert!(cache.ram_bytes.is_some_and(|ram| ram > set_bytes) && set_bytes < case.set_bytes);
            }
        }
    }
}
