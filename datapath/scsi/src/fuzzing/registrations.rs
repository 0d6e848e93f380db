//! Model of persistent reservations (SPC-4, 5.13), which the fuzzer compares with the real implementation
//! [`crate::reservation`]. It stores only the list of keys, the reservation and the pending unit attentions;
//! whether an initiator is registered or holds the reservation is derived from them. Initiators are numbers.

use crate::cdb::ReserveOut;
use crate::reservation::Access;
use crate::sense::{Code, Fault};

/// Service actions of PERSISTENT RESERVE OUT.
mod action {
    pub(super) const REGISTER: u8 = 0;
    pub(super) const RESERVE: u8 = 1;
    pub(super) const RELEASE: u8 = 2;
    pub(super) const CLEAR: u8 = 3;
    pub(super) const PREEMPT: u8 = 4;
    pub(super) const PREEMPT_AND_ABORT: u8 = 5;
    pub(super) const REGISTER_AND_IGNORE: u8 = 6;
}

/// Types of reservations. From `FIRST_REGISTRANTS` on, all registrants have the holder's access; from
/// `FIRST_ALL` on, all registrants hold the reservation.
const FIRST_REGISTRANTS: u8 = 5;
const FIRST_ALL: u8 = 7;
const WRITE_EXCLUSIVE: [u8; 3] = [1, 5, 7];
const TYPES: [u8; 6] = [1, 3, 5, 6, 7, 8];

/// The byte of the parameter list with the flags, and the flags that are not supported: SPEC_I_PT, ALL_TG_PT
/// and APTPL.
const FLAGS_AT: u16 = 20;
const UNSUPPORTED_FLAGS: u8 = 0b1101;

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejected {
    Conflict,
    Fault(Fault),
}

impl From<Fault> for Rejected {
    fn from(fault: Fault) -> Self {
        Rejected::Fault(fault)
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
    /// Unit attentions that were not taken yet, each with its initiator.
    attentions: Vec<(usize, Code)>,
}

impl Registrations {
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Takes the pending unit attentions.
    pub(super) fn take_attentions(&mut self) -> Vec<(usize, Code)> {
        std::mem::take(&mut self.attentions)
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
            Access::Reading => WRITE_EXCLUSIVE.contains(&kind),
            Access::Changing => false,
        };
        !is_free && if kind >= FIRST_REGISTRANTS { self.key(who).is_none() } else { !self.holds(who) }
    }

    fn notify_others(&mut self, me: usize, code: Code) {
        let others: Vec<usize> = self.keys.iter().map(|(who, _)| *who).filter(|who| *who != me).collect();
        self.attentions.extend(others.into_iter().map(|who| (who, code)));
    }

    fn unregister(&mut self, who: usize) {
        let held = self.holds(who);
        self.keys.retain(|(owner, _)| *owner != who);
        let Some((kind, holder)) = self.held.filter(|_| held) else { return };
        if holder.is_none() && !self.keys.is_empty() {
            return;
        }
        self.held = None;
        if kind >= FIRST_REGISTRANTS {
            self.notify_others(who, Code::RESERVATIONS_RELEASED);
        }
    }

    /// PERSISTENT RESERVE OUT with its parameter list.
    pub(super) fn out(&mut self, me: usize, request: &ReserveOut, list: &[u8]) -> Result<(), Rejected> {
        if request.action > action::REGISTER_AND_IGNORE {
            return Err(Fault::field(1).into());
        }
        let Some(list) = list.first_chunk::<24>().filter(|_| request.list_bytes == 24) else {
            return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
        };
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let (key, other) = (number(&list[..8]), number(&list[8..16]));
        let registers = [action::REGISTER, action::REGISTER_AND_IGNORE].contains(&request.action);
        if registers && list[usize::from(FLAGS_AT)] & UNSUPPORTED_FLAGS != 0 {
            return Err(Fault::parameter(FLAGS_AT).into());
        }
        let mine = self.key(me);
        let key_fits =
            if request.action == action::REGISTER { mine.unwrap_or(0) == key } else { mine == Some(key) };
        if request.action != action::REGISTER_AND_IGNORE && !key_fits {
            return Err(Rejected::Conflict);
        }
        let is_type = request.scope == 0 && TYPES.contains(&request.kind);
        let sets_type =
            [action::RESERVE, action::PREEMPT, action::PREEMPT_AND_ABORT].contains(&request.action);
        if sets_type && !is_type {
            return Err(Fault::field(2).into());
        }
        let holder = (request.kind < FIRST_ALL).then_some(me);
        match request.action {
            action::RESERVE => match self.held {
                None => self.held = Some((request.kind, holder)),
                Some((kind, _)) if kind == request.kind && self.holds(me) => {}
                Some(_) => return Err(Rejected::Conflict),
            },
            action::RELEASE => self.release(me, request)?,
            action::CLEAR => {
                self.notify_others(me, Code::RESERVATIONS_PREEMPTED);
                (self.keys, self.held) = (Vec::new(), None);
            }
            action::PREEMPT | action::PREEMPT_AND_ABORT => {
                self.preempt(me, request.kind, holder, other)?;
            }
            _ => self.register(me, mine, other),
        }
        // RESERVE and RELEASE change no registration.
        if ![action::RESERVE, action::RELEASE].contains(&request.action) {
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

    fn release(&mut self, me: usize, request: &ReserveOut) -> Result<(), Rejected> {
        let Some((kind, _)) = self.held.filter(|_| self.holds(me)) else { return Ok(()) };
        if request.scope != 0 || request.kind != kind {
            return Err(Fault::illegal(Code::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into());
        }
        self.held = None;
        if kind >= FIRST_REGISTRANTS {
            self.notify_others(me, Code::RESERVATIONS_RELEASED);
        }
        Ok(())
    }

    fn preempt(&mut self, me: usize, kind: u8, holder: Option<usize>, victim: u64) -> Result<(), Rejected> {
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
        let removed: Vec<usize> = self
            .keys
            .iter()
            .filter(|(who, key)| (from_all || *key == victim) && !(takes_over && *who == me))
            .map(|(who, _)| *who)
            .collect();
        if removed.is_empty() && !takes_over {
            return Err(Rejected::Conflict);
        }
        let old = self.held.filter(|_| takes_over);
        if takes_over {
            self.held = None;
        }
        for who in removed {
            self.unregister(who);
            if who != me {
                self.attentions.push((who, Code::REGISTRATIONS_PREEMPTED));
            }
        }
        if let Some((old, _)) = old {
            self.held = Some((kind, holder));
            if old != kind {
                self.notify_others(me, Code::RESERVATIONS_RELEASED);
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
