//! Boot traces: which chunks a boot reads first, in order. Records, merges, encodes and decodes them.
//!
//! Does no I/O. The format is described byte by byte in `docs/format.md`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headwater_store::Hash;
use parking_lot::Mutex;

use crate::error::{ImageError, ImageErrorKind};
use crate::manifest::Manifest;
use crate::units::{u64_of, usize_of};

const MAGIC: [u8; 8] = *b"HWTRACE\n";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 56;
const ENTRY_BYTES: usize = 16;
const SUM_BYTES: usize = 32;

/// The most chunks of a trace.
pub const TRACE_CHUNKS_MAX: usize = 4 << 20;
/// The most boots that count in a trace. At this number all counts are halved, so older boots fade.
pub const TRACE_BOOTS_MAX: u32 = 16;
/// From this many boots on, a chunk is dropped if the latest boot did not touch it and fewer than a quarter of
/// the boots, or only one, did.
const RARE_FROM_BOOTS: u32 = 3;
/// A recording adds no chunks after this much of the image was touched: later reads are probably a copy of the
/// disk and no longer the boot.
pub const BOOT_MAX_BYTES: u64 = 1 << 30;
/// How many chunks of an image are tracked while a boot is recorded: 1 TiB at 64 KiB.
const WATCHED_CHUNKS_MAX: u64 = 16 << 20;

/// A chunk that boots read, when after their start, and how many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// Its number in the image.
    pub chunk: u64,
    /// When it was first touched, in milliseconds after the disk was opened: the mean over the boots.
    pub at_ms: u32,
    /// How many of the boots touched it.
    pub boots: u32,
}

/// The chunks that boots of a version read, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The version's manifest.
    pub manifest: Hash,
    /// How many boots count in it; halved at [`TRACE_BOOTS_MAX`].
    pub boots: u32,
    /// In the order in which to fetch them.
    pub chunks: Vec<Touched>,
}

fn damaged(why: &str) -> ImageError {
    ImageError::new(ImageErrorKind::Damaged, format!("the boot trace is damaged: {why}"))
}

impl Trace {
    /// The trace of one boot.
    pub fn of_boot(manifest: Hash, touched: &[(u64, u32)]) -> Self {
        let entry = |(chunk, at_ms): &(u64, u32)| Touched { chunk: *chunk, at_ms: *at_ms, boots: 1 };
        let mut chunks: Vec<Touched> = touched.iter().take(TRACE_CHUNKS_MAX).map(entry).collect();
        chunks.sort_by_key(|touched| touched.at_ms);
        Self { manifest, boots: 1, chunks }
    }

    /// Merges another boot. Both must be traces of the same version.
    pub fn merge(&mut self, boot: &Self) {
        if self.boots >= TRACE_BOOTS_MAX {
            self.boots /= 2;
            for touched in &mut self.chunks {
                touched.boots /= 2;
            }
            self.chunks.retain(|touched| touched.boots > 0);
        }
        let mut known: std::collections::HashMap<u64, usize> = std::collections::HashMap::new();
        for (at, touched) in self.chunks.iter().enumerate() {
            known.insert(touched.chunk, at);
        }
        for new in &boot.chunks {
            match known.get(&new.chunk).and_then(|at| self.chunks.get_mut(*at)) {
                Some(old) => {
                    let weights = (u64::from(old.boots), u64::from(new.boots));
                    let sum = u64::from(old.at_ms) * weights.0 + u64::from(new.at_ms) * weights.1;
                    old.at_ms = u32::try_from(sum / (weights.0 + weights.1).max(1)).unwrap_or(u32::MAX);
                    old.boots = old.boots.saturating_add(new.boots);
                }
                None => self.chunks.push(*new),
            }
        }
        self.boots = self.boots.saturating_add(boot.boots).min(TRACE_BOOTS_MAX);
        let boots = self.boots;
        let latest: std::collections::HashSet<u64> =
            boot.chunks.iter().map(|touched| touched.chunk).collect();
        for touched in &mut self.chunks {
            touched.boots = touched.boots.min(boots);
        }
        if boots >= RARE_FROM_BOOTS {
            // A chunk that the latest boot touched may become usual.
            let is_usual = |touched: &Touched| touched.boots >= boots.div_ceil(4).max(2);
            self.chunks.retain(|touched| is_usual(touched) || latest.contains(&touched.chunk));
        }
        self.chunks.sort_by_key(|touched| touched.at_ms);
        self.chunks.truncate(TRACE_CHUNKS_MAX);
    }

    /// Adds chunks of a start that was not a complete boot: chunks that no boot touched are added with a
    /// count of one boot. Returns whether there are any.
    pub fn add(&mut self, part: &Self) -> bool {
        let known: std::collections::HashSet<u64> = self.chunks.iter().map(|touched| touched.chunk).collect();
        let before = self.chunks.len();
        let new = part.chunks.iter().filter(|touched| !known.contains(&touched.chunk));
        self.chunks.extend(new.map(|touched| Touched { boots: 1, ..*touched }));
        self.chunks.sort_by_key(|touched| touched.at_ms);
        self.chunks.truncate(TRACE_CHUNKS_MAX);
        self.chunks.len() > before
    }

    /// The stored bytes of its chunks.
    pub fn stored_bytes(&self, manifest: &Manifest) -> u64 {
        self.chunks
            .iter()
            .filter_map(|touched| manifest.chunk(touched.chunk))
            .map(|chunk| u64::from(chunk.stored_bytes))
            .sum()
    }

    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + self.chunks.len() * ENTRY_BYTES + SUM_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&self.boots.to_le_bytes());
        out.extend_from_slice(&self.manifest.0);
        out.extend_from_slice(&u64_of(self.chunks.len()).to_le_bytes());
        for touched in &self.chunks {
            out.extend_from_slice(&touched.chunk.to_le_bytes());
            out.extend_from_slice(&touched.at_ms.to_le_bytes());
            out.extend_from_slice(&touched.boots.to_le_bytes());
        }
        let sum = Hash::of(&out);
        out.extend_from_slice(&sum.0);
        out
    }

    /// Parses and checks. The memory is proportional to the length of `bytes`, whatever they claim.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(damaged("its first bytes are wrong"));
        }
        let format = bytes.get(8..12).and_then(|b| b.first_chunk()).map(|b| u32::from_le_bytes(*b));
        match format {
            Some(FORMAT) => {}
            Some(other) => {
                let why = format!("the boot trace has format {other}; this release reads format {FORMAT}");
                return Err(ImageError::new(ImageErrorKind::Unsupported, why));
            }
            None => return Err(damaged("it is incomplete")),
        }
        let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>().ok_or_else(|| damaged("it is incomplete"))?;
        if Hash::of(body).0 != *sum {
            return Err(damaged("its checksum does not match"));
        }
        let (header, entries) =
            body.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| damaged("it is incomplete"))?;
        let (_, header) = header.split_at(12);
        let mut at = header;
        let boots = take_u32(&mut at);
        let (hash, mut at) = at.split_first_chunk::<32>().ok_or_else(|| damaged("it is incomplete"))?;
        let count = take_u64(&mut at);
        let (entries, rest) = entries.as_chunks::<ENTRY_BYTES>();
        let odd = count != u64_of(entries.len()) || !rest.is_empty() || entries.len() > TRACE_CHUNKS_MAX;
        if odd || !(1..=TRACE_BOOTS_MAX).contains(&boots) {
            return Err(damaged("its numbers are inconsistent"));
        }
        let entry = |bytes: &[u8; ENTRY_BYTES]| {
            let mut at = bytes.as_slice();
            let (chunk, at_ms) = (take_u64(&mut at), take_u32(&mut at));
            Touched { chunk, at_ms, boots: take_u32(&mut at) }
        };
        let chunks: Vec<Touched> = entries.iter().map(entry).collect();
        let ascending = chunks.is_sorted_by_key(|touched| touched.at_ms);
        let mut seen = std::collections::HashSet::with_capacity(chunks.len());
        let once = chunks.iter().all(|touched| seen.insert(touched.chunk));
        if !ascending || !once || chunks.iter().any(|t| t.boots == 0 || t.boots > boots) {
            return Err(damaged("its chunks are not in order"));
        }
        Ok(Self { manifest: Hash(*hash), boots, chunks })
    }
}

fn take_u32(rest: &mut &[u8]) -> u32 {
    let Some((head, tail)) = rest.split_first_chunk::<4>() else { return 0 };
    *rest = tail;
    u32::from_le_bytes(*head)
}

fn take_u64(rest: &mut &[u8]) -> u64 {
    let Some((head, tail)) = rest.split_first_chunk::<8>() else { return 0 };
    *rest = tail;
    u64::from_le_bytes(*head)
}

/// Records which chunks are touched first, for a limited time.
pub(crate) struct Recorder {
    manifest: Hash,
    seen: Vec<AtomicU64>,
    touched: Mutex<Vec<(u64, u32)>>,
    max_chunks: usize,
    started: Instant,
    lasts: Duration,
    open: AtomicBool,
}

impl Recorder {
    /// Starts to record touched chunks, for at most `lasts`.
    pub(crate) fn start(manifest: Hash, chunks: u64, chunk_bytes: u32, lasts: Duration) -> Self {
        let max_chunks = usize_of(BOOT_MAX_BYTES / u64::from(chunk_bytes).max(1)).min(TRACE_CHUNKS_MAX);
        let words = chunks.min(WATCHED_CHUNKS_MAX).div_ceil(64);
        Self {
            manifest,
            seen: (0..words).map(|_| AtomicU64::new(0)).collect(),
            touched: Mutex::default(),
            max_chunks,
            started: Instant::now(),
            lasts,
            open: AtomicBool::new(true),
        }
    }

    /// Records that a read touches this chunk.
    pub(crate) fn touch(&self, chunk: u64) {
        if !self.open.load(Ordering::Relaxed) {
            return;
        }
        let (word, bit) = (usize_of(chunk / 64), 1u64 << (chunk % 64));
        let Some(word) = self.seen.get(word) else { return };
        if word.load(Ordering::Relaxed) & bit != 0 || word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return;
        }
        let after = self.started.elapsed();
        if after > self.lasts {
            self.open.store(false, Ordering::Relaxed);
            return;
        }
        let mut touched = self.touched.lock();
        if touched.len() < self.max_chunks {
            touched.push((chunk, u32::try_from(after.as_millis()).unwrap_or(u32::MAX)));
        }
    }

    /// Ends recording, and returns the trace.
    pub(crate) fn finish(&self) -> Trace {
        self.open.store(false, Ordering::Relaxed);
        Trace::of_boot(self.manifest, &self.touched.lock())
    }

    /// Whether its time is over.
    pub(crate) fn is_over(&self) -> bool {
        self.started.elapsed() > self.lasts || !self.open.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trace(touched: &[(u64, u32)]) -> Trace {
        Trace::of_boot(Hash::of(b"m"), touched)
    }

    #[test]
    fn golden_bytes() {
        let bytes = trace(&[(7, 0), (3, 250)]).encode();
        assert_eq!(bytes.len(), 56 + 2 * 16 + 32);
        assert_eq!(&bytes[..16], b"HWTRACE\n\x01\0\0\0\x01\0\0\0");
        assert_eq!(bytes[16..48], Hash::of(b"m").0);
        assert_eq!(bytes[48..72], [2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(bytes[72..88], [3, 0, 0, 0, 0, 0, 0, 0, 250, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(Hash(bytes[88..].try_into().unwrap()), Hash::of(&bytes[..88]));
    }

    #[test]
    fn a_trace_of_an_unknown_version_is_refused_as_such() {
        for version in [0u32, 2, u32::MAX] {
            let mut bytes = trace(&[(7, 0)]).encode();
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            let end = bytes.len() - SUM_BYTES;
            let sum = Hash::of(&bytes[..end]);
            bytes[end..].copy_from_slice(&sum.0);
            let refused = Trace::decode(&bytes).unwrap_err();
            assert_eq!(refused.kind(), ImageErrorKind::Unsupported);
            assert!(refused.to_string().contains(&format!("has format {version};")), "{refused}");
        }
    }

    #[test]
    fn boots_are_merged_and_rare_chunks_dropped() {
        let mut merged = trace(&[(1, 0), (2, 100), (9, 50)]);
        for _ in 0..3 {
            merged.merge(&trace(&[(1, 0), (2, 300)]));
        }
        // Only one boot touched chunk 9; perhaps a backup read it at that time.
        let chunks =
            |trace: &Trace| trace.chunks.iter().map(|t| (t.chunk, t.at_ms, t.boots)).collect::<Vec<_>>();
        assert_eq!(chunks(&merged), [(1, 0, 4), (2, 249, 4)]);
        merged.merge(&trace(&[(1, 0), (2, 250), (8, 1)]));
        // It may become usual.
        assert_eq!(chunks(&merged), [(1, 0, 5), (8, 1, 1), (2, 249, 5)]);
        merged.merge(&trace(&[(1, 0), (2, 249)]));
        assert_eq!(chunks(&merged), [(1, 0, 6), (2, 249, 6)]);
        for _ in 0..100 {
            merged.merge(&trace(&[(1, 0), (3, 10)]));
        }
        assert_eq!(merged.chunks.iter().map(|t| t.chunk).collect::<Vec<_>>(), [1, 3]);
        assert!(merged.boots <= TRACE_BOOTS_MAX);
        assert_eq!(Trace::decode(&merged.encode()).unwrap(), merged);
    }

    #[test]
    fn a_recorder_records_each_chunk_once_and_ends() {
        let recorder = Recorder::start(Hash::of(b"m"), 100, 65_536, Duration::from_secs(3600));
        for chunk in [5, 3, 5, 99, 3, 1000] {
            recorder.touch(chunk);
        }
        assert!(!recorder.is_over());
        let chunks: Vec<u64> = recorder.finish().chunks.iter().map(|t| t.chunk).collect();
        assert_eq!(chunks, [5, 3, 99]);
        recorder.touch(6);
        assert_eq!(recorder.finish().chunks.len(), 3);
        // Chunks of half the limit: the third one is too many.
        let short = Recorder::start(Hash::of(b"m"), 100, 1 << 29, Duration::from_secs(3600));
        (0..5).for_each(|chunk| short.touch(chunk));
        assert_eq!(short.finish().chunks.len(), 2);
        let over = Recorder::start(Hash::of(b"m"), 100, 65_536, Duration::ZERO);
        std::thread::sleep(Duration::from_millis(1));
        over.touch(1);
        assert!(over.is_over() && over.finish().chunks.is_empty());
    }

    proptest! {
        #[test]
        fn any_changed_byte_is_noticed(at in 0usize..200, flip in 1u8.., cut in 0usize..120) {
            let good = trace(&[(1, 2), (3, 4), (5, 6)]).encode();
            let mut bytes = good.clone();
            let at = at % bytes.len();
            bytes[at] ^= flip;
            prop_assert!(Trace::decode(&bytes).is_err());
            prop_assert!(Trace::decode(&good[..cut % good.len()]).is_err());
        }
    }
}
