//! Golden images: import, verified reading, export. Step 4 of the data path.
//!
//! ```text
//!   file, NBD server --open_source / any Device--> import --chunks--> store        verify, export <-- store
//!
//!   volume --Op--> VersionReader --hit--> copy from ChunkCache         (the caller's thread)
//!                      |
//!                      +--miss--> fetch pool: read, decompress, check --> ChunkCache --> all waiters
//!                                   ^            |
//!   readahead, boot trace, copying --+            +-- remote stores: DiskCache first
//! ```
//!
//! # Guarantees
//! - A version is a [`Manifest`], identified by the BLAKE3 of its bytes, and data objects of zstd chunks. The
//!   chunk map is flat: finding a chunk never follows a chain of versions. Zero chunks need no space; equal
//!   chunks are stored once across the store.
//! - A new version refers to no chunk of a local store that was damaged when the version was made.
//! - Every chunk is checked against its hash once, when it enters memory. Damage becomes an error that names
//!   the object and the offset, and affects only requests that need that chunk.
//! - A chunk is fetched once however many machines wait for it. If their versions have it in several places,
//!   it is fetched from each of them, and the first to arrive serves all.
//! - An import that fails, is cancelled or is killed leaves nothing behind. The same holds for an export.
//! - A version that is made from another one ([`Basis`]) costs only its changed chunks: only these are read,
//!   compressed and stored.
//! - One content imported into one store has one version hash, whatever the number of threads.
//!
//! # Limits
//! - [`diff`](mod@diff): [`diff::CHANGED_FILES_MAX`] files of a partition, in all partitions as many as fit
//!   into [`diff::CHANGED_FILES_BYTES_MAX`], and [`diff::PARTITIONS_MAX`] partitions. The directories that
//!   are open at a time need at most 256 MiB.
//! - Images: at most [`manifest::IMAGE_MAX_BYTES`], in multiples of 512 bytes. An imported disk is at most as
//!   large as a machine's disk ([`headwater_block::VOLUME_MAX_BYTES`]), and has at most as much data as a
//!   manifest of [`headwater_store::MANIFEST_MAX_BYTES`] can refer to: 1.3 TiB.
//! - VHD and VHDX: tables of 64 MiB (`foreign::TABLE_BYTES_MAX`).
//! - [`ChunkCache`]: its capacity. [`FETCH_THREADS`] reads at a time in each pool; as many wait as front-ends
//!   accept.
//! - [`DiskCache`]: its capacity on disk. Readahead: [`reader::READAHEAD_MAX_BYTES`] and
//!   [`reader::READAHEAD_REMOTE_MAX_BYTES`] for each of eight readers of a disk.
//! - Import: [`import::IMPORT_THREADS_MAX`] threads with 8 MiB each, 64 bytes for each distinct chunk of the
//!   store, and 48 more for each chunk that the image has too. The data objects with these chunks are open
//!   during the import.
//!
//! # Errors
//! [`ImageError`] for operations, [`headwater_block::IoError`] for disk requests.
//!
//! # Not here
//! Writing to an image (volumes write, and a seal makes a version from that), networks (an NBD client is a
//! `Device` like any other, a remote store is a `Store`).
//!
//! Start reading at [`reader`] for how a read is served, at [`import`] for how versions are made.

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

pub mod chunk_cache;
pub mod diff;
pub mod disk_cache;
pub mod error;
pub mod export;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod holders;
pub mod import;
pub mod manifest;
pub mod null_device;
pub mod open;
pub mod outline;
pub mod partial;
pub mod prefetch;
pub mod progress;
pub mod raw_file;
pub mod reader;
pub mod repair;
pub mod trace;
pub mod verify;
pub mod verify_round;

mod chunk;
mod chunk_map;
mod early_sync;
mod fetch;
mod fetch_pool;
mod file_disk;
pub mod fixed_vhd;
mod foreign;
mod hydrate;
mod index;
mod inspection;
mod known_formats;
mod open_maps;
mod pending;
mod qcow2;
mod qemu_locks;
mod rate_limit;
mod readahead;
mod side_by_side;
mod units;
mod vhd;
mod vhdx;
mod walk;

pub use chunk_cache::{ChunkCache, ChunkCacheCounters};
pub use chunk_map::outline_of;
pub use diff::{
    ChangedFile, DiffProgress, Difference, FileChange, PartitionDifference, SmallFile, SmallFiles, Touched,
    diff, files_touched, partitions_with, read_file, small_files,
};
pub use disk_cache::{DISK_CACHE_MIN_BYTES, DiskCache, DiskCacheCounters};
pub use error::{ImageError, ImageErrorKind};
pub use export::{export_fixed_vhd, export_qcow2, export_raw};
pub use fetch_pool::FETCH_THREADS;
pub use fixed_vhd::FixedVhd;
pub use holders::versions_touched;
pub use import::{Basis, Changes, ImportOptions, Imported, import};
pub use inspection::Inspection;
pub use manifest::{Manifest, Manifests};
pub use null_device::null_device;
pub use open::{
    Backing, FileFormat, open_chain, open_file, open_file_backed, open_source, open_source_backed,
};
pub use outline::Outline;
pub use partial::Partial;
pub use prefetch::{Background, BackgroundProgress};
pub use progress::{Cancel, Progress};
pub use rate_limit::RateLimit;
pub use raw_file::raw_file;
pub use reader::{VersionReader, pin};
pub use repair::{RepairProgress, Repaired, repair, repair_manifest};
pub use trace::Trace;
pub use verify::{DamagedChunk, DamagedObject, Verified, verify, verify_in};
pub use verify_round::VerifyRound;
