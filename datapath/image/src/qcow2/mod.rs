//! qcow2 images as read-only disks, and versions as new qcow2 images.
//!
//! Reads versions 2 and 3 with backing files, zlib and zstd compression and extended L2 entries. The tables
//! are read once when an image is opened, so that a truncated file is an error then and not zeroes later.
//! Refused with a message that says what to do: encryption, external data files, images marked corrupt,
//! unknown features. Not here: writing to an existing image, snapshots inside the image.
//!
//! Start reading at [`header`], then [`tables`], then [`disk`]; [`writer`] is independent of them.

pub(crate) mod disk;
pub(crate) mod header;
pub(crate) mod tables;
pub(crate) mod writer;
