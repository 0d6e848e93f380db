//! The threads that are explored, the disk below them, and the oracle that checks reads.

pub mod client;
pub mod disk;
pub mod oracle;
pub mod power;

use std::sync::Arc;

use headwater_writecache::{Host, WriteCache};

/// The number of scheduler steps after which memory that is still in use counts as lost.
const STEPS_MAX: usize = 20_000;

/// Waits until a condition is true; the model checker lets all other threads run meanwhile.
pub fn settle(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..STEPS_MAX {
        if is_so() {
            return;
        }
        shuttle::thread::yield_now();
    }
    panic!("not so after {STEPS_MAX} turns: {what}");
}

/// Drops the last reference to a cache and waits until the cache is gone with all its memory, whatever other
/// threads still do in it. Its memory alone does not show that: a recovered cache has none at first, while
/// the host's thread may be about to begin a read that only a running disk ends.
pub fn close(cache: Arc<WriteCache>, host: &Host) {
    let gone = Arc::downgrade(&cache);
    drop(cache);
    settle("the cache is gone", || gone.strong_count() == 0);
    settle("no cache is left, so no memory is in use", || host.used_bytes() == 0);
}
