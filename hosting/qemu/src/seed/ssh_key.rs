//! SSH host keys in the form that OpenSSH keeps in files.

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};

/// Length of a line of base64 in a private key file.
const LINE_CHARS: usize = 70;

/// The private part is padded to a multiple of this, as for a cipher, even where there is none.
const PADDING_BYTES: usize = 8;

/// A host key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshHostKey {
    /// Its type as in the name of the file: `ed25519`, `rsa`, `ecdsa`.
    pub kind: String,
    /// Content of the file `ssh_host_TYPE_key`.
    pub private: String,
    /// Content of the file `ssh_host_TYPE_key.pub`.
    pub public: String,
}

impl SshHostKey {
    /// The Ed25519 key that belongs to 32 random bytes.
    pub fn ed25519(seed: &[u8; 32], hostname: &str) -> Self {
        // Any 32 bytes are a key; the library can only refuse another length.
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).ok();
        let public = pair.as_ref().map_or(&[][..], |pair| pair.public_key().as_ref());
        let comment = format!("root@{hostname}");

        let mut public_blob = Vec::new();
        string(&mut public_blob, b"ssh-ed25519");
        string(&mut public_blob, public);

        let mut secret = Vec::new();
        // Two equal numbers, by which a decrypted key is recognised. Nothing is encrypted here.
        secret.extend_from_slice(&[0; 8]);
        string(&mut secret, b"ssh-ed25519");
        string(&mut secret, public);
        string(&mut secret, &[seed, public].concat());
        string(&mut secret, comment.as_bytes());
        let mut padding = 1;
        while !secret.len().is_multiple_of(PADDING_BYTES) {
            secret.push(padding);
            padding += 1;
        }

        let mut file = b"openssh-key-v1\0".to_vec();
        string(&mut file, b"none");
        string(&mut file, b"none");
        string(&mut file, b"");
        file.extend_from_slice(&1_u32.to_be_bytes());
        string(&mut file, &public_blob);
        string(&mut file, &secret);

        Self {
            kind: "ed25519".into(),
            private: armour(&file),
            public: format!("ssh-ed25519 {} {comment}\n", BASE64.encode(&public_blob)),
        }
    }
}

/// Without the private part.
impl std::fmt::Debug for SshHostKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SshHostKey").field("public", &self.public).finish_non_exhaustive()
    }
}

/// A string of the SSH protocol: its length in four bytes, then itself.
fn string(out: &mut Vec<u8>, value: &[u8]) {
    // Everything here is shorter than a few hundred bytes.
    out.extend_from_slice(&u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(value);
}

fn armour(file: &[u8]) -> String {
    let mut text = String::from("-----BEGIN OPENSSH PRIVATE KEY-----\n");
    for (position, c) in BASE64.encode(file).chars().enumerate() {
        if position > 0 && position % LINE_CHARS == 0 {
            text.push('\n');
        }
        text.push(c);
    }
    text.push_str("\n-----END OPENSSH PRIVATE KEY-----\n");
    text
}
