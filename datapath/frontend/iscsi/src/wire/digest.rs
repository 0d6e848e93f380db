//! CRC32C of headers and data, in the byte order of the wire.

/// Length of a digest.
pub const DIGEST_BYTES: usize = 4;

/// The digest of `parts`, one after the other. The wire has the remainder's lowest byte first.
#[inline]
pub fn digest(parts: &[&[u8]]) -> [u8; DIGEST_BYTES] {
    parts.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::digest;

    #[test]
    fn the_examples_of_the_standard() {
        // RFC 7143 (as RFC 3720, B.4): 32 bytes of zeroes, of ones, ascending, descending.
        assert_eq!(digest(&[&[0; 32]]), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(digest(&[&[0xff; 32]]), [0x43, 0xab, 0xa8, 0x62]);
        let up: Vec<u8> = (0..32).collect();
        assert_eq!(digest(&[&up]), [0x4e, 0x79, 0xdd, 0x46]);
        let down: Vec<u8> = (0..32).rev().collect();
        assert_eq!(digest(&[&down]), [0x5c, 0xdb, 0x3f, 0x11]);
        assert_eq!(digest(&[&up[..7], &up[7..]]), digest(&[&up]));
    }
}
