//! What a new version of an image costs in the store, compared with the zstd size of its changed 4 KiB
//! blocks: the table of `docs/decisions/0021-what-an-upgrade-costs.md`.
//!
//! `cargo run --release -p headwater-image --example upgrade_table -- BEFORE.raw AFTER.raw [--judge]`
//!
//! `make upgrade` makes such a pair of the Debian guest, and runs this with `--judge`: both files are
//! imported into a store, and the growth of the store with the second one is compared with a limit. Without
//! `--judge` it also prints the table, which takes a while. In the table, chunks of 64 KiB that BEFORE has
//! anywhere cost nothing, as in a store. The other chunks are compressed in ways that a store could use, so
//! that each chunk can be read without all others.

use std::collections::HashSet;
use std::error::Error;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use headwater_image::{ImportOptions, import, open_source};
use headwater_store::{Access, Hash, LocalDir};

const BLOCK_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 64 << 10;
const DICTIONARY_BYTES: usize = 112 << 10;
/// The size of the manifest's entry for each new chunk.
const ENTRY_BYTES: u64 = 48;
/// The limit for the cost of a version, as a multiple of the size of its changed blocks, compressed one by
/// one.
const GOAL: f64 = 1.15;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A chunk that the store does not have yet.
struct NewChunk {
    /// The chunk at the same place of the old disk.
    before: Vec<u8>,
    after: Vec<u8>,
}

fn main() -> Outcome<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (before, after, has_table) = match arguments.as_slice() {
        [before, after] => (before, after, true),
        [before, after, judge] if judge == "--judge" => (before, after, false),
        _ => return Err("usage: upgrade_table BEFORE.raw AFTER.raw [--judge]".into()),
    };
    let added = added(Path::new(before), Path::new(after))?;
    let (before, after) = (File::open(before)?, File::open(after)?);
    let known = known(&before)?;
    let (chunks, blocks) = new_chunks(&before, &after, &known)?;
    let changed: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    println!(
        "changed blocks: {}, {:.1} MiB; new chunks: {}",
        changed.len(),
        mib(changed.len() * BLOCK_BYTES),
        chunks.len()
    );
    let (stream, alone) = (as_stream(&changed)?, one_by_one(&changed)?);
    println!("their zstd -3 size: {:.1} MiB as one stream, {:.1} MiB one by one", mib(stream), mib(alone));
    let cost = added as f64 / alone as f64;
    println!(
        "the new version added {:.1} MiB to the store: {cost:.2} of them one by one, {:.2} of one stream",
        mib(added),
        added as f64 / stream as f64
    );
    if has_table {
        others(&chunks, &before, stream, alone)?;
    }
    let is_reached = cost <= GOAL;
    println!(
        "goal: at most {GOAL} of its changed blocks, one by one: {}",
        if is_reached { "reached" } else { "NOT reached" }
    );
    Ok(if is_reached { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Imports both into a store, and returns by how many bytes its files grew with the second.
fn added(before: &Path, after: &Path) -> Outcome<usize> {
    let dir = tempfile::tempdir()?;
    let store = LocalDir::open(dir.path(), Access::WRITE)?;
    let mut sizes = Vec::new();
    for disk in [before, after] {
        let options = ImportOptions::new("image".parse()?, 0);
        import(open_source(disk, None)?, &store, &options, &mut |_| {})?;
        sizes.push(tree_bytes(dir.path())?);
    }
    let [first, both] = sizes.as_slice() else { return Err("there are two".into()) };
    Ok(usize::try_from(both - first)?)
}

fn tree_bytes(folder: &Path) -> Outcome<u64> {
    std::fs::read_dir(folder)?.try_fold(0, |sum, entry| {
        let entry = entry?;
        let metadata = entry.metadata()?;
        Ok(sum + if metadata.is_dir() { tree_bytes(&entry.path())? } else { metadata.len() })
    })
}

/// The table: other ways to compress the new chunks.
fn others(chunks: &[NewChunk], before: &File, stream: usize, alone: usize) -> Outcome<()> {
    println!("| new chunks compressed | MiB | of one stream | of blocks one by one | CPU s |");
    println!("|---|---|---|---|---|");
    let row = |what: &str, pack: &mut dyn FnMut(&NewChunk) -> Outcome<usize>| -> Outcome<()> {
        let began = Instant::now();
        let mut bytes = chunks.len() * usize::try_from(ENTRY_BYTES)?;
        for chunk in chunks {
            bytes += pack(chunk)?.min(CHUNK_BYTES);
        }
        let ratio = |of: usize| bytes as f64 / of as f64;
        let seconds = began.elapsed().as_secs_f64();
        println!(
            "| {what} | {:.1} | {:.2} | {:.2} | {seconds:.1} |",
            mib(bytes),
            ratio(stream),
            ratio(alone)
        );
        Ok(())
    };
    for level in [1, 3, 6, 9, 12, 15, 19] {
        let mut packer = zstd::bulk::Compressor::new(level)?;
        row(&format!("alone, level {level}"), &mut |chunk| Ok(packer.compress(&chunk.after)?.len()))?;
    }
    let samples = samples(before)?;
    let sizes: Vec<usize> = samples.chunks(CHUNK_BYTES).map(<[u8]>::len).collect();
    let trained = zstd::dict::from_continuous(&samples, &sizes, DICTIONARY_BYTES)?;
    for level in [3, 9] {
        let mut packer = zstd::bulk::Compressor::with_dictionary(level, &trained)?;
        row(
            &format!("with a dictionary of 112 KiB trained on the old version, level {level}"),
            &mut |chunk| Ok(packer.compress(&chunk.after)?.len()),
        )?;
    }
    for level in [3, 9] {
        row(&format!("against the chunk that was there before, level {level}"), &mut |chunk| {
            let mut packer = zstd::bulk::Compressor::with_dictionary(level, &chunk.before)?;
            Ok(packer.compress(&chunk.after)?.len())
        })?;
    }
    let mut last: Vec<u8> = Vec::new();
    row("against the new chunk before it, level 3", &mut |chunk| {
        let mut packer = zstd::bulk::Compressor::with_dictionary(3, &last)?;
        last.clone_from(&chunk.after);
        Ok(packer.compress(&chunk.after)?.len())
    })?;
    Ok(())
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / 1_048_576.0
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The hashes of all chunks of a disk.
fn known(disk: &File) -> Outcome<HashSet<Hash>> {
    let mut known = HashSet::new();
    each_chunk(disk, |_, chunk| {
        known.insert(Hash::of(chunk));
        Ok(())
    })?;
    Ok(known)
}

fn each_chunk(disk: &File, mut with: impl FnMut(u64, &[u8]) -> Outcome<()>) -> Outcome<()> {
    let len = disk.metadata()?.len();
    let mut chunk = vec![0; CHUNK_BYTES];
    for at in (0..len).step_by(CHUNK_BYTES) {
        let piece = chunk.get_mut(..usize::try_from((len - at).min(CHUNK_BYTES as u64))?).ok_or("a chunk")?;
        disk.read_exact_at(piece, at)?;
        with(at, piece)?;
    }
    Ok(())
}

/// The chunks that are new, and the blocks that changed. Zeroes cost nothing.
fn new_chunks(before: &File, after: &File, known: &HashSet<Hash>) -> Outcome<(Vec<NewChunk>, Vec<Vec<u8>>)> {
    let (mut chunks, mut blocks) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    let old_len = before.metadata()?.len();
    each_chunk(after, |at, chunk| {
        let mut old = vec![0; chunk.len()];
        if at + chunk.len() as u64 <= old_len {
            before.read_exact_at(&mut old, at)?;
        }
        for (was, is) in old.chunks(BLOCK_BYTES).zip(chunk.chunks(BLOCK_BYTES)) {
            if was != is && !is_zero(is) {
                blocks.push(is.to_vec());
            }
        }
        let hash = Hash::of(chunk);
        if !is_zero(chunk) && !known.contains(&hash) && seen.insert(hash) {
            chunks.push(NewChunk { before: old, after: chunk.to_vec() });
        }
        Ok(())
    })?;
    Ok((chunks, blocks))
}

/// A sample of a disk's chunks for training: 1,600 chunks, 100 MiB, spread evenly.
fn samples(disk: &File) -> Outcome<Vec<u8>> {
    let mut all = Vec::new();
    each_chunk(disk, |at, chunk| {
        if chunk.len() == CHUNK_BYTES && !is_zero(chunk) {
            all.push(at);
        }
        Ok(())
    })?;
    let step = (all.len() / 1600).max(1);
    let mut out = Vec::new();
    for at in all.into_iter().step_by(step) {
        let start = out.len();
        out.resize(start + CHUNK_BYTES, 0);
        disk.read_exact_at(out.get_mut(start..).unwrap_or_default(), at)?;
    }
    Ok(out)
}

fn as_stream(blocks: &[&[u8]]) -> Outcome<usize> {
    let mut stream = zstd::stream::Encoder::new(Vec::new(), 3)?;
    for block in blocks {
        stream.write_all(block)?;
    }
    Ok(stream.finish()?.len())
}

fn one_by_one(blocks: &[&[u8]]) -> Outcome<usize> {
    let mut packer = zstd::bulk::Compressor::new(3)?;
    blocks.iter().try_fold(0, |sum, block| Ok(sum + packer.compress(block)?.len().min(BLOCK_BYTES)))
}
