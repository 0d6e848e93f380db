//! What the explored threads do, the disk under them, and who says whether a read was right.

pub mod client;
pub mod disk;
pub mod oracle;
pub mod power;

use std::sync::Arc;

use headwater_writecache::{Host, WriteCache};

/// After so many turns what is not given back will not be.
const PATIENCE: usize = 20_000;

/// Waits until something is so; the explorer lets all others go on meanwhile.
pub fn settle(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..PATIENCE {
        if is_so() {
            return;
        }
        shuttle::thread::yield_now();
    }
    panic!("not so after {PATIENCE} turns: {what}");
}

/// Drops the last handle on a cache and waits until it is gone with all its memory, whoever else was at work in it.
/// Its memory alone does not tell: one that was just recovered has none, while the host's thread may be about to
/// begin a read that only a running disk ends.
pub fn close(cache: Arc<WriteCache>, host: &Host) {
    let gone = Arc::downgrade(&cache);
    drop(cache);
    settle("the cache is gone", || gone.strong_count() == 0);
    settle("no cache is left, so no memory is in use", || host.used_bytes() == 0);
}
