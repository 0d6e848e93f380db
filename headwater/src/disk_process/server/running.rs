//! The calls that are being answered. The process ends only when none of them changes a disk any more, so that each such call is carried
//! out here, with its answer, or by the next process.

use parking_lot::Mutex;

use crate::disk_process::protocol::Call;

/// The calls that are being answered.
#[derive(Default)]
pub(super) struct RunningCalls(Mutex<Running>);

#[derive(Default)]
struct Running {
    /// The number of calls that change disks and have no answer yet.
    changes: usize,
    /// No call is begun, because the next process has the disks soon.
    is_closed: bool,
}

/// A call that has begun. Dropped when its answer was sent.
pub(super) struct RunningCall<'a> {
    calls: &'a RunningCalls,
    is_change: bool,
}

impl RunningCalls {
    /// Begins a call. `None`: the next process must be asked.
    pub(super) fn begin(&self, call: &Call) -> Option<RunningCall<'_>> {
        let is_change = call.changes_disks();
        let mut running = self.0.lock();
        if running.is_closed && !call.is_about_the_process() {
            return None;
        }
        running.changes += usize::from(is_change);
        Some(RunningCall { calls: self, is_change })
    }

    /// Begins no more calls.
    pub(super) fn close(&self) {
        self.0.lock().is_closed = true;
    }

    /// Begins calls again.
    pub(super) fn open(&self) {
        self.0.lock().is_closed = false;
    }

    /// The number of calls that change disks and have no answer yet.
    pub(super) fn changes(&self) -> usize {
        self.0.lock().changes
    }
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        self.calls.0.lock().changes -= usize::from(self.is_change);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_change_either_has_an_answer_or_is_not_begun() {
        let (calls, close) = (RunningCalls::default(), Call::Close { uuid: Uuid::nil() });
        let running = calls.begin(&close);
        assert!(running.is_some());
        let read = calls.begin(&Call::LeftOpen);
        calls.close();
        assert_eq!(calls.changes(), 1);
        assert!(calls.begin(&close).is_none() && calls.begin(&Call::LeftOpen).is_none());
        // The daemon still learns that this process is there.
        assert!(calls.begin(&Call::Hold).is_some() && calls.begin(&Call::Snapshot).is_some());
        // A seal that has a frozen disk goes on, because the upgrade may be refused.
        let (offset, len, max) = (0, 4096, 1);
        for call in [
            Call::Changed { offset, len, max },
            Call::Extents { offset, len, max },
            Call::Read { offset, len },
        ] {
            assert!(calls.begin(&call).is_some(), "{call:?}");
        }
        drop((running, read));
        assert_eq!(calls.changes(), 0);
        calls.open();
        assert!(calls.begin(&close).is_some());
        assert_eq!(calls.changes(), 0);
    }
}
