//! Partial blocks in a persistent cache: logged changes of them are bounded, and flushed ones are there after
//! opening.

use std::os::unix::fs::MetadataExt;

use super::*;
use crate::cache::Old;
use crate::persist::MOST_CHANGES;

/// The byte of the base, wherever a part of it is fetched.
const BASE: u8 = 0xba;

const NOTHING: [Option<u8>; 8] = [None; 8];

/// Writes sectors of a block, all of one byte. Any other part that it needs is fetched, and is the base's.
fn put(cache: &WriteCache, block: u32, sectors: std::ops::Range<usize>, byte: u8) -> WriteResult {
    let (block, skip, data) = (BlockNumber(block), sectors.start * 512, vec![byte; sectors.len() * 512]);
    match cache.write_part(block, skip, &data, Admission::Waited, || false) {
        WriteResult::NeedOld(Old::Absent) => {
            cache.merge(block, skip, &data, &[(Old::Absent, vec![BASE; 4096])], Admission::Waited)
        }
        other => other,
    }
}

/// Writes the last three sectors of a block and the first five of the next one, into one slot.
fn put_pair(cache: &WriteCache, block: u32, byte: u8) {
    let wrote = cache.write_pair(BlockNumber(block), 5 * 512, &[byte; 4096], Admission::Waited, || false);
    assert_eq!(wrote, Some(WriteResult::Done));
}

/// Changes that make distant blocks absent, which they are already: no two of them are merged.
fn absent(count: usize) -> impl Iterator<Item = Change> {
    (1 << 20..).step_by(2).map(|first| Change::Range { first, count: 1, zero: false }).take(count)
}

#[test]
fn further_sectors_of_a_slot_are_one_change() {
    let sectors =
        |block, sectors, slot, generation| Change::Sectors { block, sectors, position: 3, slot, generation };
    let zero = |block, sectors| Change::ZeroSectors { block, sectors };
    let mut last = sectors(8, 0x01, 5, 9);
    assert!(last.is_continued_by(&sectors(8, 0x82, 5, 9)));
    assert_eq!(last, sectors(8, 0x83, 5, 9));
    let elsewhere = Change::Sectors { block: 8, sectors: 4, position: 4, slot: 5, generation: 9 };
    let whole = Change::Slot { block: 8, position: 3, slot: 5, generation: 9 };
    for next in [sectors(9, 4, 5, 9), sectors(8, 4, 6, 9), sectors(8, 4, 5, 10), elsewhere, whole, zero(8, 4)]
    {
        assert!(!last.is_continued_by(&next) && !{ next }.is_continued_by(&last), "{next:?}");
    }
    let mut last = zero(8, 0x01);
    assert!(last.is_continued_by(&zero(8, 0x10)) && !last.is_continued_by(&zero(9, 0x10)));
    assert_eq!(last, zero(8, 0x11));
}

#[test]
fn notes_of_further_sectors_fit_into_the_claimed_map() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(u64::MAX).unwrap();
    let cache = open(dir.path(), &host);
    let persist = cache.persist.as_ref().unwrap();
    // The host's thread, which claims space, is stopped.
    let held = persist.shut.lock();
    cache.overflow.as_ref().unwrap().prepare(16).unwrap();
    let blocks = (0..).take_while(|block| put(&cache, *block, 0..1, 1) == WriteResult::Done).count();
    assert!(blocks > 10 * usize::from(SLOT_COUNT), "{blocks} blocks");
    // One sector after another of all blocks, so that no write continues the previous one.
    let mut accepted = vec![1; blocks];
    for sector in 1..8 {
        for (block, accepted) in (0..).zip(&mut accepted) {
            match put(&cache, block, sector..sector + 1, 1) {
                WriteResult::Done => *accepted |= 1 << sector,
                WriteResult::NoRoom => {}
                other => panic!("{other:?}"),
            }
        }
    }
    let claimed = persist.room.claimed_end();
    assert!(flush(&cache));
    let len = std::fs::metadata(dir.path().join("kept/map")).unwrap().len();
    assert!(len <= claimed, "the map has {len} bytes, and had space for {claimed}");
    // Some blocks have fewer further sectors than others: the map has no space for more changes.
    assert!(accepted.contains(&0x03) && accepted.iter().all(|sectors| *sectors >= 0x03));
    drop(held);
    cache.close().unwrap();
    let cache = open(dir.path(), &host);
    for (block, sectors) in (0..).zip(&accepted).step_by(41) {
        let expected = std::array::from_fn(|sector| (sectors >> sector & 1 == 1).then_some(1));
        assert_eq!(read(&cache, BlockNumber(block)), expected, "block {block}");
    }
    cache.close().unwrap();
}

#[test]
fn partial_blocks_change_while_no_more_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(u64::MAX).unwrap();
    let cache = open(dir.path(), &host);
    let persist = cache.persist.as_ref().unwrap();
    // The host's thread, which requests commits, is stopped.
    let held = persist.shut.lock();
    for block in [0, 1, 2, 3] {
        assert_eq!(put(&cache, block, 0..1, 0), WriteResult::Done);
    }
    for block in [10, 11, 12, 13] {
        assert_eq!(put(&cache, block, 0..1, 1), WriteResult::Done);
    }
    put_pair(&cache, 20, 2);
    assert_eq!(cache.map.partial_blocks(), 10);
    persist.pending.lock().changes.extend(absent(MOST_CHANGES));
    assert!(!persist.takes_notes());
    let noted = persist.pending_changes();

    // A zero part of an absent block and of one without a slot: the rest is fetched, and both become whole.
    assert_eq!((put(&cache, 5, 1..2, 0), put(&cache, 0, 1..2, 0)), (WriteResult::Done, WriteResult::Done));
    // Further sectors take another slot.
    let slots = cache.map.partial_slots();
    assert_eq!(put(&cache, 10, 1..2, 3), WriteResult::Done);
    assert_eq!(cache.map.partial_slots(), slots + 1);
    let clear = |range: std::ops::Range<u32>, to, slotless| {
        cache.clear(BlockNumber(range.start), BlockNumber(range.end), to, slotless)
    };
    // Discards and zero writes: partial blocks are cleared; an absent block waits, or stays unchanged.
    assert_eq!(clear(11..12, Location::ABSENT, UnloggedBlocks::Stay), Cleared::All);
    assert_eq!(clear(1..3, Location::ZERO, UnloggedBlocks::Wait), Cleared::All);
    assert_eq!(clear(3..5, Location::ZERO, UnloggedBlocks::Wait), Cleared::UpTo(BlockNumber(3)));
    assert_eq!(clear(12..15, Location::ZERO, UnloggedBlocks::Stay), Cleared::All);
    assert_eq!(clear(20..21, Location::ZERO, UnloggedBlocks::Wait), Cleared::All);
    assert_eq!(cache.write(BlockNumber(21), &[0; 4096], Admission::Waited), WriteResult::Done);
    assert!(persist.pending_changes() <= noted + 12, "{} were {noted}", persist.pending_changes());

    let holds = |cache: &Arc<WriteCache>| {
        let base = Some(BASE);
        let zero = [Some(0); 8];
        for (block, expected) in [
            (0, [Some(0), Some(0), base, base, base, base, base, base]),
            (1, zero),
            (2, zero),
            (3, [Some(0), None, None, None, None, None, None, None]),
            (4, NOTHING),
            (5, [base, Some(0), base, base, base, base, base, base]),
            (10, [Some(1), Some(3), None, None, None, None, None, None]),
            (11, NOTHING),
            (12, zero),
            (13, zero),
            (14, NOTHING),
            (20, zero),
            (21, zero),
        ] {
            assert_eq!(read(cache, BlockNumber(block)), expected, "block {block}");
        }
    };
    holds(&cache);
    drop(held);
    cache.close().unwrap();
    let cache = open(dir.path(), &host);
    holds(&cache);
    cache.close().unwrap();
}

/// The first commit fails between the writes of two blocks into a slot and the write with which one of them
/// leaves it.
#[test]
fn a_shared_slot_is_left_after_a_commit_that_failed() {
    // The next commit adds to the map, or replaces it.
    for replaced in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let engine = Failing::new();
        let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
        let cache = open(dir.path(), &host);
        let map = || std::fs::metadata(dir.path().join("kept/map")).unwrap();
        if replaced {
            absent(20_000).for_each(|change| cache.persist.as_ref().unwrap().note(change));
            assert!(flush(&cache));
        }
        let before = map();
        put_pair(&cache, 7, 1);
        put_pair(&cache, 30, 2);
        assert_eq!(put(&cache, 40, 0..1, 3), WriteResult::Done);
        // More than go into the map only.
        for block in 100..132 {
            assert_eq!(cache.write(BlockNumber(block), &[8; 4096], Admission::Waited), WriteResult::Done);
        }
        engine.writes_fail.store(true, Ordering::SeqCst);
        assert!(!flush(&cache) && !cache.is_broken());
        assert_eq!(cache.write(BlockNumber(7), &[4; 4096], Admission::Waited), WriteResult::Done);
        cache.clear(BlockNumber(31), BlockNumber(32), Location::ABSENT, UnloggedBlocks::Stay);
        assert_eq!(put(&cache, 40, 3..5, 5), WriteResult::Done);
        engine.writes_fail.store(false, Ordering::SeqCst);
        assert!(flush(&cache));
        assert_eq!(map().ino() != before.ino(), replaced);
        // The slots that were left are free, and only these.
        let live = |cache: &WriteCache| {
            let segment = |number| cache.segments.get(crate::units::SegmentId(number));
            (0..16).filter_map(segment).map(|segment| segment.live()).sum::<u32>()
        };
        assert_eq!(live(&cache), 32 + 5);
        cache.close().unwrap();
        let cache = open(dir.path(), &host);
        assert_eq!(live(&cache), 32 + 5);
        for (block, expected) in [
            (7, [Some(4); 8]),
            (8, [Some(1), Some(1), Some(1), Some(1), Some(1), None, None, None]),
            (30, [None, None, None, None, None, Some(2), Some(2), Some(2)]),
            (31, NOTHING),
            (40, [Some(3), None, None, Some(5), Some(5), None, None, None]),
            (131, [Some(8); 8]),
        ] {
            assert_eq!(read(&cache, BlockNumber(block)), expected, "block {block}");
        }
        cache.close().unwrap();
    }
}
