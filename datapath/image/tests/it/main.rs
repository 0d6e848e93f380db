//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod compaction;
mod damage;
mod diff;
mod diff_ntfs;
mod export_fixed_vhd;
mod export_qcow2;
mod files;
mod fixture;
mod foreign;
mod inspection;
mod large_sectors;
mod paged;
mod repair;
mod round_trip;
mod s3;
mod seal;
mod sharing;
mod streaming;
mod touched;
mod trim;
