//! LZNT1, the compression of files in NTFS: chunks of 4 KiB, each compressed on its own.

/// What a chunk unpacks to, except for the last one of a value.
const CHUNK_BYTES: usize = 4096;

/// The example of MS-XCA 2.5.5: the bytes that its text is packed to.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) const EXAMPLE: [u8; 59] = [
    0x38, 0xb0, 0x88, 0x46, 0x23, 0x20, 0x00, 0x20, 0x47, 0x20, 0x41, 0x00, 0x10, 0xa2, 0x47, 0x01, 0xa0,
    0x45, 0x20, 0x44, 0x00, 0x08, 0x45, 0x01, 0x50, 0x79, 0x00, 0xc0, 0x45, 0x20, 0x05, 0x24, 0x13, 0x88,
    0x05, 0xb4, 0x02, 0x4a, 0x44, 0xef, 0x03, 0x58, 0x02, 0x8c, 0x09, 0x16, 0x01, 0x48, 0x45, 0x00, 0xbe,
    0x00, 0x9e, 0x00, 0x04, 0x01, 0x18, 0x90, 0x00,
];
/// That text.
#[cfg(test)]
pub(super) const EXAMPLE_TEXT: &[u8] =
    b"F# F# G A A G F# E D D E F# F# E E F# F# G A A G F# E D D E F# E D D E E F# D E \
    F# G F# D E F# G F# E D E A F# F# G A A G F# E D D E F# E D D\0";

/// Unpacks `packed` into `into`. The rest of `into` becomes zero. `None`: it is no LZNT1.
pub(super) fn unpack(mut packed: &[u8], into: &mut [u8]) -> Option<()> {
    for chunk in into.chunks_mut(CHUNK_BYTES) {
        let header =
            packed.split_first_chunk::<2>().map(|(header, rest)| (u16::from_le_bytes(*header), rest));
        // A header of 0 ends the unit, and so does its end.
        let Some((header, rest)) = header.filter(|(header, _)| *header != 0) else {
            chunk.fill(0);
            packed = &[];
            continue;
        };
        let (body, rest) = rest.split_at_checked(usize::from(header & 0xfff) + 1)?;
        packed = rest;
        let len = if header & 0x8000 == 0 {
            let len = body.len().min(chunk.len());
            chunk.get_mut(..len)?.copy_from_slice(body.get(..len)?);
            len
        } else {
            unpack_chunk(body, chunk)?
        };
        chunk.get_mut(len..)?.fill(0);
    }
    Some(())
}

/// Unpacks a chunk and returns its length.
fn unpack_chunk(mut packed: &[u8], chunk: &mut [u8]) -> Option<usize> {
    let mut at = 0;
    while let Some((flags, rest)) = packed.split_first() {
        packed = rest;
        for bit in 0..8 {
            if packed.is_empty() || at >= chunk.len() {
                break;
            }
            if flags >> bit & 1 == 0 {
                let (byte, rest) = packed.split_first()?;
                packed = rest;
                *chunk.get_mut(at)? = *byte;
                at += 1;
                continue;
            }
            let (token, rest) = packed.split_first_chunk::<2>()?;
            packed = rest;
            let token = u16::from_le_bytes(*token);
            // The further the place, the more bits say how far back the copy begins, and the fewer how long it is.
            let back_bits = (usize::BITS - at.checked_sub(1)?.leading_zeros()).max(4);
            let len_bits = 16u32.checked_sub(back_bits)?;
            let back = usize::from(token >> len_bits) + 1;
            let len = usize::from(token & (0xffffu16 >> back_bits)) + 3;
            let from = at.checked_sub(back)?;
            for step in 0..len.min(chunk.len() - at) {
                let byte = *chunk.get(from + step)?;
                *chunk.get_mut(at)? = byte;
                at += 1;
            }
        }
        if at >= chunk.len() {
            break;
        }
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_its_documentation_unpacks() {
        let mut out = vec![1; 8192];
        unpack(&EXAMPLE, &mut out).unwrap();
        assert_eq!(&out[..EXAMPLE_TEXT.len()], EXAMPLE_TEXT);
        assert!(out[EXAMPLE_TEXT.len()..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_copy_from_before_the_chunk_is_refused() {
        assert_eq!(unpack(&[2, 0xb0, 1, 0, 0], &mut [0; 4096]), None);
        assert_eq!(unpack(&[3, 0xb0, 2, 7, 0, 0x10], &mut [0; 4096]), None);
        assert_eq!(unpack(&[9, 0xb0, 2, 7], &mut [0; 4096]), None);
    }
}
