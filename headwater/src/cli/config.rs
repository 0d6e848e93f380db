//! Subcommands and options of `headwater config`, which checks and shows the configuration file of `headwater serve`.
//! The keys of that file are the options of `serve`, in `daemon.rs`.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};

/// `headwater config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a configuration file: its keys, their values, and whether they are compatible
    Check {
        /// The file [default: /etc/headwater/headwater.toml]
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
    /// Show each setting of 'headwater serve' with a configuration file, and where its value comes from
    Show {
        /// The file [default: /etc/headwater/headwater.toml, if it exists]
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
}
