//! Manifests of versions that were opened, so that they can be opened again while no server answers.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use headwater_store::{Hash, MANIFEST_MAX_BYTES};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use crate::disk_cache::{DiskCache, make_own, open_own};
use crate::units::u64_of;

const DIR: &str = "manifests";
/// What is not written in full has a name that begins like this.
const PART: &str = "part-";
/// Manifests take at most one part in so many of what the cache may take, beside it.
const SHARE: u64 = 16;

/// Numbers what is being written: machines that start together may open the same version.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// Removes what a process left that ended while it wrote.
pub(super) fn remove_rest(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir.join(DIR)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PART) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

impl DiskCache {
    /// The manifest, if it is here and sound.
    pub(crate) fn manifest(&self, id: Hash) -> Option<Vec<u8>> {
        let path = self.dir.join(DIR).join(id.to_string());
        if fs::metadata(&path).ok()?.len() > MANIFEST_MAX_BYTES {
            return None;
        }
        fs::read(&path).ok().filter(|bytes| Hash::of(bytes) == id)
    }

    /// Keeps a manifest. Those that were not used for longest go for it.
    pub(crate) fn keep_manifest(&self, id: Hash, bytes: &[u8]) {
        if let Err(e) = self.try_keep_manifest(id, bytes) {
            tracing::warn!(version = %id.short(), dir = %self.dir.display(), error = %e,
                "cannot keep the manifest of a version: it cannot be opened while all servers are gone");
        }
    }

    /// Marks a manifest as used now. Whether it is there.
    pub(crate) fn use_manifest(&self, id: Hash) -> io::Result<bool> {
        let now = || Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now(), last_modification: now() };
        match utimensat(CWD, self.dir.join(DIR).join(id.to_string()), &times, AtFlags::empty()) {
            Err(rustix::io::Errno::NOENT) => Ok(false),
            done => Ok(done.map(|()| true)?),
        }
    }

    fn try_keep_manifest(&self, id: Hash, bytes: &[u8]) -> io::Result<()> {
        let dir = self.dir.join(DIR);
        let path = dir.join(id.to_string());
        if self.manifest(id).is_some() {
            return self.use_manifest(id).map(drop);
        }
        make_own(&dir)?;
        let room = (self.capacity_bytes / SHARE).checked_sub(u64_of(bytes.len()));
        let Some(room) = room else {
            return Err(io::Error::other(format!("it has {} bytes: make the cache larger", bytes.len())));
        };
        thin(&dir, room)?;
        let part = dir.join(format!("{PART}{}", WRITES.fetch_add(1, Ordering::Relaxed)));
        let written = open_own(File::options().create(true).truncate(true).write(true), &part)
            .and_then(|mut file| file.write_all(bytes))
            .and_then(|()| fs::rename(&part, &path));
        if written.is_err() {
            // The first failure is the one to tell.
            let _ = fs::remove_file(&part);
        }
        written
    }
}

/// Removes the manifests that were not used for longest, until the others take at most `room` bytes.
fn thin(dir: &Path, room: u64) -> io::Result<()> {
    let mut all: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().parse::<Hash>().is_err() {
            continue;
        }
        match entry.metadata() {
            Ok(metadata) => all.push((metadata.modified()?, metadata.len(), entry.path())),
            // Another one that makes room removed it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    all.sort_unstable();
    let mut taken: u64 = all.iter().map(|(_, len, _)| len).sum();
    for (_, len, path) in all {
        if taken <= room {
            break;
        }
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => taken = taken.saturating_sub(len),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_cache::DISK_CACHE_MIN_BYTES;

    #[test]
    fn manifests_are_kept_whole_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        let manifests: Vec<Vec<u8>> = (0..3).map(|n| vec![n; 1 << 20]).collect();
        let keep = |bytes: &[u8]| cache.keep_manifest(Hash::of(bytes), bytes);
        let is_kept = |bytes: &[u8]| cache.manifest(Hash::of(bytes)).is_some();
        manifests.iter().for_each(|bytes| {
            keep(bytes);
            // So that the file system's clock tells them apart.
            std::thread::sleep(std::time::Duration::from_millis(20));
        });
        assert!(manifests.iter().all(|bytes| is_kept(bytes)));
        // Used again, so that the second is the one that goes.
        keep(&manifests[0]);
        keep(&vec![9; (DISK_CACHE_MIN_BYTES / SHARE) as usize - (2 << 20)]);
        assert_eq!(manifests.iter().map(|bytes| is_kept(bytes)).collect::<Vec<_>>(), [true, false, true]);
        // Too large for all of the room.
        keep(&vec![8; (DISK_CACHE_MIN_BYTES / SHARE) as usize + 1]);
        assert!(is_kept(&manifests[0]));
        let path = dir.path().join(DIR).join(Hash::of(&manifests[0]).to_string());
        fs::write(&path, [0; 5]).unwrap();
        assert!(!is_kept(&manifests[0]));
        keep(&manifests[0]);
        assert!(is_kept(&manifests[0]));
        let part = dir.path().join(DIR).join("part-7");
        fs::write(&part, [0]).unwrap();
        drop(cache);
        let cache = DiskCache::open(dir.path(), DISK_CACHE_MIN_BYTES).unwrap();
        assert!(!part.exists() && cache.manifest(Hash::of(&manifests[0])).is_some());
    }
}
