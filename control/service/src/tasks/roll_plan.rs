//! Decides the next step of a roll: a pure function of its plan and the time. `roll.rs` carries the step out. A roll moves a
//! catalog's machines to another version: canaries first, then in batches.
//!
//! ```text
//!   Pending --move--> Moving --healthy--> Healthy --return--> Returning --> Returned
//!    |  |              |  | \---failed--> Failed ----/            ^
//!    |  |              |  +--the roll is moved back---------------+
//!    |  +<--not moved--+
//!    +--off, claimed, pinned, persistent--> Left
//! ```
//! A roll that waits for users has one more stage, between `Pending` and `Moving`: see `roll_idle.rs`. "Not moved": its
//! node was away, or the daemon ended before. A roll is moved back if it was cancelled, or if a canary or more than `max_failures`
//! machines are not healthy.

use headwater_api::{LeftMachine, RollReport, RollRequest};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::roll_idle::{ASK_INTERVAL_MS, InUse};

/// Why the machines of a cancelled roll are moved back.
pub(super) const CANCELLED: &str = "it was cancelled";

/// The stage of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub(super) enum Stage {
    /// It runs the previous version.
    Pending,
    /// It runs the previous version, and somebody may be logged in.
    InUse(InUse),
    /// It is being moved to the new version.
    Moving,
    /// It runs the new version and is healthy.
    Healthy,
    /// It runs the new version and is not healthy.
    Failed {
        /// Why.
        why: String,
    },
    /// It is being moved back.
    Returning,
    /// It runs the previous version again.
    Returned,
    /// It is not moved.
    Left {
        /// Why.
        why: String,
    },
}

/// A machine of a roll.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    /// Its UUID, because another machine may get its name.
    pub(super) uuid: Uuid,
    /// Its name.
    pub(super) machine: String,
    /// Its stage.
    pub(super) stage: Stage,
}

/// All data that a roll needs to continue after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Plan {
    /// The catalog.
    pub(super) catalog: String,
    /// The request.
    pub(super) request: RollRequest,
    /// The version that its machines ran before, as `IMAGE@NUMBER`.
    pub(super) from: String,
    /// The new version.
    pub(super) to: String,
    /// The catalog's pin before the roll. During the roll the catalog is pinned to `from`.
    pub(super) pin_before: Option<String>,
    /// Its machines, in the order in which they are moved.
    pub(super) members: Vec<Member>,
    /// The end of the pause after a batch: nothing is moved before this time.
    pub(super) pause_until_ms: u64,
    /// Why all machines are moved back, once that is decided.
    pub(super) back: Option<String>,
    /// The start of its window, if no machine may be moved before that. `None` while machines may be moved.
    #[serde(default)]
    pub(super) waits_until_ms: Option<u64>,
    /// The end of all waits for users, in this window.
    pub(super) deadline_ms: Option<u64>,
}

/// Whether machines may be moved now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// Machines may be moved.
    Open,
    /// Not before this time, in milliseconds.
    Closed(u64),
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Move these machines to the version, together.
    Move(Vec<Member>),
    /// Ask the guests of these machines who is logged in.
    Ask(Vec<Member>),
    /// Wait until that time.
    Wait(u64),
    /// Move no machine before that time, at which the window of the roll begins.
    Hold(u64),
    /// Decide to move all machines back.
    DecideReturn(String),
    /// Move these machines back, together.
    Return(Vec<Member>),
    /// All machines run the new version: update the catalog.
    Finish,
    /// All machines are moved back: end the roll.
    Returned(String),
}

impl Plan {
    fn find(&self, wanted: impl Fn(&Stage) -> bool) -> Vec<Member> {
        self.members.iter().filter(|it| wanted(&it.stage)).cloned().collect()
    }

    fn names(&self, wanted: impl Fn(&Stage) -> bool) -> Vec<String> {
        self.find(wanted).into_iter().map(|it| it.machine).collect()
    }

    fn count(&self, wanted: impl Fn(&Stage) -> bool) -> usize {
        self.members.iter().filter(|it| wanted(&it.stage)).count()
    }

    /// Sets the stage of a machine.
    pub(super) fn set(&mut self, machine: &str, stage: Stage) {
        if let Some(member) = self.members.iter_mut().find(|it| it.machine == machine) {
            member.stage = stage;
        }
    }

    /// The next step at a time.
    pub(super) fn next(&self, now_ms: u64, cancelled: bool, gate: Gate) -> Next {
        let in_work = |stage: &Stage| {
            matches!(stage, Stage::Moving | Stage::Healthy | Stage::Failed { .. } | Stage::Returning)
        };
        if let Some(why) = &self.back {
            let left = self.find(in_work);
            let size = self.request.batch.of(self.movable());
            return match left.is_empty() {
                true => Next::Returned(why.clone()),
                false => Next::Return(left.into_iter().take(size).collect()),
            };
        }
        // Machines that a previous daemon was moving when it ended.
        let moving = self.find(|stage| *stage == Stage::Moving);
        if cancelled {
            return Next::DecideReturn(CANCELLED.to_owned());
        }
        let failed = self.names(|stage| matches!(stage, Stage::Failed { .. }));
        let is_canary_round = self.canaries_left() > 0;
        let allowed = usize::try_from(self.request.max_failures).unwrap_or(usize::MAX);
        if let Some(first) = failed.first() {
            if is_canary_round {
                return Next::DecideReturn(format!("the canary {}", self.why(first)));
            }
            if failed.len() > allowed {
                let all: Vec<_> = failed.iter().map(|machine| self.why(machine)).collect();
                return Next::DecideReturn(format!(
                    "{} of at most {allowed} failed: {}",
                    failed.len(),
                    all.join("; ")
                ));
            }
        }
        if !moving.is_empty() {
            return Next::Move(moving);
        }
        let pending = self.find(|stage| *stage == Stage::Pending);
        let in_use = self.find(|stage| matches!(stage, Stage::InUse(_)));
        if pending.is_empty() && in_use.is_empty() {
            return match gate {
                // Machines that are off or claimed now may be on and free at that time.
                Gate::Closed(until_ms) if !self.has_begun() => Next::Hold(until_ms),
                _ => Next::Finish,
            };
        }
        // Outside of the window, no further machine is moved. Machines that are being moved continue, and the steps above move all
        // machines back if that was decided.
        if let Gate::Closed(until_ms) = gate {
            return Next::Hold(until_ms);
        }
        if now_ms < self.pause_until_ms {
            return Next::Wait(self.pause_until_ms);
        }
        let batch = pending.into_iter().take(self.batch_size());
        if self.request.wait_idle_s.is_none() {
            return Next::Move(batch.collect());
        }
        let is_due = |it: &Member| matches!(it.stage, Stage::InUse(wait) if wait.is_due(now_ms));
        let asked: Vec<_> = in_use.into_iter().filter(is_due).chain(batch).collect();
        match asked.is_empty() {
            true => Next::Wait(now_ms.saturating_add(ASK_INTERVAL_MS)),
            false => Next::Ask(asked),
        }
    }

    /// How many canaries are still to be moved.
    fn canaries_left(&self) -> usize {
        let canaries = usize::try_from(self.request.canary).unwrap_or(usize::MAX).min(self.movable());
        canaries.saturating_sub(self.count(|stage| *stage == Stage::Healthy))
    }

    /// How many machines are moved together now: all canaries that are left, or else a batch.
    pub(super) fn batch_size(&self) -> usize {
        match self.canaries_left() {
            0 => self.request.batch.of(self.movable()),
            canaries => canaries,
        }
    }

    /// Whether a machine was moved.
    pub(super) fn has_begun(&self) -> bool {
        let is_unmoved =
            |stage: &Stage| matches!(stage, Stage::Pending | Stage::InUse(_) | Stage::Left { .. });
        self.members.iter().any(|it| !is_unmoved(&it.stage))
    }

    /// The number of machines that are or were to be moved.
    fn movable(&self) -> usize {
        self.count(|stage| !matches!(stage, Stage::Left { .. }))
    }

    fn why(&self, machine: &str) -> String {
        let found = self.members.iter().find(|it| it.machine == machine).map(|it| &it.stage);
        match found {
            Some(Stage::Failed { why }) => format!("{machine} {why}"),
            _ => machine.to_owned(),
        }
    }

    /// The progress, for people.
    pub(super) fn in_words(&self) -> String {
        let on = self.count(|stage| matches!(stage, Stage::Healthy | Stage::Failed { .. }));
        let moving = self.names(|stage| *stage == Stage::Moving);
        let returned = self.count(|stage| *stage == Stage::Returned);
        if let Some(why) = &self.back {
            return format!("taking machines back to {}, {returned} done: {why}", self.from);
        }
        if let Some(until_ms) = self.waits_until_ms {
            let hours = self.request.window.as_ref().map(|hours| format!(" ({hours})")).unwrap_or_default();
            let until = headwater_api::words::time(until_ms);
            return format!("waits until {until}{hours}; {on} of {} machines on {}", self.movable(), self.to);
        }
        let waits =
            if moving.is_empty() { String::new() } else { format!("; waits for {}", moving.join(", ")) };
        let users = self.users_in_words();
        format!("{on} of {} machines on {}{waits}{users}", self.movable(), self.to)
    }

    /// The report of the roll.
    pub(super) fn report(&self, pinned: bool) -> RollReport {
        let with_why = |wanted: &dyn Fn(&Stage) -> Option<String>| {
            let found = self.members.iter().filter_map(|it| {
                wanted(&it.stage).map(|why| LeftMachine { machine: it.machine.clone(), why })
            });
            found.collect::<Vec<_>>()
        };
        let failed = |stage: &Stage| if let Stage::Failed { why } = stage { Some(why.clone()) } else { None };
        let left = |stage: &Stage| if let Stage::Left { why } = stage { Some(why.clone()) } else { None };
        RollReport {
            catalog: self.catalog.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            moved: self.names(|stage| *stage == Stage::Healthy),
            failed: with_why(&failed),
            left: with_why(&left),
            pinned,
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_api::Batch;

    use super::*;

    fn plan(machines: usize, request: RollRequest) -> Plan {
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
            deadline_ms: None,
        }
    }

    fn request(canary: u32, batch: &str, max_failures: u32) -> RollRequest {
        RollRequest {
            to: "debian@2".to_owned(),
            canary,
            batch: Batch::parse(batch).unwrap(),
            pause_s: 0,
            health: None,
            health_s: 1,
            boot_s: 1,
            max_failures,
            at_ms: None,
            window: None,
            wait_idle_s: None,
            message: None,
            deadline_s: None,
        }
    }

    fn names(members: &[Member]) -> Vec<String> {
        members.iter().map(|member| member.machine.clone()).collect()
    }

    /// Plays a roll: `fails` lists the machines that are not healthy on the new version. Returns each step in words.
    fn play(mut plan: Plan, fails: &[&str]) -> Vec<String> {
        let mut script = Vec::new();
        for _ in 0..1000 {
            match plan.next(0, false, Gate::Open) {
                Next::Move(members) => {
                    let machines = names(&members);
                    script.push(format!("move {}", machines.join(" ")));
                    for machine in machines {
                        let why = "is ill".to_owned();
                        let stage = if fails.contains(&machine.as_str()) {
                            Stage::Failed { why }
                        } else {
                            Stage::Healthy
                        };
                        plan.set(&machine, stage);
                    }
                }
                Next::Return(members) => {
                    let machines = names(&members);
                    script.push(format!("return {}", machines.join(" ")));
                    machines.iter().for_each(|machine| plan.set(machine, Stage::Returned));
                }
                Next::DecideReturn(why) => {
                    script.push(format!("take back: {why}"));
                    plan.back = Some(why);
                }
                end => {
                    script.push(format!("{end:?}"));
                    return script;
                }
            }
        }
        panic!("it does not end: {script:?}");
    }

    #[test]
    fn canaries_go_first_and_the_others_in_batches() {
        let script = play(plan(6, request(1, "40%", 0)), &[]);
        assert_eq!(script, ["move pc-1", "move pc-2 pc-3", "move pc-4 pc-5", "move pc-6", "Finish"]);
        assert_eq!(play(plan(3, request(0, "100%", 0)), &[]), ["move pc-1 pc-2 pc-3", "Finish"]);
        assert_eq!(play(plan(2, request(9, "1", 0)), &[]), ["move pc-1 pc-2", "Finish"]);
        assert_eq!(play(plan(0, request(1, "1", 0)), &[]), ["Finish"]);
    }

    #[test]
    fn a_canary_that_fails_goes_back_and_no_other_was_touched() {
        // Even if the others could fail too.
        let script = play(plan(6, request(1, "3", 5)), &["pc-1"]);
        let why = "the canary pc-1 is ill";
        assert_eq!(
            script,
            ["move pc-1", &format!("take back: {why}"), "return pc-1", &format!("Returned({why:?})")]
        );
        let script = play(plan(6, request(2, "3", 5)), &["pc-2"]);
        assert_eq!(&script[..2], ["move pc-1 pc-2", "take back: the canary pc-2 is ill"]);
        assert_eq!(script[2], "return pc-1 pc-2");
    }

    #[test]
    fn failures_up_to_the_limit_are_reported_and_above_it_all_goes_back() {
        let script = play(plan(5, request(1, "2", 1)), &["pc-3"]);
        assert_eq!(script, ["move pc-1", "move pc-2 pc-3", "move pc-4 pc-5", "Finish"]);
        let script = play(plan(5, request(1, "2", 1)), &["pc-3", "pc-4"]);
        assert_eq!(script[3], "take back: 2 of at most 1 failed: pc-3 is ill; pc-4 is ill");
        assert_eq!(script[4..7], ["return pc-1 pc-2", "return pc-3 pc-4", "return pc-5"]);
    }

    #[test]
    fn machines_that_are_left_alone_count_as_none() {
        let mut roll = plan(4, request(2, "50%", 0));
        roll.set("pc-1", Stage::Left { why: "is off".to_owned() });
        roll.set("pc-3", Stage::Left { why: "keeps its disk".to_owned() });
        assert_eq!(play(roll.clone(), &[]), ["move pc-2 pc-4", "Finish"]);
        let left = roll.report(false).left;
        assert_eq!(left.iter().map(|it| it.machine.as_str()).collect::<Vec<_>>(), ["pc-1", "pc-3"]);
    }

    #[test]
    fn pauses_are_kept_and_a_cancelled_roll_goes_back() {
        let mut roll = plan(3, request(1, "1", 0));
        roll.set("pc-1", Stage::Healthy);
        roll.pause_until_ms = 500;
        assert_eq!(roll.next(499, false, Gate::Open), Next::Wait(500));
        assert_eq!(roll.next(500, false, Gate::Open), Next::Move(vec![roll.members[1].clone()]));
        assert_eq!(roll.next(0, true, Gate::Open), Next::DecideReturn("it was cancelled".to_owned()));
    }

    #[test]
    fn outside_of_its_hours_a_roll_moves_none_and_still_takes_back() {
        let mut roll = plan(3, request(1, "1", 0));
        assert_eq!(roll.next(0, false, Gate::Closed(9)), Next::Hold(9));
        assert!(!roll.has_begun());
        // A roll without a machine to move waits too: machines are checked again at that time.
        let mut idle = plan(1, request(1, "1", 0));
        idle.set("pc-1", Stage::Left { why: "is off".to_owned() });
        assert_eq!(idle.next(0, false, Gate::Closed(9)), Next::Hold(9));
        assert_eq!(idle.next(9, false, Gate::Open), Next::Finish);
        // A machine that is being moved arrives, and the next one waits.
        roll.set("pc-1", Stage::Moving);
        assert_eq!(roll.next(0, false, Gate::Closed(9)), Next::Move(vec![roll.members[0].clone()]));
        roll.set("pc-1", Stage::Healthy);
        assert_eq!(roll.next(0, false, Gate::Closed(9)), Next::Hold(9));
        assert!(roll.has_begun());
        roll.waits_until_ms = Some(0);
        assert_eq!(roll.in_words(), "waits until 1970-01-01 00:00:00Z; 1 of 3 machines on debian@2");
        // A failed canary is moved back at once, and not in the next window.
        roll.set("pc-1", Stage::Failed { why: "is ill".to_owned() });
        let back = Next::DecideReturn("the canary pc-1 is ill".to_owned());
        assert_eq!(roll.next(0, false, Gate::Closed(9)), back);
        roll.back = Some("it is ill".to_owned());
        assert_eq!(roll.next(0, false, Gate::Closed(9)), Next::Return(vec![roll.members[0].clone()]));
        // The end needs no window.
        let mut roll = plan(1, request(0, "1", 0));
        roll.set("pc-1", Stage::Healthy);
        assert_eq!(roll.next(0, false, Gate::Closed(9)), Next::Finish);
        assert_eq!(roll.next(0, true, Gate::Closed(9)), Next::DecideReturn(CANCELLED.to_owned()));
    }

    /// Applies answers: after the deadline, nobody who is logged in is sent away.
    fn hear(roll: &mut Plan, answers: &[(Member, Option<usize>)], now_ms: u64) {
        roll.heard(answers, now_ms);
        let is_over = roll.deadline_ms.is_some_and(|end_ms| end_ms <= now_ms);
        let moving = roll.names(|stage| *stage == Stage::Moving);
        for (member, users) in answers.iter().filter(|_| is_over) {
            assert!(*users == Some(0) || !moving.contains(&member.machine), "{roll:?}");
        }
    }

    /// Random rolls, with daemons that end at any step: at the end each machine runs one of the two versions, all of
    /// them the same unless failures are allowed, and never more than a batch were moved at once.
    #[test]
    fn random_rolls_end_with_all_machines_on_one_version() {
        let mut seed = 7u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for round in 0..10_000 {
            let (machines, canary, batch) = (draw(12), draw(4), 1 + draw(5));
            let allowed = draw(3);
            let mut request =
                request(u32::try_from(canary).unwrap(), &batch.to_string(), u32::try_from(allowed).unwrap());
            // In every second roll, users may be logged in.
            request.wait_idle_s = (round % 2 == 1).then_some(60);
            let mut roll = plan(usize::try_from(machines).unwrap(), request);
            roll.deadline_ms = (draw(2) == 0).then_some(100_000);
            let mut now_ms = 0;
            let mut steps = 0;
            let end = loop {
                steps += 1;
                assert!(steps < 500, "round {round} does not end: {roll:?}");
                // The window opens and closes at any step.
                let gate = if draw(4) == 0 { Gate::Closed(1) } else { Gate::Open };
                let next = roll.next(now_ms, draw(60) == 0 && roll.back.is_none(), gate);
                // The daemon ends before or after it recorded a step, and continues from the row.
                let ends = draw(10) == 0;
                match next {
                    Next::Move(list) => {
                        let list = names(&list);
                        let moving = roll.names(|stage| *stage == Stage::Moving);
                        assert!(list.len() <= usize::try_from(batch.max(canary)).unwrap(), "round {round}");
                        assert!(moving.iter().all(|machine| list.contains(machine)), "round {round}");
                        list.iter().for_each(|machine| roll.set(machine, Stage::Moving));
                        let is_new = moving.is_empty();
                        assert!(!is_new || gate == Gate::Open, "round {round}");
                        assert!(!is_new || roll.request.wait_idle_s.is_none(), "round {round}");
                        if !ends {
                            for machine in list {
                                let why = "is ill".to_owned();
                                let stage = match draw(8) {
                                    0 => Stage::Failed { why },
                                    // Its node was away, so its users are asked again.
                                    1 if roll.request.wait_idle_s.is_some() => Stage::Pending,
                                    _ => Stage::Healthy,
                                };
                                roll.set(&machine, stage);
                            }
                        }
                    }
                    Next::Return(list) => {
                        let list = names(&list);
                        let stage = if ends { Stage::Returning } else { Stage::Returned };
                        list.iter().for_each(|machine| roll.set(machine, stage.clone()));
                    }
                    Next::DecideReturn(why) => roll.back = Some(why),
                    Next::Ask(list) => {
                        assert_eq!(gate, Gate::Open, "round {round}");
                        let answers = list.into_iter().map(|it| {
                            let users = [Some(0), Some(0), Some(1), None][usize::try_from(draw(4)).unwrap()];
                            (it, users)
                        });
                        let answers: Vec<_> = answers.collect();
                        hear(&mut roll, &answers, now_ms);
                        let moving = roll.count(|stage| *stage == Stage::Moving);
                        assert!(moving <= usize::try_from(batch.max(canary)).unwrap(), "round {round}");
                    }
                    Next::Wait(until_ms) => {
                        assert!(roll.request.wait_idle_s.is_some(), "there is no pause");
                        now_ms = until_ms;
                    }
                    Next::Hold(_) => assert_eq!(gate, Gate::Closed(1), "round {round}"),
                    end => break end,
                }
                let stored = serde_json::to_string(&roll).unwrap();
                assert_eq!(serde_json::from_str::<Plan>(&stored).unwrap(), roll);
            };
            let of = |wanted: fn(&Stage) -> bool| roll.count(wanted);
            let failed = of(|stage| matches!(stage, Stage::Failed { .. }));
            match end {
                Next::Finish => {
                    let left = of(|stage| matches!(stage, Stage::Left { .. }));
                    assert!(left == 0 || roll.deadline_ms.is_some_and(|end_ms| end_ms <= now_ms));
                    assert_eq!(of(|stage| *stage == Stage::Healthy) + failed + left, roll.members.len());
                    assert!(failed <= usize::try_from(allowed).unwrap());
                }
                Next::Returned(_) => {
                    let is_untouched = |stage: &Stage| {
                        matches!(
                            stage,
                            Stage::Pending | Stage::Returned | Stage::InUse(_) | Stage::Left { .. }
                        )
                    };
                    let untouched = of(is_untouched);
                    assert_eq!(untouched, roll.members.len(), "round {round}: {roll:?}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
