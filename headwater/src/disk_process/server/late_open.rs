//! What is opened once, unless the process leaves its disks to the next one before.
//!
//! Without the second half there is a race: the process finds nothing open and ends, while another thread opens the store and begins to
//! use persistent disks, which the keeper then does not hold any more.

use std::sync::OnceLock;

use parking_lot::Mutex;

/// A value that is set at most once, and never after [`LateOpen::get_or_refuse`] has found none.
pub(super) struct LateOpen<T> {
    value: OnceLock<T>,
    is_refused: Mutex<bool>,
}

impl<T> Default for LateOpen<T> {
    fn default() -> Self {
        Self { value: OnceLock::new(), is_refused: Mutex::new(false) }
    }
}

impl<T> LateOpen<T> {
    /// The value, if it is set.
    pub(super) fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// Sets the value. Returns whether a value is set: not if it is refused.
    pub(super) fn set(&self, value: T) -> bool {
        let is_refused = self.is_refused.lock();
        if *is_refused {
            return false;
        }
        let _ = self.value.set(value);
        true
    }

    /// The value. If none is set, none is set from now on.
    pub(super) fn get_or_refuse(&self) -> Option<&T> {
        let mut is_refused = self.is_refused.lock();
        let value = self.value.get();
        *is_refused = value.is_none();
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_opened_after_the_disks_were_left() {
        let left = LateOpen::default();
        assert_eq!(left.get_or_refuse(), None);
        assert!(!left.set(1));
        assert_eq!((left.get(), left.get_or_refuse()), (None, None));
        let opened = LateOpen::default();
        assert!(opened.set(1));
        assert_eq!((opened.get(), opened.get_or_refuse()), (Some(&1), Some(&1)));
        assert!(opened.set(2));
        assert_eq!(opened.get(), Some(&1));
    }
}
