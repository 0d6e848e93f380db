//! Secrets for CHAP: lines of text, from a file that only its owner can read, or from the environment.
//!
//! ```text
//! # who may log in, any number
//! initiator  NAME  SECRET
//! # how the target proves itself, where the initiator asks (mutual CHAP); one at most
//! target     NAME  SECRET
//! ```

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::login::chap::{Accounts, SECRET_BYTES_MAX, SECRET_BYTES_MIN, Secret};

/// A longer file is none of secrets.
const FILE_BYTES: u64 = 1 << 20;

/// Why there are no secrets. No message shows one.
#[derive(Debug, thiserror::Error)]
pub enum ChapFileError {
    /// It cannot be read.
    #[error("cannot read the CHAP secrets in {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Others can read it.
    #[error("the CHAP secrets in {path} can be read by others (mode {mode:03o}); run: chmod 600 {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A line is wrong.
    #[error("the CHAP secrets in {place}, line {line}: {why}")]
    Line {
        /// Which file, or the environment.
        place: String,
        /// From 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// There is nobody who could log in.
    #[error("the CHAP secrets in {place} name no initiator: add a line 'initiator NAME SECRET'")]
    Nobody {
        /// Which file, or the environment.
        place: String,
    },
}

/// Reads a file.
pub fn read(path: &Path) -> Result<Accounts, ChapFileError> {
    let failed = |source| ChapFileError::Read { path: path.into(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let mode = metadata.mode() & 0o777;
    if metadata.is_file() && mode & 0o077 != 0 {
        return Err(ChapFileError::Open { path: path.into(), mode });
    }
    let mut text = String::new();
    file.take(FILE_BYTES).read_to_string(&mut text).map_err(failed)?;
    parse(&text, &path.display().to_string())
}

/// Parses a text; `place` is where it comes from, for messages.
pub fn parse(text: &str, place: &str) -> Result<Accounts, ChapFileError> {
    let mut accounts = Accounts::default();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        take_line(line, &mut accounts).map_err(|why| ChapFileError::Line {
            place: place.into(),
            line: at.saturating_add(1),
            why,
        })?;
    }
    if accounts.initiators.is_empty() {
        return Err(ChapFileError::Nobody { place: place.into() });
    }
    Ok(accounts)
}

fn take_line(line: &str, accounts: &mut Accounts) -> Result<(), String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [kind, name, secret] = words.as_slice() else {
        return Err("expected three words: initiator or target, a name, a secret".into());
    };
    let new = Secret::new(*name, secret.as_bytes()).ok_or_else(|| {
        format!(
            "the secret of '{name}' has {} bytes; {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} are legal",
            secret.len()
        )
    })?;
    let others = accounts.initiators.iter().chain(&accounts.target);
    match *kind {
        "initiator" if accounts.initiators.iter().any(|known| known.name == *name) => {
            return Err(format!("the initiator '{name}' is there already"));
        }
        "target" if accounts.target.is_some() => return Err("a second target secret".into()),
        "initiator" => {}
        "target" if others.clone().any(|other| other.has_the_secret_of(&new)) => {
            return Err("the target's secret must differ from those of initiators".into());
        }
        "target" => {
            accounts.target = Some(new);
            return Ok(());
        }
        other => return Err(format!("'{other}' is neither initiator nor target")),
    }
    // The same secret in both directions would let an initiator have its challenge answered by the target.
    if accounts.target.as_ref().is_some_and(|target| target.has_the_secret_of(&new)) {
        return Err("the target's secret must differ from those of initiators".into());
    }
    accounts.initiators.push(new);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn secrets_are_read_from_a_file_that_only_its_owner_can_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chap");
        std::fs::write(&path, "# who\ninitiator  one first-secret-1\n\ntarget disk other-secret-2\n")
            .unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("chmod 600"));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let accounts = read(&path).unwrap();
        assert_eq!(accounts.initiators, vec![Secret::new("one", "first-secret-1").unwrap()]);
        assert_eq!(accounts.target.unwrap().name, "disk");
        let missing = read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("cannot read the CHAP secrets"), "{missing}");
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line_and_without_the_secret() {
        for (text, expected) in [
            ("", "name no initiator"),
            ("target a secret-secret-1", "name no initiator"),
            ("\ninitiator a hidden", "line 2: the secret of 'a' has 6 bytes"),
            ("initiator a", "line 1: expected three words"),
            ("user a hidden-secret-1", "'user' is neither"),
            (
                "initiator a hidden-secret-1\ninitiator a hidden-secret-2",
                "line 2: the initiator 'a' is there",
            ),
            (
                "initiator a hidden-secret-1\ntarget b hidden-secret-1",
                "line 2: the target's secret must differ",
            ),
            (
                "target b hidden-secret-1\ninitiator a hidden-secret-1",
                "line 2: the target's secret must differ",
            ),
            (
                "initiator a hidden-secret-1\ntarget b hidden-2-secret\ntarget c hidden-3-secret",
                "a second target",
            ),
        ] {
            let error = parse(text, "the test").unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
            assert!(!error.contains("hidden"), "{error}");
        }
    }
}
