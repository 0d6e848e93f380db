//! Subcommands and options of `headwater store`, which copies versions between stores, serves a store, and verifies
//! and repairs it, without a daemon.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use headwater_store_server::{Limits, Options, TlsFiles};

use crate::stores::Credentials;
use crate::streaming;

/// `headwater store ...`.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Copy versions to another store, where each keeps its number; data that is there already is not copied again
    Copy {
        /// A directory, s3://BUCKET/PREFIX[?endpoint=URL], or servers: https://HOST[,https://HOST..]
        #[arg(value_name = "FROM")]
        source: String,
        /// A directory or s3://..; created if it does not exist
        #[arg(value_name = "TO")]
        target: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH
        #[arg(required = true)]
        images: Vec<String>,
        /// Token and certificate authorities for servers
        #[command(flatten)]
        credentials: Credentials,
        /// What is logged to standard error: off, error, warn, info, debug, trace, or a filter [default: warn; off with
        /// --json]
        #[arg(long, value_name = "FILTER", env = "HEADWATER_LOG")]
        log: Option<String>,
    },
    /// Copy all versions that another store lacks, and set its channels, scheduled promotions, notes and retired marks as
    /// in the source; removes no version
    Sync {
        /// A directory, s3://BUCKET/PREFIX[?endpoint=URL], or servers: https://HOST[,https://HOST..]
        #[arg(value_name = "FROM")]
        source: String,
        /// A directory or s3://..; created if it does not exist
        #[arg(value_name = "TO")]
        target: String,
        /// Token and certificate authorities for servers
        #[command(flatten)]
        credentials: Credentials,
        /// What is logged to standard error: off, error, warn, info, debug, trace, or a filter [default: warn; off with
        /// --json]
        #[arg(long, value_name = "FILTER", env = "HEADWATER_LOG")]
        log: Option<String>,
    },
    /// Serve a store to others over HTTP, read-only
    Serve {
        /// A directory or s3://..
        store: String,
        /// The address, for instance 127.0.0.1:8090; addresses other than loopback need TLS and tokens
        #[arg(long, value_name = "ADDR", value_parser = super::ip_and_port)]
        listen: SocketAddr,
        /// Certificate, key and tokens
        #[command(flatten)]
        offer: OfferArgs,
        /// What is logged to standard error: error, warn, info, debug, trace, or a filter
        #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADWATER_LOG")]
        log: String,
    },
    /// Make a token for readers: print it once, and add its hash to a file
    Token {
        /// The reader's name, for people
        name: String,
        /// The file; created if it does not exist
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        token_file: PathBuf,
    },
    /// Read a store, or some versions, completely, and compare the data with its hashes; with --repair-from, also repair
    /// damage
    Verify {
        /// A directory, s3://.. or https://..
        store: String,
        /// IMAGE, IMAGE:CHANNEL, IMAGE@NUMBER or IMAGE@HASH [default: all]
        images: Vec<String>,
        /// Read at most this many bytes per second [default: no limit]
        #[arg(long, value_name = "RATE", value_parser = streaming::rate)]
        rate: Option<u64>,
        /// Repair damage from this store, if it has an intact copy; may be given several times
        #[arg(long, value_name = "STORE")]
        repair_from: Vec<String>,
        /// Token and certificate authorities for servers
        #[command(flatten)]
        credentials: Credentials,
        /// What is logged to standard error: off, error, warn, info, debug, trace, or a filter [default: warn; off with
        /// --json]
        #[arg(long, value_name = "FILTER", env = "HEADWATER_LOG")]
        log: Option<String>,
    },
}

impl StoreCommand {
    /// The log filter; `None`: nothing is logged.
    pub fn log(&self, json: bool) -> Option<&str> {
        // With --json, programs expect a single object on standard error.
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

/// How a store is offered to others: options of `headwater store serve`, and of `headwater serve`.
#[derive(Clone, Debug, Default, Args)]
pub struct OfferArgs {
    /// Certificate in PEM, with the intermediate certificates
    #[arg(long, value_name = "FILE", requires = "tls_key", value_hint = ValueHint::FilePath)]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM
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

    /// The options of the server.
    pub fn options(&self, listen: SocketAddr) -> Options {
        Options { listen, tls: self.tls(), token_file: self.token_file.clone(), limits: Limits::default() }
    }
}
