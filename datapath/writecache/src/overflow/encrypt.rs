//! Encrypts slots for the overflow disk: AES-128-GCM, with a tag for each slot.
//!
//! On disk a slot is its ciphertext followed by its tag, [`ENCRYPTED_SLOT_BYTES`] in all, without padding:
//! 512 slots take exactly 514 pages. The nonce is the segment's generation (8 bytes, little endian) and the
//! slot (4 bytes); each generation is used for one write of one segment, and never again with the same key.
//! The key of an ephemeral cache is made from the system's random source when the volume is opened, is never
//! written anywhere, and is wiped with the volume; the key of a persistent cache belongs to its owner. The
//! slots of one generation may be written at several times, and again, but always with the same contents.

use aws_lc_rs::hmac;
use headwater_block::BLOCK_BYTES;

use super::gcm::{GcmKey, KEY_BYTES, NONCE_BYTES};
use super::key_memory::Protection;
use crate::units::{SLOTS, Slot};

const BLOCK: usize = BLOCK_BYTES as usize;

pub use super::gcm::TAG_BYTES;

/// Bytes of a slot on disk.
pub const ENCRYPTED_SLOT_BYTES: usize = BLOCK + TAG_BYTES;

/// Bytes of a segment on disk: a multiple of 4096.
pub const ENCRYPTED_SEGMENT_BYTES: usize = SLOTS * ENCRYPTED_SLOT_BYTES;

/// The first bytes of a map, which are equal for all maps of its version: magic and version.
const SAME_BYTES: usize = 12;

/// The key of one volume's overflow, in memory of [`super::key_memory`].
pub struct SlotKey(GcmKey);

impl std::fmt::Debug for SlotKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SlotKey(..)")
    }
}

fn nonce(generation: u64, slot: Slot) -> [u8; NONCE_BYTES] {
    let mut bytes = [0u8; NONCE_BYTES];
    let (high, low) = bytes.split_at_mut(8);
    high.copy_from_slice(&generation.to_le_bytes());
    low.copy_from_slice(&u32::from(slot.0).to_le_bytes());
    bytes
}

impl SlotKey {
    /// A new random key, made in protected memory and never anywhere else.
    pub fn random() -> Result<Self, String> {
        let made = |key: &mut [u8; KEY_BYTES]| {
            aws_lc_rs::rand::fill(key).map_err(|e| format!("the system gave no random bytes for a key: {e}"))
        };
        GcmKey::new(made).map(Self)
    }

    /// The key of a persistent cache, which its owner keeps.
    pub fn from_bytes(key: &[u8; KEY_BYTES]) -> Result<Self, String> {
        let given = |place: &mut [u8; KEY_BYTES]| {
            place.copy_from_slice(key);
            Ok(())
        };
        GcmKey::new(given).map(Self)
    }

    /// How well the key is protected from swap.
    pub fn protection(&self) -> Protection {
        self.0.protection()
    }

    /// A tag over `part`, the first bytes of a map of this version. Only this key gives that tag.
    ///
    /// One key may be used for maps of several sizes and bases, and two GCM tags with one nonce over known
    /// data would reveal the authentication key. So GCM makes only one tag per version, over the bytes that
    /// all maps of the version share; this tag stays in memory and is the key of an HMAC over `part`. The
    /// nonce has generation 0, which is never used for slots, and contains the version.
    pub fn check(&self, version: u32, part: &[u8]) -> Option<[u8; TAG_BYTES]> {
        let slot = u16::try_from(version.checked_sub(1)?).ok()?;
        let key = self.0.encrypt(&nonce(0, Slot(slot)), part.get(..SAME_BYTES)?, &[], &mut [])?;
        let mac = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), part);
        mac.as_ref().first_chunk().copied()
    }

    /// Encrypts a block into [`ENCRYPTED_SLOT_BYTES`]. Returns `false` if a length is wrong; then `encrypted`
    /// has nothing of the block.
    pub fn encrypt(&self, generation: u64, slot: Slot, plain: &[u8], encrypted: &mut [u8]) -> bool {
        let Some((data, tag_at)) = encrypted.split_at_mut_checked(BLOCK) else { return false };
        let Some(tag_at) = tag_at.first_chunk_mut::<TAG_BYTES>() else { return false };
        let Some(tag) = self.0.encrypt(&nonce(generation, slot), &[], plain, data) else { return false };
        *tag_at = tag;
        true
    }

    /// Decrypts a slot into `into` (4096 bytes). `false`: the slot was changed, or encrypted with other
    /// parameters.
    pub fn open(&self, generation: u64, slot: Slot, encrypted: &[u8], into: &mut [u8]) -> bool {
        let Some((data, tag)) = encrypted.split_at_checked(BLOCK) else { return false };
        self.0.open(&nonce(generation, slot), data, tag, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_segment_fills_whole_pages() {
        assert_eq!(ENCRYPTED_SEGMENT_BYTES, 514 * 4096);
    }

    /// Two GCM tags with one nonce differ by a value that depends only on the difference of their data.
    #[test]
    fn checks_of_one_key_do_not_tell_what_tags_are_made_with() {
        let key = SlotKey::from_bytes(&[7; 16]).unwrap();
        // Three bases that differ only after magic and version.
        let differ = |base: u8| {
            let check = |base: u8| {
                let part = [b"HWCACHE\n", &4u32.to_le_bytes()[..], &[base; 44]].concat();
                key.check(4, &part).unwrap()
            };
            let (one, other) = (check(base), check(base ^ 0x55));
            std::array::from_fn::<u8, TAG_BYTES, _>(|at| one[at] ^ other[at])
        };
        assert_ne!(differ(1), differ(9));
    }

    #[test]
    fn what_was_sealed_is_opened_and_nothing_else() {
        let key = SlotKey::random().unwrap();
        let plain: Vec<u8> = (0..BLOCK).map(|i| (i % 251) as u8).collect();
        let mut encrypted = vec![0; ENCRYPTED_SLOT_BYTES];
        assert!(key.encrypt(7, Slot(3), &plain, &mut encrypted));
        assert_ne!(&encrypted[..BLOCK], &plain[..]);
        let mut opened = vec![0; BLOCK];
        assert!(key.open(7, Slot(3), &encrypted, &mut opened));
        assert_eq!(opened, plain);
        assert!(!key.open(8, Slot(3), &encrypted, &mut opened));
        assert!(!key.open(7, Slot(4), &encrypted, &mut opened));
        assert!(!SlotKey::random().unwrap().open(7, Slot(3), &encrypted, &mut opened));
        for at in [0, 100, BLOCK, ENCRYPTED_SLOT_BYTES - 1] {
            let mut flipped = encrypted.clone();
            flipped[at] ^= 1;
            assert!(!key.open(7, Slot(3), &flipped, &mut opened), "byte {at}");
        }
    }
}
