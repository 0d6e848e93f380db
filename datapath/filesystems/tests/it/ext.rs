//! ext2, ext3 and ext4 of random features, compared with debugfs and a kernel mount.
