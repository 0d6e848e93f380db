//! Writes equal to the image: they take no space, and free what the block took.
//!
//! | the block | the image is looked at |
//! |---|---|
//! | would take a new slot (absent, or its segment is not in RAM to be written) | one of 32 |
//! | is overwritten where it is | one of 64 |
//! | either, up to 64 differing ones after an equal one, or after the volume was opened | always |
//!
//! Looking means [`Device::peek`] for one logical block, and for the rest only where that is equal; where
//! the image has it not in memory, the write is stored like any other. Equal writes come in runs (a file is
//! put back, a package installed again), so one hit makes the next ones likely; and a look costs about as
//! much as half a write, for a cache line of the image that nobody else needs. What was missed so, the write
//! cache finds by a second look, off the hit path ([`BaseImage`]).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use headwater_block::{BLOCK_BYTES, ByteRange, Device};
use headwater_writecache::{BaseImage, BlockNumber, Now};

use crate::pieces::Piece;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Looks in vain after a hit, before only some writes are looked at again.
const EAGER_LOOKS: u32 = 64;

/// One of so many writes that would take a slot is looked at.
const SAMPLE_NEW: u32 = 32;

/// One of so many overwrites in place is looked at.
const SAMPLE_IN_PLACE: u32 = 64;

/// Compared before anything else: the usual logical block.
const PROBE_BYTES: usize = 512;

/// Looks for writes equal to the image of one volume.
pub(crate) struct Elision {
    base: Arc<dyn Device>,
    /// Looks that are left of a run. Written seldom, so that its cache line stays shared.
    eager: AtomicU32,
}

impl Elision {
    /// `None` where there is nothing in the image to be equal to, or not in pieces small enough to look at.
    pub(crate) fn new(base: &Arc<dyn Device>, base_is_empty: bool) -> Option<Arc<Self>> {
        let is_small = usize::try_from(base.geometry().logical_block_bytes).is_ok_and(|b| b <= PROBE_BYTES);
        (is_small && !base_is_empty)
            .then(|| Arc::new(Self { base: Arc::clone(base), eager: AtomicU32::new(EAGER_LOOKS) }))
    }

    /// Whether the image holds `data`, a whole block, as far as that is known without waiting.
    #[inline]
    pub(crate) fn is_same(&self, block: BlockNumber, data: &[u8], now: Now) -> bool {
        self.is_due(block, data, now) && self.look(block, data)
    }

    /// Whether the image holds `data` from where the piece begins, at most a block long.
    pub(crate) fn is_same_part(&self, piece: &Piece, data: &[u8]) -> bool {
        self.is_due(piece.block, data, Now::Elsewhere) && self.count_look(self.equals_part(piece, data))
    }

    fn equals_part(&self, piece: &Piece, data: &[u8]) -> bool {
        let mut image = [0u8; BLOCK];
        let range = piece.range().and_then(|first| ByteRange::new(first.offset(), data.len() as u64));
        let (Some(range), Some(image)) = (range, image.get_mut(..data.len())) else { return false };
        self.base.peek(range, image) && image == data
    }

    #[inline]
    fn is_due(&self, block: BlockNumber, data: &[u8], now: Now) -> bool {
        if self.eager.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let head = data.first_chunk::<4>().map_or(0, |head| u32::from_le_bytes(*head));
        let sample = if now == Now::InPlace { SAMPLE_IN_PLACE } else { SAMPLE_NEW };
        (head ^ block.0).wrapping_mul(0x9E37_79B9) < u32::MAX / sample
    }

    /// Out of line: most writes never come here, and need not pay for its stack.
    #[cold]
    #[inline(never)]
    fn look(&self, block: BlockNumber, data: &[u8]) -> bool {
        let base = &*self.base;
        self.count_look(equals::<PROBE_BYTES>(base, block, data) && equals::<BLOCK>(base, block, data))
    }

    /// After one that was equal, more are looked at.
    fn count_look(&self, same: bool) -> bool {
        let eager = self.eager.load(Ordering::Relaxed);
        if same && eager != EAGER_LOOKS {
            self.eager.store(EAGER_LOOKS, Ordering::Relaxed);
        } else if !same && eager > 0 {
            self.eager.store(eager - 1, Ordering::Relaxed);
        }
        same
    }
}

impl BaseImage for Elision {
    fn begins_with(&self, block: BlockNumber, data: &[u8]) -> bool {
        match data.len() {
            PROBE_BYTES => equals::<PROBE_BYTES>(&*self.base, block, data),
            BLOCK => equals::<BLOCK>(&*self.base, block, data),
            _ => false,
        }
    }
}

impl fmt::Debug for Elision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Elision").field("eager", &self.eager).finish_non_exhaustive()
    }
}

/// Whether the first `N` bytes of the block are known to be those of the image.
fn equals<const N: usize>(base: &dyn Device, block: BlockNumber, data: &[u8]) -> bool {
    let mut image = [0u8; N];
    let Some(range) = ByteRange::new(u64::from(block.0) * u64::from(BLOCK_BYTES), N as u64) else {
        return false;
    };
    base.peek(range, &mut image) && data.get(..N) == Some(&image)
}
