//! Remembers the holes of objects on each server, and directs reads to servers that have the bytes.
//!
//! A *hole* is a range of an object whose bytes a server deleted, because none of its versions needs them.
//! Each server reports its own list of holes.
//!
//! A range is not read from a server with a hole in it, as long as another server has it. If every server
//! with a known list has a hole in the range, the range is read in pieces from several servers.
//!
//! The lists are remembered for some time, for all readers of the object. A reader that was given the holes
//! of an object, and reads it with them, keeps using these lists. Other readers may find them outdated. A
//! reader that checks the bytes asks servers with holes last. A reader without a check, such as a relay, asks
//! servers with holes only if all others answer that they do not have the range, and not if one of these
//! fails. If the servers that have the range are away, the lists are requested again.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_store::{Hash, Holes};

use crate::blame::ServerChoice;
use crate::servers::Servers;

/// The most objects whose lists are remembered.
const OBJECTS_MAX: usize = 256;
/// The most holes of all remembered lists together, of 48 bytes each.
const HOLES_MAX: usize = 1 << 20;
/// How long lists are remembered.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// The holes of one object on each server with a known list, in the order in which reads prefer servers.
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

    /// Whether both have the same servers with the same lists, in whatever order.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.iter().all(|(server, holes)| other.of(server) == Some(holes))
    }

    /// The holes that all known lists share.
    pub(crate) fn common(&self) -> Arc<Holes> {
        let mut all = self.iter().map(|(_, holes)| holes);
        let first = all.next().cloned().unwrap_or_default();
        // Mostly the lists are equal.
        all.fold(
            first,
            |common, holes| if common == *holes { common } else { Arc::new(common.common(holes)) },
        )
    }

    /// Whether any list has a hole.
    pub(crate) fn is_of_holes(&self) -> bool {
        self.iter().any(|(_, holes)| !holes.is_empty())
    }

    /// Of servers `0..servers`, those with a hole in a range that another one has, or may have.
    pub(crate) fn lacking(&self, part: &Range<u64>, servers: usize) -> Vec<usize> {
        let lacking: Vec<usize> =
            self.iter().filter(|(_, holes)| holes.overlap(part)).map(|(server, _)| server).collect();
        // A range that is a hole on all servers can be read from each: it reads as zeroes.
        if lacking.len() < servers { lacking } else { Vec::new() }
    }

    /// Divides a range into pieces. Each piece extends as far as one server with a known list has all of it,
    /// or as far as none has its beginning.
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

    /// Directs the request for a piece to servers that have it. `strictly`: servers with unknown lists are
    /// asked only if these are away, and servers with a hole in the piece are not asked at all.
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

/// The known lists of one object.
#[derive(Debug)]
pub(crate) struct RememberedLists {
    object: Hash,
    lists: HoleLists,
    at: Instant,
    /// When each server last reported its list.
    said_at: Vec<(usize, Instant)>,
    /// When all servers were last asked for their lists.
    all_asked: Option<Instant>,
}

impl RememberedLists {
    fn said_at(&self, server: usize) -> Option<Instant> {
        self.said_at.iter().find(|(said, _)| *said == server).map(|(_, at)| *at)
    }
}

/// Adds an entry, replaces an earlier one of the same object, and keeps the limits.
fn keep(remembered: &mut VecDeque<RememberedLists>, new: RememberedLists) {
    remembered.retain(|before| before.object != new.object);
    if !new.lists.is_of_holes() {
        return;
    }
    remembered.push_back(new);
    let mut count =
        remembered.iter().fold(0usize, |sum, remembered| sum.saturating_add(remembered.lists.count()));
    // Removes even the only entry if it is too long.
    while remembered.len() > OBJECTS_MAX || count > HOLES_MAX {
        let Some(oldest) = remembered.pop_front() else { break };
        count = count.saturating_sub(oldest.lists.count());
    }
}

impl Servers {
    /// Remembers the lists of an object after all servers were asked. Replaces earlier lists.
    pub(crate) fn remember_lists(&self, object: Hash, lists: &HoleLists) {
        let at = Instant::now();
        let said_at = lists.iter().map(|(server, _)| (server, at)).collect();
        let new = RememberedLists { object, lists: lists.clone(), at, said_at, all_asked: Some(at) };
        keep(&mut self.state.lock().remembered, new);
    }

    /// Remembers the list of one server.
    pub(crate) fn remember_list(&self, object: Hash, server: usize, holes: Arc<Holes>) {
        let now = Instant::now();
        let remembered = &mut self.state.lock().remembered;
        let before = remembered.iter().position(|remembered| remembered.object == object);
        let before = before
            .and_then(|at| remembered.remove(at))
            .filter(|remembered| remembered.at.elapsed() < KEPT_FOR);
        // Lists of the other servers keep their age.
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

    /// The holes of an object on one server, if the server reported them within the last `longest`.
    pub(crate) fn said(&self, object: Hash, server: usize, longest: Duration) -> Option<Arc<Holes>> {
        let state = self.state.lock();
        let remembered = state.remembered.iter().find(|remembered| remembered.object == object)?;
        let at = remembered.said_at(server).filter(|at| at.elapsed() <= longest);
        at.and_then(|_| remembered.lists.of(server).cloned())
    }

    /// Whether a list of the object is known, and the servers were last asked longer ago than `longest`. A
    /// caller that gets `true` must ask them; later callers then get `false`.
    pub(crate) fn is_to_be_asked(&self, object: Hash, longest: Duration) -> bool {
        let remembered = &mut self.state.lock().remembered;
        let remembered = remembered.iter_mut().find(|remembered| remembered.object == object);
        let is_due =
            |remembered: &&mut RememberedLists| remembered.all_asked.is_none_or(|at| at.elapsed() > longest);
        let Some(remembered) = remembered.filter(is_due) else { return false };
        remembered.all_asked = Some(Instant::now());
        true
    }

    /// The known lists of an object that are not too old; empty if there are no holes.
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

    /// Holes at these blocks of 4 KiB.
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
    fn a_range_that_no_server_has_completely_is_read_in_pieces() {
        // The fourth block is a hole on both servers, and can be read from any server.
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
    fn a_piece_is_requested_from_servers_that_have_it() {
        let lists = lists(&[&[1, 2, 3], &[3, 4]]);
        let nobody = || (vec![], vec![]);
        for strictly in [false, true] {
            assert_eq!(directed(&lists, 0..4 * K, 2, strictly), nobody());
            assert_eq!(directed(&lists, 12 * K..16 * K, 2, strictly), nobody());
        }
        // Order: servers known to have the range, servers without a known list, servers with a hole in it.
        assert_eq!(directed(&lists, 4 * K..5 * K, 3, true), (vec![0], vec![2]));
        assert_eq!(directed(&lists, 4 * K..5 * K, 3, false), (vec![], vec![0]));
        assert_eq!(directed(&lists, 12 * K..13 * K, 3, false), (vec![], vec![0, 1]));
        assert_eq!(directed(&lists, 16 * K..17 * K, 3, true), (vec![1], vec![2]));
        let mut choice = ServerChoice { first: Some(1), last: vec![1, 0], ..ServerChoice::default() };
        lists.direct(&mut choice, &(16 * K..17 * K), 2, false);
        assert_eq!((choice.first, choice.last), (None, vec![0, 1]));
        // If no list is known, all servers are equal.
        assert_eq!(directed(&HoleLists::from_iter([(0, holes(&[]))]), 0..K, 2, true), (vec![], vec![1]));
        assert_eq!(directed(&HoleLists::default(), 0..K, 2, true), nobody());
    }

    #[test]
    fn lists_are_remembered_until_they_are_replaced() {
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
    fn one_list_does_not_refresh_the_lists_of_others() {
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
        // Only one caller gets `true`, because it asks then.
        assert!(servers.is_to_be_asked(object, half_a_minute));
        assert!(!servers.is_to_be_asked(object, half_a_minute));
    }
}
