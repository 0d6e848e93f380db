//! Tests of readers of file systems against the programs that make them and the kernel that mounts them.

mod ext;
mod ntfs;
mod ntfs_random;
