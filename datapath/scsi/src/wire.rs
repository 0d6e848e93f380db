//! Big-endian fields of CDBs and parameter data, without indexing.

/// The byte at `at`; 0 past the end.
pub(crate) fn u8_at(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

/// `count` bytes (at most 8) from `at` on as a number; bytes past the end count as 0.
pub(crate) fn number_at(bytes: &[u8], at: usize, count: usize) -> u64 {
    (0..count).fold(0, |number, index| (number << 8) | u64::from(u8_at(bytes, at.saturating_add(index))))
}

/// Two bytes.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([u8_at(bytes, at), u8_at(bytes, at.saturating_add(1))])
}

/// Four bytes.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::try_from(number_at(bytes, at, 4)).unwrap_or(u32::MAX)
}

/// Eight bytes.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    number_at(bytes, at, 8)
}

/// Whether bit `bit` of the byte at `at` is set.
pub(crate) fn bit_at(bytes: &[u8], at: usize, bit: u8) -> bool {
    u8_at(bytes, at) & 1_u8.wrapping_shl(u32::from(bit)) != 0
}

/// Overwrites the bytes at `at`; does nothing if they do not fit.
pub(crate) fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..what.len())) {
        place.copy_from_slice(what);
    }
}

/// A length as a 16-bit field, clipped.
pub(crate) fn len16(len: usize) -> [u8; 2] {
    u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes()
}

/// A length as a 32-bit field, clipped.
pub(crate) fn len32(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes()
}

/// A length as an 8-bit field, clipped.
pub(crate) fn len8(len: usize) -> u8 {
    u8::try_from(len).unwrap_or(u8::MAX)
}

/// Text as an ASCII field: printable characters, padded with spaces or cut to `width` bytes.
pub(crate) fn ascii(text: &str, width: usize) -> Vec<u8> {
    let mut field: Vec<u8> = text
        .chars()
        .filter(|c| c.is_ascii_graphic() || *c == ' ')
        .filter_map(|c| u8::try_from(c).ok())
        .take(width)
        .collect();
    field.resize(width, b' ');
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_big_endian_and_end_with_the_bytes() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(u16_at(&bytes, 1), 0x0203);
        assert_eq!(u32_at(&bytes, 2), 0x0304_0506);
        assert_eq!(u64_at(&bytes, 1), 0x0203_0405_0607_0809);
        assert_eq!(number_at(&bytes, 0, 3), 0x0001_0203);
        assert_eq!(u32_at(&bytes, 7), 0x0809_0000);
        assert_eq!(u64_at(&bytes, usize::MAX), 0);
        assert!(bit_at(&bytes, 7, 3) && !bit_at(&bytes, 7, 2));
    }

    #[test]
    fn text_fields_have_their_width() {
        assert_eq!(ascii("HW", 4), b"HW  ");
        assert_eq!(ascii("H\u{e4}\nead", 4), b"Head");
    }
}
