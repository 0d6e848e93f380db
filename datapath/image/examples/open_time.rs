//! How long it takes to open a version of 64 GiB in which every chunk has data: the table of
//! `docs/decisions/0030-manifests-in-parts.md`.
//!
//! `cargo run --release -p headwater-image --example open_time -- [DIR] [GIB]`
//!
//! A version of a million different chunks is imported into a store in DIR. This takes minutes, since all of
//! it is hashed, and 150 MiB, since the chunks are nearly empty. Then the version is opened in two ways. The
//! first reader shares nothing with other readers: measured is the time to read, check and parse the whole
//! manifest, and the time of the first read of a part of it. The second reader opens the version while
//! another reader has it open, like the second machine of a daemon. `cold` means that the kernel was asked to
//! drop the store's files from the page cache, which it may not do.

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
    blocking,
};
use headwater_image::{ChunkCache, ImportOptions, Manifest, VersionReader, import};
use headwater_store::{Access, Hash, LocalDir, Store};

const CHUNK_BYTES: u64 = 64 << 10;
/// The bytes of the disk that one page of the chunk map describes.
const PAGE_BYTES: u64 = 64 << 20;
const ROUNDS: usize = 15;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A disk whose chunks contain their number, and nothing else.
struct Numbered {
    size_bytes: u64,
}

impl Numbered {
    fn fill(range: ByteRange, into: &mut [u8]) {
        into.fill(0);
        for at in (range.offset().next_multiple_of(CHUNK_BYTES)..range.end()).step_by(CHUNK_BYTES as usize) {
            let from = (at - range.offset()) as usize;
            let number = (at / CHUNK_BYTES + 1).to_le_bytes();
            let len = number.len().min(into.len() - from);
            into[from..from + len].copy_from_slice(&number[..len]);
        }
    }
}

fn read_only() -> IoError {
    IoError::new(IoErrorKind::ReadOnly, "it is only read")
}

impl Device for Numbered {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size_bytes,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => Self::fill(range, into),
            Op::Flush => {}
            _ => return Err(read_only()),
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { range, mut buffer } => {
                Self::fill(range, &mut buffer);
                done.complete(Ok(()), buffer);
            }
            Request::Prefetch { .. } | Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parent = arguments.first().map_or_else(std::env::temp_dir, Into::into);
    let gib: u64 = arguments.get(1).map_or(Ok(64), |gib| gib.parse())?;
    let dir = tempfile::tempdir_in(parent)?;
    let store = LocalDir::open(dir.path(), Access::WRITE)?;
    let began = Instant::now();
    let disk = Arc::new(Numbered { size_bytes: gib << 30 });
    let options = ImportOptions::new("image".parse()?, 0);
    let id = import(disk, &store, &options, &mut |_| {})?.version.manifest;
    println!("imported {gib} GiB in {:.0} s", began.elapsed().as_secs_f64());
    let bytes = store.manifest(id)?;
    let chunks = Manifest::decode(&bytes)?.data_chunks();
    println!(
        "{chunks} chunks, a manifest of {:.1} MiB, in the middle of {ROUNDS}:",
        bytes.len() as f64 / 1_048_576.0
    );
    drop(bytes);

    let cache = || ChunkCache::new(64 << 20);
    row("first reader of the version, its manifest in the page cache", || {
        opened(&store, id, cache()).map(|it| it.0)
    })?;
    row("the same, cold", || {
        forget(dir.path())?;
        opened(&store, id, cache()).map(|it| it.0)
    })?;
    row("  of it: the manifest read and hashed", || {
        let began = Instant::now();
        let bytes = store.manifest(id)?;
        let ms = ms(began);
        drop(bytes);
        Ok(ms)
    })?;
    let bytes = store.manifest(id)?;
    row("  of it: parsed and checked", || {
        let began = Instant::now();
        let manifest = Manifest::decode(&bytes)?;
        let ms = ms(began);
        drop(manifest);
        Ok(ms)
    })?;
    let (_, reader) = opened(&store, id, cache())?;
    // The reads start at the beginning, because opening has read the middle. They are so far apart that
    // readahead fetches none of them.
    let mut page = 0;
    row("a block of a chunk that is read first in its 64 MiB", || {
        page += 1;
        read_ms(&reader, page * PAGE_BYTES)
    })?;
    page = 0;
    row("a block of a further chunk there", || {
        page += 1;
        read_ms(&reader, page * PAGE_BYTES + PAGE_BYTES / 2)
    })?;
    let shared = cache();
    let (_, _first) = opened(&store, id, Arc::clone(&shared))?;
    row("a further reader beside it", || opened(&store, id, Arc::clone(&shared)).map(|it| it.0))
}

/// Milliseconds until a reader is open. Also checks that it reads correct bytes.
fn opened(store: &LocalDir, id: Hash, cache: Arc<ChunkCache>) -> Outcome<(f64, Arc<VersionReader>)> {
    let began = Instant::now();
    let reader = VersionReader::open(store, id, cache)?;
    let ms = ms(began);
    let (mut is, mut has_to) = (vec![0; 4096], vec![0; 4096]);
    let at = reader.geometry().size_bytes / 2;
    blocking::read(&*reader, at, &mut is)?;
    Numbered::fill(ByteRange::new(at, 4096).ok_or("a block")?, &mut has_to);
    if is == has_to { Ok((ms, reader)) } else { Err("it reads something else".into()) }
}

/// Milliseconds for the read of a block. Also checks the block.
fn read_ms(reader: &Arc<VersionReader>, at: u64) -> Outcome<f64> {
    let (mut is, mut has_to) = (vec![0; 4096], vec![0; 4096]);
    let began = Instant::now();
    blocking::read(&**reader, at, &mut is)?;
    let ms = ms(began);
    Numbered::fill(ByteRange::new(at, 4096).ok_or("a block")?, &mut has_to);
    if is == has_to { Ok(ms) } else { Err("it reads something else".into()) }
}

fn ms(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

fn row(what: &str, mut run: impl FnMut() -> Outcome<f64>) -> Outcome<()> {
    let mut all = (0..ROUNDS).map(|_| run()).collect::<Outcome<Vec<f64>>>()?;
    all.sort_by(f64::total_cmp);
    println!("| {what} | {:.3} ms | {:.3} to {:.3} |", all[ROUNDS / 2], all[0], all[ROUNDS - 1]);
    Ok(())
}

/// Asks the kernel to drop all files below a directory from the page cache.
fn forget(folder: &Path) -> Outcome<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
        } else {
            let file = File::open(&path)?;
            file.sync_all()?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
    }
    Ok(())
}
