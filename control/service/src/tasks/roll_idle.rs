//! Decides what happens to a machine after its guest said whether somebody is logged in, in a roll that waits for users. A pure function,
//! as the rest of the plan; `roll_ask.rs` asks the guests.
//!
//! ```text
//!   Pending --nobody---------------------------------------------> Moving
//!      |                                                             ^
//!      +--somebody, or no answer--> InUse --nobody twice, or time----+
//!      |                              |
//!      +--the deadline is over--------+--> Left
//! ```

use serde::{Deserialize, Serialize};

use super::roll_plan::{Member, Plan, Stage};

/// How often a guest is asked whether somebody is still logged in.
pub(super) const ASK_INTERVAL_MS: u64 = 10_000;

/// Why a machine is left whose user was logged in at the deadline.
pub(super) const IN_USE: &str = "somebody was logged in until the deadline: the machine boots the new version after 'headwater machine reset', or when its guest restarts";

/// The same for a machine whose guest said nothing.
pub(super) const SAYS_NOTHING: &str = "its guest agent did not say until the deadline whether somebody is logged in: the machine boots the new version after 'headwater machine reset', or when its guest restarts";

/// The most machines that the progress names.
const NAMES_MAX: usize = 5;

/// The wait of a machine that may be in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InUse {
    /// It is moved at this time even if somebody is logged in, unless the deadline is earlier.
    pub(super) until_ms: u64,
    /// When its guest was asked last.
    pub(super) asked_ms: u64,
    /// How many users were logged in. `None`: the guest agent did not say.
    pub(super) users: Option<usize>,
    /// Whether users who are known to be logged in have got the message.
    pub(super) has_message: bool,
}

impl InUse {
    /// Whether its guest is to be asked again.
    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        // If the clock is set back, too.
        now_ms >= self.until_ms || now_ms.abs_diff(self.asked_ms) >= ASK_INTERVAL_MS
    }
}

/// The times that decide.
#[derive(Clone, Copy)]
struct Times {
    now_ms: u64,
    wait_ms: u64,
    deadline_ms: Option<u64>,
}

/// What happens to a machine.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Move,
    Wait(InUse),
    Leave(&'static str),
}

/// Decides about one machine. `before` is its wait so far.
fn step(before: Option<InUse>, users: Option<usize>, times: Times) -> Step {
    let Times { now_ms, wait_ms, deadline_ms } = times;
    let is_idle = users == Some(0);
    // A session that ends while the next one begins looks like nobody for a moment.
    if is_idle && before.is_none_or(|before| before.users == Some(0)) {
        return Step::Move;
    }
    let until_ms = now_ms.saturating_add(wait_ms);
    let first = InUse { until_ms, asked_ms: now_ms, users, has_message: false };
    let mut wait = before.map_or(first, |before| InUse { asked_ms: now_ms, users, ..before });
    if !is_idle && users.is_some() && !wait.has_message {
        // Nobody is sent away without the whole time after the message.
        wait.until_ms = until_ms;
        wait.has_message = true;
    }
    // A machine whose wait was over before the deadline may still wait for its batch.
    match deadline_ms.filter(|end_ms| *end_ms <= wait.until_ms.max(now_ms)) {
        Some(end_ms) if end_ms <= now_ms && users.is_none() => Step::Leave(SAYS_NOTHING),
        Some(end_ms) if end_ms <= now_ms && !is_idle => Step::Leave(IN_USE),
        None if wait.until_ms <= now_ms => Step::Move,
        _ => Step::Wait(wait),
    }
}

/// Whether the users of a machine get the message now. If its guest does not say whether there are any, it is shown all the same.
fn is_told(before: Option<InUse>, wait: &InUse) -> bool {
    let Some(before) = before else { return wait.has_message || wait.users.is_none() };
    let has_more = matches!((before.users, wait.users), (Some(old), Some(now)) if now > old);
    has_more || (wait.has_message && !before.has_message)
}

impl Plan {
    /// Applies the answers of guests: how many users are logged in, or `None` if the guest does not say. Returns the machines whose users
    /// get the message now.
    pub(super) fn heard(&mut self, answers: &[(Member, Option<usize>)], now_ms: u64) -> Vec<Member> {
        let wait_ms = self.request.wait_idle_s.unwrap_or(0).saturating_mul(1000);
        let times = Times { now_ms, wait_ms, deadline_ms: self.deadline_ms };
        let mut places = self.places();
        let mut to_tell = Vec::new();
        for (member, users) in answers {
            let before = match &member.stage {
                Stage::InUse(wait) => Some(*wait),
                _ => None,
            };
            match step(before, *users, times) {
                Step::Move if places > 0 => {
                    places -= 1;
                    self.set(&member.machine, Stage::Moving);
                }
                // It is asked again for the next batch.
                Step::Move => {}
                Step::Wait(wait) => {
                    if is_told(before, &wait) {
                        to_tell.push(member.clone());
                    }
                    self.set(&member.machine, Stage::InUse(wait));
                }
                Step::Leave(why) => self.set(&member.machine, Stage::Left { why: why.to_owned() }),
            }
        }
        to_tell
    }

    /// How many more machines may be moved together with those that are about to be moved.
    pub(super) fn places(&self) -> usize {
        let moving = self.members.iter().filter(|it| it.stage == Stage::Moving).count();
        self.batch_size().saturating_sub(moving)
    }

    /// Ends all waits for users, because the window of the roll is over: they begin again in the next one.
    pub(super) fn forget_users(&mut self) {
        self.deadline_ms = None;
        for member in self.members.iter_mut().filter(|it| matches!(it.stage, Stage::InUse(_))) {
            member.stage = Stage::Pending;
        }
    }

    /// The machines that wait for their users, for people. Empty if there are none.
    pub(super) fn users_in_words(&self) -> String {
        let waits: Vec<_> = self.members.iter().filter_map(|it| self.wait_in_words(it)).collect();
        if waits.is_empty() {
            return String::new();
        }
        let more = match waits.len().saturating_sub(NAMES_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let named: Vec<_> = waits.into_iter().take(NAMES_MAX).collect();
        format!("; waits until nobody is logged in: {}{more}", named.join(", "))
    }

    fn wait_in_words(&self, member: &Member) -> Option<String> {
        let Stage::InUse(wait) = &member.stage else { return None };
        let users = match wait.users {
            Some(0) => "nobody".to_owned(),
            Some(1) => "1 user".to_owned(),
            Some(count) => format!("{count} users"),
            None => "no answer".to_owned(),
        };
        let (end_ms, ending) = match self.deadline_ms.filter(|end_ms| *end_ms <= wait.until_ms) {
            Some(end_ms) => (end_ms, "left"),
            None => (wait.until_ms, "restarted"),
        };
        let end = headwater_api::words::time(end_ms);
        Some(format!("{} ({users}; {ending} at {end})", member.machine))
    }
}

#[cfg(test)]
mod tests {
    use headwater_api::{Batch, RollRequest};
    use uuid::Uuid;

    use super::super::roll_plan::{Gate, Next};
    use super::*;

    const MINUTE_MS: u64 = 60_000;

    /// A roll of so many machines whose users have half an hour.
    fn plan(machines: usize, batch: &str, deadline_ms: Option<u64>) -> Plan {
        let request = RollRequest {
            to: "debian@2".to_owned(),
            canary: 0,
            batch: Batch::parse(batch).unwrap(),
            pause_s: 0,
            health: None,
            health_s: 1,
            boot_s: 1,
            max_failures: 0,
            at_ms: None,
            window: None,
            wait_idle_s: Some(1800),
            message: None,
            deadline_s: None,
        };
        let member = |number: usize| {
            let uuid = Uuid::from_u128(number as u128);
            Member { uuid, machine: format!("pc-{number}"), stage: Stage::Pending }
        };
        Plan {
            catalog: "class".to_owned(),
            from: "debian@1".to_owned(),
            to: request.to.clone(),
            request,
            pin_before: None,
            members: (1..=machines).map(member).collect(),
            pause_until_ms: 0,
            back: None,
            waits_until_ms: None,
            deadline_ms,
        }
    }

    /// Plays the roll from minute to minute. `users` says how many users a machine has at a minute. All moves succeed. Returns what
    /// happened, with the minute.
    fn play(mut plan: Plan, users: impl Fn(&str, u64) -> Option<usize>) -> Vec<String> {
        let mut script = Vec::new();
        for minute in 0..1000 {
            let now_ms = minute * MINUTE_MS;
            for step in 0.. {
                assert!(step < 1000, "minute {minute} does not end: {plan:?}");
                match plan.next(now_ms, false, Gate::Open) {
                    Next::Ask(members) => {
                        let answers: Vec<_> = members
                            .into_iter()
                            .map(|member| {
                                let count = users(&member.machine, minute);
                                (member, count)
                            })
                            .collect();
                        for member in plan.heard(&answers, now_ms) {
                            script.push(format!("{minute}: tell {}", member.machine));
                        }
                    }
                    Next::Move(members) => {
                        let names: Vec<_> = members.iter().map(|member| member.machine.clone()).collect();
                        script.push(format!("{minute}: move {}", names.join(" ")));
                        names.iter().for_each(|name| plan.set(name, Stage::Healthy));
                        plan.pause_until_ms = now_ms + plan.request.pause_s * 1000;
                    }
                    Next::Wait(_) => break,
                    end => {
                        let left = plan.report(false).left;
                        script.extend(left.iter().map(|it| format!("left {}: {}", it.machine, it.why)));
                        script.push(format!("{minute}: {end:?}"));
                        return script;
                    }
                }
            }
        }
        panic!("it does not end: {script:?}");
    }

    #[test]
    fn idle_machines_go_first_and_users_have_their_time() {
        let script = play(plan(4, "2", None), |machine, minute| {
            Some(match machine {
                // Its user never leaves.
                "pc-1" => 1,
                // Two users leave after ten minutes.
                "pc-3" if minute < 10 => 2,
                _ => 0,
            })
        });
        let expected = [
            "0: tell pc-1",
            "0: move pc-2",
            "0: tell pc-3",
            "0: move pc-4",
            "11: move pc-3",
            "30: move pc-1",
        ];
        assert_eq!(script[..6], expected);
        assert_eq!(script[6..], ["30: Finish"]);
    }

    #[test]
    fn the_deadline_ends_the_wait_and_sends_nobody_away() {
        let users = |machine: &str, minute| match machine {
            "pc-1" => Some(1),
            "pc-2" => None,
            "pc-3" => Some(usize::from(minute < 20)),
            _ => Some(0),
        };
        let script = play(plan(4, "4", Some(30 * MINUTE_MS)), users);
        let expected = [
            "0: tell pc-1".to_owned(),
            "0: tell pc-2".to_owned(),
            "0: tell pc-3".to_owned(),
            "0: move pc-4".to_owned(),
            "21: move pc-3".to_owned(),
            format!("left pc-1: {IN_USE}"),
            format!("left pc-2: {SAYS_NOTHING}"),
            "30: Finish".to_owned(),
        ];
        assert_eq!(script, expected);
        // A machine that is looked at after the deadline does not wait at all.
        let script = play(plan(1, "1", Some(0)), |_, _| Some(1));
        assert_eq!(script, [format!("left pc-1: {IN_USE}"), "0: Finish".to_owned()]);
    }

    #[test]
    fn a_machine_whose_turn_has_not_come_at_the_deadline_is_left_to_its_users() {
        let mut roll = plan(5, "1", Some(60 * MINUTE_MS));
        roll.request.pause_s = 600;
        let script = play(roll, |_, _| Some(1));
        let moves: Vec<_> = script.iter().filter(|line| line.contains("move")).collect();
        assert_eq!(moves, ["30: move pc-1", "40: move pc-2", "50: move pc-3"]);
        let ends = [format!("left pc-4: {IN_USE}"), format!("left pc-5: {IN_USE}"), "60: Finish".to_owned()];
        assert_eq!(script[script.len() - 3..], ends);
    }

    #[test]
    fn a_guest_that_answers_late_has_its_whole_time_from_then_on() {
        let script = play(plan(1, "1", None), |_, minute| (minute >= 20).then_some(1));
        assert_eq!(script, ["0: tell pc-1", "20: tell pc-1", "50: move pc-1", "50: Finish"]);
        // A guest that never says who is logged in waits for the whole time. Its users may see the message all the same.
        let script = play(plan(1, "1", None), |_, _| None);
        assert_eq!(script, ["0: tell pc-1", "30: move pc-1", "30: Finish"]);
    }

    #[test]
    fn one_answer_of_nobody_ends_no_wait() {
        let script = play(plan(1, "1", None), |_, minute| Some(usize::from(minute != 5)));
        assert_eq!(script, ["0: tell pc-1", "6: tell pc-1", "30: move pc-1", "30: Finish"]);
    }

    #[test]
    fn users_who_log_in_later_are_told_too() {
        let script = play(plan(1, "1", None), |_, minute| {
            Some(match minute {
                0..=9 => 1,
                // A second user logs in, and one of them logs off.
                10..=19 => 2,
                _ => 1,
            })
        });
        assert_eq!(script, ["0: tell pc-1", "10: tell pc-1", "30: move pc-1", "30: Finish"]);
    }

    #[test]
    fn no_more_machines_than_a_batch_are_restarted_together() {
        let script = play(plan(5, "2", None), |_, minute| Some(usize::from(minute < 3)));
        let moves: Vec<_> = script.iter().filter(|line| line.contains("move")).collect();
        assert_eq!(moves, ["4: move pc-1 pc-2", "4: move pc-3 pc-4", "4: move pc-5"]);
    }

    #[test]
    fn answers_in_parts_move_no_more_machines_than_a_batch() {
        let mut roll = plan(5, "2", None);
        for member in roll.members.clone() {
            roll.heard(&[(member, Some(0))], 0);
        }
        let moving: Vec<_> = roll.members[..2].iter().map(|it| (&*it.machine, &it.stage)).collect();
        assert_eq!(moving, [("pc-1", &Stage::Moving), ("pc-2", &Stage::Moving)]);
        assert_eq!(roll.places(), 0);
        assert!(roll.members[2..].iter().all(|it| it.stage == Stage::Pending));
    }

    #[test]
    fn the_end_of_a_window_ends_the_waits() {
        let mut roll = plan(2, "2", Some(99));
        let answers: Vec<_> = roll.members.iter().map(|member| (member.clone(), Some(1))).collect();
        assert_eq!(roll.heard(&answers, 0).len(), 2);
        assert_eq!(roll.next(0, false, Gate::Closed(9)), Next::Hold(9));
        // Nobody was restarted, so there is nothing to take back.
        assert!(!roll.has_begun());
        roll.forget_users();
        assert_eq!(roll, plan(2, "2", None));
    }

    #[test]
    fn the_progress_says_who_waits_and_until_when() {
        let mut roll = plan(7, "7", None);
        let answers: Vec<_> = roll.members.iter().map(|member| (member.clone(), Some(2))).collect();
        roll.heard(&answers, 0);
        let words = roll.in_words();
        assert!(words.contains("pc-1 (2 users; restarted at 1970-01-01 00:30:00Z), pc-2"), "{words}");
        assert!(words.ends_with(" and 2 more"), "{words}");
        roll.deadline_ms = Some(MINUTE_MS);
        let words = roll.in_words();
        assert!(words.contains("pc-1 (2 users; left at 1970-01-01 00:01:00Z)"), "{words}");
    }
}
