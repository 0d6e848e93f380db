//! Remembers which server gave which part of an object that was read without a check, for readers that find
//! it wrong.
//!
//! A server that relays data of other servers passes parts of objects on, and cannot check them. Its reader
//! can, and asks once more, bypassing caches. The relay would then choose the same server again. Instead it
//! asks others first. This is an order, not blame: the reader may be wrong, or lie.
//!
//! | a server that | is asked |
//! |---|---|
//! | has given nothing of the part | first |
//! | gave it only to readers that had found it wrong | next |
//! | gave it to other readers, one of which may be the present one | last |
//!
//! Among servers of one kind, the one that gave it longest ago comes first. So a reader that asks again and
//! again gets the part from all servers of a kind in turn.
//!
//! A full re-read passes its attempt number. All parts of one such reading come from one server, and each
//! reading comes from another one. Otherwise each reading would mix parts of a bad server with parts of
//! others, and other parts the next time.
//!
//! The identity of readers is not known. If several servers gave the part to other readers, the first one
//! that is asked may be the one with the wrong bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use headwater_store::Hash;

use crate::blame::ServerChoice;
use crate::servers::Servers;

/// The most parts that are remembered: more than are read in the short time after which a reader that found
/// one wrong asks again.
const GIVEN_MAX: usize = 4096;

/// A part of an object that a server gave.
#[derive(Debug)]
pub(crate) struct GivenPart {
    pub object: Hash,
    pub part: Range<u64>,
    pub server: usize,
    /// Whether caches were bypassed because the earlier bytes were wrong.
    pub past_caches: bool,
}

impl Servers {
    /// Records which server gave a part of an object.
    pub(crate) fn gave(&self, given: GivenPart) {
        let kept = &mut self.state.lock().given;
        kept.push_back(given);
        if kept.len() > GIVEN_MAX {
            kept.pop_front();
        }
    }

    /// Which servers to ask for a part that was wrong.
    pub(crate) fn others_first(&self, object: Hash, part: &Range<u64>) -> ServerChoice {
        // For each server: whether it gave the part to other readers, and when it last gave it.
        let mut turns = BTreeMap::<usize, (bool, usize)>::new();
        let state = self.state.lock();
        let is_of_part = |given: &&GivenPart| {
            given.object == object && given.part.start < part.end && part.start < given.part.end
        };
        for (turn, given) in state.given.iter().filter(is_of_part).enumerate() {
            let (gave_to_others, last) = turns.entry(given.server).or_default();
            *gave_to_others |= !given.past_caches;
            *last = turn;
        }
        drop(state);
        let mut order: Vec<_> = turns
            .into_iter()
            .map(|(server, (gave_to_others, last))| (gave_to_others, last, server))
            .collect();
        order.sort_unstable();
        ServerChoice {
            last: order.into_iter().map(|(_, _, server)| server).collect(),
            past_caches: true,
            ..ServerChoice::default()
        }
    }
}

impl Servers {
    /// Which server to ask in rereading number `reading` of a whole object. The number for that server is its
    /// own count, because it may relay other servers.
    pub(crate) fn in_turn(&self, reading: u32) -> ServerChoice {
        let there: Vec<usize> = (0..self.list.len()).filter(|server| self.is_there(*server)).collect();
        let count = u32::try_from(there.len()).unwrap_or(u32::MAX).max(1);
        let first = usize::try_from(reading.checked_rem(count).unwrap_or(0)).unwrap_or(usize::MAX);
        ServerChoice {
            first: there.get(first).copied(),
            alone: true,
            past_caches: true,
            reading: reading.checked_div(count),
            ..ServerChoice::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three_servers() -> std::sync::Arc<Servers> {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"];
        let urls = urls.map(|url| url.parse().unwrap()).to_vec();
        Servers::new(urls, None, None, (crate::Limits::default(), headwater_store::WhileBusy::default()))
            .unwrap()
    }

    #[test]
    fn servers_that_gave_wrong_parts_are_asked_last() {
        let servers = three_servers();
        let [object, other] = [b"1", b"2"].map(|name| Hash::of(name));
        let gave = |server, object, part, past_caches| {
            servers.gave(GivenPart { object, part, server, past_caches });
        };
        let last = |part| servers.others_first(object, &part).last;
        assert!(last(0..100).is_empty());
        gave(1, other, 0..100, false);
        gave(2, object, 100..200, false);
        assert!(last(0..100).is_empty());
        gave(0, object, 50..60, false);
        assert_eq!((last(0..100), last(55..56), last(100..101)), (vec![0], vec![0], vec![2]));
        // Several readers found the same part wrong: the first reader's new source is not the second one's.
        gave(0, object, 0..100, false);
        gave(1, object, 0..100, true);
        assert_eq!(last(0..100), [1, 0]);
        // It was wrong there, too.
        gave(2, object, 0..100, true);
        assert_eq!(last(0..100), [1, 2, 0]);
        // Readers that know nothing of it get it from another server.
        gave(1, object, 0..100, false);
        assert_eq!(last(0..100), [2, 0, 1]);
        for _ in 0..GIVEN_MAX {
            gave(0, other, 0..1, false);
        }
        assert!(last(0..100).is_empty());
    }

    #[test]
    fn repeated_requests_for_a_wrong_part_rotate_through_all_servers() {
        let object = Hash::of(b"1");
        // Servers that gave the part to unknown readers, and the resulting order.
        let cases: [(&[usize], [usize; 6]); 4] = [
            (&[0, 1, 2], [0, 1, 2, 0, 1, 2]),
            (&[1, 0, 2, 1], [0, 2, 1, 0, 2, 1]),
            (&[2, 0, 1, 1], [2, 0, 1, 2, 0, 1]),
            (&[], [0, 1, 2, 0, 1, 2]),
        ];
        for (before, expected) in cases {
            let servers = three_servers();
            let gave = |server, past_caches| {
                servers.gave(GivenPart { object, part: 0..100, server, past_caches });
            };
            before.iter().for_each(|server| gave(*server, false));
            let asked = expected.map(|_| {
                let last = servers.others_first(object, &(0..100)).last;
                // A server that has given nothing of it is asked before those.
                let first = (0..3).find(|server| !last.contains(server)).unwrap_or_else(|| last[0]);
                gave(first, true);
                first
            });
            assert_eq!(asked, expected, "{before:?}");
        }
    }

    #[test]
    fn many_readers_of_a_wrong_part_get_it_from_another_server() {
        let (servers, object) = (three_servers(), Hash::of(b"1"));
        let gave = |server, past_caches| {
            servers.gave(GivenPart { object, part: 0..100, server, past_caches });
        };
        // All at the same time, and one after the other.
        (0..8).for_each(|_| gave(0, false));
        gave(1, true);
        for _ in 1..8 {
            assert_eq!(servers.others_first(object, &(0..100)).last, [1, 0]);
            gave(1, true);
        }
        for _ in 0..8 {
            gave(0, false);
            assert_eq!(servers.others_first(object, &(0..100)).last, [1, 0]);
            gave(1, true);
        }
    }

    #[test]
    fn each_reading_of_all_of_an_object_is_of_another_server() {
        let servers = three_servers();
        let turn = |reading| {
            let choice = servers.in_turn(reading);
            assert!(choice.alone && choice.past_caches);
            (choice.first, choice.reading)
        };
        // No server is available.
        assert_eq!(turn(7), (None, Some(7)));
        servers.is_back(0, std::time::Duration::ZERO);
        assert_eq!(turn(7), (Some(0), Some(7)));
        servers.is_back(2, std::time::Duration::ZERO);
        let turns: Vec<_> = (1..5).map(turn).collect();
        // Each of the servers behind these is combined once with each of them.
        assert_eq!(turns, [(Some(2), Some(0)), (Some(0), Some(1)), (Some(2), Some(1)), (Some(0), Some(2))]);
    }
}
