//! Remembers machines between packets: which form of offer a machine accepts (direct or BINL, see [`crate::decide`]), and
//! whether it loads loaders in a loop.
//!
//! | remembered of a machine | used for |
//! |---|---|
//! | exchange number of its last DISCOVER, and its repetitions | firmware that ignores one form of offer repeats its DISCOVER with the same number: it gets the other form |
//! | whether it accepts only the other form | the next boot begins with the form that worked |
//! | times at which it got loaders since it last got a script | detects a loader that loads itself again and again |

use std::collections::HashMap;

use crate::mac::Mac;

/// The most machines that are remembered. A new machine replaces the one whose last packet is oldest.
pub const MACHINES_MAX: usize = 1000;
/// The most loaders that a machine gets within [`LOADER_WINDOW_MS`] without fetching a script. With the next one it counts
/// as looping.
pub const LOADERS_MAX: usize = 3;
/// The time window for [`LOADERS_MAX`], in milliseconds.
pub const LOADER_WINDOW_MS: u64 = 60_000;
/// How long a looping machine gets no answer, in milliseconds.
pub const LOOP_SILENCE_MS: u64 = 300_000;

/// The state of a machine when one of its packets arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// Earlier DISCOVERs with the same exchange number as the present one. Each of them got an offer.
    pub repeats: u32,
    /// Its firmware ignored an offer in the usual form.
    pub takes_other_form: bool,
    /// The machine fetched loader after loader and no script, and gets no answer for [`LOOP_SILENCE_MS`]. False after that time.
    pub is_looping: bool,
}

/// The histories of all machines.
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
    /// Records a DISCOVER. Returns the state with which it is answered.
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

    /// The state of a machine that sends another packet of an exchange.
    pub fn request(&mut self, mac: Mac, now_ms: u64) -> Past {
        self.of(mac, now_ms).past(now_ms)
    }

    /// Records that a machine got a loader. Returns whether the machine counts as looping from now on.
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

    /// Records that a machine got its script: its loader works.
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
        // The next boot begins with the form that worked.
        let next = histories.discover(MAC, 2, 90_000);
        assert_eq!((next.repeats, next.takes_other_form), (0, true));
    }

    #[test]
    fn a_looping_machine_gets_no_answer_for_five_minutes() {
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
