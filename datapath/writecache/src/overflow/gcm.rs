//! AES-128-GCM whose expanded key is at an address that the caller chooses.
//!
//! `unsafe` here: `aws-lc-rs` keeps expanded keys on the heap, which may be swapped and dumped. So its C
//! library is called directly: the context is made in a [`KeySlot`] and stays there. For AES-GCM it is plain
//! data without pointers to other memory. While a block is encrypted or decrypted, the library has the hash
//! key and the counter on the thread's stack, but not the AES key.
#![expect(unsafe_code, reason = "calls of the C library; see above")]

use aws_lc_sys::{
    EVP_AEAD_CTX, EVP_AEAD_CTX_init, EVP_AEAD_CTX_open_gather, EVP_AEAD_CTX_seal_scatter,
    EVP_aead_aes_128_gcm,
};

use super::key_memory::{KeySlot, Protection, SLOT_BYTES};

/// Bytes of a key.
pub const KEY_BYTES: usize = 16;

/// Bytes of an authentication tag.
pub const TAG_BYTES: usize = 16;

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 12;

/// Offset in the slot of the key while it is expanded.
const KEY_AT: usize = SLOT_BYTES - KEY_BYTES;

const _: () = assert!(size_of::<EVP_AEAD_CTX>() <= KEY_AT && align_of::<EVP_AEAD_CTX>() <= SLOT_BYTES);

/// An expanded key. It is wiped when it is dropped.
pub struct GcmKey {
    slot: KeySlot,
}

impl GcmKey {
    /// Makes the expanded key of a key that `fill` writes into protected memory.
    pub fn new(fill: impl FnOnce(&mut [u8; KEY_BYTES]) -> Result<(), String>) -> Result<Self, String> {
        let mut slot = KeySlot::take().map_err(|e| format!("no memory for a key: {e}"))?;
        // SAFETY: inside the slot, which is ours, and zeroed.
        let key = unsafe { &mut *slot.as_ptr().add(KEY_AT).cast::<[u8; KEY_BYTES]>() };
        fill(key)?;
        // SAFETY: the context fits before the key and is aligned (see above); a tag length of 0 means the
        // algorithm's own, and no engine is used.
        let done = unsafe {
            EVP_AEAD_CTX_init(
                slot.as_ptr().cast(),
                EVP_aead_aes_128_gcm(),
                key.as_ptr(),
                KEY_BYTES,
                0,
                std::ptr::null_mut(),
            )
        };
        slot.wipe(KEY_AT, KEY_BYTES);
        if done == 1 { Ok(Self { slot }) } else { Err("the key was refused".into()) }
    }

    /// How well the key is protected.
    pub fn protection(&self) -> Protection {
        self.slot.protection()
    }

    /// Address of the expanded key.
    #[cfg(test)]
    pub fn address(&self) -> usize {
        self.slot.as_ptr().addr()
    }

    fn context(&self) -> *const EVP_AEAD_CTX {
        self.slot.as_ptr().cast_const().cast()
    }

    /// Encrypts `plain` into `encrypted`, which must be as long, and returns the tag. `None`: the lengths
    /// differ.
    pub fn encrypt(
        &self,
        nonce: &[u8; NONCE_BYTES],
        identity: &[u8],
        plain: &[u8],
        encrypted: &mut [u8],
    ) -> Option<[u8; TAG_BYTES]> {
        if plain.len() != encrypted.len() {
            return None;
        }
        let mut tag = [0; TAG_BYTES];
        let mut tag_len = 0;
        // SAFETY: all lengths are those of the slices; the borrows keep input and output apart. The context
        // was initialised by `new`, and is only read.
        let done = unsafe {
            EVP_AEAD_CTX_seal_scatter(
                self.context(),
                encrypted.as_mut_ptr(),
                tag.as_mut_ptr(),
                &mut tag_len,
                TAG_BYTES,
                nonce.as_ptr(),
                NONCE_BYTES,
                plain.as_ptr(),
                plain.len(),
                std::ptr::null(),
                0,
                identity.as_ptr(),
                identity.len(),
            )
        };
        (done == 1 && tag_len == TAG_BYTES).then_some(tag)
    }

    /// Decrypts `encrypted` into `plain`, which must be as long. `false`: the data or the tag was changed.
    pub fn open(&self, nonce: &[u8; NONCE_BYTES], encrypted: &[u8], tag: &[u8], plain: &mut [u8]) -> bool {
        if plain.len() != encrypted.len() {
            return false;
        }
        // SAFETY: as for sealing.
        let done = unsafe {
            EVP_AEAD_CTX_open_gather(
                self.context(),
                plain.as_mut_ptr(),
                nonce.as_ptr(),
                NONCE_BYTES,
                encrypted.as_ptr(),
                encrypted.len(),
                tag.as_ptr(),
                tag.len(),
                std::ptr::null(),
                0,
            )
        };
        done == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(bytes: [u8; KEY_BYTES]) -> GcmKey {
        GcmKey::new(|key| {
            *key = bytes;
            Ok(())
        })
        .unwrap()
    }

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    /// Test case 4 of the GCM specification (McGrew and Viega).
    #[test]
    fn the_specification_gives_the_same() {
        let key = key(hex("feffe9928665731c6d6a8f9467308308").try_into().unwrap());
        let nonce: [u8; 12] = hex("cafebabefacedbaddecaf888").try_into().unwrap();
        let plain = hex(concat!(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72",
            "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
        ));
        let mut encrypted = vec![0; plain.len()];
        let identity = hex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
        let tag = key.encrypt(&nonce, &identity, &plain, &mut encrypted).unwrap();
        assert_eq!(tag.to_vec(), hex("5bc94fbc3221a5db94fae95ae7121a47"));
        assert_eq!(
            encrypted,
            hex(concat!(
                "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e",
                "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091"
            ))
        );
    }

    #[test]
    fn the_key_itself_does_not_stay() {
        let bytes = *b"a key to look for";
        let key = key(bytes[..16].try_into().unwrap());
        // SAFETY: the slot is the key's, and `key` holds it.
        let slot = unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(key.address()), SLOT_BYTES)
        };
        assert!(slot[KEY_AT..].iter().all(|byte| *byte == 0));
        assert!(slot[..KEY_AT].iter().any(|byte| *byte != 0), "the expanded key is here");
    }

    #[test]
    fn lengths_that_differ_are_refused() {
        let key = key([7; 16]);
        assert!(key.encrypt(&[0; 12], &[], &[1, 2, 3], &mut [0; 2]).is_none());
        let mut encrypted = [0; 3];
        let tag = key.encrypt(&[0; 12], &[], &[1, 2, 3], &mut encrypted).unwrap();
        let mut plain = [0; 3];
        assert!(!key.open(&[0; 12], &encrypted, &tag, &mut plain[..2]));
        assert!(!key.open(&[0; 12], &encrypted, &tag[..15], &mut plain));
        assert!(key.open(&[0; 12], &encrypted, &tag, &mut plain));
        assert_eq!(plain, [1, 2, 3]);
    }
}
