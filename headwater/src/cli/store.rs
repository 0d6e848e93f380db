//! Flags of `headwater store`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use headwater_store_server::{Limits, Options, TlsFiles};

use crate::stores::Credentials;
use crate::streaming;

/// `headwater store ...`.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Copy versions to another store, each under its own number; what is there is not sent again
    Copy {
        /// A directory, s3://BUCKET/PREFIX[?endpoint=URL], or servers: https://HOST[,https://HOST..]
        #[arg(value_name = "FROM")]
        source: String,
        /// A directory or s3://..; made if there is none
        #[arg(value_name = "TO")]
        target: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(required = true)]
        images: Vec<String>,
        /// What servers need to be shown
        #[command(flatten)]
        credentials: Credentials,
        /// What is logged to standard error: off, error, warn, info, debug, trace, or a filter [default: warn; off with
        /// --json]
        #[arg(long, value_name = "FILTER", env = "HEADWATER_LOG")]
        log: Option<String>,
    },
    /// Copy all versions and channels that another store does not have; removes nothing there
    Sync {
        /// A directory, s3://BUCKET/PREFIX[?endpoint=URL], or servers: https://HOST[,https://HOST..]
        #[arg(value_name = "FROM")]
        source: String,
        /// A directory or s3://..; made if there is none
        #[arg(value_name = "TO")]
        target: String,
        /// What servers need to be shown
        #[command(flatten)]
        credentials: Credentials,
        /// What is logged to standard error: off, error, warn, info, debug, trace, or a filter [default: warn; off with
        /// --json]
        #[arg(long, value_name = "FILTER", env = "HEADWATER_LOG")]
        log: Option<String>,
    },
    /// Offer a store to others over HTTP, for reading
    Serve {
        /// A directory or s3://..
        store: String,
        /// Where, for instance 127.0.0.1:8090; anything but loopback needs TLS and tokens
        #[arg(long, value_name = "ADDR", value_parser = super::ip_and_port)]
        listen: SocketAddr,
        /// Certificate, key and tokens
        #[command(flatten)]
        offer: OfferArgs,
        /// What is logged to standard error: error, warn, info, debug, trace, or a filter
        #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADWATER_LOG")]
        log: String,
    },
    /// Make a token for readers: print it, once, and add its hash to a file
    Token {
        /// Who gets it, for people
        name: String,
        /// The file; made if there is none
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        token_file: PathBuf,
    },
    /// Read all of a store, or some versions, compare it with its hashes, and repair what is damaged
    Verify {
        /// A directory, s3://.. or https://..
        store: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH [default: all]
        images: Vec<String>,
        /// Read at most so many bytes a second [default: as many as the store gives]
        #[arg(long, value_name = "RATE", value_parser = streaming::rate)]
        rate: Option<u64>,
        /// Take what is damaged from this store, if it has it; may be given several times
        #[arg(long, value_name = "STORE")]
        repair_from: Vec<String>,
        /// What servers need to be shown
        #[command(flatten)]
        credentials: Credentials,
        /// What is logged to standard error: off, error, warn, info, debug, trace, or a filter [default: warn; off with
        /// --json]
        #[arg(long, value_name = "FILTER", env = "HEADWATER_LOG")]
        log: Option<String>,
    },
}

impl StoreCommand {
    /// What is logged; `None`: it has no log.
    pub fn log(&self, json: bool) -> Option<&str> {
        // A program takes what is on standard error for one object.
        let default = if json { "off" } else { "warn" };
        match self {
            Self::Copy { log, .. } | Self::Sync { log, .. } | Self::Verify { log, .. } => {
                Some(log.as_deref().unwrap_or(default))
            }
            Self::Serve { log, .. } => Some(log.as_str()),
            Self::Token { .. } => None,
        }
    }
}

/// How a store is offered to others.
#[derive(Clone, Debug, Default, Args)]
pub struct OfferArgs {
    /// Certificate in PEM, with those between it and the authority
    #[arg(long, value_name = "FILE", requires = "tls_key", value_hint = ValueHint::FilePath)]
    pub tls_cert: Option<PathBuf>,
    /// Its key in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_hint = ValueHint::FilePath)]
    pub tls_key: Option<PathBuf>,
    /// File with names and hashes of the tokens that allow reading; 'headwater store token' adds one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub token_file: Option<PathBuf>,
}

impl OfferArgs {
    /// Certificate and key, if they were given.
    pub fn tls(&self) -> Option<TlsFiles> {
        let files = self.tls_cert.clone().zip(self.tls_key.clone());
        files.map(|(certificate, key)| TlsFiles { certificate, key })
    }

    /// As the server takes them.
    pub fn options(&self, listen: SocketAddr) -> Options {
        Options { listen, tls: self.tls(), token_file: self.token_file.clone(), limits: Limits::default() }
    }
}
