//! `headwater backup` and `headwater restore`: writes the data that a daemon cannot recreate to one file, and
//! restores it. This module checks the arguments and prints the results; `crate::backup` does the work.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_block::size;
use headwater_service::backend::{Clock, SystemClock};
use serde::Serialize;

use crate::backup::restoring::{self, Restored};
use crate::backup::writing::{self, Wanted};
use crate::backup::{CONFIGURATION, Contents, DATABASE};
use crate::cli::{BackupArgs, RestoreArgs};
use crate::config::{SYSTEM_FILE, system_data_dir};
use crate::contexts::LOCAL;
use crate::daemon::network::host_name;
use crate::data_dir::{DataDir, other_owner};
use crate::secrets_key::FILE_NAME;
use crate::show;

/// The content of `database.place` if the database is the SQLite file of the data directory.
const SQLITE: &str = "SQLite";

/// The result of a backup, as JSON.
#[derive(Serialize)]
struct Report<'a> {
    file: &'a Path,
    size_bytes: u64,
    #[serde(flatten)]
    contents: &'a Contents,
}

/// The result of a restore, as JSON.
#[derive(Serialize)]
struct RestoreReport<'a> {
    restored: &'a Path,
    /// The hosts whose nodes must accept this controller (`node accept`) if they have connected since the backup.
    nodes: &'a [String],
    #[serde(flatten)]
    contents: &'a Contents,
}

/// Fails if the command addresses a server on another host, because the data directory is on that host.
pub fn refuse_remote(context: Option<&str>) -> anyhow::Result<()> {
    match context.filter(|name| !name.is_empty() && *name != LOCAL) {
        None => Ok(()),
        Some(name) => {
            let message = format!(
                "a backup is made and restored on the host of the daemon, but '{name}' is another host"
            );
            Err(Problem::new(ProblemKind::Invalid, message).advise("run the command there").into())
        }
    }
}

/// Makes a backup. The daemon may run.
pub async fn write(data_dir: DataDir, args: BackupArgs, json: bool) -> anyhow::Result<u8> {
    let dir = data_dir.path().display();
    let place = data_dir.path().join("database.place");
    let postgres = std::fs::read_to_string(place).ok().filter(|place| place != SQLITE);
    match &postgres {
        Some(url) if !args.without_database => return Err(in_postgres(&data_dir, url).into()),
        Some(_) => {}
        None if args.without_database => {
            let message = format!(
                "--without-database is for databases in PostgreSQL, but the database of {dir} is a file in that directory"
            );
            return Err(Problem::new(ProblemKind::Invalid, message).advise("leave it out").into());
        }
        None => refuse_missing(&data_dir.database(), "name the data directory with --data-dir")?,
    }
    let wanted = Wanted {
        data_dir: &data_dir,
        configuration: args.config.or_else(|| configuration_of(data_dir.path())),
        postgres,
        host: host_name(),
        now_ms: SystemClock.now_ms(),
    };
    if let Some(file) = &wanted.configuration {
        refuse_missing(file, "name the configuration of the daemon with --config")?;
    }
    let contents = writing::write(&args.file, wanted).await?;
    let size_bytes = args.file.metadata().map_or(0, |file| file.len());
    if json {
        show::json(&Report { file: &args.file, size_bytes, contents: &contents })?;
        return Ok(0);
    }
    let taken = taken(&contents).join(", ");
    show::line(&format!(
        "backed up {dir} to {}, {}: {taken}",
        args.file.display(),
        size::format(size_bytes)
    ))?;
    if !contents.has(FILE_NAME) {
        show::aside(
            "the backup does not contain the key of the secrets in the database: keep a copy of that file elsewhere ('serve --secrets-key')\n",
        );
    }
    show::aside(
        "the backup contains keys and is not encrypted. It does not contain images ('headwater store sync' copies a store), nor the contents of \
         persistent disks\n",
    );
    Ok(0)
}

/// The contents of a backup, in words.
fn taken(contents: &Contents) -> Vec<String> {
    let keys = contents.count("keys");
    let all = [
        (contents.has(DATABASE), "the database".to_owned()),
        (contents.has(FILE_NAME), "the key of the secrets in it".to_owned()),
        (keys > 0, format!("{keys} keys of persistent disks")),
        (contents.count("node") > 0, "the certificate of this node".to_owned()),
        (contents.count("tls") > 0, "the certificate of the API".to_owned()),
        (contents.has(CONFIGURATION), "the configuration".to_owned()),
        (true, "the identity of the daemon".to_owned()),
    ];
    all.into_iter().filter(|(is_there, _)| *is_there).map(|(_, what)| what).collect()
}

fn in_postgres(data_dir: &DataDir, url: &str) -> Problem {
    let dir = data_dir.path().display();
    let message = format!("cannot back up the database of {dir}: it is in PostgreSQL ({url})");
    Problem::new(ProblemKind::Invalid, message).advise(format!(
        "copy the database with 'pg_dump --format custom --file DUMP {url}', and the rest with 'headwater backup --without-database FILE'"
    ))
}

fn refuse_missing(file: &Path, advice: &str) -> anyhow::Result<()> {
    let failed = || format!("cannot back up {}", file.display());
    match file.metadata() {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let problem = Problem::new(ProblemKind::NotFound, format!("{}: there is no such file", failed()));
            Err(problem.advise(advice).into())
        }
        Err(e) => Err(e).with_context(failed),
    }
}

/// The configuration file of this host's service, if it is for this data directory.
fn configuration_of(data_dir: &Path) -> Option<PathBuf> {
    let file = Path::new(SYSTEM_FILE);
    let named = system_data_dir().unwrap_or_else(|| PathBuf::from("/var/lib/headwater"));
    (file.is_file() && named == data_dir).then(|| file.to_owned())
}

/// Fills a data directory from a backup.
pub async fn restore(data_dir: DataDir, args: RestoreArgs, json: bool) -> anyhow::Result<u8> {
    let is_stdin = args.file == Path::new("-");
    let opened = || File::open(&args.file).with_context(|| format!("cannot read {}", args.file.display()));
    let dir = data_dir.path();
    if rustix::process::geteuid().is_root()
        && let Some(owner) = other_owner(dir)
    {
        let input = if is_stdin { Stdio::inherit() } else { Stdio::from(opened()?) };
        return as_owner(dir, owner, input, json);
    }
    let from: Box<dyn Read> =
        if is_stdin { Box::new(std::io::stdin()) as Box<dyn Read> } else { Box::new(opened()?) };
    let restored = restoring::restore(&data_dir, BufReader::new(from), SystemClock.now_ms()).await;
    let Restored { contents, nodes } =
        restored.with_context(|| format!("cannot restore {}", args.file.display()))?;
    if json {
        show::json(&RestoreReport { restored: dir, nodes: &nodes, contents: &contents })?;
        return Ok(0);
    }
    let (taken, made) = (taken(&contents).join(", "), show::time(contents.made_at_ms));
    show::line(&format!(
        "restored {} from the backup that host {} made at {made}: {taken}",
        dir.display(),
        contents.host
    ))?;
    show::aside(&next_steps(dir, &contents, &nodes));
    Ok(0)
}

/// The steps that remain after a restore.
fn next_steps(dir: &Path, contents: &Contents, nodes: &[String]) -> String {
    let dir = dir.display();
    let mut steps = vec![
        "the daemon from which the backup comes must not run any more, because this one has its identity"
            .to_owned(),
        format!("images: 'headwater store sync FROM {dir}/store' if {dir}/store does not exist"),
    ];
    if let Some(url) = &contents.postgres {
        steps.push(format!(
            "the database: 'pg_restore --clean --if-exists --dbname {url} DUMP', with the file that pg_dump wrote"
        ));
    }
    if contents.has(CONFIGURATION) {
        steps.push(format!("the configuration is {dir}/{CONFIGURATION}: compare it with {SYSTEM_FILE}"));
    }
    if !contents.has(FILE_NAME) {
        steps.push(format!(
            "the key of the secrets in the database: copy its file to {dir}/{FILE_NAME}, or name it with 'serve --secrets-key'"
        ));
    }
    for node in nodes {
        steps.push(format!(
            "node {node} refuses this controller if the node has connected since the backup: if so, start the daemon and \
             run 'headwater node accept {node}', which makes this database the valid one"
        ));
    }
    steps.into_iter().map(|step| format!("- {step}\n")).collect()
}

/// Runs this program again as the owner of the directory, to restore there: the owner's daemon could not use
/// files of root.
fn as_owner(dir: &Path, owner: u32, input: Stdio, json: bool) -> anyhow::Result<u8> {
    let group = dir.metadata().with_context(|| format!("cannot look at {}", dir.display()))?.gid();
    let mut command = Command::new("/proc/self/exe");
    command.arg("--data-dir").arg(dir).args(["restore", "-"]);
    if json {
        command.arg("--json");
    }
    let status = command.current_dir("/").uid(owner).gid(group).stdin(input).status();
    let status =
        status.with_context(|| format!("cannot restore as user {owner}, who owns {}", dir.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
