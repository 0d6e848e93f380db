//! Measures what an operation costs, and how much memory a process has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_volume::Volume;
use headwater_writecache::Host;
use rustix::time::{ClockId, clock_gettime};

/// Processor time of this process, or of this thread, so far.
fn processor_time(of: ClockId) -> Duration {
    Duration::try_from(clock_gettime(of)).expect("it grows from nothing")
}

/// Available memory by the system's estimate, in bytes.
pub fn available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("the kernel counts it");
    let line =
        text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).expect("the kernel counts it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// Warns if memory became short during a measurement: its results are then not what was meant.
pub fn warn_if_short(host: &Host) {
    let shrinks = host.snapshot().pressure_shrinks;
    if shrinks > 0 {
        println!(
            "    memory pressure lowered the limit of RAM {shrinks} times: these figures are not valid, run it again with more free memory"
        );
    }
}

/// What an operation costs.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    pub ns: f64,
    pub processor_ns: f64,
}

/// The cost of each of this many operations.
pub fn cost(operations: u64, run: impl FnOnce()) -> Cost {
    cost_until_settled(operations, run, || {})
}

/// The same, including the processor time of background work until `settled` returns, without that of
/// `settled` itself.
pub fn cost_until_settled(operations: u64, run: impl FnOnce(), settled: impl FnOnce()) -> Cost {
    let (start, before) = (Instant::now(), processor_time(ClockId::ProcessCPUTime));
    run();
    let elapsed = start.elapsed();
    let own = processor_time(ClockId::ThreadCPUTime);
    settled();
    let own = processor_time(ClockId::ThreadCPUTime) - own;
    let processor = (processor_time(ClockId::ProcessCPUTime) - before).saturating_sub(own);
    let each = |time: Duration| time.as_nanos() as f64 / operations as f64;
    Cost { ns: each(elapsed), processor_ns: each(processor) }
}

/// Waits until no segment is written any more.
pub fn settle(volumes: &[Arc<Volume>]) {
    let spilled = || -> u64 { volumes.iter().map(|v| v.counters().cache.spilled_segments).sum() };
    let (mut before, mut same) = (spilled(), 0);
    while same < 3 {
        std::thread::sleep(Duration::from_millis(15));
        let now = spilled();
        same = if now == before { same + 1 } else { 0 };
        before = now;
    }
}

/// Reports the progress of longer work.
pub fn progress(what: std::fmt::Arguments<'_>) {
    println!("    {what}");
}
