//! What the keeper (the parent process, [`crate::disk_process`]) holds of a machine's disk, so that the next disk process can serve it.
//!
//! An ephemeral disk is held from its opening to its closing, so it outlives a crash. A persistent disk is held only between the two disk
//! processes of an upgrade, after it was saved: after a crash its file may lack answered writes, so its machine cannot continue.

use std::sync::Arc;

use anyhow::Context;
use headwater_api::CacheSettings;
use headwater_service::backend::DiskRequest;
use headwater_volume::Volume;
use parking_lot::Mutex;

use super::scratch::Scratch;
use crate::disk_process::{Keeper, LeftCaches};

/// The memory of a machine's write caches with which another process can continue.
pub(super) fn caches(volume: &Volume, scratch: Option<&Scratch>) -> std::io::Result<LeftCaches> {
    let scratch = match scratch {
        Some(scratch) => scratch.volume.handover()?,
        None => None,
    };
    Ok(LeftCaches { disk: volume.handover()?, scratch })
}

/// Tells the keeper what to hold of one open disk. Does nothing without a keeper, or if the keeper did not take the disk.
pub(super) struct DiskInKeeper(Option<Held>);

struct Held {
    keeper: Arc<Keeper>,
    request: Mutex<DiskRequest>,
    /// Whether the keeper holds this disk while it is served: true for ephemeral disks.
    is_ephemeral: bool,
}

impl DiskInKeeper {
    /// Called when a disk is opened. Gives an ephemeral disk to the keeper, unless this process took the disk over from the keeper
    /// (`is_recovered`). Removes a persistent disk from the keeper.
    pub(super) fn begin(
        keeper: Option<&Arc<Keeper>>,
        request: &DiskRequest,
        caches: std::io::Result<LeftCaches>,
        is_recovered: bool,
    ) -> Self {
        let Some(keeper) = keeper else { return Self(None) };
        let is_ephemeral = request.kept.is_none();
        let give = || -> anyhow::Result<()> {
            let caches = caches?;
            if !is_ephemeral {
                // Its file changes from now on, so what the keeper holds is outdated.
                keeper.forget(request.uuid)?;
            }
            let lacks_scratch = request.scratch_bytes > 0 && caches.scratch.is_none();
            anyhow::ensure!(
                !lacks_scratch && (!is_ephemeral || caches.disk.is_some()),
                "the memory of its write cache is in no file that another process could use"
            );
            if is_ephemeral && !is_recovered {
                keeper.put_disk(request, &caches)?;
            }
            Ok(())
        };
        if let Err(error) = give() {
            let machine = &request.machine;
            tracing::warn!(%machine, "the machine's disk will not survive a crash of the disk process: {error:#}");
            return Self(None);
        }
        Self(Some(Held { keeper: Arc::clone(keeper), request: Mutex::new(request.clone()), is_ephemeral }))
    }

    /// Whether the next process can go on with it.
    pub(super) fn is_possible(&self) -> bool {
        self.0.is_some()
    }

    /// Gives the keeper a persistent disk that is saved and not served any more.
    pub(super) fn hand_over(&self, caches: &LeftCaches) -> anyhow::Result<()> {
        let Held { keeper, request, .. } = self.0.as_ref().context("there is no keeper")?;
        keeper.put_disk(&request.lock(), caches)
    }

    /// Gives the keeper a persistent disk again that was taken over and is not served. It is as it was when it was handed over.
    pub(super) fn give_back(&self, caches: std::io::Result<LeftCaches>) {
        let Some(Held { request, is_ephemeral: false, .. }) = &self.0 else { return };
        let given = caches.map_err(anyhow::Error::from).and_then(|caches| self.hand_over(&caches));
        if let Err(error) = given {
            tracing::error!(machine = %request.lock().machine, "cannot give the machine's disk back to the keeper, so no other process can take it over: {error:#}");
        }
    }

    /// Records the disk's new limits for the next disk process.
    pub(super) fn set_limits(&self, cache: &CacheSettings) {
        if let Some(Held { keeper, request, is_ephemeral }) = &self.0 {
            let mut request = request.lock();
            request.cache = *cache;
            if *is_ephemeral && let Err(error) = keeper.put_request(&request) {
                tracing::warn!(machine = %request.machine, "cannot record the new limits of the machine's disk, so the next disk process will use the earlier ones: {error:#}");
            }
        }
    }

    /// Called when the disk is closed. Removes it from the keeper. Harmless if repeated.
    pub(super) fn end(&self) {
        if let Some(Held { keeper, request, .. }) = &self.0
            && let Err(error) = keeper.forget(request.lock().uuid)
        {
            tracing::debug!(%error, "the keeper has ended before a disk was closed");
        }
    }
}
