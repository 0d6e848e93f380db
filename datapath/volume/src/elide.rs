//! Finds writes that equal the image. Such a write takes no space, and frees the space of the block's earlier
//! contents.
//!
//! | the block | the write is compared with the image |
//! |---|---|
//! | would take a new slot (it is absent, or its segment may not be overwritten in RAM) | one write in 32 |
//! | is overwritten in place | one write in 64 |
//! | in both cases, after an equal write, or after the volume was opened, until 64 writes differed | always |
//!
//! A comparison reads one logical block with [`Device::peek`], and the rest of the block only if the first is
//! equal. If the image's data is not in memory, the write is stored like any other. Equal writes come in runs
//! (a file is restored, a package installed again), so one hit makes the next ones likely. A comparison costs
//! about half as much as a write, for a cache line of the image that is not used otherwise. Equal blocks that
//! are missed here are found later by the write cache's dedup scan, off the hit path ([`BaseImage`]).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use headwater_block::{BLOCK_BYTES, ByteRange, Device};
use headwater_writecache::{BaseImage, BlockNumber, Now};

use crate::pieces::Piece;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Comparisons without a hit after the last hit; then only a sample of writes is compared.
const EAGER_COMPARISONS: u32 = 64;

/// One in this many writes that would take a slot is compared.
const SAMPLE_NEW: u32 = 32;

/// One in this many overwrites in place is compared.
const SAMPLE_IN_PLACE: u32 = 64;

/// The bytes that are compared first: the usual logical block.
const PROBE_BYTES: usize = 512;

/// Finds writes that equal the image of one volume.
pub(crate) struct Elision {
    base: Arc<dyn Device>,
    /// Comparisons that are left in a run. Seldom written, so that its cache line stays shared.
    eager: AtomicU32,
}

impl Elision {
    /// `None` if the image is empty, or cannot be read in pieces that are small enough.
    pub(crate) fn new(base: &Arc<dyn Device>, base_is_empty: bool) -> Option<Arc<Self>> {
        let is_small = usize::try_from(base.geometry().logical_block_bytes).is_ok_and(|b| b <= PROBE_BYTES);
        (is_small && !base_is_empty)
            .then(|| Arc::new(Self { base: Arc::clone(base), eager: AtomicU32::new(EAGER_COMPARISONS) }))
    }

    /// Whether the image holds `data`, a whole block, as far as that is known without waiting.
    #[inline]
    pub(crate) fn is_same(&self, block: BlockNumber, data: &[u8], now: Now) -> bool {
        self.is_due(block, data, now) && self.compare(block, data)
    }

    /// Whether the image holds `data`, at most a block long, from the start of the piece on.
    pub(crate) fn is_same_part(&self, piece: &Piece, data: &[u8]) -> bool {
        self.is_due(piece.block, data, Now::Elsewhere) && self.count_comparison(self.equals_part(piece, data))
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

    /// Not inlined: most writes do not get here, and need not pay for its stack.
    #[cold]
    #[inline(never)]
    fn compare(&self, block: BlockNumber, data: &[u8]) -> bool {
        let base = &*self.base;
        self.count_comparison(equals::<PROBE_BYTES>(base, block, data) && equals::<BLOCK>(base, block, data))
    }

    /// Counts a comparison. After an equal write, more of the next writes are compared.
    fn count_comparison(&self, same: bool) -> bool {
        let eager = self.eager.load(Ordering::Relaxed);
        if same && eager != EAGER_COMPARISONS {
            self.eager.store(EAGER_COMPARISONS, Ordering::Relaxed);
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

/// Whether the first `N` bytes of the block are known to equal those of the image.
fn equals<const N: usize>(base: &dyn Device, block: BlockNumber, data: &[u8]) -> bool {
    let mut image = [0u8; N];
    let Some(range) = ByteRange::new(u64::from(block.0) * u64::from(BLOCK_BYTES), N as u64) else {
        return false;
    };
    base.peek(range, &mut image) && data.get(..N) == Some(&image)
}
