//! Tests of the owners of changed blocks against `debugfs`, the kernel and ntfs-3g.

mod damage;
mod disks;
mod ext;
mod image;
