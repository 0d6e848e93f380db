//! The tests of this crate as one program, because linking each costs time.

#[macro_use]
mod suite;
mod full_disk;
mod holes_uncached;
mod local_dir;
mod modes;
mod s3;
mod s3_crash;
mod trim;
