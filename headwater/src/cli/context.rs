//! `headwater login` and `headwater context`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use crate::client::server::parse_fingerprint;

/// `headwater login`.
#[derive(Debug, Args)]
pub struct LoginArgs {
    /// The server's API, https://HOST:PORT; the port is 9470 unless given
    pub url: String,
    /// What to call it [default: the host's name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The fingerprint of the server's certificate, as 'headwater status' shows it there; for a certificate that the server made
    #[arg(long, value_name = "FINGERPRINT", value_parser = parse_fingerprint, conflicts_with = "ca")]
    pub fingerprint: Option<String>,
    /// Trust the certificate authorities of this PEM file, in place of the system's
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
    /// File with the token, or - for standard input; a terminal is asked for it unless given
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub token_file: Option<PathBuf>,
}

/// `headwater context ...`.
#[derive(Debug, Subcommand)]
pub enum ContextCommand {
    /// List the servers of 'headwater login'; * is the current one, for commands that name no other
    List,
    /// Send commands to this server from now on, or with 'local' to the daemon of this host
    Use {
        /// Its name
        name: String,
    },
    /// Forget a server and the token for it, which stays valid: 'headwater token revoke' ends it
    Remove {
        /// Its name
        name: String,
    },
}
