//! Secrets in the database: encrypted with a key that is kept elsewhere, so that a copy of the database alone reveals none of them.
//!
//! | column | secret |
//! |---|---|
//! | `machines.ssh_host_key_private` | the private SSH host key of a machine |
//! | `user_data.text`, `catalogs.user_data`, `schemes.user_data` | user data, which may hold passwords |
//! | `authorities.key` | the key that signs the certificates of nodes |
//! | `connections.secret` | the client secret of a connection to a cloud |
//! | `secrets_keys.mark` | a known text, by which another key is noticed before it is used |
//!
//! A stored secret is a random nonce of 12 bytes, the text encrypted with AES-256-GCM, and the tag of 16 bytes. Its column and the key of
//! its row are authenticated with it, so a secret that somebody copied to another row is refused.
//!
//! # Not here
//! Where the key is kept is decided by the program. Tokens are not among the secrets: the database has their hashes only.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};

use crate::error::DbError;

/// The length of a key.
pub const SECRETS_KEY_BYTES: usize = 32;

/// The key of the secrets in a database.
pub struct SecretsKey(RandomizedNonceKey);

impl SecretsKey {
    /// A key of these bytes.
    pub fn new(bytes: &[u8; SECRETS_KEY_BYTES]) -> Result<Self, DbError> {
        RandomizedNonceKey::new(&AES_256_GCM, bytes).map(Self).map_err(|_| DbError::NotEncrypted)
    }

    /// Encrypts a secret of a column of a row.
    pub(crate) fn encrypt(&self, column: &str, row: &str, text: &str) -> Result<Vec<u8>, DbError> {
        let mut encrypted = text.as_bytes().to_vec();
        let nonce = self.0.seal_in_place_append_tag(place(column, row), &mut encrypted);
        let nonce = nonce.map_err(|_| DbError::NotEncrypted)?;
        Ok([&nonce.as_ref()[..], &encrypted].concat())
    }

    /// Decrypts it. `None`: it is of another key or place, or damaged.
    pub(crate) fn decrypt(&self, column: &str, row: &str, mut stored: Vec<u8>) -> Option<String> {
        let (nonce, encrypted) = stored.split_at_mut_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let text = self.0.open_in_place(nonce, place(column, row), encrypted).ok()?;
        String::from_utf8(text.to_vec()).ok()
    }
}

impl std::fmt::Debug for SecretsKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecretsKey(..)")
    }
}

fn place(column: &str, row: &str) -> Aad<Vec<u8>> {
    Aad::from(format!("{column} {row}").into_bytes())
}

/// The key of an open database, once it is given.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeySlot(Arc<OnceLock<SecretsKey>>);

impl KeySlot {
    /// Takes the key. Another one that was given before stays.
    pub(crate) fn set(&self, key: SecretsKey) {
        let _ = self.0.set(key);
    }

    fn get(&self) -> Result<&SecretsKey, DbError> {
        self.0.get().ok_or(DbError::NoSecretsKey)
    }

    /// Encrypts a secret of a column of a row.
    pub(crate) fn encrypt(&self, column: &str, row: &str, text: &str) -> Result<Vec<u8>, DbError> {
        self.get()?.encrypt(column, row, text)
    }

    /// Decrypts it.
    pub(crate) fn decrypt(&self, column: &str, row: &str, stored: Vec<u8>) -> Result<String, DbError> {
        let text = self.get()?.decrypt(column, row, stored);
        text.ok_or_else(|| DbError::Damaged(format!("{column} of '{row}' cannot be decrypted")))
    }
}

/// A database whose secrets are encrypted. Without their key, all but the secrets can be read and changed.
#[async_trait]
pub trait Secrets: Send + Sync {
    /// Whether a key was given to this database before.
    async fn has_key(&self) -> Result<bool, DbError>;

    /// Gives it the key of its secrets. The first one counts from then on, and another one is refused.
    async fn unlock(&self, key: SecretsKey) -> Result<(), DbError>;

    /// Encrypts all secrets with another key, which counts once the database was opened again. Returns how many there are.
    async fn rotate(&self, new: &SecretsKey) -> Result<u64, DbError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_with_its_key_at_its_place_only() {
        let key = |byte| SecretsKey::new(&[byte; SECRETS_KEY_BYTES]).unwrap();
        let stored = key(1).encrypt("user_data.text", "a", "a password").unwrap();
        assert_eq!(key(1).decrypt("user_data.text", "a", stored.clone()).as_deref(), Some("a password"));
        assert_ne!(key(1).encrypt("user_data.text", "a", "a password").unwrap(), stored);
        assert!(!stored.windows(8).any(|part| part == b"password"));
        assert_eq!(key(2).decrypt("user_data.text", "a", stored.clone()), None);
        assert_eq!(key(1).decrypt("user_data.text", "b", stored.clone()), None);
        assert_eq!(key(1).decrypt("catalogs.user_data", "a", stored.clone()), None);
        for at in 0..stored.len() {
            let mut changed = stored.clone();
            changed[at] ^= 1;
            assert_eq!(key(1).decrypt("user_data.text", "a", changed), None, "byte {at}");
            assert_eq!(key(1).decrypt("user_data.text", "a", stored[..at].to_vec()), None, "cut at {at}");
        }
    }
}
