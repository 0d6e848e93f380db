//! Imports any device as a version in the store.
//!
//! ```text
//!   planner --ranges with data, in order--> workers: read, zero? hash, known? compress --+
//!      ^                                                                                 v
//!      +-- a free `Work` is needed to start, which bounds memory --------- writer: in order, to the store
//! ```
//! The workers finish in any order. But for one source and store the data object and the manifest are always
//! the same, whatever the number of workers, because the writer puts each distinct chunk at the position of
//! its first use in the image. So importing the same bytes into the same store again gives the same hash.
//!
//! A [`Basis`] is a known version together with the source's differences to it. With a basis only chunks with
//! a difference are read, and all others are taken from its manifest. So the cost of a seal depends on the
//! size of the changes, plus at most 1 GiB of compaction ([`compaction`]), and not on the size of the disk.
//!
//! A chunk that the store already has is read back before a version refers to it, and stored again if it is
//! damaged ([`known`]). Chunks that are taken from a [`Basis`] are not read back: they are as good as in the
//! parent version. Chunks in mostly unused data objects are stored again, too ([`compaction`]).
//!
//! Nothing is visible before the last step. An error, a cancellation or a crash before it leaves the store as
//! it was (see [`headwater_store::Publication`]).

mod compaction;
mod input;
mod known;
mod plan;
mod worker;
mod writer;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use headwater_block::{ByteRange, Device, VOLUME_MAX_BYTES};
use headwater_store::{
    Committed, Hash, ImageName, NewVersion, Publication, Store, StoreError, StoreErrorKind, Version,
};
use parking_lot::Mutex;

use crate::error::{ImageError, ImageErrorKind};
use crate::import::compaction::Compaction;
use crate::import::known::KnownChunks;
use crate::import::plan::Planner;
use crate::import::worker::{Claims, Shared, Work};
use crate::import::writer::{Feed, Parent, Writer, Written};
use crate::index::ChunkIndex;
use crate::inspection::{Inspection, check_sector_bytes};
use crate::manifest::{Manifest, ManifestBuilder, ObjectRef};
use crate::progress::{Cancel, Progress};
use crate::units::{u64_of, usize_of, usize_of_u32};

/// The default zstd level of imports.
pub const LEVEL_DEFAULT: i32 = 3;
/// The most worker threads of an import.
pub const IMPORT_THREADS_MAX: usize = 64;
/// How many bytes of the image a worker takes at a time, unless a chunk is larger.
const WORK_BYTES: u32 = 1 << 20;
/// The number of `Work`s for each worker: one is processed, the others are in transit to the writer or wait
/// for their turn. An import needs at most `2 * WORK_BYTES * WORKS_PER_THREAD` bytes for each thread, and a
/// page for each `Work`.
const WORKS_PER_THREAD: usize = 4;

/// The differences in a range: from its start, the lengths of runs and whether each run differs. The list has
/// at most as many runs as the second argument says, and may end early.
pub type Changes = Arc<dyn Fn(ByteRange, usize) -> Vec<(u64, bool)> + Send + Sync>;

/// The version from which a source was made. It becomes the parent of the new version.
#[derive(Clone)]
pub struct Basis {
    /// The hash of its manifest. The manifest must not be removed during the import.
    pub parent: Hash,
    /// The source's differences to it. They may include too much, but never too little.
    pub changes: Changes,
}

impl std::fmt::Debug for Basis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Basis").field("parent", &self.parent).finish_non_exhaustive()
    }
}

/// The parameters of an import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// The image that gets a new version.
    pub name: ImageName,
    /// Now, in seconds since 1970.
    pub created_at_s: u64,
    /// The origin, such as a path or URI.
    pub source: String,
    /// A note for people.
    pub note: String,
    /// The user who imports it.
    pub author: String,
    /// Size of the disk's sectors, 512 or 4,096; `None`: as the disk or its source specifies.
    pub sector_bytes: Option<u32>,
    /// Whether to make no version if the newest one already has the same bytes.
    pub unless_newest: bool,
    /// The highest version number that the image may have when this version is added, not counting retired
    /// versions.
    pub newest_at_most: Option<u32>,
    /// Whether the source is a machine's disk; see [`NewVersion::is_sealed`].
    pub is_sealed: bool,
    /// Whether the version may contain the identity of one machine; see [`NewVersion::keeps_identity`].
    pub keeps_identity: bool,
    /// zstd level.
    pub level: i32,
    /// Worker threads; `None` for one on each core.
    pub threads: Option<usize>,
    /// The version from which the source was made, if it is known. If the source does not differ from it, the
    /// import fails.
    pub basis: Option<Basis>,
    /// A switch that stops the import.
    pub cancel: Cancel,
}

impl ImportOptions {
    /// Default options.
    pub fn new(name: ImageName, created_at_s: u64) -> Self {
        Self {
            name,
            created_at_s,
            source: String::new(),
            note: String::new(),
            author: String::new(),
            sector_bytes: None,
            unless_newest: false,
            newest_at_most: None,
            is_sealed: false,
            keeps_identity: false,
            level: LEVEL_DEFAULT,
            threads: None,
            basis: None,
            cancel: Cancel::new(),
        }
    }
}

/// The result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The new version, or with [`ImportOptions::unless_newest`] the existing one.
    pub version: Version,
    /// Whether this import made it.
    pub is_new: bool,
    /// The version to which this import set `production`. `None` if it was already set, or stays unset.
    pub production: Option<u32>,
    /// Bytes of the image that are not zero, in whole chunks.
    pub data_bytes: u64,
    /// How many of these bytes are not stored again, because the store had them or the image has them several
    /// times.
    pub shared_bytes: u64,
    /// Bytes that were read from the source; with a basis, only of the differences.
    pub read_bytes: u64,
    /// Chunks that are damaged in the store: older versions refer to them, this version does not.
    pub damaged_chunks: u64,
    /// The result of the disk's inspection; `None` with a basis, whose version already has this information.
    pub inspection: Option<Inspection>,
}

/// Imports `source` as a new version. `progress` is called on this thread, about once per MiB, and several
/// times a second while the source does not answer. If the data object is sent to the store only after the
/// source was read, its bytes are then counted as well, and `progress` is called after every few parts.
///
/// A cancelled import may leave reads of the source unanswered. If the source hangs in [`Device::extents`],
/// the import cannot end before it answers, so a caller that cancels should also disconnect such a source.
pub fn import(
    source: Arc<dyn Device>,
    store: &dyn Store,
    options: &ImportOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Imported, ImageError> {
    check_size(source.geometry().size_bytes)?;
    check_sector_bytes(options.sector_bytes, source.geometry().size_bytes)?;
    check_text("note", &options.note, headwater_store::NOTE_MAX_BYTES)?;
    check_text("source", &options.source, headwater_store::NOTE_MAX_BYTES)?;
    check_text("author", &options.author, headwater_store::AUTHOR_MAX_BYTES)?;
    let mut attempt = Attempt::default();
    match import_once(&source, store, options, progress, (true, &mut attempt)) {
        // A full store, or damage that the new version would only inherit, must not prevent the version.
        Err(e) if attempt.may_retry_without_compaction(&e, options) => {
            tracing::warn!(image = %options.name, error = %e,
                "chunks of mostly unused data objects could not be stored again: importing without compaction");
            import_once(&source, store, options, progress, (false, &mut attempt))
        }
        done => done,
    }
}

/// How far an import got.
#[derive(Default)]
struct Attempt {
    /// Whether any chunk of a mostly unused data object was stored again.
    has_compacted: bool,
    /// Whether the version may exist in spite of an error. A repetition could make it twice.
    is_committing: bool,
}

impl Attempt {
    fn may_retry_without_compaction(&self, error: &ImageError, options: &ImportOptions) -> bool {
        let may = match error.kind() {
            // Nothing was committed in this case.
            ImageErrorKind::NoSpace => true,
            // Without a basis all of the source is read anyway.
            ImageErrorKind::Damaged | ImageErrorKind::Io => options.basis.is_some() && !self.is_committing,
            _ => false,
        };
        self.has_compacted && may
    }
}

/// One attempt. With `compacts`, it stores chunks of mostly unused data objects again.
fn import_once(
    source: &Arc<dyn Device>,
    store: &dyn Store,
    options: &ImportOptions,
    progress: &mut dyn FnMut(Progress),
    (compacts, attempt): (bool, &mut Attempt),
) -> Result<Imported, ImageError> {
    let size_bytes = source.geometry().size_bytes;
    let chunk_bytes = store.chunk_bytes();
    // Before the index is built: from now on nothing that the index lists is reclaimed.
    let mut publication = store.publish()?;
    let mut index = ChunkIndex::build(store, &mut |_| {
        // The progress callback may cancel here.
        progress(Progress { done_bytes: 0, total_bytes: size_bytes });
        options.cancel.check("the import")
    })?;
    if compacts {
        index.avoid_sparse();
    }
    let parent = options.basis.as_ref().map(|basis| parent_of(store, basis, size_bytes)).transpose()?;

    let compaction = parent.as_ref().map(|manifest| Arc::new(Compaction::of(manifest, &index)));
    let changes = options.basis.as_ref().zip(compaction.as_ref());
    let changes =
        changes.map(|(basis, compaction)| Arc::clone(compaction).add_to(Arc::clone(&basis.changes)));

    let own_object = u32::try_from(index.objects().len()).unwrap_or(u32::MAX);
    let builder = ManifestBuilder::new(size_bytes, chunk_bytes, options.basis.as_ref().map(|b| b.parent));
    let known = KnownChunks::new(store, &index);
    let below = parent.as_ref().map(|manifest| Parent::new(manifest, &index, &known));
    let mut writer = Writer::new(publication.as_mut(), (builder, below), chunk_bytes, own_object);
    let mut done = |done_bytes| progress(Progress { done_bytes, total_bytes: size_bytes });
    let worked = work((Arc::clone(source), changes), &known, options, &mut writer, &mut done);
    let compacted_bytes = compaction.map_or(0, |compaction| compaction.compacted_bytes());
    attempt.has_compacted = known.compacted() > 0 || compacted_bytes > 0;
    worked?;
    let Written { mut builder, chunks: written, object_bytes, read_bytes } = writer.finish()?;
    let inspection = inspect(source, (parent.as_ref(), options.sector_bytes), &mut builder)?;
    let read_bytes = read_bytes.saturating_sub(compacted_bytes);
    let data_bytes = builder.data_chunks() * u64::from(chunk_bytes);

    let mut at = Progress { done_bytes: size_bytes, total_bytes: size_bytes };
    let newest = options.unless_newest.then(|| same_newest(store, options, &builder, (&index, &known)));
    let (manifest, new_bytes) = match newest.transpose()?.flatten() {
        // The newest version is as good; chunks that were stored again are not needed.
        Some(newest) if written == 0 => (newest, 0),
        Some(newest) => {
            let begun = std::mem::replace(&mut publication, store.publish()?);
            // The new publication protects only from reclaims since its beginning.
            begun.confirm()?;
            (newest, 0)
        }
        None => {
            let mut objects = index.objects().to_vec();
            let own = finish_object(publication.as_mut(), object_bytes, options, &mut at, progress)?;
            objects.extend(own);
            (builder.finish(&objects)?, written * u64::from(chunk_bytes))
        }
    };
    if let Some(parent) = &parent {
        check_differs(&manifest, parent)?;
    }
    let needed: Vec<_> = manifest.objects().iter().map(|object| object.id).collect();
    options.cancel.check("the import")?;
    attempt.is_committing = true;
    let Committed { version, is_new, production } = publication.commit(NewVersion {
        name: &options.name,
        manifest: &manifest.encode(),
        objects: &needed,
        size_bytes,
        created_at_s: options.created_at_s,
        source: &options.source,
        note: &options.note,
        author: &options.author,
        unless_newest: options.unless_newest,
        newest_at_most: options.newest_at_most,
        is_sealed: options.is_sealed,
        keeps_identity: options.keeps_identity,
    })?;
    progress(at);
    if is_new && attempt.has_compacted {
        tracing::info!(image = %options.name, version = version.number, chunks = known.compacted(),
            "chunks of mostly unused data objects were stored again, so that these objects can be removed with older versions");
    }
    let damaged_chunks = known.damaged();
    warn_of_damage(store, options, &version, damaged_chunks);
    Ok(Imported {
        version,
        is_new,
        production,
        data_bytes,
        shared_bytes: data_bytes.saturating_sub(new_bytes),
        read_bytes,
        damaged_chunks,
        inspection,
    })
}

/// Inspects a disk after it was read: before that the source may hang, and the inspection could not be
/// cancelled. A version with a basis inherits the result of that version.
fn inspect(
    source: &Arc<dyn Device>,
    (parent, told): (Option<&Manifest>, Option<u32>),
    builder: &mut ManifestBuilder,
) -> Result<Option<Inspection>, ImageError> {
    if let Some(parent) = parent {
        builder.set_disk_properties(parent.sector_bytes(), parent.is_uefi_only());
        return Ok(None);
    }
    let found = Inspection::of(source, told)?;
    builder.set_disk_properties(found.sector_bytes, found.boot.is_uefi_only());
    Ok(Some(found))
}

/// Finishes the data object. If it is sent only now, its bytes are counted after those of the image, because
/// the import is not finished before.
fn finish_object(
    publication: &mut dyn Publication,
    object_bytes: u64,
    options: &ImportOptions,
    at: &mut Progress,
    progress: &mut dyn FnMut(Progress),
) -> Result<Option<ObjectRef>, ImageError> {
    let total_bytes = at.total_bytes.saturating_add(object_bytes);
    let finished = publication.finish_object_telling(&mut |sent_bytes| {
        *at = Progress { done_bytes: at.done_bytes.saturating_add(sent_bytes), total_bytes };
        progress(*at);
        if options.cancel.is_cancelled() {
            return Err(StoreError::new(StoreErrorKind::Io, "the import was cancelled"));
        }
        Ok(())
    });
    if finished.is_err() {
        // A cancellation is not a failure of the store.
        options.cancel.check("the import")?;
    }
    Ok(finished?.map(|(id, len_bytes)| ObjectRef { id, len_bytes }))
}

fn warn_of_damage(store: &dyn Store, options: &ImportOptions, version: &Version, damaged_chunks: u64) {
    if damaged_chunks > 0 {
        tracing::warn!(image = %options.name, version = version.number, damaged_chunks,
            "chunks in the store are damaged: this version uses other copies of them, but older versions, of other images too, may \
             need them: 'headwater store verify {}' lists these versions", store.shown());
    }
}

/// The manifest of the newest version of an image, if it has the same bytes, wherever they are stored, and
/// they are undamaged.
fn same_newest(
    store: &dyn Store,
    options: &ImportOptions,
    builder: &ManifestBuilder,
    (index, known): (&ChunkIndex, &KnownChunks<'_>),
) -> Result<Option<Manifest>, ImageError> {
    let image = store.image(&options.name)?;
    let Some(newest) = image.as_ref().and_then(|image| image.newest()) else { return Ok(None) };
    let read = store.manifest(newest.manifest).map_err(ImageError::from);
    let manifest = match read.and_then(|bytes| Manifest::decode(&bytes)) {
        Ok(manifest) => manifest,
        // A manifest that cannot be read does not prevent a new version.
        Err(e) if e.kind().is_damage() || e.kind() == ImageErrorKind::Unsupported => return Ok(None),
        Err(e) => return Err(e),
    };
    if !builder.has_bytes_of(&manifest) {
        return Ok(None);
    }
    let mut looked_at = HashSet::new();
    for (ours, theirs) in builder.chunks().iter().zip(manifest.data().map(|(_, chunk)| chunk)) {
        options.cancel.check("the import")?;
        let place = index.place_in(&manifest, theirs);
        // The chunks to which the new version would refer were checked.
        if place == Some(*ours) || place.is_some_and(|place| !looked_at.insert((place.object, place.offset)))
        {
            continue;
        }
        if !place.is_some_and(|place| known.is_intact_or_remote(&place)) {
            known.found_damage();
            return Ok(None);
        }
    }
    Ok(Some(manifest))
}

/// Runs the workers, and the writer on this thread, until the whole source is processed.
fn work(
    (source, changes): (Arc<dyn Device>, Option<Changes>),
    known: &KnownChunks<'_>,
    options: &ImportOptions,
    writer: &mut Writer<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<(), ImageError> {
    let chunk_bytes = writer.chunk_bytes();
    let threads = thread_count(options);
    let work_bytes = usize_of_u32(WORK_BYTES.max(chunk_bytes));
    let (free_tx, free_rx) = free_works(threads * WORKS_PER_THREAD, work_bytes);
    let (done_tx, done_rx) = mpsc::channel();
    let planner = Planner::new(Arc::clone(&source), changes, chunk_bytes, u64_of(work_bytes));
    let shared = Shared {
        planner: Mutex::new(planner),
        source,
        chunk_bytes: usize_of_u32(chunk_bytes),
        level: options.level,
        known,
        claims: Claims::default(),
        free: Mutex::new(free_rx),
        is_over: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        for number in 0..threads {
            let (shared, done) = (&shared, done_tx.clone());
            std::thread::Builder::new()
                .name(format!("import-{number}"))
                .spawn_scoped(scope, move || shared.run(&done))
                .map_err(|e| ImageError::from_os("cannot start a thread for the import", &e))?;
        }
        drop(done_tx);
        // On return both channels close, which ends the workers wherever they are.
        let (free, done) = (free_tx, done_rx);
        let mut feed = Feed { done: &done, cancel: &options.cancel, progress, done_bytes: 0 };
        let written = writer.run(&mut feed, &free);
        // A read of the source may wait for as long as its disk is away.
        shared.is_over.store(true, Ordering::Release);
        written
    })
}

/// The manifest of the version from which the source was made.
fn parent_of(store: &dyn Store, basis: &Basis, size_bytes: u64) -> Result<Manifest, ImageError> {
    let manifest = Manifest::decode(&store.manifest(basis.parent)?)?;
    let fits = manifest.size_bytes() == size_bytes && manifest.chunk_bytes() == store.chunk_bytes();
    if fits {
        return Ok(manifest);
    }
    let (was, chunks) = (manifest.size_bytes(), manifest.chunk_bytes());
    let why = format!(
        "a version of a disk of {size_bytes} bytes cannot be based on a version of {was} bytes in chunks of {chunks}: both must be equal"
    );
    Err(ImageError::new(ImageErrorKind::Invalid, why))
}

fn check_differs(manifest: &Manifest, parent: &Manifest) -> Result<(), ImageError> {
    if !manifest.has_bytes_of(parent) {
        return Ok(());
    }
    let why = "nothing differs between the disk and the version from which it was made";
    Err(ImageError::new(ImageErrorKind::Unchanged, why))
}

fn thread_count(options: &ImportOptions) -> usize {
    let wanted = options.threads;
    let threads = wanted.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    threads.clamp(1, IMPORT_THREADS_MAX)
}

/// A channel with all unused `Work`s; at first that is all of them.
fn free_works(count: usize, work_bytes: usize) -> (mpsc::Sender<Box<Work>>, mpsc::Receiver<Box<Work>>) {
    let (tx, rx) = mpsc::channel();
    for _ in 0..count {
        // The receiver is in this function.
        let _ = tx.send(Box::new(Work::new(work_bytes)));
    }
    (tx, rx)
}

fn check_size(size_bytes: u64) -> Result<u64, ImageError> {
    let why = if size_bytes == 0 {
        "it is empty".to_owned()
    } else if !size_bytes.is_multiple_of(512) {
        format!("its size of {size_bytes} bytes is not a multiple of 512")
    } else if size_bytes > VOLUME_MAX_BYTES {
        // The format would allow more, but no machine could be started with it.
        format!(
            "it has {size_bytes} bytes, but a machine's disk can have at most {VOLUME_MAX_BYTES} (8 KiB less than 16 TiB)"
        )
    } else {
        return Ok(size_bytes);
    };
    Err(ImageError::new(ImageErrorKind::Invalid, format!("cannot import this disk: {why}")))
}

fn check_text(what: &str, text: &str, max_bytes: usize) -> Result<(), ImageError> {
    let len = text.len();
    if len <= max_bytes {
        return Ok(());
    }
    let message = format!("the {what} has {len} bytes, and at most {max_bytes} are allowed");
    Err(ImageError::new(ImageErrorKind::Invalid, message))
}

/// How many chunks a range of bytes from the start of a chunk touches.
fn chunks_of(bytes: u64, chunk_bytes: u32) -> usize {
    usize_of(bytes.div_ceil(u64::from(chunk_bytes)))
}
