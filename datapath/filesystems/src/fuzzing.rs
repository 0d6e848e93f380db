//! What must hold of every byte sequence that a reader of a file system can be given: for the fuzzers in `fuzz/`, and for a
//! bounded test.
//!
//! Each function takes bytes, reads them, and panics if what was read breaks a promise. Refusing them is always right.

pub use crate::ntfs::fuzzing::ntfs_volume;

/// What a fuzzer or a test feeds with bytes.
pub type Oracle = fn(&[u8]);

/// All of them, with their names and bytes to begin with.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    vec![("ntfs_volume", ntfs_volume, crate::ntfs::fuzzing::ntfs_samples())]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fuzzers' work in small.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
