//! Remembers which server sent which range of an object to a relay, so that a client that finds the range wrong gets
//! it from another server.
//!
//! A *relay* serves data that it reads from other servers. It passes ranges of objects on and cannot check
//! them. Its client can, and requests a wrong range once more, bypassing caches. Without this module, the
//! relay would choose the same server again. Instead it asks other servers first. This is an order of
//! preference, not blame: the client may be wrong, or lie.
//!
//! | the server | is asked |
//! |---|---|
//! | has given nothing of the range | first |
//! | gave the range only to clients that had found it wrong | second |
//! | gave the range to other clients, one of which may be the present one | last |
//!
//! Within a row, the server that gave the range longest ago comes first. So a client that repeats its request
//! gets the range from all servers of a row in turn.
//!
//! A client that reads the whole object again sends its attempt number. All ranges of one such attempt come
//! from one server, and each attempt uses another server. Otherwise each attempt would mix ranges of a bad
//! server with ranges of others.
//!
//! The identity of clients is not known. If several servers gave the range to other clients, the first one
//! asked may be the one with the wrong bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use headwater_store::Hash;

use crate::blame::ServerChoice;
use crate::servers::Servers;

/// The most ranges that are remembered: more than are read in the short time until a client that found one
/// wrong asks again.
const GIVEN_MAX: usize = 4096;

/// A range of an object, and the server that gave it.
#[derive(Debug)]
pub(crate) struct GivenPart {
    pub object: Hash,
    pub part: Range<u64>,
    pub server: usize,
    /// Whether caches were bypassed because the earlier bytes were wrong.
    pub bypass_caches: bool,
}

impl Servers {
    /// Records which server gave a range of an object.
    pub(crate) fn record_given(&self, given: GivenPart) {
        let kept = &mut self.state.lock().given;
        kept.push_back(given);
        if kept.len() > GIVEN_MAX {
            kept.pop_front();
        }
    }

    /// In which order to ask servers for a range that a client found wrong.
    pub(crate) fn others_first(&self, object: Hash, part: &Range<u64>) -> ServerChoice {
        // For each server: whether it gave the range to other clients, and the number of the last time it did.
        let mut given_by = BTreeMap::<usize, (bool, usize)>::new();
        let state = self.state.lock();
        let is_of_part = |given: &&GivenPart| {
            given.object == object && given.part.start < part.end && part.start < given.part.end
        };
        for (number, given) in state.given.iter().filter(is_of_part).enumerate() {
            let (gave_to_others, last) = given_by.entry(given.server).or_default();
            *gave_to_others |= !given.bypass_caches;
            *last = number;
        }
        drop(state);
        let mut order: Vec<_> = given_by
            .into_iter()
            .map(|(server, (gave_to_others, last))| (gave_to_others, last, server))
            .collect();
        order.sort_unstable();
        ServerChoice {
            last: order.into_iter().map(|(_, _, server)| server).collect(),
            bypass_caches: true,
            ..ServerChoice::default()
        }
    }
}

impl Servers {
    /// Which server to ask in attempt `reading` of a whole object. The attempt number that is sent to a server
    /// counts only the attempts with that server, because the server may be a relay too.
    pub(crate) fn rotate(&self, reading: u32) -> ServerChoice {
        let there: Vec<usize> = (0..self.list.len()).filter(|server| self.is_there(*server)).collect();
        let count = u32::try_from(there.len()).unwrap_or(u32::MAX).max(1);
        let first = usize::try_from(reading.checked_rem(count).unwrap_or(0)).unwrap_or(usize::MAX);
        ServerChoice {
            first: there.get(first).copied(),
            alone: true,
            bypass_caches: true,
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
        let gave = |server, object, part, bypass_caches| {
            servers.record_given(GivenPart { object, part, server, bypass_caches });
        };
        let last = |part| servers.others_first(object, &part).last;
        assert!(last(0..100).is_empty());
        gave(1, other, 0..100, false);
        gave(2, object, 100..200, false);
        assert!(last(0..100).is_empty());
        gave(0, object, 50..60, false);
        assert_eq!((last(0..100), last(55..56), last(100..101)), (vec![0], vec![0], vec![2]));
        // Several clients found the same range wrong: the first client's new source is not the second one's.
        gave(0, object, 0..100, false);
        gave(1, object, 0..100, true);
        assert_eq!(last(0..100), [1, 0]);
        // The range was wrong there, too.
        gave(2, object, 0..100, true);
        assert_eq!(last(0..100), [1, 2, 0]);
        // Clients that have not read the range yet get it from another server.
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
        // Servers that gave the range to unknown clients, and the resulting order.
        let cases: [(&[usize], [usize; 6]); 4] = [
            (&[0, 1, 2], [0, 1, 2, 0, 1, 2]),
            (&[1, 0, 2, 1], [0, 2, 1, 0, 2, 1]),
            (&[2, 0, 1, 1], [2, 0, 1, 2, 0, 1]),
            (&[], [0, 1, 2, 0, 1, 2]),
        ];
        for (before, expected) in cases {
            let servers = three_servers();
            let gave = |server, bypass_caches| {
                servers.record_given(GivenPart { object, part: 0..100, server, bypass_caches });
            };
            before.iter().for_each(|server| gave(*server, false));
            let asked = expected.map(|_| {
                let last = servers.others_first(object, &(0..100)).last;
                // A server that has given nothing of the range is asked before those.
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
        let gave = |server, bypass_caches| {
            servers.record_given(GivenPart { object, part: 0..100, server, bypass_caches });
        };
        // Concurrently, and one after the other.
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
            let choice = servers.rotate(reading);
            assert!(choice.alone && choice.bypass_caches);
            (choice.first, choice.reading)
        };
        // No server is available.
        assert_eq!(turn(7), (None, Some(7)));
        servers.is_back(0, std::time::Duration::ZERO);
        assert_eq!(turn(7), (Some(0), Some(7)));
        servers.is_back(2, std::time::Duration::ZERO);
        let turns: Vec<_> = (1..5).map(turn).collect();
        // Each of the servers behind these relays is combined once with each relay.
        assert_eq!(turns, [(Some(2), Some(0)), (Some(0), Some(1)), (Some(2), Some(1)), (Some(0), Some(2))]);
    }
}
