//! The permitted readers: a file of names and hashes of tokens.
//!
//! A line is `NAME HASH`: a name for people, and the BLAKE3 of the token in 64 hexadecimal digits. Empty
//! lines and those that start with `#` are skipped. A token has 256 random bits, so its hash need not be
//! slow. The file is read again when it changes: removing a line takes effect within [`LOOK_EVERY`].

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
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The largest file of tokens.
pub const TOKEN_FILE_MAX_BYTES: u64 = 16 << 20;

/// The name of a token.
pub type TokenName = String;

/// The line of a token.
pub fn token_line(name: &str, token: &str) -> Result<String, ServeError> {
    let sound = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '@');
    if name.is_empty() || name.len() > 64 || !name.chars().all(sound) {
        return Err(ServeError::Invalid(format!(
            "'{}' is not a name for a token: 1 to 64 letters, digits, '.', '-', '_' and '@' are",
            name.escape_debug()
        )));
    }
    Ok(format!("{name} {}", Hash::of(token.as_bytes())))
}

/// The file, and its content when it was last read.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    state: Mutex<State>,
    /// Whether the program itself writes the file, by replacing it with a new file.
    is_issued: bool,
    /// Another file, whose tokens count as well.
    other: Option<Box<TokenFile>>,
}

#[derive(Debug)]
struct State {
    tokens: Vec<(TokenName, Hash)>,
    changed: Option<Changed>,
    looked: Instant,
}

impl TokenFile {
    /// Reads the file. A file without tokens is an error, because nobody could read anything.
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

    /// The file of tokens that this program makes itself, which may have none yet. A token is valid as soon
    /// as it is in the file.
    pub fn open_issued(path: &Path) -> Result<Self, ServeError> {
        let (tokens, changed) = read(path)?;
        Ok(Self::of(path, tokens, changed, true))
    }

    /// The tokens of another file count as well.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.other = Some(Box::new(other));
        self
    }

    fn of(path: &Path, tokens: Vec<(TokenName, Hash)>, changed: Option<Changed>, is_issued: bool) -> Self {
        let state = State { tokens, changed, looked: Instant::now() };
        Self { path: path.to_owned(), state: Mutex::new(state), is_issued, other: None }
    }

    /// The name of the token in an `Authorization` header, if it is one of the file's.
    pub(crate) fn name_of(&self, header: Option<&str>) -> Option<TokenName> {
        self.name_of_hash(Hash::of(token_of(header?)?.as_bytes()))
    }

    fn name_of_hash(&self, given: Hash) -> Option<TokenName> {
        // Hashes are compared, so the time reveals nothing about tokens.
        let find = |state: &State| {
            state.tokens.iter().find(|(_, hash)| *hash == given).map(|(name, _)| name.clone())
        };
        let mut state = self.state.lock();
        if state.looked.elapsed() >= LOOK_EVERY {
            self.look_again(&mut state);
        }
        let mut found = find(&state);
        if found.is_none() && self.is_issued {
            // It may have been made a moment ago.
            self.look_again(&mut state);
            found = find(&state);
        }
        drop(state);
        found.or_else(|| self.other.as_ref()?.name_of_hash(given))
    }

    fn look_again(&self, state: &mut State) {
        state.looked = Instant::now();
        let changed = std::fs::metadata(&self.path).ok().and_then(|metadata| changed(&metadata));
        if changed.is_some() && changed == state.changed {
            return;
        }
        match read(&self.path) {
            Ok((tokens, changed)) => (state.tokens, state.changed) = (tokens, changed),
            // An unreadable file admits nobody, because its owner may have wanted that.
            Err(e) => {
                tracing::error!(error = %e, "no token is accepted until the file can be read again");
                (state.tokens, state.changed) = (Vec::new(), None);
            }
        }
    }
}

/// When a file was changed, and its number, because another file may have replaced it.
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

/// The tokens in a file's text; the error is the number of an invalid line.
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
        file.state.lock().looked -= LOOK_EVERY * 2;
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
