//! Compares algorithms for packing the blocks that a real machine changed: how small, how fast, and how long
//! a read of one block then takes. The table of docs/decisions/0014 comes from here.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use headwater_testkit::Rng;
use lz4_flex::block as lz4;
use zstd::bulk::{Compressor, Decompressor};

use crate::pack;
use crate::work::{BLOCK, MIB};

const SLOT: usize = BLOCK as usize;

/// Number of blocks that are packed together in memory.
const SEGMENT: usize = 512;

/// What each entry begins at a multiple of, and what its length takes.
const UNIT: usize = 32;
const HEADER: usize = 2;

/// Segments that a dictionary for all others is trained on.
const TRAINED_ON: usize = 8;

#[derive(Clone, Copy)]
enum Dictionary {
    None,
    /// The dictionary consists of this many blocks of each segment, uncompressed; they stay in memory in
    /// addition.
    Raw(usize),
    /// A dictionary that is trained on each segment: of this many bytes, which stay in memory in addition.
    Trained(usize),
    /// A dictionary that is trained once, on the first segments: of this many bytes for all.
    Once(usize),
}

#[derive(Clone, Copy)]
enum How {
    Lz4,
    Zstd(i32),
}

struct Candidate {
    name: &'static str,
    how: How,
    /// Number of slots that are packed together.
    group: usize,
    dictionary: Dictionary,
}

const fn candidate(name: &'static str, how: How, group: usize, dictionary: Dictionary) -> Candidate {
    Candidate { name, how, group, dictionary }
}

const CANDIDATES: &[Candidate] = &[
    candidate("LZ4, each block", How::Lz4, 1, Dictionary::None),
    candidate("LZ4, 4 blocks together", How::Lz4, 4, Dictionary::None),
    candidate("LZ4, 8 blocks together", How::Lz4, 8, Dictionary::None),
    candidate("LZ4, 16 blocks together", How::Lz4, 16, Dictionary::None),
    candidate("LZ4, 16 blocks of the segment as prefix", How::Lz4, 1, Dictionary::Raw(15)),
    candidate("zstd -1 (fast), each block", How::Zstd(-1), 1, Dictionary::None),
    candidate("zstd 1, each block", How::Zstd(1), 1, Dictionary::None),
    candidate("zstd 2, each block", How::Zstd(2), 1, Dictionary::None),
    candidate("zstd 3, each block", How::Zstd(3), 1, Dictionary::None),
    candidate("zstd 6, each block", How::Zstd(6), 1, Dictionary::None),
    candidate("zstd 1, 2 blocks together", How::Zstd(1), 2, Dictionary::None),
    candidate("zstd 1, 4 blocks together", How::Zstd(1), 4, Dictionary::None),
    candidate("zstd 1, 8 blocks together", How::Zstd(1), 8, Dictionary::None),
    candidate("zstd 3, 4 blocks together", How::Zstd(3), 4, Dictionary::None),
    candidate("zstd 1, 16 blocks of the segment as prefix", How::Zstd(1), 1, Dictionary::Raw(16)),
    candidate("zstd 1, 16 KiB trained on each segment", How::Zstd(1), 1, Dictionary::Trained(16 << 10)),
    candidate("zstd 1, 64 KiB trained on each segment", How::Zstd(1), 1, Dictionary::Trained(64 << 10)),
    candidate("zstd 1, 112 KiB trained once", How::Zstd(1), 1, Dictionary::Once(112 << 10)),
    candidate("zstd 3, 112 KiB trained once", How::Zstd(3), 1, Dictionary::Once(112 << 10)),
];

/// An algorithm, ready for a segment.
enum Coder {
    Lz4(lz4::CompressTable, Vec<u8>),
    Zstd(Box<Compressor<'static>>, Box<Decompressor<'static>>),
}

impl Coder {
    fn new(how: How, dictionary: &[u8]) -> Self {
        match how {
            How::Lz4 => Coder::Lz4(lz4::CompressTable::default(), dictionary.to_vec()),
            How::Zstd(level) => {
                let packer = Compressor::with_dictionary(level, dictionary).expect("a context");
                let unpacker = Decompressor::with_dictionary(dictionary).expect("a context");
                Coder::Zstd(Box::new(packer), Box::new(unpacker))
            }
        }
    }

    /// Packs into the start of `into`; returns the length, or `None` if it does not get smaller.
    fn pack(&mut self, plain: &[u8], into: &mut [u8]) -> Option<usize> {
        let len = match self {
            Coder::Lz4(table, dictionary) if dictionary.is_empty() => {
                lz4::compress_into_with_table(plain, into, table).ok()
            }
            Coder::Lz4(_, dictionary) => lz4::compress_into_with_dict(plain, into, dictionary).ok(),
            Coder::Zstd(packer, _) => packer.compress_to_buffer(plain, into).ok(),
        };
        len.filter(|len| *len < plain.len())
    }

    fn unpack(&mut self, packed: &[u8], into: &mut [u8]) -> usize {
        match self {
            Coder::Lz4(_, dictionary) if dictionary.is_empty() => lz4::decompress_into(packed, into).ok(),
            Coder::Lz4(_, dictionary) => lz4::decompress_into_with_dict(packed, into, dictionary).ok(),
            Coder::Zstd(_, unpacker) => unpacker.decompress_to_buffer(packed, into).ok(),
        }
        .expect("what was packed unpacks")
    }
}

fn train(segment: &[u8], bytes: usize) -> Vec<u8> {
    let sizes = vec![SLOT; segment.len() / SLOT];
    // Too little data to train on: no dictionary.
    zstd::dict::from_continuous(segment, &sizes, bytes).unwrap_or_default()
}

fn dictionary_of(candidate: &Candidate, segment: &[u8], once: &[u8]) -> Vec<u8> {
    match candidate.dictionary {
        Dictionary::None => Vec::new(),
        Dictionary::Raw(blocks) => {
            let step = (segment.len() / SLOT).div_ceil(blocks);
            segment.chunks(SLOT).step_by(step).flatten().copied().collect()
        }
        Dictionary::Trained(bytes) => train(segment, bytes),
        Dictionary::Once(_) => once.to_vec(),
    }
}

/// A packed segment: the offset of each group, and whether it got smaller.
struct Packed {
    bytes: Vec<u8>,
    groups: Vec<(usize, usize, bool)>,
    coder: Coder,
}

fn pack(candidate: &Candidate, segment: &[u8], dictionary: &[u8]) -> Packed {
    let mut coder = Coder::new(candidate.how, dictionary);
    let mut buffer = vec![0; candidate.group * SLOT * 2];
    let (mut bytes, mut groups) = (Vec::new(), Vec::new());
    for plain in segment.chunks(candidate.group * SLOT) {
        let start = bytes.len();
        let len = coder.pack(plain, &mut buffer);
        bytes.extend_from_slice(len.map_or(plain, |len| &buffer[..len]));
        groups.push((start, bytes.len(), len.is_some()));
        bytes.resize((bytes.len() + HEADER).next_multiple_of(UNIT), 0);
    }
    Packed { bytes, groups, coder }
}

fn measure(candidate: &Candidate, data: &[u8]) {
    let segments: Vec<&[u8]> = data.chunks(SEGMENT * SLOT).collect();
    let start = Instant::now();
    let once = match candidate.dictionary {
        Dictionary::Once(bytes) => {
            let step = segments.len().div_ceil(TRAINED_ON);
            train(&segments.iter().step_by(step).copied().collect::<Vec<_>>().concat(), bytes)
        }
        _ => Vec::new(),
    };
    let mut taken = once.len();
    let mut packed = Vec::with_capacity(segments.len());
    for segment in &segments {
        let dictionary = dictionary_of(candidate, segment, &once);
        let now = pack(candidate, segment, &dictionary);
        let beside = if matches!(candidate.dictionary, Dictionary::Once(_)) { 0 } else { dictionary.len() };
        // If packing does not pay, the segment stays as it is.
        taken += (now.bytes.len() + beside).min(segment.len());
        packed.push(now);
    }
    let seconds = start.elapsed().as_secs_f64();
    let mut rng = Rng::new(7);
    let mut group = vec![0; candidate.group * SLOT];
    let mut block = vec![0; SLOT];
    let mut times = Vec::new();
    while times.len() < 20_000 {
        let number = rng.below(segments.len() as u64) as usize;
        let packed = &mut packed[number];
        let slot = rng.below((segments[number].len() / SLOT) as u64) as usize;
        let (start, end, smaller) = packed.groups[slot / candidate.group];
        if !smaller {
            continue;
        }
        let begun = Instant::now();
        packed.coder.unpack(&packed.bytes[start..end], &mut group);
        let at = slot % candidate.group * SLOT;
        block.copy_from_slice(&group[at..at + SLOT]);
        times.push(begun.elapsed().as_nanos() as f64 / 1000.0);
        assert!(black_box(&block)[..] == segments[number][slot * SLOT..(slot + 1) * SLOT]);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "| {:<42} | {:>5.2} | {:>5.0} | {:>5.1} | {:>5.1} |",
        candidate.name,
        data.len() as f64 / taken as f64,
        data.len() as f64 / MIB as f64 / seconds,
        times[times.len() / 2],
        times[times.len() * 99 / 100],
    );
}

/// All candidates with the blocks that differ.
pub fn compare(before: &Path, after: &Path) {
    let data: Vec<u8> = pack::changed(before, after).into_iter().flat_map(|(_, block)| block).collect();
    println!("{} MiB of blocks changed, without those that are zero", data.len() as u64 / MIB);
    println!("| {:<42} | ratio | MiB/s | read, median us | p99 us |\n|---|---|---|---|---|", "way");
    CANDIDATES.iter().for_each(|candidate| measure(candidate, &data));
}
