//! Decides which server is to blame for a wrong object that is read as a whole, and can be checked only at
//! its end. A server that listed parts of the object as gone counts as having given them.
//!
//! | the object was wrong, and | from then on |
//! |---|---|
//! | it was read for the first time | no server is blamed: caches on the way may hold what lay in holes, or other wrong bytes. It is read once more, bypassing caches, and from one server alone, with that server's list of holes |
//! | the server that should give all of it did, and reports the same holes as before | that server is distrusted, and another one should give all of it; if there is no other, the same server once more |
//! | the same happened with the same server another time | it is not asked for this object again |
//! | others gave parts of it too, or the server reports other holes now | no server is blamed; another one should give all of it |
//! | a part of it was not read here, or could not be | no server can be blamed; it is read once more from its start, and another server should give all of it |
//! | servers report other holes now, or do not report them | no server is blamed; it is read once more |

use std::collections::{BTreeMap, BTreeSet};

use crate::hole_lists::HoleLists;

/// The most readings of a whole object, for each server and in addition, before it is given up.
const ROUNDS_MAX: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Blame {
    read_bytes: u64,
    from: BTreeSet<usize>,
    /// The server that should give all of it.
    giver: Option<usize>,
    /// Servers that should give all of it, after which it was wrong. The one that was asked longest ago comes
    /// first.
    before: Vec<usize>,
    /// Servers that gave wrong bytes of it once.
    wrong: BTreeSet<usize>,
    /// Servers that gave wrong bytes of it twice.
    liars: BTreeSet<usize>,
    /// Whether all of it should come from one server.
    alone: bool,
    /// Whether caches are bypassed even before it was wrong.
    past_caches: bool,
    /// How often each server was chosen to give all of it.
    readings: BTreeMap<usize, u32>,
    rounds: u32,
}

/// Which servers to ask.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerChoice {
    /// Servers that are not asked.
    pub liars: BTreeSet<usize>,
    /// Servers that are not asked either, because the requested part is gone there, ..
    pub without: BTreeSet<usize>,
    /// .. unless all others answer that they do not have it: then the bytes in their holes are taken.
    pub or_what_lies_there: bool,
    /// Only one server at a time, without a second one if it is late, ..
    pub alone: bool,
    /// .. and this one, as long as it is available.
    pub first: Option<usize>,
    /// Servers that are asked after all others, in this order.
    pub last: Vec<usize>,
    /// All of them are asked with caches bypassed, because earlier bytes were wrong.
    pub past_caches: bool,
    /// The number of the full rereading from that server. All bytes of one rereading should come from one
    /// place.
    pub reading: Option<u32>,
}

/// The consequence of wrong bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The server that gave them, if it is known.
    pub liar: Option<usize>,
    /// Whether to read it once more.
    pub again: bool,
}

impl Blame {
    pub(crate) fn choice(&self) -> ServerChoice {
        ServerChoice {
            liars: self.liars.clone(),
            alone: self.giver.is_some(),
            first: self.giver,
            past_caches: self.past_caches || self.is_again(),
            reading: self.giver.and_then(|giver| self.readings.get(&giver).copied()),
            ..ServerChoice::default()
        }
    }

    /// Chooses the server that should give all of the object, if one should. Servers that have not been
    /// chosen yet come first, then those chosen longest ago; of several, the one with the fewest bytes in
    /// holes.
    pub(crate) fn choose_giver(&mut self, lists: &HoleLists) -> Option<usize> {
        let turn = |server: usize| {
            self.before.iter().position(|before| *before == server).map_or(0, |turn| turn + 1)
        };
        let candidates = lists.iter().filter(|(server, _)| self.alone && !self.liars.contains(server));
        let best = candidates.min_by_key(|(server, holes)| (turn(*server), holes.bytes()));
        self.giver = best.map(|(server, _)| server);
        if let Some(giver) = self.giver {
            let readings = self.readings.entry(giver).or_default();
            *readings = readings.saturating_add(1);
        }
        self.giver
    }

    /// The number of the rereading for a server, if it is the next one to give all of it. `None`: no server
    /// is.
    pub(crate) fn next_reading(&self, server: usize) -> Option<u32> {
        self.alone.then(|| self.readings.get(&server).copied().unwrap_or_default().saturating_add(1))
    }

    pub(crate) fn read(&mut self, server: usize, len: u64) {
        self.from.insert(server);
        self.read_bytes = self.read_bytes.saturating_add(len);
    }

    /// The holes were requested again, so caches are bypassed: they may hold bytes of former holes.
    pub(crate) fn read_past_caches(&mut self) {
        self.past_caches = true;
    }

    /// Whether it was wrong before.
    pub(crate) fn is_again(&self) -> bool {
        self.rounds > 0
    }

    /// The object differs, or may differ, from its description during the reading. Returns whether to read it
    /// once more; `servers` is the number of servers.
    pub(crate) fn begin_again(&mut self, servers: usize) -> bool {
        self.from.clear();
        self.read_bytes = 0;
        self.rounds = self.rounds.saturating_add(1);
        self.may_be_read(servers)
    }

    fn may_be_read(&self, servers: usize) -> bool {
        let rounds = usize::try_from(self.rounds).unwrap_or(usize::MAX);
        self.liars.len() < servers && rounds < servers.saturating_add(ROUNDS_MAX)
    }

    /// The object was wrong, and `len_bytes` of it have been read. `servers` is the number of servers.
    /// `is_sure`: the server that should give all of it reports again exactly the holes that were not read.
    pub(crate) fn was_wrong(&mut self, len_bytes: u64, servers: usize, is_sure: bool) -> Verdict {
        let from = std::mem::take(&mut self.from);
        let is_all = std::mem::take(&mut self.read_bytes) >= len_bytes;
        self.rounds = self.rounds.saturating_add(1);
        self.alone = true;
        let is_of_giver = |giver: &usize| is_all && is_sure && from.iter().all(|server| server == giver);
        let liar = self.giver.filter(is_of_giver);
        if let Some(liar) = liar
            && !self.wrong.insert(liar)
        {
            self.liars.insert(liar);
        }
        if let Some(giver) = self.giver {
            self.before.retain(|server| *server != giver);
            self.before.push(giver);
        }
        Verdict { liar, again: self.may_be_read(servers) }
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
        assert!(!whole.choice().past_caches && whole.choose_giver(&nothing_is_gone()).is_none());
        assert_eq!(whole.next_reading(0), None);
        // The part from an earlier copy was wrong.
        whole.read(0, 60);
        assert_eq!(whole.was_wrong(100, 3, true), Verdict { liar: None, again: true });
        for server in 0..3 {
            assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(server));
            let choice = whole.choice();
            assert!(choice.alone && choice.past_caches && choice.liars.is_empty(), "{choice:?}");
            assert_eq!((choice.first, choice.reading), (Some(server), Some(1)));
            assert_eq!((whole.next_reading(server), whole.next_reading(3)), (Some(2), Some(1)));
            whole.read(server, 60);
            whole.read(server, 40);
            assert_eq!(whole.was_wrong(100, 3, true), Verdict { liar: Some(server), again: true });
        }
        // All were wrong. A part of the object is no proof, the next reading may be better, and in the end it
        // is given up.
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(0));
        whole.read(0, 99);
        assert_eq!(whole.was_wrong(100, 3, true), Verdict { liar: None, again: true });
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(1));
        whole.read(1, 100);
        assert_eq!(whole.was_wrong(100, 3, true), Verdict { liar: Some(1), again: false });
        assert_eq!(whole.choice().liars, [1].into());
    }

    #[test]
    fn the_only_server_is_asked_again_after_wrong_uncached_bytes() {
        let (mut whole, one) = (Blame::default(), HoleLists::from_iter([(1, std::sync::Arc::default())]));
        for (liar, again) in [(None, true), (Some(1), true), (Some(1), false)] {
            whole.choose_giver(&one);
            whole.read(1, 100);
            assert_eq!(whole.was_wrong(100, 1, true), Verdict { liar, again });
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
        assert_eq!(whole.was_wrong(100, 2, true), Verdict { liar: None, again: true });
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(1));
        whole.read(1, 100);
        assert_eq!(whole.was_wrong(100, 2, false), Verdict { liar: None, again: true });
        // The third server has not been asked for anything yet.
        assert_eq!(whole.choose_giver(&nothing_is_gone()), Some(2));
        assert!(whole.choice().liars.is_empty());
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
            assert_eq!(whole.was_wrong(100, 3, true).liar, None);
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
        // The same if the reported holes differ each time.
        let mut whole = Blame::default();
        let again = |whole: &mut Blame| {
            whole.read(0, 50);
            whole.begin_again(2)
        };
        assert!((0..100).take_while(|_| again(&mut whole)).count() < 10);
        assert!(whole.choice().liars.is_empty() && !whole.was_wrong(100, 2, true).again);
    }
}
