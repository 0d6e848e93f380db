//! The 32-byte BLAKE3 hash that names chunks, objects and versions.

use crate::error::{StoreError, StoreErrorKind};

/// A BLAKE3 hash. Printed as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The first twelve digits, enough for people to tell versions apart.
    pub fn short(&self) -> String {
        self.to_string().chars().take(12).collect()
    }
}

impl From<blake3::Hash> for Hash {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl std::fmt::Display for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Hash {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = || {
            StoreError::new(
                StoreErrorKind::Invalid,
                format!("'{text}' is not a hash: 64 digits of 0-9 and a-f are needed"),
            )
        };
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(bad());
        }
        let mut out = [0u8; 32];
        for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
            let mut value = 0u8;
            for digit in pair {
                let nibble = match digit {
                    b'0'..=b'9' => digit - b'0',
                    b'a'..=b'f' => digit - b'a' + 10,
                    _ => return Err(bad()),
                };
                value = (value << 4) | nibble;
            }
            *byte = value;
        }
        Ok(Self(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_survives_printing_and_parsing() {
        let hash = Hash::of(b"headwater");
        assert_eq!(hash.to_string().parse::<Hash>().unwrap(), hash);
        assert_eq!(hash.short().len(), 12);
    }

    #[test]
    fn invalid_hashes_are_refused() {
        let good = Hash::of(b"").to_string();
        for bad in [String::new(), good.to_uppercase(), good.replace('a', "g"), format!("{good}0")] {
            assert!(bad.parse::<Hash>().is_err(), "{bad}");
        }
    }
}
