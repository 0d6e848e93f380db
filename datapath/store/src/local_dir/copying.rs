//! Copies objects of other stores, and repairs damaged objects and manifests.
//!
//! A copy is written to `tmp/HASH.part`, which is renamed when its hash is right.
//!
//! - If the store was opened to copy versions, an interrupted copy continues where it stopped. Its file is
//!   kept for a week, or until another writer opens the store and empties `tmp`.
//! - After a power cut the file may have other bytes than were written. So if the hash at the end is wrong,
//!   the copy starts once more before the source is blamed.
//! - If a copy fills the disk, its file is removed, and a copy that does not fit is not started. A copy that
//!   replaces a damaged object leaves some space free, because machines may write to the same disk.
//! - If the same object is being copied already, as in two concurrent repairs, the second copy uses a file of
//!   its own, which is never kept.
//! - A source may have deleted ranges of an object (holes, [`crate::holes`]). The copy has the same holes, except where
//!   the target's own object still has the bytes: [`Filled`] reads those from there. So a copy never loses bytes that the
//!   target had.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::{Filled, Holes, ObjectHashing};
use crate::local_dir::Inner;
use crate::local_dir::files::{
    remove_quietly, rename, replace_file, share_file, step, sync_dir, sync_file, write,
};
use crate::local_dir::object::{LocalObject, read_holes};
use crate::store::{Object, Patch};

/// How much is read and written at a time.
const PIECE_BYTES: usize = 1 << 20;
/// The unit for disk space in messages.
const MIB: u64 = 1 << 20;
/// How long the file of an interrupted copy is kept.
const ABANDONED_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often a copy is attempted while other processes keep copying the same object.
const ATTEMPTS_MAX: usize = 4;
/// The fraction of a file system that a copy of a damaged object leaves free for other writers such as
/// machines: one part in this many.
const RESERVE_PART: u64 = 64;
/// The upper limit of that space.
const RESERVE_MAX_BYTES: u64 = 1 << 30;

impl Inner {
    /// Copies an object. `copied` is called with the number of bytes of each step, and its error ends the copy.
    pub(super) fn copy_object(
        &self,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let holes = source.holes()?;
        if self.copy_once(source, &holes, copied)? {
            return Ok(());
        }
        for _ in 1..ATTEMPTS_MAX {
            // Reports 0 bytes now, because the first attempt reported them all.
            if self.copy_once(source, &holes, &mut |_| copied(0))? {
                return Ok(());
            }
        }
        Err(StoreError::new(
            StoreErrorKind::Io,
            format!(
                "the data object {} was not copied: other processes kept copying it; try again",
                source.id()
            ),
        ))
    }

    /// Copies an object of a source that has it with these holes. `false`: another copy was put in place in
    /// the meantime, and has bytes that this copy lacks.
    fn copy_once(
        &self,
        source: &dyn Object,
        holes: &Arc<Holes>,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<bool, StoreError> {
        let mut part = Part::new(self, source.id());
        let outcome = self.target_object(source.id(), holes).and_then(|target| match target {
            Some(target) => {
                let target_error = |why: &str| own_object_is_damaged(source.id(), why);
                let filled = Filled::new(source, Arc::clone(holes), target)
                    .map_err(|e| target_error(&e.to_string()))?;
                self.copy_to(&mut part, &filled, copied).map_err(|e| filled.blame(e, &target_error, copied))
            }
            None => self.copy_to(&mut part, source, copied),
        });
        part.is_kept = match &outcome {
            Ok(is_placed) => *is_placed,
            // If the disk became full, the file is removed to free its space. But if `check_room` refused the copy, nothing
            // was written, and the part of an earlier copy stays.
            Err(e) => {
                self.keeps_parts && part.is_named && (part.is_refused || e.kind() != StoreErrorKind::NoSpace)
            }
        };
        outcome
    }

    /// The existing object that a copy with these holes would replace.
    fn target_object(&self, id: Hash, holes: &Holes) -> Result<Option<Arc<dyn Object>>, StoreError> {
        if holes.is_empty() {
            return Ok(None);
        }
        match LocalObject::open(&self.layout, id) {
            Ok(object) => Ok(Some(Arc::new(object))),
            Err(e) if e.kind() == StoreErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns whether the copy was put in place.
    fn copy_to(
        &self,
        part: &mut Part<'_>,
        source: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<bool, StoreError> {
        let (id, len_bytes, holes) = (source.id(), source.len_bytes(), source.holes()?);
        part.check_room(&holes, len_bytes).inspect_err(|_| part.is_refused = true)?;
        let failed = |e| StoreError::from_os(format!("cannot write {}", part.path.display()), e);
        let mut file = step().and_then(|()| part.open()).map_err(failed)?;
        let mut hashing = ObjectHashing::new(&holes, len_bytes);
        let resumed_bytes = resume(&file, len_bytes, &mut hashing).map_err(failed)?;
        copied(resumed_bytes)?;
        part.append(&mut file, (source, &holes), (resumed_bytes, &mut hashing), copied)?;
        let mut hash = hashing.finish();
        if resumed_bytes > 0 && hash != id {
            tracing::warn!(%id, "the file of an interrupted copy has wrong bytes: copying the data object from the start");
            step().and_then(|()| file.set_len(0)).and_then(|()| file.rewind()).map_err(failed)?;
            // Holes occupied no space before, so the space is checked again for a copy without them.
            part.check_room(&holes, len_bytes)?;
            hashing = ObjectHashing::new(&holes, len_bytes);
            // Reports 0 bytes now, because all bytes were reported before.
            part.append(&mut file, (source, &holes), (0, &mut hashing), &mut |_| copied(0))?;
            hash = hashing.finish();
        }
        if hash != id {
            remove_quietly(&part.path);
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!("the data object {id} is damaged at the source or in transit; it was not copied"),
            ));
        }
        let target = self.layout.object(id);
        share_file(&file, &target).and_then(|()| sync_file(&file, &part.path)).map_err(failed)?;
        self.place(part, &holes, len_bytes)
    }

    /// Puts a copy in place with its list of holes. A crash may leave bytes in listed holes, but no unlisted
    /// holes. `false`: the object in place has bytes that this copy lacks.
    fn place(&self, part: &Part<'_>, holes: &Holes, len_bytes: u64) -> Result<bool, StoreError> {
        let (id, target) = (part.id, self.layout.object(part.id));
        let _placing = self.placing.lock();
        if !holes.is_empty() {
            self.allow_holes()?;
            match self.target_object(id, holes)? {
                Some(present) if holes.common(&*present.holes()?) != *holes => return Ok(false),
                Some(_) => {}
                None => self.put_holes(id, holes, len_bytes)?,
            }
        }
        rename(&part.path, &target)
            .map_err(|e| StoreError::from_os(format!("cannot write {}", target.display()), e))?;
        sync_dir(&self.layout.objects())?;
        self.put_holes(id, holes, len_bytes)?;
        Ok(true)
    }

    /// Overwrites damaged bytes with right ones. It writes in place, so processes that have the object open
    /// read them too.
    pub(super) fn repair_object(&self, object: Hash, patches: &[Patch]) -> Result<(), StoreError> {
        self.must_be_writable()?;
        let path = self.layout.object(object);
        let failed = |e| StoreError::from_os(format!("cannot repair {}", path.display()), e);
        let file = File::options().write(true).open(&path).map_err(failed)?;
        let len_bytes = file.metadata().map_err(failed)?.len();
        // If the list of holes is damaged, no process can punch holes from it, so it does not matter here.
        let holes = read_holes(&self.layout.holes_of(object), len_bytes).unwrap_or_default();
        for patch in patches {
            let end = u64::try_from(patch.bytes.len()).ok().and_then(|len| patch.offset.checked_add(len));
            let why = match end {
                Some(end) if end <= len_bytes && !holes.overlap(&(patch.offset..end)) => None,
                Some(end) if end <= len_bytes => Some("the range is in a hole"),
                _ => Some("the object ends before the range"),
            };
            if let Some(why) = why {
                return Err(StoreError::new(
                    StoreErrorKind::Damaged,
                    format!("cannot repair {}: {why} ({:?})", path.display(), patch),
                ));
            }
            step().and_then(|()| file.write_all_at(&patch.bytes, patch.offset)).map_err(failed)?;
        }
        sync_file(&file, &path).map_err(failed)
    }
}

impl Inner {
    /// Overwrites a manifest. It writes in place, because pins are locks on the file. After a crash the
    /// manifest is at most as damaged as before.
    pub(super) fn repair_manifest(&self, id: Hash, bytes: &[u8]) -> Result<(), StoreError> {
        self.must_be_writable()?;
        if Hash::of(bytes) != id {
            return Err(StoreError::new(
                StoreErrorKind::Damaged,
                format!("these bytes are not the manifest {id}"),
            ));
        }
        let path = self.layout.manifest(id);
        let failed = |e| StoreError::from_os(format!("cannot repair {}", path.display()), e);
        let file = match File::options().write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return replace_file(&self.temporary("manifest"), &path, bytes);
            }
            Err(e) => return Err(failed(e)),
        };
        let len_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let written =
            step().and_then(|()| file.write_all_at(bytes, 0)).and_then(|()| file.set_len(len_bytes));
        written.map_err(failed)?;
        sync_file(&file, &path).map_err(failed)
    }
}

impl Inner {
    /// Removes files from `tmp` that no copy will continue. If that fails, there is less space, and the copy
    /// is tried anyway.
    pub(super) fn remove_abandoned(&self) {
        let modified = |file: io::Result<fs::Metadata>| file.and_then(|file| file.modified()).ok();
        // The lock file was written just now, so its time shows the file system's clock.
        let now = self.writer_lock.as_ref().and_then(|lock| modified(lock.metadata()));
        let Ok(entries) = fs::read_dir(self.layout.tmp()) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            let is_part = path.extension().is_some_and(|suffix| suffix == "part");
            let age = || now?.duration_since(modified(entry.metadata())?).ok();
            if is_part && age().is_none_or(|age| age <= ABANDONED_AFTER) {
                continue;
            }
            tracing::info!(path = %path.display(), "removing the file of an interrupted copy");
            remove_quietly(&path);
        }
    }
}

/// The file to which a copy is written. Dropping it removes the file, unless it is kept.
struct Part<'a> {
    store: &'a Inner,
    id: Hash,
    path: PathBuf,
    /// The file is named after the object, and no other copy uses it.
    is_named: bool,
    /// There is no space for the rest of the object.
    is_refused: bool,
    /// The file is in place, or the next copy of the object can continue it.
    is_kept: bool,
}

impl<'a> Part<'a> {
    fn new(store: &'a Inner, id: Hash) -> Self {
        let is_named = store.copying.lock().insert(id);
        let path = match is_named {
            true => store.layout.tmp().join(format!("{id}.part")),
            false => store.temporary("copy"),
        };
        Self { store, id, path, is_named, is_refused: false, is_kept: false }
    }

    fn open(&self) -> std::io::Result<File> {
        let mut options = File::options();
        match self.is_named {
            true => options.append(true),
            // A process that was killed may have left a file of this name.
            false => options.write(true).truncate(true),
        };
        options.read(true).create(true).open(&self.path)
    }

    /// Fails if the rest of an object of this length, with these holes, does not fit. A copy that fills the
    /// disk would make all other writes there fail until it fails itself.
    fn check_room(&self, holes: &Holes, len_bytes: u64) -> Result<(), StoreError> {
        // If the free space is unknown, the copy is started, and fails when the disk is full.
        let Ok(space) = rustix::fs::statvfs(self.store.layout.tmp()) else { return Ok(()) };
        let copied_bytes =
            if self.is_named { fs::metadata(&self.path).map_or(0, |part| part.len()) } else { 0 };
        // Holes occupy no space, neither in the copied part nor in the rest.
        let rest = holes.within(&(copied_bytes..len_bytes)).into_iter();
        let hole_bytes = rest.fold(0u64, |sum, hole| sum.saturating_add(hole.end.saturating_sub(hole.start)));
        let more_bytes = len_bytes.saturating_sub(copied_bytes).saturating_sub(hole_bytes);
        if more_bytes == 0 || space.f_blocks == 0 {
            return Ok(());
        }
        let is_repair = self.store.layout.object(self.id).exists();
        let total_bytes = space.f_blocks.saturating_mul(space.f_frsize);
        let left_bytes = if is_repair { reserve_bytes(total_bytes) } else { 0 };
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        if more_bytes.saturating_add(left_bytes) <= free_bytes {
            return Ok(());
        }
        let others = format!(", {} MiB must stay free for other writers", left_bytes.div_ceil(MIB));
        Err(StoreError::new(
            StoreErrorKind::NoSpace,
            format!(
                "cannot write {}: {} MiB more are to be written{}, but only {} MiB are free: free space there",
                self.path.display(),
                more_bytes.div_ceil(MIB),
                if is_repair { &others } else { "" },
                free_bytes / MIB
            ),
        ))
    }

    /// Appends the object from an offset on, and hashes it. The file gets the same holes.
    fn append(
        &self,
        file: &mut File,
        (source, holes): (&dyn Object, &Holes),
        (at, hashing): (u64, &mut ObjectHashing),
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let failed = |e| StoreError::from_os(format!("cannot write {}", self.path.display()), e);
        let (mut at, len_bytes) = (at, source.len_bytes());
        let mut buffer = vec![0; PIECE_BYTES];
        let mut stretches = holes.within(&(at..len_bytes));
        stretches.push(len_bytes..len_bytes);
        for hole in stretches {
            while at < hole.start {
                let len = usize::try_from(hole.start - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
                let piece = buffer.get_mut(..len).unwrap_or_default();
                source.read_range(at, piece)?;
                hashing.update(piece);
                write(file, piece).map_err(failed)?;
                let len = u64::try_from(len).unwrap_or(u64::MAX);
                at = at.saturating_add(len);
                copied(len)?;
            }
            let hole_bytes = hole.end.saturating_sub(at);
            if hole_bytes > 0 {
                step().and_then(|()| file.set_len(hole.end)).map_err(failed)?;
                file.seek(SeekFrom::Start(hole.end)).map_err(failed)?;
                hashing.pass(hole_bytes);
                at = hole.end;
                copied(hole_bytes)?;
            }
        }
        Ok(())
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        // Removed before another copy can reuse the file.
        if !self.is_kept {
            remove_quietly(&self.path);
        }
        if self.is_named {
            self.store.copying.lock().remove(&self.id);
        }
    }
}

fn own_object_is_damaged(id: Hash, why: &str) -> StoreError {
    StoreError::of_own_object(format!(
        "the data object {id} is damaged in the target store ({why}), and the source has only a part of it: run 'headwater \
         store verify TARGET --repair-from STORE' with a store that has all of it"
    ))
}

/// The space that a repair leaves free on a file system of this size.
fn reserve_bytes(total_bytes: u64) -> u64 {
    (total_bytes / RESERVE_PART).min(RESERVE_MAX_BYTES)
}

/// Reads the file of an interrupted copy. Returns the offset at which to continue.
fn resume(file: &File, len_bytes: u64, hashing: &mut ObjectHashing) -> std::io::Result<u64> {
    let copied_bytes = file.metadata()?.len();
    if copied_bytes > len_bytes {
        file.set_len(0)?;
        return Ok(0);
    }
    let mut at = 0;
    let mut buffer = vec![0; PIECE_BYTES];
    while at < copied_bytes {
        let len = usize::try_from(copied_bytes - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
        let piece = buffer.get_mut(..len).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        hashing.update(piece);
        at = at.saturating_add(u64::try_from(len).unwrap_or(u64::MAX));
    }
    Ok(copied_bytes)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};

    use headwater_testkit::{on_small_file_system, test_name};

    use super::*;
    use crate::local_dir::{Access, LocalDir};
    use crate::store::Store;

    /// An object that consists of zeroes, and counts how often it is read.
    struct Zeroes {
        id: Hash,
        len_bytes: u64,
        holes: Arc<Holes>,
        reads: AtomicU64,
    }

    impl Zeroes {
        fn new(id: Hash, len_bytes: u64) -> Self {
            Self { id, len_bytes, holes: Arc::default(), reads: AtomicU64::new(0) }
        }

        /// An object of zeroes with its right name.
        fn named(len_bytes: u64) -> Self {
            let bytes = vec![0_u8; usize::try_from(len_bytes).unwrap()];
            Self::new(Hash::of(&bytes), len_bytes)
        }

        /// The same object with this hole.
        fn without(mut self, gone: std::ops::Range<u64>) -> Self {
            let blocks: Vec<u64> = (gone.start / 4096..gone.end / 4096).collect();
            self.holes = Arc::new(Holes::of_blocks(&blocks));
            self
        }

        fn reads(&self) -> u64 {
            self.reads.load(Ordering::Relaxed)
        }
    }

    impl Object for Zeroes {
        fn id(&self) -> Hash {
            self.id
        }

        fn len_bytes(&self) -> u64 {
            self.len_bytes
        }

        fn read_range(&self, _: u64, into: &mut [u8]) -> Result<(), StoreError> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            into.fill(0);
            Ok(())
        }

        fn holes(&self) -> Result<Arc<Holes>, StoreError> {
            Ok(Arc::clone(&self.holes))
        }
    }

    fn is_empty(dir: &Path) -> bool {
        fs::read_dir(dir).unwrap().next().is_none()
    }

    fn free_bytes(dir: &Path) -> u64 {
        let space = rustix::fs::statvfs(dir).unwrap();
        space.f_bavail * space.f_frsize
    }

    #[test]
    fn a_repair_leaves_a_bounded_part_of_the_file_system_free() {
        assert_eq!(reserve_bytes(16 * MIB), MIB / 4);
        assert_eq!(reserve_bytes(64 << 30), 1 << 30);
        assert_eq!(reserve_bytes(64 << 40), 1 << 30);
    }

    #[test]
    fn a_copy_that_does_not_fit_is_not_started() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        // Longer than any disk.
        let source = Zeroes::new(Hash::of(b"large"), 1 << 60);
        let error = store.publish().unwrap().copy_object(&source, &mut |_| Ok(())).unwrap_err();
        assert_eq!((error.kind(), source.reads()), (StoreErrorKind::NoSpace, 0));
        let says = format!(": {} MiB more are to be written", 1_u64 << 40);
        assert!(error.to_string().contains(&says), "{error}");
        assert!(is_empty(&dir.path().join("tmp")) && is_empty(&dir.path().join("objects")));
    }

    #[test]
    fn a_copy_may_fill_the_disk_but_a_repair_may_not() {
        let dir = tempfile::tempdir().unwrap();
        let this = test_name(a_copy_may_fill_the_disk_but_a_repair_may_not);
        on_small_file_system(this, dir.path(), 16, in_it);
    }

    /// The child process of the test above.
    fn in_it(dir: &Path) {
        let place = dir.join("store");
        let store = LocalDir::open(&place, Access::Copy { new_chunk_bytes: 4096 }).unwrap();
        let (source, ballast) = (Zeroes::named(6 * MIB), dir.join("ballast"));
        let object = place.join("objects").join(source.id.to_string());
        let part = place.join("tmp").join(format!("{}.part", source.id));
        let copy = |copied: &mut dyn FnMut(u64) -> Result<(), StoreError>| {
            store.publish().unwrap().copy_object(&source, copied)
        };
        let fill = |left_bytes: u64| {
            let _ = fs::remove_file(&ballast);
            let len = usize::try_from(free_bytes(dir) - left_bytes).unwrap();
            fs::write(&ballast, vec![7_u8; len]).unwrap();
        };
        // If the rest does not fit now, the file of an interrupted copy stays, and counts.
        let mut told = 0;
        let interrupted = copy(&mut |bytes| {
            told += bytes;
            if told < 2 * MIB { Ok(()) } else { Err(StoreError::new(StoreErrorKind::Io, "enough")) }
        });
        assert_eq!(interrupted.unwrap_err().kind(), StoreErrorKind::Io);
        let reads = source.reads();
        fill(3 * MIB);
        assert_eq!(copy(&mut |_| Ok(())).unwrap_err().kind(), StoreErrorKind::NoSpace);
        assert_eq!((source.reads(), fs::metadata(&part).unwrap().len()), (reads, 2 * MIB));
        fill(4 * MIB + MIB / 16);
        copy(&mut |_| Ok(())).unwrap();
        assert_eq!(fs::metadata(&object).unwrap().len(), 6 * MIB);

        // A copy that replaces an existing object leaves some space free.
        fill(6 * MIB + MIB / 8);
        let reads = source.reads();
        let refused = copy(&mut |_| Ok(())).unwrap_err();
        assert_eq!((refused.kind(), source.reads()), (StoreErrorKind::NoSpace, reads));
        assert!(refused.to_string().contains("1 MiB must stay free"), "{refused}");
        fill(6 * MIB + MIB / 4 + MIB / 16);
        copy(&mut |_| Ok(())).unwrap();
        assert!(is_empty(&place.join("tmp")));

        // A hole of the source takes space if the target's object has its bytes, and none if both have the
        // hole. That also holds for the part that was copied before.
        let refused = |source: &Zeroes| {
            let refused = store.publish().unwrap().copy_object(source, &mut |_| Ok(())).unwrap_err();
            assert_eq!((refused.kind(), source.reads()), (StoreErrorKind::NoSpace, 0), "{refused}");
            refused.to_string()
        };
        fill(3 * MIB);
        let says = refused(&Zeroes::named(6 * MIB).without(MIB..5 * MIB));
        assert!(says.contains(": 6 MiB more are to be written"), "{says}");
        let other = Hash::of(b"another one");
        let part = place.join("tmp").join(format!("{other}.part"));
        File::create(&part).unwrap().set_len(3 * MIB).unwrap();
        fill(MIB);
        let says = refused(&Zeroes::new(other, 6 * MIB).without(MIB..4 * MIB));
        assert!(says.contains(": 2 MiB more are to be written"), "{says}");
        assert_eq!(fs::metadata(&part).unwrap().len(), 3 * MIB);

        // A copy that starts again because its bytes were wrong needs all of its space, because its holes
        // took none.
        fill(4 * MIB);
        let source = Zeroes::new(other, 6 * MIB);
        let refused = store.publish().unwrap().copy_object(&source, &mut |_| Ok(())).unwrap_err();
        assert!(refused.to_string().contains(": 6 MiB more are to be written"), "{refused}");
        assert_eq!((refused.kind(), source.reads()), (StoreErrorKind::NoSpace, 3));
        assert!(is_empty(&place.join("tmp")));
    }
}
