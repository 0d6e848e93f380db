//! Fills a data directory from a backup.
//!
//! ```text
//!   lock DIR -> DIR/restoring/: write all files, compare their checksums, open the database -> rename to DIR, the database last
//! ```
//! A daemon refuses a directory that contains `restoring`, so an interrupted restore is never mistaken for a data
//! directory.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_db::sqlite::{self, SqliteDatabase};
use headwater_db::{Database, NewEvent};

use super::{Contents, DATABASE, copy, damaged};
use crate::adapters::persistent_disks::INCOMPLETE;
use crate::data_dir::{DataDir, RESTORING};
use crate::secrets_key::SecretsKeyFile;
use crate::show;

/// Names that may exist in a data directory before it is filled. They are not changed.
const MAY_BE_THERE: [&str; 5] = ["cache", "lock", "lost+found", "run", "store"];

/// A directory that is being filled. If a restore fails before it moves files to their place, everything that it made is
/// removed.
struct Filling {
    dir: PathBuf,
    /// The names that existed before.
    before: Option<Vec<String>>,
    is_done: bool,
}

impl Drop for Filling {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        // Ignored, because the error of the restore matters more.
        let _ = std::fs::remove_dir_all(self.dir.join(RESTORING));
        let was_there = |name: &str| self.before.iter().flatten().any(|it| it == name);
        for name in ["cache", "run"].into_iter().filter(|name| !was_there(name)) {
            let _ = std::fs::remove_dir(self.dir.join(name));
        }
        if !was_there("lock") {
            let _ = std::fs::remove_file(self.dir.join("lock"));
        }
        if self.before.is_none() {
            let _ = std::fs::remove_dir(&self.dir);
        }
    }
}

/// The result of a restore.
pub struct Restored {
    /// The list of files in the backup.
    pub contents: Contents,
    /// The other hosts of the fleet.
    pub nodes: Vec<String>,
}

/// Fills `data_dir` from a backup. If the directory is in use or not empty, this fails and changes nothing.
pub async fn restore(data_dir: &DataDir, mut from: impl Read, now_ms: u64) -> anyhow::Result<Restored> {
    let contents = Contents::read(&mut from)?;
    if let Some(format) = contents.database_format.filter(|format| *format > sqlite::known_format()) {
        let known = sqlite::known_format();
        let message = format!(
            "the backup was made by release {}: its database has format {format}, and this release reads formats up to {known}",
            contents.release
        );
        let advice = "restore the backup with that release, or a later one";
        return Err(Problem::new(ProblemKind::Damaged, message).advise(advice).into());
    }
    let before = entries(data_dir.path())?;
    refuse_full(data_dir.path(), before.as_deref())?;
    let _lock = data_dir.lock()?;
    let mut filling = Filling { dir: data_dir.path().to_owned(), before, is_done: false };
    // A daemon may have run in between.
    refuse_full(data_dir.path(), entries(data_dir.path())?.as_deref())?;
    let staged = data_dir.path().join(RESTORING);
    let failed = || format!("cannot write to {}", staged.display());
    DirBuilder::new().mode(0o700).create(&staged).with_context(failed)?;
    for file in &contents.files {
        let path = staged.join(&file.name);
        let parent = path.parent().unwrap_or(&staged);
        DirBuilder::new().recursive(true).mode(0o700).create(parent).with_context(failed)?;
        let mut out =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).with_context(failed)?;
        let part = &mut (&mut from).take(file.size_bytes);
        let (len, sha256) = copy(part, |bytes| out.write_all(bytes), u64::MAX)
            .with_context(|| format!("cannot restore {}", file.name))?;
        if (len, &sha256) != (file.size_bytes, &file.sha256) {
            return Err(damaged(&format!("the checksum of {} does not match", file.name)));
        }
        out.sync_all().with_context(failed)?;
        mark_if_kept(data_dir.path(), &file.name, &path).with_context(failed)?;
        File::open(parent).and_then(|dir| dir.sync_all()).with_context(failed)?;
    }
    if from.read(&mut [0]).with_context(|| "cannot read the backup".to_owned())? > 0 {
        return Err(damaged("there is data after its last file"));
    }
    let nodes = match contents.database_format {
        Some(_) => look_at_database(&staged.join(DATABASE), &contents, now_ms).await?,
        None => Vec::new(),
    };
    // From now on files are moved to their place. If that is interrupted, RESTORING stays, and a daemon refuses the
    // directory.
    filling.is_done = true;
    put_in_place(&staged, data_dir.path()).with_context(|| {
        format!("cannot fill {}: remove what is in it, and restore again", data_dir.path().display())
    })?;
    Ok(Restored { contents, nodes })
}

/// Creates the mark that a disk may lack its last writes, next to its restored key, if its write cache is there: nothing
/// says whether it was closed. The machine's next stop removes the mark.
fn mark_if_kept(data_dir: &Path, name: &str, restored: &Path) -> std::io::Result<()> {
    let Some(disk) = name.strip_prefix("keys/") else { return Ok(()) };
    if data_dir.join("cache").join(disk).try_exists()? {
        File::create(restored.with_file_name(format!("{disk}{INCOMPLETE}")))?.sync_all()?;
    }
    Ok(())
}

/// The names in a directory. `None`: there is no such directory.
fn entries(dir: &Path) -> anyhow::Result<Option<Vec<String>>> {
    let listed = std::fs::read_dir(dir).and_then(|entries| {
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    });
    match listed {
        Ok(names) => Ok(Some(names)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot list {}", dir.display())),
    }
}

fn refuse_full(dir: &Path, names: Option<&[String]>) -> anyhow::Result<()> {
    let is_odd = |name: &&String| !MAY_BE_THERE.contains(&name.as_str());
    let Some(first) = names.into_iter().flatten().filter(is_odd).min() else { return Ok(()) };
    let message =
        format!("cannot restore into {}: the directory is not empty: it has '{first}'", dir.display());
    let advice = match first == RESTORING {
        true => {
            "an earlier restore was interrupted: remove its contents, except 'store' and 'cache', and restore again"
        }
        false => {
            "choose another directory with --data-dir; or stop its daemon and move its contents away, except 'store' and 'cache'"
        }
    };
    Err(Problem::new(ProblemKind::Conflict, message).advise(advice).into())
}

/// Checks the database, applies migrations, and records its origin in its history. Returns the other hosts of the fleet.
async fn look_at_database(path: &Path, contents: &Contents, now_ms: u64) -> anyhow::Result<Vec<String>> {
    sqlite::check(path).await?;
    let database = SqliteDatabase::open(path).await?;
    if let Some(keys) = path.parent().map(SecretsKeyFile::in_directory).filter(SecretsKeyFile::exists) {
        // A key that does not fit is noticed now, and not when a machine is started. It may be outdated: the daemon can have its key in
        // another place, and refuses to start without the right one.
        if let Err(error) = keys.unlock(&database).await {
            let is_other =
                error.downcast_ref::<Problem>().is_some_and(|problem| problem.kind == ProblemKind::Invalid);
            if !is_other {
                return Err(error);
            }
            tracing::warn!(
                "the key of secrets in the backup is not that of its database: 'serve --secrets-key' names the right one"
            );
        }
    }
    let user = rustix::process::geteuid().as_raw();
    let event = NewEvent {
        at_ms: now_ms,
        caller: format!("uid {user}"),
        subject: "daemon".to_owned(),
        action: "restored".into(),
        detail: format!("from the backup of {} on host {}", show::time(contents.made_at_ms), contents.host),
        change: None,
    };
    let noted = async {
        let mut repo = database.write().await?;
        repo.events().append(event).await?;
        let hosts = repo.hosts().list().await?;
        repo.save().await?;
        Ok::<_, headwater_db::DbError>(hosts)
    };
    let noted = noted.await;
    database.close().await;
    // The daemon's own host has no certificate.
    let nodes = noted?.into_iter().filter(|host| host.fingerprint.is_some());
    Ok(nodes.map(|host| host.name).collect())
}

/// Moves all files to their place, the database last: without it no daemon accepts the directory.
fn put_in_place(staged: &Path, dir: &Path) -> std::io::Result<()> {
    let mut names: Vec<_> =
        std::fs::read_dir(staged)?.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<_>>()?;
    names.sort_by_key(|name| name == DATABASE);
    for name in names {
        std::fs::rename(staged.join(&name), dir.join(&name))?;
    }
    File::open(dir)?.sync_all()?;
    std::fs::remove_dir(staged)?;
    File::open(dir)?.sync_all()
}
