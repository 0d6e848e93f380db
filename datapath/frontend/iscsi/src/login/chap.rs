//! CHAP: the initiator proves that it knows a secret. If the initiator asks for it, the target proves itself
//! too (mutual CHAP).
//!
//! ```text
//!   initiator: CHAP_A=7,5                    which algorithms, best first
//!   target:    CHAP_A=7 CHAP_I=.. CHAP_C=..  the first that it knows, an identifier, a challenge
//!   initiator: CHAP_N=name CHAP_R=hash(identifier, secret, challenge) [CHAP_I=.. CHAP_C=..]
//!   target:    [CHAP_N=name CHAP_R=hash(identifier, its own secret, challenge)]
//! ```
//!
//! MD5 is weak, but the protocol requires it and most initiators support only that. Initiators that know
//! SHA-256 or SHA3-256 use these.

use aws_lc_rs::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA3_256, SHA256};
use md5::{Digest, Md5};

use crate::wire::text::{binary, hexadecimal, number};

/// The shortest length of a secret, in bytes: the protocol demands it without IPsec.
pub const SECRET_BYTES_MIN: usize = 12;

/// Longest secret, in bytes.
pub const SECRET_BYTES_MAX: usize = 255;

/// Length of our challenge.
pub const CHALLENGE_BYTES: usize = 32;

/// A name and its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// The account's name.
    pub name: String,
    secret: Vec<u8>,
}

impl Secret {
    /// A secret, if its length is legal.
    pub fn new(name: impl Into<String>, secret: impl Into<Vec<u8>>) -> Option<Self> {
        let secret = secret.into();
        let legal = (SECRET_BYTES_MIN..=SECRET_BYTES_MAX).contains(&secret.len());
        legal.then(|| Self { name: name.into(), secret })
    }

    pub(crate) fn has_the_secret_of(&self, other: &Self) -> bool {
        self.secret == other.secret
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secret({}, ...)", self.name.escape_debug())
    }
}

/// A hash that both sides use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// 5
    Md5,
    /// 6
    Sha1,
    /// 7
    Sha256,
    /// 8
    Sha3,
}

impl Algorithm {
    /// The first known algorithm in the initiator's list.
    pub fn choose(list: &str) -> Option<Self> {
        list.split(',').find_map(|choice| match number(choice)? {
            5 => Some(Self::Md5),
            6 => Some(Self::Sha1),
            7 => Some(Self::Sha256),
            8 => Some(Self::Sha3),
            _ => None,
        })
    }

    /// The algorithm's number in the protocol.
    pub fn number(self) -> u8 {
        match self {
            Self::Md5 => 5,
            Self::Sha1 => 6,
            Self::Sha256 => 7,
            Self::Sha3 => 8,
        }
    }

    /// The response to a challenge.
    pub fn response(self, identifier: u8, secret: &Secret, challenge: &[u8]) -> Vec<u8> {
        let parts = [&[identifier][..], &secret.secret, challenge];
        let algorithm = match self {
            Self::Md5 => {
                let mut hash = Md5::new();
                parts.iter().for_each(|part| hash.update(part));
                return hash.finalize().to_vec();
            }
            Self::Sha1 => &SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &SHA256,
            Self::Sha3 => &SHA3_256,
        };
        let mut hash = Context::new(algorithm);
        parts.iter().for_each(|part| hash.update(part));
        hash.finish().as_ref().to_vec()
    }
}

/// The accounts of a target.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    /// Initiators that may log in.
    pub initiators: Vec<Secret>,
    /// The target's own name and secret, for mutual CHAP.
    pub target: Option<Secret>,
}

/// A challenge that was sent.
#[derive(Clone, Debug)]
pub struct Challenge {
    /// Hash.
    pub algorithm: Algorithm,
    /// Identifier.
    pub identifier: u8,
    /// Random bytes.
    pub bytes: [u8; CHALLENGE_BYTES],
}

/// An initiator's answer to a challenge.
#[derive(Clone, Copy, Debug, Default)]
pub struct Response<'a> {
    /// CHAP_N.
    pub name: Option<&'a str>,
    /// CHAP_R.
    pub response: Option<&'a str>,
    /// CHAP_I of mutual CHAP.
    pub identifier: Option<&'a str>,
    /// CHAP_C of mutual CHAP.
    pub challenge: Option<&'a str>,
}

/// Why a login is refused; for the log only, not for the initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub String);

impl Challenge {
    /// The key-value pairs to send.
    pub fn pairs(&self) -> [(&'static str, String); 3] {
        [
            ("CHAP_A", self.algorithm.number().to_string()),
            ("CHAP_I", self.identifier.to_string()),
            ("CHAP_C", hexadecimal(&self.bytes)),
        ]
    }

    /// Checks the answer. Returns the target's own proof, if the initiator asked for mutual CHAP.
    pub fn check(
        &self,
        accounts: &Accounts,
        answer: &Response<'_>,
    ) -> Result<Vec<(&'static str, String)>, Refusal> {
        let fail = |why: String| Err(Refusal(why));
        let (Some(name), Some(response)) = (answer.name, answer.response) else {
            return fail("it did not send CHAP_N and CHAP_R".into());
        };
        let Some(response) = binary(response) else {
            return fail("its CHAP_R is neither hexadecimal nor base64".into());
        };
        // All accounts are compared, so that the duration does not reveal which names exist.
        let mut known = false;
        let mut right = false;
        for account in &accounts.initiators {
            let expected = self.algorithm.response(self.identifier, account, &self.bytes);
            let same = aws_lc_rs::constant_time::verify_slices_are_equal(&expected, &response).is_ok();
            let named = account.name == name;
            known |= named;
            right |= named && same;
        }
        if !right {
            let name: String = name.chars().take(64).collect();
            let name = name.escape_debug();
            return fail(match known {
                true => format!("the CHAP response of '{name}' is wrong: the secrets differ"),
                false => format!("'{name}' is not a CHAP name of this target"),
            });
        }
        match (answer.identifier, answer.challenge) {
            (None, None) => Ok(Vec::new()),
            (Some(identifier), Some(challenge)) => self.prove(accounts, identifier, challenge),
            _ => fail("it sent only one of CHAP_I and CHAP_C".into()),
        }
    }

    fn prove(
        &self,
        accounts: &Accounts,
        identifier: &str,
        challenge: &str,
    ) -> Result<Vec<(&'static str, String)>, Refusal> {
        let fail = |why: &str| Err(Refusal(why.into()));
        let Some(own) = &accounts.target else {
            return fail("it asks for mutual CHAP, and this target has no secret of its own");
        };
        let Some(identifier) = number(identifier).and_then(|number| u8::try_from(number).ok()) else {
            return fail("its CHAP_I is no number below 256");
        };
        let Some(challenge) = binary(challenge).filter(|bytes| bytes.len() <= 1024) else {
            return fail("its CHAP_C is not 1 to 1024 bytes in hexadecimal or base64");
        };
        // An initiator could otherwise have the target answer its own challenge over another connection.
        if challenge == self.bytes {
            return fail("it sent the target's own challenge back");
        }
        let response = self.algorithm.response(identifier, own, &challenge);
        Ok(vec![("CHAP_N", own.name.clone()), ("CHAP_R", hexadecimal(&response))])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, secret: &str) -> Secret {
        Secret::new(name, secret).unwrap()
    }

    fn challenge(algorithm: Algorithm) -> Challenge {
        Challenge { algorithm, identifier: 7, bytes: [9; CHALLENGE_BYTES] }
    }

    #[test]
    fn responses_equal_those_of_other_programs() {
        // printf '\007twelve-bytes' | cat - <(head -c 32 /dev/zero | tr '\0' '\011') | md5sum (sha1sum, sha256sum,
        // openssl dgst -sha3-256)
        for (algorithm, expected) in EXPECTED {
            let challenge = challenge(algorithm);
            let response = algorithm.response(7, &secret("x", "twelve-bytes"), &challenge.bytes);
            assert_eq!(hexadecimal(&response), expected, "{algorithm:?}");
        }
    }

    const EXPECTED: [(Algorithm, &str); 4] = [
        (Algorithm::Md5, "0x257e8668c172972aa96972cdf10c50bc"),
        (Algorithm::Sha1, "0xb3b3436d0eb61146b9cdce4bd97eaf22f114ec75"),
        (Algorithm::Sha256, "0x5f16c7381be13eaa264c2b1bc3fbcee8e6ad956b2fdc74f8929c13ffea982bae"),
        (Algorithm::Sha3, "0xe6c649fb254052b9c8ccdbd3cc96b8c5f8a1c56045e9cff748543a18fbb430cd"),
    ];

    #[test]
    fn the_first_known_algorithm_of_the_list_is_taken() {
        assert_eq!(Algorithm::choose("5"), Some(Algorithm::Md5));
        assert_eq!(Algorithm::choose("9,7,5"), Some(Algorithm::Sha256));
        assert_eq!(Algorithm::choose("x,8"), Some(Algorithm::Sha3));
        assert_eq!(Algorithm::choose("9"), None);
        assert_eq!(Algorithm::choose(""), None);
    }

    #[test]
    fn right_answers_pass_and_wrong_ones_are_logged_distinctly() {
        let accounts = Accounts {
            initiators: vec![secret("one", "first-secret-1"), secret("two", "second-secret")],
            target: Some(secret("disk", "target-secret")),
        };
        let challenge = challenge(Algorithm::Sha256);
        let answer = |secret: &Secret| {
            hexadecimal(&challenge.algorithm.response(challenge.identifier, secret, &challenge.bytes))
        };
        let right = answer(&accounts.initiators[1]);
        let check = |name, response, identifier, bytes| {
            let answer = Response { name, response, identifier, challenge: bytes };
            challenge.check(&accounts, &answer).map_err(|refusal| refusal.0)
        };
        assert_eq!(check(Some("two"), Some(&right), None, None), Ok(vec![]));
        // Another account's secret is not accepted.
        assert!(check(Some("one"), Some(&right), None, None).unwrap_err().contains("secrets differ"));
        assert!(check(Some("none"), Some(&right), None, None).unwrap_err().contains("not a CHAP name"));
        assert!(check(None, Some(&right), None, None).is_err());
        assert!(check(Some("two"), None, None, None).is_err());
        assert!(check(Some("two"), Some("0x"), None, None).is_err());
        assert!(check(Some("two"), Some(&right[..right.len() - 2]), None, None).is_err());
        // Mutual CHAP.
        let proof = check(Some("two"), Some(&right), Some("200"), Some("0x0102")).unwrap();
        let own = accounts.target.as_ref().unwrap();
        let expected = hexadecimal(&Algorithm::Sha256.response(200, own, &[1, 2]));
        assert_eq!(proof, vec![("CHAP_N", "disk".to_string()), ("CHAP_R", expected)]);
        assert!(check(Some("two"), Some(&right), Some("256"), Some("0x01")).is_err());
        assert!(check(Some("two"), Some(&right), Some("1"), None).is_err());
        let reflected = hexadecimal(&challenge.bytes);
        assert!(check(Some("two"), Some(&right), Some("1"), Some(&reflected)).unwrap_err().contains("back"));
        let none = Accounts { target: None, ..accounts.clone() };
        let answer = Response {
            name: Some("two"),
            response: Some(&right),
            identifier: Some("1"),
            challenge: Some("0x01"),
        };
        assert!(challenge.check(&none, &answer).unwrap_err().0.contains("no secret of its own"));
    }

    #[test]
    fn short_and_endless_secrets_are_none() {
        assert!(Secret::new("x", "eleven-byte").is_none());
        assert!(Secret::new("x", "x".repeat(256)).is_none());
        assert!(!format!("{:?}", secret("name", "do-not-print-this")).contains("do-not"));
    }
}
