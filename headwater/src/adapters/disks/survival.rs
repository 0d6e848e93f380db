//! What is kept of a machine's disk for the next disk process.

use std::sync::Arc;

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
pub(super) struct Survival(Option<(Arc<Keeper>, Mutex<DiskRequest>)>);

impl Survival {
    /// Gives the keeper what the next process needs, unless the keeper has that from the process before. A persistent disk is not kept:
    /// after a crash it is as at its last flush, or later, so its machine cannot go on.
    pub(super) fn begin(
        keeper: Option<&Arc<Keeper>>,
        request: &DiskRequest,
        caches: std::io::Result<LeftCaches>,
        is_recovered: bool,
    ) -> Self {
        let Some(keeper) = keeper else { return Self(None) };
        let kept = || -> anyhow::Result<bool> {
            let caches = caches?;
            if caches.disk.is_none() {
                return Ok(false);
            }
            if !is_recovered {
                keeper.put_disk(request, &caches)?;
            }
            Ok(true)
        };
        Self(match kept() {
            Ok(true) => Some((Arc::clone(keeper), Mutex::new(request.clone()))),
            Ok(false) => None,
            Err(error) => {
                let machine = &request.machine;
                tracing::warn!(%machine, "its disk does not outlive a crash of the disk process: {error:#}");
                None
            }
        })
    }

    /// The disk has other limits from now on.
    pub(super) fn set_limits(&self, cache: &CacheSettings) {
        if let Some((keeper, request)) = &self.0 {
            let mut request = request.lock();
            request.cache = *cache;
            if let Err(error) = keeper.put_request(&request) {
                tracing::warn!(machine = %request.machine, "the next disk process has its earlier limits: {error:#}");
            }
        }
    }

    /// The disk is closed. Harmless when repeated.
    pub(super) fn end(&self) {
        if let Some((keeper, request)) = &self.0
            && let Err(error) = keeper.forget(request.lock().uuid)
        {
            tracing::debug!(%error, "the keeper has ended before a disk was closed");
        }
    }
}
