//! How `headwater serve` offers machines' disks over NBD.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use headwater_nbd::{Address, Right};

use crate::daemon::exports::{self, Offer};

/// The flags.
#[derive(Debug, Args)]
pub struct ServeNbdArgs {
    /// Also offer machines' disks to NBD clients here, for reading, each as an export by the machine's name:
    /// unix:PATH or tcp:HOST[:PORT]. tcp: needs the two flags below
    #[arg(long, value_name = "ADDRESS")]
    pub nbd: Option<Address>,
    /// Encrypt NBD, and let in only clients with a certificate: directory with ca-cert.pem, server-cert.pem,
    /// server-key.pem and, if there is one, ca-crl.pem
    #[arg(long, value_name = "DIR", requires = "nbd", value_hint = ValueHint::DirPath)]
    pub nbd_certificates: Option<PathBuf>,
    /// Let clients whose certificate has this common name or DNS name read all machines' disks, or those of some;
    /// may be given several times
    #[arg(long, value_name = "NAME[=MACHINE,..]", requires = "nbd_certificates", value_parser = exports::right)]
    pub nbd_allow: Vec<Right>,
}

impl ServeNbdArgs {
    /// What is to be offered, if anything.
    pub fn offer(self) -> anyhow::Result<Option<Offer>> {
        self.nbd.map(|address| Offer::new(address, self.nbd_certificates, self.nbd_allow)).transpose()
    }
}
