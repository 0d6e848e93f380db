//! The volume as a [`Device`]: finishes requests that need no waiting, and hands the others to `read` and `write`.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use headwater_block::{
    Attempt, BLOCK_BYTES, ByteRange, Completion, CompletionQueue, Device, Extent, ExtentKind, Geometry,
    IoError, IoErrorKind, Op, Request, SharedSlice,
};
use headwater_writecache::{
    Admission, BaseImage, BlockNumber, CacheOptions, Cleared, Found, Handover, Host, Kind, Location, Now,
    OverflowOptions, ReadTally, Shortage, WriteCache, WriteResult,
};

use crate::clearing::Clearing;
use crate::counters::{Own, OwnCounters, VolumeCounters};
use crate::elide::Elision;
use crate::freeze::FrozenView;
use crate::latency::{Class, Latencies};
use crate::options::{CacheMode, VolumeOptions, disk_mode_ram_bytes};
use crate::pieces::{Piece, pieces, straddling};
use crate::read::Side;
use crate::together::SideBySide;
use crate::write::Clear;
use crate::{latency, read, write};

/// Discards and zero writes longer than this are executed on the volume's thread for long clears.
pub(crate) const LONG_CLEAR_BYTES: u64 = 1 << 30;

/// Zeroes for the ends of a zero write.
static ZEROES: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];

/// One machine's disk.
pub struct Volume {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) cache: Arc<WriteCache>,
    pub(crate) base: Arc<dyn Device>,
    /// The base for views: their reads are not the machine's.
    pub(crate) base_of_views: Arc<dyn Device>,
    pub(crate) geometry: Geometry,
    pub(crate) counters: OwnCounters,
    pub(crate) latencies: Latencies,
    /// The location of a cleared block: absent over an empty base, zero over an image.
    cleared: Location,
    pub(crate) clearing: Arc<Clearing>,
    elision: Option<Arc<Elision>>,
}

impl Volume {
    /// Opens a volume: with an empty write cache, or with the persistent one as it was left.
    pub fn open(options: &VolumeOptions, host: &Host) -> Result<Arc<Self>, IoError> {
        Self::with_cache(options, |cache| WriteCache::open(cache, &host.shared()))
    }

    /// Opens a volume with an empty write cache whose memory is in `file`, a memfd or a file of a tmpfs, so
    /// that another process can take it over ([`Volume::recover`]). The file is emptied first. Not for a
    /// persistent write cache.
    ///
    /// Dropping such a volume keeps its machine's writes for the next process, unless [`Volume::end`] was
    /// called before.
    pub fn open_in(file: File, options: &VolumeOptions, host: &Host) -> Result<Arc<Self>, IoError> {
        Self::with_cache(options, |cache| WriteCache::open_in(file, cache, &host.shared()))
    }

    /// Opens the volume of another process, which has ended, from the descriptors that [`Volume::handover`]
    /// gave there. `options` are those with which it was opened, over the same base; limits may differ. All
    /// answered writes are there.
    ///
    /// An error of kind [`IoErrorKind::Corrupt`] says that the file contradicts itself. After an error the
    /// file is unchanged.
    pub fn recover(left: Handover, options: &VolumeOptions, host: &Host) -> Result<Arc<Self>, IoError> {
        Self::with_cache(options, |cache| WriteCache::recover(left, cache, &host.shared()))
    }

    /// The descriptors with which another process can take over this volume when this process has ended, in
    /// whatever way. `None`: the volume's memory is not in a file.
    pub fn handover(&self) -> std::io::Result<Option<Handover>> {
        self.inner.cache.handover()
    }

    /// Marks the machine's writes as no longer needed: the memory file and the overflow are emptied when the
    /// volume's last user is dropped.
    pub fn end(&self) {
        self.inner.cache.end();
    }

    fn with_cache(
        options: &VolumeOptions,
        open: impl FnOnce(&CacheOptions) -> Result<Arc<WriteCache>, IoError>,
    ) -> Result<Arc<Self>, IoError> {
        let base = options.base.geometry();
        let ram_bytes = match options.mode {
            CacheMode::Disk => disk_mode_ram_bytes(options.persistent.is_some()),
            _ => options.ram_bytes,
        };
        let overflow = options.mode.has_disk().then(|| OverflowOptions {
            at: options.cache_dir.clone(),
            limit_bytes: options.disk_bytes,
            buffering: options.buffering,
            little_space: options.little_space,
        });
        let whole = ByteRange::new(0, base.size_bytes)
            .ok_or_else(|| IoError::new(IoErrorKind::Invalid, "the image is too large"))?;
        let first = if whole.is_empty() { None } else { options.base.extents(whole, 1)?.first().copied() };
        let is_empty = first.is_some_and(|e| e.kind == ExtentKind::Hole && e.len >= whole.len());
        let elision = Elision::new(&options.base, is_empty);
        let cache_options = CacheOptions {
            name: options.name.clone(),
            size_bytes: base.size_bytes,
            ram_bytes,
            weight: options.weight,
            overflow,
            pause_limit: options.pause_limit,
            persistent: options.persistent.clone(),
            base: elision.clone().map(|elision| elision as Arc<dyn BaseImage>),
        };
        let cache = open(&cache_options)?;
        let geometry = Geometry {
            size_bytes: base.size_bytes,
            logical_block_bytes: base.logical_block_bytes.min(BLOCK_BYTES),
            physical_block_bytes: BLOCK_BYTES,
            read_only: false,
            // Only a persistent cache has something to flush.
            volatile_cache: cache.is_persistent(),
        };
        let inner = Inner {
            cache,
            base: Arc::clone(&options.base),
            base_of_views: Arc::clone(&options.base)
                .unrecorded()
                .unwrap_or_else(|| Arc::clone(&options.base)),
            geometry,
            counters: OwnCounters::default(),
            latencies: Latencies::default(),
            elision,
            clearing: Arc::default(),
            cleared: if is_empty { Location::ABSENT } else { Location::ZERO },
        };
        Ok(Arc::new(Self { inner: Arc::new(inner) }))
    }

    /// The counters at this moment.
    pub fn counters(&self) -> VolumeCounters {
        self.inner.counters.view(self.inner.latencies.view(), self.inner.cache.snapshot())
    }

    /// A random number that identifies a persistent write cache, whatever its name is; made with the cache.
    pub fn cache_id(&self) -> Option<[u8; 16]> {
        self.inner.cache.persistent_id()
    }

    /// Whether the persistent write cache was made by this open.
    pub fn has_new_cache(&self) -> bool {
        self.inner.cache.is_new()
    }

    /// Refuses limits that a volume which is opened now could not have. `None`: the limit stays.
    pub fn check_limits(&self, ram_bytes: Option<u64>, disk_bytes: Option<u64>) -> Result<(), IoError> {
        self.inner.cache.check_limits(ram_bytes, disk_bytes)
    }

    /// Sets the command that log messages about missing space advise, to raise the limits. Only the first
    /// call has an effect.
    pub fn advise(&self, command: String) {
        self.inner.cache.advise(command);
    }

    /// Changes the RAM limit; takes effect at once.
    pub fn set_ram_bytes(&self, ram_bytes: u64) {
        self.inner.cache.set_ram_bytes(ram_bytes);
    }

    /// Changes the weight among the volumes of the host.
    pub fn set_weight(&self, weight: u32) {
        self.inner.cache.set_weight(weight);
    }

    /// The weight among the volumes of the host.
    pub fn weight(&self) -> u32 {
        self.inner.cache.weight()
    }

    /// Changes the disk limit; takes effect at once.
    pub fn set_disk_bytes(&self, disk_bytes: u64) {
        self.inner.cache.set_disk_bytes(disk_bytes);
    }

    /// How many writes wait for space or were refused, at this moment.
    pub fn shortage(&self) -> Shortage {
        self.inner.cache.shortage()
    }

    /// Whether all flushes fail until the volume is opened again: the disk of its persistent write cache
    /// failed at a flush, and writes since the last successful flush may be lost.
    pub fn is_broken(&self) -> bool {
        self.inner.cache.is_broken()
    }

    /// Whether the last write to the disk of a persistent write cache failed or found no space.
    pub fn is_failing(&self) -> bool {
        self.inner.cache.is_failing()
    }

    /// Keeps the state of this moment while the machine continues: all requests that were answered before are
    /// in it, and none that begin afterwards. Overwriting a block of it takes new space in the write cache.
    /// Fails while an earlier view exists.
    pub fn freeze(&self) -> Result<Arc<FrozenView>, IoError> {
        FrozenView::new(&self.inner)
    }

    /// Refuses writes that wait for space, now and from now on. RAM, overflow and key are freed when the
    /// volume's last user is dropped. With a persistent write cache, all writes, discards and zero writes are
    /// refused from now on; all answered ones are made durable, and the cache can be opened again when this
    /// returns. A failure is logged: writes since the last successful flush may be lost.
    pub fn close(&self) {
        if let Err(error) = self.try_close() {
            tracing::error!(%error, "a persistent write cache could not be closed in order; writes since the last successful flush may be lost");
        }
    }

    /// Like [`Volume::close`], but returns the error instead of logging it.
    pub fn try_close(&self) -> Result<(), IoError> {
        self.inner.cache.close()
    }
}

impl Inner {
    /// Answers a read without waiting. `None`: it must wait.
    fn read_now(&self, range: ByteRange, into: &mut [u8]) -> Result<Option<Class>, IoError> {
        let mut absent: Option<ByteRange> = None;
        // Counted when all of it is served: a request that must wait is served again as a whole.
        let (mut tally, mut image_bytes) = (ReadTally::default(), 0);
        for piece in pieces(range) {
            let Some(part) = into.get_mut(piece.start..piece.start + piece.len) else {
                return Err(bad_buffer());
            };
            let mut found = self.cache.read(piece.block, piece.skip, part);
            if found == Found::Partial {
                found =
                    read::of_one_kind(&mut |each| self.cache.read_parts(piece.block, piece.skip, part, each));
            }
            match found {
                Found::Done(from) => {
                    tally.add(from);
                    if let Some(run) = absent.take() {
                        if read_base_now(&self.base, range, run, into)? == Attempt::MustWait {
                            return Ok(None);
                        }
                        image_bytes += run.len();
                    }
                }
                Found::Absent => absent = extend(absent, piece),
                Found::Spilled(_) | Found::Partial => return Ok(None),
            }
        }
        if let Some(run) = absent {
            if read_base_now(&self.base, range, run, into)? == Attempt::MustWait {
                return Ok(None);
            }
            image_bytes += run.len();
        }
        self.cache.count_reads(tally);
        if image_bytes > 0 {
            self.counters.add(Own::ImageBytes, image_bytes);
        }
        Ok(Some(Class::at_once(tally, image_bytes)))
    }

    fn write_now(&self, range: ByteRange, from: &[u8]) -> Result<Attempt, IoError> {
        let mut stored = SideBySide::default();
        for piece in pieces(range) {
            if piece.is_whole() && stored.has(self, &piece, from) {
                continue;
            }
            let Some(part) = from.get(piece.start..piece.start + piece.len) else { return Err(bad_buffer()) };
            if piece.start == 0
                && let Some(stored) = self.write_pair_now(range, from)
            {
                return Ok(if stored { Attempt::Done } else { Attempt::MustWait });
            }
            let admission = if piece.start == 0 { Admission::New } else { Admission::Rest };
            if !self.write_piece_now(&piece, part, admission) {
                return Ok(Attempt::MustWait);
            }
        }
        Ok(Attempt::Done)
    }

    fn write_piece_now(&self, piece: &Piece, data: &[u8], admission: Admission) -> bool {
        self.store_now(|| {
            Some(if piece.is_whole() {
                self.write_whole(piece.block, data, admission)
            } else {
                self.write_part(piece, data, admission)
            })
        })
        .unwrap_or(false)
    }

    /// Stores a request that covers the end of one block and the beginning of the next. Returns whether there
    /// was space; `None`: its pieces are written one by one.
    fn write_pair_now(&self, range: ByteRange, from: &[u8]) -> Option<bool> {
        let first = straddling(range)?;
        self.store_now(|| self.write_pair(&first, from, Admission::New))
    }

    /// Stores a write if that needs no waiting. Returns whether it was stored.
    fn store_now(&self, write: impl Fn() -> Option<WriteResult>) -> Option<bool> {
        loop {
            match write()? {
                WriteResult::Done => return Some(true),
                // Dropping a clean copy frees RAM without I/O. No new slot is taken ahead of waiting writes.
                WriteResult::NoRoom if self.cache.make_room() => {}
                WriteResult::NoRoom
                | WriteResult::Queued
                | WriteResult::Throttled
                | WriteResult::NeedOld(_)
                | WriteResult::Closed => {
                    return Some(false);
                }
            }
        }
    }

    /// Stores a part of a block, unless the image is known to hold the same bytes.
    pub(crate) fn write_part(&self, piece: &Piece, data: &[u8], admission: Admission) -> WriteResult {
        self.cache.write_part(piece.block, piece.skip, data, admission, || self.is_same_part(piece, data))
    }

    /// Like [`Inner::write_part`], for the end of a block and the beginning of the next one.
    pub(crate) fn write_pair(&self, first: &Piece, data: &[u8], admission: Admission) -> Option<WriteResult> {
        self.cache.write_pair(first.block, first.skip, data, admission, || self.is_same_part(first, data))
    }

    /// Whether the image is known to hold `data` from the start of the piece on.
    fn is_same_part(&self, piece: &Piece, data: &[u8]) -> bool {
        match &self.elision {
            Some(elision) => elision.is_same_part(piece, data),
            None => self.cleared == Location::ABSENT && data.iter().all(|byte| *byte == 0),
        }
    }

    /// Stores a whole block, unless the image is known to hold the same bytes.
    #[inline]
    pub(crate) fn write_whole(&self, block: BlockNumber, data: &[u8], admission: Admission) -> WriteResult {
        self.cache.write_unless(block, data, admission, |now| self.is_same(block, data, now))
    }

    /// Whether the image is known to hold the same bytes.
    #[inline]
    pub(crate) fn is_same(&self, block: BlockNumber, data: &[u8], now: Now) -> bool {
        self.elision.as_ref().is_some_and(|elision| elision.is_same(block, data, now))
    }

    fn clear_now(&self, range: ByteRange, what: Clear) -> Attempt {
        let (head, whole, tail) = split(range, self.geometry.size_bytes);
        // First the whole blocks: they free space, which the ends may need.
        if self.clear_blocks(whole, what) != Cleared::All {
            return Attempt::MustWait;
        }
        for edge in pieces(head).chain(pieces(tail)) {
            let Some(zeroes) = ZEROES.get(..edge.len) else { return Attempt::MustWait };
            if !self.write_piece_now(&edge, zeroes, Admission::New) {
                return Attempt::MustWait;
            }
        }
        Attempt::Done
    }

    /// The completion of a write or zero write that may wait; counts it when it is answered. A write that is
    /// refused for lack of space is not counted here: the cache counts refusals, and front-ends and machines
    /// may repeat such a write each second.
    fn then_count(
        self: &Arc<Self>,
        done: Completion,
        count: impl FnOnce(&Self) + Send + 'static,
    ) -> Completion {
        let this = Arc::clone(self);
        Completion::new(move |outcome| {
            if !matches!(&outcome.result, Err(error) if error.kind() == IoErrorKind::NoSpace) {
                count(&this);
            }
            drop(this);
            done.complete(outcome.result, outcome.buffer);
        })
    }

    /// The completion of a write with FUA: flushes the data, then answers.
    fn then_flush(&self, fua: bool, done: Completion) -> Completion {
        if !fua || !self.cache.is_persistent() {
            return done;
        }
        let cache = Arc::clone(&self.cache);
        Completion::new(move |outcome| match outcome.result {
            Err(error) => done.complete(Err(error), outcome.buffer),
            Ok(()) => {
                let buffer = outcome.buffer;
                cache.flush(Box::new(move |result| done.complete(result, buffer)));
            }
        })
    }

    pub(crate) fn clear_blocks(&self, whole: ByteRange, what: Clear) -> Cleared {
        let number = |block| BlockNumber(u32::try_from(block).unwrap_or(u32::MAX));
        let (first, end) = (number(whole.first_block()), number(whole.end_block()));
        self.cache.clear(first, end, self.cleared, what.slotless())
    }
}

/// Reads the part `run` of the request `range` from the base, if that needs no waiting.
pub(crate) fn read_base_now(
    base: &Arc<dyn Device>,
    range: ByteRange,
    run: ByteRange,
    into: &mut [u8],
) -> Result<Attempt, IoError> {
    let part = usize::try_from(run.offset() - range.offset())
        .ok()
        .zip(usize::try_from(run.len()).ok())
        .and_then(|(start, len)| into.get_mut(start..start + len))
        .ok_or_else(bad_buffer)?;
    base.try_now(Op::Read { range: run, into: part })
}

/// Adds a piece to a run of absent ones.
pub(crate) fn extend(run: Option<ByteRange>, piece: Piece) -> Option<ByteRange> {
    let piece = piece.range()?;
    match run {
        Some(run) => ByteRange::new(run.offset(), run.len() + piece.len()),
        None => Some(piece),
    }
}

pub(crate) fn closed() -> IoError {
    IoError::new(IoErrorKind::Closed, "the volume is closed")
}

pub(crate) fn bad_buffer() -> IoError {
    IoError::new(IoErrorKind::Invalid, "the request's buffer does not fit its range")
}

/// Cuts a range into a partial head, whole blocks, and a partial tail. A last block that the volume's end
/// cuts counts as whole.
pub(crate) fn split(range: ByteRange, size_bytes: u64) -> (ByteRange, ByteRange, ByteRange) {
    let block = u64::from(BLOCK_BYTES);
    let first = range.offset().next_multiple_of(block).min(range.end());
    let last = if range.end() == size_bytes { range.end() } else { range.end() - range.end() % block };
    let last = last.max(first);
    let part = |from: u64, to: u64| ByteRange::new(from, to - from).unwrap_or(range);
    (part(range.offset(), first), part(first, last), part(last, range.end()))
}

impl Device for Volume {
    fn geometry(&self) -> Geometry {
        self.inner.geometry
    }

    fn write_together(&self, writes: &[(ByteRange, &[u8])], done: &mut [bool]) {
        self.inner.write_together(writes, done);
    }

    #[inline]
    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        let inner = &*self.inner;
        match op {
            Op::Read { range, into } => {
                let sampled = latency::sample();
                let Some(class) = inner.read_now(range, into)? else { return Ok(Attempt::MustWait) };
                if let Some(since) = sampled {
                    inner.latencies.sampled(class, since);
                }
                inner.counters.read(class, range.len());
                Ok(Attempt::Done)
            }
            Op::Write { fua: true, .. } | Op::WriteZeroes { fua: true, .. }
                if inner.geometry.volatile_cache =>
            {
                Ok(Attempt::MustWait)
            }
            Op::Write { range, from, .. } => {
                let sampled = latency::sample();
                let attempt = inner.write_now(range, from)?;
                if attempt == Attempt::Done {
                    if let Some(since) = sampled {
                        inner.latencies.sampled(Class::Write, since);
                    }
                    inner.counters.add(Own::WriteOps, 1);
                    inner.counters.add(Own::WriteBytes, range.len());
                }
                Ok(attempt)
            }
            Op::WriteZeroes { range, .. } | Op::Discard { range } if range.len() <= LONG_CLEAR_BYTES => {
                let is_discard = matches!(op, Op::Discard { .. });
                let attempt =
                    inner.clear_now(range, if is_discard { Clear::Discard } else { Clear::ZeroWrite });
                if attempt == Attempt::Done {
                    inner.counters.add(Own::DiscardOps, 1);
                }
                Ok(attempt)
            }
            Op::WriteZeroes { .. } | Op::Discard { .. } => Ok(Attempt::MustWait),
            // Nothing has to become durable in a write cache that is not persistent.
            Op::Flush if inner.cache.is_durable() => Ok(Attempt::Done),
            Op::Flush => Ok(Attempt::MustWait),
        }
    }

    /// Shares the image's pages of the blocks that the machine has not changed, if the image can.
    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let sampled = latency::sample();
        let inner = &*self.inner;
        if !is_absent(range, &|first, end| inner.cache.run_at(first, end))
            || !inner.base.read_shared(range, parts)
        {
            return false;
        }
        inner.counters.read(Class::ReadImage, range.len());
        inner.counters.add(Own::ImageBytes, range.len());
        if let Some(since) = sampled {
            inner.latencies.sampled(Class::ReadImage, since);
        }
        true
    }

    fn submit(&self, request: Request, done: Completion) {
        let inner = &self.inner;
        match request {
            Request::Read { range, buffer } => read::start(inner, Side::Now, range, buffer, done),
            Request::Write { range, buffer, fua } => {
                let since = Instant::now();
                let done = inner.then_count(done, move |inner| {
                    inner.counters.add(Own::WriteOps, 1);
                    inner.counters.add(Own::WriteBytes, range.len());
                    inner.latencies.waited(Class::WriteWaited, since);
                });
                write::start(inner, range, buffer, inner.then_flush(fua, done));
            }
            Request::WriteZeroes { range, fua, .. } => {
                let done = inner.then_count(done, |inner| inner.counters.add(Own::DiscardOps, 1));
                write::start_clear(inner, range, Clear::ZeroWrite, inner.then_flush(fua, done));
            }
            Request::Discard { range } => {
                inner.counters.add(Own::DiscardOps, 1);
                write::start_clear(inner, range, Clear::Discard, done);
            }
            Request::Flush => inner.cache.flush(Box::new(move |result| done.complete(result, Vec::new()))),
            Request::Prefetch { range } => inner.base.submit(Request::Prefetch { range }, done),
        }
    }

    fn completion_queue(&self) -> Option<Box<dyn CompletionQueue>> {
        self.inner.cache.completion_queue()
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.inner.extents(range, max_extents, |first, end| self.inner.cache.run_at(first, end))
    }
}

impl Inner {
    /// The extents of a range, data and holes: from the write cache, and from the base for blocks that the cache
    /// does not have. `run_at` returns the kind of the first block, and how many blocks have that kind.
    pub(crate) fn extents(
        &self,
        range: ByteRange,
        max_extents: usize,
        run_at: impl Fn(BlockNumber, BlockNumber) -> (Kind, u32),
    ) -> Result<Vec<Extent>, IoError> {
        let mut found: Vec<Extent> = Vec::new();
        let mut at = range.offset();
        while at < range.end() && found.len() < max_extents.max(1) {
            let rest = ByteRange::new(at, range.end() - at).ok_or_else(bad_buffer)?;
            let (kind, run) = first_run(rest, &run_at);
            match kind {
                Kind::Data => push(&mut found, Extent { len: run.len(), kind: ExtentKind::Data }),
                Kind::Zero => push(&mut found, Extent { len: run.len(), kind: ExtentKind::Hole }),
                Kind::Absent => {
                    let below = self.base.extents(run, max_extents)?;
                    let covered: u64 = below.iter().map(|e| e.len).sum();
                    below.into_iter().for_each(|extent| push(&mut found, extent));
                    at += covered.clamp(1, run.len());
                    continue;
                }
            }
            at += run.len();
        }
        found.truncate(max_extents.max(1));
        Ok(found)
    }
}

/// The first part of a range whose blocks are all of one kind.
pub(crate) fn first_run(
    range: ByteRange,
    run_at: &impl Fn(BlockNumber, BlockNumber) -> (Kind, u32),
) -> (Kind, ByteRange) {
    let number = |block: u64| BlockNumber(u32::try_from(block).unwrap_or(u32::MAX));
    let (kind, blocks) = run_at(number(range.first_block()), number(range.end_block()));
    let run_end = (range.first_block() + u64::from(blocks)) * u64::from(BLOCK_BYTES);
    (kind, range.clipped_to(run_end.max(range.offset() + 1).min(range.end())))
}

/// Whether the whole range comes from the image.
pub(crate) fn is_absent(range: ByteRange, run_at: &impl Fn(BlockNumber, BlockNumber) -> (Kind, u32)) -> bool {
    let (kind, run) = first_run(range, run_at);
    kind == Kind::Absent && run.len() == range.len()
}

/// Appends an extent, joined with the last one where both are of one kind.
fn push(found: &mut Vec<Extent>, extent: Extent) {
    match found.last_mut() {
        Some(last) if last.kind == extent.kind => last.len += extent.len,
        _ => found.push(extent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_split_into_edges_and_whole_blocks() {
        let cut = |offset, len| {
            let (a, b, c) = split(ByteRange::new(offset, len).unwrap(), 100 * 512);
            ((a.offset(), a.len()), (b.offset(), b.len()), (c.offset(), c.len()))
        };
        assert_eq!(cut(512, 512), ((512, 512), (1024, 0), (1024, 0)));
        assert_eq!(cut(512, 8192), ((512, 3584), (4096, 4096), (8192, 512)));
        assert_eq!(cut(49152, 2048), ((49152, 0), (49152, 2048), (51200, 0)));
    }
}
