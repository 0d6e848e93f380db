//! Subcommands and options of `headwater cache`: limits of write caches of exports and attached devices, and the
//! report of what occupies a write cache.

use clap::{ArgGroup, Subcommand, ValueEnum};

use crate::caches::NewLimits;

/// `headwater cache ...`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List the write caches of this user's running exports and attached devices (for root: of all users), with their
    /// limits and use
    List,
    /// Show what occupies the write cache of a machine: files, directories, deleted files that were not trimmed,
    /// journal, swap.
    ///
    /// Scans the file systems on a snapshot of the machine's disk, while the machine runs. ext2, ext3, ext4, XFS, Btrfs, NTFS and FAT are
    /// read, also in linear volumes of LVM.
    Contents {
        /// The machine
        #[arg(value_name = "MACHINE", required_unless_present = "catalog")]
        machine: Option<String>,
        /// Scan machines of this catalog in place of one machine, and add up what they hold
        #[arg(long, value_name = "CATALOG", conflicts_with = "machine")]
        catalog: Option<String>,
        /// The most machines of the catalog that are scanned, spread over it
        #[arg(long, value_name = "COUNT", requires = "catalog", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
        machines: u16,
        /// Whether lines show directories, files or kinds
        #[arg(long, value_enum, default_value_t = By::Dir, value_name = "BY")]
        by: By,
        /// The most lines
        #[arg(long, default_value_t = 20, value_name = "LINES")]
        lines: usize,
    },
    /// Change the limits of the write cache of a running export or attached device, up or down, at once
    #[command(group = ArgGroup::new("limits").required(true).multiple(true))]
    Set {
        /// The process id, the name of what it serves, or the device that it attached
        #[arg(value_name = "PID|SOURCE|DEVICE")]
        which: String,
        /// Only of this volume, if the process serves several
        #[arg(long, value_name = "VOLUME")]
        volume: Option<String>,
        /// The new limits
        #[command(flatten)]
        limits: NewLimits,
        /// Its weight among the volumes of the process while --cache-ram or the host's memory is short, 1 to 10000
        #[arg(long, value_name = "WEIGHT", group = "limits")]
        weight: Option<u32>,
    },
}

/// What each line of `headwater cache contents` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Directories as a tree, each with everything below it
    Dir,
    /// Files
    File,
    /// Kinds and partitions
    Kind,
}
