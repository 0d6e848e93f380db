//! Caches boot traces that were recorded on this host in the chunk cache on disk, for versions of stores
//! that this host cannot write. A boot trace lists the chunks that a boot reads first.

use headwater_store::{Hash, TRACE_MAX_BYTES};

use crate::disk_cache::DiskCache;
use crate::disk_cache::sidecars::SidecarDirectory;
use crate::error::ImageError;

const DIR: &str = "traces";
/// They use at most the cache's size divided by this, in addition to the chunks.
const SHARE: u64 = 64;

impl DiskCache {
    pub(super) fn traces(&self) -> SidecarDirectory {
        SidecarDirectory::new(self.dir.join(DIR), self.capacity_bytes / SHARE)
    }

    /// The boot trace that was recorded here. The call marks it as used.
    pub fn trace(&self, manifest: Hash) -> Option<Vec<u8>> {
        let (bytes, _) = self.traces().read(manifest, TRACE_MAX_BYTES)?;
        if let Err(e) = self.traces().touch(manifest) {
            tracing::debug!(error = %e, "cannot record the time at which a boot trace was last used");
        }
        Some(bytes)
    }

    /// Writes or removes a boot trace. The least recently used ones are removed for it.
    pub fn set_trace(&self, manifest: Hash, trace: Option<&[u8]>) -> Result<(), ImageError> {
        let traces = self.traces();
        let set = match trace {
            Some(trace) => traces.keep(manifest, trace),
            None => traces.remove(manifest),
        };
        let shown = self.dir.join(DIR);
        set.map_err(|e| ImageError::from_os(format!("cannot write a boot trace to {}", shown.display()), &e))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::disk_cache::DISK_CACHE_MIN_BYTES;
    use crate::disk_cache::tests::open_again;

    #[test]
    fn traces_are_bounded_and_used_traces_stay() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let limit = (DISK_CACHE_MIN_BYTES / SHARE) as usize;
        let id = |n: usize| Hash::of(&[n as u8]);
        for n in 0..20 {
            cache.set_trace(id(n), Some(&vec![7; limit / 5])).unwrap();
            assert!(n == 0 || cache.trace(id(0)).is_some(), "the first is used all the time");
            // So that the file system's clock distinguishes them.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let taken: u64 =
            fs::read_dir(dir.path().join(DIR)).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(taken <= limit as u64, "{taken}");
        assert!(cache.trace(id(19)).is_some() && cache.trace(id(1)).is_none());
        // A trace that exceeds the whole limit is refused, and evicts nothing.
        assert!(cache.set_trace(id(99), Some(&vec![7; limit + 1])).is_err());
        assert!(cache.trace(id(0)).is_some() && cache.trace(id(99)).is_none());
        // Incomplete files are removed, even those of an earlier release.
        let parts = ["part", "part-3"].map(|name| dir.path().join(DIR).join(name));
        parts.iter().for_each(|part| fs::write(part, [1]).unwrap());
        drop(cache);
        let cache = open_again(dir.path());
        assert!(parts.iter().all(|part| !part.exists()) && cache.trace(id(0)).is_some());
    }
}
