//! Flags of `headwater cache`.

use clap::{ArgGroup, Subcommand};

use crate::caches::NewLimits;

/// `headwater cache ...`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List the write caches of this user's exports and attached devices that run (for root: of all users), with their limits and
    /// use
    List,
    /// Change the limits of the write cache of an export or attached device that runs, up or down, at once
    #[command(group = ArgGroup::new("limits").required(true).multiple(true))]
    Set {
        /// The number of the process, what it serves, or the device that it attached
        #[arg(value_name = "PID|SOURCE|DEVICE")]
        which: String,
        /// Only of this volume, where the process serves several
        #[arg(long, value_name = "VOLUME")]
        volume: Option<String>,
        /// What is to be another one
        #[command(flatten)]
        limits: NewLimits,
        /// Its weight among the volumes of the process while --cache-ram or the host's memory is short, 1 to 10000
        #[arg(long, value_name = "WEIGHT", group = "limits")]
        weight: Option<u32>,
    },
}
