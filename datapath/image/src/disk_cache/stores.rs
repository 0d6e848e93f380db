//! Caches the settings and image lists of stores as they were last seen, so that versions can be opened while
//! no server answers.
//!
//! ```text
//!   DIR/stores/HASH    8 bytes  magic
//!                     32 bytes  BLAKE3 of the file's name and of the following bytes
//!                               the file `store`, or the list of versions of an image, as `docs/format.md` says
//! ```
//! `HASH` is the hash of the store's name and the path in it. These files are not named by their contents, so
//! the checksum at the start detects a file that was changed, cut off or replaced by another one. The mtime
//! of a file is the time at which the store last confirmed its content; reading the file does not change it.

use std::time::SystemTime;

use headwater_store::{Hash, Image, ImageName, StoreError, chunk_bytes_of, settings_bytes};

use crate::disk_cache::DiskCache;
use crate::disk_cache::sidecars::SidecarDirectory;

const DIR: &str = "stores";
/// These files together use at most the cache's size divided by this, in addition to the chunks.
const SHARE: u64 = 64;
const MAGIC: &[u8; 8] = b"HWSEEN\x01\0";
/// The path of a store's settings.
const SETTINGS: &str = "store";

impl DiskCache {
    pub(super) fn stores(&self) -> SidecarDirectory {
        SidecarDirectory::new(self.dir.join(DIR), self.capacity_bytes / SHARE)
    }

    /// Caches the settings of a store, for the next process.
    pub fn keep_store(&self, store: &str, chunk_bytes: u32) {
        self.keep_path(store, SETTINGS, settings_bytes(chunk_bytes));
    }

    /// The chunk size of a store, if its settings are cached and undamaged, and when they were last looked
    /// up.
    pub fn kept_store(&self, store: &str) -> Option<(u32, SystemTime)> {
        let (bytes, at) = self.kept_path(store, SETTINGS)?;
        Some((chunk_bytes_of(store, &bytes).ok()?, at))
    }

    /// Caches the list of versions of an image. The least recently looked up ones are removed for it.
    pub fn keep_image(&self, store: &str, image: &Image) {
        self.keep_path(store, &path_of(&image.name), image.encode());
        // The settings get the time of the newest list, because a list is useless without them.
        if let Err(e) = self.stores().touch(id_of(store, SETTINGS)) {
            tracing::debug!(error = %e, "cannot record the time at which a store was last looked up");
        }
    }

    /// The list of versions of an image, if it is cached and undamaged, and when it was last looked up.
    pub fn kept_image(&self, store: &str, name: &ImageName) -> Option<(Image, SystemTime)> {
        let (bytes, at) = self.kept_path(store, &path_of(name))?;
        Some((Image::decode(name, &bytes).ok()?, at))
    }

    /// Removes the list of an image that the store no longer has.
    pub fn forget_image(&self, store: &str, name: &ImageName) {
        if let Err(e) = self.stores().remove(id_of(store, &path_of(name))) {
            tracing::warn!(image = %name, dir = %self.dir.display(), error = %e, "cannot remove the list of versions of an image from the chunk cache");
        }
    }

    fn keep_path(&self, store: &str, path: &str, bytes: Result<Vec<u8>, StoreError>) {
        let id = id_of(store, path);
        let kept = bytes.map_err(std::io::Error::other).and_then(|bytes| match self.kept_path(store, path) {
            Some((kept, _)) if kept == bytes => self.stores().touch(id).map(drop),
            _ => self.stores().keep(id, &with_checksum(id, &bytes)),
        });
        if let Err(e) = kept {
            tracing::warn!(path, dir = %self.dir.display(), error = %e,
                "cannot write a store's lists and settings to the chunk cache: the store cannot be opened while no server answers");
        }
    }

    fn kept_path(&self, store: &str, path: &str) -> Option<(Vec<u8>, SystemTime)> {
        let id = id_of(store, path);
        let (bytes, at) = self.stores().read(id, self.capacity_bytes / SHARE)?;
        Some((verified(id, &bytes)?.to_vec(), at))
    }
}

/// Encodes the content of the file with the name `id`.
pub(crate) fn with_checksum(id: Hash, bytes: &[u8]) -> Vec<u8> {
    [MAGIC, sum_of(id, bytes).as_slice(), bytes].concat()
}

/// The payload of the file with the name `id`, if it is undamaged.
pub(crate) fn verified(id: Hash, bytes: &[u8]) -> Option<&[u8]> {
    let (sum, bytes) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<32>()?;
    (*sum == sum_of(id, bytes)).then_some(bytes)
}

fn path_of(name: &ImageName) -> String {
    format!("images/{name}")
}

fn id_of(store: &str, path: &str) -> Hash {
    Hash::of(format!("{store}\n{path}").as_bytes())
}

fn sum_of(id: Hash, bytes: &[u8]) -> [u8; 32] {
    Hash::of(&[id.0.as_slice(), bytes].concat()).0
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::disk_cache::DISK_CACHE_MIN_BYTES;
    use crate::disk_cache::tests::open_again;

    const STORE: &str = "https://a.example";

    fn image(name: &str) -> Image {
        Image::empty(name.parse().unwrap())
    }

    #[test]
    fn cached_store_lists_outlive_the_process_and_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let name: ImageName = "debian".parse().unwrap();
        let cache = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        assert!(cache.kept_store(STORE).is_none() && cache.kept_image(STORE, &name).is_none());
        cache.keep_store(STORE, 65_536);
        cache.keep_image(STORE, &image("debian"));
        drop(cache);
        let cache = open_again(dir.path());
        assert_eq!(cache.kept_store(STORE).unwrap().0, 65_536);
        assert_eq!(cache.kept_image(STORE, &name).unwrap().0, image("debian"));
        assert!(cache.kept_image("https://b.example", &name).is_none());

        // The list of another image in its place, or a changed byte, is detected.
        let file = |path: &str| dir.path().join(DIR).join(id_of(STORE, path).to_string());
        cache.keep_image(STORE, &image("other"));
        let right = fs::read(file("images/debian")).unwrap();
        fs::copy(file("images/other"), file("images/debian")).unwrap();
        assert!(cache.kept_image(STORE, &name).is_none());
        for at in 0..right.len() {
            let mut wrong = right.clone();
            wrong[at] ^= 1;
            fs::write(file("images/debian"), &wrong).unwrap();
            assert!(cache.kept_image(STORE, &name).is_none(), "byte {at}");
            fs::write(file("images/debian"), &right[..at]).unwrap();
            assert!(cache.kept_image(STORE, &name).is_none(), "{at} bytes");
        }
        cache.keep_image(STORE, &image("debian"));
        assert!(cache.kept_image(STORE, &name).is_some());
        cache.forget_image(STORE, &name);
        cache.forget_image(STORE, &name);
        assert!(cache.kept_image(STORE, &name).is_none());
    }

    #[test]
    fn settings_stay_as_long_as_a_list_of_their_store() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        cache.keep_store(STORE, 65_536);
        let folder = SidecarDirectory::new(dir.path().join(DIR), 4096);
        for n in 0..40 {
            cache.keep_image(STORE, &image(&format!("i{n}")));
            // So that the file system's clock distinguishes them.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        folder.keep(Hash::of(b"x"), &[0; 2048]).unwrap();
        let taken: u64 =
            fs::read_dir(dir.path().join(DIR)).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
        assert!(taken <= 4096, "{taken}");
        let is_kept = |n: u32| cache.kept_image(STORE, &format!("i{n}").parse().unwrap()).is_some();
        assert!(is_kept(39) && !is_kept(0));
        assert!(cache.kept_store(STORE).is_some());
    }
}
