//! Alarms of machines: checked at every tick, shown with the machine, and recorded in the history.
//!
//! ```text
//!   no alarm --its disk has no space or is not made durable, or no server of its image answers--> alarm, event "alarm"
//!   alarm    --none of these for ALARM_LINGER--> no alarm, event "alarm over"
//! ```
//! A paused machine retries every few seconds, and its disk seems well for a moment at each retry: an
//! alarm ends only when nothing was wrong for a while.
//!
//! A machine that is off because its guest restarted and its start fails has an alarm too, until it is on or is not wanted
//! any more. The history has the machine's state instead of an alarm for that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_api::name::natural;
use headwater_api::{Alarm, Wanted};
use headwater_db::{DbError, MachineRecord, Repository};

use crate::Service;
use crate::answer::problem;
use crate::backend::Shortage;
use crate::caller::Caller;
use crate::lifecycle::Active;

/// How long nothing must be wrong before an alarm ends.
const ALARM_LINGER: Duration = Duration::from_secs(4);

/// An alarm, and when its cause was last seen.
#[derive(Clone, Debug)]
pub(crate) struct RaisedAlarm {
    pub(crate) alarm: Alarm,
    /// An [`Instant`], because the time of day can be set back, which would keep an alarm that is over.
    began: Instant,
    seen: Instant,
}

/// The change that a check made.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    RaisedAlarm,
    Over { lasted: Duration },
}

/// Updates the alarm after a check that found `cause`.
fn update_alarm(
    raised: &mut Option<RaisedAlarm>,
    subject: impl FnOnce() -> String,
    cause: Option<Shortage>,
    now_ms: u64,
    now: Instant,
) -> Change {
    match (raised.as_mut(), cause) {
        (Some(raised), Some(cause)) => {
            raised.seen = now;
            raised.alarm.message = cause.message;
            raised.alarm.advice = cause.advice;
            Change::None
        }
        (None, Some(Shortage { message, advice })) => {
            let alarm = Alarm { subject: subject(), since_ms: now_ms, message, advice };
            *raised = Some(RaisedAlarm { alarm, began: now, seen: now });
            Change::RaisedAlarm
        }
        (Some(over), None) if now.saturating_duration_since(over.seen) >= ALARM_LINGER => {
            let lasted = over.seen.saturating_duration_since(over.began);
            *raised = None;
            Change::Over { lasted }
        }
        (_, None) => Change::None,
    }
}

/// Why a machine's disk accepts no writes, is not made durable, or its reads wait.
pub(super) fn cause(active: &Active) -> Option<Shortage> {
    let stands_still = active.vm.is_out_of_space();
    let shortage = active.disk.shortage().or_else(|| {
        // QEMU retries soon, and then gets the reason.
        stands_still.then(|| Shortage {
            message: "the machine's disk had no space for a write".to_owned(),
            advice: "the machine tries again by itself".to_owned(),
        })
    })?;
    let message = if stands_still {
        format!("the machine is paused, and continues by itself when there is space: {}", shortage.message)
    } else {
        shortage.message
    };
    Some(Shortage { message, advice: shortage.advice })
}

impl Service {
    /// The alarm of a machine that is on, or that is off because its guest restarted and its start fails.
    pub(crate) fn alarm_of(&self, machine: &MachineRecord) -> Option<Alarm> {
        match self.active(machine.uuid) {
            Some(active) => active.alarm().as_ref().map(|raised| raised.alarm.clone()),
            None if machine.wanted == Wanted::Running => self.failing_restart(machine.uuid),
            None => None,
        }
    }

    /// The alarms of all machines, ordered by the names of machines.
    pub(crate) async fn alarms_of_machines(&self, repo: &mut dyn Repository) -> Result<Vec<Alarm>, DbError> {
        let raised = |active: &Arc<Active>| active.alarm().as_ref().map(|raised| raised.alarm.clone());
        let mut alarms: Vec<Alarm> = self.active_map().values().filter_map(raised).collect();
        for machine in self.failing_restarts() {
            let record = repo.machines().by_uuid(machine).await?;
            // A machine that was started meanwhile has no alarm, or another one.
            let is_off = self.active(machine).is_none();
            alarms.extend(record.filter(|_| is_off).and_then(|record| self.alarm_of(&record)));
        }
        alarms.sort_by(|a, b| natural(&a.subject, &b.subject));
        Ok(alarms)
    }

    /// Checks all machines that are on. The history is updated as soon as it can be written.
    pub(crate) async fn check_alarms(&self) {
        let machines: Vec<_> = self.active_map().values().cloned().collect();
        let mut is_news = false;
        for active in machines {
            is_news |= self.check_alarm(&active);
        }
        if let Err(e) = self.write_pending_events().await
            && is_news
        {
            tracing::error!("cannot write an alarm to the history now; it is tried again: {}", problem(&e));
        }
    }

    /// Whether an alarm began or ended.
    fn check_alarm(&self, active: &Active) -> bool {
        let subject = format!("machine {}", active.name);
        let found = cause(active);
        if found.is_some() {
            // The machine has priority over readers of its disk.
            active.disk.relieve();
        }
        let (change, alarm) = {
            let mut raised = active.alarm();
            let change = update_alarm(&mut raised, || subject.clone(), found, self.now_ms(), Instant::now());
            if change == Change::RaisedAlarm
                && let Some(raised) = raised.as_mut()
                && let Some(since_ms) = self.alarm_state().take_earlier_start(&subject)
            {
                raised.alarm.since_ms = since_ms;
                tracing::warn!(machine = %active.name, "alarm, as before the daemon started: {}", raised.alarm);
                return false;
            }
            (change, raised.as_ref().map(|raised| raised.alarm.to_string()))
        };
        let event = match change {
            Change::None => return false,
            Change::RaisedAlarm => {
                let text = alarm.unwrap_or_default();
                tracing::warn!(machine = %active.name, "alarm: {text}");
                self.event(&Caller::daemon(), subject, "alarm", text)
            }
            Change::Over { lasted } => {
                tracing::info!(machine = %active.name, lasted_s = lasted.as_secs(), "the alarm is over");
                let text = format!("all is well again, after {} s", lasted.as_secs());
                self.event(&Caller::daemon(), subject, "alarm over", text)
            }
        };
        self.pending_events().add(event);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_ends_only_after_a_while_without_its_cause() {
        let full = |message: &str| Some(Shortage { message: message.to_owned(), advice: "more".to_owned() });
        let subject = || "machine a".to_owned();
        let (mut raised, start) = (None, Instant::now());
        // The clock that is shown differs.
        let mut look_at = |clock_ms: u64, cause, at_ms: u64| {
            let change =
                update_alarm(&mut raised, subject, cause, clock_ms, start + Duration::from_millis(at_ms));
            (change, raised.as_ref().map(|raised| raised.alarm.clone()))
        };
        assert_eq!(look_at(90_000, None, 0).0, Change::None);
        assert_eq!(look_at(91_000, full("RAM"), 1_000).0, Change::RaisedAlarm);
        assert_eq!(look_at(92_000, None, 2_000).0, Change::None);
        let (change, alarm) = look_at(93_000, full("disk"), 3_000);
        let alarm = alarm.unwrap();
        assert_eq!(change, Change::None);
        assert_eq!((alarm.since_ms, alarm.to_string().as_str()), (91_000, "disk; more"));
        // The clock is set back.
        assert_eq!(look_at(6_999, None, 6_999).0, Change::None);
        let lasted = Duration::from_secs(2);
        assert_eq!(look_at(7_000, None, 7_000), (Change::Over { lasted }, None));
    }
}
