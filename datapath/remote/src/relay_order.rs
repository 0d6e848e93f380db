//! Who gave parts of objects that are read without a check, for those who find them wrong.
//!
//! A server whose store is itself on servers hands parts of objects on, and cannot check them. Who asked for one can, and asks
//! once more, past caches; the server that is chosen would be the same again. So others are asked first then. This is an order, and
//! no blame: who asks may be wrong, or lie.
//!
//! | a server that | is asked |
//! |---|---|
//! | has given nothing of the part | first |
//! | gave it only to those who had found it wrong | then |
//! | gave it to others, of whom one may be who asks now | last |
//!
//! Of several of one kind, the one that gave it longest ago comes first. So who asks again and again gets it from all servers of a kind in
//! turn.
//!
//! Who reads all of an object once more says for the how manyeth time. All parts of one such reading come from one server, and each reading
//! from another one: else each would have parts of a server whose bytes are wrong, and others next time.
//!
//! Who asks is not known. Where several servers gave the part to others, the first that is asked may be the one whose bytes were wrong.

use std::collections::BTreeMap;
use std::ops::Range;

use headwater_store::Hash;

use crate::blame::ServerChoice;
use crate::servers::Servers;

/// Parts that are remembered: more than are read in the moment after which who found one wrong asks again.
const GIVEN_MAX: usize = 4096;

/// A part of an object that a server gave.
#[derive(Debug)]
pub(crate) struct GivenPart {
    pub object: Hash,
    pub part: Range<u64>,
    pub server: usize,
    /// Whether it was asked for past caches, as what came before was wrong.
    pub past_caches: bool,
}

impl Servers {
    /// Remembers who gave a part of an object.
    pub(crate) fn gave(&self, given: GivenPart) {
        let kept = &mut self.state.lock().given;
        kept.push_back(given);
        if kept.len() > GIVEN_MAX {
            kept.pop_front();
        }
    }

    /// Whom to ask for a part that was wrong.
    pub(crate) fn others_first(&self, object: Hash, part: &Range<u64>) -> ServerChoice {
        // Whether each gave it to others, and when it gave it last.
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
    /// Whom to ask where all of an object is read for the so manyeth time. What those are asked is counted in their turn, as they may
    /// have servers themselves.
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
    fn who_gave_what_was_wrong_is_asked_last() {
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
        // Several found the same wrong: what the first one got instead is not what the second one means.
        gave(0, object, 0..100, false);
        gave(1, object, 0..100, true);
        assert_eq!(last(0..100), [1, 0]);
        // It was wrong there, too.
        gave(2, object, 0..100, true);
        assert_eq!(last(0..100), [1, 2, 0]);
        // Another one is asked by those who know of nothing.
        gave(1, object, 0..100, false);
        assert_eq!(last(0..100), [2, 0, 1]);
        for _ in 0..GIVEN_MAX {
            gave(0, other, 0..1, false);
        }
        assert!(last(0..100).is_empty());
    }

    #[test]
    fn who_finds_a_part_wrong_again_and_again_gets_it_from_all_servers_in_turn() {
        let object = Hash::of(b"1");
        // Those who gave it to whom they did not know, and in which order they are asked then.
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
                // One that has given nothing of it is asked before those.
                let first = (0..3).find(|server| !last.contains(server)).unwrap_or_else(|| last[0]);
                gave(first, true);
                first
            });
            assert_eq!(asked, expected, "{before:?}");
        }
    }

    #[test]
    fn many_who_had_wrong_bytes_of_one_server_get_the_part_from_the_other_one() {
        let (servers, object) = (three_servers(), Hash::of(b"1"));
        let gave = |server, past_caches| {
            servers.gave(GivenPart { object, part: 0..100, server, past_caches });
        };
        // All at a time, and one after the other.
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
        // Nobody is there.
        assert_eq!(turn(7), (None, Some(7)));
        servers.is_back(0, std::time::Duration::ZERO);
        assert_eq!(turn(7), (Some(0), Some(7)));
        servers.is_back(2, std::time::Duration::ZERO);
        let turns: Vec<_> = (1..5).map(turn).collect();
        // Each of those that these may have comes once with each of them.
        assert_eq!(turns, [(Some(2), Some(0)), (Some(0), Some(1)), (Some(2), Some(1)), (Some(0), Some(2))]);
    }
}
