//! Changes that are noted, and a cache whose disk failed at a sync.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Change, PersistentOptions};
use crate::cache::{CacheOptions, LittleSpace, OverflowOptions, Turn, WriteCache, Wrote};
use crate::host::Host;
use crate::overflow::buffering::Buffering;
use crate::overflow::io::{IoEngine, IoOp, open_engine};
use crate::units::{BlockNumber, Location, SLOT_COUNT};

#[test]
fn discards_side_by_side_are_one_change() {
    let range = |first, count, zero| Change::Range { first, count, zero };
    let mut last = range(8, 2, true);
    assert!((10..1000).all(|next| last.is_continued_by(&range(next, 1, true))));
    assert_eq!(last, range(8, 992, true));
    // Not the other kind, not elsewhere, not longer than a count can say, and not what lies in a slot.
    for next in
        [range(1000, 1, false), range(1001, 1, true), range(999, 1, true), range(1000, u32::MAX, true)]
    {
        assert!(!last.is_continued_by(&next), "{next:?}");
    }
    let slot = Change::Slot { block: 1000, position: 0, slot: 0, generation: 1 };
    assert!(!last.is_continued_by(&slot) && !{ slot }.is_continued_by(&range(1001, 1, true)));
    assert_eq!(last, range(8, 992, true));
}

/// The real engine, whose syncs fail while it is told so.
struct Failing {
    real: Arc<dyn IoEngine>,
    syncs_fail: AtomicBool,
}

impl IoEngine for Failing {
    fn submit(&self, op: IoOp) {
        self.real.submit(op);
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

#[test]
fn a_broken_cache_tries_no_commit_and_waits_for_none() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Arc::new(Failing { real: open_engine().unwrap(), syncs_fail: AtomicBool::new(false) });
    let host = Host::with_engine(u64::MAX, Arc::clone(&engine) as _).unwrap();
    let options = CacheOptions {
        name: "test".into(),
        size_bytes: 1 << 30,
        ram_bytes: 64 << 20,
        weight: 100,
        overflow: Some(OverflowOptions {
            at: dir.path().to_owned(),
            limit_bytes: 64 << 20,
            buffering: Buffering::Buffered,
            little_space: LittleSpace::Refused,
        }),
        pause_limit: Duration::from_secs(60),
        persistent: Some(PersistentOptions { name: "kept".into(), key: [7; 16], base_id: [1; 32] }),
        beneath: None,
    };
    let cache = WriteCache::open(&options, &host.shared()).unwrap();
    let persist = cache.persist.as_ref().unwrap();
    let blocks = 3 * u32::from(SLOT_COUNT);
    for block in 0..blocks {
        assert_eq!(cache.write(BlockNumber(block), &[7; 4096], Turn::New), Wrote::Done);
    }
    assert!(flush(&cache));
    engine.syncs_fail.store(true, Ordering::SeqCst);
    assert_eq!(cache.write(BlockNumber(0), &[8; 4096], Turn::New), Wrote::Done);
    assert!(!flush(&cache) && cache.is_broken());
    // The disk works again, and would say so.
    engine.syncs_fail.store(false, Ordering::SeqCst);
    let commits = persist.commits();
    cache.clear(BlockNumber(0), BlockNumber(blocks), Location::ZERO);
    assert!(!persist.pending.lock().freed.is_empty(), "places wait for a commit");
    persist.ask_for_room(true);
    persist.ask_for_commit();
    assert!(!persist.asked.lock().commit && !persist.brings_room());
    assert!(!flush(&cache));
    // Nothing was taken for a commit that would fail.
    let pending = persist.pending.lock();
    assert!(!pending.committing && !pending.freed.is_empty() && persist.commits() == commits);
}
