//! Reacts to memory pressure: if the host runs short of memory, the limit of all caches is lowered in steps,
//! and raised again later.
//!
//! ```text
//!  tight: limit = 7/8 of the used bytes,    critical: 3/4     ample for 5 s: limit + 1/8 each second,
//!  or of the limit if that is lower         (every second)    until it is as configured
//!  (not again before that is reached)
//! ```
//!
//! If the kernel has PSI (`/proc/pressure/memory`), pressure is the share of time in which tasks stalled for
//! lack of memory since the last check. Otherwise it is how little the cgroup's limit (v2 or v1) and
//! `MemAvailable` leave. On every host, hardly any memory left counts as critical, because a cgroup's limit
//! may be reached without stalls before.
//!
//! The kernel also counts as stalls the time in which it searches for contiguous 2 MiB for the huge pages of
//! segments. On a host whose memory is full of page cache, a growing cache spends more than a tenth of its
//! time so; it would be shrunk again and again although nearly all memory is available. So stalls count only
//! if less than a quarter of the memory is left.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::budget::Budget;

/// The interval of checks while caches have RAM in use.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// Number of checks without pressure before the limit is raised.
const CALM_CHECKS: u32 = 5;

/// The smallest change of the limit in one step, in bytes.
const STEP_BYTES: u64 = 2 << 20;

/// How short memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// There is enough.
    Ample,
    /// Memory is short; using less would help.
    Tight,
    /// Hardly any memory is left, or all tasks often stall for lack of memory: the kernel may soon kill a
    /// process.
    Critical,
}

/// A source of the level of memory pressure.
pub trait PressureSource: Send + 'static {
    /// The level at this moment.
    fn level(&mut self, now: Instant) -> Level;

    /// Name of the source, for logs.
    fn name(&self) -> &'static str;
}

/// A source for hosts that ignore pressure: it always reports [`Level::Ample`].
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPressure;

impl PressureSource for NoPressure {
    fn level(&mut self, _now: Instant) -> Level {
        Level::Ample
    }

    fn name(&self) -> &'static str {
        "none"
    }
}

/// The state of the monitor, on the host's thread.
pub(crate) struct Monitor {
    source: Box<dyn PressureSource>,
    next: Option<Instant>,
    calm: u32,
    bound: Option<u64>,
    shrinks: u64,
}

/// The figures of all caches together, for one check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// The lowest possible limit: the memory that the caches need in any case.
    pub(crate) least_bytes: u64,
    /// Sum of the caches' maxima: a higher limit would have no effect.
    pub(crate) most_bytes: u64,
}

impl Monitor {
    pub(crate) fn new(source: Box<dyn PressureSource>) -> Self {
        Self { source, next: None, calm: 0, bound: None, shrinks: 0 }
    }

    /// How often the limit was lowered.
    pub(crate) fn shrinks(&self) -> u64 {
        self.shrinks
    }

    /// Whether a check is due.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| next <= now)
    }

    /// Checks the pressure if that is due, and changes the limit. Returns when the next check is due; never,
    /// while no RAM is in use.
    pub(crate) fn check(
        &mut self,
        budget: &Budget,
        now: Instant,
        extent: impl Fn() -> Extent,
    ) -> Option<Instant> {
        if budget.used_bytes() == 0 {
            if self.bound.take().is_some() {
                budget.set_pressure_bytes(None);
            }
            return None;
        }
        if !self.is_due(now) {
            return self.next;
        }
        self.next = now.checked_add(INTERVAL);
        match self.source.level(now) {
            Level::Ample => self.calm = self.calm.saturating_add(1),
            level => {
                self.calm = 0;
                self.shrink(budget, level, extent().least_bytes);
            }
        }
        if self.calm >= CALM_CHECKS && self.bound.is_some() {
            self.restore(budget, extent().most_bytes);
        }
        self.next
    }

    fn shrink(&mut self, budget: &Budget, level: Level, least_bytes: u64) {
        let (limit, used) = (budget.limit_bytes(), budget.used_bytes());
        let under_way = self.bound.is_some() && used > limit;
        if under_way && level < Level::Critical {
            return;
        }
        let from = limit.min(used);
        let part = if level == Level::Critical { from / 4 } else { from / 8 };
        let to = (from - part).max(least_bytes);
        if to.saturating_add(STEP_BYTES) > limit {
            return;
        }
        self.bound = Some(to);
        self.shrinks += 1;
        budget.set_pressure_bytes(self.bound);
        tracing::warn!(
            source = self.source.name(),
            ?level,
            limit_bytes = to,
            used_bytes = used,
            "memory is short on this host: the RAM limit of all write caches is lowered"
        );
    }

    fn restore(&mut self, budget: &Budget, most_bytes: u64) {
        let Some(bound) = self.bound else { return };
        let wider = bound.saturating_add((bound / 8).max(STEP_BYTES));
        self.bound = (wider < budget.configured_bytes().min(most_bytes)).then_some(wider);
        budget.set_pressure_bytes(self.bound);
        if self.bound.is_none() {
            tracing::info!(
                "memory is no longer short: the RAM limit of all write caches is the configured one again"
            );
        }
    }
}

/// The sources of this host: PSI, the limits of cgroups, and `MemAvailable`.
pub struct SystemPressure {
    root: PathBuf,
    last: Option<(Stalls, Instant)>,
    has_psi: bool,
}

/// Microseconds in which tasks stalled, since the host was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stalls {
    some_us: u64,
    full_us: u64,
}

/// The memory that a limit leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Left {
    free: u64,
    limit: u64,
}

/// At least one task stalled for a tenth of the time.
const TIGHT_SOME_PERCENT: u64 = 10;

/// All tasks stalled for a tenth of the time.
const CRITICAL_FULL_PERCENT: u64 = 10;

/// Stalls count if less than this part of a limit is left.
const PLENTY_DIVISOR: u64 = 4;

/// Tight if less than this part of a limit is left.
const TIGHT_DIVISOR: u64 = 16;

/// Critical if less than this part is left.
const CRITICAL_DIVISOR: u64 = 50;

impl SystemPressure {
    /// The sources of this host.
    pub fn new() -> Self {
        Self::under(Path::new("/"))
    }

    /// The sources in the files below another root directory.
    pub fn under(root: &Path) -> Self {
        let has_psi = read_stalls(root).is_some();
        Self { root: root.to_path_buf(), last: None, has_psi }
    }

    /// The most memory that this process can use: that of the host, or the least limit of its cgroup and the
    /// groups above. `None` if unknown.
    pub fn memory_bytes(&self) -> Option<u64> {
        let limits = cgroups(&self.root).into_iter().filter_map(|(dir, [limit, ..])| limit_in(&dir, limit));
        limits.chain(memory_field(&self.root, "MemTotal:")).min()
    }

    fn stalled(&mut self, now: Instant) -> Level {
        let Some(stalls) = read_stalls(&self.root) else { return Level::Ample };
        let before = self.last.replace((stalls, now));
        let Some((before, then)) = before else { return Level::Ample };
        let elapsed_us = u64::try_from(now.saturating_duration_since(then).as_micros()).unwrap_or(u64::MAX);
        let reached = |now_us: u64, before_us: u64, percent: u64| {
            let stalled = now_us.saturating_sub(before_us).saturating_mul(100);
            stalled > 0 && stalled >= elapsed_us.saturating_mul(percent)
        };
        if reached(stalls.full_us, before.full_us, CRITICAL_FULL_PERCENT) {
            Level::Critical
        } else if reached(stalls.some_us, before.some_us, TIGHT_SOME_PERCENT) {
            Level::Tight
        } else {
            Level::Ample
        }
    }

    /// The memory that the tightest limit leaves.
    fn left(&self) -> Option<Left> {
        let all = cgroup_left(&self.root).into_iter().chain(machine_left(&self.root));
        all.min_by_key(Left::per_mille)
    }
}

impl Default for SystemPressure {
    fn default() -> Self {
        Self::new()
    }
}

impl PressureSource for SystemPressure {
    fn level(&mut self, now: Instant) -> Level {
        let left = self.left();
        let level = left.map_or(Level::Ample, |left| left.level());
        if !self.has_psi || level == Level::Critical {
            return level;
        }
        // Read each time, because the time since the last check counts.
        let stalled = self.stalled(now);
        if left.is_some_and(|left| left.is_plenty()) { Level::Ample } else { stalled }
    }

    fn name(&self) -> &'static str {
        if self.has_psi { "PSI" } else { "cgroup limit and MemAvailable" }
    }
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn read_number(path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

/// The value of `key` in a file of lines "key value".
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

fn read_stalls(root: &Path) -> Option<Stalls> {
    let text = read(&root.join("proc/pressure/memory"))?;
    let total = |kind: &str| {
        let line = text.lines().find(|line| line.starts_with(kind))?;
        line.split("total=").nth(1)?.trim().parse().ok()
    };
    Some(Stalls { some_us: total("some ")?, full_us: total("full ").unwrap_or(0) })
}

fn machine_left(root: &Path) -> Option<Left> {
    Some(Left { free: memory_field(root, "MemAvailable:")?, limit: memory_field(root, "MemTotal:")? })
}

/// In bytes.
fn memory_field(root: &Path, key: &str) -> Option<u64> {
    let text = read(&root.join("proc/meminfo"))?;
    field(&text, key).map(|kib| kib.saturating_mul(1024))
}

/// The files of a cgroup that are read: its limit, its usage, and the page cache within that.
type Files = [&'static str; 3];

/// This process's memory cgroup and those above it, up to the mount: a container sees its own group there.
fn cgroups(root: &Path) -> Vec<(PathBuf, Files)> {
    let text = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let groups = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        if controllers.is_empty() {
            let files = ["memory.max", "memory.current", "inactive_file "];
            return Some((root.join("sys/fs/cgroup"), group, files));
        }
        let files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
        let is_memory = controllers.split(',').any(|name| name == "memory");
        is_memory.then(|| (root.join("sys/fs/cgroup/memory"), group, files))
    });
    let above = |(mount, group, files): (PathBuf, &str, Files)| -> Vec<_> {
        Path::new(group).ancestors().map(|part| (mount.join(part), files)).collect()
    };
    groups.flat_map(above).collect()
}

/// The memory that the limits of this process's cgroup and of those above it leave; the tightest.
fn cgroup_left(root: &Path) -> Option<Left> {
    cgroups(root).into_iter().filter_map(|(dir, files)| left_in(&dir, files)).min_by_key(Left::per_mille)
}

/// "max" is not a number and means no limit; v1 has a number near 2^63 instead.
fn limit_in(dir: &Path, file: &str) -> Option<u64> {
    read_number(&dir.join(file)).filter(|limit| *limit < 1 << 60 && *limit > 0)
}

fn left_in(dir: &Path, [limit, usage, cache]: Files) -> Option<Left> {
    let limit = limit_in(dir, limit)?;
    let usage = read_number(&dir.join(usage))?;
    let given_back = read(&dir.join("memory.stat")).and_then(|text| field(&text, cache)).unwrap_or(0);
    Some(Left { free: limit.saturating_sub(usage.saturating_sub(given_back)), limit })
}

impl Left {
    fn level(&self) -> Level {
        if self.free < self.limit / CRITICAL_DIVISOR {
            Level::Critical
        } else if self.free < self.limit / TIGHT_DIVISOR {
            Level::Tight
        } else {
            Level::Ample
        }
    }

    fn is_plenty(&self) -> bool {
        self.free >= self.limit / PLENTY_DIVISOR
    }

    fn per_mille(&self) -> u128 {
        u128::from(self.free) * 1000 / u128::from(self.limit.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    struct Script(Vec<Level>);

    impl PressureSource for Script {
        fn level(&mut self, _now: Instant) -> Level {
            if self.0.is_empty() { Level::Ample } else { self.0.remove(0) }
        }

        fn name(&self) -> &'static str {
            "script"
        }
    }

    fn look(monitor: &mut Monitor, budget: &Budget, now: Instant) -> Option<Instant> {
        monitor.check(budget, now, || Extent { least_bytes: 20 * MIB, most_bytes: 200 * MIB })
    }

    #[test]
    fn the_limit_goes_down_in_steps_and_up_again() {
        let budget = Budget::new(u64::MAX);
        let levels = vec![Level::Tight, Level::Tight, Level::Critical];
        let mut monitor = Monitor::new(Box::new(Script(levels)));
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        assert_eq!(look(&mut monitor, &budget, at(0)), None, "nothing in use, nothing to look at");
        budget.add(160 * MIB);
        assert_eq!(look(&mut monitor, &budget, at(0)), Some(at(1)));
        assert_eq!(budget.limit_bytes(), 140 * MIB);
        // The caches are still above the limit, so no further step; and no check before its time.
        assert_eq!(look(&mut monitor, &budget, at(0)), Some(at(1)));
        look(&mut monitor, &budget, at(1));
        assert_eq!((budget.limit_bytes(), monitor.shrinks()), (140 * MIB, 1));
        look(&mut monitor, &budget, at(2));
        assert_eq!((budget.limit_bytes(), monitor.shrinks()), (105 * MIB, 2));
        budget.give(60 * MIB);
        for second in 3..7 {
            look(&mut monitor, &budget, at(second));
            assert_eq!(budget.limit_bytes(), 105 * MIB);
        }
        look(&mut monitor, &budget, at(7));
        assert!(budget.limit_bytes() > 115 * MIB);
        for second in 8..30 {
            look(&mut monitor, &budget, at(second));
        }
        assert_eq!(budget.limit_bytes(), u64::MAX);
    }

    #[test]
    fn the_limit_never_goes_below_what_always_goes() {
        let budget = Budget::new(u64::MAX);
        budget.add(24 * MIB);
        let mut monitor = Monitor::new(Box::new(Script(vec![Level::Critical; 20])));
        let start = Instant::now();
        for second in 0..20 {
            look(&mut monitor, &budget, start + Duration::from_secs(second));
        }
        assert_eq!((budget.limit_bytes(), monitor.shrinks()), (20 * MIB, 1));
    }

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn level(files: &[(&str, &str)]) -> Level {
        SystemPressure::under(machine(files).path()).level(Instant::now())
    }

    #[test]
    fn stalls_since_the_last_look_count() {
        let psi = |some: u64, full: u64| {
            format!(
                "some avg10=90.00 avg60=0 avg300=0 total={some}\nfull avg10=90.00 avg60=0 avg300=0 total={full}\n"
            )
        };
        let root = machine(&[("proc/pressure/memory", &psi(5_000_000, 5_000_000))]);
        let mut source = SystemPressure::under(root.path());
        assert_eq!(source.name(), "PSI");
        let start = Instant::now();
        let mut look = |second: u64, some, full| {
            std::fs::write(root.path().join("proc/pressure/memory"), psi(some, full)).unwrap();
            source.level(start + Duration::from_secs(second))
        };
        assert_eq!(look(0, 5_000_000, 5_000_000), Level::Ample);
        assert_eq!(look(1, 5_050_000, 5_000_000), Level::Ample);
        assert_eq!(look(2, 5_200_000, 5_050_000), Level::Tight);
        assert_eq!(look(3, 5_500_000, 5_300_000), Level::Critical);
        assert_eq!(look(4, 5_500_000, 5_300_000), Level::Ample);
    }

    #[test]
    fn stalls_do_not_count_while_there_is_plenty() {
        let root = machine(&[]);
        let write = |path: &str, text: String| {
            std::fs::create_dir_all(root.path().join("proc/pressure")).unwrap();
            std::fs::write(root.path().join(path), text).unwrap();
        };
        let psi =
            |total: u64| write("proc/pressure/memory", format!("some total={total}\nfull total={total}\n"));
        psi(0);
        let mut source = SystemPressure::under(root.path());
        let start = Instant::now();
        let mut look = |second: u64, available: u64| {
            psi(second * 500_000);
            write("proc/meminfo", format!("MemTotal: 1000000 kB\nMemAvailable: {available} kB\n"));
            source.level(start + Duration::from_secs(second))
        };
        // Half of each second is a stall.
        assert_eq!(look(0, 900_000), Level::Ample);
        assert_eq!(look(1, 900_000), Level::Ample);
        assert_eq!(look(2, 240_000), Level::Critical);
        assert_eq!(look(3, 260_000), Level::Ample);
    }

    #[test]
    fn without_psi_the_cgroup_and_the_machine_count() {
        let meminfo =
            |available: u64| format!("MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n");
        assert_eq!(level(&[("proc/meminfo", &meminfo(500_000))]), Level::Ample);
        assert_eq!(level(&[("proc/meminfo", &meminfo(50_000))]), Level::Tight);
        assert_eq!(level(&[("proc/meminfo", &meminfo(10_000))]), Level::Critical);
        let v2 = |current: &str| {
            level(&[
                ("proc/meminfo", &meminfo(900_000)),
                ("proc/self/cgroup", "0::/outer/inner\n"),
                ("sys/fs/cgroup/outer/memory.max", "1000000000\n"),
                ("sys/fs/cgroup/outer/memory.current", current),
                ("sys/fs/cgroup/outer/memory.stat", "anon 5\ninactive_file 200000000\n"),
                ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
                ("sys/fs/cgroup/outer/inner/memory.current", current),
            ])
        };
        assert_eq!(v2("990000000\n"), Level::Ample);
        assert_eq!(v2("1160000000\n"), Level::Tight);
        assert_eq!(v2("1190000000\n"), Level::Critical);
        let v1 = |usage: &str| {
            level(&[
                ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/gone\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", usage),
                ("sys/fs/cgroup/memory/memory.stat", "cache 9\ntotal_inactive_file 0\n"),
            ])
        };
        assert_eq!(v1("500000000\n"), Level::Ample);
        assert_eq!(v1("990000000\n"), Level::Critical);
        assert_eq!(level(&[]), Level::Ample);
    }

    #[test]
    fn a_limit_of_a_group_above_is_the_memory_that_there_is() {
        let memory = |files: &[(&str, &str)]| SystemPressure::under(machine(files).path()).memory_bytes();
        let meminfo = ("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n");
        // A unit of systemd with MemoryMax=, which is not visible in the group at the mount.
        let unit = ("sys/fs/cgroup/system.slice/headwater.service/memory.max", "300000000\n");
        let v2 = [meminfo, ("proc/self/cgroup", "0::/system.slice/headwater.service\n"), unit];
        assert_eq!(memory(&v2), Some(300_000_000));
        let slice = ("sys/fs/cgroup/system.slice/memory.max", "200000000\n");
        assert_eq!(memory(&[&v2[..], &[slice]].concat()), Some(200_000_000));
        let container =
            [meminfo, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "100000000\n")];
        assert_eq!(memory(&container), Some(100_000_000));
        let v1 = [
            meminfo,
            ("proc/self/cgroup", "4:memory:/gone\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!((memory(&v1), memory(&[])), (Some(1_024_000_000), None));
    }

    #[test]
    fn hardly_anything_left_is_critical_with_psi_too() {
        let files = [
            ("proc/pressure/memory", "some avg10=0 avg60=0 avg300=0 total=0\n"),
            ("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 10000 kB\n"),
        ];
        assert_eq!(level(&files), Level::Critical);
    }
}
