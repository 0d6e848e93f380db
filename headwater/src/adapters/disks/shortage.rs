//! Finds out what prevents a machine's disk from working, such as a full write cache. The service asks at each tick, and shows the answer
//! as the machine's alarm. Nothing is repaired here.

use std::time::{Duration, Instant};

use headwater_api::{CacheMode, DiskTransport};
use headwater_block::size;
use headwater_service::backend::Shortage;

use super::served::ServedVolume;
use crate::streaming::reads_wait;

/// A write that waited this long found no space; shorter waits mean that the disk is slower than the machine.
pub(super) const SHORTAGE_AFTER: Duration = Duration::from_secs(2);

/// An overflow file with less than this many bytes below its limit counts as full, because it grows by segments.
const DISK_FULL_MARGIN_BYTES: u64 = 8 << 20;

/// How long a persistent disk must be unwritable before it is reported: a shorter failure may be a lack of space for
/// a moment.
const FAILING_AFTER: Duration = Duration::from_secs(3);

/// Since when every check has found that a persistent disk cannot be written.
#[derive(Debug, Default)]
pub(super) struct Failing(Option<Instant>);

impl Failing {
    /// Records the result of a check. Returns whether the failure has lasted for [`FAILING_AFTER`].
    fn look(&mut self, fails: bool, now: Instant) -> bool {
        let since = fails.then(|| *self.0.get_or_insert(now));
        self.0 = since;
        since.is_some_and(|since| now.saturating_duration_since(since) >= FAILING_AFTER)
    }
}

impl ServedVolume {
    /// The most severe shortage, if any.
    pub(super) fn trouble(&self) -> Option<Shortage> {
        let failing = self.not_saved();
        match (self.not_durable(), self.full_cache()) {
            // Space on disk becomes usable only when the disk is opened again.
            (Some(broken), Some(full)) => {
                Some(Shortage { message: format!("{}; {}", broken.message, full.message), ..broken })
            }
            (broken, full) => {
                broken.or(full).or(failing).or_else(|| self.full_scratch()).or_else(|| self.no_server())
            }
        }
    }

    fn full_scratch(&self) -> Option<Shortage> {
        let parts = self.parts.lock();
        parts.as_ref()?.scratch.as_ref()?.trouble(&self.files.cache_dir)
    }

    fn not_durable(&self) -> Option<Shortage> {
        self.volume.is_broken().then(|| Shortage {
            message: "its persistent disk cannot be made durable any more, because the host's disk failed at a flush: \
                      writes since the last flush that succeeded may be lost, and flushes fail"
                .into(),
            advice: format!(
                "check the disk of {}, then stop the machine and start it again: its disk has the state of the last \
                 flush that succeeded, or a later state",
                self.files.cache_dir.display()
            ),
        })
    }

    fn not_saved(&self) -> Option<Shortage> {
        self.failing.lock().look(self.volume.is_failing(), Instant::now()).then(|| Shortage {
            message: "its persistent disk cannot be written, because the host's disk fails or is full: writes since the \
                      last flush that succeeded are lost if the machine is stopped now"
                .into(),
            advice: format!(
                "check the disk of {} and free space there: each flush tries to write again",
                self.files.cache_dir.display()
            ),
        })
    }

    fn no_server(&self) -> Option<Shortage> {
        // The store counts the reads of all machines. A machine whose image is on this host needs no server.
        let copied = self.copied();
        if copied.total_bytes > 0 && copied.done_bytes >= copied.total_bytes {
            return None;
        }
        reads_wait(&*self.store).map(|reasons| Shortage {
            message: format!("no server of its image answers, and its reads wait: {reasons}"),
            advice: "they go on by themselves when a server is back".into(),
        })
    }

    /// Whether writes find no space, or found none a short time ago.
    pub(super) fn is_full(&self) -> bool {
        let shortage = self.volume.shortage();
        let waiting = || self.parts.lock().as_ref().map_or(0, |parts| parts.server.waiting_writes());
        shortage.refusing || shortage.waited >= SHORTAGE_AFTER || waiting() > 0
    }

    fn full_cache(&self) -> Option<Shortage> {
        if !self.is_full() {
            return None;
        }
        let cache = self.volume.counters().cache;
        let told = self.volume.shortage().refusing && self.transport == DiskTransport::Nbd;
        let fare = if told { "are refused" } else { "wait" };
        let ram =
            format!("{} of {} RAM", size::format(cache.ram_used_bytes), size::format(cache.ram_target_bytes));
        let disk = format!(
            "{} of {} disk",
            size::format(cache.disk_used_bytes),
            size::format(cache.disk_limit_bytes)
        );
        let used = match self.mode {
            CacheMode::Ram => ram,
            CacheMode::Disk => disk,
            CacheMode::RamDisk => format!("{ram}, {disk}"),
        };
        let set = format!("headwater machine set {}", self.machine);
        let is_disk_full =
            cache.disk_used_bytes.saturating_add(DISK_FULL_MARGIN_BYTES) > cache.disk_limit_bytes;
        let advice = match self.mode {
            CacheMode::Ram => format!("'{set} --ram SIZE' gives it more memory at once"),
            _ if is_disk_full => format!("'{set} --disk SIZE' gives it more disk at once"),
            _ => format!("free space on the file system of {}", self.files.cache_dir.display()),
        };
        let message = format!("its write cache is full and writes {fare}: {used} in use");
        Some(Shortage { message, advice: format!("{advice}; {}", freed_by_trim(&self.machine)) })
    }
}

/// The additional advice to trim: a guest that mounts without `discard` keeps the blocks of removed files until it
/// discards them.
fn freed_by_trim(machine: &str) -> String {
    format!(
        "files removed in the guest free some once it gives their blocks back: 'headwater machine trim {machine}', or fstrim -a in the guest"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_failing_when_no_look_for_a_while_found_it_well() {
        let (mut failing, start) = (Failing::default(), Instant::now());
        let mut look = |fails, at_s| failing.look(fails, start + Duration::from_secs(at_s));
        assert_eq!([(true, 0), (true, 2), (false, 3)].map(|(fails, at)| look(fails, at)), [false; 3]);
        assert_eq!(
            [(true, 4), (true, 6), (true, 7), (true, 9)].map(|(f, at)| look(f, at)),
            [false, false, true, true]
        );
        assert!(!look(false, 10));
    }
}
