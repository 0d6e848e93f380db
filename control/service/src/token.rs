//! Tokens of TCP clients: the token of the data directory, with all permissions, and the secrets of named
//! tokens, which are stored as hashes.

use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use axum::http::{HeaderMap, header};

use crate::backend::Random;

/// The random bytes of a token. Its file has them in hexadecimal digits.
const TOKEN_BYTES: usize = 32;

/// A secret that the daemon shares with everybody who can read its file. Its `Debug` output hides it.
#[derive(Clone)]
pub struct Token(String);

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file could not be read or written.
    #[error("cannot {what} {path}")]
    File {
        /// What was to be done.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file has another content.
    #[error(
        "{path} does not contain a token of 64 hexadecimal digits (remove the file, and the daemon makes a new one)"
    )]
    Odd {
        /// The file.
        path: PathBuf,
    },
    /// No random numbers.
    #[error("cannot get random numbers for {path}")]
    Random {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Token {
    /// Reads the token of a file. If the file is missing, it is created with a random token. Restricts the file to its
    /// owner. Callers hold the lock of the directory.
    pub fn load_or_make(path: &Path, random: &dyn Random) -> Result<Self, TokenError> {
        let failed = |what| move |source| TokenError::File { what, path: path.to_owned(), source };
        match std::fs::read_to_string(path) {
            Ok(text) => {
                let only_owner = std::fs::Permissions::from_mode(0o600);
                std::fs::set_permissions(path, only_owner).map_err(failed("protect the token file"))?;
                let digits = text.trim_end();
                let sound = digits.len() == 2 * TOKEN_BYTES && digits.bytes().all(|c| c.is_ascii_hexdigit());
                if sound {
                    Ok(Self(digits.to_owned()))
                } else {
                    Err(TokenError::Odd { path: path.to_owned() })
                }
            }
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                Err(TokenError::Odd { path: path.to_owned() })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let mut bytes = [0; TOKEN_BYTES];
                let no_random = |source| TokenError::Random { path: path.to_owned(), source };
                random.fill(&mut bytes).map_err(no_random)?;
                let token = Self(hex(&bytes));
                token.write(path).map_err(failed("make the token file"))?;
                Ok(token)
            }
            Err(e) => Err(failed("read the token file")(e)),
        }
    }

    /// Writes under another name first, so that the file is complete or does not exist.
    fn write(&self, path: &Path) -> io::Result<()> {
        let unfinished = path.with_extension("token.new");
        match std::fs::remove_file(&unfinished) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut options = std::fs::File::options();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&unfinished)?;
        writeln!(file, "{}", self.0)?;
        file.sync_all()?;
        std::fs::rename(&unfinished, path)?;
        // Clients store the token, so it must survive a power cut.
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(dir)?.sync_all()
    }

    /// Whether a request has this token.
    pub(crate) fn is_in(&self, headers: &HeaderMap) -> bool {
        let Some(given) = bearer(headers) else { return false };
        let (given, own) = (given.as_bytes(), self.0.as_bytes());
        // All bytes are compared, so that the time does not reveal how many are right.
        let difference = given.iter().zip(own).fold(0, |all, (a, b)| all | (a ^ b));
        given.len() == own.len() && difference == 0
    }
}

/// The secret of a request with `Authorization: Bearer SECRET`.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let given = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, secret) = given.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

/// The prefix of the secrets of named tokens, by which tools that search for leaked secrets find them.
pub(crate) const NAMED_PREFIX: &str = "hwt_";

/// The prefix of the secrets of console sessions and of links to them.
pub(crate) const SESSION_PREFIX: &str = "hws_";

/// A new secret that begins with `prefix`.
pub(crate) fn new_secret(random: &dyn Random, prefix: &str) -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    random.fill(&mut bytes)?;
    Ok(format!("{prefix}{}", hex(&bytes)))
}

/// The stored hash of a secret. The secret has 256 random bits, so the hash need not be slow.
pub(crate) fn hash_of(secret: &str) -> String {
    blake3::hash(secret.as_bytes()).to_hex().to_string()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::SystemRandom;

    #[test]
    fn a_token_is_made_once_and_for_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.token");
        std::fs::write(dir.path().join("api.token.new"), "of a daemon that died").unwrap();
        let made = Token::load_or_make(&path, &SystemRandom).unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!((made.0.len(), mode()), (64, 0o600));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(Token::load_or_make(&path, &SystemRandom).unwrap().0, made.0);
        assert_eq!(mode(), 0o600);
        let other = Token::load_or_make(&dir.path().join("other.token"), &SystemRandom).unwrap();
        assert_ne!(other.0, made.0);
        std::fs::write(&path, "").unwrap();
        assert!(matches!(Token::load_or_make(&path, &SystemRandom), Err(TokenError::Odd { .. })));
        assert_eq!(format!("{made:?}"), "Token(..)");
    }

    #[test]
    fn only_the_whole_token_as_bearer_counts() {
        let token = Token("ab".repeat(32));
        let has = |value: String| {
            let headers: HeaderMap = [(header::AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            token.is_in(&headers)
        };
        assert!(has(format!("Bearer {}", token.0)) && has(format!("bearer  {}", token.0)));
        assert!(!has(format!("Basic {}", token.0)) && !has(token.0.clone()) && !has("Bearer ".into()));
        assert!(!has(format!("Bearer {}", "ab".repeat(31))) && !has(format!("Bearer {}00", token.0)));
        assert!(!token.is_in(&HeaderMap::new()));
    }
}
