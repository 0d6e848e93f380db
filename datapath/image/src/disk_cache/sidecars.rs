//! Sidecars: small files beside the chunks in the chunk cache on disk, named by hashes. They are boot
//! traces, and what is needed to open versions while no server answers (`manifests`, `stores`). They
//! survive a power cut.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use headwater_store::Hash;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use crate::disk_cache::{make_own, open_own};
use crate::units::u64_of;

/// The prefix of the name of an incomplete file. A number follows or, from an earlier release, nothing.
const PART: &str = "part";

/// Numbers the files being written, because machines that start together may open the same version.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// A directory of such files with a size limit. The least recently used ones are removed to make space for a
/// new one.
pub(super) struct SidecarDirectory {
    dir: PathBuf,
    limit_bytes: u64,
}

impl SidecarDirectory {
    pub(super) fn new(dir: PathBuf, limit_bytes: u64) -> Self {
        Self { dir, limit_bytes }
    }

    /// A file of at most `max_bytes`, and when it was last used. Its content is not checked.
    pub(super) fn read(&self, id: Hash, max_bytes: u64) -> Option<(Vec<u8>, SystemTime)> {
        let file = open_own(File::options().read(true), &self.dir.join(id.to_string())).ok()?;
        let metadata = file.metadata().ok()?;
        if metadata.len() > max_bytes {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(max_bytes).read_to_end(&mut bytes).ok()?;
        Some((bytes, metadata.modified().ok()?))
    }

    /// Marks a file as used now. Returns whether it exists.
    pub(super) fn touch(&self, id: Hash) -> io::Result<bool> {
        let now = || Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now(), last_modification: now() };
        match utimensat(CWD, self.dir.join(id.to_string()), &times, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => Ok(false),
            done => Ok(done.map(|()| true)?),
        }
    }

    /// Writes a file durably, and replaces an existing one of the same name.
    pub(super) fn keep(&self, id: Hash, bytes: &[u8]) -> io::Result<()> {
        make_own(&self.dir)?;
        let Some(room) = self.limit_bytes.checked_sub(u64_of(bytes.len())) else {
            let (len, limit_bytes) = (bytes.len(), self.limit_bytes);
            let why = format!(
                "the file has {len} bytes, and the cache keeps at most {limit_bytes} of such files: make the cache larger"
            );
            return Err(io::Error::other(why));
        };
        self.thin(room, id)?;
        let part = self.dir.join(format!("{PART}-{}", WRITES.fetch_add(1, Ordering::Relaxed)));
        let written = open_own(File::options().create(true).truncate(true).write(true), &part)
            .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&part, self.dir.join(id.to_string())));
        if written.is_err() {
            // The first failure is the one to report.
            let _ = fs::remove_file(&part);
        }
        written.and_then(|()| File::open(&self.dir)?.sync_all())
    }

    /// Removes a file.
    pub(super) fn remove(&self, id: Hash) -> io::Result<()> {
        unless_missing(fs::remove_file(self.dir.join(id.to_string())))
    }

    /// Removes incomplete files of a process that ended.
    pub(super) fn remove_rest(&self) -> io::Result<()> {
        let entries = match fs::read_dir(&self.dir) {
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

    /// Removes the least recently used files until the others use at most `room` bytes. The file of `id` does
    /// not count, because it is replaced.
    fn thin(&self, room: u64, id: Hash) -> io::Result<()> {
        let mut all: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().parse::<Hash>().map_or(true, |other| other == id) {
                continue;
            }
            match entry.metadata() {
                Ok(metadata) => all.push((metadata.modified()?, metadata.len(), entry.path())),
                // Another call that makes space removed it.
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
            unless_missing(fs::remove_file::<&Path>(&path))?;
            taken = taken.saturating_sub(len);
        }
        Ok(())
    }
}

fn unless_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
