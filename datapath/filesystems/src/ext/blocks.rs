//! The bytes of the file system as its journal makes them: committed blocks of the journal lie over those of the disk.

use std::collections::HashMap;

use super::journal::Replayed;
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Fault, fault};

/// The bytes, and what lies over them.
pub(super) struct Blocks {
    bytes: Bytes,
    block_bytes: u64,
    replayed: HashMap<u64, Replayed>,
}

impl Blocks {
    pub(super) fn new(bytes: Bytes, block_bytes: u64) -> Self {
        Self { bytes, block_bytes, replayed: HashMap::new() }
    }

    /// Puts committed blocks of the journal over the disk.
    pub(super) fn put_over(&mut self, replayed: HashMap<u64, Replayed>) {
        self.replayed = replayed;
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.bytes.len()
    }

    /// Fills `into` from any place.
    pub(super) fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Fault> {
        if self.replayed.is_empty() {
            return self.bytes.read(at, into);
        }
        let mut done = 0;
        while done < into.len() {
            let from = at.checked_add(u64_of(done)).ok_or_else(|| fault("a byte offset exceeds 64 bits"))?;
            let (block, skip) = (from / self.block_bytes, from % self.block_bytes);
            let rest = into.get_mut(done..).unwrap_or_default();
            let len = usize_of(self.block_bytes - skip).min(rest.len());
            let piece = rest.get_mut(..len).unwrap_or_default();
            match self.replayed.get(&block) {
                None => self.bytes.read(from, piece)?,
                Some(replayed) => {
                    self.bytes.read(replayed.at.saturating_add(skip), piece)?;
                    replayed.restore(skip, piece);
                }
            }
            done += len;
        }
        Ok(())
    }

    /// A whole block.
    pub(super) fn block(&mut self, number: u64) -> Result<Vec<u8>, Fault> {
        let mut block = vec![0; usize_of(self.block_bytes)];
        self.read(number.saturating_mul(self.block_bytes), &mut block)?;
        Ok(block)
    }
}
