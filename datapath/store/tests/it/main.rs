//! The tests of this crate as one program, since each costs its linking; those that need a process for themselves lie beside it.

#[macro_use]
mod suite;
mod full_disk;
mod holes_uncached;
mod local_dir;
mod modes;
mod s3;
mod s3_crash;
mod trim;
