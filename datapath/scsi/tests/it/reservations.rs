//! Persistent reservations of several nexuses, compared with a model after the standard's tables; and the
//! data of PERSISTENT RESERVE IN.

use std::collections::BTreeMap;

use crate::session::{self, Answer, LUN, initiator, read10, send, target, target_with, ten, write10};
use headwater_scsi::{Function, Nexus, Options, Status};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER_AND_IGNORE: u8 = 6;

const NEXUSES: usize = 4;

/// The reservations, by number of the nexus.
#[derive(Default)]
struct Model {
    generation: u32,
    keys: BTreeMap<usize, u64>,
    /// Type, and the holder unless it is all registrants.
    held: Option<(u8, Option<usize>)>,
    attentions: [Vec<u16>; NEXUSES],
}

const CONFLICT: Answer = Answer { status: Status::ReservationConflict, sense: (0, 0), data: Vec::new() };

impl Model {
    fn holds(&self, who: usize) -> bool {
        match self.held {
            None => false,
            Some((_, Some(holder))) => holder == who,
            Some((_, None)) => self.keys.contains_key(&who),
        }
    }

    fn add_attention(&mut self, who: impl Iterator<Item = usize>, code: u16) {
        for who in who {
            if !self.attentions[who].contains(&code) {
                self.attentions[who].push(code);
            }
        }
    }

    fn others(&self, me: usize) -> Vec<usize> {
        self.keys.keys().copied().filter(|who| *who != me).collect()
    }

    fn unregister(&mut self, who: usize) {
        let held = self.holds(who);
        self.keys.remove(&who);
        let Some((kind, holder)) = self.held.filter(|_| held) else { return };
        if holder.is_none() && !self.keys.is_empty() {
            return;
        }
        self.held = None;
        if kind >= 5 {
            let others = self.others(who);
            self.add_attention(others.into_iter(), 0x2a04);
        }
    }

    fn out(&mut self, me: usize, action: u8, kind: u8, key: u64, other_key: u64) -> Answer {
        let good = Answer::good(vec![]);
        let mine = self.keys.get(&me).copied();
        if matches!(action, REGISTER | REGISTER_AND_IGNORE) {
            if action == REGISTER && mine.unwrap_or(0) != key {
                return CONFLICT;
            }
            match (mine, other_key) {
                (None, 0) => {}
                (Some(_), 0) => self.unregister(me),
                _ => drop(self.keys.insert(me, other_key)),
            }
            self.generation += 1;
            return good;
        }
        if mine != Some(key) {
            return CONFLICT;
        }
        let kind_is_known = [1, 3, 5, 6, 7, 8].contains(&kind);
        match action {
            RESERVE => {
                if !kind_is_known {
                    return Answer::check(5, 0x2400);
                }
                match self.held {
                    None => self.held = Some((kind, (kind < 7).then_some(me))),
                    Some((old, _)) if old == kind && self.holds(me) => {}
                    Some(_) => return CONFLICT,
                }
                good
            }
            RELEASE => {
                if !self.holds(me) {
                    return good;
                }
                let (old, _) = self.held.unwrap();
                if old != kind {
                    return Answer::check(5, 0x2604);
                }
                self.held = None;
                if old >= 5 {
                    let others = self.others(me);
                    self.add_attention(others.into_iter(), 0x2a04);
                }
                good
            }
            CLEAR => {
                let others = self.others(me);
                self.add_attention(others.into_iter(), 0x2a03);
                self.keys.clear();
                self.held = None;
                self.generation += 1;
                good
            }
            _ => self.preempt(me, kind, kind_is_known, other_key),
        }
    }

    fn preempt(&mut self, me: usize, kind: u8, kind_is_known: bool, victim: u64) -> Answer {
        if !kind_is_known {
            return Answer::check(5, 0x2400);
        }
        let takes_over = match self.held {
            None => false,
            Some((_, None)) => victim == 0,
            Some((_, Some(holder))) => self.keys[&holder] == victim,
        };
        if victim == 0 && !takes_over {
            return Answer::check(5, 0x2600);
        }
        let meant: Vec<usize> = match (takes_over, self.held) {
            (true, Some((_, None))) => self.others(me),
            (true, _) => self.others(me).into_iter().filter(|who| self.keys[who] == victim).collect(),
            (false, _) => self.keys.iter().filter(|(_, key)| **key == victim).map(|(who, _)| *who).collect(),
        };
        if meant.is_empty() && !takes_over {
            return CONFLICT;
        }
        if takes_over {
            let (old, _) = self.held.unwrap();
            self.keys.retain(|who, _| !meant.contains(who));
            self.add_attention(meant.iter().copied(), 0x2a05);
            if old != kind {
                let others = self.others(me);
                self.add_attention(others.into_iter(), 0x2a04);
            }
            self.held = Some((kind, (kind < 7).then_some(me)));
        } else {
            for who in &meant {
                self.unregister(*who);
                if *who != me {
                    self.add_attention([*who].into_iter(), 0x2a05);
                }
            }
        }
        self.generation += 1;
        Answer::good(vec![])
    }

    /// Whether this nexus may read, and whether it may write.
    fn access(&self, who: usize) -> (bool, bool) {
        let Some((kind, _)) = self.held else { return (true, true) };
        let full = if kind < 5 { self.holds(who) } else { self.keys.contains_key(&who) };
        let reading_is_free = matches!(kind, 1 | 5 | 7);
        (full || reading_is_free, full)
    }

    fn reservation(&self) -> Vec<u8> {
        let mut data = self.generation.to_be_bytes().to_vec();
        let Some((kind, holder)) = self.held else { return [data, vec![0; 4]].concat() };
        data.extend([0, 0, 0, 16]);
        data.extend(holder.map_or(0, |holder| self.keys[&holder]).to_be_bytes());
        data.extend([0, 0, 0, 0, 0, kind, 0, 0]);
        data
    }
}

fn out(nexus: &Nexus, action: u8, kind: u8, key: u64, other_key: u64) -> Answer {
    let list = [&key.to_be_bytes()[..], &other_key.to_be_bytes(), &[0; 8]].concat();
    send(nexus, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list)
}

fn report(nexus: &Nexus, action: u8) -> Vec<u8> {
    send(nexus, &[0x5e, action, 0, 0, 0, 0, 0, 0x10, 0, 0], &[]).data
}

/// Takes all unit attentions.
fn take_attentions(nexus: &Nexus) -> Vec<u16> {
    let mut codes = Vec::new();
    loop {
        match send(nexus, &[0; 6], &[]).sense {
            (0, 0) => return codes,
            (key, code) => {
                assert_eq!(key, 6);
                codes.push(code);
            }
        }
    }
}

#[test]
fn random_actions_of_several_nexuses() {
    for seed in 0..12 {
        let target = target(64, ReferenceOptions::default());
        // The last two sessions are of one initiator port. Both act.
        let names = ["a", "b", "c", "d"];
        let nexuses: Vec<Nexus> = names.iter().map(|name| target.nexus(initiator(name))).collect();
        let mut model = Model::default();
        let mut rng = Rng::new(seed);
        let mut good = 0;
        for number in 0..400 {
            let me = rng.index(NEXUSES);
            let action = *[0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6].get(rng.index(11)).unwrap();
            let kind = if rng.chance(1, 12) { rng.below(16) as u8 } else { [1, 3, 5, 6, 7, 8][rng.index(6)] };
            let current = model.held.map_or(kind, |(kind, _)| kind);
            let kind = if action == RELEASE && rng.chance(2, 3) { current } else { kind };
            let mut key = rng.below(3);
            if rng.chance(3, 4) {
                key = model.keys.get(&me).copied().unwrap_or(0);
            }
            let other_key = rng.below(4);
            let what =
                format!("seed {seed}, {number}: {} does {action} type {kind} {key} {other_key}", names[me]);
            let expected = model.out(me, action, kind, key, other_key);
            let answer = out(&nexuses[me], action, kind, key, other_key);
            assert_eq!(answer, expected, "{what}");
            good += usize::from(expected.status == Status::Good);
            for (who, nexus) in nexuses.iter().enumerate() {
                let mut expected = std::mem::take(&mut model.attentions[who]);
                let mut actual = take_attentions(nexus);
                expected.sort_unstable();
                actual.sort_unstable();
                assert_eq!(actual, expected, "{what}: attentions of {}", names[who]);
                let may = |cdb: &[u8], data: &[u8]| send(nexus, cdb, data).status == Status::Good;
                let actual = (may(&read10(0, 1), &[]), may(&write10(0, 1), &[0; 512]));
                assert_eq!(actual, model.access(who), "{what}: access of {}", names[who]);
            }
            assert_eq!(report(&nexuses[0], 1), model.reservation(), "{what}");
            let mut keys: Vec<u64> = report(&nexuses[1], 0)[8..]
                .chunks(8)
                .map(|k| u64::from_be_bytes(k.try_into().unwrap()))
                .collect();
            let mut expected: Vec<u64> = model.keys.values().copied().collect();
            keys.sort_unstable();
            expected.sort_unstable();
            assert_eq!(keys, expected, "{what}");
        }
        assert!(good > 100, "seed {seed}: only {good} actions were good");
    }
}

#[test]
fn persistent_reserve_in_reports_the_state() {
    let target = target(64, ReferenceOptions::default());
    let (a, b) = (target.nexus(initiator("aa")), target.nexus(initiator("bb")));
    assert_eq!(report(&a, 0), [0; 8]);
    assert_eq!(report(&a, 2), [0, 8, 0, 0x80, 0xea, 1, 0, 0]);
    assert_eq!(out(&a, REGISTER, 0, 0, 0x11), Answer::good(vec![]));
    assert_eq!(out(&b, REGISTER_AND_IGNORE, 0, 5, 0x22), Answer::good(vec![]));
    assert_eq!(out(&b, RESERVE, 5, 0x22, 0), Answer::good(vec![]));
    let key = |key: u8| [0, 0, 0, 0, 0, 0, 0, key];
    assert_eq!(report(&a, 0), [&[0, 0, 0, 2, 0, 0, 0, 16][..], &key(0x11), &key(0x22)].concat());
    let reservation = [&[0, 0, 0, 2, 0, 0, 0, 16][..], &key(0x22), &[0, 0, 0, 0, 0, 5, 0, 0]].concat();
    assert_eq!(report(&a, 1), reservation);
    let first = [&key(0x11)[..], &[0; 10], &[0, 1, 0, 0, 0, 8], b"\x45\0\0\0aa\0\0"].concat();
    let second =
        [&key(0x22)[..], &[0, 0, 0, 0, 1, 5, 0, 0, 0, 0], &[0, 1, 0, 0, 0, 8], b"\x45\0\0\0bb\0\0"].concat();
    assert_eq!(report(&b, 3), [&[0, 0, 0, 2, 0, 0, 0, 64][..], &first, &second].concat());
    // Cut to the allocation length; the additional length is that of all data.
    assert_eq!(send(&a, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 12, 0], &[]).data, report(&a, 0)[..12]);
    for action in 4..32 {
        assert_eq!(send(&a, &[0x5e, action, 0, 0, 0, 0, 0, 0, 99, 0], &[]), Answer::check(5, 0x2400));
        if action > 6 {
            assert_eq!(out(&a, action, 1, 0x11, 0), Answer::check(5, 0x2400));
        }
    }
}

#[test]
fn registrations_belong_to_the_port_and_outlive_its_session() {
    let target = target(64, ReferenceOptions::default());
    let a = target.nexus(initiator("a"));
    let b = target.nexus(initiator("b"));
    assert_eq!(out(&a, REGISTER, 0, 0, 7).status, Status::Good);
    assert_eq!(out(&a, RESERVE, 3, 7, 0).status, Status::Good);
    drop(a);
    assert_eq!(send(&b, &read10(0, 1), &[]), Answer::conflict());
    let again = target.nexus(initiator("a"));
    assert_eq!(send(&again, &read10(0, 1), &[]).status, Status::Good);
    // For reservations, another target port of the same target is another nexus.
    let elsewhere = target.nexus(headwater_scsi::Initiator { target_port: 2, ..initiator("a") });
    assert_eq!(send(&elsewhere, &read10(0, 1), &[]), Answer::conflict());
    assert_eq!(out(&again, REGISTER, 0, 7, 0).status, Status::Good);
    assert_eq!(send(&b, &read10(0, 1), &[]).status, Status::Good);
}

#[test]
fn a_unit_of_two_targets_has_its_reservations_once() {
    let options = Options { power_on_attention: false, ..Options::default() };
    let disk = std::sync::Arc::new(ReferenceDisk::new(1 << 20));
    let unit = headwater_scsi::LogicalUnit::new(disk, session::identity(), options);
    let target = |name: &str| headwater_scsi::Target::new(name, vec![(0, std::sync::Arc::clone(&unit))]);
    let at = |name: &str| {
        let target_port_name = format!("{name},t,0x0001");
        target(name).nexus(headwater_scsi::Initiator { target_port_name, ..initiator("a") })
    };
    let (one, two) = (at("one"), at("two"));
    assert_eq!(out(&one, REGISTER, 0, 0, 7).status, Status::Good);
    assert_eq!(out(&one, RESERVE, 1, 7, 0).status, Status::Good);
    assert_eq!(send(&two, &read10(0, 1), &[]).status, Status::Good);
    assert_eq!(send(&two, &write10(0, 1), &[0; 512]), Answer::conflict());
    assert_eq!(out(&two, REGISTER, 0, 0, 8).status, Status::Good);
    assert_eq!(report(&one, 0)[4..8], [0, 0, 0, 16]);
    assert_eq!(out(&two, PREEMPT, 1, 8, 7).status, Status::Good);
    assert_eq!(take_attentions(&one), [0x2a05]);
    assert_eq!(send(&one, &write10(0, 1), &[0; 512]), Answer::conflict());
}

#[test]
fn parameter_lists_that_are_refused() {
    let target = target(64, ReferenceOptions::default());
    let nexus = target.nexus(initiator("a"));
    let list = |flags: u8| {
        let mut list = [0; 24];
        (list[15], list[20]) = (1, flags);
        list
    };
    let cdb = |len: u8| [0x5f, 0, 0, 0, 0, 0, 0, 0, len, 0];
    // SPEC_I_PT, ALL_TG_PT, APTPL.
    for flags in [0x08, 0x04, 0x01] {
        assert_eq!(send(&nexus, &cdb(24), &list(flags)), Answer::check(5, 0x2600));
    }
    assert_eq!(send(&nexus, &cdb(23), &list(0)[..23]), Answer::check(5, 0x1a00));
    assert_eq!(send(&nexus, &cdb(24), &list(0)[..20]), Answer::check(5, 0x1a00));
    assert_eq!(send(&nexus, &cdb(0), &[]), Answer::check(5, 0x1a00));
    assert_eq!(report(&nexus, 0)[4..], [0; 4]);
}

#[test]
fn the_old_and_the_persistent_reservations_exclude_each_other() {
    let target = target(64, ReferenceOptions::default());
    let (a, b) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
    let (reserve, release) = ([0x16, 0, 0, 0, 0, 0], [0x17, 0, 0, 0, 0, 0]);
    assert_eq!(send(&a, &reserve, &[]).status, Status::Good);
    assert_eq!(send(&a, &reserve, &[]).status, Status::Good);
    for cdb in [&reserve[..], &[0; 6], &read10(0, 1), &[0x25], &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0]] {
        assert_eq!(send(&b, cdb, &[]), Answer::conflict(), "{cdb:?}");
    }
    assert_eq!(out(&b, REGISTER, 0, 0, 1), Answer::conflict());
    assert_eq!(send(&b, &[0x12, 0, 0, 0, 96, 0], &[]).status, Status::Good);
    assert_eq!(send(&b, &release, &[]).status, Status::Good);
    assert_eq!(send(&b, &[0; 6], &[]), Answer::conflict(), "a release by another does nothing");
    assert_eq!(send(&a, &release, &[]).status, Status::Good);
    assert_eq!(out(&b, REGISTER, 0, 0, 1).status, Status::Good);
    assert_eq!(send(&a, &reserve, &[]), Answer::conflict());
    assert_eq!(send(&b, &release, &[]), Answer::conflict());
}

#[test]
fn commands_beside_a_reservation() {
    let write_exclusive = |kind: u8| [1, 5, 7].contains(&kind);
    for kind in [1, 3, 5, 6, 7, 8] {
        let target = target(64, ReferenceOptions::default());
        let (holder, stranger) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
        assert_eq!(out(&holder, REGISTER, 0, 0, 7).status, Status::Good);
        assert_eq!(out(&holder, RESERVE, kind, 7, 0).status, Status::Good);
        let always: [&[u8]; 8] = [
            &[0; 6],
            &[0x12, 0, 0, 0, 96, 0],
            &[0x03, 0, 0, 0, 18, 0],
            &[0xa0, 0, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0],
            &[0x25],
            &[0x5e, 1, 0, 0, 0, 0, 0, 0, 99, 0],
            &[0x1b, 0, 0, 0, 1, 0],
            &[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0],
        ];
        for cdb in always {
            assert_eq!(send(&stranger, cdb, &[]).status, Status::Good, "type {kind}, {cdb:x?}");
        }
        let reading: [&[u8]; 5] = [
            &read10(0, 1),
            &ten(0x2f, 0, 0, 1),
            &ten(0x34, 0, 0, 1),
            &[0x1a, 0, 8, 0, 255, 0],
            &ten(0x37, 0, 0, 8),
        ];
        for cdb in reading {
            let good = send(&stranger, cdb, &[]).status == Status::Good;
            assert_eq!(good, write_exclusive(kind), "type {kind}, {cdb:x?}");
        }
        let writing: [&[u8]; 6] = [
            &write10(0, 1),
            &ten(0x2e, 0, 0, 1),
            &ten(0x41, 0, 0, 1),
            &ten(0x42, 0, 0, 8),
            &ten(0x35, 0, 0, 0),
            &[0x15, 0x10, 0, 0, 0, 0],
        ];
        for cdb in writing {
            assert_eq!(send(&stranger, cdb, &[0; 512]), Answer::conflict(), "type {kind}, {cdb:x?}");
            assert_ne!(send(&holder, cdb, &[0; 512]), Answer::conflict(), "type {kind}, {cdb:x?}");
        }
    }
}

#[test]
fn preempt_and_abort_ends_the_tasks_of_the_preempted() {
    let options = ReferenceOptions { waits: headwater_testkit::Waits::Always, ..ReferenceOptions::default() };
    let disk = std::sync::Arc::new(ReferenceDisk::with_options(1 << 20, options));
    let target = session::target_on(&disk, Options::default());
    let (a, b) = (target.nexus(initiator("a")), target.nexus(initiator("b")));
    assert_eq!(out(&a, REGISTER, 0, 0, 1).status, Status::Good);
    assert_eq!(out(&b, REGISTER, 0, 0, 2).status, Status::Good);
    disk.hold();
    let cdb = headwater_scsi::Cdb::new(&read10(0, 1));
    let (mine, theirs) = (session::start(&a, LUN, &cdb, &[], 1), session::start(&b, LUN, &cdb, &[], 1));
    let list = [1_u64.to_be_bytes(), 2_u64.to_be_bytes(), [0; 8]].concat();
    let preempt = headwater_scsi::Cdb::new(&[0x5f, PREEMPT_AND_ABORT, 1, 0, 0, 0, 0, 0, 24, 0]);
    let preempt = session::start(&a, LUN, &preempt, &list, 2);
    assert!(preempt.try_recv().is_err(), "the preempted task is still at the disk");
    disk.release();
    assert_eq!(session::wait(&theirs).reply, None);
    assert_eq!(session::wait(&preempt).reply.map(|reply| reply.status), Some(Status::Good));
    assert!(session::wait(&mine).reply.is_some());
    assert_eq!(take_attentions(&b), [0x2a05]);
    assert_eq!(report(&a, 0)[8..], 1_u64.to_be_bytes());
}

#[test]
fn there_is_a_limit_to_registrations() {
    let target = target_with(ReferenceDisk::new(1 << 20), Options::default());
    let nexuses: Vec<Nexus> = (0..257).map(|n| target.nexus(initiator(&format!("{n}")))).collect();
    for nexus in &nexuses[..256] {
        assert_eq!(out(nexus, REGISTER, 0, 0, 1).status, Status::Good);
    }
    assert_eq!(out(&nexuses[256], REGISTER, 0, 0, 1), Answer::check(5, 0x5504));
    assert_eq!(out(&nexuses[0], REGISTER, 0, 1, 0).status, Status::Good);
    assert_eq!(out(&nexuses[256], REGISTER, 0, 0, 1).status, Status::Good);
    nexuses[0].manage(Function::LogicalUnitReset { lun: LUN }, |_| {});
    assert_eq!(out(&nexuses[256], CLEAR, 0, 1, 0), Answer::check(6, 0x2903));
    assert_eq!(out(&nexuses[256], PREEMPT, 1, 1, 9), CONFLICT);
    assert_eq!(out(&nexuses[256], CLEAR, 0, 1, 0).status, Status::Good);
    assert_eq!(report(&nexuses[256], 0)[4..], [0; 4]);
}
