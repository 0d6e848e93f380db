//! How long tests of random operations run: an eighth of their full length in `make test`, all of it in `make long`.

/// Set by `make long`.
const VARIABLE: &str = "HEADWATER_LONG";

/// How many of `full` rounds a test makes.
pub fn rounds(full: usize) -> usize {
    if is_long() { full } else { full.div_ceil(8) }
}

/// Whether tests run at their full length.
pub fn is_long() -> bool {
    std::env::var_os(VARIABLE).is_some()
}
