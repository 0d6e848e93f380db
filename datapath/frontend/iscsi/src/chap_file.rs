//! CHAP secrets: lines of text, from a file to which only its owner has access, or from the environment.
//!
//! ```text
//! # initiators that may log in, any number; with TARGETs, only to these targets
//! initiator  NAME  SECRET  [TARGET..]
//! # the secret with which the target proves itself if the initiator asks (mutual CHAP); at most one
//! target     NAME  SECRET
//! ```

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use headwater_block::small_file;

use crate::login::chap::{Accounts, SECRET_BYTES_MAX, SECRET_BYTES_MIN, Secret};
use crate::name::IscsiName;

/// A longer file is refused: it cannot be a file of secrets.
const FILE_BYTES: u64 = 1 << 20;

/// Why there are no usable secrets. No message shows a secret.
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
    /// Its group or other users have access to it.
    #[error("the CHAP secrets in {path} can be accessed by others (mode {mode:03o}); run: chmod 600 {path}")]
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
    /// A line names a target that is not offered.
    #[error(
        "the CHAP secrets in {place} name the target '{target}', which is not offered: correct the name, or leave it out"
    )]
    Unknown {
        /// Which file, or the environment.
        place: String,
        /// The name.
        target: IscsiName,
    },
    /// No line permits a login to this target.
    #[error(
        "the CHAP secrets in {place} permit no login to '{target}': add a line 'initiator NAME SECRET {target}'"
    )]
    Closed {
        /// Which file, or the environment.
        place: String,
        /// The target.
        target: IscsiName,
    },
    /// The text names no initiator.
    #[error("the CHAP secrets in {place} name no initiator: add a line 'initiator NAME SECRET'")]
    Nobody {
        /// Which file, or the environment.
        place: String,
    },
}

/// The parsed secrets.
#[derive(Debug, Default)]
pub struct ChapFile {
    place: String,
    initiators: Vec<Login>,
    target: Option<Secret>,
}

/// An initiator that may log in.
#[derive(Debug)]
struct Login {
    secret: Secret,
    /// The targets; empty means all.
    targets: Vec<IscsiName>,
}

impl ChapFile {
    /// Returns the accounts of each target in `targets`, in their order. Fails if a line names another
    /// target, or if a target has no initiator that may log in.
    pub fn accounts(&self, targets: &[IscsiName]) -> Result<Vec<Accounts>, ChapFileError> {
        let named = self.initiators.iter().flat_map(|login| &login.targets);
        if let Some(target) = named.into_iter().find(|target| !targets.contains(target)) {
            return Err(ChapFileError::Unknown { place: self.place.clone(), target: target.clone() });
        }
        targets.iter().map(|target| self.accounts_of(target)).collect()
    }

    fn accounts_of(&self, target: &IscsiName) -> Result<Accounts, ChapFileError> {
        let may = |login: &&Login| login.targets.is_empty() || login.targets.contains(target);
        let initiators: Vec<Secret> =
            self.initiators.iter().filter(may).map(|login| login.secret.clone()).collect();
        if initiators.is_empty() {
            return Err(ChapFileError::Closed { place: self.place.clone(), target: target.clone() });
        }
        Ok(Accounts { initiators, target: self.target.clone() })
    }
}

/// Reads a file. Checks the permissions of a regular file, but not its owner, and nothing of a pipe.
pub fn read(path: &Path) -> Result<ChapFile, ChapFileError> {
    let failed = |source| ChapFileError::Read { path: path.into(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let mode = metadata.mode() & 0o777;
    if metadata.is_file() && mode & 0o077 != 0 {
        return Err(ChapFileError::Open { path: path.into(), mode });
    }
    let text = small_file::read_open(file, FILE_BYTES).and_then(small_file::text).map_err(failed)?;
    parse(&text, &path.display().to_string())
}

/// Parses a text; `place` names its source in messages.
pub fn parse(text: &str, place: &str) -> Result<ChapFile, ChapFileError> {
    let mut file = ChapFile { place: place.into(), ..ChapFile::default() };
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        take_line(line, &mut file).map_err(|why| ChapFileError::Line {
            place: place.into(),
            line: at.saturating_add(1),
            why,
        })?;
    }
    if file.initiators.is_empty() {
        return Err(ChapFileError::Nobody { place: place.into() });
    }
    Ok(file)
}

fn take_line(line: &str, file: &mut ChapFile) -> Result<(), String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [kind, name, secret, targets @ ..] = words.as_slice() else {
        return Err("expected three words: initiator or target, a name, a secret".into());
    };
    let new = Secret::new(*name, secret.as_bytes()).ok_or_else(|| {
        format!(
            "the secret of '{name}' has {} bytes; {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} are legal",
            secret.len()
        )
    })?;
    // With the same secret in both directions, an initiator could have the target answer the initiator's own
    // challenge.
    let clash = || Err("the target's secret must differ from those of initiators".to_owned());
    match *kind {
        "initiator" if file.initiators.iter().any(|known| known.secret.name == *name) => {
            Err(format!("the initiator '{name}' occurs twice"))
        }
        "initiator" if file.target.as_ref().is_some_and(|target| target.has_the_secret_of(&new)) => clash(),
        "initiator" => {
            let targets = targets.iter().map(|target| named(target)).collect::<Result<_, _>>()?;
            file.initiators.push(Login { secret: new, targets });
            Ok(())
        }
        "target" if file.target.is_some() => {
            Err("there is already a line 'target'; only one is allowed".into())
        }
        "target" if !targets.is_empty() => Err("expected three words: target, a name, a secret".into()),
        "target" if file.initiators.iter().any(|known| known.secret.has_the_secret_of(&new)) => clash(),
        "target" => {
            file.target = Some(new);
            Ok(())
        }
        other => Err(format!("'{other}' is neither initiator nor target")),
    }
}

/// Parses the name of a target. An invalid text is not shown in the error, because it may be a part of a
/// secret that contains a space.
fn named(word: &str) -> Result<IscsiName, String> {
    word.parse()
        .map_err(|_| "only names of targets (iqn...) may follow a secret; secrets have no spaces".into())
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
        let accounts = read(&path).unwrap().accounts(&[name("a")]).unwrap().remove(0);
        assert_eq!(accounts.initiators, vec![Secret::new("one", "first-secret-1").unwrap()]);
        assert_eq!(accounts.target.unwrap().name, "disk");
        let missing = read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("cannot read the CHAP secrets"), "{missing}");
    }

    fn name(disk: &str) -> IscsiName {
        format!("iqn.2026-01.org.example:{disk}").parse().unwrap()
    }

    #[test]
    fn an_initiator_may_be_for_some_targets_only() {
        let text = "initiator all secret-of-all\ninitiator a secret-of-a-1 iqn.2026-01.org.example:a\n\
                    initiator ab secret-of-ab iqn.2026-01.org.example:a iqn.2026-01.org.example:b";
        let file = parse(text, "the test").unwrap();
        let may = |accounts: &Accounts| -> Vec<String> {
            accounts.initiators.iter().map(|secret| secret.name.clone()).collect()
        };
        let accounts = file.accounts(&[name("a"), name("b"), name("c")]).unwrap();
        assert_eq!(may(&accounts[0]), ["all", "a", "ab"]);
        assert_eq!(may(&accounts[1]), ["all", "ab"]);
        assert_eq!(may(&accounts[2]), ["all"]);
        let unknown = file.accounts(&[name("a")]).unwrap_err().to_string();
        assert!(unknown.contains(":b', which is not offered"), "{unknown}");
        let file = parse("initiator a secret-of-a-1 iqn.2026-01.org.example:a", "the test").unwrap();
        let closed = file.accounts(&[name("a"), name("b")]).unwrap_err().to_string();
        assert!(closed.contains("permit no login to 'iqn.2026-01.org.example:b'"), "{closed}");
    }

    #[test]
    fn errors_name_the_line_but_not_the_secret() {
        for (text, expected) in [
            ("", "name no initiator"),
            ("target a secret-secret-1", "name no initiator"),
            ("\ninitiator a hidden", "line 2: the secret of 'a' has 6 bytes"),
            ("initiator a", "line 1: expected three words"),
            ("user a hidden-secret-1", "'user' is neither"),
            (
                "initiator a hidden-secret-1 hidden",
                "line 1: only names of targets (iqn...) may follow a secret",
            ),
            ("target a hidden-secret-1 iqn.2026-01.org.example:a", "line 1: expected three words"),
            (
                "initiator a hidden-secret-1\ninitiator a hidden-secret-2",
                "line 2: the initiator 'a' occurs twice",
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
                "only one is allowed",
            ),
        ] {
            let error = parse(text, "the test").unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
            assert!(!error.contains("hidden"), "{error}");
        }
    }
}
