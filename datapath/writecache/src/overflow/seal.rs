//! Sealing of slots for the overflow disk: AES-128-GCM, one tag a slot.
//!
//! On disk a slot is its ciphertext followed by its tag, [`SEALED_SLOT_BYTES`] in all, packed without
//! padding: 512 of them take exactly 514 pages. The nonce is the segment's generation (8 bytes, little
//! endian) and the slot (4 bytes); a generation is used for one write of one segment and never again
//! under the same key. The key of an ephemeral cache is made from the system's random source when the volume
//! is opened, is never written anywhere, and goes with the volume; that of a persistent cache is its owner's.
//! The slots of one generation may be written at several times, and again, but always with the same contents.

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use headwater_block::BLOCK_BYTES;

use crate::units::{SLOTS, Slot};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Bytes of an authentication tag.
pub const TAG_BYTES: usize = 16;

/// Bytes of a slot on disk.
pub const SEALED_SLOT_BYTES: usize = BLOCK + TAG_BYTES;

/// Bytes of a segment on disk: a multiple of 4096.
pub const SEALED_SEGMENT_BYTES: usize = SLOTS * SEALED_SLOT_BYTES;

/// The key of one volume's overflow.
pub struct SealKey(LessSafeKey);

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealKey(..)")
    }
}

fn nonce(generation: u64, slot: Slot) -> Nonce {
    let mut bytes = [0u8; 12];
    let (high, low) = bytes.split_at_mut(8);
    high.copy_from_slice(&generation.to_le_bytes());
    low.copy_from_slice(&u32::from(slot.0).to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl SealKey {
    /// A new random key.
    pub fn random() -> Result<Self, String> {
        let mut key = [0u8; 16];
        aws_lc_rs::rand::fill(&mut key).map_err(|e| format!("no random bytes for the key: {e}"))?;
        let made = Self::from_bytes(&key);
        key.fill(0);
        made
    }

    /// The key of a persistent cache, which its owner keeps.
    pub fn from_bytes(key: &[u8; 16]) -> Result<Self, String> {
        let bound = UnboundKey::new(&AES_128_GCM, key).map_err(|e| format!("the key was refused: {e}"));
        Ok(Self(LessSafeKey::new(bound?)))
    }

    /// A tag over `identity` that only this key gives: generation 0, which no slot is sealed with.
    pub fn check(&self, identity: &[u8]) -> Option<[u8; TAG_BYTES]> {
        let mut nothing = [0u8; 0];
        let nonce = nonce(0, Slot(0));
        let tag = self.0.seal_in_place_separate_tag(nonce, Aad::from(identity), &mut nothing).ok()?;
        tag.as_ref().try_into().ok()
    }

    /// Seals `sealed[..4096]` in place and puts the tag behind it. Whether that worked: it does, unless the
    /// buffer has the wrong length.
    pub fn seal(&self, generation: u64, slot: Slot, sealed: &mut [u8]) -> bool {
        let Some((data, tag_at)) = sealed.split_at_mut_checked(BLOCK) else { return false };
        let Ok(tag) = self.0.seal_in_place_separate_tag(nonce(generation, slot), Aad::empty(), data) else {
            return false;
        };
        if tag_at.len() != TAG_BYTES {
            return false;
        }
        tag_at.copy_from_slice(tag.as_ref());
        true
    }

    /// Opens a sealed slot into `into` (4096 bytes). `false`: it is not what was sealed.
    pub fn open(&self, generation: u64, slot: Slot, sealed: &[u8], into: &mut [u8]) -> bool {
        let Some((data, tag)) = sealed.split_at_checked(BLOCK) else { return false };
        self.0.open_separate_gather(nonce(generation, slot), Aad::empty(), data, tag, into).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_segment_fills_whole_pages() {
        assert_eq!(SEALED_SEGMENT_BYTES, 514 * 4096);
    }

    #[test]
    fn what_was_sealed_is_opened_and_nothing_else() {
        let key = SealKey::random().unwrap();
        let plain: Vec<u8> = (0..BLOCK).map(|i| (i % 251) as u8).collect();
        let mut sealed = plain.clone();
        sealed.resize(SEALED_SLOT_BYTES, 0);
        assert!(key.seal(7, Slot(3), &mut sealed));
        assert_ne!(&sealed[..BLOCK], &plain[..]);
        let mut opened = vec![0; BLOCK];
        assert!(key.open(7, Slot(3), &sealed, &mut opened));
        assert_eq!(opened, plain);
        assert!(!key.open(8, Slot(3), &sealed, &mut opened));
        assert!(!key.open(7, Slot(4), &sealed, &mut opened));
        assert!(!SealKey::random().unwrap().open(7, Slot(3), &sealed, &mut opened));
        for at in [0, 100, BLOCK, SEALED_SLOT_BYTES - 1] {
            let mut flipped = sealed.clone();
            flipped[at] ^= 1;
            assert!(!key.open(7, Slot(3), &flipped, &mut opened), "byte {at}");
        }
    }
}
