//! What of an object is gone on which server, as each said.
//!
//! No part of an object is read from a server that said that something of it is gone there, as long as another one has it. Where each server
//! that was heard lacks something of it, it is read in pieces.
//!
//! What was heard is remembered for all who read the object, for a while. Who was told the holes of an object, and reads it with these, keeps
//! to what was heard then. For others it may be wrong by now. Who checks what it reads asks those that lack it last. Who does not, as a
//! server that reads from servers, asks them only where all others say that they do not have it, and not where one of these fails; where
//! those that have it are away, what was heard is asked for again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_store::{Hash, Holes};

use crate::blame::ServerChoice;
use crate::servers::Servers;

/// Objects whose lists are remembered ..
const OBJECTS_MAX: usize = 256;
/// .. holes of all of these, of 48 bytes each ..
const HOLES_MAX: usize = 1 << 20;
/// .. and for how long.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// What is gone of one object, by server. Who was heard comes in the order in which reads prefer servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HoleLists(Vec<(usize, Arc<Holes>)>);

impl FromIterator<(usize, Arc<Holes>)> for HoleLists {
    fn from_iter<T: IntoIterator<Item = (usize, Arc<Holes>)>>(lists: T) -> Self {
        Self(lists.into_iter().collect())
    }
}

impl HoleLists {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &Arc<Holes>)> {
        self.0.iter().map(|(server, holes)| (*server, holes))
    }

    pub(crate) fn of(&self, server: usize) -> Option<&Arc<Holes>> {
        self.iter().find(|(said, _)| *said == server).map(|(_, holes)| holes)
    }

    /// Whether the same servers said the same, in whatever order.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.iter().all(|(server, holes)| other.of(server) == Some(holes))
    }

    /// What is gone on all that were heard.
    pub(crate) fn common(&self) -> Arc<Holes> {
        let mut all = self.iter().map(|(_, holes)| holes);
        let first = all.next().cloned().unwrap_or_default();
        // Mostly they are the same.
        all.fold(
            first,
            |common, holes| if common == *holes { common } else { Arc::new(common.common(holes)) },
        )
    }

    /// Whether something is gone anywhere.
    pub(crate) fn is_of_holes(&self) -> bool {
        self.iter().any(|(_, holes)| !holes.is_empty())
    }

    /// Those, of so many servers, that lack something of a part which another one has, or may have.
    pub(crate) fn lacking(&self, part: &Range<u64>, servers: usize) -> Vec<usize> {
        let lacking: Vec<usize> =
            self.iter().filter(|(_, holes)| holes.overlap(part)).map(|(server, _)| server).collect();
        // What is gone on all of them can be had of each, as it lies there.
        if lacking.len() < servers { lacking } else { Vec::new() }
    }

    /// The pieces in which a part is to be read: each as long as one of those that were heard has all of it, or none has its beginning.
    pub(crate) fn pieces(&self, part: &Range<u64>) -> Vec<Range<u64>> {
        let is_whole = |(_, holes): (usize, &Arc<Holes>)| !holes.overlap(part);
        if self.0.is_empty() || self.iter().any(is_whole) {
            return vec![part.clone()];
        }
        let (mut pieces, mut at) = (Vec::new(), part.start);
        while at < part.end {
            let runs = || self.iter().map(|(_, holes)| holes.run_at(at));
            let there = runs().filter(|(is_gone, _)| !is_gone).map(|(_, end)| end).max();
            let end = there.or_else(|| runs().map(|(_, end)| end).min()).unwrap_or(part.end);
            let end = end.clamp(at.saturating_add(1), part.end);
            pieces.push(at..end);
            at = end;
        }
        pieces
    }

    /// Has a piece asked of those that have it. `strictly`: of those that were not heard only where these are away, and not at all of
    /// those that lack something of it.
    pub(crate) fn direct(
        &self,
        choice: &mut ServerChoice,
        piece: &Range<u64>,
        servers: usize,
        strictly: bool,
    ) {
        if self.0.is_empty() {
            return;
        }
        let lacking = self.lacking(piece, servers);
        choice.first = choice.first.filter(|first| !lacking.contains(first));
        if strictly {
            let silent = (0..servers).filter(|server| self.of(*server).is_none());
            choice.last.extend(silent);
            choice.without.extend(lacking);
        } else {
            choice.last.retain(|server| !lacking.contains(server));
            choice.last.extend(lacking);
        }
    }

    fn count(&self) -> usize {
        self.iter().fold(0, |sum, (_, holes)| sum.saturating_add(holes.count()))
    }
}

/// What was heard of one object.
#[derive(Debug)]
pub(crate) struct RememberedLists {
    object: Hash,
    lists: HoleLists,
    at: Instant,
    /// When each server was heard last.
    said_at: Vec<(usize, Instant)>,
    /// When all servers were last asked for it.
    all_asked: Option<Instant>,
}

impl RememberedLists {
    fn said_at(&self, server: usize) -> Option<Instant> {
        self.said_at.iter().find(|(said, _)| *said == server).map(|(_, at)| *at)
    }
}

/// Keeps one more, in place of what was heard of the same object before, and no more than is to be remembered.
fn keep(remembered: &mut VecDeque<RememberedLists>, new: RememberedLists) {
    remembered.retain(|before| before.object != new.object);
    if !new.lists.is_of_holes() {
        return;
    }
    remembered.push_back(new);
    let mut count =
        remembered.iter().fold(0usize, |sum, remembered| sum.saturating_add(remembered.lists.count()));
    // Also the only one, if it is that long.
    while remembered.len() > OBJECTS_MAX || count > HOLES_MAX {
        let Some(oldest) = remembered.pop_front() else { break };
        count = count.saturating_sub(oldest.lists.count());
    }
}

impl Servers {
    /// Remembers what servers said of an object when all were asked, in place of what was heard of it before.
    pub(crate) fn remember_lists(&self, object: Hash, lists: &HoleLists) {
        let at = Instant::now();
        let said_at = lists.iter().map(|(server, _)| (server, at)).collect();
        let new = RememberedLists { object, lists: lists.clone(), at, said_at, all_asked: Some(at) };
        keep(&mut self.state.lock().remembered, new);
    }

    /// Remembers what one server said.
    pub(crate) fn remember_list(&self, object: Hash, server: usize, holes: Arc<Holes>) {
        let now = Instant::now();
        let remembered = &mut self.state.lock().remembered;
        let before = remembered.iter().position(|remembered| remembered.object == object);
        let before = before
            .and_then(|at| remembered.remove(at))
            .filter(|remembered| remembered.at.elapsed() < KEPT_FOR);
        // What the others said is as old as it was.
        let mut new = before.unwrap_or_else(|| RememberedLists {
            object,
            lists: HoleLists::default(),
            at: now,
            said_at: Vec::new(),
            all_asked: None,
        });
        new.lists.0.retain(|(said, _)| *said != server);
        new.lists.0.push((server, holes));
        new.said_at.retain(|(said, _)| *said != server);
        new.said_at.push((server, now));
        if new.lists.0.len() == 1 {
            new.at = now;
        }
        keep(remembered, new);
    }

    /// What of an object is gone on one server, as it said no longer ago than this.
    pub(crate) fn said(&self, object: Hash, server: usize, longest: Duration) -> Option<Arc<Holes>> {
        let state = self.state.lock();
        let remembered = state.remembered.iter().find(|remembered| remembered.object == object)?;
        let at = remembered.said_at(server).filter(|at| at.elapsed() <= longest);
        at.and_then(|_| remembered.lists.of(server).cloned())
    }

    /// Whether something was heard of an object, and all servers were asked for it longer ago than this. Who is told so is to ask them:
    /// others are not told so then.
    pub(crate) fn is_to_be_asked(&self, object: Hash, longest: Duration) -> bool {
        let remembered = &mut self.state.lock().remembered;
        let remembered = remembered.iter_mut().find(|remembered| remembered.object == object);
        let is_due =
            |remembered: &&mut RememberedLists| remembered.all_asked.is_none_or(|at| at.elapsed() > longest);
        let Some(remembered) = remembered.filter(is_due) else { return false };
        remembered.all_asked = Some(Instant::now());
        true
    }

    /// What was heard of an object not long ago; nothing where nothing is gone.
    pub(crate) fn lists_of(&self, object: Hash) -> HoleLists {
        let state = self.state.lock();
        if state.remembered.is_empty() {
            return HoleLists::default();
        }
        let is_it =
            |remembered: &&RememberedLists| remembered.object == object && remembered.at.elapsed() < KEPT_FOR;
        let remembered = state.remembered.iter().find(is_it);
        remembered.map(|remembered| remembered.lists.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1024;

    /// Holes of these blocks of 4 KiB.
    fn holes(blocks: &[u64]) -> Arc<Holes> {
        Arc::new(Holes::of_blocks(blocks))
    }

    fn lists(of: &[&[u64]]) -> HoleLists {
        of.iter().map(|blocks| holes(blocks)).enumerate().collect()
    }

    fn directed(
        lists: &HoleLists,
        piece: Range<u64>,
        servers: usize,
        strictly: bool,
    ) -> (Vec<usize>, Vec<usize>) {
        let mut choice = ServerChoice::default();
        lists.direct(&mut choice, &piece, servers, strictly);
        (choice.without.into_iter().collect(), choice.last)
    }

    #[test]
    fn a_part_is_read_in_pieces_where_nobody_has_all_of_it() {
        // What both lack, the fourth block, comes of any.
        let lists = lists(&[&[1, 2, 3], &[3, 4]]);
        let pieces = |part: Range<u64>| lists.pieces(&part);
        for whole in [0..4 * K, 4 * K..12 * K, 5000..5001, 16 * K..20 * K, 20 * K..99 * K] {
            assert_eq!(pieces(whole.clone()), [whole]);
        }
        assert_eq!(pieces(0..99 * K), [0..12 * K, 12 * K..16 * K, 16 * K..99 * K]);
        assert_eq!(pieces(13 * K..17 * K), [13 * K..16 * K, 16 * K..17 * K]);
        let all = 0..99 * K;
        assert_eq!(HoleLists::default().pieces(&all), std::slice::from_ref(&all));
        assert_eq!(*lists.common(), *holes(&[3]));
        let turned = HoleLists::from_iter([(1, holes(&[3, 4])), (0, holes(&[1, 2, 3]))]);
        assert!(turned.is_same(&lists) && !HoleLists::from_iter([(1, holes(&[3, 4]))]).is_same(&lists));
    }

    #[test]
    fn a_piece_is_asked_of_those_that_have_it() {
        let lists = lists(&[&[1, 2, 3], &[3, 4]]);
        let nobody = || (vec![], vec![]);
        for strictly in [false, true] {
            assert_eq!(directed(&lists, 0..4 * K, 2, strictly), nobody());
            assert_eq!(directed(&lists, 12 * K..16 * K, 2, strictly), nobody());
        }
        // One that was not heard comes after those that have it, and before those that lack it.
        assert_eq!(directed(&lists, 4 * K..5 * K, 3, true), (vec![0], vec![2]));
        assert_eq!(directed(&lists, 4 * K..5 * K, 3, false), (vec![], vec![0]));
        assert_eq!(directed(&lists, 12 * K..13 * K, 3, false), (vec![], vec![0, 1]));
        assert_eq!(directed(&lists, 16 * K..17 * K, 3, true), (vec![1], vec![2]));
        let mut choice = ServerChoice { first: Some(1), last: vec![1, 0], ..ServerChoice::default() };
        lists.direct(&mut choice, &(16 * K..17 * K), 2, false);
        assert_eq!((choice.first, choice.last), (None, vec![0, 1]));
        // Where nobody was heard all are the same.
        assert_eq!(directed(&HoleLists::from_iter([(0, holes(&[]))]), 0..K, 2, true), (vec![], vec![1]));
        assert_eq!(directed(&HoleLists::default(), 0..K, 2, true), nobody());
    }

    #[test]
    fn what_was_heard_is_remembered_until_something_else_is() {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(|url| url.parse().unwrap());
        let servers = Servers::new(
            urls.to_vec(),
            None,
            None,
            (crate::Limits::default(), headwater_store::WhileBusy::default()),
        )
        .unwrap();
        let object = |number: usize| Hash::of(&number.to_le_bytes());
        servers.remember_lists(object(0), &lists(&[&[1], &[2]]));
        servers.remember_list(object(0), 0, holes(&[7]));
        let remembered = servers.lists_of(object(0));
        assert_eq!((remembered.of(0), remembered.of(1)), (Some(&holes(&[7])), Some(&holes(&[2]))));
        assert_eq!(servers.lists_of(object(1)), HoleLists::default());
        servers.remember_lists(object(0), &lists(&[&[], &[]]));
        assert_eq!(servers.lists_of(object(0)), HoleLists::default());
        for number in 0..=OBJECTS_MAX {
            servers.remember_list(object(number), 1, holes(&[1]));
        }
        assert!(servers.lists_of(object(0)).of(1).is_none() && servers.lists_of(object(1)).of(1).is_some());
    }

    #[test]
    fn what_one_server_says_makes_nothing_newer_that_others_said() {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(|url| url.parse().unwrap());
        let servers = Servers::new(
            urls.to_vec(),
            None,
            None,
            (crate::Limits::default(), headwater_store::WhileBusy::default()),
        )
        .unwrap();
        let (object, half_a_minute) = (Hash::of(b"1"), Duration::from_secs(30));
        let said = |server| servers.said(object, server, half_a_minute);
        servers.remember_lists(object, &lists(&[&[1], &[2]]));
        assert_eq!((said(0), said(1)), (Some(holes(&[1])), Some(holes(&[2]))));
        assert!(!servers.is_to_be_asked(object, half_a_minute));
        let before = Instant::now().checked_sub(half_a_minute * 2).unwrap();
        for remembered in &mut servers.state.lock().remembered {
            remembered.said_at.iter_mut().for_each(|(_, at)| *at = before);
            remembered.all_asked = Some(before);
        }
        assert_eq!((said(0), said(1)), (None, None));
        servers.remember_list(object, 0, holes(&[7]));
        assert_eq!((said(0), said(1)), (Some(holes(&[7])), None));
        assert_eq!(servers.lists_of(object).of(1), Some(&holes(&[2])));
        // One alone is told so, as it asks then.
        assert!(servers.is_to_be_asked(object, half_a_minute));
        assert!(!servers.is_to_be_asked(object, half_a_minute));
    }
}
