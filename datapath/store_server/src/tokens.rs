//! Checks tokens of clients against a file of names and hashes.
//!
//! A line is `NAME HASH`: a name for people, and the BLAKE3 hash of the token in 64 hexadecimal digits. Empty
//! lines and lines that start with `#` are skipped. A token has 256 random bits, so a fast hash is enough.
//! The file is reloaded when it changes: removing a line takes effect within [`CHECK_INTERVAL`].

use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use headwater_block::small_file;
use headwater_store::Hash;
use parking_lot::Mutex;

use crate::error::ServeError;

/// How often the file is checked for changes, at most.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The largest token file.
pub const TOKEN_FILE_MAX_BYTES: u64 = 16 << 20;

/// The name of a token.
pub type TokenName = String;

/// The line of a token in the file.
pub fn token_line(name: &str, token: &str) -> Result<String, ServeError> {
    let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '@');
    if name.is_empty() || name.len() > 64 || !name.chars().all(sound) {
        return Err(ServeError::Invalid(format!(
            "'{}' is not a name for a token: use 1 to 64 letters, digits, '.', '-', '_' and '@'",
            name.escape_debug()
        )));
    }
    Ok(format!("{name} {}", Hash::of(token.as_bytes())))
}

/// The token file, and its content when it was last read.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    state: Mutex<State>,
    /// Whether this program itself writes the file, by replacing it with a new file.
    is_issued: bool,
    /// Another file, whose tokens are valid too.
    other: Option<Box<TokenFile>>,
}

#[derive(Debug)]
struct State {
    tokens: Vec<(TokenName, Hash)>,
    changed: Option<Changed>,
    checked_at: Instant,
}

impl TokenFile {
    /// Reads the file. A file without tokens is an error, because no client could read anything.
    pub fn open(path: &Path) -> Result<Self, ServeError> {
        let (tokens, changed) = read(path)?;
        if tokens.is_empty() {
            return Err(ServeError::Invalid(format!(
                "the token file {} has no tokens; 'headwater store token NAME --token-file {}' makes one",
                path.display(),
                path.display()
            )));
        }
        Ok(Self::of(path, tokens, changed, false))
    }

    /// Opens the file of tokens that this program makes itself, which may have none yet. A token is valid as
    /// soon as it is in the file.
    pub fn open_issued(path: &Path) -> Result<Self, ServeError> {
        let (tokens, changed) = read(path)?;
        Ok(Self::of(path, tokens, changed, true))
    }

    /// Adds another file, whose tokens are valid too.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.other = Some(Box::new(other));
        self
    }

    fn of(path: &Path, tokens: Vec<(TokenName, Hash)>, changed: Option<Changed>, is_issued: bool) -> Self {
        let state = State { tokens, changed, checked_at: Instant::now() };
        Self { path: path.to_owned(), state: Mutex::new(state), is_issued, other: None }
    }

    /// The name of the token in an `Authorization` header, if a file has it.
    pub(crate) fn name_of(&self, header: Option<&str>) -> Option<TokenName> {
        self.name_of_hash(Hash::of(token_of(header?)?.as_bytes()))
    }

    fn name_of_hash(&self, given: Hash) -> Option<TokenName> {
        // Hashes are compared, so the time reveals nothing about tokens.
        let find = |state: &State| {
            state.tokens.iter().find(|(_, hash)| *hash == given).map(|(name, _)| name.clone())
        };
        let mut state = self.state.lock();
        if state.checked_at.elapsed() >= CHECK_INTERVAL {
            self.reload_if_changed(&mut state);
        }
        let mut found = find(&state);
        if found.is_none() && self.is_issued {
            // The token may have been made a moment ago.
            self.reload_if_changed(&mut state);
            found = find(&state);
        }
        drop(state);
        found.or_else(|| self.other.as_ref()?.name_of_hash(given))
    }

    fn reload_if_changed(&self, state: &mut State) {
        state.checked_at = Instant::now();
        let changed = std::fs::metadata(&self.path).ok().and_then(|metadata| changed(&metadata));
        if changed.is_some() && changed == state.changed {
            return;
        }
        match read(&self.path) {
            Ok((tokens, changed)) => (state.tokens, state.changed) = (tokens, changed),
            // If the file is unreadable, no token of it is valid, because its owner may have wanted that.
            Err(e) => {
                tracing::error!(error = %e, "the token file cannot be read: no token of this file is accepted until it can be");
                (state.tokens, state.changed) = (Vec::new(), None);
            }
        }
    }
}

/// When a file was changed, and its inode, because another file may have replaced it.
type Changed = (SystemTime, u64);

fn changed(metadata: &Metadata) -> Option<Changed> {
    Some((metadata.modified().ok()?, metadata.ino()))
}

/// The tokens of a file, and when it was changed.
type Read = (Vec<(TokenName, Hash)>, Option<Changed>);

fn read(path: &Path) -> Result<Read, ServeError> {
    let failed =
        |source| ServeError::Io { tried: format!("cannot read the token file {}", path.display()), source };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let text = small_file::read_open(file, TOKEN_FILE_MAX_BYTES).and_then(small_file::text);
    let text = text.map_err(|e| match e.kind() {
        ErrorKind::InvalidData => {
            ServeError::Invalid(format!("the token file {} cannot be used: {e}", path.display()))
        }
        _ => failed(e),
    })?;
    let tokens = lines_of(&text).map_err(|line| {
        ServeError::Invalid(format!(
            "line {line} of the token file {} is not 'NAME HASH'; 'headwater store token' makes such lines",
            path.display()
        ))
    })?;
    Ok((tokens, changed(&metadata)))
}

/// The token of an `Authorization` header.
pub(crate) fn token_of(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The tokens in a file's text. The error is the number of the first invalid line.
pub(crate) fn lines_of(text: &str) -> Result<Vec<(TokenName, Hash)>, usize> {
    let mut tokens = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let parsed =
            line.split_once(' ').and_then(|(name, hash)| Some((name.to_owned(), hash.trim().parse().ok()?)));
        tokens.push(parsed.ok_or(index.saturating_add(1))?);
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_known_by_their_hashes_until_their_line_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens");
        assert!(matches!(TokenFile::open(&path), Err(ServeError::Io { .. })));
        let endless = TokenFile::open(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(endless.contains("it has more than 16.0 MiB"), "{endless}");
        std::fs::write(&path, "# nobody\n\n").unwrap();
        assert!(TokenFile::open(&path).unwrap_err().to_string().contains("headwater store token"));
        std::fs::write(&path, "anna secret\n").unwrap();
        assert!(TokenFile::open(&path).unwrap_err().to_string().contains("line 1"));
        let lines = [token_line("anna", "one").unwrap(), token_line("ben", "two").unwrap()].join("\n");
        std::fs::write(&path, &lines).unwrap();
        let file = TokenFile::open(&path).unwrap();
        assert_eq!(file.name_of(Some("Bearer two")).as_deref(), Some("ben"));
        assert_eq!(file.name_of(Some("bearer one")).as_deref(), Some("anna"));
        for wrong in [None, Some("Bearer three"), Some("Basic one"), Some("one"), Some("Bearer ")] {
            assert_eq!(file.name_of(wrong), None, "{wrong:?}");
        }
        std::fs::write(&path, token_line("ben", "two").unwrap()).unwrap();
        file.state.lock().checked_at -= CHECK_INTERVAL * 2;
        file.state.lock().changed = None;
        assert_eq!(file.name_of(Some("Bearer one")), None);
        assert_eq!(file.name_of(Some("Bearer two")).as_deref(), Some("ben"));
        assert!(token_line("a b", "x").is_err());
    }

    #[test]
    fn an_issued_token_counts_at_once_and_beside_those_of_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let (given, issued) = (dir.path().join("given"), dir.path().join("issued"));
        std::fs::write(&given, token_line("anna", "one").unwrap()).unwrap();
        std::fs::write(&issued, "").unwrap();
        let file = TokenFile::open(&given).unwrap().and(TokenFile::open_issued(&issued).unwrap());
        for token in ["two", "three"] {
            assert_eq!(file.name_of(Some(&format!("Bearer {token}"))), None);
            std::fs::write(dir.path().join("new"), token_line("pc-1", token).unwrap()).unwrap();
            std::fs::rename(dir.path().join("new"), &issued).unwrap();
            assert_eq!(file.name_of(Some(&format!("Bearer {token}"))).as_deref(), Some("pc-1"));
        }
        assert_eq!(file.name_of(Some("Bearer two")), None);
        assert_eq!(file.name_of(Some("Bearer one")).as_deref(), Some("anna"));
    }
}
