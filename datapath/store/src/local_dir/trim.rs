//! Trimming: frees the space of object parts that no version needs, by punching holes.
//!
//! ```text
//!   1 find the needed ranges of each object of a removed version, from the manifests of the remaining versions
//!   2 compute the BLAKE3 chaining values above the unneeded ranges (reads only these ranges)
//!   3 write holes/HASH, and sync it
//!   4 punch the holes in objects/HASH
//! ```
//! Steps 1 and 2 run concurrently with everything else, and end if a publication begins. A publication may
//! need any existing byte. So before step 3 of each object, trimming checks that no publication is in
//! progress or began since step 1. After step 3 no new version can need the listed ranges. After a crash
//! between steps 3 and 4 the listed ranges still have their bytes; the file `trim` makes the next writer
//! punch them.
//!
//! On a file system without holes nothing is trimmed. There, new versions store chunks again if the existing
//! copies are in mostly unused objects.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::holes::{HOLE_BYTES_MIN, Holes, Needed, Plan, plan_holes};
use crate::local_dir::files::{is_durable, read_small, remove, replace_file, step, sync_dir};
use crate::local_dir::object::read_holes;
use crate::local_dir::{Inner, State};
use crate::needs::Needs;

/// The largest file `trim`: the objects of a million versions.
const NOTE_MAX_BYTES: u64 = 65 << 20;
/// The most bytes of objects that are examined at a time. Each of their blocks needs one bit of memory.
const AT_ONCE_BYTES: u64 = 2 << 40;
/// A longer object is not trimmed, because a bit for each of its blocks would take more than 256 MiB.
const OBJECT_MAX_BYTES: u64 = 8 << 40;
/// A failed trim is tried again after this time, or after the next removal.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// The objects to be trimmed.
#[derive(Debug, Default)]
pub(super) struct Trim {
    objects: BTreeSet<Hash>,
    /// Whether an earlier process may have been interrupted while it trimmed some of them.
    is_taken_up: bool,
    /// Whether there is a reason to try.
    is_due: bool,
    failed_at: Option<Instant>,
}

impl Trim {
    fn is_due(&self) -> bool {
        self.is_due || self.failed_at.is_some_and(|at| at.elapsed() >= AGAIN_AFTER)
    }
}

/// The outcome for one object.
enum Trimmed {
    Freed(u64),
    /// A publication began, which may take hours. After it the needed ranges must be determined again.
    Overtaken,
}

impl Inner {
    /// Records that less of these objects is needed from now on. The record survives this process.
    pub(super) fn want_trim(&self, state: &mut State, objects: BTreeSet<Hash>) {
        if objects.is_empty() {
            return;
        }
        state.trim.is_due = true;
        state.trim.objects.extend(objects);
        self.note_trim(&state.trim.objects);
    }

    /// Without the record, a crash costs only space.
    fn note_trim(&self, objects: &BTreeSet<Hash>) {
        let path = self.layout.trim();
        let noted = if objects.is_empty() {
            match remove(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    Err(StoreError::from_os(format!("cannot remove {}", path.display()), e))
                }
                _ => Ok(()),
            }
        } else {
            let text: String = objects.iter().map(|id| format!("{id}\n")).collect();
            replace_file(&self.temporary("trim"), &path, text.as_bytes())
        };
        if let Err(e) = noted {
            tracing::warn!(error = %e, "cannot record which objects to trim: if this process ends, the space of removed versions is not freed");
        }
    }

    /// Reads the record of another process. If there is none, nothing is to be trimmed.
    pub(super) fn take_up_trim(&self) {
        let Ok(bytes) = read_small(&self.layout.trim(), NOTE_MAX_BYTES) else { return };
        let objects = std::str::from_utf8(&bytes).unwrap_or_default().lines();
        let objects: BTreeSet<Hash> = objects.filter_map(|line| line.parse().ok()).collect();
        let is_due = !objects.is_empty();
        self.state.lock().trim = Trim { objects, is_taken_up: true, is_due, failed_at: None };
    }

    pub(super) fn trim(&self, needs: &dyn Needs) -> Result<u64, StoreError> {
        let Some(file) = &self.writer_lock else { return Ok(0) };
        // The thread that is trimming handles later removals afterwards.
        let Some(_alone) = self.trimming.try_lock() else { return Ok(0) };
        let (objects, changes, is_taken_up) = {
            let mut state = self.state.lock();
            // The needs of a pinned version are unknown if the version is no longer listed.
            if !state.trim.is_due() || state.publications > 0 || state.sweep_wanted {
                return Ok(0);
            }
            (state.trim.is_due, state.trim.failed_at) = (false, None);
            (state.trim.objects.clone(), state.changes, state.trim.is_taken_up)
        };
        let outcome = can_have_holes(file, &self.layout.lock()).and_then(|can| {
            if can { self.trim_all(&objects, needs, changes, is_taken_up) } else { Ok((0, BTreeSet::new())) }
        });
        let mut state = self.state.lock();
        let (freed_bytes, left) = match outcome {
            Ok((freed_bytes, left)) => (freed_bytes, left),
            Err(e) => {
                // The lists of some objects may have holes that are not punched yet.
                (state.trim.is_taken_up, state.trim.failed_at) = (true, Some(Instant::now()));
                return Err(e);
            }
        };
        if state.changes == changes {
            state.trim.objects.retain(|id| left.contains(id) || !objects.contains(id));
        } else {
            // A publication or a removal happened, so the needed ranges must be determined again.
            state.trim.is_due = true;
        }
        state.trim.is_taken_up = !left.is_empty();
        if !left.is_empty() {
            state.trim.failed_at = Some(Instant::now());
        }
        self.note_trim(&state.trim.objects);
        Ok(freed_bytes)
    }

    /// Trims these objects. Returns the bytes freed, and the objects that must be tried again.
    fn trim_all(
        &self,
        objects: &BTreeSet<Hash>,
        needs: &dyn Needs,
        changes: u64,
        again: bool,
    ) -> Result<(u64, BTreeSet<Hash>), StoreError> {
        let (mut freed_bytes, mut left) = (0_u64, BTreeSet::new());
        // A process that died may have created the folder of the lists, and the settings, without making them
        // durable.
        sync_dir(&self.layout.root)?;
        for some in self.in_portions(objects) {
            for (id, needed) in self.needed_of(&some, needs, &mut left)? {
                match self.trim_object(id, &needed, changes, again) {
                    Ok(Trimmed::Freed(freed)) => freed_bytes = freed_bytes.saturating_add(freed),
                    Ok(Trimmed::Overtaken) => {
                        left.extend(objects);
                        return Ok((freed_bytes, left));
                    }
                    // A failed object must not block the others.
                    Err(e) => {
                        tracing::warn!(error = %e, "the unneeded parts of a data object are not freed now, but later");
                        left.insert(id);
                    }
                }
            }
        }
        Ok((freed_bytes, left))
    }

    /// The objects that exist, in portions that fit into memory.
    fn in_portions(&self, objects: &BTreeSet<Hash>) -> Vec<HashMap<Hash, u64>> {
        let (mut portions, mut room) = (vec![HashMap::new()], AT_ONCE_BYTES);
        for id in objects {
            // An object that is lost, or was removed with its last version, has no space to free.
            let Ok(object) = self.layout.object(*id).metadata() else { continue };
            if object.len() > OBJECT_MAX_BYTES {
                tracing::warn!(%id, bytes = object.len(), "the unneeded parts of a data object are not freed, because the object is too long");
                continue;
            }
            if object.len() > room {
                portions.push(HashMap::new());
                room = AT_ONCE_BYTES;
            }
            room = room.saturating_sub(object.len());
            if let Some(portion) = portions.last_mut() {
                portion.insert(*id, object.len());
            }
        }
        portions
    }

    /// The ranges of these objects that existing versions need. Objects for which they are unknown are left
    /// out.
    fn needed_of(
        &self,
        objects: &HashMap<Hash, u64>,
        needs: &dyn Needs,
        left: &mut BTreeSet<Hash>,
    ) -> Result<HashMap<Hash, Needed>, StoreError> {
        let images = self.images()?;
        let mut manifests: HashMap<Hash, Vec<Hash>> = HashMap::new();
        let mut needed: HashMap<Hash, Needed> = HashMap::new();
        for version in images.iter().flat_map(|image| &image.versions) {
            for id in &version.objects {
                if let Some(len_bytes) = objects.get(id) {
                    needed.entry(*id).or_insert_with(|| Needed::of(*len_bytes));
                    manifests.entry(version.manifest).or_default().push(*id);
                }
            }
        }
        for (manifest, of) in manifests {
            let told = self.manifest(manifest).and_then(|bytes| {
                needs.stretches(&bytes, &mut |id, stretch| {
                    if let Some(needed) = needed.get_mut(&id) {
                        needed.mark(&stretch);
                    }
                })
            });
            if let Err(e) = told {
                tracing::warn!(error = %e, "the manifest of a version cannot be read, so the unneeded parts of its data objects are not freed");
                for id in of {
                    needed.remove(&id);
                    left.insert(id);
                }
            }
        }
        Ok(needed)
    }

    fn trim_object(
        &self,
        id: Hash,
        needed: &Needed,
        changes: u64,
        again: bool,
    ) -> Result<Trimmed, StoreError> {
        let path = self.layout.object(id);
        let failed =
            |e| StoreError::from_read(format!("cannot free unneeded parts of {}", path.display()), e);
        let file = match File::options().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Trimmed::Freed(0)),
            Err(e) => return Err(failed(e)),
        };
        let len_bytes = file.metadata().map_err(failed)?.len();
        let before = read_holes(&self.layout.holes_of(id), len_bytes)?;
        let is_overtaken = Cell::new(false);
        let mut read = |offset: u64, into: &mut [u8]| {
            is_overtaken.set(self.is_overtaken(&self.state.lock(), changes));
            if is_overtaken.get() {
                return Err(StoreError::new(StoreErrorKind::InUse, "a version is being published"));
            }
            file.read_exact_at(into, offset).map_err(failed)
        };
        let planned = plan_holes(needed, &before, &mut read);
        if is_overtaken.get() {
            return Ok(Trimmed::Overtaken);
        }
        let Plan { holes, free } = planned?;
        let is_more = holes != before;
        if !is_more && (!again || free.is_empty()) {
            return Ok(Trimmed::Freed(0));
        }
        // Held until the holes are recorded durably. If no publication has begun since, file and list belong
        // together. A later publication puts another file in place.
        let state = self.state.lock();
        if self.is_overtaken(&state, changes) {
            return Ok(Trimmed::Overtaken);
        }
        if is_more {
            self.allow_holes()?;
            self.put_holes(id, &holes, len_bytes)?;
        } else {
            // The process that wrote the list may have died before it was durable.
            sync_dir(&self.layout.holes())?;
        }
        drop(state);
        punch(&file, &path, if is_more { &holes } else { &free }).map_err(failed)?;
        Ok(Trimmed::Freed(holes.bytes().saturating_sub(before.bytes())))
    }

    fn is_overtaken(&self, state: &State, changes: u64) -> bool {
        state.publications > 0 || state.changes != changes
    }

    /// Changes the format version, so that releases that do not know holes refuse the store from now on.
    pub(super) fn allow_holes(&self) -> Result<(), StoreError> {
        self.layout.allow_holes(&self.temporary("settings"), self.chunk_bytes)
    }

    /// Writes the holes of an object durably or, if there are none, removes the list.
    pub(super) fn put_holes(&self, id: Hash, holes: &Holes, len_bytes: u64) -> Result<(), StoreError> {
        let path = self.layout.holes_of(id);
        let failed = |e| StoreError::from_os(format!("cannot write {}", path.display()), e);
        if !holes.is_empty() {
            self.make_folder(&self.layout.holes()).map_err(failed)?;
            return replace_file(&self.temporary("holes"), &path, &holes.encode(len_bytes));
        }
        match remove(&path) {
            Ok(()) => sync_dir(&self.layout.holes()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(failed(e)),
        }
    }
}

/// Frees the space of holes.
fn punch(file: &File, path: &Path, holes: &Holes) -> std::io::Result<()> {
    for hole in holes.stretches() {
        step()?;
        rustix::io::retry_on_intr(|| {
            fallocate(file, PUNCH, hole.start, hole.end.saturating_sub(hole.start))
        })?;
    }
    // The punch is not synced, but may become durable at any time.
    is_durable(path);
    Ok(())
}

/// Whether the file system of a file supports holes. Tries to punch a hole beyond the end of the file, which
/// changes nothing.
fn can_have_holes(file: &File, path: &Path) -> Result<bool, StoreError> {
    let failed = |e| {
        StoreError::from_os(
            format!("cannot test whether the file system of {} supports holes", path.display()),
            e,
        )
    };
    let len_bytes = file.metadata().map_err(failed)?.len();
    match fallocate(file, PUNCH, len_bytes.next_multiple_of(HOLE_BYTES_MIN), HOLE_BYTES_MIN) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(e) => Err(failed(e.into())),
    }
}
