//! The memory of this process as the system counts it, and a lock that serialises tests that measure it.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A test that uses much memory, or measures the process's memory, holds this lock. Otherwise the memory of
/// other tests in the same program would be counted too.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A failed test has released the lock as well.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of this process that is in RAM.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the kernel counts it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the kernel counts it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_memory_is_counted() {
        let _alone = alone();
        let before = resident_bytes();
        let used = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = resident_bytes();
        assert!(after >= before + (60 << 20), "{before} bytes before and {after} after");
        drop(used);
    }
}
