//! The checksums of tables and metadata: CRC-32 as in Ethernet, and CRC-32C.

/// The remainder of a byte for a polynomial, bits reversed.
const fn table(polynomial: u32) -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0u32;
    while byte < 256 {
        let (mut crc, mut bit) = (byte, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ polynomial } else { crc >> 1 };
            bit += 1;
        }
        #[expect(clippy::indexing_slicing, reason = "the loop ends at 256")]
        #[expect(clippy::as_conversions, reason = "less than 256")]
        {
            table[byte as usize] = crc;
        }
        byte += 1;
    }
    table
}

const ETHERNET: [u32; 256] = table(0xedb8_8320);
const CASTAGNOLI: [u32; 256] = table(0x82f6_3b78);

fn add(table: &[u32; 256], crc: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(crc, |crc, byte| {
        let [low, ..] = crc.to_le_bytes();
        let remainder = table.get(usize::from(low ^ byte)).copied().unwrap_or(0);
        (crc >> 8) ^ remainder
    })
}

/// CRC-32 as in UEFI 2.10, section 5.3, and as in Ethernet.
pub fn crc32(bytes: &[u8]) -> u32 {
    !add(&ETHERNET, u32::MAX, bytes)
}

/// Goes on with a CRC-32, without the inversions at its start and end, as NILFS2 counts it.
pub(crate) fn crc32_from(crc: u32, bytes: &[u8]) -> u32 {
    add(&ETHERNET, crc, bytes)
}

/// Goes on with a CRC-32C, without the inversions at its start and end, as ext4 and jbd2 count it.
pub(crate) fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    add(&CASTAGNOLI, crc, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_standards() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(!crc32c(u32::MAX, b"123456789"), 0xe306_9283);
    }
}
