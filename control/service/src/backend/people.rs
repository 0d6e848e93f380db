//! Identity providers, which know people, and the attempts of people to log in.

use async_trait::async_trait;
use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use headwater_api::{Problem, Role, Scopes};

use super::Random;
use crate::token::{self, hash_of};

/// A person whom an identity provider knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// The person's name in the history.
    pub name: String,
    /// The person's role.
    pub role: Role,
    /// The catalogs and images to which the role is limited. `None`: no limit.
    pub scopes: Option<Scopes>,
}

/// The prefix of the secrets of attempts.
const PREFIX: &str = "hwl_";

/// One attempt to log in. The browser carries values of it to the identity provider and back. They all come from one
/// secret, which the daemon makes. The client keeps the secret and sends it back with the code, so the daemon stores
/// nothing about an attempt.
#[derive(Clone)]
pub struct Attempt {
    secret: String,
}

impl Attempt {
    /// A new attempt.
    pub(crate) fn new(random: &dyn Random) -> std::io::Result<Self> {
        Ok(Self { secret: token::new_secret(random, PREFIX)? })
    }

    /// The attempt with this secret.
    pub fn of(secret: String) -> Self {
        Self { secret }
    }

    /// The secret.
    pub(crate) fn secret(&self) -> &str {
        &self.secret
    }

    /// The value of `state`: the client accepts only a browser that comes back with it.
    pub fn state(&self) -> String {
        self.value("state")
    }

    /// The value of `nonce`: the daemon accepts only an ID token with it.
    pub fn nonce(&self) -> String {
        self.value("nonce")
    }

    /// The code verifier of PKCE (RFC 7636): the identity provider accepts the code only with it.
    pub fn verifier(&self) -> String {
        self.value("verifier")
    }

    /// The code challenge of PKCE, by the method S256.
    pub fn challenge(&self) -> String {
        challenge_of(&self.verifier())
    }

    /// From one of these values, neither the secret nor another value can be computed.
    fn value(&self, purpose: &str) -> String {
        hash_of(&format!("{purpose} of {}", self.secret))
    }
}

fn challenge_of(verifier: &str) -> String {
    URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes()))
}

/// An identity provider that speaks OpenID Connect.
#[async_trait]
pub trait IdentityProvider: Send + Sync {
    /// Its URL.
    fn issuer(&self) -> &str;

    /// How long a login lasts, in seconds.
    fn session_s(&self) -> u64;

    /// The URL at which a person logs in. The browser then goes to `redirect` with a code.
    async fn page(&self, attempt: &Attempt, redirect: &str) -> Result<String, Problem>;

    /// The person who logged in, for the code that the browser brought. Fails if the identity provider does not accept the
    /// code, or if the person has no role. Fails too if the ID token is not for this attempt and this daemon, or not valid
    /// at the time `now_ms`.
    async fn person(
        &self,
        attempt: &Attempt,
        code: &str,
        redirect: &str,
        now_ms: u64,
    ) -> Result<Person, Problem>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::SystemRandom;

    #[test]
    fn an_attempt_has_a_value_for_each_purpose_and_reveals_no_other() {
        let attempt = Attempt::new(&SystemRandom).unwrap();
        let same = Attempt::of(attempt.secret().to_owned());
        let values = [attempt.secret, same.state(), same.nonce(), same.verifier(), same.challenge()];
        assert_eq!(values[1..4], [same.state(), same.nonce(), same.verifier()]);
        for (at, value) in values.iter().enumerate() {
            assert!((43..=128).contains(&value.len()), "{value}");
            assert!(values.iter().skip(at + 1).all(|other| !other.contains(value) && !value.contains(other)));
        }
        let other = Attempt::new(&SystemRandom).unwrap();
        assert_ne!(other.state(), values[1]);
    }

    #[test]
    fn the_challenge_is_that_of_the_standard() {
        // RFC 7636, appendix B.
        let challenge = challenge_of("dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk");
        assert_eq!(challenge, "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM");
    }
}
