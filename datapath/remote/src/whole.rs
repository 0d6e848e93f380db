//! Who gave the bytes of an object that is read as a whole, and is checked only then.
//!
//! | it was wrong, and | from then on |
//! |---|---|
//! | one server gave all of it | that one is distrusted, and not asked for this object again |
//! | several did | one server is asked for all of it, so that the next time it is known who lies |
//! | a part of it was not read here | nobody can be blamed; it is read once more, from its start |

use std::collections::BTreeSet;

/// Reads of all of an object, for each server and beyond, before it is given up.
const ROUNDS_MAX: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Whole {
    read_bytes: u64,
    from: BTreeSet<usize>,
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
        let first = self.from.first().copied().filter(|_| self.alone);
        Whom { liars: self.liars.clone(), alone: self.alone, first, ..Whom::default() }
    }

    pub(crate) fn read(&mut self, server: usize, len: u64) {
        self.from.insert(server);
        self.read_bytes = self.read_bytes.saturating_add(len);
    }

    /// It was wrong, and has `len_bytes`. There are so many servers.
    pub(crate) fn was_wrong(&mut self, len_bytes: u64, servers: usize) -> Verdict {
        let from = std::mem::take(&mut self.from);
        let is_all = std::mem::take(&mut self.read_bytes) >= len_bytes;
        self.rounds = self.rounds.saturating_add(1);
        let mut liar = None;
        if is_all && from.len() == 1 {
            liar = from.first().copied();
            self.liars.extend(&from);
        } else if is_all {
            self.alone = true;
        }
        let again = self.liars.len() < servers && self.rounds < servers.saturating_add(ROUNDS_MAX);
        Verdict { liar, again }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lies_is_found_by_asking_one_alone() {
        let mut whole = Whole::default();
        // What an earlier copy left was wrong.
        whole.read(0, 60);
        assert_eq!(whole.was_wrong(100, 3), Verdict { liar: None, again: true });
        assert!(!whole.whom().alone && whole.whom().liars.is_empty());
        whole.read(0, 60);
        whole.read(2, 40);
        assert_eq!(whole.was_wrong(100, 3), Verdict { liar: None, again: true });
        assert!(whole.whom().alone && whole.whom().first.is_none());
        whole.read(2, 60);
        assert_eq!(whole.whom().first, Some(2));
        whole.read(2, 40);
        assert_eq!(whole.was_wrong(100, 3), Verdict { liar: Some(2), again: true });
        assert!(whole.whom().liars.contains(&2) && whole.whom().first.is_none());
        for (server, again) in [(0, true), (1, false)] {
            whole.read(server, 100);
            assert_eq!(whole.was_wrong(100, 3), Verdict { liar: Some(server), again });
        }
    }

    #[test]
    fn it_is_not_read_for_ever() {
        let mut whole = Whole::default();
        let again = |whole: &mut Whole| {
            whole.read(0, 50);
            whole.read(1, 50);
            whole.was_wrong(100, 2).again
        };
        assert!((0..100).take_while(|_| again(&mut whole)).count() < 10);
    }
}
