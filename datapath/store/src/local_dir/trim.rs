//! Trimming: space of what no version needs of objects that others need in part.
//!
//! ```text
//!   1 which versions are left that name an object of a removed one? what of it do their manifests need?
//!   2 the nodes of its hash above the rest                      reads only what will be gone
//!   3 holes/HASH, synced                                        4 holes in objects/HASH
//! ```
//! Steps 1 and 2 run beside everything else, and end where somebody begins to publish. Before 3, and for each object, it is made sure that nobody
//! publishes, or began to since 1: what is published may need anything that is there. After 3 nobody can come to need what is in the list. A crash
//! there leaves a list of holes in which there still are the bytes: the note `trim` has them punched by the next writer.
//!
//! A file system without holes leaves all as it is: then new versions carry chunks out of objects that are mostly out of use.

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

/// The longest note: the objects of a million versions.
const NOTE_MAX_BYTES: u64 = 65 << 20;
/// What is looked at is in memory with a bit for each block: of so many bytes of objects at a time.
const AT_ONCE_BYTES: u64 = 2 << 40;
/// An object that is longer stays as it is: a bit for each of its blocks would take more than 256 MiB.
const OBJECT_MAX_BYTES: u64 = 8 << 40;
/// What failed is tried again after this, if nothing is removed before.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// What is to be trimmed.
#[derive(Debug, Default)]
pub(super) struct Trim {
    objects: BTreeSet<Hash>,
    /// Whether some of it may have been ended in the middle.
    is_taken_up: bool,
    /// Whether there is reason to try.
    is_due: bool,
    failed_at: Option<Instant>,
}

impl Trim {
    fn is_due(&self) -> bool {
        self.is_due || self.failed_at.is_some_and(|at| at.elapsed() >= AGAIN_AFTER)
    }
}

/// What came of an object.
enum Trimmed {
    Freed(u64),
    /// Somebody publishes. That may take hours, and what is needed by then is found out anew.
    Overtaken,
}

impl Inner {
    /// Notes objects of which less is needed from now on, also for the next writer.
    pub(super) fn want_trim(&self, state: &mut State, objects: BTreeSet<Hash>) {
        if objects.is_empty() {
            return;
        }
        state.trim.is_due = true;
        state.trim.objects.extend(objects);
        self.note_trim(&state.trim.objects);
    }

    /// Without the note only a crash is a loss, of space.
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
            tracing::warn!(error = %e, "space of removed versions is given back only while this process runs");
        }
    }

    /// Goes on where another process was, or takes note of nothing.
    pub(super) fn take_up_trim(&self) {
        let Ok(bytes) = read_small(&self.layout.trim(), NOTE_MAX_BYTES) else { return };
        let objects = std::str::from_utf8(&bytes).unwrap_or_default().lines();
        let objects: BTreeSet<Hash> = objects.filter_map(|line| line.parse().ok()).collect();
        let is_due = !objects.is_empty();
        self.state.lock().trim = Trim { objects, is_taken_up: true, is_due, failed_at: None };
    }

    pub(super) fn trim(&self, needs: &dyn Needs) -> Result<u64, StoreError> {
        let Some(file) = &self.writer_lock else { return Ok(0) };
        // Whoever is at it goes on with what was removed since, later.
        let Some(_alone) = self.trimming.try_lock() else { return Ok(0) };
        let (objects, changes, is_taken_up) = {
            let mut state = self.state.lock();
            // Whoever is pinned and in no list any more needs what nobody knows.
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
                // Some may have holes in their lists by now that are none yet.
                (state.trim.is_taken_up, state.trim.failed_at) = (true, Some(Instant::now()));
                return Err(e);
            }
        };
        if state.changes == changes {
            state.trim.objects.retain(|id| left.contains(id) || !objects.contains(id));
        } else {
            // Somebody publishes, or removed something: what is needed is found out anew.
            state.trim.is_due = true;
        }
        state.trim.is_taken_up = !left.is_empty();
        if !left.is_empty() {
            state.trim.failed_at = Some(Instant::now());
        }
        self.note_trim(&state.trim.objects);
        Ok(freed_bytes)
    }

    /// Trims these objects. Returns the bytes freed, and which objects have to be tried again.
    fn trim_all(
        &self,
        objects: &BTreeSet<Hash>,
        needs: &dyn Needs,
        changes: u64,
        again: bool,
    ) -> Result<(u64, BTreeSet<Hash>), StoreError> {
        let (mut freed_bytes, mut left) = (0_u64, BTreeSet::new());
        // The folder of the lists, and the settings, may have been made by who died before that was durable.
        sync_dir(&self.layout.root)?;
        for some in self.in_portions(objects) {
            for (id, needed) in self.needed_of(&some, needs, &mut left)? {
                match self.trim_object(id, &needed, changes, again) {
                    Ok(Trimmed::Freed(freed)) => freed_bytes = freed_bytes.saturating_add(freed),
                    Ok(Trimmed::Overtaken) => {
                        left.extend(objects);
                        return Ok((freed_bytes, left));
                    }
                    // One must not stand in the way of the others.
                    Err(e) => {
                        tracing::warn!(error = %e, "space of a data object is not given back now; it will be later");
                        left.insert(id);
                    }
                }
            }
        }
        Ok((freed_bytes, left))
    }

    /// Those of the objects that are there, as many at a time as there is room for.
    fn in_portions(&self, objects: &BTreeSet<Hash>) -> Vec<HashMap<Hash, u64>> {
        let (mut portions, mut room) = (vec![HashMap::new()], AT_ONCE_BYTES);
        for id in objects {
            // One that is lost, or went with its last version, has nothing to give.
            let Ok(object) = self.layout.object(*id).metadata() else { continue };
            if object.len() > OBJECT_MAX_BYTES {
                tracing::warn!(%id, bytes = object.len(), "space of a data object is not given back: it is too long");
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

    /// What the versions that are there need of these objects. One of which that is not known is left.
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
                tracing::warn!(error = %e, "what a version needs is not known, so no space of its data objects is given back");
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
        let failed = |e| StoreError::from_read(format!("cannot give back space of {}", path.display()), e);
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
                return Err(StoreError::new(StoreErrorKind::InUse, "somebody publishes"));
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
        // Held until it is durable what goes. Where nobody published since, file and list belong together; who does so from here on puts
        // another file in place.
        let state = self.state.lock();
        if self.is_overtaken(&state, changes) {
            return Ok(Trimmed::Overtaken);
        }
        if is_more {
            self.allow_holes()?;
            self.put_holes(id, &holes, len_bytes)?;
        } else {
            // Who wrote the list may have died before that was.
            sync_dir(&self.layout.holes())?;
        }
        drop(state);
        punch(&file, &path, if is_more { &holes } else { &free }).map_err(failed)?;
        Ok(Trimmed::Freed(holes.bytes().saturating_sub(before.bytes())))
    }

    fn is_overtaken(&self, state: &State, changes: u64) -> bool {
        state.publications > 0 || state.changes != changes
    }

    /// Has releases that know nothing of holes refuse the store from now on.
    pub(super) fn allow_holes(&self) -> Result<(), StoreError> {
        self.layout.allow_holes(&self.temporary("settings"), self.chunk_bytes)
    }

    /// Writes what of an object is gone, durably; where nothing is, removes what says otherwise.
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

/// Frees what is in holes.
fn punch(file: &File, path: &Path, holes: &Holes) -> std::io::Result<()> {
    for hole in holes.stretches() {
        step()?;
        rustix::io::retry_on_intr(|| {
            fallocate(file, PUNCH, hole.start, hole.end.saturating_sub(hole.start))
        })?;
    }
    // It is not synced, and may be durable all the same.
    is_durable(path);
    Ok(())
}

/// Whether the file system of a file knows holes: one is asked for that ends nothing, behind the end of the file.
fn can_have_holes(file: &File, path: &Path) -> Result<bool, StoreError> {
    let failed = |e| StoreError::from_os(format!("cannot make holes as in {}", path.display()), e);
    let len_bytes = file.metadata().map_err(failed)?.len();
    match fallocate(file, PUNCH, len_bytes.next_multiple_of(HOLE_BYTES_MIN), HOLE_BYTES_MIN) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(e) => Err(failed(e.into())),
    }
}
