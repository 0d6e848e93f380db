//! TLS of the NBD server of `headwater export`: which files, who must use it, and who may open the disk.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum, ValueHint};
use headwater_nbd::{ServerTls, ServerTlsOptions};

/// Whether NBD clients must use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Demand {
    /// Clients without TLS are refused
    #[default]
    Required,
    /// Clients choose
    Optional,
}

/// The flags.
#[derive(Debug, Args)]
pub struct NbdTlsArgs {
    /// Encrypt NBD with the files of this directory, named as QEMU and nbdkit name them: ca-cert.pem,
    /// server-cert.pem, server-key.pem and, if there is one, ca-crl.pem
    #[arg(long, value_name = "DIR", requires = "nbd", value_hint = ValueHint::DirPath)]
    pub tls_certificates: Option<PathBuf>,
    /// Whether NBD clients must use TLS
    #[arg(long, value_name = "WHEN", value_enum, default_value_t, requires = "tls_certificates")]
    pub tls: Demand,
    /// Let only those NBD clients in that show a certificate which ca-cert.pem has signed
    #[arg(long, requires = "tls_certificates")]
    pub tls_verify_peer: bool,
    /// Let only NBD clients in whose certificate has this common name or DNS name; with --nbd-export also to some exports
    /// only. May be given several times
    #[arg(long, value_name = "NAME[=EXPORT,..]", requires = "tls_certificates")]
    pub tls_allow: Vec<String>,
}

impl NbdTlsArgs {
    /// Reads the files, if TLS is asked for.
    pub fn load(&self) -> anyhow::Result<Option<ServerTls>> {
        let Some(directory) = &self.tls_certificates else { return Ok(None) };
        let options = ServerTlsOptions {
            is_required: self.tls == Demand::Required,
            // A name counts only if somebody vouches for it.
            verifies_clients: self.tls_verify_peer || !self.tls_allow.is_empty(),
        };
        ServerTls::load(directory, options).map(Some).context("cannot serve NBD with TLS")
    }
}
