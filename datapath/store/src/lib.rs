//! Stores the bytes of images, and which versions exist. Step 5 of the data path (`datapath/README.md`).
//!
//! [`Store`] has two implementations that write: [`LocalDir`] (a directory, one writing process at a time) and
//! [`S3Store`](s3::S3Store) (a bucket, any number of writers). The picture shows the files of a directory; a
//! bucket has the same names as keys.
//!
//! ```text
//!   image name --refs--> channel test, production   images/NAME      replaced as a whole, by rename
//!                           |
//!                        version 1, 2, 3 ...
//!                           |
//!                           +--BLAKE3--> manifest    manifests/HASH   immutable
//!                                          |
//!                                          +-------> data objects     objects/HASH     immutable
//!                                          +-------> holes            holes/HASH       deleted ranges of an object
//!                                          +- - - -  hash tree        trees/HASH       to check parts of the manifest
//!                                          +- - - -  boot trace       traces/HASH      a hint, replaced as a whole
//! ```
//!
//! # Guarantees
//! - Objects and manifests are named by the BLAKE3 of their bytes, and their bytes never change; but a directory
//!   may deallocate ranges of an object that no version needs (`holes`). The data object is written before the
//!   manifest, and the manifest before the reference. If a [`Publication`] is interrupted, the store stays as it
//!   was, apart from orphans.
//! - In a directory, a file is written under a temporary name, synced and renamed, and the next
//!   [`LocalDir::open`] removes orphans. One process writes at a time; any number read.
//! - A version that any process has pinned with [`Store::pin`] cannot be removed.
//! - Version numbers increase and are not used again while the image exists, even if all its versions were
//!   removed. A version cannot be removed if a channel points to it or will by a scheduled promotion, unless
//!   the whole image is removed with its channels.
//! - Removing a version frees exactly the objects that no other version needs. Nothing is freed during a
//!   publication, because it may refer to any object. In a directory, [`Store::trim`] frees the unneeded
//!   parts of the other objects.
//! - Every file says what it is and in which format version. An unknown format is refused, never guessed at.
//! - No clock: times come from the caller.
//!
//! # Limits
//! - Image name: 1 to 63 characters of `[a-z0-9._-]`, starting with a letter or digit.
//! - [`CHANNEL_PAST_MAX`] positions that a channel remembers, [`AUTHOR_MAX_BYTES`], [`NOTE_MAX_BYTES`],
//!   [`MANIFEST_MAX_BYTES`], [`VERSIONS_MAX`] versions of an image, [`VERSION_OBJECTS_MAX`] objects of a
//!   version.
//!
//! # Errors
//! [`StoreError`]: a kind for programs, a message and a source for people.
//!
//! # Not here
//! The meaning of manifests, chunks, compression, and hashing of chunks: see `headwater-image`. So
//! [`NewVersion`] lists the objects of a version, and [`Needs`] tells which parts of an object are needed. No
//! caching. The caller performs scheduled promotions, because there is no clock here.
//!
//! Start reading at [`store`], then [`local_dir`]. The files are described byte by byte in `docs/format.md`.

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

pub mod copy;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod hash;
pub mod hash_tree;
pub mod holes;
pub mod local_dir;
pub mod name;
pub mod needs;
pub mod refs;
pub mod retention;
pub mod retrying;
pub mod s3;
pub mod store;
pub mod waiting;
pub mod while_busy;

mod copied;

pub use copied::{ChannelMove, CopiedImage};
pub use copy::{Copied, CopyProgress, NotCopied, copy, copy_object, copy_telling};
pub use error::{StoreError, StoreErrorKind};
pub use hash::Hash;
pub use holes::{HOLES_MAX_BYTES, Holes, ObjectHashing, hash_of};
pub use local_dir::{
    Access, CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, LocalDir, chunk_bytes_of, settings_bytes,
};
pub use name::{ImageName, ImageReference, Selector};
pub use needs::Needs;
pub use refs::{
    AUTHOR_MAX_BYTES, CHANNEL_PAST_MAX, Channel, Image, NOTE_MAX_BYTES, Pointer, VERSION_OBJECTS_MAX,
    VERSIONS_MAX, Version,
};
pub use retention::RetentionRoot;
pub use s3::{Keys, S3Options, S3Store, S3Url};
pub use store::{
    Adopted, Check, Committed, Listed, MANIFEST_MAX_BYTES, NewVersion, Object, Parts, Patch, Pin,
    Publication, Removed, Store, TRACE_MAX_BYTES, Traffic,
};
pub use waiting::{ReadFor, Waiting};
pub use while_busy::WhileBusy;
