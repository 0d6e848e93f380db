//! Records the counts of each second of a run, for `series.csv.zst` of a report.

use std::fmt::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use headwater_volume::VolumeCounters;

/// The interval between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// Counts since the start, or between two samples. `ram_bytes` and `overflow_bytes` are momentary values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Reads by source: RAM, compressed RAM, zeroes, overflow disk, image.
    pub served: [u64; 5],
    /// Reads of the overflow disk.
    pub disk_reads: u64,
    /// Bytes read from the overflow disk.
    pub disk_read_bytes: u64,
    /// Writes to the overflow disk.
    pub disk_writes: u64,
    /// Bytes written to the overflow disk.
    pub disk_write_bytes: u64,
    /// RAM in use, in bytes.
    pub ram_bytes: u64,
    /// Overflow disk in use, in bytes.
    pub overflow_bytes: u64,
}

impl From<&VolumeCounters> for Counts {
    fn from(counters: &VolumeCounters) -> Self {
        let (reads, cache) = (counters.reads, &counters.cache);
        Self {
            reads: counters.read_ops,
            writes: counters.write_ops,
            served: [reads.ram, reads.packed, reads.zero, reads.disk, reads.image],
            disk_reads: cache.disk_read_ops,
            disk_read_bytes: cache.disk_read_bytes,
            disk_writes: cache.disk_write_ops,
            disk_write_bytes: cache.disk_write_bytes,
            ram_bytes: cache.ram_used_bytes,
            overflow_bytes: cache.disk_used_bytes,
        }
    }
}

impl Counts {
    /// The counts since an earlier sample.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            reads: self.reads - before.reads,
            writes: self.writes - before.writes,
            served: std::array::from_fn(|place| self.served[place] - before.served[place]),
            disk_reads: self.disk_reads - before.disk_reads,
            disk_read_bytes: self.disk_read_bytes - before.disk_read_bytes,
            disk_writes: self.disk_writes - before.disk_writes,
            disk_write_bytes: self.disk_write_bytes - before.disk_write_bytes,
            ..*self
        }
    }
}

/// The counts of one run over time.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// The name of the variant.
    pub variant: String,
    /// The name of the case.
    pub case: String,
    /// The number of the round, or of the machine.
    pub round: usize,
    /// The end of each interval in seconds, with the counts of the interval.
    pub intervals: Vec<(f64, Counts)>,
}

/// Calls `run`, and samples the counts each second and at the end.
pub fn watched<T>(sample: impl Fn() -> Counts + Send, run: impl FnOnce() -> T) -> (T, Vec<(f64, Counts)>) {
    let (ended, is_ended) = channel::<()>();
    let (began, mut before) = (Instant::now(), sample());
    std::thread::scope(|scope| {
        let watching = scope.spawn(move || {
            let mut intervals = Vec::new();
            let mut next = began + INTERVAL;
            loop {
                let waited = is_ended.recv_timeout(next.saturating_duration_since(Instant::now()));
                let now = sample();
                intervals.push((began.elapsed().as_secs_f64(), now.since(&before)));
                before = now;
                if waited != Err(RecvTimeoutError::Timeout) {
                    return intervals;
                }
                next += INTERVAL;
            }
        });
        let outcome = run();
        drop(ended);
        (outcome, watching.join().unwrap_or_default())
    })
}

/// The names of the columns.
const HEAD: &str = "variant,case,round,end_s,reads,writes,reads_ram,reads_packed,reads_zero,reads_overflow,reads_image,\
                    disk_reads,disk_read_bytes,disk_writes,disk_write_bytes,ram_bytes,overflow_bytes\n";

/// All series as a table, compressed with zstd.
pub fn packed(all: &[Series]) -> Result<Vec<u8>> {
    let mut text = HEAD.to_owned();
    for series in all {
        for (end_s, counts) in &series.intervals {
            let Series { variant, case, round, .. } = series;
            let [ram, packed, zero, overflow, image] = counts.served;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{variant},{case},{round},{end_s:.3},{},{},{ram},{packed},{zero},{overflow},{image},{},{},{},{},{},{}",
                counts.reads,
                counts.writes,
                counts.disk_reads,
                counts.disk_read_bytes,
                counts.disk_writes,
                counts.disk_write_bytes,
                counts.ram_bytes,
                counts.overflow_bytes
            );
        }
    }
    zstd::encode_all(text.as_bytes(), 3).context("cannot compress the series")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn intervals_add_up_to_the_total() {
        let done = AtomicU64::new(7);
        let sample = || {
            let writes = done.load(Ordering::Relaxed);
            Counts { writes, ram_bytes: writes * 10, ..Counts::default() }
        };
        let ((), intervals) = watched(sample, || {
            for _ in 0..3 {
                done.fetch_add(100, Ordering::Relaxed);
            }
        });
        assert_eq!(intervals.iter().map(|(_, counts)| counts.writes).sum::<u64>(), 300);
        assert_eq!(intervals.last().unwrap().1.ram_bytes, 3070);
    }

    #[test]
    fn the_table_has_a_column_for_each_figure() {
        let counts = Counts { reads: 1, served: [2, 3, 4, 5, 6], overflow_bytes: 9, ..Counts::default() };
        let series =
            Series { case: "raw".into(), round: 1, intervals: vec![(0.5, counts)], ..Series::default() };
        let text = String::from_utf8(zstd::decode_all(&packed(&[series]).unwrap()[..]).unwrap()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], ",raw,1,0.500,1,0,2,3,4,5,6,0,0,0,0,0,9");
        assert_eq!(lines[0].split(',').count(), lines[1].split(',').count());
    }
}
