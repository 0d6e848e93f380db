//! Options of `headwater backup` and `headwater restore`, which write the data that a daemon cannot recreate to one
//! file, and restore it.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// `headwater backup`.
#[derive(Debug, Args)]
pub struct BackupArgs {
    /// The new file; only its owner may read it, because it contains keys
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Also back up this configuration file of 'headwater serve' [default: /etc/headwater/headwater.toml if it is for
    /// this data directory]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Back up a data directory whose database is in PostgreSQL, without the database: back that up with pg_dump
    #[arg(long)]
    pub without_database: bool,
}

/// `headwater restore`.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The file of 'headwater backup', or - for the standard input
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
}
