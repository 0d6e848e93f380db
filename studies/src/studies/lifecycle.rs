//! Study 000: boots, logons, work and logoffs of 500 users, with write caches on disk and in RAM with overflow
//! (2014).
//!
//! The machines are models of desktops. Each runs on a real write cache whose disk operations are counted. As many
//! machines run as fit in the host's RAM; the 500 users are drawn from them with replacement, each started at a
//! random time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use headwater_volume::{Buffering, CacheMode, disk_mode_ram_bytes};
use serde::Serialize;

use super::MIB;
use super::modelled;
use super::s000::{PLATFORMS, Platform};
use crate::desktop::run::{self, Machine, Pace, rates};
use crate::desktop::{Generator, Life, Profile, Sessions};
use crate::disks::{self, VolumeSpec};
use crate::machine::{Machine as Hardware, available_memory_bytes};
use crate::model::Model;
use crate::needs::Needs;
use crate::random::Random;
use crate::series::Series;
use crate::trace::{Kind, Request};

/// The number of users for which the publication computes disks.
pub const USERS: u32 = 500;

/// Time between the end of the boots and the first logon.
const IDLE_S: f64 = 60.0;

/// The number of random choices of 500 users.
pub const DRAWS: usize = 300;

/// The most machines of one kind.
const MOST_MACHINES: u64 = 40;

/// A kind of machine.
#[derive(Clone, Debug, Serialize)]
pub struct Machines {
    /// Title for people.
    pub title: &'static str,
    /// The number of machines.
    pub count: usize,
    /// Users of each machine.
    pub users: u32,
    /// RAM limit of the cache in RAM.
    pub ram_bytes: u64,
    /// The published steady state, in IOPS per user: with the cache on disk, with the cache in RAM.
    pub printed_steady: (Option<f64>, Option<f64>),
}

/// The times at which machines boot and users log on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Storm {
    /// All machines boot within this number of seconds.
    pub boots_s: f64,
    /// All users log on within this number of seconds.
    pub logons_s: f64,
}

/// The write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Cache {
    /// No cache: each request counts as one operation of the disk.
    Count,
    /// Headwater's cache on disk.
    Disk,
    /// Headwater's cache in RAM with overflow.
    Ram,
}

impl Cache {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Count, Self::Disk, Self::Ram];

    /// Title for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::Count => "one operation per request",
            Self::Disk => "our cache on disk",
            Self::Ram => "our RAM with overflow",
        }
    }
}

/// Disk operations per second of one machine, for each interval since its boot, and since its users' logons.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Load {
    /// Since the boot.
    pub boot: Vec<f64>,
    /// Since the first logon.
    pub session: Vec<f64>,
}

/// The results of machines of one kind with one cache.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Title of the kind.
    pub machines: &'static str,
    /// The cache.
    pub cache: Cache,
    /// The load of each machine.
    pub loads: Vec<Load>,
    /// IOPS per user during the loops.
    pub steady_iops: f64,
    /// IOPS per user of each machine.
    pub steady_iops_by_machine: Vec<f64>,
    /// The longest delay of a request, in model time.
    pub late_us: u64,
    /// The counts of each machine in each interval.
    #[serde(skip)]
    pub series: Vec<Series>,
}

/// The median of the random choices, and the interval that contains 95 % of them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Drawn {
    /// The median.
    pub median: f64,
    /// Its interval.
    pub interval: (f64, f64),
}

/// A platform of the publication, with the kind of machines and the storm that represent it.
#[derive(Clone, Copy, Debug)]
pub struct Stand {
    /// The platform.
    pub platform: Platform,
    /// The index of the kind.
    pub machines: usize,
    /// The storm.
    pub storm: Storm,
}

/// The parameters of the study.
pub struct Setup {
    /// The desktop model.
    pub profile: Profile,
    /// Kinds of machines.
    pub machines: Vec<Machines>,
    /// Loops of each user.
    pub loops: u32,
    /// The speed of model time, as a multiple of real time.
    pub speed: f64,
    /// The interval between two samples of the counters, in microseconds of model time.
    pub interval_us: u64,
    /// The seed of random numbers.
    pub seed: u64,
    /// The model to whose speed the disk is slowed down.
    pub storage: Option<Model>,
    /// Whether this is a quick run with small sizes.
    pub is_quick: bool,
}

/// All measurements.
#[derive(Default)]
pub struct Results {
    /// The results of each kind with each cache.
    pub measured: Vec<Measured>,
    /// Whether the study was interrupted.
    pub interrupted: bool,
    /// The error that ended the study early, if any.
    pub failure: Option<String>,
    /// The host.
    pub hardware: Hardware,
    /// IOPS of the raw disk, before and after.
    pub probes_iops: Vec<f64>,
}

impl Setup {
    /// The parameters with a desktop model. `desktops`: the number of desktops; `None`: as many as fit in RAM.
    pub fn new(profile: Profile, desktops: Option<u32>, seed: u64, is_quick: bool) -> Self {
        let quick = [
            ("boot_seconds", 20.0),
            ("boot_writes", 300.0),
            ("logon_seconds", 10.0),
            ("logon_writes", 100.0),
            ("loop_seconds", 60.0),
        ];
        let profile = if is_quick { profile.with(&quick) } else { profile };
        // Half of the available memory, with 256 MiB for each desktop, which is what its cache holds at the end.
        let fit = (available_memory_bytes() / 2 / (256 * MIB)).clamp(1, MOST_MACHINES);
        let count = desktops.map_or(if is_quick { 3 } else { fit as usize }, |count| count as usize);
        let unit = if is_quick { 32 } else { 512 } * MIB;
        let desktops = Machines {
            title: "Desktops",
            count,
            users: 1,
            ram_bytes: unit,
            printed_steady: (Some(9.2), Some(0.09)),
        };
        let hosts = Machines {
            title: "Session hosts",
            count: if is_quick { 1 } else { 2 },
            users: if is_quick { 5 } else { 25 },
            ram_bytes: unit * 4,
            printed_steady: (None, Some(1.0)),
        };
        Self {
            profile,
            machines: vec![desktops, hosts],
            loops: if is_quick { 1 } else { 3 },
            speed: if is_quick { 60.0 } else { 10.0 },
            interval_us: if is_quick { 2_000_000 } else { 15_000_000 },
            seed,
            storage: None,
            is_quick,
        }
    }

    /// The four platforms of the publication. All machines boot at nearly the same time, or one after the other.
    pub fn stands(&self) -> [Stand; 4] {
        let scale = self.profile.get("boot_seconds") / 250.0;
        let at_once = Storm { boots_s: 120.0 * scale, logons_s: 600.0 * scale };
        let staggered = Storm { boots_s: 1200.0 * scale, logons_s: 600.0 * scale };
        let storms = [(0, at_once), (0, staggered), (1, at_once), (1, staggered)];
        std::array::from_fn(|number| {
            let (machines, storm) = storms[number];
            Stand { platform: PLATFORMS[number], machines, storm }
        })
    }

    fn sessions(&self, machines: &Machines) -> Sessions {
        let logons_s =
            if machines.users == 1 { 0.0 } else { 300.0 * self.profile.get("boot_seconds") / 250.0 };
        Sessions { users: machines.users, logons_s, loops: self.loops, copies_files: false }
    }

    fn lives(&self, number: usize) -> Vec<Life> {
        let machines = &self.machines[number];
        let sessions = self.sessions(machines);
        let seed = |machine: usize| self.seed.wrapping_add(((number + 1) as u64) << 32 | machine as u64);
        (0..machines.count)
            .map(|machine| Generator::new(&self.profile, seed(machine)).life(&sessions))
            .collect()
    }

    fn session_s(&self, machines: &Machines) -> f64 {
        let one =
            self.profile.get("logon_seconds") + f64::from(self.loops) * self.profile.get("loop_seconds");
        self.sessions(machines).logons_s + one
    }

    /// The needs of the study: kinds and caches run one after the other.
    pub fn needs(&self) -> Needs {
        let written = |machines: &Machines| {
            let loops = self.profile.get("loop_seconds") * f64::from(self.loops);
            let user = self.profile.get("logon_writes") * self.profile.get("logon_write_bytes")
                + loops * self.profile.get("loop_write_iops") * self.profile.get("loop_write_bytes");
            let boot = self.profile.get("boot_writes") * self.profile.get("boot_write_bytes");
            (boot + f64::from(machines.users) * user) as u64
        };
        let ram = |machines: &Machines| {
            let one = machines.ram_bytes.min(written(machines) + 16 * MIB).max(disk_mode_ram_bytes(false));
            machines.count as u64 * one
        };
        let disk = |machines: &Machines| machines.count as u64 * (written(machines) + 64 * MIB);
        Needs {
            ram_bytes: self.machines.iter().map(ram).max().unwrap_or(0) + 128 * MIB,
            disk_bytes: self.machines.iter().map(disk).max().unwrap_or(0),
        }
    }

    /// The model time from the beginning of the boot to the logon, a multiple of the interval.
    fn shift_us(&self) -> u64 {
        let least = ((self.profile.get("boot_seconds") + IDLE_S / self.speed.max(1.0)) * 1e6) as u64;
        least.next_multiple_of(self.interval_us)
    }

    /// The duration of the study in seconds.
    pub fn seconds(&self) -> f64 {
        let one =
            |machines: &Machines| (self.shift_us() as f64 / 1e6 + self.session_s(machines)) / self.speed;
        self.machines.iter().map(one).sum::<f64>() * 2.0
    }

    /// Runs all kinds with all caches. The results contain the measurements up to a failure.
    pub fn run(&self, dir: &Path, stop: &AtomicBool, progress: &mut dyn FnMut(&str, f64)) -> Results {
        let mut results = Results { hardware: Hardware::describe(dir), ..Results::default() };
        if let Err(error) = self.all(&mut results, dir, stop, progress) {
            results.failure = Some(format!("{error:#}"));
        }
        results.hardware.note_load();
        results
    }

    fn all(
        &self,
        results: &mut Results,
        dir: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<()> {
        results.probes_iops.extend(modelled::probe(dir, self.is_quick, stop)?);
        for number in 0..self.machines.len() {
            let lives = self.lives(number);
            for cache in Cache::ALL {
                let measured = match cache {
                    Cache::Count => Some(self.count(number, &lives)),
                    _ => self.measure((number, cache), &lives, dir, stop, progress)?,
                };
                results.interrupted |= stop.load(Ordering::Relaxed);
                match measured.filter(|_| !results.interrupted) {
                    Some(measured) => results.measured.push(measured),
                    None => return Ok(()),
                }
            }
        }
        results.probes_iops.extend(modelled::probe(dir, self.is_quick, stop)?);
        Ok(())
    }

    fn intervals(&self, seconds: f64) -> usize {
        (seconds * 1e6 / self.interval_us as f64).ceil() as usize
    }

    /// Counts each request as one operation of the disk.
    fn count(&self, number: usize, lives: &[Life]) -> Measured {
        let machines = &self.machines[number];
        let per_interval = |requests: &[Request], seconds: f64| {
            let mut counts = vec![0.0; self.intervals(seconds)];
            for request in requests.iter().filter(|request| request.kind != Kind::Discard) {
                if let Some(count) = counts.get_mut((request.time_us / self.interval_us) as usize) {
                    *count += 1e6 / self.interval_us as f64;
                }
            }
            counts
        };
        let load = |life: &Life| Load {
            boot: per_interval(&life.boot, self.profile.get("boot_seconds")),
            session: per_interval(&life.session, self.session_s(machines)),
        };
        self.measured(number, Cache::Count, lives.iter().map(load).collect(), 0)
    }

    fn measure(
        &self,
        (number, cache): (usize, Cache),
        lives: &[Life],
        dir: &Path,
        stop: &AtomicBool,
        progress: &mut dyn FnMut(&str, f64),
    ) -> Result<Option<Measured>> {
        let (kind, shift_us) = (&self.machines[number], self.shift_us());
        let below = disks::engine(self.storage, self.speed)?;
        let what = format!("{}, {}", kind.title, cache.title());
        let machines = lives.iter().map(|life| {
            let later = |request: &Request| Request { time_us: request.time_us + shift_us, ..*request };
            let requests: Vec<Request> =
                life.boot.iter().copied().chain(life.session.iter().map(later)).collect();
            let written: u64 = requests
                .iter()
                .filter(|request| request.kind == Kind::Write)
                .map(|request| request.bytes)
                .sum();
            let spec = VolumeSpec {
                name: what.clone(),
                size_bytes: u64::from(kind.users) * crate::desktop::USER_BYTES,
                mode: if cache == Cache::Disk { CacheMode::Disk } else { CacheMode::RamDisk },
                ram_bytes: kind.ram_bytes,
                disk_bytes: written + written / 8 + 64 * MIB,
                buffering: Buffering::Direct,
            };
            Machine::open(&spec, requests, &below, dir)
        });
        let machines = machines.collect::<Result<Vec<_>>>()?;
        let end_us = shift_us + (self.session_s(kind) * 1e6) as u64;
        let pace = Pace { speed: self.speed, interval_us: self.interval_us, end_us };
        let ran = run::run(&machines, pace, stop, &mut |share| progress(&what, share))
            .with_context(|| format!("{what} failed"))?;
        if ran.interrupted {
            return Ok(None);
        }
        let first = (shift_us / self.interval_us) as usize;
        let load = |samples: &Vec<run::CounterSample>| {
            let mut boot = rates(samples, self.interval_us, |sample| {
                sample.counts.disk_reads + sample.counts.disk_writes
            });
            let session = boot.split_off(first.min(boot.len()));
            Load { boot, session }
        };
        let series = |(machine, samples): (usize, &Vec<run::CounterSample>)| {
            run::series(&what, machine, samples, self.interval_us)
        };
        let series = ran.samples.iter().enumerate().map(series).collect();
        let measured = self.measured(number, cache, ran.samples.iter().map(load).collect(), ran.late_us);
        Ok(Some(Measured { series, ..measured }))
    }

    fn measured(&self, number: usize, cache: Cache, loads: Vec<Load>, late_us: u64) -> Measured {
        let machines = &self.machines[number];
        // From the last logon on.
        let first = self.intervals(self.sessions(machines).logons_s + self.profile.get("logon_seconds"));
        let steady = |load: &Load| {
            let loops = load.session.get(first..).unwrap_or_default();
            loops.iter().sum::<f64>() / loops.len().max(1) as f64 / f64::from(machines.users)
        };
        let steady_iops_by_machine: Vec<f64> = loads.iter().map(steady).collect();
        let steady_iops = steady_iops_by_machine.iter().sum::<f64>() / loads.len().max(1) as f64;
        Measured {
            machines: machines.title,
            cache,
            loads,
            steady_iops,
            steady_iops_by_machine,
            late_us,
            series: Vec::new(),
        }
    }

    /// All operations of 500 users over the whole run, for one random choice.
    pub fn draw(&self, stand: &Stand, measured: &Measured, random: &mut Random) -> Vec<f64> {
        let machines = &self.machines[stand.machines];
        let interval_s = self.interval_us as f64 / 1e6;
        let at = |seconds: f64| (seconds / interval_s) as usize;
        let logons_begin = stand.storm.boots_s + self.profile.get("boot_seconds") + IDLE_S;
        // The logons of the users of one session host are staggered already.
        let logons_s = (stand.storm.logons_s - self.sessions(machines).logons_s).max(0.0);
        let mut all = vec![0.0; at(logons_begin + logons_s + self.session_s(machines)) + 2];
        for _ in 0..USERS.div_ceil(machines.users) {
            let load = &measured.loads[random.below(measured.loads.len() as u64) as usize];
            let boot = at(random.share() * stand.storm.boots_s);
            let logon = at(logons_begin + random.share() * logons_s);
            for (begin, part) in [(boot, &load.boot), (logon, &load.session)] {
                all.iter_mut().skip(begin).zip(part).for_each(|(sum, iops)| *sum += iops);
            }
        }
        all
    }

    /// The 95th percentile over the run, for all random choices.
    pub fn p95(&self, stand: &Stand, measured: &Measured) -> Drawn {
        let mut random = Random::new(self.seed ^ 0x0070_3935);
        let mut all: Vec<f64> =
            (0..DRAWS).map(|_| nearest_rank(&mut self.draw(stand, measured, &mut random), 0.95)).collect();
        let mut at = |share| nearest_rank(&mut all, share);
        Drawn { median: at(0.5), interval: (at(0.025), at(0.975)) }
    }
}

impl Results {
    /// The results of a kind of machines with a cache.
    pub fn of(&self, machines: &str, cache: Cache) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.machines == machines && measured.cache == cache)
    }
}

/// The nearest-rank quantile of the values.
fn nearest_rank(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = ((values.len() as f64 * share).ceil() as usize).max(1);
    values.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(number: usize) -> (Setup, Measured) {
        let mut setup = Setup::new(Profile::standard().unwrap(), Some(12), 1, false);
        setup.machines[1].count = 2;
        let measured = setup.count(number, &setup.lives(number));
        (setup, measured)
    }

    #[test]
    fn a_failed_study_reports_its_failure() {
        let setup = Setup::new(Profile::standard().unwrap(), Some(1), 1, true);
        let results = setup.run(Path::new("/nonexistent"), &AtomicBool::new(false), &mut |_, _| ());
        let report = crate::studies::lifecycle_report::Report::new(&setup, &results);
        for shown in [report.text(), report.html()] {
            assert!(shown.contains("The study failed: cannot measure the raw disk"), "{shown}");
        }
    }

    #[test]
    fn the_count_of_desktops_gives_the_printed_steady_state_and_percentiles() {
        let (setup, measured) = counted(0);
        assert!((measured.steady_iops / 9.2 - 1.0).abs() < 0.03, "{}", measured.steady_iops);
        let stands = setup.stands();
        for stand in stands.iter().filter(|stand| stand.machines == 0) {
            let (found, printed) = (setup.p95(stand, &measured), stand.platform.disk_p95_iops);
            assert!((found.median / printed - 1.0).abs() < 0.1, "{found:?}, printed {printed}");
            assert!(found.interval.0 <= found.median && found.median <= found.interval.1);
        }
    }

    #[test]
    fn every_request_of_a_machine_is_in_its_load() {
        let (setup, measured) = counted(1);
        let lives = setup.lives(1);
        let interval_s = setup.interval_us as f64 / 1e6;
        let counted: f64 = measured.loads[0].session.iter().sum::<f64>() * interval_s;
        let sent = lives[0].session.iter().filter(|request| request.kind != Kind::Discard).count();
        assert_eq!(counted.round() as usize, sent);
        assert!((measured.steady_iops / 9.2 - 1.0).abs() < 0.25, "{}", measured.steady_iops);
    }
}
