//! Tests of readers of file systems against the programs that make them and the kernel that mounts them.

mod btrfs;
mod ext;
mod ntfs;
mod ntfs_random;
mod xfs;
