//! Counts the requests of one connection that wait for the device.

use crate::limits::Limits;

/// Requests that the device has, and their payload in bytes.
#[derive(Default)]
pub(super) struct InFlight {
    requests: usize,
    bytes: usize,
    /// How many of them belong to requests that need no space in the device, such as reads. Requests that
    /// need space may wait for long.
    others: usize,
    other_bytes: usize,
}

impl InFlight {
    pub(super) fn add(&mut self, bytes: usize, needs_room: bool) {
        self.requests = self.requests.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
        if !needs_room {
            self.others = self.others.saturating_add(1);
            self.other_bytes = self.other_bytes.saturating_add(bytes);
        }
    }

    pub(super) fn remove(&mut self, bytes: usize, needs_room: bool) {
        self.requests = self.requests.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        if !needs_room {
            self.others = self.others.saturating_sub(1);
            self.other_bytes = self.other_bytes.saturating_sub(bytes);
        }
    }

    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    #[inline]
    pub(super) fn any(&self) -> bool {
        self.requests > 0
    }

    /// Whether a limit is reached: then no request that needs space is taken.
    #[inline]
    pub(super) fn is_full(&self, limits: &Limits) -> bool {
        self.requests >= limits.requests_in_flight || self.bytes >= limits.bytes_in_flight
    }

    /// Whether a request that needs no space may be taken: such requests have another quarter of the limits.
    #[inline]
    pub(super) fn has_room_for_others(&self, limits: &Limits) -> bool {
        !self.is_full(limits)
            || self.others == 0
            || (self.others < limits.requests_in_flight / 4 && self.other_bytes < limits.bytes_in_flight / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_writes_leave_a_quarter_to_other_requests() {
        let limits = Limits { requests_in_flight: 8, bytes_in_flight: 800, ..Limits::default() };
        let mut in_flight = InFlight::default();
        (0..8).for_each(|_| in_flight.add(10, true));
        assert!(in_flight.is_full(&limits));
        for _ in 0..2 {
            assert!(in_flight.has_room_for_others(&limits));
            in_flight.add(10, false);
        }
        assert!(!in_flight.has_room_for_others(&limits));
        (0..2).for_each(|_| in_flight.remove(10, false));
        in_flight.add(200, false);
        assert!(!in_flight.has_room_for_others(&limits), "bytes count too");
        (0..2).for_each(|_| in_flight.remove(10, true));
        assert!(in_flight.has_room_for_others(&limits) && !in_flight.is_full(&limits));
        in_flight.remove(200, false);
        (0..6).for_each(|_| in_flight.remove(10, true));
        assert!(!in_flight.any());
    }
}
