//! What a boot server remembers of machines between packets: the form of the offer, and loaders that lead nowhere.
//!
//! | of a machine | why |
//! |---|---|
//! | the exchange of its last DISCOVER, and how often it was repeated | firmware that ignores one form of offer asks again in the same exchange |
//! | whether the other form is its form | it need not ignore an offer at each boot |
//! | when it was given loaders since it last had a script | a loader that starts itself again loops |

use std::collections::HashMap;

use crate::mac::Mac;

/// Machines that are remembered; the one that was quiet longest is forgotten first.
pub const MACHINES_MAX: usize = 1000;
/// So many loaders within [`LOADER_WINDOW`] and no script: the machine loops.
pub const LOADERS_MAX: usize = 3;
/// See [`LOADERS_MAX`]; in milliseconds.
pub const LOADER_WINDOW_MS: u64 = 60_000;
/// How long a machine that loops gets no answer, in milliseconds.
pub const LOOP_SILENCE_MS: u64 = 300_000;

/// What is known of a machine when a packet of it arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// DISCOVERs of the same exchange before this one, each of which got an offer.
    pub repeats: u32,
    /// Its firmware ignored the usual form of an offer.
    pub takes_other_form: bool,
    /// It was given loader after loader and never asked for a script.
    pub is_looping: bool,
}

/// The machines.
#[derive(Debug, Default)]
pub struct Histories {
    machines: HashMap<Mac, History>,
}

#[derive(Debug, Default)]
struct History {
    xid: Option<u32>,
    repeats: u32,
    takes_other_form: bool,
    loaders_ms: Vec<u64>,
    silent_until_ms: u64,
    seen_ms: u64,
}

impl Histories {
    /// Notes a DISCOVER, and says what was known before.
    pub fn discover(&mut self, mac: Mac, xid: u32, now_ms: u64) -> Past {
        let history = self.of(mac, now_ms);
        if history.xid == Some(xid) {
            history.repeats = history.repeats.saturating_add(1);
            history.takes_other_form = history.repeats % 2 == 1;
        } else {
            (history.xid, history.repeats) = (Some(xid), 0);
        }
        history.past(now_ms)
    }

    /// What is known of a machine that asks in the course of an exchange.
    pub fn request(&mut self, mac: Mac, now_ms: u64) -> Past {
        self.of(mac, now_ms).past(now_ms)
    }

    /// Notes that a machine was given a loader. Whether this is the one that makes it count as looping.
    pub fn gave_loader(&mut self, mac: Mac, now_ms: u64) -> bool {
        let history = self.of(mac, now_ms);
        history.loaders_ms.retain(|at| at.saturating_add(LOADER_WINDOW_MS) > now_ms);
        history.loaders_ms.push(now_ms);
        let loops = history.loaders_ms.len() > LOADERS_MAX;
        if loops {
            history.loaders_ms.clear();
            history.silent_until_ms = now_ms.saturating_add(LOOP_SILENCE_MS);
        }
        loops
    }

    /// Notes that a machine has its script: its loader works.
    pub fn gave_script(&mut self, mac: Mac, now_ms: u64) {
        self.of(mac, now_ms).loaders_ms.clear();
    }

    fn of(&mut self, mac: Mac, now_ms: u64) -> &mut History {
        if !self.machines.contains_key(&mac) && self.machines.len() >= MACHINES_MAX {
            let oldest = self.machines.iter().min_by_key(|(_, history)| history.seen_ms).map(|(mac, _)| *mac);
            oldest.map(|oldest| self.machines.remove(&oldest));
        }
        let history = self.machines.entry(mac).or_default();
        history.seen_ms = now_ms;
        history
    }
}

impl History {
    fn past(&self, now_ms: u64) -> Past {
        Past {
            repeats: self.repeats,
            takes_other_form: self.takes_other_form,
            is_looping: now_ms < self.silent_until_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

    #[test]
    fn a_discover_that_is_repeated_gets_the_other_form() {
        let mut histories = Histories::default();
        assert_eq!(histories.discover(MAC, 1, 0), Past::default());
        let again = histories.discover(MAC, 1, 4000);
        assert_eq!((again.repeats, again.takes_other_form), (1, true));
        // The next boot begins with what worked.
        let next = histories.discover(MAC, 2, 90_000);
        assert_eq!((next.repeats, next.takes_other_form), (0, true));
    }

    #[test]
    fn a_machine_that_loops_is_left_alone_for_five_minutes() {
        let mut histories = Histories::default();
        for at in 0..3 {
            assert!(!histories.gave_loader(MAC, at * 1000));
        }
        assert!(histories.gave_loader(MAC, 3000));
        assert!(histories.discover(MAC, 1, 302_999).is_looping);
        assert!(!histories.discover(MAC, 1, 303_000).is_looping);
    }

    #[test]
    fn a_script_or_a_minute_ends_the_count_of_loaders() {
        let mut histories = Histories::default();
        for at in 0..20 {
            assert!(!histories.gave_loader(MAC, at * 1000));
            histories.gave_script(MAC, at * 1000);
        }
        for at in 0..20 {
            assert!(!histories.gave_loader(MAC, 100_000 + at * 20_001));
        }
    }

    #[test]
    fn the_machine_that_was_quiet_longest_is_forgotten_first() {
        let mut histories = Histories::default();
        let mac = |number: u64| Mac([2, 0, 0, 0, (number >> 8) as u8, number as u8]);
        for number in 0..=MACHINES_MAX as u64 {
            histories.discover(mac(number), 5, number);
        }
        assert_eq!(histories.machines.len(), MACHINES_MAX);
        assert_eq!(histories.discover(mac(1), 5, 5000).repeats, 1);
        assert_eq!(histories.discover(mac(0), 5, 5001).repeats, 0);
    }
}
