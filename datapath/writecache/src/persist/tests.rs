//! Tests of logged changes, and of a cache whose disk failed at a sync.

mod parts;

use std::fs::File;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use headwater_testkit::wait_until;

use super::format::{Encoder, Header, NO_BLOCK, Part, VERSION};
use super::{Change, MOST_IN_ALL, PersistentOptions};
use crate::cache::{
    Admission, Block, CacheOptions, Cleared, Found, LittleSpace, OverflowOptions, Residence, UnloggedBlocks,
    WriteCache, WriteResult,
};
use crate::fetch::Fetched;
use crate::host::Host;
use crate::overflow::buffering::Buffering;
use crate::overflow::encrypt::{ENCRYPTED_SLOT_BYTES, SlotKey};
use crate::overflow::io::{Direction, IoEngine, IoOp, open_engine};
use crate::units::{BlockNumber, Location, SLOT_COUNT, Slot};

#[test]
fn discards_side_by_side_are_one_change() {
    let range = |first, count, zero| Change::Range { first, count, zero };
    let mut last = range(8, 2, true);
    assert!((10..1000).all(|next| last.is_continued_by(&range(next, 1, true))));
    assert_eq!(last, range(8, 992, true));
    // Not of the other kind, not elsewhere, not longer than a count can express, and not in a slot.
    for next in
        [range(1000, 1, false), range(1001, 1, true), range(999, 1, true), range(1000, u32::MAX, true)]
    {
        assert!(!last.is_continued_by(&next), "{next:?}");
    }
    let slot = Change::Slot { block: 1000, position: 0, slot: 0, generation: 1 };
    assert!(!last.is_continued_by(&slot) && !{ slot }.is_continued_by(&range(1001, 1, true)));
    assert_eq!(last, range(8, 992, true));
}

/// The real engine, whose writes or syncs can be made to fail.
struct Failing {
    real: Arc<dyn IoEngine>,
    writes_fail: AtomicBool,
    syncs_fail: AtomicBool,
    /// Number of writes through the page cache.
    written: AtomicUsize,
}

impl Failing {
    fn new() -> Arc<Self> {
        let (writes_fail, syncs_fail) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { real: open_engine().unwrap(), writes_fail, syncs_fail, written: AtomicUsize::new(0) })
    }
}

impl IoEngine for Failing {
    fn submit(&self, op: IoOp) {
        if op.direction == Direction::Write && self.writes_fail.load(Ordering::SeqCst) {
            return (op.done)(Err(io::Error::from_raw_os_error(libc::EIO)), op.buffer);
        }
        self.real.submit(op);
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.written.fetch_add(1, Ordering::SeqCst);
        self.real.write_at(file, bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        if self.syncs_fail.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.real.sync(file)
    }
}

fn flush(cache: &WriteCache) -> bool {
    let (tell, told) = std::sync::mpsc::channel();
    cache.flush(Box::new(move |result| tell.send(result.is_ok()).unwrap()));
    told.recv().unwrap()
}

fn open(dir: &Path, host: &Host) -> Arc<WriteCache> {
    WriteCache::open(&options(dir), &host.shared()).unwrap()
}

fn options(dir: &Path) -> CacheOptions {
    CacheOptions {
        name: "test".into(),
        size_bytes: 16 << 30,
        ram_bytes: 64 << 20,
        weight: 100,
        overflow: Some(OverflowOptions {
            at: dir.to_owned(),
            limit_bytes: 64 << 20,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        }),
        pause_limit: Duration::from_secs(60),
        persistent: Some(PersistentOptions { name: "kept".into(), key: [7; 16], base_id: [1; 32] }),
        base: None,
    }
}

#[test]
fn a_map_of_another_version_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(u64::MAX).unwrap();
    let cache = open(dir.path(), &host);
    assert_eq!(cache.write(BlockNumber(3), &[8; 4096], Admission::New), WriteResult::Done);
    cache.close().unwrap();
    let map = dir.path().join("kept/map");
    let before = std::fs::read(&map).unwrap();
    for version in [0, VERSION + 1] {
        let mut bytes = before.clone();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        std::fs::write(&map, &bytes).unwrap();
        let refused = WriteCache::open(&options(dir.path()), &host.shared()).err().expect("it was opened");
        assert!(refused.to_string().contains(&format!("format version {version},")), "{refused}");
        assert!(std::fs::read(&map).unwrap() == bytes, "the map was changed");
    }
    std::fs::write(&map, &before).unwrap();
    let cache = open(dir.path(), &host);
    assert_eq!(cache.residence(BlockNumber(3)), Residence::Disk);
    cache.close().unwrap();
}

/// A map of this version, written by another program (Python's `cryptography`) according to the document
/// only.
const GOLDEN: &[u8] = include_bytes!("golden/map");

/// The contents of blocks 3, 10 to 12 and 20: each sector repeats one byte; `None` for the base's.
fn golden_sectors(block: u32) -> [Option<u8>; 8] {
    std::array::from_fn(|sector| match (block, sector) {
        (3, _) => Some(0x33),
        (10, 5..) | (11, ..5) => Some(0xa5),
        (12, 0 | 7) => Some(0xc7),
        (12, 1) | (20, _) => Some(0),
        _ => None,
    })
}

#[test]
fn the_golden_map_is_what_the_encoder_writes() {
    let key = SlotKey::from_bytes(&[7; 16]).unwrap();
    let (size_bytes, base_id, generation) = (16 << 30, [1; 32], 0x1122_3344_5566_7788);
    let key_check = key.check(VERSION, &Header::checked_part(size_bytes, &base_id)).unwrap();
    let mut bytes = Header { size_bytes, base_id, key_check, first_sequence: 5 }.encode().to_vec();
    let mut encoder = Encoder::new(5);
    let mut slots = vec![0; 3 * ENCRYPTED_SLOT_BYTES];
    // A slot has the contents of its sectors, and zeroes elsewhere.
    let plain = |blocks: [(u32, std::ops::Range<usize>); 2]| {
        let mut plain = vec![0; 4096];
        for (block, range) in blocks {
            for sector in range {
                plain[sector * 512..][..512].fill(golden_sectors(block)[sector].unwrap_or(0));
            }
        }
        plain
    };
    let plains =
        [plain([(3, 0..8), (3, 0..0)]), plain([(10, 5..8), (11, 0..5)]), plain([(12, 0..8), (12, 0..0)])];
    for ((slot, into), plain) in (0..).zip(slots.chunks_mut(ENCRYPTED_SLOT_BYTES)).zip(plains) {
        assert!(key.encrypt(generation, Slot(slot), &plain, into));
    }
    let part = |block, sectors, slot: Option<u16>| Part {
        block,
        sectors,
        slot: slot.map(|slot| (0, generation, slot)),
    };
    encoder.encrypted((0, generation), 0, &[3, NO_BLOCK, NO_BLOCK], &slots);
    encoder.parts(&[
        part(10, 0xe0, Some(1)),
        part(11, 0x1f, Some(1)),
        part(12, 0x81, Some(2)),
        part(12, 0x02, None),
    ]);
    encoder.ranges(true, &[(20, 1)]);
    encoder.commit(1, generation + (1 << 20));
    bytes.extend(encoder.finish().0);
    assert!(bytes == GOLDEN, "the format has changed: raise its version");
}

#[test]
fn the_golden_map_is_opened_and_read() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::DirBuilder::new().mode(0o700).create(dir.path().join("kept")).unwrap();
    std::fs::write(dir.path().join("kept/map"), GOLDEN).unwrap();
    let host = Host::start(u64::MAX).unwrap();
    for _ in 0..2 {
        let cache = open(dir.path(), &host);
        for block in [3, 10, 11, 12, 13, 20] {
            let sectors = read(&cache, BlockNumber(block));
            assert_eq!(sectors, golden_sectors(block), "block {block}");
        }
        cache.close().unwrap();
    }
}

/// The sectors of a block, each of which repeats one byte; `None`: the base's.
fn read(cache: &Arc<WriteCache>, block: BlockNumber) -> [Option<u8>; 8] {
    let mut bytes = [0; 4096];
    let mut sectors = [None; 8];
    let mut places = Vec::new();
    cache.read_parts(block, 0, &mut bytes, &mut |at, len, found| places.push((at, len, found)));
    for (at, len, found) in places {
        let bytes = match found {
            Found::Absent => continue,
            Found::Partial => panic!("a part of a partial block is a partial block"),
            Found::Done(_) => bytes[at..at + len].to_vec(),
            Found::Spilled(ticket) => {
                let (tell, told) = std::sync::mpsc::channel();
                cache.fetch(vec![ticket], move |_, fetched| {
                    let Fetched::Data(slot) = fetched else { panic!("the slot is damaged") };
                    tell.send(slot[at..at + len].to_vec()).unwrap();
                });
                told.recv().unwrap()
            }
        };
        for (sector, bytes) in (at / 512..).zip(bytes.chunks(512)) {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "sector {sector}");
            sectors[sector] = Some(bytes[0]);
        }
    }
    sectors
}

#[test]
fn a_spill_that_has_nothing_to_do_does_not_make_good_a_commit_that_failed() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Failing::new();
    let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
    let cache = open(dir.path(), &host);
    let persist = cache.persist.as_ref().unwrap();
    // More than go into the map only.
    for block in 0..32 {
        assert_eq!(cache.write(BlockNumber(block), &[8; 4096], Admission::New), WriteResult::Done);
    }
    engine.writes_fail.store(true, Ordering::SeqCst);
    assert!(!flush(&cache) && cache.is_failing() && !cache.is_broken());
    persist.ask_spill(true);
    wait_until("nothing is spilled", || {
        let requests = persist.requests.lock();
        !requests.spill && !requests.spilling
    });
    assert!(cache.is_failing(), "the last commit failed");
    engine.writes_fail.store(false, Ordering::SeqCst);
    assert!(flush(&cache) && !cache.is_failing());
}

#[test]
fn blocks_of_a_request_are_not_stored_in_front_of_one_before_them() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(u64::MAX).unwrap();
    let kept = open(dir.path(), &host);
    let options = CacheOptions { persistent: None, overflow: None, ..options(dir.path()) };
    let ephemeral = WriteCache::open(&options, &host.shared()).unwrap();
    // The third and the last have no slot yet; the last two belong to another request.
    let numbers = [0, 1, 2, 3, 4, 9, 10];
    let blocks = numbers.map(|number| Block { number: BlockNumber(number), data: &[8; 4096] });
    let stored = |cache: &WriteCache| {
        for number in [0, 1, 3, 4, 9] {
            assert_eq!(cache.write(BlockNumber(number), &[7; 4096], Admission::New), WriteResult::Done);
        }
        let mut done = [true; 7];
        cache.overwrite_together(&blocks, &mut done, |_, _| false);
        done
    };
    assert_eq!(stored(&kept), [true, true, false, false, false, true, false]);
    assert_eq!(stored(&ephemeral), [true, true, false, true, true, true, false]);
}

#[test]
fn discards_are_noted_within_a_bound_while_commits_fail() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Failing::new();
    let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
    let cache = open(dir.path(), &host);
    let persist = cache.persist.as_ref().unwrap();
    let clear =
        |block, slotless| cache.clear(BlockNumber(block), BlockNumber(block + 1), Location::ZERO, slotless);
    let residence = |block| cache.residence(BlockNumber(block));
    const LAST: u32 = (16 << 18) - 1;
    // More than go into the map only.
    for block in LAST - 31..=LAST {
        assert_eq!(cache.write(BlockNumber(block), &[8; 4096], Admission::New), WriteResult::Done);
    }
    engine.writes_fail.store(true, Ordering::SeqCst);
    assert!(!flush(&cache));
    // Scattered, so that no two of them are merged.
    let scattered = || (0..u32::try_from(MOST_IN_ALL).unwrap() * 3 / 2).map(|number| number * 2);
    for block in scattered() {
        assert_eq!(clear(block, UnloggedBlocks::Stay), Cleared::All);
    }
    let noted = persist.pending_changes();
    assert!(noted <= MOST_IN_ALL + 1, "{noted} changes are noted");
    // Blocks without a slot stay unchanged, or wait; blocks with a slot are cleared. A commit that is tried
    // frees space for a moment, until it fails.
    let mut last = scattered().next_back().unwrap();
    wait_until("blocks without a slot stay unchanged, or wait", || {
        last += 2;
        assert_eq!(clear(last, UnloggedBlocks::Stay), Cleared::All);
        (residence(last), clear(last, UnloggedBlocks::Wait))
            == (Residence::Absent, Cleared::UpTo(BlockNumber(last)))
    });
    assert_eq!((residence(0), clear(0, UnloggedBlocks::Wait)), (Residence::Zero, Cleared::All));
    assert_eq!((clear(LAST, UnloggedBlocks::Wait), residence(LAST)), (Cleared::All, Residence::Zero));
    engine.writes_fail.store(false, Ordering::SeqCst);
    assert!(flush(&cache));
    assert_eq!((clear(last, UnloggedBlocks::Wait), residence(last)), (Cleared::All, Residence::Zero));
}

#[test]
fn a_broken_cache_tries_no_commit_and_waits_for_none() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Failing::new();
    let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
    let cache = open(dir.path(), &host);
    let persist = cache.persist.as_ref().unwrap();
    let blocks = 3 * u32::from(SLOT_COUNT);
    for block in 0..blocks {
        assert_eq!(cache.write(BlockNumber(block), &[7; 4096], Admission::New), WriteResult::Done);
    }
    assert!(flush(&cache));
    engine.syncs_fail.store(true, Ordering::SeqCst);
    assert_eq!(cache.write(BlockNumber(0), &[8; 4096], Admission::New), WriteResult::Done);
    assert!(!flush(&cache) && cache.is_broken());
    // The disk works again, and would report success.
    engine.syncs_fail.store(false, Ordering::SeqCst);
    let commits = persist.commits();
    cache.clear(BlockNumber(0), BlockNumber(blocks), Location::ZERO, UnloggedBlocks::Stay);
    assert!(!persist.pending.lock().freed.is_empty(), "positions wait for a commit");
    persist.ask_for_room(true);
    persist.ask_for_commit();
    assert!(!persist.requests.lock().commit && !persist.brings_room());
    assert!(!flush(&cache));
    // No change was taken for a commit that would fail.
    let pending = persist.pending.lock();
    assert!(!pending.committing && !pending.freed.is_empty() && persist.commits() == commits);
}

/// A flush waits whenever the thread has answered the last one, so that the thread never spills.
#[test]
fn a_flush_of_few_blocks_writes_segments_where_ram_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::with_engine(u64::MAX, Failing::new()).unwrap();
    let cache = open(dir.path(), &host);
    cache.set_ram_bytes(16 << 20);
    // The host's thread, which requests spills, is stopped.
    let held = cache.persist.as_ref().unwrap().shut.lock();
    let mut block = 0;
    while cache.write(BlockNumber(block), &[8; 4096], Admission::New) == WriteResult::Done {
        block += 1;
        assert!(!block.is_multiple_of(16) || flush(&cache));
    }
    assert!(cache.wants_spill() && cache.snapshot().spilled_blocks == 0, "{:?}", cache.snapshot());
    // It needs no slot.
    cache.clear(BlockNumber(0), BlockNumber(1), Location::ZERO, UnloggedBlocks::Stay);
    assert!(flush(&cache) && !cache.wants_spill());
    assert!(cache.snapshot().spilled_blocks >= u64::from(block) - 1, "{:?}", cache.snapshot());
    assert!(cache.make_room());
    assert_eq!(cache.write(BlockNumber(block), &[8; 4096], Admission::New), WriteResult::Done);
    drop(held);
}

#[test]
fn slots_side_by_side_are_put_back_by_one_write() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::with_engine(u64::MAX, Failing::new()).unwrap();
    let cache = open(dir.path(), &host);
    for block in 0..40 {
        assert_eq!(cache.write(BlockNumber(block), &[8; 4096], Admission::New), WriteResult::Done);
        assert!(flush(&cache));
    }
    cache.close().unwrap();
    assert_eq!(cache.snapshot().spilled_blocks, 0);
    let engine = Failing::new();
    let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
    let cache = open(dir.path(), &host);
    // Writes of the map and of the data.
    let written = engine.written.load(Ordering::SeqCst);
    assert!((2..10).contains(&written), "{written} writes");
    cache.close().unwrap();
}
