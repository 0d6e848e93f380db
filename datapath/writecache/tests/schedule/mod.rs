//! What the explored threads do, the disk under them, and who says whether a read was right.

pub mod client;
pub mod disk;
pub mod oracle;
pub mod power;

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
