//! Tracks the state of each server from its answers.
//!
//! | state | becomes | if |
//! |---|---|---|
//! | up | down | the server cannot be reached, an answer breaks off for the first time in a read, or the server is busy |
//! | up | aside | the server sends an unexpected answer, such as a redirect |
//! | up | distrusted | its bytes were wrong, and another server's were right |
//! | down, aside | up | a probe gets the right answer; probes become rarer the longer the server fails |
//! | distrusted | up | the time of distrust is over |
//!
//! A server of which only one file is wrong keeps its state: see [`crate::read`]. If no other server is left,
//! a distrusted server is used, because everything it sends is checked.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_store::StoreError;

use crate::servers::Servers;
use crate::transfer::{Busy, Fault};

/// How often the shortest pause of a busy server is doubled. The pause stays shorter than the times that
/// servers ask for.
const BUSY_DOUBLINGS_MAX: u32 = 3;

#[derive(Clone, Debug)]
pub(crate) enum Health {
    Up,
    Distrusted {
        until: Instant,
    },
    /// `is_gone`: all reads are affected. Otherwise only the transfer of one file failed.
    Down {
        probe_at: Instant,
        is_gone: bool,
    },
    /// `is_gone`: a probe found it, so all reads are affected. Otherwise only the answer to one read was
    /// wrong.
    Aside {
        probe_at: Instant,
        is_gone: bool,
    },
}

impl Servers {
    pub(crate) fn was_late(&self, index: usize, waited: Duration) {
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.speed.was_late(waited);
        }
    }

    /// The server gave a right answer.
    pub(crate) fn answered(&self, index: usize, len: u64, (first_byte, whole): (Duration, Duration)) {
        self.counting.fetched_bytes.fetch_add(len, Ordering::Relaxed);
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.answers += 1;
            record.bytes += len;
            record.strikes = 0;
            record.speed.answered(len, first_byte, whole);
            record.sampled_at = Instant::now();
        }
    }

    /// The server gave wrong bytes, for whatever reason.
    pub(crate) fn gave_wrong_bytes(&self, index: usize, what: &str, why: &StoreError) {
        self.counting.wrong_answers.fetch_add(1, Ordering::Relaxed);
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let until = Instant::now() + self.limits.distrust;
        let seconds = self.limits.distrust.as_secs();
        let mut state = self.state.lock();
        if let Some(record) = state.records.get_mut(index) {
            record.failures += 1;
            record.why = Some(format!("it sent wrong bytes for {what}: {why}"));
            if matches!(record.health, Health::Up) {
                tracing::warn!(server = %url, %what, error = %why,
                    "a server sent wrong bytes: for {seconds} s it is used only if no other server is left");
            }
            record.health = Health::Distrusted { until };
        }
    }

    /// Whether reads may use the server now.
    pub(crate) fn is_there(&self, index: usize) -> bool {
        let state = self.state.lock();
        let health = state.records.get(index).map(|record| &record.health);
        matches!(health, Some(Health::Up | Health::Distrusted { .. }))
    }

    /// Whether the server gave wrong bytes recently.
    pub(crate) fn is_distrusted(&self, index: usize) -> bool {
        let state = self.state.lock();
        let health = state.records.get(index).map(|record| &record.health);
        matches!(health, Some(Health::Distrusted { until }) if *until > Instant::now())
    }

    /// Whether the server is reachable, overloaded, and said when to retry.
    pub(crate) fn is_busy(&self, index: usize) -> bool {
        let state = self.state.lock();
        state.records.get(index).is_some_and(|record| record.is_busy_now())
    }

    /// Whether a transfer from the server has just broken off, so that the server may still be reachable and
    /// is probed soon.
    pub(crate) fn is_probed_soon(&self, index: usize) -> bool {
        let state = self.state.lock();
        let health = state.records.get(index).map(|record| &record.health);
        matches!(health, Some(Health::Down { is_gone: false, .. }))
    }

    /// Records whether it makes sense to wait for this server's list of holes: it gave one, or waiting was
    /// useless.
    pub(crate) fn has_lists(&self, index: usize, has: bool) {
        if let Some(record) = self.state.lock().records.get_mut(index) {
            record.is_without_lists = !has;
        }
    }

    /// Whether waiting for the server's list of holes was useless, and the server has neither come back nor
    /// given a list since.
    pub(crate) fn is_without_lists(&self, index: usize) -> bool {
        self.state.lock().records.get(index).is_some_and(|record| record.is_without_lists)
    }

    /// The server answers, but cannot give `what`. Only reads of that file are affected.
    pub(crate) fn cannot_give(&self, index: usize, what: &str, why: &str) {
        self.counting.wrong_answers.fetch_add(1, Ordering::Relaxed);
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let why = format!("it has no good {what}: {why}");
        let mut state = self.state.lock();
        let Some(record) = state.records.get_mut(index) else { return };
        record.failures += 1;
        if record.why.as_ref() != Some(&why) {
            tracing::warn!(server = %url, %why, "a server cannot give a file of the store: the other servers are asked for it");
        }
        record.why = Some(why);
    }

    /// The server answers, but said before and after a probe that it cannot give `what` now. Only reads of
    /// that file are affected.
    pub(crate) fn cannot_give_now(&self, index: usize, what: &str) {
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let mut state = self.state.lock();
        let Some(record) = state.records.get_mut(index) else { return };
        record.failures += 1;
        let why = "the server is up, but reports that it cannot provide some files now";
        if record.why.as_deref() != Some(why) {
            tracing::warn!(server = %url, %what, %why, "a server cannot give a file now: reads use other servers, or wait");
            record.why = Some(why.into());
        }
    }

    /// No available server has `what`, so reads wait for others. Logs that from time to time.
    pub(crate) fn waits_for_others(&self, what: &str) {
        let mut state = self.state.lock();
        if state.lacking_said.is_none_or(|said| said.elapsed() >= self.limits.distrust) {
            state.lacking_said = Some(Instant::now());
            let reasons = self.status_of(&state).reasons();
            tracing::warn!(%what, %reasons, "no reachable server has this file: reads of it wait for the other servers");
        }
    }

    /// The server gave no usable answer to a read of `what`.
    pub(crate) fn failed(&self, index: usize, what: &str, fault: &Fault) {
        self.note_failure(index, what, fault, false);
    }

    /// The server gave no usable answer to a probe.
    pub(crate) fn probe_failed(&self, index: usize, fault: &Fault) {
        self.note_failure(index, "store", fault, true);
    }

    fn note_failure(&self, index: usize, what: &str, fault: &Fault, is_probe: bool) {
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        if let Some(server) = self.list.get(index) {
            server.drop_kept();
        }
        let mut state = self.state.lock();
        let Some(record) = state.records.get_mut(index) else { return };
        let now = Instant::now();
        let was_up = matches!(record.health, Health::Up | Health::Distrusted { .. });
        record.failures += 1;
        if !was_up && !is_probe {
            // Concurrent reads fail together and count as one failure: the later ones do not postpone the
            // probe.
            if let (Health::Down { is_gone, .. }, Fault::Gone(_) | Fault::Busy(_)) =
                (&mut record.health, fault)
            {
                *is_gone = true;
            }
            return;
        }
        let (pause, busy_for) = (self.pause_after(record.strikes), self.busy_for(record.strikes));
        record.strikes = record.strikes.saturating_add(1);
        if was_up || record.is_busy {
            record.away_since = now;
        }
        record.is_busy = matches!(fault, Fault::Busy(Busy { says_when: true, .. }));
        match fault {
            Fault::Missing | Fault::Wrong(_) | Fault::Stale => {}
            Fault::Busy(Busy { wait, .. }) => {
                record.why = Some(fault.to_string());
                record.health = Health::Down { probe_at: now + busy_for.max(*wait), is_gone: true };
            }
            Fault::Gone(why) | Fault::Broke(why) => {
                let is_gone = matches!(fault, Fault::Gone(_));
                record.health = Health::Down { probe_at: now + pause, is_gone };
                if was_up {
                    tracing::warn!(server = %url, %what, %why, "a server cannot be reached, or broke off: the other servers are asked");
                }
                record.why = Some(why.clone());
            }
            Fault::Odd(why) | Fault::Refused(why) => {
                // The fault may affect one read only. If a probe finds it too, somebody has to repair the
                // server.
                let pause = if is_probe { (pause * 10).min(self.limits.distrust) } else { pause };
                record.health = Health::Aside { probe_at: now + pause, is_gone: is_probe };
                if was_up || record.why.as_deref() != Some(why) {
                    tracing::warn!(server = %url, %what, %why, "a server answers wrongly and is put aside");
                }
                record.why = Some(why.clone());
            }
        }
        drop(state);
        self.announce_change();
    }

    /// When the server last came back after it was gone.
    pub(crate) fn back_at(&self, index: usize) -> Option<Instant> {
        self.state.lock().records.get(index).map(|record| record.back_at)
    }

    /// The pause before the next probe, after this many failures.
    pub(crate) fn pause_after(&self, failures: u32) -> Duration {
        let doubled = self.limits.probe_after.saturating_mul(1 << failures.min(10));
        doubled.min(self.limits.probe_after_max)
    }

    /// The shortest pause before a busy server is asked again, if it was busy `times` times before.
    pub(crate) fn busy_for(&self, times: u32) -> Duration {
        self.pause_after(times.min(BUSY_DOUBLINGS_MAX))
    }

    /// A probe got the right answer.
    pub(crate) fn is_back(&self, index: usize, first_byte: Duration) {
        let url = self.list.get(index).map(|server| server.url.to_string()).unwrap_or_default();
        let mut state = self.state.lock();
        let waiting = state.waiting;
        let Some(record) = state.records.get_mut(index) else { return };
        record.speed.probed(first_byte);
        record.sampled_at = Instant::now();
        if matches!(record.health, Health::Down { is_gone: false, .. }) {
            // Only the transfer of that file failed: the next read that fails like this should not wait
            // longer for its probe.
            record.strikes = 0;
        }
        if matches!(record.health, Health::Down { .. } | Health::Aside { .. }) {
            let was_gone = matches!(
                record.health,
                Health::Down { is_gone: true, .. } | Health::Aside { is_gone: true, .. }
            );
            if was_gone {
                record.back_at = Instant::now();
            }
            if record.why.is_some() {
                tracing::info!(server = %url, "a server is back");
            }
            record.health = Health::Up;
            record.is_without_lists = false;
            // The server may have been restarted, and may have forgotten which versions are in use.
            state.pins_due |= was_gone;
            if let Some(since) = state.gone_since.take() {
                tracing::warn!(server = %url, gone_s = since.elapsed().as_secs_f64(), reads = waiting,
                    "a server is back after none could be reached: reads go on");
            }
        }
        drop(state);
        self.announce_change();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

    #[test]
    fn a_server_with_retry_after_zero_is_asked_ever_more_rarely() {
        let url = "http://127.0.0.1:1".parse().unwrap();
        let servers =
            Servers::new(vec![url], None, None, (Limits::default(), headwater_store::WhileBusy::default()))
                .unwrap();
        let pauses = [0, 1, 2, 3, 4, 1000].map(|times| servers.busy_for(times).as_millis());
        assert_eq!(pauses, [100, 200, 400, 800, 800, 800]);
    }

    #[test]
    fn a_server_that_refuses_one_read_is_probed_soon() {
        let url = "http://127.0.0.1:1".parse().unwrap();
        let servers =
            Servers::new(vec![url], None, None, (Limits::default(), headwater_store::WhileBusy::default()))
                .unwrap();
        servers.is_back(0, Duration::ZERO);
        servers.failed(0, "objects/1", &Fault::Odd("status 403".into()));
        let probe_at = |servers: &Servers| match servers.state.lock().records[0].health {
            Health::Aside { probe_at, .. } => probe_at,
            _ => panic!("the server is not put aside: {:?}", servers.status()),
        };
        assert!(probe_at(&servers) <= Instant::now() + servers.limits.probe_after);
        // The server refuses the probe too, so all reads are affected.
        let before = Instant::now();
        servers.probe_failed(0, &Fault::Odd("status 403".into()));
        assert!(probe_at(&servers) >= before + servers.limits.probe_after * 10);
    }

    #[test]
    fn reads_that_fail_together_are_one_failure() {
        let url = "http://127.0.0.1:1".parse().unwrap();
        let servers =
            Servers::new(vec![url], None, None, (Limits::default(), headwater_store::WhileBusy::default()))
                .unwrap();
        let probe_at = || match servers.state.lock().records[0].health {
            Health::Down { probe_at, .. } | Health::Aside { probe_at, .. } => probe_at,
            _ => panic!("the server is up: {:?}", servers.status()),
        };
        let why = || "for a moment".into();
        for fault in [Fault::Gone(why()), Fault::Odd(why()), Fault::Refused(why()), Fault::Broke(why())] {
            servers.is_back(0, Duration::ZERO);
            servers.answered(0, 1, (Duration::ZERO, Duration::ZERO));
            servers.failed(0, "objects/1", &fault);
            let first = probe_at();
            for _ in 1..8 {
                servers.failed(0, "objects/1", &fault);
            }
            assert_eq!(probe_at(), first, "{fault:?}");
            assert_eq!(servers.state.lock().records[0].strikes, 1, "{fault:?}");
            // A fault that a probe finds is new.
            servers.probe_failed(0, &fault);
            assert!(probe_at() > first, "{fault:?}");
            assert_eq!(servers.state.lock().records[0].strikes, 2, "{fault:?}");
        }
    }
}
