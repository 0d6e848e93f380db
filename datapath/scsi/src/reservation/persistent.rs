//! The state machine of persistent reservations. They end with the process, because APTPL is refused.
//!
//! | action | allowed for | registrations | reservation | unit attention for others |
//! |---|---|---|---|---|
//! | REGISTER | the registered key; 0 if not registered | added, changed, removed | ends with its holder's registration | RESERVATIONS RELEASED, for types 5 to 8 |
//! | REGISTER AND IGNORE | all | the same | the same | the same |
//! | RESERVE | registrants | - | made, if there is none | - |
//! | RELEASE | registrants | - | ends, if it is the initiator's own | RESERVATIONS RELEASED, for types 5 to 8 |
//! | CLEAR | registrants | all removed | ends | RESERVATIONS PREEMPTED |
//! | PREEMPT (AND ABORT) | registrants | those with the key removed; for key 0 and types 7 and 8, all others removed | taken over, if its holder had the key, or for key 0 and types 7 and 8 | REGISTRATIONS PREEMPTED; RESERVATIONS RELEASED, if the type changed |

use std::sync::Arc;

use super::Access;
use crate::cdb::ReserveOut;
use crate::identity::Initiator;
use crate::sense::{Code, Fault};
use crate::wire::{bit_at, len16, len32, u64_at};

/// Most registrations of a logical unit.
const REGISTRATIONS: usize = 256;

/// Length of the parameter list without TransportIDs.
const LIST_BYTES: usize = 24;

// The service actions of PERSISTENT RESERVE OUT. The remaining one is PREEMPT AND ABORT (5).
const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const REGISTER_AND_IGNORE: u8 = 6;

/// Type of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrants = 5,
    ExclusiveAccessRegistrants = 6,
    WriteExclusiveAll = 7,
    ExclusiveAccessAll = 8,
}

impl Kind {
    fn new(number: u8) -> Option<Self> {
        Some(match number {
            1 => Kind::WriteExclusive,
            3 => Kind::ExclusiveAccess,
            5 => Kind::WriteExclusiveRegistrants,
            6 => Kind::ExclusiveAccessRegistrants,
            7 => Kind::WriteExclusiveAll,
            8 => Kind::ExclusiveAccessAll,
            _ => return None,
        })
    }

    /// Whether all registrants hold the reservation.
    fn is_all(self) -> bool {
        matches!(self, Kind::WriteExclusiveAll | Kind::ExclusiveAccessAll)
    }

    /// Whether registrants that do not hold the reservation have the holder's access.
    fn admits_registrants(self) -> bool {
        !matches!(self, Kind::WriteExclusive | Kind::ExclusiveAccess)
    }

    /// Whether every initiator may read.
    fn admits_reading(self) -> bool {
        matches!(self, Kind::WriteExclusive | Kind::WriteExclusiveRegistrants | Kind::WriteExclusiveAll)
    }
}

#[derive(Clone, Debug)]
struct Registration {
    port: Arc<Initiator>,
    key: u64,
}

#[derive(Clone, Debug)]
struct Held {
    kind: Kind,
    /// The holder; ignored if all registrants hold it.
    holder: Arc<Initiator>,
}

/// The effects of a change on other initiators.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Unit attentions.
    pub(crate) attentions: Vec<(Arc<Initiator>, Code)>,
    /// The initiators whose tasks have to be aborted.
    pub(crate) aborts: Vec<Arc<Initiator>>,
}

/// Why PERSISTENT RESERVE OUT was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Conflict,
    Fault(Fault),
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Refusal::Fault(fault)
    }
}

/// Registrations and the reservation of a logical unit.
#[derive(Debug, Default)]
pub(crate) struct Persistent {
    generation: u32,
    registrations: Vec<Registration>,
    held: Option<Held>,
}

/// Whether initiator port and target port are the same. A unit may belong to several targets, whose ports
/// have the same numbers, so the name counts too.
fn is_same(a: &Initiator, b: &Initiator) -> bool {
    a.transport_id == b.transport_id
        && a.target_port == b.target_port
        && a.target_port_name == b.target_port_name
}

impl Persistent {
    pub(crate) fn is_reserved(&self) -> bool {
        self.held.is_some()
    }

    pub(crate) fn is_registered_by_any(&self) -> bool {
        !self.registrations.is_empty()
    }

    pub(crate) fn conflicts(&self, initiator: &Initiator, access: Access) -> bool {
        let Some(held) = &self.held else { return false };
        match access {
            Access::Identify | Access::Status => return false,
            Access::Reading if held.kind.admits_reading() => return false,
            Access::Reading | Access::Changing => {}
        }
        let allowed = if held.kind.admits_registrants() {
            self.key_of(initiator).is_some()
        } else {
            is_same(&held.holder, initiator)
        };
        !allowed
    }

    fn key_of(&self, initiator: &Initiator) -> Option<u64> {
        self.registrations.iter().find(|r| is_same(&r.port, initiator)).map(|r| r.key)
    }

    fn holds(&self, initiator: &Initiator) -> bool {
        self.held.as_ref().is_some_and(|held| {
            if held.kind.is_all() {
                self.key_of(initiator).is_some()
            } else {
                is_same(&held.holder, initiator)
            }
        })
    }

    fn others(&self, me: &Initiator, code: Code) -> Vec<(Arc<Initiator>, Code)> {
        let others = self.registrations.iter().filter(|r| !is_same(&r.port, me));
        others.map(|r| (Arc::clone(&r.port), code)).collect()
    }

    fn bump(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// PERSISTENT RESERVE OUT.
    pub(crate) fn out(
        &mut self,
        me: &Arc<Initiator>,
        request: &ReserveOut,
        list: &[u8],
    ) -> Result<Effects, Refusal> {
        if request.action > REGISTER_AND_IGNORE {
            return Err(Fault::field(1).into());
        }
        if request.list_bytes != 24 || list.len() < LIST_BYTES {
            return Err(Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
        }
        let (key, new_key) = (u64_at(list, 0), u64_at(list, 8));
        // SPEC_I_PT, ALL_TG_PT and APTPL, which REPORT CAPABILITIES says are not supported.
        if matches!(request.action, REGISTER | REGISTER_AND_IGNORE)
            && [0, 2, 3].iter().any(|bit| bit_at(list, 20, *bit))
        {
            return Err(Fault::parameter(20).into());
        }
        let kind = || {
            if request.scope != 0 {
                return Err(Fault::field(2));
            }
            Kind::new(request.kind).ok_or(Fault::field(2))
        };
        match request.action {
            REGISTER if self.key_of(me).unwrap_or(0) != key => Err(Refusal::Conflict),
            REGISTER | REGISTER_AND_IGNORE => self.register(me, new_key),
            _ if self.key_of(me) != Some(key) => Err(Refusal::Conflict),
            RESERVE => self.reserve(me, kind()?),
            RELEASE => self.release(me, request),
            CLEAR => Ok(self.clear(me)),
            _ => {
                let mut effects = self.preempt(me, new_key, kind()?)?;
                if request.action == PREEMPT {
                    effects.aborts.clear();
                }
                Ok(effects)
            }
        }
    }

    fn register(&mut self, me: &Arc<Initiator>, new_key: u64) -> Result<Effects, Refusal> {
        let place = self.registrations.iter().position(|r| is_same(&r.port, me));
        let mut effects = Effects::default();
        match (place, new_key) {
            (None, 0) => {}
            (None, key) => {
                if self.registrations.len() >= REGISTRATIONS {
                    return Err(Fault::illegal(Code::INSUFFICIENT_REGISTRATION_RESOURCES).into());
                }
                self.registrations.push(Registration { port: Arc::clone(me), key });
            }
            (Some(_), 0) => {
                effects.attentions = self.unregister(me);
            }
            (Some(place), key) => {
                if let Some(registration) = self.registrations.get_mut(place) {
                    registration.key = key;
                }
            }
        }
        self.bump();
        Ok(effects)
    }

    /// Removes a registration, and the reservation if it ends with it. Returns the unit attentions of the
    /// others.
    fn unregister(&mut self, who: &Initiator) -> Vec<(Arc<Initiator>, Code)> {
        let held = self.holds(who);
        self.registrations.retain(|r| !is_same(&r.port, who));
        let Some(kind) = self.held.as_ref().map(|h| h.kind).filter(|_| held) else {
            return Vec::new();
        };
        // A reservation of all registrants ends with the last of them.
        if kind.is_all() && !self.registrations.is_empty() {
            return Vec::new();
        }
        self.held = None;
        if kind.admits_registrants() { self.others(who, Code::RESERVATIONS_RELEASED) } else { Vec::new() }
    }

    fn reserve(&mut self, me: &Arc<Initiator>, kind: Kind) -> Result<Effects, Refusal> {
        match &self.held {
            None => {
                self.held = Some(Held { kind, holder: Arc::clone(me) });
                Ok(Effects::default())
            }
            Some(held) if held.kind == kind && self.holds(me) => Ok(Effects::default()),
            Some(_) => Err(Refusal::Conflict),
        }
    }

    fn release(&mut self, me: &Arc<Initiator>, request: &ReserveOut) -> Result<Effects, Refusal> {
        let Some(held) = self.held.as_ref().filter(|_| self.holds(me)) else {
            return Ok(Effects::default());
        };
        if request.scope != 0 || Kind::new(request.kind) != Some(held.kind) {
            return Err(Fault::illegal(Code::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into());
        }
        let tell = held.kind.admits_registrants();
        self.held = None;
        let attentions = if tell { self.others(me, Code::RESERVATIONS_RELEASED) } else { Vec::new() };
        Ok(Effects { attentions, aborts: Vec::new() })
    }

    fn clear(&mut self, me: &Arc<Initiator>) -> Effects {
        let attentions = self.others(me, Code::RESERVATIONS_PREEMPTED);
        self.registrations.clear();
        self.held = None;
        self.bump();
        Effects { attentions, aborts: Vec::new() }
    }

    fn preempt(&mut self, me: &Arc<Initiator>, key: u64, kind: Kind) -> Result<Effects, Refusal> {
        let takes_over = match &self.held {
            None => false,
            Some(held) if held.kind.is_all() => key == 0,
            Some(held) => self.key_of(&held.holder) == Some(key),
        };
        if key == 0 && !takes_over {
            return Err(Fault::parameter(8).into());
        }
        // Preempting all registrants removes all registrations except the preempting initiator's own.
        let is_meant = |r: &Registration| {
            let all = takes_over && key == 0;
            (all || r.key == key) && !(takes_over && is_same(&r.port, me))
        };
        let removed: Vec<Arc<Initiator>> =
            self.registrations.iter().filter(|r| is_meant(r)).map(|r| Arc::clone(&r.port)).collect();
        if removed.is_empty() && !takes_over {
            return Err(Refusal::Conflict);
        }
        let mut effects = Effects::default();
        let old = if takes_over { self.held.take() } else { None };
        for port in &removed {
            effects.attentions.extend(self.unregister(port));
            if !is_same(port, me) {
                effects.attentions.push((Arc::clone(port), Code::REGISTRATIONS_PREEMPTED));
            }
        }
        if let Some(old) = old {
            self.held = Some(Held { kind, holder: Arc::clone(me) });
            if old.kind != kind {
                effects.attentions.extend(self.others(me, Code::RESERVATIONS_RELEASED));
            }
        }
        effects.aborts = removed;
        self.bump();
        Ok(effects)
    }

    /// PERSISTENT RESERVE IN.
    pub(crate) fn report(&self, action: u8) -> Result<Vec<u8>, Fault> {
        let body = match action {
            0 => self.registrations.iter().flat_map(|r| r.key.to_be_bytes()).collect(),
            1 => self.reservation(),
            2 => {
                // Only TMV is set: the type mask below is valid. All six types.
                return Ok(vec![0, 8, 0x00, 0x80, 0xea, 0x01, 0, 0]);
            }
            3 => self.full_status(),
            _ => return Err(Fault::field(1)),
        };
        let mut data = self.generation.to_be_bytes().to_vec();
        data.extend_from_slice(&len32(body.len()));
        data.extend_from_slice(&body);
        Ok(data)
    }

    fn reservation(&self) -> Vec<u8> {
        let Some(held) = &self.held else { return Vec::new() };
        let key = if held.kind.is_all() { 0 } else { self.key_of(&held.holder).unwrap_or(0) };
        let mut body = key.to_be_bytes().to_vec();
        body.extend_from_slice(&[0, 0, 0, 0, 0, held.kind as u8, 0, 0]);
        body
    }

    fn full_status(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for registration in &self.registrations {
            let held = self.held.as_ref().filter(|_| self.holds(&registration.port));
            let kind = held.map_or(0, |held| held.kind as u8);
            body.extend_from_slice(&registration.key.to_be_bytes());
            body.extend_from_slice(&[0, 0, 0, 0, u8::from(held.is_some()), kind, 0, 0, 0, 0]);
            body.extend_from_slice(&registration.port.target_port.to_be_bytes());
            body.extend_from_slice(&[0, 0]);
            body.extend_from_slice(&len16(registration.port.transport_id.len()));
            body.extend_from_slice(&registration.port.transport_id);
        }
        body
    }
}
