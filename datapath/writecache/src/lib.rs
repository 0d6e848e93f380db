//! The write cache: what one machine changed, in RAM with overflow to disk.
//!
//! ```text
//!  write -> [filling segment] -> RAM (dirty) -> packed RAM --------------\
//!                                     \--> RAM + disk (clean) -----------> overflow disk (sequential, encrypted)
//!            the (segment, slot) of a block does not change when its segment moves:
//!            spilling 512 blocks changes one segment record, not 512 map entries
//! ```
//!
//! # Guarantees
//! - A hit in RAM is finished on the caller's thread: one leaf lock, one copy.
//! - No lock is held across I/O. A write that finds no space is queued, tried again when space becomes free,
//!   and refused with `NoSpace` after the pause limit. Reads always continue.
//! - Blocks on the overflow disk are encrypted with AES-GCM. The key exists only in this process, in memory
//!   that is locked if the system allows it ([`overflow::key_memory`]); the key of a persistent cache belongs
//!   to its owner. A block that was changed on disk is reported as `Corrupt`, and only that block.
//! - RAM in use, including index and buffers, stays within `ram_bytes`. The RAM of all caches stays within the
//!   host's limit, which is shared by weight ([`budget`]) and lowered under memory pressure ([`pressure`]). If
//!   the index alone exceeds one of these limits, four segments (8 MiB) of the cache are allowed nevertheless,
//!   or up to eight if its share has space for them.
//! - A frozen state ([`FrozenCache`]) is the cache at one instant, while requests continue. Freezing takes as
//!   long with much in the cache as with nothing.
//! - A cache whose memory is in a file ([`WriteCache::open_in`]) outlives its process, however that ends. The
//!   next process finds all answered writes, or gets an error if the file contradicts itself
//!   ([`WriteCache::recover`]).
//! - After a crash, a persistent cache ([`persist`]) has the state of some moment at or after the last
//!   answered flush: a prefix of the writes.
//!
//! # Limits
//! - Volumes up to 16 TiB less 8 KiB; 2^23 - 1 segments of 2 MiB; at least 16 MiB of RAM for each cache.
//! - A persistent cache has two buffers (4 MiB) of its own after its first write, and 4 bytes for each block
//!   while its map is replaced by a shorter one. Each of its segments keeps its position on disk from its
//!   beginning, and none is packed.
//! - A cache whose memory is in a file has up to 2 MiB of index more than it counts. RAM that it frees returns
//!   to the system within half a second, and other caches do not use that RAM before.
//! - Three staging buffers (6 MiB) for all caches of a host, counted in equal parts; 64 blocks in one read of
//!   the overflow disk.
//!
//! # Errors
//! [`headwater_block::IoError`]: `NoSpace`, `Corrupt`, `Device`, `Closed`.
//!
//! # Not here
//! The image below and the front-ends above: the volume connects them. Versions: they are made from a frozen
//! state, above the volume. The map of a persistent cache has checksums against accidents, and no signature: a
//! user who can write to its directory can restore an older state, or exchange blocks.
//!
//! Start reading at [`cache`], then [`map`] (whose lock rule the rest relies on), [`segment`], [`spill`].

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

pub mod budget;
pub mod cache;
mod clean;
pub mod counters;
pub mod fetch;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod host;
mod index_memory;
mod log;
pub mod map;
mod memory;
mod memory_file;
pub mod overflow;
mod packed;
mod panic_guard;
pub mod partial;
pub mod persist;
pub mod pressure;
pub mod segment;
pub mod spill;
mod sync;
mod throttle;
pub mod units;
pub mod write_queue;

pub use budget::{DEFAULT_WEIGHT, MAX_WEIGHT};
pub use cache::{
    Admission, BaseImage, Block, CacheOptions, Cleared, EachPart, FetchedOld, Found, FrozenCache,
    GUARANTEED_SEGMENT_BYTES, Kind, LittleSpace, MIN_DISK_BYTES, MIN_RAM_BYTES, Now, Old, OverflowOptions,
    ReadTally, Residence, TOGETHER, Ticket, UnloggedBlocks, WriteCache, WriteResult,
};
pub use counters::Snapshot;
pub use fetch::Fetched;
pub use host::{Host, HostSnapshot};
pub use memory::AlignedBuffer;
pub use memory_file::{Handover, VERSION as MEMORY_VERSION};
pub use overflow::buffering::Buffering;
pub use persist::PersistentOptions;
pub use persist::format::VERSION as PERSISTENT_VERSION;
pub use units::{BlockNumber, Location};
pub use write_queue::{QueuedWrite, RetryResult, Shortage};
