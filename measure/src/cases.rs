//! What is measured: each case is one piece of work and the systems that do it in turn.

use crate::fio::{Job, Requests};
use crate::systems::{Cache, System};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What a system holds when it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The whole set has been written once. Systems run from the first round to the last.
    Filled,
    /// Nothing has been written: a machine that just booted. Each round starts the systems again.
    Fresh,
}

/// One piece of work.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name for `--only` and for results.
    pub name: &'static str,
    /// What it shows, for people.
    pub title: &'static str,
    /// Bytes that are read and written.
    pub set_bytes: u64,
    /// Requests in flight.
    pub depth: u32,
    /// Where requests begin, and how long they are.
    pub requests: Requests,
    /// 80: the VDI mix; 100: its random variant.
    pub percentage_random: u8,
    /// What the systems hold beforehand.
    pub state: State,
    /// Ours first, then the peers.
    pub systems: Vec<System>,
}

impl Case {
    /// Bytes that a system reads and writes: one that is there to show what a set costs that fits has such a set.
    pub fn set_bytes_of(&self, system: System, quick: bool) -> u64 {
        match system {
            System::HeadwaterFits(_) => fitting_set_bytes(quick),
            _ => self.set_bytes,
        }
    }

    /// The case as a job of fio, for a system: one that is there to show what aligned requests cost has such.
    pub fn job_of(&self, system: System, seconds: u32) -> Job {
        let requests = match system {
            System::HeadwaterAligned(_) => Requests::Blocks,
            _ => self.requests,
        };
        Job::Mix { requests, percentage_random: self.percentage_random, depth: self.depth, seconds }
    }
}

/// The overflow disk of a case with room, by the set. Cleaning starts where it is full. By arithmetic, from 80 to 120 k IOPS of which four of
/// five write, rounds of ten seconds write 3 to 4 GB: twice the set would be full in the third or fourth of five, three times leave all of them room. Four
/// times would ask 50 GiB of everybody.
const ROOM: u64 = 3;

/// Bytes of the disk that systems offer, of which a case may use a part.
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
    let with = |ram_bytes| Cache { mode: "ram+disk", ram_bytes: Some(ram_bytes), disk_bytes: ROOM * device };
    let on_disk = Cache { mode: "disk", ram_bytes: None, disk_bytes: ROOM * device };
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

/// Names of cases whose requests begin at any sector end like this.
pub const UNALIGNED: &str = "-512";

/// Cases whose requests begin at any sector. A set of 1 GiB, which all of them write several times over; with room for what rounds of
/// ten seconds write, as above.
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

/// A set that fits, with room to spare, in the RAM of [`fitting`].
fn fitting_set_bytes(quick: bool) -> u64 {
    if quick { 256 * MIB } else { GIB }
}

/// Twice what [`fitting_set_bytes`] takes.
fn fitting(quick: bool) -> Cache {
    let ram_bytes = Some(2 * fitting_set_bytes(quick));
    Cache { mode: "ram+disk", ram_bytes, disk_bytes: ROOM * fitting_set_bytes(quick) }
}

/// Cases over vhost-user begin like this.
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
            // Beside it, in the same rounds.
            let fits = case.systems.iter().find(|system| system.name() == HEADWATER_FITS);
            assert_eq!(fits.is_some(), case.name == "overflow-4g", "{}", case.name);
            if let Some(fits) = fits {
                let (set_bytes, cache) = (case.set_bytes_of(*fits, false), fits.cache().expect("it is ours"));
                assert!(cache.ram_bytes.is_some_and(|ram| ram > set_bytes) && set_bytes < case.set_bytes);
            }
        }
    }
}
