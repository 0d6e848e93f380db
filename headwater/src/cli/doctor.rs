//! Options of `headwater doctor`, which checks whether this host can run machines.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// `headwater doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Check the requirements of a daemon with this configuration file [default: /etc/headwater/headwater.toml, if it
    /// exists]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Also measure how fast the data directory can be written: 64 MiB in an unlinked file. Without this nothing is
    /// written
    #[arg(long)]
    pub write: bool,
}
