//! Tests of the log's bookkeeping.

use std::sync::Arc;

use super::*;

/// A log with this many full segments, the oldest first.
fn full_segments(count: u32) -> (Log, SegmentTable, Arc<MemoryPool>) {
    let (mut log, table, pool) = (Log::default(), SegmentTable::new(count), MemoryPool::new());
    for number in 0..count {
        log.begin(&table, Stream::Fresh, (pool.take().unwrap(), None)).unwrap();
        let first = number * u32::from(SLOT_COUNT);
        for block in first..first + u32::from(SLOT_COUNT) {
            log.claim(&table, Stream::Fresh, BlockNumber(block)).unwrap();
        }
        // A claim that finds no slot closes the segment.
        assert!(log.claim(&table, Stream::Fresh, BlockNumber(0)).is_none());
    }
    assert_eq!(log.dirty_segments, count);
    (log, table, pool)
}

#[test]
fn what_died_before_anybody_took_it_out_is_not_queued_for_ever() {
    let (mut log, table, pool) = (Log::default(), SegmentTable::new(4), MemoryPool::new());
    for _ in 0..2000 {
        log.begin(&table, Stream::Fresh, (pool.take().unwrap(), None)).unwrap();
        let id = log.filling(Stream::Fresh).unwrap();
        (0..SLOT_COUNT).for_each(|slot| {
            log.claim(&table, Stream::Fresh, BlockNumber(slot.into())).unwrap();
        });
        assert!(log.claim(&table, Stream::Fresh, BlockNumber(0)).is_none());
        let segment = table.get(id).unwrap();
        (0..SLOT_COUNT).for_each(|slot| {
            segment.kill(Slot(slot));
        });
        pool.give(log.release(segment, id).unwrap().memory.unwrap());
    }
    assert!(log.dirty.len() <= most_queued(log.numbers_used()), "{}", log.dirty.len());
    // Segments that waited still wait, in their order.
    for number in 0..3 {
        log.begin(&table, Stream::Fresh, (pool.take().unwrap(), None)).unwrap();
        while log.claim(&table, Stream::Fresh, BlockNumber(number)).is_some() {}
    }
    log.prune(&table, 0);
    assert_eq!(log.dirty.len(), 3);
    assert!(std::iter::from_fn(|| log.freeze_coldest(&table)).count() == 3);
}

#[test]
fn what_cleaning_filled_does_not_count_once_it_died() {
    let (mut log, table, pool) = (Log::default(), SegmentTable::new(4), MemoryPool::new());
    let [first, second] = [0, 1].map(|block| {
        log.begin(&table, Stream::Cleaned, (pool.take().unwrap(), None)).unwrap();
        let id = log.filling(Stream::Cleaned).unwrap();
        while log.claim(&table, Stream::Cleaned, BlockNumber(block)).is_some() {}
        id
    });
    for id in [first, second] {
        assert!(log.has_dirty_cleaned(&table));
        let segment = table.get(id).unwrap();
        (0..SLOT_COUNT).for_each(|slot| {
            segment.kill(Slot(slot));
        });
        pool.give(log.release(segment, id).unwrap().memory.unwrap());
    }
    assert!(!log.has_dirty_cleaned(&table) && log.freeze_victim(&table, true).is_none());
}

fn clean_segments(count: u32) -> (Log, SegmentTable, Arc<MemoryPool>) {
    let (mut log, table, pool) = full_segments(count);
    for number in 0..count {
        let id = log.freeze_victim(&table, false).unwrap();
        assert_eq!(id, SegmentId(number));
        assert!(log.thaw(table.get(id).unwrap(), id, true).is_none());
    }
    assert_eq!((log.clean_segments, log.dirty_segments, log.frozen_segments), (count, 0, 0));
    (log, table, pool)
}

fn touch(table: &SegmentTable, number: u32) {
    table.get(SegmentId(number)).unwrap().touch();
}

/// Evicts all segments one after the other, and returns their numbers.
fn evicted(mut log: Log, table: &SegmentTable, pool: &MemoryPool) -> Vec<u32> {
    let next = || {
        let (id, memory) = log.evict_victim(table)?;
        pool.give(memory);
        Some(id.0)
    };
    std::iter::from_fn(next).collect()
}

#[test]
fn what_may_be_half_written_is_not_overwritten_in_place() {
    let (mut log, table, _pool) = full_segments(1);
    let id = log.freeze_victim(&table, false).unwrap();
    let segment = table.get(id).unwrap();
    log.thaw_unsaved(segment, id);
    assert_eq!(segment.word().state(), State::Dirty);
    assert!((0..SLOT_COUNT).all(|slot| segment.writable(Slot(slot)).is_none()));
}

#[test]
fn a_clean_segment_that_was_used_survives_one_eviction() {
    let (log, table, pool) = clean_segments(2);
    touch(&table, 0);
    assert_eq!(evicted(log, &table, &pool), [1, 0]);

    let (log, table, pool) = clean_segments(2);
    assert_eq!(evicted(log, &table, &pool), [0, 1], "the oldest is evicted first if none was used");

    let (log, table, pool) = clean_segments(3);
    (0..3).for_each(|number| touch(&table, number));
    assert_eq!(evicted(log, &table, &pool), [0, 1, 2], "one is evicted even if all were used");
}

/// Freezes all dirty segments one after the other, and returns their numbers.
fn frozen(mut log: Log, mut next: impl FnMut(&mut Log) -> Option<SegmentId>) -> Vec<u32> {
    std::iter::from_fn(|| next(&mut log)).map(|id| id.0).collect()
}

#[test]
fn a_dirty_segment_that_was_used_is_not_the_coldest() {
    let (log, table, _pool) = full_segments(3);
    touch(&table, 0);
    assert_eq!(frozen(log, |log| log.freeze_coldest(&table)), [1, 2, 0]);

    let (log, table, _pool) = full_segments(3);
    touch(&table, 1);
    assert_eq!(frozen(log, |log| log.freeze_victim(&table, false)), [0, 2, 1]);

    let (log, table, _pool) = full_segments(2);
    (0..2).for_each(|number| touch(&table, number));
    assert_eq!(frozen(log, |log| log.freeze_coldest(&table)), [0, 1], "one is frozen even if all were used");
}
