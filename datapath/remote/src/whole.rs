//! Who gave the bytes of an object that is read as a whole, and is checked only then. Who said that parts of it are gone gave them, too.
//!
//! | it was wrong, and | from then on |
//! |---|---|
//! | it was read for the first time | nobody is to blame: caches on the way may keep what lay in holes, or what else was wrong. It is read once more, past them, and from one server alone |
//! | one server gave all of it | that one is distrusted, and not asked for this object again |
//! | several did | nobody is to blame; one server is asked for all of it, and another one than before where that one failed on the way |
//! | who gave it does not say, or not any more, that just these parts of it are gone | nobody is to blame; another one is to give all of it |
//! | a part of it was not read here | nobody can be blamed; it is read once more, from its start |
//! | servers say now that other parts of it are gone, or do not say what is | nobody is to blame; it is read once more |

use std::collections::BTreeSet;

/// Reads of all of an object, for each server and beyond, before it is given up.
const ROUNDS_MAX: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Whole {
    read_bytes: u64,
    from: BTreeSet<usize>,
    /// Who is to give all of it, as what is said to be gone is gone there.
    giver: Option<usize>,
    /// Those that were to give all of it, and did not: what came was from others, too, or they are not known to be wrong. The one that
    /// was asked longest ago comes first.
    before: Vec<usize>,
    /// Those whose bytes of it were wrong.
    liars: BTreeSet<usize>,
    /// Whether all of it is to come from one server.
    alone: bool,
    rounds: usize,
}

/// Whom to ask.
#[derive(Clone, Debug, Default)]
pub(crate) struct Whom {
    /// Not these.
    pub liars: BTreeSet<usize>,
    /// One server alone, without another one where it is late ..
    pub alone: bool,
    /// .. and this one, as long as it is there.
    pub first: Option<usize>,
    /// These after all others, and in this order.
    pub last: Vec<usize>,
    /// All of them past caches on the way, as what came before was wrong.
    pub past_caches: bool,
}

/// What is done about wrong bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Who gave them, if that is known.
    pub liar: Option<usize>,
    /// Whether to read it once more.
    pub again: bool,
}

impl Whole {
    pub(crate) fn whom(&self) -> Whom {
        let alone = self.alone || self.giver.is_some();
        let first = self.giver.or_else(|| self.from.first().copied().filter(|_| self.alone));
        let (liars, last, past_caches) = (self.liars.clone(), self.before.clone(), self.is_again());
        Whom { liars, alone, first, last, past_caches }
    }

    /// Who is to give all of it, if that is one.
    pub(crate) fn comes_from(&mut self, giver: Option<usize>) {
        self.giver = giver;
        self.from.extend(giver);
    }

    pub(crate) fn read(&mut self, server: usize, len: u64) {
        self.from.insert(server);
        self.read_bytes = self.read_bytes.saturating_add(len);
    }

    /// Whether it was wrong before.
    pub(crate) fn is_again(&self) -> bool {
        self.rounds > 0
    }

    /// It is another one than it was taken for when it was read, or may be. There are so many servers. Returns whether to read it once
    /// more.
    pub(crate) fn begin_again(&mut self, servers: usize) -> bool {
        self.from.clear();
        self.giver = None;
        self.read_bytes = 0;
        self.rounds = self.rounds.saturating_add(1);
        self.may_be_read(servers)
    }

    fn may_be_read(&self, servers: usize) -> bool {
        self.liars.len() < servers && self.rounds < servers.saturating_add(ROUNDS_MAX)
    }

    /// It was wrong, and `len_bytes` of it are there. There are so many servers, and these have said again that just what was not
    /// read of it is gone there.
    pub(crate) fn was_wrong(&mut self, len_bytes: u64, servers: usize, said: &BTreeSet<usize>) -> Verdict {
        let (from, giver) = (std::mem::take(&mut self.from), self.giver.take());
        let is_all = std::mem::take(&mut self.read_bytes) >= len_bytes;
        let past_caches = self.is_again();
        self.rounds = self.rounds.saturating_add(1);
        if !is_all {
            return Verdict { liar: None, again: self.may_be_read(servers) };
        }
        self.alone = true;
        let only = from.first().copied().filter(|_| from.len() == 1);
        let liar = only.filter(|only| past_caches && said.contains(only));
        self.liars.extend(liar);
        // Where all came from one, and not past caches, these may be to blame.
        let failed = if only.is_some() { only.filter(|_| past_caches) } else { giver };
        if let Some(failed) = failed.filter(|_| liar.is_none()) {
            self.before.retain(|server| *server != failed);
            self.before.push(failed);
        }
        Verdict { liar, again: self.may_be_read(servers) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All say what is gone there.
    fn all() -> BTreeSet<usize> {
        (0..3).collect()
    }

    #[test]
    fn who_lies_is_found_by_asking_one_alone() {
        let mut whole = Whole::default();
        assert!(!whole.whom().past_caches);
        // What an earlier copy left was wrong.
        whole.read(0, 60);
        assert_eq!(whole.was_wrong(100, 3, &all()), Verdict { liar: None, again: true });
        assert!(!whole.whom().alone && whole.whom().liars.is_empty());
        whole.read(0, 60);
        whole.read(2, 40);
        assert_eq!(whole.was_wrong(100, 3, &all()), Verdict { liar: None, again: true });
        assert!(whole.whom().alone && whole.whom().first.is_none() && whole.whom().past_caches);
        whole.read(2, 60);
        assert_eq!(whole.whom().first, Some(2));
        whole.read(2, 40);
        assert_eq!(whole.was_wrong(100, 3, &all()), Verdict { liar: Some(2), again: true });
        assert!(whole.whom().liars.contains(&2) && whole.whom().first.is_none());
        for (server, again) in [(0, true), (1, false)] {
            whole.read(server, 100);
            assert_eq!(whole.was_wrong(100, 3, &all()), Verdict { liar: Some(server), again });
        }
    }

    #[test]
    fn nobody_is_blamed_for_what_was_not_read_past_caches() {
        let mut whole = Whole::default();
        whole.read(1, 100);
        assert_eq!(whole.was_wrong(100, 1, &all()), Verdict { liar: None, again: true });
        assert!(whole.whom().past_caches && whole.whom().alone && whole.whom().last.is_empty());
        whole.read(1, 100);
        assert_eq!(whole.was_wrong(100, 1, &all()), Verdict { liar: Some(1), again: false });
    }

    #[test]
    fn who_does_not_say_what_is_gone_is_not_blamed() {
        let mut whole = Whole::default();
        assert!(whole.begin_again(2));
        whole.read(0, 100);
        assert_eq!(whole.was_wrong(100, 2, &[1].into()), Verdict { liar: None, again: true });
        assert!(whole.whom().alone && whole.whom().liars.is_empty());
        assert_eq!(whole.whom().last, [0]);
    }

    #[test]
    fn who_says_that_a_part_is_gone_is_one_of_those_who_gave_it() {
        let mut whole = Whole::default();
        whole.comes_from(Some(1));
        assert!(whole.whom().alone && whole.whom().first == Some(1) && !whole.is_again());
        // It failed on the way.
        whole.read(0, 60);
        assert_eq!(whole.was_wrong(60, 2, &all()), Verdict { liar: None, again: true });
        assert!(whole.is_again() && whole.whom().alone && whole.whom().first.is_none());
        // So another one is to give it.
        assert_eq!(whole.whom().last, [1]);
        whole.comes_from(Some(0));
        whole.read(1, 60);
        assert_eq!(whole.was_wrong(60, 2, &all()), Verdict { liar: None, again: true });
        assert_eq!(whole.whom().last, [1, 0]);
        whole.comes_from(Some(1));
        whole.read(1, 60);
        assert_eq!(whole.was_wrong(60, 2, &all()), Verdict { liar: Some(1), again: true });
    }

    #[test]
    fn it_is_not_read_for_ever() {
        let mut whole = Whole::default();
        let again = |whole: &mut Whole| {
            whole.read(0, 50);
            whole.read(1, 50);
            whole.was_wrong(100, 2, &all()).again
        };
        assert!((0..100).take_while(|_| again(&mut whole)).count() < 10);
        // Nor where what is gone of it is said to be another part each time.
        let mut whole = Whole::default();
        let again = |whole: &mut Whole| {
            whole.read(0, 50);
            whole.begin_again(2)
        };
        assert!((0..100).take_while(|_| again(&mut whole)).count() < 10);
        assert!(whole.whom().liars.is_empty() && !whole.was_wrong(100, 2, &all()).again);
    }
}
