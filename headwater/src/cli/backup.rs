//! Flags of `headwater backup` and `headwater restore`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

/// `headwater backup`.
#[derive(Debug, Args)]
pub struct BackupArgs {
    /// The new file, for its owner only: keys are in it
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Also take this configuration file of 'headwater serve' [default: /etc/headwater/headwater.toml if it is of this data directory]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Take the rest of a data directory whose database is in PostgreSQL: copy that with pg_dump
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
