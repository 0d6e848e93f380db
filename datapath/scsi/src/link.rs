//! A nexus's view of one logical unit (SAM's I_T_L nexus): its unit attentions and its EXTENDED COPY operations.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::copies::Copies;
use crate::identity::Initiator;
use crate::sense::Code;
use crate::unit::LogicalUnit;

/// A number that no other nexus of this process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NexusId(u64);

impl NexusId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The state of one nexus at one logical unit (an I_T_L nexus).
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) unit: Arc<LogicalUnit>,
    pub(crate) nexus: NexusId,
    pub(crate) initiator: Arc<Initiator>,
    pub(crate) attention: Attention,
    pub(crate) copies: Copies,
}

/// The most unit attentions that wait at a time; there are about as many kinds.
const ATTENTIONS: usize = 16;

/// Unit attention conditions that the initiator has not seen yet.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    /// Whether `waiting` has any entry. A RAM hit checks only this.
    pending: AtomicBool,
    waiting: Mutex<VecDeque<Code>>,
}

impl Attention {
    /// Adds a condition, if it is not pending already. A reset replaces all earlier conditions. If [`ATTENTIONS`] conditions wait, a further
    /// condition is dropped.
    pub(crate) fn establish(&self, code: Code) {
        let mut waiting = self.waiting.lock();
        if code == Code::RESET_FUNCTION_OCCURRED || code == Code::POWER_ON_OR_RESET {
            waiting.clear();
        }
        if !waiting.contains(&code) && waiting.len() < ATTENTIONS {
            waiting.push_back(code);
        }
        self.pending.store(true, Ordering::SeqCst);
    }

    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// Removes and returns the oldest condition.
    pub(crate) fn take(&self) -> Option<Code> {
        let mut waiting = self.waiting.lock();
        let code = waiting.pop_front();
        self.pending.store(!waiting.is_empty(), Ordering::SeqCst);
        code
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attentions_are_reported_once_and_in_order() {
        let attention = Attention::default();
        attention.establish(Code::MODE_PARAMETERS_CHANGED);
        attention.establish(Code::RESERVATIONS_RELEASED);
        attention.establish(Code::MODE_PARAMETERS_CHANGED);
        assert!(attention.is_pending());
        assert_eq!(attention.take(), Some(Code::MODE_PARAMETERS_CHANGED));
        assert!(attention.is_pending());
        assert_eq!(attention.take(), Some(Code::RESERVATIONS_RELEASED));
        assert!(!attention.is_pending());
        assert_eq!(attention.take(), None);
    }

    #[test]
    fn a_reset_makes_earlier_attentions_moot() {
        let attention = Attention::default();
        attention.establish(Code::MODE_PARAMETERS_CHANGED);
        attention.establish(Code::RESET_FUNCTION_OCCURRED);
        assert_eq!(attention.take(), Some(Code::RESET_FUNCTION_OCCURRED));
        assert_eq!(attention.take(), None);
    }
}
