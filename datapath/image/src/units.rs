//! Conversions between the integer types of offsets, counts and slices, without `as`.

/// A length in memory as a number of bytes.
pub(crate) fn u64_of(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

/// Converts a number of bytes to `usize`, saturating at `usize::MAX`.
pub(crate) fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// As [`usize_of`], from 32 bits.
pub(crate) fn usize_of_u32(bytes: u32) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
