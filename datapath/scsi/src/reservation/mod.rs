//! Reservations: persistent ones (SPC-4, 5.12) and those of RESERVE and RELEASE (SPC-2).
//!
//! Persistent reservations belong to initiator ports. They survive the end of a session and a reset of the
//! logical unit, and end with the process (PTPL is not supported, and APTPL refused). A reservation by
//! RESERVE belongs to the nexus and ends with it.
//!
//! ```text
//!   command --> conflicts()? --no--> executed
//!                 |  if nothing is reserved: one load of an atomic
//!                 +-- otherwise: compare the table of `access` with holder and registrants
//! ```

mod access;
mod persistent;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

pub(crate) use access::Access;
pub(crate) use persistent::{Effects, Persistent, Refusal};

use crate::cdb::ReserveOut;
use crate::identity::Initiator;
use crate::link::NexusId;
use crate::sense::Fault;

/// The reservations of one logical unit.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// Whether anything is reserved. A RAM hit checks only this.
    any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    persistent: Persistent,
    simple: Option<NexusId>,
}

impl State {
    fn is_held_by_another(&self, nexus: NexusId) -> bool {
        self.simple.is_some_and(|holder| holder != nexus)
    }
}

impl Reservations {
    /// Whether a reservation of another initiator forbids the command.
    #[inline]
    pub(crate) fn conflicts(&self, nexus: NexusId, initiator: &Initiator, access: Access) -> bool {
        self.any.load(Ordering::Relaxed) && self.look_up(nexus, initiator, access)
    }

    #[cold]
    fn look_up(&self, nexus: NexusId, initiator: &Initiator, access: Access) -> bool {
        let state = self.state.lock();
        if state.is_held_by_another(nexus) {
            return access != Access::Identify;
        }
        state.persistent.conflicts(initiator, access)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        self.any.store(state.simple.is_some() || state.persistent.is_reserved(), Ordering::SeqCst);
        result
    }

    /// RESERVE. `false`: conflict.
    pub(crate) fn reserve_simple(&self, nexus: NexusId) -> bool {
        self.change(|state| {
            // Two RESERVE commands at the same time may both have passed the check.
            if state.persistent.is_registered_by_any() || state.is_held_by_another(nexus) {
                return false;
            }
            state.simple = Some(nexus);
            true
        })
    }

    /// RELEASE. `false`: conflict. If the nexus has no reservation it does nothing.
    pub(crate) fn release_simple(&self, nexus: NexusId) -> bool {
        self.change(|state| {
            if state.persistent.is_registered_by_any() {
                return false;
            }
            if state.simple == Some(nexus) {
                state.simple = None;
            }
            true
        })
    }

    /// Removes the reservation of a nexus that ends.
    pub(crate) fn nexus_lost(&self, nexus: NexusId) {
        self.change(|state| {
            if state.simple == Some(nexus) {
                state.simple = None;
            }
        });
    }

    /// Removes the reservation at a reset.
    pub(crate) fn clear_simple(&self) {
        self.change(|state| state.simple = None);
    }

    /// PERSISTENT RESERVE IN.
    pub(crate) fn report(&self, action: u8) -> Result<Vec<u8>, Fault> {
        self.state.lock().persistent.report(action)
    }

    /// PERSISTENT RESERVE OUT.
    pub(crate) fn persistent_out(
        &self,
        nexus: NexusId,
        initiator: &Arc<Initiator>,
        request: &ReserveOut,
        list: &[u8],
    ) -> Result<Effects, Refusal> {
        self.change(|state| {
            // A RESERVE may have been executed since the check.
            if state.is_held_by_another(nexus) {
                return Err(Refusal::Conflict);
            }
            state.persistent.out(initiator, request, list)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_permitted_reserves_only_one_succeeds() {
        let (a, b) = (NexusId::next(), NexusId::next());
        let port = |name| {
            Arc::new(Initiator {
                transport_id: Box::new([0x45, 0, 0, name]),
                target_port: 1,
                target_port_name: "t".into(),
            })
        };
        let register = ReserveOut { action: 0, scope: 0, kind: 0, list_bytes: 24 };
        let list = [[0; 8], 7_u64.to_be_bytes(), [0; 8]].concat();
        let reservations = Reservations::default();
        assert!(reservations.reserve_simple(a) && reservations.reserve_simple(a));
        assert!(!reservations.reserve_simple(b));
        let out = reservations.persistent_out(b, &port(2), &register, &list);
        assert_eq!(out.err(), Some(Refusal::Conflict));
        assert!(reservations.release_simple(b) && !reservations.reserve_simple(b));
        assert!(reservations.release_simple(a) && reservations.reserve_simple(b));
    }
}
