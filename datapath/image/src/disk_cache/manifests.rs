//! Caches manifests of opened versions in the chunk cache on disk, so that the versions can be opened again
//! while no server answers. A manifest lists the chunks of a version.

use std::io;

use headwater_store::{Hash, MANIFEST_MAX_BYTES};

use crate::disk_cache::DiskCache;
use crate::disk_cache::sidecars::SidecarDirectory;
use crate::error::ImageError;

const DIR: &str = "manifests";
/// Manifests use at most the cache's size divided by this, in addition to the chunks.
const SHARE: u64 = 16;

impl DiskCache {
    pub(super) fn manifests(&self) -> SidecarDirectory {
        SidecarDirectory::new(self.dir.join(DIR), self.capacity_bytes / SHARE)
    }

    /// The manifest, if it is cached and undamaged.
    pub(crate) fn manifest(&self, id: Hash) -> Option<Vec<u8>> {
        let (bytes, _) = self.manifests().read(id, MANIFEST_MAX_BYTES)?;
        (Hash::of(&bytes) == id).then_some(bytes)
    }

    /// Caches a manifest if possible. The least recently used manifests are removed if space is needed.
    pub(crate) fn keep_manifest(&self, id: Hash, bytes: &[u8]) {
        if let Err(e) = self.must_keep_manifest(id, bytes) {
            tracing::warn!(error = %e, "cannot write the manifest of a version to the chunk cache: the version opens now, but cannot be opened while no server answers");
        }
    }

    /// Like [`DiskCache::keep_manifest`], but returns the error: for callers that promise that the version can be
    /// opened while no server answers.
    pub(crate) fn must_keep_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), ImageError> {
        self.try_keep_manifest(id, bytes).map_err(|e| {
            let (version, dir) = (id.short(), self.dir.join(DIR));
            // The other errors have advice of their own.
            let advice = match e.raw_os_error() {
                Some(_) => " (check that there is free space, and that the directory is writable)",
                None => "",
            };
            let tried = format!(
                "cannot write the manifest of version {version} to {}, so the version cannot be opened while no server answers{advice}",
                dir.display()
            );
            ImageError::from_os(tried, &e)
        })
    }

    /// Marks a manifest as used now. Returns whether it is cached.
    pub(crate) fn use_manifest(&self, id: Hash) -> io::Result<bool> {
        self.manifests().touch(id)
    }

    fn try_keep_manifest(&self, id: Hash, bytes: &[u8]) -> io::Result<()> {
        if self.manifest(id).is_some() {
            return self.use_manifest(id).map(drop);
        }
        self.manifests().keep(id, bytes).inspect_err(|_| {
            // If the sync of the directory failed, the file exists and is not durable. The next call writes
            // it again.
            let _ = self.manifests().remove(id);
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::disk_cache::DISK_CACHE_MIN_BYTES;
    use crate::disk_cache::tests::open_again;

    #[test]
    fn cached_manifests_are_complete_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let manifests: Vec<Vec<u8>> = (0..3).map(|n| vec![n; 1 << 20]).collect();
        let keep = |bytes: &[u8]| cache.keep_manifest(Hash::of(bytes), bytes);
        let is_kept = |bytes: &[u8]| cache.manifest(Hash::of(bytes)).is_some();
        manifests.iter().for_each(|bytes| {
            keep(bytes);
            // So that the file system's clock distinguishes them.
            std::thread::sleep(std::time::Duration::from_millis(20));
        });
        assert!(manifests.iter().all(|bytes| is_kept(bytes)));
        // Used again, so that the second one is removed.
        keep(&manifests[0]);
        keep(&vec![9; (DISK_CACHE_MIN_BYTES / SHARE) as usize - (2 << 20)]);
        assert_eq!(manifests.iter().map(|bytes| is_kept(bytes)).collect::<Vec<_>>(), [true, false, true]);
        // Larger than the whole limit.
        let too_large = vec![8; (DISK_CACHE_MIN_BYTES / SHARE) as usize + 1];
        let refused = cache.must_keep_manifest(Hash::of(&too_large), &too_large).unwrap_err().to_string();
        assert!(refused.contains("has 4194305 bytes, and the cache keeps at most 4194304"), "{refused}");
        assert!(refused.ends_with("make the cache larger"), "{refused}");
        assert!(is_kept(&manifests[0]));
        let path = dir.path().join(DIR).join(Hash::of(&manifests[0]).to_string());
        fs::write(&path, [0; 5]).unwrap();
        assert!(!is_kept(&manifests[0]));
        keep(&manifests[0]);
        assert!(is_kept(&manifests[0]));
        let part = dir.path().join(DIR).join("part-7");
        fs::write(&part, [0]).unwrap();
        drop(cache);
        let cache = open_again(dir.path());
        assert!(!part.exists() && cache.manifest(Hash::of(&manifests[0])).is_some());
    }
}
