//! Decides which server sent wrong bytes, for an object whose hash is checked only after all of it was read.
//! A range that a server lists as a hole counts as read from that server.
//!
//! *Holes* are ranges of an object whose bytes a server deleted, because none of its versions needs them.
//!
//! | the object was wrong, and | consequence |
//! |---|---|
//! | it was the first read | no server is blamed: HTTP caches on the way may have old bytes of holes, or other wrong bytes. The object is read again, bypassing caches, and from one server alone, with that server's list of holes |
//! | all bytes came from the one server that was chosen, and it reports the same holes as before | that server is distrusted, and another one is chosen; if there is no other, the same server once more |
//! | the same happened a second time with the same server | that server is not asked for this object again |
//! | other servers gave parts of it too, or the server reports other holes now | no server is blamed; another server is chosen |
//! | a part of it came from an earlier copy, or could not be read | no server can be blamed; it is read again from its start, and another server is chosen |
//! | servers report other holes now, or do not report them | no server is blamed; it is read again |

use std::collections::{BTreeMap, BTreeSet};

use crate::hole_lists::HoleLists;

/// The most readings of a whole object, for each server plus this number, before the read fails.
const ROUNDS_MAX: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Blame {
    read_bytes: u64,
    from: BTreeSet<usize>,
    /// The server that was chosen to give the whole object.
    giver: Option<usize>,
    /// Servers that were chosen before, and after which the object was wrong. The one chosen longest ago is
    /// first.
    before: Vec<usize>,
    /// Servers that gave wrong bytes of it once.
    wrong: BTreeSet<usize>,
    /// Servers that gave wrong bytes of it twice; they are not asked again.
    servers_with_wrong_bytes: BTreeSet<usize>,
    /// Whether the whole object should come from one server.
    alone: bool,
    /// Whether caches are bypassed although the object was not wrong yet.
    bypass_caches: bool,
    /// How often each server was chosen to give the whole object.
    readings: BTreeMap<usize, u32>,
    rounds: u32,
}

/// Which servers to ask.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerChoice {
    /// Servers that are not asked, because they gave wrong bytes of the object twice.
    pub servers_with_wrong_bytes: BTreeSet<usize>,
    /// Servers that are not asked because the requested range is in one of their holes.
    pub without: BTreeSet<usize>,
    /// If all other servers answer that they do not have the range, `without` is asked after all, and the
    /// bytes in its holes (zeroes, or old ones) are used.
    pub or_bytes_in_holes: bool,
    /// Asks only one server at a time, without a second one if it is late.
    pub alone: bool,
    /// This server is asked while it is available.
    pub first: Option<usize>,
    /// Servers that are asked after all others, in this order.
    pub last: Vec<usize>,
    /// Asks all of them with caches bypassed, because earlier bytes were wrong.
    pub bypass_caches: bool,
    /// The attempt number of a full re-read from that server. All bytes of one re-read should come from one
    /// server.
    pub reading: Option<u32>,
}

/// The consequence of wrong bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The server that gave them, if it is known.
    pub server: Option<usize>,
    /// Whether to read the object once more.
    pub again: bool,
}

impl Blame {
    pub(crate) fn choice(&self) -> ServerChoice {
        ServerChoice {
            servers_with_wrong_bytes: self.servers_with_wrong_bytes.clone(),
            alone: self.giver.is_some(),
            first: self.giver,
            bypass_caches: self.bypass_caches || self.is_again(),
            reading: self.giver.and_then(|giver| self.readings.get(&giver).copied()),
            ..ServerChoice::default()
        }
    }

    /// Chooses the server that should give the whole object, if one should. Servers that have not been chosen
    /// yet come first, then those chosen longest ago; of several, the one with the fewest bytes in holes.
    pub(crate) fn choose_giver(&mut self, lists: &HoleLists) -> Option<usize> {
        let turn = |server: usize| {
            self.before.iter().position(|before| *before == server).map_or(0, |turn| turn + 1)
        };
        let candidates =
            lists.iter().filter(|(server, _)| self.alone && !self.servers_with_wrong_bytes.contains(server));
        let best = candidates.min_by_key(|(server, holes)| (turn(*server), holes.bytes()));
        self.giver = best.map(|(server, _)| server);
        if let Some(giver) = self.giver {
            let readings = self.readings.entry(giver).or_default();
            *readings = readings.saturating_add(1);
        }
        self.giver
    }

    /// The attempt number of the re-read, if `server` is the next one chosen to give the whole object;
    /// otherwise `None`.
    pub(crate) fn next_reading(&self, server: usize) -> Option<u32> {
        self.alone.then(|| self.readings.get(&server).copied().unwrap_or_default().saturating_add(1))
    }

    pub(crate) fn read(&mut self, server: usize, len: u64) {
        self.from.insert(server);
        self.read_bytes = self.read_bytes.saturating_add(len);
    }

    /// Bypasses caches from now on, because the holes were requested again: caches may have bytes of former
    /// holes.
    pub(crate) fn read_past_caches(&mut self) {
        self.bypass_caches = true;
    }

    /// Whether the object was wrong before.
    pub(crate) fn is_again(&self) -> bool {
        self.rounds > 0
    }

    /// The object's description changed, or may have, while the object was read. Returns whether to read it
    /// once more; `servers` is the number of servers.
    pub(crate) fn begin_again(&mut self, servers: usize) -> bool {
        self.from.clear();
        self.read_bytes = 0;
        self.rounds = self.rounds.saturating_add(1);
        self.may_be_read(servers)
    }

    fn may_be_read(&self, servers: usize) -> bool {
        let rounds = usize::try_from(self.rounds).unwrap_or(usize::MAX);
        self.servers_with_wrong_bytes.len() < servers && rounds < servers.saturating_add(ROUNDS_MAX)
    }

    /// The object was wrong, and `len_bytes` of it have been read. `servers` is the number of servers.
    /// `is_sure`: the chosen server reports exactly the holes that were skipped.
    pub(crate) fn was_wrong(&mut self, len_bytes: u64, servers: usize, is_sure: bool) -> Verdict {
        let from = std::mem::take(&mut self.from);
        let is_all = std::mem::take(&mut self.read_bytes) >= len_bytes;
        self.rounds = self.rounds.saturating_add(1);
        self.alone = true;
        let is_of_giver = |giver: &usize| is_all && is_sure && from.iter().all(|server| server == giver);
        let blamed = self.giver.filter(is_of_giver);
        if let Some(blamed) = blamed
            && !self.wrong.insert(blamed)
        {
            self.servers_with_wrong_bytes.insert(blamed);
        }
        if let Some(giver) = self.giver {
            self.before.retain(|server| *server != giver);
            self.before.push(giver);
        }
        Verdict { server: blamed, again: self.may_be_read(servers) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing_is_gone() -> HoleLists {
        (0..3).map(|server| (server, std::sync::Arc::default())).collect()
    }

    #[test]
    fn asking_one_server_alone_finds_the_wrong_one() {
        let mut whole = Blame::default();
        assert!(!whole.choice().bypass_caches && whole.choose_giver(&nothing_is_gone()).is_none());
        assert_eq!(whole.next_reading(0), None);
        // The part from an earlier copy was wrong.
        whole.read(0, 60);
        assert_eq!(whole.was_wrong(100, 3, true), Verdict { server: None, again: true });
        for server in 0..3 {
            assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(server));
            let choice = whole.choice();
            assert!(
                choice.alone && choice.bypass_caches && choice.servers_with_wrong_bytes.is_empty(),
                "{choice:?}"
            );
            assert_eq!((choice.first, choice.reading), (Some(server), Some(1)));
            assert_eq!((whole.next_reading(server), whole.next_reading(3)), (Some(2), Some(1)));
            whole.read(server, 60);
            whole.read(server, 40);
            assert_eq!(whole.was_wrong(100, 3, true), Verdict { server: Some(server), again: true });
        }
        // All servers gave wrong bytes. A partial read proves nothing, the next read may succeed, and at last
        // the read fails.
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(0));
        whole.read(0, 99);
        assert_eq!(whole.was_wrong(100, 3, true), Verdict { server: None, again: true });
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(1));
        whole.read(1, 100);
        assert_eq!(whole.was_wrong(100, 3, true), Verdict { server: Some(1), again: false });
        assert_eq!(whole.choice().servers_with_wrong_bytes, [1].into());
    }

    #[test]
    fn the_only_server_is_asked_again_after_wrong_uncached_bytes() {
        let (mut whole, one) = (Blame::default(), HoleLists::from_iter([(1, std::sync::Arc::default())]));
        for (blamed, again) in [(None, true), (Some(1), true), (Some(1), false)] {
            whole.choose_giver(&one);
            whole.read(1, 100);
            assert_eq!(whole.was_wrong(100, 1, true), Verdict { server: blamed, again });
        }
    }

    #[test]
    fn only_a_complete_and_consistent_server_is_blamed() {
        let mut whole = Blame::default();
        whole.read(1, 100);
        whole.was_wrong(100, 2, true);
        // A read failed.
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(0));
        whole.read(0, 60);
        whole.read(1, 40);
        assert_eq!(whole.was_wrong(100, 2, true), Verdict { server: None, again: true });
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(1));
        whole.read(1, 100);
        assert_eq!(whole.was_wrong(100, 2, false), Verdict { server: None, again: true });
        // The third server has not been asked for anything yet.
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(2));
        assert!(whole.choice().servers_with_wrong_bytes.is_empty());
    }

    #[test]
    fn the_server_with_the_fewest_holes_gives_the_whole_object() {
        let holes = |blocks: &[u64]| std::sync::Arc::new(headwater_store::Holes::of_blocks(blocks));
        let lists: HoleLists =
            [(0, holes(&[1, 2])), (1, holes(&[4])), (2, holes(&[5]))].into_iter().collect();
        let mut whole = Blame::default();
        assert_eq!(whole.choose_giver(&lists), None);
        for expected in [1, 2, 0] {
            whole.read(0, 50);
            whole.read(1, 50);
            assert_eq!(whole.was_wrong(100, 3, true).server, None);
            assert_eq!(whole.choose_giver(&lists), Some(expected));
        }
    }

    #[test]
    fn it_is_not_read_for_ever() {
        let mut whole = Blame::default();
        let again = |whole: &mut Blame| {
            whole.choose_giver(&nothing_is_gone());
            whole.read(0, 50);
            whole.read(1, 50);
            whole.was_wrong(100, 2, true).again
        };
        assert!((0..100).take_while(|_| again(&mut whole)).count() < 10);
        // The same happens if the reported holes differ each time.
        let mut whole = Blame::default();
        let again = |whole: &mut Blame| {
            whole.read(0, 50);
            whole.begin_again(2)
        };
        assert!((0..100).take_while(|_| again(&mut whole)).count() < 10);
        assert!(whole.choice().servers_with_wrong_bytes.is_empty() && !whole.was_wrong(100, 2, true).again);
    }
}
