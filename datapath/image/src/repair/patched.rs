//! An object that a repair rewrites: the existing bytes, with right bytes instead of wrong ones.

use std::sync::Arc;

use headwater_store::{Hash, Holes, Object, Patch, StoreError};

use crate::units::{u64_of, usize_of};

/// A damaged object with patches over its wrong bytes.
pub(super) struct Patched {
    pub(super) damaged: Arc<dyn Object>,
    /// Sorted by offset. Two patches are either equal or do not touch.
    pub(super) patches: Vec<Patch>,
}

impl Patched {
    fn read_damaged(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        if into.is_empty() {
            return Ok(());
        }
        self.damaged.read_range(offset, into)
    }
}

impl Object for Patched {
    fn id(&self) -> Hash {
        self.damaged.id()
    }

    fn len_bytes(&self) -> u64 {
        self.damaged.len_bytes()
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        self.damaged.holes()
    }

    /// The bytes below patches are not read, because the disk may be unable to read them.
    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let (mut at, mut rest) = (offset, into);
        for patch in &self.patches {
            let passed = usize_of(at.saturating_sub(patch.offset));
            let Some(bytes) = patch.bytes.get(passed..).filter(|bytes| !bytes.is_empty()) else { continue };
            let gap = usize_of(patch.offset.saturating_sub(at)).min(rest.len());
            let (before, after) = std::mem::take(&mut rest).split_at_mut(gap);
            self.read_damaged(at, before)?;
            let len = bytes.len().min(after.len());
            let (below, after) = after.split_at_mut(len);
            below.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            at = at.saturating_add(u64_of(gap)).saturating_add(u64_of(len));
            rest = after;
        }
        self.read_damaged(at, rest)
    }
}
