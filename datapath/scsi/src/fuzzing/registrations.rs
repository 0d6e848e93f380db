//! A second implementation of persistent reservations, by the tables of SPC-4 5.13 and `docs/scsi.md`.
//! Initiators are numbers, and their state is computed and not stored.

use crate::cdb::ReserveOut;
use crate::reservation::Access;
use crate::sense::{Code, Fault};

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum No {
    Conflict,
    Fault(Fault),
}

impl From<Fault> for No {
    fn from(fault: Fault) -> Self {
        No::Fault(fault)
    }
}

/// Registrations, the reservation, and pending unit attentions.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    generation: u32,
    /// Initiator and key, in the order of registration.
    keys: Vec<(usize, u64)>,
    /// Type, and the holder unless it is all registrants.
    held: Option<(u8, Option<usize>)>,
    told: Vec<(usize, Code)>,
}

impl Registrations {
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Takes the pending unit attentions.
    pub(super) fn take_told(&mut self) -> Vec<(usize, Code)> {
        std::mem::take(&mut self.told)
    }

    fn key(&self, who: usize) -> Option<u64> {
        self.keys.iter().find(|(owner, _)| *owner == who).map(|(_, key)| *key)
    }

    fn holds(&self, who: usize) -> bool {
        match self.held {
            Some((_, Some(holder))) => holder == who,
            Some((_, None)) => self.key(who).is_some(),
            None => false,
        }
    }

    pub(super) fn conflicts(&self, who: usize, access: Access) -> bool {
        let Some((kind, _)) = self.held else { return false };
        let is_free = match access {
            Access::Identify | Access::Status => true,
            Access::Reading => [1, 5, 7].contains(&kind),
            Access::Changing => false,
        };
        // For types 5 to 8, registrants may do everything.
        !is_free && if kind >= 5 { self.key(who).is_none() } else { !self.holds(who) }
    }

    fn tell_others(&mut self, me: usize, code: Code) {
        let others: Vec<usize> = self.keys.iter().map(|(who, _)| *who).filter(|who| *who != me).collect();
        self.told.extend(others.into_iter().map(|who| (who, code)));
    }

    fn unregister(&mut self, who: usize) {
        let held = self.holds(who);
        self.keys.retain(|(owner, _)| *owner != who);
        let Some((kind, holder)) = self.held.filter(|_| held) else { return };
        if holder.is_none() && !self.keys.is_empty() {
            return;
        }
        self.held = None;
        if kind >= 5 {
            self.tell_others(who, Code::RESERVATIONS_RELEASED);
        }
    }

    /// PERSISTENT RESERVE OUT with its parameter list.
    pub(super) fn out(&mut self, me: usize, ask: &ReserveOut, list: &[u8]) -> Result<(), No> {
        if ask.action > 6 {
            return Err(Fault::field(1).into());
        }
        let Some(list) = list.first_chunk::<24>().filter(|_| ask.list_bytes == 24) else {
            return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
        };
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let (key, other) = (number(&list[..8]), number(&list[8..16]));
        let registers = ask.action == 0 || ask.action == 6;
        // SPEC_I_PT, ALL_TG_PT, APTPL.
        if registers && list[20] & 0b1101 != 0 {
            return Err(Fault::parameter(20).into());
        }
        let mine = self.key(me);
        let key_fits = if ask.action == 0 { mine.unwrap_or(0) == key } else { mine == Some(key) };
        if ask.action != 6 && !key_fits {
            return Err(No::Conflict);
        }
        let is_type = ask.scope == 0 && [1, 3, 5, 6, 7, 8].contains(&ask.kind);
        if matches!(ask.action, 1 | 4 | 5) && !is_type {
            return Err(Fault::field(2).into());
        }
        let holder = (ask.kind < 7).then_some(me);
        match ask.action {
            1 => match self.held {
                None => self.held = Some((ask.kind, holder)),
                Some((kind, _)) if kind == ask.kind && self.holds(me) => {}
                Some(_) => return Err(No::Conflict),
            },
            2 => self.release(me, ask)?,
            3 => {
                self.tell_others(me, Code::RESERVATIONS_PREEMPTED);
                (self.keys, self.held) = (Vec::new(), None);
            }
            4 | 5 => self.preempt(me, ask.kind, holder, other)?,
            _ => self.register(me, mine, other),
        }
        // RESERVE and RELEASE change no registration.
        if !matches!(ask.action, 1 | 2) {
            self.generation += 1;
        }
        Ok(())
    }

    fn register(&mut self, me: usize, mine: Option<u64>, key: u64) {
        match (mine, key) {
            (None, 0) => {}
            (None, key) => self.keys.push((me, key)),
            (Some(_), 0) => self.unregister(me),
            (Some(_), new) => {
                self.keys.iter_mut().filter(|(who, _)| *who == me).for_each(|(_, key)| *key = new);
            }
        }
    }

    fn release(&mut self, me: usize, ask: &ReserveOut) -> Result<(), No> {
        let Some((kind, _)) = self.held.filter(|_| self.holds(me)) else { return Ok(()) };
        if ask.scope != 0 || ask.kind != kind {
            return Err(Fault::illegal(Code::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into());
        }
        self.held = None;
        if kind >= 5 {
            self.tell_others(me, Code::RESERVATIONS_RELEASED);
        }
        Ok(())
    }

    fn preempt(&mut self, me: usize, kind: u8, holder: Option<usize>, victim: u64) -> Result<(), No> {
        let takes_over = match self.held {
            None => false,
            Some((_, None)) => victim == 0,
            Some((_, Some(holder))) => self.key(holder) == Some(victim),
        };
        if victim == 0 && !takes_over {
            return Err(Fault::parameter(8).into());
        }
        // The preempting initiator stays; if it preempts all registrants, their keys do not matter.
        let from_all = takes_over && victim == 0;
        let gone: Vec<usize> = self
            .keys
            .iter()
            .filter(|(who, key)| (from_all || *key == victim) && !(takes_over && *who == me))
            .map(|(who, _)| *who)
            .collect();
        if gone.is_empty() && !takes_over {
            return Err(No::Conflict);
        }
        let old = self.held.filter(|_| takes_over);
        if takes_over {
            self.held = None;
        }
        for who in gone {
            self.unregister(who);
            if who != me {
                self.told.push((who, Code::REGISTRATIONS_PREEMPTED));
            }
        }
        if let Some((old, _)) = old {
            self.held = Some((kind, holder));
            if old != kind {
                self.tell_others(me, Code::RESERVATIONS_RELEASED);
            }
        }
        Ok(())
    }

    /// The data of PERSISTENT RESERVE IN: keys, the reservation, and the full status with these TransportIDs.
    pub(super) fn report(&self, action: u8, transport_id: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        let mut body = Vec::new();
        match action {
            0 => self.keys.iter().for_each(|(_, key)| body.extend(key.to_be_bytes())),
            1 => {
                if let Some((kind, holder)) = self.held {
                    let key = holder.and_then(|holder| self.key(holder)).unwrap_or(0);
                    body.extend(key.to_be_bytes());
                    body.extend([0, 0, 0, 0, 0, kind, 0, 0]);
                }
            }
            _ => {
                for (who, key) in &self.keys {
                    let kind = self.held.filter(|_| self.holds(*who)).map_or(0, |(kind, _)| kind);
                    let id = transport_id(*who);
                    body.extend(key.to_be_bytes());
                    body.extend([0, 0, 0, 0, u8::from(kind > 0), kind, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
                    body.push(u8::try_from(id.len()).unwrap_or(u8::MAX));
                    body.extend(id);
                }
            }
        }
        let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        [&self.generation.to_be_bytes()[..], &len.to_be_bytes(), &body].concat()
    }
}
