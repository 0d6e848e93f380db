//! The file of `headwater backup`: the data that a daemon cannot recreate, except images and the contents of disks.
//!
//! ```text
//!   headwater backup 1\n
//!   {"release":..,"made_at_ms":..,"host":..,"files":[{"name":"daemon.id","size_bytes":33,"sha256":..},..]}\n
//!   SHA-256 of these two lines, in hexadecimal digits\n
//!   the contents of the files, in that order
//! ```
//! Only names of an allow-list are accepted, so that a forged file cannot write elsewhere.
//!
//! # Not here
//! The file is not encrypted. It contains keys, so only its owner may read it.

pub mod restoring;
pub mod writing;

use std::io::{Error, ErrorKind, Read};

use aws_lc_rs::digest::{Context, Digest, SHA256};
use headwater_api::{Problem, ProblemKind};
use serde::{Deserialize, Serialize};

use crate::adapters::persistent_disks::INCOMPLETE;
use crate::secrets_key::{FILE_NAME, NEWER_FILE_NAME};

/// The first line. Its number is that of the format.
const FIRST_LINE: &str = "headwater backup 1";

/// The longest line at the start, which suffices for tens of thousands of keys.
const LINE_MAX_BYTES: u64 = 16 << 20;

/// The longest file besides the database.
const FILE_MAX_BYTES: u64 = 64 << 20;

/// The database.
pub const DATABASE: &str = "headwater.db";

/// The configuration file. It is restored into the data directory, because that of the host may be another one.
pub const CONFIGURATION: &str = "headwater.toml";

/// Files of a data directory that are in a backup. While the key of the secrets is replaced, either of its two files may be the right one.
const FILES: [&str; 7] =
    ["api.token", CONFIGURATION, "daemon.id", "database.place", DATABASE, FILE_NAME, NEWER_FILE_NAME];

/// Directories of a data directory whose files are in a backup.
const DIRECTORIES: [&str; 4] = ["boot", "keys", "node", "tls"];

/// The list of files in a backup, and its origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// The release that made the backup.
    pub release: String,
    /// When it was made.
    pub made_at_ms: u64,
    /// The name of the host.
    pub host: String,
    /// The data directory.
    pub data_dir: String,
    /// The format of the database in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database_format: Option<i64>,
    /// The database in PostgreSQL, which is not in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postgres: Option<String>,
    /// The files, in the order of their contents.
    pub files: Vec<Entry>,
}

/// A file in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name in the data directory: `FILE` or `DIRECTORY/FILE`.
    pub name: String,
    /// Its length.
    pub size_bytes: u64,
    /// The SHA-256 of its contents.
    pub sha256: String,
}

impl Contents {
    /// Whether the backup has a file of this name.
    pub fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file.name == name)
    }

    /// The number of files in a directory.
    pub fn count(&self, directory: &str) -> usize {
        let of = |file: &&Entry| file.name.split_once('/').is_some_and(|(it, _)| it == directory);
        self.files.iter().filter(of).count()
    }

    /// The header lines before the contents of the files.
    fn lines(&self) -> serde_json::Result<String> {
        let lines = format!("{FIRST_LINE}\n{}\n", serde_json::to_string(self)?);
        let sum = hexadecimal(&digest(lines.as_bytes()));
        Ok(format!("{lines}{sum}\n"))
    }

    /// Reads the header lines.
    fn read(from: &mut impl Read) -> anyhow::Result<Self> {
        let first = line(from, 64)?;
        if first != FIRST_LINE {
            return Err(match first.strip_prefix("headwater backup ") {
                Some(format) => {
                    let message = format!("the backup has format {format}, and this release reads format 1");
                    Problem::new(ProblemKind::Damaged, message).advise("use the release that made it").into()
                }
                None => {
                    let message = "the file was not made by 'headwater backup'";
                    Problem::new(ProblemKind::Invalid, message).into()
                }
            });
        }
        let (second, sum) = (line(from, LINE_MAX_BYTES)?, line(from, 64)?);
        let is_whole = hexadecimal(&digest(format!("{first}\n{second}\n").as_bytes())) == sum;
        let contents: Option<Self> = serde_json::from_str(&second).ok().filter(|_| is_whole);
        let contents = contents.ok_or_else(|| damaged("the checksum of its list of files does not match"))?;
        match contents.files.iter().find(|file| !is_allowed(&file.name)) {
            Some(file) => Err(damaged(&format!(
                "it has a file '{}', which backups never have",
                file.name.escape_debug()
            ))),
            None => Ok(contents),
        }
    }
}

/// Whether a backup may have files of this name.
fn is_allowed(name: &str) -> bool {
    let is_name = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
    match name.split_once('/') {
        None => FILES.contains(&name),
        // The mark of a disk says whether its write cache has all writes, and a backup has no write cache.
        Some(("keys", file)) if file.ends_with(INCOMPLETE) => false,
        Some((directory, file)) => DIRECTORIES.contains(&directory) && is_name(file),
    }
}

/// Reads a line of at most this many bytes, without its end. Empty if there is no such line.
fn line(from: &mut impl Read, max_bytes: u64) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while u64::try_from(bytes.len()).is_ok_and(|len| len <= max_bytes) {
        match from.read_exact(&mut byte) {
            Ok(()) if byte == *b"\n" => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Ok(()) => bytes.extend(byte),
            // A file of another kind may end before its first line does.
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(String::new())
}

fn damaged(why: &str) -> anyhow::Error {
    let advice = "copy the file again from its origin, or use an earlier backup";
    Problem::new(ProblemKind::Damaged, format!("the backup is damaged: {why}")).advise(advice).into()
}

fn digest(bytes: &[u8]) -> Digest {
    aws_lc_rs::digest::digest(&SHA256, bytes)
}

fn hexadecimal(digest: &Digest) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Copies all bytes, at most `max_bytes`. Returns the length and the SHA-256.
fn copy(
    from: &mut impl Read,
    mut to: impl FnMut(&[u8]) -> std::io::Result<()>,
    max_bytes: u64,
) -> std::io::Result<(u64, String)> {
    let mut sum = Context::new(&SHA256);
    let mut buffer = vec![0; 1 << 20];
    let mut len: u64 = 0;
    loop {
        let left = usize::try_from(max_bytes - len).unwrap_or(usize::MAX).min(buffer.len());
        let wanted = buffer.get_mut(..left).unwrap_or_default();
        let read = match from.read(wanted) {
            Ok(0) => return Ok((len, hexadecimal(&sum.finish()))),
            Ok(read) => read,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        let bytes = wanted.get(..read).ok_or_else(|| Error::from(ErrorKind::InvalidData))?;
        sum.update(bytes);
        to(bytes)?;
        len += u64::try_from(read).map_err(|_| Error::from(ErrorKind::InvalidData))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents() -> Contents {
        let files = [("daemon.id", "one"), ("keys/disk-1", "two"), ("tls/cert.pem", "three")];
        let entry = |(name, text): (&str, &str)| Entry {
            name: name.to_owned(),
            size_bytes: u64::try_from(text.len()).unwrap(),
            sha256: hexadecimal(&digest(text.as_bytes())),
        };
        Contents {
            release: "1".to_owned(),
            made_at_ms: 7,
            host: "a".to_owned(),
            data_dir: "/d".to_owned(),
            database_format: Some(1),
            postgres: None,
            files: files.into_iter().map(entry).collect(),
        }
    }

    #[test]
    fn the_list_of_files_is_read_as_it_was_written() {
        let lines = contents().lines().unwrap();
        let mut rest = lines.as_bytes();
        assert_eq!(Contents::read(&mut rest).unwrap(), contents());
        assert!(rest.is_empty());
        assert_eq!((contents().count("keys"), contents().has("daemon.id")), (1, true));
    }

    #[test]
    fn each_changed_byte_of_the_list_is_found() {
        let lines = contents().lines().unwrap().into_bytes();
        for at in 0..lines.len() {
            let mut changed = lines.clone();
            changed[at] ^= 1;
            assert!(Contents::read(&mut changed.as_slice()).is_err(), "byte {at}");
            assert!(Contents::read(&mut lines.get(..at).unwrap()).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn names_outside_of_the_data_directory_are_refused() {
        for name in
            ["../x", "/etc/passwd", "keys/../x", "keys/", "keys/.x", "keys/a/b", "store/x", "lock", ""]
        {
            assert!(!is_allowed(name), "{name}");
            let mut odd = contents();
            odd.files[0].name = name.to_owned();
            let error = Contents::read(&mut odd.lines().unwrap().as_bytes()).unwrap_err();
            assert!(error.to_string().contains("which backups never have"), "{error}");
        }
        for name in ["headwater.db", "keys/disk-1", "tls/cert.pem"] {
            assert!(is_allowed(name), "{name}");
        }
    }

    #[test]
    fn a_later_format_and_another_file_are_told_apart() {
        let told = |text: &str| Contents::read(&mut text.as_bytes()).unwrap_err().to_string();
        assert!(told("headwater backup 2\n{}\n").contains("format 2"));
        assert!(told("").contains("was not made by 'headwater backup'"));
        assert!(told(&"x".repeat(1000)).contains("was not made by 'headwater backup'"));
    }
}
