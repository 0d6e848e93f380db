//! Options of `headwater login` and `headwater context`. A context is a server on another host, with its address and
//! token, for which this user's commands can be.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use crate::client::server::parse_fingerprint;

/// `headwater login`.
#[derive(Debug, Args)]
pub struct LoginArgs {
    /// The server's API, https://HOST:PORT; the port is 9470 unless given
    pub url: String,
    /// The context's name [default: the host's name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The fingerprint of the server's certificate, as 'headwater status' on the server shows it; for a certificate
    /// that the server made
    #[arg(long, value_name = "FINGERPRINT", value_parser = parse_fingerprint, conflicts_with = "ca")]
    pub fingerprint: Option<String>,
    /// Trust the certificate authorities of this PEM file instead of those of the system
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
    /// File with the token, or - for standard input [default: ask on the terminal]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub token_file: Option<PathBuf>,
    /// Log in with a browser, at the identity provider of the server
    #[arg(long, conflicts_with_all = ["token_file", "certificate"])]
    pub oidc: bool,
    /// Log in with a client certificate in PEM, for which 'token create --certificate' made a token
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "key", conflicts_with = "token_file")]
    pub certificate: Option<PathBuf>,
    /// The key of the certificate in PEM; each command reads both files again
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "certificate")]
    pub key: Option<PathBuf>,
}

/// `headwater context ...`.
#[derive(Debug, Subcommand)]
pub enum ContextCommand {
    /// List the servers of 'headwater login'; * marks the current one, for commands without --context
    List,
    /// Use this server for later commands, or with 'local' the daemon of this host
    Use {
        /// Its name
        name: String,
    },
    /// Remove a server and its token from this user's files. The token stays valid: 'headwater token revoke' ends it
    Remove {
        /// Its name
        name: String,
    },
}
