//! Answers the boot server's questions about machines that boot from the network (targets), from the database, the store and the data
//! directory: what a card's machine boots, and with which token it may read its image. The boot server (`boot/server`) speaks the
//! protocols of firmware itself, and calls this through its trait [`Targets`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use async_trait::async_trait;
use headwater_block::Device;
use headwater_boot_artefacts::{Artefacts, Kept};
use headwater_boot_script::{CA_FILE, DIRECTORY, SETTINGS_FILE, Settings, TOKEN_FILE, check_options, cpio};
use headwater_boot_server::{Artefact, Boot, Known, Mac, Targets};
use headwater_image::{ChunkCache, VersionReader};
use headwater_service::Service;
use headwater_service::backend::{Clock, Random, SystemClock, SystemRandom};
use headwater_store::{Hash, Store};
use headwater_store_server::token_line;
use parking_lot::Mutex;

use crate::replace::replace;

/// Cache of uncompressed chunks of a version while its kernel is extracted.
const CHUNKS_BYTES: u64 = 64 << 20;
/// Random bytes of a token for the store.
const TOKEN_BYTES: usize = 32;

/// Answers the boot server about the machines of a daemon that boot from the network.
pub struct NetworkTargets {
    pub service: Service,
    pub store: Arc<dyn Store>,
    pub kept: Arc<Kept>,
    pub issued: IssuedTokens,
    /// The URL at which the machines read their images.
    pub servers: String,
    /// The certificate authorities of these servers, in PEM.
    pub ca: Vec<u8>,
    /// Why machines did not boot, the last time that they asked.
    pub refusals: Mutex<BTreeMap<Mac, String>>,
}

/// The store tokens that were issued, one for each machine that has booted. A new boot replaces the machine's token.
pub struct IssuedTokens {
    path: PathBuf,
    lines: Mutex<BTreeMap<String, String>>,
}

impl IssuedTokens {
    /// Reads the tokens of earlier runs, which running machines still use.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let failed = || format!("cannot use {}", path.display());
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                replace(path, b"", 0o600).with_context(failed)?;
                String::new()
            }
            Err(e) => return Err(e).with_context(failed),
        };
        let name = |line: &str| Some((line.split_once(' ')?.0.to_owned(), line.to_owned()));
        Ok(Self { path: path.to_owned(), lines: Mutex::new(text.lines().filter_map(name).collect()) })
    }

    /// The file of their hashes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the tokens of machines that are not registered any more.
    pub async fn forget_unknown_targets(&self, service: &Service) -> anyhow::Result<()> {
        let names: Vec<String> = self.lines.lock().keys().cloned().collect();
        let mut is_changed = false;
        for name in names {
            if service.target(&name.replace('-', ":")).await?.is_none() {
                is_changed |= self.lines.lock().remove(&name).is_some();
            }
        }
        if is_changed { self.write().context("cannot write the tokens of machines") } else { Ok(()) }
    }

    /// Issues a token to a machine; its earlier token becomes invalid.
    fn issue(&self, mac: Mac) -> Result<String, String> {
        let mut bytes = [0; TOKEN_BYTES];
        SystemRandom.fill(&mut bytes).map_err(|e| format!("the system gave no random numbers: {e}"))?;
        let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let line = token_line(&mac.dashed(), &token).map_err(|e| e.to_string())?;
        self.lines.lock().insert(mac.dashed(), line);
        self.write().map_err(|e| format!("cannot write {}: {e}", self.path.display()))?;
        Ok(token)
    }

    fn write(&self) -> std::io::Result<()> {
        let lines = self.lines.lock();
        let text: String = lines.values().map(|line| format!("{line}\n")).collect();
        replace(&self.path, text.as_bytes(), 0o600)
    }
}

#[async_trait]
impl Targets for NetworkTargets {
    async fn find(&self, mac: Mac) -> Result<Option<Known>, String> {
        let found = self.service.target(&mac.to_string()).await;
        found.map(|name| name.map(|name| Known { name })).map_err(|e| e.to_string())
    }

    async fn boot(&self, mac: Mac) -> Result<Boot, String> {
        let boot = self.service.target_boot(&mac.to_string()).await.map_err(|e| e.to_string())?;
        let boot = boot.ok_or("the machine is not registered any more")?;
        let version = format!("{}@{}", boot.version.image, boot.version.number);
        let found = self.artefacts(&boot.version.hash).await;
        let Artefacts { options, root_partition, .. } = found.map_err(|why| format!("{version}: {why}"))?;
        let options = check_options(&options).map_err(|e| format!("{version}: {e}"))?;
        Ok(Boot { machine: boot.machine, mac, version, manifest: boot.version.hash, options, root_partition })
    }

    fn artefact(&self, manifest: &str, which: Artefact) -> Option<PathBuf> {
        let found = self.kept.find(manifest)?;
        Some(match which {
            Artefact::Kernel => found.kernel,
            Artefact::Initrd => found.initrd,
        })
    }

    async fn settings(&self, boot: &Boot) -> Result<Vec<u8>, String> {
        let mac = boot.mac.to_string();
        let now = self.service.target_boot(&mac).await.map_err(|e| e.to_string())?;
        let now = now.ok_or("the machine is not registered any more")?;
        let settings = Settings {
            machine: now.machine,
            host_name: now.identity.host_name,
            machine_id: now.identity.machine_id,
            mac: mac.clone(),
            version: boot.version.clone(),
            manifest: boot.manifest.clone(),
            servers: self.servers.clone(),
            root_partition: boot.root_partition,
            cache_ram_bytes: now.cache_ram_bytes,
            now_ms: SystemClock.now_ms(),
        };
        let token = self.issued.issue(boot.mac)?;
        let json = settings.to_json();
        let files = [(SETTINGS_FILE, json.as_slice()), (TOKEN_FILE, token.as_bytes()), (CA_FILE, &self.ca)];
        self.refusals.lock().remove(&boot.mac);
        // It boots whether or not that can be noted.
        if let Err(error) = self.service.target_boots(&mac, &boot.version).await {
            tracing::error!(machine = boot.machine, %error, "cannot record that a machine boots");
        }
        Ok(cpio::archive(DIRECTORY, &files))
    }

    async fn refused(&self, mac: Mac, why: &str) {
        let before = self.refusals.lock().insert(mac, why.to_owned());
        if before.as_deref() == Some(why) {
            return;
        }
        tracing::error!(%mac, why, "a machine cannot boot");
        if let Err(error) = self.service.target_refused(&mac.to_string(), why).await {
            tracing::error!(%mac, %error, "cannot record in the history that a machine cannot boot");
        }
    }

    fn token(&self) -> std::io::Result<[u8; 16]> {
        let mut token = [0; 16];
        SystemRandom.fill(&mut token)?;
        Ok(token)
    }
}

impl NetworkTargets {
    /// Kernel and initramfs of a version; extracts them unless that was done before.
    async fn artefacts(&self, manifest: &str) -> Result<Artefacts, String> {
        if let Some(found) = self.kept.find(manifest) {
            return Ok(found);
        }
        let (store, kept, manifest) = (Arc::clone(&self.store), Arc::clone(&self.kept), manifest.to_owned());
        let taking = tokio::task::spawn_blocking(move || {
            let hash: Hash =
                manifest.parse().map_err(|_| "the hash of the version is not valid".to_owned())?;
            let reader = VersionReader::open(&*store, hash, ChunkCache::new(CHUNKS_BYTES));
            let reader: Arc<dyn Device> = reader.map_err(|e| e.to_string())?;
            kept.take(&manifest, &reader).map_err(|e| e.to_string())
        });
        let internal = "headwater could not extract its kernel because of an internal error (a panic): \
                        report it with the lines before this one in the daemon's log";
        taking.await.map_err(|_| internal.to_owned())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_one_token_which_survives_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        let issued = IssuedTokens::open(&path).unwrap();
        let (one, two) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        let first = issued.issue(one).unwrap();
        let second = issued.issue(two).unwrap();
        let again = IssuedTokens::open(&path).unwrap();
        let third = again.issue(one).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 2);
        let has = |mac: Mac, token: &str| text.contains(&token_line(&mac.dashed(), token).unwrap());
        assert!(!has(one, &first) && has(two, &second) && has(one, &third), "{text}");
        assert!(!text.contains(&third));
    }
}
