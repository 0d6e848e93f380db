//! Computes figures of a phase: counts, sizes, classes of data, and the live bytes at its end. A block is live if it
//! was written and has not been discarded or zeroed since.

use std::collections::BTreeSet;

use headwater_recorder::Content;
use serde::Serialize;

use super::{Desktop, Kind};
use crate::trace::{Kind as Operation, Request};

const BLOCK: u64 = 4096;

/// A block counts as compressible if its compressed size is less than this many sixteenths.
const PACKS_WELL: u8 = 8;

/// The figures of a phase. Phases of one kind are merged: counts are means, shares are computed from the sums, and
/// `live_bytes` is that of the last phase.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Length in seconds.
    pub seconds: f64,
    /// The number of writes, except zero writes without data.
    pub writes: f64,
    /// Bytes of these writes.
    pub written_bytes: f64,
    /// Bytes of discards and of zero writes.
    pub discarded_bytes: f64,
    /// Reads of blocks that were written before, as a share of these reads and all writes.
    pub read_share: f64,
    /// Written blocks that were already live, as a share of all written blocks.
    pub rewritten_share: f64,
    /// Written blocks that compress to less than half, as a share.
    pub packs_share: f64,
    /// Written blocks that are zero or equal to the image, as a share.
    pub free_share: f64,
    /// Live bytes at the end.
    pub live_bytes: f64,
    /// Lengths of all writes.
    #[serde(skip)]
    pub lengths: Vec<u64>,
}

/// Counts of one phase.
#[derive(Default)]
struct Counted {
    seconds: f64,
    writes: u64,
    written_bytes: u64,
    discarded_bytes: u64,
    reads: u64,
    blocks: u64,
    rewritten: u64,
    packs: u64,
    free: u64,
    live: u64,
    lengths: Vec<u64>,
}

impl Counted {
    fn take(&mut self, live: &mut BTreeSet<u64>, request: &Request) {
        let (first, end) = (request.offset / BLOCK, (request.offset + request.bytes).div_ceil(BLOCK));
        let remove = |live: &mut BTreeSet<u64>, first: u64, end: u64| {
            let gone: Vec<u64> = live.range(first..end.max(first)).copied().collect();
            for block in gone {
                live.remove(&block);
            }
        };
        match request.kind {
            Operation::Read => self.reads += u64::from(live.range(first..end).next().is_some()),
            Operation::Discard | Operation::WriteZeroes => {
                self.discarded_bytes += request.bytes;
                // Blocks that are covered only in part keep their data.
                remove(live, request.offset.div_ceil(BLOCK), (request.offset + request.bytes) / BLOCK);
            }
            Operation::Write => {
                self.writes += 1;
                self.written_bytes += request.bytes;
                self.lengths.push(request.bytes);
                self.blocks += end - first;
                match request.content {
                    Content::Zero | Content::Equal => {
                        self.free += end - first;
                        remove(live, first, end);
                    }
                    Content::Packs(parts) => {
                        self.packs += if parts < PACKS_WELL { end - first } else { 0 };
                        self.write(live, first, end);
                    }
                    Content::Unknown => self.write(live, first, end),
                }
            }
        }
    }

    fn write(&mut self, live: &mut BTreeSet<u64>, first: u64, end: u64) {
        for block in first..end {
            self.rewritten += u64::from(!live.insert(block));
        }
    }
}

/// The figures of each kind of phase.
pub fn by_kind(desktop: &Desktop) -> Vec<(Kind, Figures)> {
    let mut live = BTreeSet::new();
    let mut phases: Vec<(Kind, Counted)> = Vec::new();
    let mut requests = desktop.volume.requests.iter().peekable();
    // Requests between phases count for no phase, but they change which blocks are live.
    let mut between = Counted::default();
    for (kind, phase) in &desktop.phases {
        let at_us = |seconds: f64| (seconds * 1e6) as u64;
        while let Some(request) = requests.next_if(|request| request.time_us < at_us(phase.from_s)) {
            between.take(&mut live, request);
        }
        let mut counted = Counted { seconds: phase.to_s - phase.from_s, ..Counted::default() };
        while let Some(request) = requests.next_if(|request| request.time_us < at_us(phase.to_s)) {
            counted.take(&mut live, request);
        }
        counted.live = live.len() as u64;
        phases.push((*kind, counted));
    }
    let mean = |kind: Kind| {
        let alike: Vec<&Counted> =
            phases.iter().filter(|(other, _)| *other == kind).map(|(_, counted)| counted).collect();
        let count = alike.len().max(1) as f64;
        let sum = |of: fn(&Counted) -> u64| alike.iter().map(|counted| of(counted)).sum::<u64>() as f64;
        let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
        let blocks = sum(|counted| counted.blocks);
        let figures = Figures {
            seconds: alike.iter().map(|counted| counted.seconds).sum::<f64>() / count,
            writes: sum(|counted| counted.writes) / count,
            written_bytes: sum(|counted| counted.written_bytes) / count,
            discarded_bytes: sum(|counted| counted.discarded_bytes) / count,
            read_share: share(
                sum(|counted| counted.reads),
                sum(|counted| counted.reads) + sum(|counted| counted.writes),
            ),
            rewritten_share: share(sum(|counted| counted.rewritten), blocks),
            packs_share: share(sum(|counted| counted.packs), blocks),
            free_share: share(sum(|counted| counted.free), blocks),
            live_bytes: alike.last().map_or(0.0, |counted| (counted.live * BLOCK) as f64),
            lengths: alike.iter().flat_map(|counted| counted.lengths.iter().copied()).collect(),
        };
        (kind, figures)
    };
    desktop.kinds().into_iter().map(mean).collect()
}

/// The Kolmogorov-Smirnov distance between two samples, from 0 to 1. `None`: one sample is empty.
pub fn distance(a: &[u64], b: &[u64]) -> Option<f64> {
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let sorted = |samples: &[u64]| {
        let mut samples = samples.to_vec();
        samples.sort_unstable();
        samples
    };
    let (a, b) = (sorted(a), sorted(b));
    let share = |samples: &[u64], value: u64| {
        samples.partition_point(|sample| *sample <= value) as f64 / samples.len() as f64
    };
    let values = a.iter().chain(&b);
    values.map(|value| (share(&a, *value) - share(&b, *value)).abs()).max_by(f64::total_cmp)
}
