//! The iSCSI server of `headwater export`: names and identities of its targets (disks), and the secrets with which
//! clients log in (CHAP).

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use headwater_block::Device;
use headwater_iscsi::chap_file::{self, ChapFile};
use headwater_iscsi::{Accounts, FixedTargets, IscsiName, Limits, Offer, Server};
use headwater_scsi::{Identity, LogicalUnit, Options, Target};

use crate::cli::IscsiArgs;
use crate::cmd::persistent::Kept;

/// The environment variable with the secrets, instead of a file.
const SECRETS_VARIABLE: &str = "HEADWATER_CHAP";

/// The prefix of default target names.
const NAME_PREFIX: &str = "iqn.2026-01.local.headwater:";

/// A running server, and the disks that it offers.
pub struct Running {
    server: Server,
    targets: Vec<IscsiName>,
}

impl Running {
    /// The URLs of the disks.
    pub fn urls(&self) -> impl Iterator<Item = String> + '_ {
        self.targets.iter().map(|target| self.server.url(target, 0))
    }
}

impl IscsiArgs {
    /// Serves `devices`, one for each target, if that was requested. `kept` is the persistent cache, if there is one:
    /// then the disk has the same identity after a restart, otherwise another one.
    pub fn serve(
        &self,
        source: &str,
        kept: Option<&Kept>,
        devices: &[Arc<dyn Device>],
    ) -> anyhow::Result<Option<Running>> {
        let Some(address) = &self.iscsi else { return Ok(None) };
        let failed = || format!("cannot serve '{source}' over iSCSI");
        let mut targets = self.iscsi_target.clone();
        if targets.is_empty() {
            targets.push(default_name(source).parse().with_context(failed)?);
        }
        let mut accounts = match self.secrets().with_context(failed)? {
            Some(secrets) => secrets
                .accounts(&targets)
                .with_context(failed)?
                .into_iter()
                .map(|a| Some(Arc::new(a)))
                .collect(),
            None => vec![None; targets.len()],
        };
        let offers =
            targets.iter().zip(devices).zip(accounts.drain(..)).map(|((target, device), accounts)| {
                (target.clone(), offer(source, kept, target, Arc::clone(device), accounts))
            });
        let server = Server::bind(address, FixedTargets::new(offers.collect()), Limits::default());
        Ok(Some(Running { server: server.with_context(failed)?, targets }))
    }

    fn secrets(&self) -> anyhow::Result<Option<ChapFile>> {
        if let Some(file) = &self.chap_file {
            return Ok(Some(chap_file::read(file)?));
        }
        match std::env::var(SECRETS_VARIABLE) {
            Ok(text) => Ok(Some(chap_file::parse(&text, SECRETS_VARIABLE)?)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            // Without the secrets, the disk would be open to everybody, so this is an error.
            Err(error) => Err(anyhow::Error::new(error).context(format!("cannot read {SECRETS_VARIABLE}"))),
        }
    }
}

/// Makes the target of a disk.
fn offer(
    source: &str,
    kept: Option<&Kept>,
    target: &IscsiName,
    device: Arc<dyn Device>,
    accounts: Option<Arc<Accounts>>,
) -> Offer {
    let uuid = match kept {
        Some(kept) => {
            // The identity depends on host and target too: multipath must not take a copy of the cache on another
            // host for the same disk.
            let machine = std::fs::read("/etc/machine-id").unwrap_or_default();
            fingerprint(&[&machine, target.as_str().as_bytes(), kept.identity().as_bytes()])
        }
        None => *uuid::Uuid::new_v4().as_bytes(),
    };
    let identity = Identity {
        vendor: "HEADWATR".into(),
        product: "VIRTUAL DISK".into(),
        revision: env!("CARGO_PKG_VERSION").chars().filter(|c| *c != '.').collect(),
        serial: uuid::Uuid::from_bytes(uuid).simple().to_string(),
        uuid,
    };
    let unit = LogicalUnit::new(device, identity, Options::default());
    let scsi = Target::new(target.as_str(), vec![(0, unit)]);
    Offer { scsi, alias: source.chars().take(255).collect(), accounts }
}

/// The default name: the source's file name up to the first dot, or the image's name, with valid characters only.
fn default_name(source: &str) -> String {
    let stem = if source.contains('/') {
        Path::new(source).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    } else {
        source.to_string()
    };
    let legal = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
    let name: String = stem.chars().map(legal).take(128).collect();
    let name = name.trim_matches('-');
    format!("{NAME_PREFIX}{}", if name.is_empty() { "disk" } else { name })
}

/// 128 bits of FNV-1a over all parts, each with its length.
fn fingerprint(parts: &[&[u8]]) -> [u8; 16] {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let step = |hash: u128, byte: &u8| (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
    let hash = parts.iter().fold(BASIS, |hash, part| {
        let hash = (part.len() as u64).to_be_bytes().iter().fold(hash, step);
        part.iter().fold(hash, step)
    });
    let mut bytes = hash.to_be_bytes();
    // The format of a UUID of version 8, whose contents are application-defined.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_names_are_legal_and_tell_the_source() {
        for (source, expected) in [
            ("/images/Debian 12.qcow2", "debian-12"),
            ("./x.raw", "x"),
            ("debian@3", "debian-3"),
            ("null:1G", "null-1g"),
            ("/images/\u{e4}", "disk"),
        ] {
            let name = default_name(source);
            assert_eq!(name, format!("{NAME_PREFIX}{expected}"));
            assert!(name.parse::<IscsiName>().is_ok(), "{name}");
        }
    }

    #[test]
    fn fingerprints_tell_parts_apart() {
        assert_eq!(fingerprint(&[b"a", b"bc"]), fingerprint(&[b"a", b"bc"]));
        assert_ne!(fingerprint(&[b"a", b"bc"]), fingerprint(&[b"ab", b"c"]));
    }
}
