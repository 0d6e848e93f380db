//! The write cache: what one machine changed, in RAM with overflow to disk.
//!
//! ```text
//!  write -> [filling segment] -> RAM (dirty) -> packed RAM --------------\
//!                                     \--> RAM + disk (clean) -----------> overflow disk (sequential, sealed)
//!            the (segment, slot) of a block does not change when its segment moves:
//!            spilling 512 blocks changes one segment record, not 512 map entries
//! ```
//!
//! # Guarantees
//! - A hit in RAM is finished on the caller's thread: one leaf lock, one copy.
//! - No lock is held across I/O. A write that finds no room is parked, tried again as space comes back,
//!   and refused with `NoSpace` after the pause limit; reads always go on.
//! - Blocks on the overflow disk are sealed with AES-GCM under a key that lives only in this process
//!   (a persistent cache's key is its owner's), in memory that is locked where the system allows it
//!   ([`overflow::key_memory`]); a block that was changed on disk is reported, alone, as `Corrupt`.
//! - RAM in use, index and buffers included, stays within `ram_bytes`, and that of all caches within the
//!   host's limit, which is shared by weight ([`budget`]) and lowered under memory pressure ([`pressure`]).
//!   Only four segments (8 MiB) of each cache, up to eight where its share has room for them, are allowed beside an index that has outgrown either.
//! - A frozen state ([`FrozenCache`]) is the cache at one instant, while requests go on; freezing takes as long with much
//!   in the cache as with nothing.
//! - A cache whose memory is in a file ([`WriteCache::open_in`]) outlives its process, however that ends: the next one finds all
//!   that was answered, or an error if the file contradicts itself ([`WriteCache::recover`]).
//! - A persistent cache ([`persist`]) comes back after a crash as it was at some moment at or after the last
//!   answered flush: a prefix of the writes.
//!
//! # Limits
//! - Volumes up to 16 TiB less 8 KiB; 2^23 - 1 segments of 2 MiB; at least 16 MiB of RAM a cache.
//! - A persistent cache has two buffers (4 MiB) of its own once it has written, and 4 bytes for each block while its map
//!   is replaced by a shorter one; it keeps every segment's place on disk from the moment it is begun, and packs nothing.
//! - A cache whose memory is in a file has up to 2 MiB of index more than it counts. RAM that it frees goes back to the system
//!   within half a second, and other caches do not use it before.
//! - Three staging buffers (6 MiB) for all caches of a host, which bear them in equal parts; 64 blocks in one overflow read.
//!
//! # Errors
//! [`headwater_block::IoError`]: `NoSpace`, `Corrupt`, `Device`, `Closed`.
//!
//! # Not here
//! The image below and the front-ends above: the volume puts them together. Versions: they are made of what a frozen
//! state holds, above the volume. The map of a persistent cache is checked against accidents, not signed: who can
//! write to its directory can put an older state back, or exchange blocks.
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
    Admission, BaseImage, Block, CacheOptions, Cleared, EachPart, FetchedOld, Found, FrozenCache, Kind,
    LEAST_RAM_BYTES, LittleSpace, MIN_DISK_BYTES, MIN_RAM_BYTES, Now, Old, OverflowOptions, ReadTally,
    Residence, TOGETHER, Ticket, UnloggedBlocks, WriteCache, WriteResult,
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
