//! What is kept of a machine's disk for the next disk process.

use std::sync::Arc;

use anyhow::Context;
use headwater_api::CacheSettings;
use headwater_service::backend::DiskRequest;
use headwater_volume::Volume;
use parking_lot::Mutex;

use super::scratch::Scratch;
use crate::disk_process::{Keeper, LeftCaches};

/// The memory of a machine's write caches, as far as another process can go on with it.
pub(super) fn caches(volume: &Volume, scratch: Option<&Scratch>) -> std::io::Result<LeftCaches> {
    let scratch = match scratch {
        Some(scratch) => scratch.volume.handover()?,
        None => None,
    };
    Ok(LeftCaches { disk: volume.handover()?, scratch })
}

/// Keeps a disk until it is closed.
pub(super) struct Survival(Option<Kept>);

struct Kept {
    keeper: Arc<Keeper>,
    request: Mutex<DiskRequest>,
    /// The keeper has all of it. It has a persistent disk only while that is handed over.
    is_held: bool,
}

impl Survival {
    /// Gives the keeper what the next process needs, unless the keeper has that from the process before. A persistent disk is not given:
    /// after a crash it is as at its last flush, or later, so its machine cannot go on.
    pub(super) fn begin(
        keeper: Option<&Arc<Keeper>>,
        request: &DiskRequest,
        caches: std::io::Result<LeftCaches>,
        is_recovered: bool,
    ) -> Self {
        let Some(keeper) = keeper else { return Self(None) };
        let is_held = request.kept.is_none();
        let give = || -> anyhow::Result<()> {
            match caches? {
                // From now on it is written to.
                _ if !is_held => keeper.forget(request.uuid)?,
                caches if caches.disk.is_none() => anyhow::bail!("its memory is in no file"),
                caches if !is_recovered => keeper.put_disk(request, &caches)?,
                _ => {}
            }
            Ok(())
        };
        if let Err(error) = give() {
            let machine = &request.machine;
            tracing::warn!(%machine, "its disk does not outlive a crash of the disk process: {error:#}");
            return Self(None);
        }
        Self(Some(Kept { keeper: Arc::clone(keeper), request: Mutex::new(request.clone()), is_held }))
    }

    /// Gives the keeper a persistent disk that is saved and not served any more.
    pub(super) fn hand_over(&self, caches: &LeftCaches) -> anyhow::Result<()> {
        let Kept { keeper, request, .. } = self.0.as_ref().context("there is no keeper")?;
        keeper.put_disk(&request.lock(), caches)
    }

    /// The disk has other limits from now on.
    pub(super) fn set_limits(&self, cache: &CacheSettings) {
        if let Some(Kept { keeper, request, is_held }) = &self.0 {
            let mut request = request.lock();
            request.cache = *cache;
            if *is_held && let Err(error) = keeper.put_request(&request) {
                tracing::warn!(machine = %request.machine, "the next disk process has its earlier limits: {error:#}");
            }
        }
    }

    /// The disk is closed. Harmless when repeated.
    pub(super) fn end(&self) {
        if let Some(Kept { keeper, request, .. }) = &self.0
            && let Err(error) = keeper.forget(request.lock().uuid)
        {
            tracing::debug!(%error, "the keeper has ended before a disk was closed");
        }
    }
}
