//! Writes a backup of a data directory, also while its daemon runs.
//!
//! Keys are read before the database is copied. A disk that is created in between is then in the database without a key in
//! the backup. In the opposite order, a daemon would remove the disk of a key that its database does not know.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_db::sqlite;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::{CONFIGURATION, Contents, DATABASE, DIRECTORIES, Entry, FILE_MAX_BYTES, FILES, copy};
use crate::data_dir::DataDir;

/// The contents of a backup to write.
pub struct Wanted<'a> {
    /// The data directory.
    pub data_dir: &'a DataDir,
    /// The configuration file, if there is one.
    pub configuration: Option<PathBuf>,
    /// The PostgreSQL database, which is not copied.
    pub postgres: Option<String>,
    /// The name of the host.
    pub host: String,
    /// The time.
    pub now_ms: u64,
}

/// The temporary file beside the backup, which is removed unless the backup is complete.
struct Unfinished(PathBuf);

impl Unfinished {
    /// A unique name in the directory of the backup, so that the later rename stays within the file system.
    fn beside(path: &Path) -> Self {
        let name = format!(".headwater-{}.new", uuid::Uuid::new_v4().simple());
        Self(path.with_file_name(name))
    }

    fn create(&self) -> std::io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.0)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Fails after the file was renamed, which is expected.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes a backup to `path`, where no file may exist. The file is complete or does not exist, and only its owner may
/// read it.
pub async fn write(path: &Path, wanted: Wanted<'_>) -> anyhow::Result<Contents> {
    let failed = || format!("cannot write the backup {}", path.display());
    refuse_existing(path)?;
    let small = small_files(&wanted)?;
    let database = Unfinished::beside(path);
    let mut contents = Contents {
        release: env!("CARGO_PKG_VERSION").to_owned(),
        made_at_ms: wanted.now_ms,
        host: wanted.host,
        data_dir: wanted.data_dir.path().display().to_string(),
        database_format: None,
        postgres: wanted.postgres,
        files: small.iter().map(|(entry, _)| entry.clone()).collect(),
    };
    if contents.postgres.is_none() {
        database.create().with_context(failed)?;
        contents.database_format = Some(sqlite::copy(&wanted.data_dir.database(), &database.0).await?);
        let mut file = File::open(&database.0).with_context(failed)?;
        let (size_bytes, sha256) = copy(&mut file, |_| Ok(()), u64::MAX).with_context(failed)?;
        contents.files.push(Entry { name: DATABASE.to_owned(), size_bytes, sha256 });
    }
    let unfinished = Unfinished::beside(path);
    let mut file = unfinished.create().with_context(failed)?;
    let written = || -> std::io::Result<()> {
        file.write_all(contents.lines()?.as_bytes())?;
        for (_, bytes) in &small {
            file.write_all(bytes)?;
        }
        if contents.postgres.is_none() {
            std::io::copy(&mut File::open(&database.0)?, &mut file)?;
        }
        file.sync_all()
    };
    let mut written = written;
    written().with_context(failed)?;
    rename_to_new(&unfinished.0, path)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).with_context(failed)?;
    Ok(contents)
}

fn exists(path: &Path) -> anyhow::Error {
    let message = format!("cannot write the backup {}: it exists already", path.display());
    Problem::new(ProblemKind::Conflict, message).advise("choose another name, or remove the file").into()
}

fn refuse_existing(path: &Path) -> anyhow::Result<()> {
    match path.symlink_metadata() {
        Ok(_) => Err(exists(path)),
        Err(_) => Ok(()),
    }
}

/// Renames a file without replacing another one.
fn rename_to_new(from: &Path, to: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write the backup {}", to.display());
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => Err(exists(to)),
        // For file systems that cannot do that, such as NFS: creating a link replaces nothing either.
        Err(Errno::INVAL | Errno::NOSYS) => match std::fs::hard_link(from, to) {
            Ok(()) => std::fs::remove_file(from).with_context(failed),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(exists(to)),
            Err(e) => Err(e).with_context(failed),
        },
        Err(e) => Err(e).with_context(failed),
    }
}

/// The files other than the database, with their contents.
fn small_files(wanted: &Wanted<'_>) -> anyhow::Result<Vec<(Entry, Vec<u8>)>> {
    let dir = wanted.data_dir.path();
    let mut found: Vec<(String, PathBuf)> = FILES
        .into_iter()
        .filter(|name| ![DATABASE, CONFIGURATION].contains(name))
        .map(|name| (name.to_owned(), dir.join(name)))
        .collect();
    found.extend(wanted.configuration.iter().map(|file| (CONFIGURATION.to_owned(), file.clone())));
    for directory in DIRECTORIES {
        let path = dir.join(directory);
        let entries = match std::fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(e).with_context(|| format!("cannot list {}", path.display())),
        };
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", path.display()))?;
            let name = format!("{directory}/{}", entry.file_name().to_string_lossy());
            // A temporary file that is about to be renamed has a name that is not allowed.
            if super::is_allowed(&name) && entry.file_type().is_ok_and(|kind| kind.is_file()) {
                found.push((name, entry.path()));
            }
        }
    }
    found.sort();
    let mut files = Vec::new();
    for (name, path) in found {
        let read = || format!("cannot read {}", path.display());
        let mut bytes = Vec::new();
        let mut file = match File::open(&path) {
            Ok(file) => file.take(FILE_MAX_BYTES + 1),
            // Removed since it was listed, for instance the key of a disk whose machine was removed.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(e).with_context(read),
        };
        let take = |part: &[u8]| bytes.write_all(part);
        let (size_bytes, sha256) = copy(&mut file, take, u64::MAX).with_context(read)?;
        if size_bytes > FILE_MAX_BYTES {
            let why = format!("{} has more than {} MiB", path.display(), FILE_MAX_BYTES >> 20);
            return Err(Problem::new(ProblemKind::Invalid, why).during("cannot back it up").into());
        }
        files.push((Entry { name, size_bytes, sha256 }, bytes));
    }
    Ok(files)
}
