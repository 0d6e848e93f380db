//! Decides which machines of a pool are started and switched off. A pure function.
//!
//! ```text
//!   wanted = --keep-ready within the hours, else 0; plus a machine for each claim that waits.
//!   fewer are ready  --> machines that are off are started, a few at a time.
//!   more are ready   --> machines that are too many for longer than --stop-idle are switched off.
//! ```
//! A machine that is claimed, or that somebody has used, is never switched off here.

use std::collections::HashMap;

use uuid::Uuid;

/// The most machines of one catalog that are being started, and that are being switched off, at the same time.
pub(super) const AT_A_TIME: usize = 4;

/// The state of a machine of a pool, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberState {
    /// It can be started. A machine whose last run crashed may crash again, so others are preferred.
    Off { has_crashed: bool },
    /// It is being started.
    Starting,
    /// It is on, and nobody has used it.
    Free,
    /// It is being switched off.
    Stopping,
    /// It is claimed or was used, or it cannot be started now.
    Other,
}

/// A machine of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) uuid: Uuid,
    pub(super) name: String,
    pub(super) state: MemberState,
}

/// A catalog with machines to keep ready, at one instant.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    /// The number of machines that should be ready.
    pub(super) wanted: usize,
    /// The reason for this number, in words.
    pub(super) why: String,
    /// How long a surplus machine stays on. `None`: forever.
    pub(super) stop_idle_ms: Option<u64>,
    /// The machines, in natural order of their names.
    pub(super) machines: Vec<Member>,
}

/// What to do with a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Start,
    Stop,
}

/// A step, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) action: Action,
    pub(super) machine: Uuid,
    pub(super) name: String,
    pub(super) why: String,
}

/// The steps to take at this instant. `excess_since` maps each machine that was surplus at the last call to the time since
/// when it is; the call updates it.
pub(super) fn plan(pool: &Pool, now_ms: u64, excess_since: &mut HashMap<Uuid, u64>) -> Vec<Step> {
    let count = |is: fn(&MemberState) -> bool| pool.machines.iter().filter(|it| is(&it.state)).count();
    let starting = count(|state| *state == MemberState::Starting);
    let ready = starting + count(|state| *state == MemberState::Free);
    let step = |action, member: &Member, why: String| Step {
        action,
        machine: member.uuid,
        name: member.name.clone(),
        why,
    };
    if ready < pool.wanted {
        excess_since.clear();
        let mut off: Vec<(&Member, bool)> = pool
            .machines
            .iter()
            .filter_map(|member| match member.state {
                MemberState::Off { has_crashed } => Some((member, has_crashed)),
                _ => None,
            })
            .collect();
        off.sort_by_key(|(_, has_crashed)| *has_crashed);
        let missing = (pool.wanted - ready).min(AT_A_TIME.saturating_sub(starting));
        let why = format!("{ready} of {} are ready: {}", pool.wanted, pool.why);
        return off.into_iter().take(missing).map(|(it, _)| step(Action::Start, it, why.clone())).collect();
    }
    let mut free: Vec<&Member> =
        pool.machines.iter().rev().filter(|member| member.state == MemberState::Free).collect();
    // Prefer machines that were surplus before, else none would be surplus for long; then those with the highest numbers.
    free.sort_by_key(|member| excess_since.get(&member.uuid).copied().unwrap_or(u64::MAX));
    // Of surplus machines, those that are still starting are listed first.
    let excess: Vec<&Member> = free.into_iter().take(ready - pool.wanted).collect();
    let since: HashMap<Uuid, u64> = excess
        .iter()
        .map(|member| (member.uuid, excess_since.get(&member.uuid).copied().unwrap_or(now_ms)))
        .collect();
    *excess_since = since;
    let Some(stop_idle_ms) = pool.stop_idle_ms else { return Vec::new() };
    let stopping = count(|state| *state == MemberState::Stopping);
    let is_due = |member: &&&Member| {
        let since = excess_since.get(&member.uuid).copied().unwrap_or(now_ms);
        now_ms.saturating_sub(since) >= stop_idle_ms
    };
    let why = format!("{ready} are ready and {} are wanted: {}", pool.wanted, pool.why);
    let due = excess.iter().filter(is_due).take(AT_A_TIME.saturating_sub(stopping));
    due.map(|member| step(Action::Stop, member, why.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(wanted: usize, stop_idle_ms: Option<u64>, states: &[MemberState]) -> Pool {
        let member = |(number, state): (usize, &MemberState)| Member {
            uuid: Uuid::from_u128(u128::try_from(number).unwrap()),
            name: format!("pc-{number}"),
            state: *state,
        };
        let machines = states.iter().enumerate().map(member).collect();
        Pool { wanted, why: "test".to_owned(), stop_idle_ms, machines }
    }

    fn words(steps: &[Step]) -> Vec<String> {
        let verb = |step: &Step| if step.action == Action::Start { "start" } else { "stop" };
        steps.iter().map(|step| format!("{} {}", verb(step), step.name)).collect()
    }

    const OFF: MemberState = MemberState::Off { has_crashed: false };
    const CRASHED: MemberState = MemberState::Off { has_crashed: true };
    use MemberState::{Free, Other, Starting, Stopping};

    #[test]
    fn each_state_has_its_steps() {
        // Wanted machines, idle time, states, and the expected steps now and after the idle time.
        type Row =
            (usize, Option<u64>, &'static [MemberState], &'static [&'static str], &'static [&'static str]);
        let table: &[Row] = &[
            (0, Some(10), &[], &[], &[]),
            (2, Some(10), &[OFF, OFF, OFF], &["start pc-0", "start pc-1"], &["start pc-0", "start pc-1"]),
            (2, None, &[Free, Free], &[], &[]),
            (2, Some(10), &[Free, Starting, OFF], &[], &[]),
            (2, Some(10), &[Free, Other, OFF], &["start pc-2"], &["start pc-2"]),
            (1, Some(10), &[CRASHED, OFF], &["start pc-1"], &["start pc-1"]),
            (1, Some(10), &[CRASHED, Other], &["start pc-0"], &["start pc-0"]),
            (
                9,
                Some(10),
                &[OFF; 9],
                &["start pc-0", "start pc-1", "start pc-2", "start pc-3"],
                &["start pc-0", "start pc-1", "start pc-2", "start pc-3"],
            ),
            (9, Some(10), &[Starting, Starting, Starting, OFF, OFF], &["start pc-3"], &["start pc-3"]),
            (0, Some(10), &[Free, Free], &[], &["stop pc-1", "stop pc-0"]),
            (1, Some(10), &[Free, Free], &[], &["stop pc-1"]),
            (0, None, &[Free, Free], &[], &[]),
            (0, Some(10), &[Other, Free, Stopping], &[], &["stop pc-1"]),
            (0, Some(10), &[Starting], &[], &[]),
            (0, Some(10), &[Free; 9], &[], &["stop pc-8", "stop pc-7", "stop pc-6", "stop pc-5"]),
            (0, Some(0), &[Free], &["stop pc-0"], &["stop pc-0"]),
        ];
        for (number, (wanted, stop_idle_ms, states, at_once, later)) in table.iter().enumerate() {
            let pool = pool(*wanted, *stop_idle_ms, states);
            let mut since = HashMap::new();
            assert_eq!(words(&plan(&pool, 100, &mut since)), *at_once, "row {number}");
            assert_eq!(words(&plan(&pool, 110, &mut since)), *later, "row {number}");
        }
    }

    #[test]
    fn a_machine_that_is_wanted_again_waits_its_whole_time() {
        let mut since = HashMap::new();
        let few = pool(0, Some(10), &[Free, Free]);
        assert!(plan(&few, 0, &mut since).is_empty());
        assert!(plan(&pool(2, Some(10), &[Free, Free]), 9, &mut since).is_empty());
        assert!(plan(&few, 10, &mut since).is_empty());
        assert!(plan(&few, 19, &mut since).is_empty());
        assert_eq!(words(&plan(&few, 20, &mut since)), ["stop pc-1", "stop pc-0"]);
    }

    #[test]
    fn reasons_say_how_many_and_why() {
        let mut since = HashMap::new();
        let steps = plan(&pool(1, Some(0), &[OFF]), 0, &mut since);
        assert_eq!(steps[0].why, "0 of 1 are ready: test");
        let steps = plan(&pool(0, Some(0), &[Free]), 0, &mut since);
        assert_eq!(steps[0].why, "1 are ready and 0 are wanted: test");
    }

    /// Random pools in which steps take their time, users come and go, and the wanted number changes: a stop never leaves
    /// fewer than the wanted number, only free machines are switched off, and the pool becomes stable.
    #[test]
    fn random_pools_come_to_rest_with_as_many_as_wanted() {
        let mut seed = 11u64;
        let mut draw = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(seed >> 33).unwrap() % below
        };
        for round in 0..2_000 {
            let mut states: Vec<MemberState> = (0..1 + draw(12)).map(|_| OFF).collect();
            let mut since = HashMap::new();
            let mut wanted = draw(8);
            for step in 0..200 {
                let now_ms = u64::try_from(step).unwrap() * 10;
                // First everything changes at random, later only the steps change anything.
                let is_calm = step > 80;
                if !is_calm && draw(10) == 0 {
                    wanted = draw(8);
                }
                for state in &mut states {
                    *state = match *state {
                        Starting if is_calm || draw(3) == 0 => Free,
                        Stopping if is_calm || draw(3) == 0 => OFF,
                        Free if !is_calm && draw(15) == 0 => Other,
                        Other if is_calm || draw(5) == 0 => OFF,
                        state => state,
                    };
                }
                let steps = plan(&pool(wanted, Some(50), &states), now_ms, &mut since);
                let ready = states.iter().filter(|state| matches!(state, Free | Starting)).count();
                for step in steps {
                    let at = usize::try_from(step.machine.as_u128()).unwrap();
                    match (step.action, states[at]) {
                        (Action::Start, MemberState::Off { .. }) => states[at] = Starting,
                        (Action::Stop, Free) => states[at] = Stopping,
                        odd => panic!("round {round}: {odd:?}"),
                    }
                }
                let after = states.iter().filter(|state| matches!(state, Free | Starting)).count();
                assert!(after >= ready.min(wanted), "round {round}");
                assert!(after <= ready.max(wanted), "round {round}");
            }
            let free = states.iter().filter(|state| **state == Free).count();
            assert_eq!(free, wanted.min(states.len()), "round {round}: {states:?}");
        }
    }
}
