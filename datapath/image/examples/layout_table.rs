//! How the order of chunks in a data object affects a boot: the table of layouts of
//! `docs/decisions/0009-chunks-of-64-kib.md`.
//!
//! `cargo run --release -p headwater-image --example layout_table -- FILE.raw READS [ROUNDS]`
//!
//! READS is a recorded boot: a line `OFFSET LENGTH` for each read of the disk. For each order, a store gets
//! an object in that order. The reader that volumes use then reads the boot from it, one request after
//! another, over a simulated line of 100 Mbit/s with a latency of 4 ms: on demand, with readahead, and with
//! the boot's own trace.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use headwater_block::blocking;
use headwater_image::manifest::{ChunkRef, ManifestBuilder, ObjectRef};
use headwater_image::{ChunkCache, ImportOptions, Manifest, VersionReader, import, open_source};
use headwater_store::{
    Access, Hash, Image, ImageName, LocalDir, NewVersion, Object, Pin, Publication, Removed, Store,
    StoreError,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const LATENCY: Duration = Duration::from_millis(4);
const BYTES_PER_S: f64 = 100e6 / 8.0;
const CACHE_BYTES: u64 = 1 << 30;
const HEADER_BYTES: usize = 16;

/// A recorded boot: the offset and the length of each read.
type Reads = Vec<(u64, usize)>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (file, reads, rounds) = match arguments.as_slice() {
        [file, reads] => (file, reads, 3),
        [file, reads, rounds] => (file, reads, rounds.parse()?),
        _ => return Err("usage: layout_table FILE.raw READS [ROUNDS]".into()),
    };
    let reads = recorded(Path::new(reads))?;
    let dir = tempfile::tempdir()?;
    let store = LocalDir::open(&dir.path().join("image"), Access::WRITE)?;
    let options = ImportOptions::new("guest".parse()?, 0);
    let imported = import(open_source(Path::new(file), None)?, &store, &options, &mut |_| {})?;
    let manifest = Manifest::decode(&store.manifest(imported.version.manifest)?)?;
    println!("order | requests, MiB and seconds: on demand | with readahead | by trace");
    for (name, order) in orders(&manifest, &reads) {
        let ordered = LocalDir::open(&dir.path().join(name.replace(' ', "-")), Access::WRITE)?;
        let version = in_order(&store, &manifest, &order, &ordered)?;
        let far = Far { store: ordered, line: Arc::default() };
        let mut row = name.to_owned();
        for way in [Way::OnDemand, Way::Readahead, Way::Trace] {
            let mut seconds = Vec::new();
            let (mut requests, mut bytes) = (0, 0);
            for _ in 0..rounds {
                let (requests_before, bytes_before) = far.line.counted();
                seconds.push(boot(&far, version, &reads, &way)?);
                let (requests_after, bytes_after) = far.line.counted();
                (requests, bytes) = (requests_after - requests_before, bytes_after - bytes_before);
            }
            seconds.sort_by(f64::total_cmp);
            let middle = seconds.get(seconds.len() / 2).copied().unwrap_or_default();
            row += &format!(" | {requests}, {:.1}, {middle:.2}", bytes as f64 / 1_048_576.0);
        }
        println!("{row}");
    }
    Ok(())
}

/// Each distinct chunk of the version once, in each order.
fn orders(manifest: &Manifest, reads: &Reads) -> [(&'static str, Vec<ChunkRef>); 3] {
    let mut seen = HashSet::new();
    let image: Vec<ChunkRef> =
        manifest.data().map(|(_, chunk)| *chunk).filter(|chunk| seen.insert(chunk.hash)).collect();
    let mut by_hash = image.clone();
    by_hash.sort_by_key(|chunk| chunk.hash.0);
    let chunk_bytes = u64::from(manifest.chunk_bytes());
    let touched = reads.iter().flat_map(|(offset, len)| {
        *offset / chunk_bytes..=(offset + *len as u64).saturating_sub(1) / chunk_bytes
    });
    let mut seen = HashSet::new();
    let mut boot_first: Vec<ChunkRef> =
        touched.filter_map(|index| manifest.chunk(index).copied()).filter(|c| seen.insert(c.hash)).collect();
    boot_first.extend(image.iter().filter(|chunk| !seen.contains(&chunk.hash)));
    [("of the image", image), ("by hash", by_hash), ("boot first", boot_first)]
}

/// Writes the version into another store, with its chunks in this order.
fn in_order(from: &LocalDir, manifest: &Manifest, order: &[ChunkRef], to: &LocalDir) -> Outcome<Hash> {
    let objects: Vec<_> =
        manifest.objects().iter().map(|object| from.open_object(object.id)).collect::<Result<_, _>>()?;
    let header: Vec<u8> = {
        let mut header = vec![0; HEADER_BYTES];
        objects.first().ok_or("the image has no data")?.read_range(0, &mut header)?;
        header
    };
    let mut publication = to.publish()?;
    publication.append(&header)?;
    let (mut at, mut places) = (HEADER_BYTES as u64, HashMap::new());
    for chunk in order {
        let mut stored = vec![0; usize::try_from(chunk.stored_bytes)?];
        let object = objects.get(usize::try_from(chunk.object)?).ok_or("a chunk is in no object")?;
        object.read_range(chunk.offset, &mut stored)?;
        publication.append(&stored)?;
        places.insert(chunk.hash, at);
        at += u64::from(chunk.stored_bytes);
    }
    let (id, len_bytes) = publication.finish_object()?.ok_or("nothing was written")?;
    let mut built = ManifestBuilder::new(manifest.size_bytes(), manifest.chunk_bytes(), None);
    for (index, chunk) in manifest.data() {
        let offset = *places.get(&chunk.hash).ok_or("a chunk was left out")?;
        built.push(index, ChunkRef { object: 0, offset, ..*chunk });
    }
    let bytes = built.finish(&[ObjectRef { id, len_bytes }])?.encode();
    let name: ImageName = "guest".parse()?;
    let committed = publication.commit(NewVersion {
        name: &name,
        manifest: &bytes,
        objects: &[id],
        size_bytes: manifest.size_bytes(),
        created_at_s: 0,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    })?;
    Ok(committed.version.manifest)
}

enum Way {
    OnDemand,
    Readahead,
    Trace,
}

/// Reads what the boot read, one request after another, with nothing cached. Returns the seconds.
fn boot(far: &Far, version: Hash, reads: &Reads, way: &Way) -> Outcome<f64> {
    // This boot is not measured: it reads from memory, on this host.
    let trace = {
        let near = VersionReader::open(&far.store, version, ChunkCache::new(CACHE_BYTES))?;
        near.record(Duration::from_secs(3600));
        read(&near, reads)?;
        near.recorded().ok_or("no boot was recorded")?
    };
    let reader = VersionReader::open(far, version, ChunkCache::new(CACHE_BYTES))?;
    if !matches!(way, Way::Readahead) {
        reader.stop_readahead();
    }
    let started = Instant::now();
    let _work = match way {
        Way::Trace => Some(reader.prefetch(&trace, u64::MAX)?),
        Way::OnDemand | Way::Readahead => None,
    };
    read(&reader, reads)?;
    Ok(started.elapsed().as_secs_f64())
}

fn read(reader: &VersionReader, reads: &Reads) -> Outcome<()> {
    let mut buffer = Vec::new();
    for (offset, len) in reads {
        buffer.resize(*len, 0);
        blocking::read(reader, *offset, &mut buffer)?;
    }
    Ok(())
}

fn recorded(file: &Path) -> Outcome<Reads> {
    let mut reads = Vec::new();
    for line in std::fs::read_to_string(file)?.lines() {
        let (offset, len) = line.split_once(' ').ok_or("a line is not 'OFFSET LENGTH'")?;
        reads.push((offset.parse()?, len.parse()?));
    }
    Ok(reads)
}

/// A line that transmits one answer at a time, and the time when it is free again.
#[derive(Default)]
struct Line {
    requests: AtomicU64,
    bytes: AtomicU64,
    free: Mutex<Option<Instant>>,
}

impl Line {
    fn counted(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Waits until an answer of this many bytes would have arrived.
    fn compaction(&self, bytes: usize) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let arrives = {
            let mut free = self.free.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let begins = (Instant::now() + LATENCY).max(free.unwrap_or_else(Instant::now));
            *free.insert(begins + Duration::from_secs_f64(bytes as f64 / BYTES_PER_S))
        };
        std::thread::sleep(arrives.saturating_duration_since(Instant::now()));
    }
}

/// A store at the far end of the line.
struct Far {
    store: LocalDir,
    line: Arc<Line>,
}

struct FarObject {
    object: Arc<dyn Object>,
    line: Arc<Line>,
}

impl Object for FarObject {
    fn id(&self) -> Hash {
        self.object.id()
    }

    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.line.compaction(into.len());
        self.object.read_range(offset, into)
    }
}

impl Store for Far {
    fn chunk_bytes(&self) -> u32 {
        self.store.chunk_bytes()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.store.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.store.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.store.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(FarObject { object: self.store.open_object(id)?, line: Arc::clone(&self.line) }))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.store.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.store.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.store.change(name, change)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.store.remove(name, number)
    }
}
