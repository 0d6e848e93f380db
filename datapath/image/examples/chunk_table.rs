//! What different chunk sizes and compression levels cost and save, for one image: the table of
//! `docs/decisions/0009-chunks-of-64-kib.md`.
//!
//! `cargo run --release -p headwater-image --example chunk_table -- FILE.raw [READS] [CHANGED.raw]`
//!
//! READS is a recorded boot: a line `OFFSET LENGTH` for each read of the disk. CHANGED.raw is the same disk
//! after an upgrade: the space that its version adds is compared with the zstd size of the changed 4 KiB
//! blocks.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use headwater_image::{ImportOptions, Imported, Manifest, import, open_source};
use headwater_store::{Access, LocalDir, Store};

const BLOCK_BYTES: u64 = 4096;
const SIZES: [u32; 6] = [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20];
const LEVELS: [i32; 4] = [1, 3, 6, 9];
/// Reads of an object that are closer together than this are one request.
const GAP_BYTES: u64 = 64 << 10;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(file) = arguments.first() else {
        return Err("usage: chunk_table FILE [READS] [CHANGED]".into());
    };
    let needed = arguments.get(1).map(|reads| blocks_of(reads)).transpose()?.unwrap_or_default();
    let changed = arguments.get(2);
    let changed_zstd = changed.map(|changed| zstd_of_changes(file, changed)).transpose()?;
    println!("boot: {} MiB in 4 KiB blocks", (needed.len() as u64 * BLOCK_BYTES) >> 20);
    if let Some((blocks, bytes)) = changed_zstd {
        println!("upgrade: {blocks} blocks changed, {bytes} bytes as one zstd -3 stream");
    }
    println!(
        "chunk KiB | level | import s | MiB/s | stored MiB | manifest KiB | boot MiB fetched | unpacked / needed | requests | upgrade MiB | / zstd"
    );
    for chunk_bytes in SIZES {
        for level in LEVELS {
            let dir = tempfile::tempdir()?;
            let store = LocalDir::open(dir.path(), Access::Write { new_chunk_bytes: chunk_bytes })?;
            let started = Instant::now();
            let first = add(&store, file, level)?;
            let import_s = started.elapsed().as_secs_f64();
            let bytes = store.manifest(first.version.manifest)?;
            let manifest = Manifest::decode(&bytes)?;
            let boot = fetched(&manifest, &needed);
            let upgrade = match (changed, changed_zstd) {
                (Some(changed), Some((_, zstd))) => {
                    let added = add(&store, changed, level)?.version.stored_bytes;
                    format!("{:.1} | {:.2}", added as f64 / MIB, added as f64 / zstd as f64)
                }
                _ => "| ".to_owned(),
            };
            println!(
                "{} | {level} | {import_s:.2} | {:.0} | {:.1} | {} | {:.1} | {:.2} | {} | {upgrade}",
                chunk_bytes >> 10,
                first.data_bytes as f64 / MIB / import_s,
                first.version.stored_bytes as f64 / MIB,
                bytes.len() >> 10,
                boot.stored_bytes as f64 / MIB,
                boot.unpacked_bytes as f64 / (needed.len().max(1) as f64 * BLOCK_BYTES as f64),
                boot.requests,
            );
        }
    }
    Ok(())
}

const MIB: f64 = 1_048_576.0;

fn add(store: &LocalDir, file: &str, level: i32) -> Outcome<Imported> {
    let mut options = ImportOptions::new("image".parse()?, 0);
    options.level = level;
    Ok(import(open_source(Path::new(file), None)?, store, &options, &mut |_| {})?)
}

/// The blocks that a boot reads.
fn blocks_of(reads: &str) -> Outcome<BTreeSet<u64>> {
    let mut blocks = BTreeSet::new();
    for line in std::fs::read_to_string(reads)?.lines() {
        let (offset, len) = line.split_once(' ').ok_or("a line is not 'OFFSET LENGTH'")?;
        let (offset, len): (u64, u64) = (offset.parse()?, len.parse()?);
        blocks.extend(offset / BLOCK_BYTES..(offset + len).div_ceil(BLOCK_BYTES));
    }
    Ok(blocks)
}

struct Fetched {
    stored_bytes: u64,
    unpacked_bytes: u64,
    requests: u64,
}

/// What a boot fetches: the chunks of its blocks, once each. Chunks that are adjacent in the object are one
/// request.
fn fetched(manifest: &Manifest, needed: &BTreeSet<u64>) -> Fetched {
    let per_chunk = u64::from(manifest.chunk_bytes()) / BLOCK_BYTES;
    let chunks: BTreeSet<u64> = needed.iter().map(|block| block / per_chunk).collect();
    let mut places: Vec<(u32, u64, u64)> = chunks
        .iter()
        .filter_map(|index| manifest.chunk(*index))
        .map(|chunk| (chunk.object, chunk.offset, u64::from(chunk.stored_bytes)))
        .collect();
    places.sort_unstable();
    places.dedup();
    let (mut requests, mut end) = (0, None);
    for (object, offset, len) in &places {
        if end.is_none_or(|(before, at)| before != *object || offset.saturating_sub(at) > GAP_BYTES) {
            requests += 1;
        }
        end = Some((*object, offset + len));
    }
    Fetched {
        stored_bytes: places.iter().map(|(_, _, len)| len).sum(),
        unpacked_bytes: places.len() as u64 * u64::from(manifest.chunk_bytes()),
        requests,
    }
}

/// How many 4 KiB blocks differ, and their size as one stream of zstd at the level of imports.
fn zstd_of_changes(before: &str, after: &str) -> Outcome<(u64, u64)> {
    let (before, after) = (File::open(before)?, File::open(after)?);
    let len = after.metadata()?.len();
    let (mut old, mut new) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut packed = zstd::stream::Encoder::new(Vec::new(), headwater_image::import::LEVEL_DEFAULT)?;
    let (mut at, mut blocks) = (0, 0);
    while at < len {
        let piece = usize::try_from((len - at).min(1 << 20))?;
        after.read_exact_at(&mut new[..piece], at)?;
        before.read_exact_at(&mut old[..piece], at)?;
        for (was, is) in old[..piece].chunks(4096).zip(new[..piece].chunks(4096)) {
            if was != is {
                blocks += 1;
                std::io::Write::write_all(&mut packed, is)?;
            }
        }
        at += piece as u64;
    }
    Ok((blocks, packed.finish()?.len() as u64))
}
