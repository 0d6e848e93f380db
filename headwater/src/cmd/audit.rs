//! `headwater audit`: writes the history to a file as a hash chain ([`headwater_api::audit`]), and checks such a file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use anyhow::Context;
use headwater_api::audit::{AuditCheck, AuditError};
use headwater_api::{Problem, ProblemKind};
use serde::Serialize;

use crate::cli::AuditCommand;
use crate::client::Client;
use crate::show;

/// The result of an export or a check.
#[derive(Serialize)]
struct Report {
    file: String,
    events: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    added: Option<u64>,
    first_id: Option<i64>,
    last_id: Option<i64>,
    /// Whether the first event of the file is the first of the history.
    is_whole: bool,
    /// The hash of the last line.
    hash: String,
}

/// Runs a command. Only `export` calls `client`: it asks the daemon.
pub async fn run(
    client: impl FnOnce() -> anyhow::Result<Client>,
    command: AuditCommand,
    json: bool,
) -> anyhow::Result<u8> {
    match command {
        AuditCommand::Export { file, after } => export(client()?, &file, after, json).await?,
        AuditCommand::Check { file } => {
            let opened = File::open(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let (check, rest) = read(&opened, &file)?;
            if rest > 0 {
                let advice = "the next 'headwater audit export' to it completes the line";
                return Err(damaged(&file, "the last line is not complete").advise(advice).into());
            }
            show_report(&file, &check, None, json)?;
        }
    }
    Ok(0)
}

/// Adds the newer events of the daemon to a file; those after the event `after` to a new file.
async fn export(client: Client, path: &Path, after: Option<i64>, json: bool) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
    let mut file = opened.with_context(cannot)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message =
                format!("cannot write {}: another 'headwater audit export' writes it", path.display());
            return Err(Problem::new(ProblemKind::Conflict, message).into());
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(cannot),
    }
    let (mut check, rest) = read(&file, path)?;
    if rest > 0 {
        // An export was killed while it wrote this line, which is requested again.
        let len = file.metadata().with_context(cannot)?.len();
        file.set_len(len.saturating_sub(rest)).with_context(cannot)?;
    }
    let before = check.lines;
    if after.is_some() && before > 0 {
        let message = format!("cannot begin {} after an event: the file has events already", path.display());
        return Err(Problem::new(ProblemKind::Invalid, message)
            .advise("leave out --after, or name a new file")
            .into());
    }
    if let Some(first) = check.first {
        // The line before it would show a change of its text, and is not in the file.
        let lines = client.audit_after(first.id.saturating_sub(1)).await?;
        if lines.lines().next().is_some_and(|line| !check.begins_like(line)) {
            let why = format!("the first line of the file is not event {} of the daemon's history", first.id);
            return Err(discontinued(path, before, why).into());
        }
    }
    if let Some(last) = check.last {
        // A history that has no newer events could also be an older one, of a backup.
        let lines = client.audit_after(last.id.saturating_sub(1)).await?;
        if !lines.lines().next().is_some_and(|line| check.ends_with(line)) {
            let why = format!("the daemon's history has no event {} like that in the file", last.id);
            return Err(discontinued(path, before, why).into());
        }
    }
    loop {
        let after = check.last.map_or(after.unwrap_or(0), |last| last.id);
        let lines = client.audit_after(after).await?;
        if lines.is_empty() {
            break;
        }
        let mut good_bytes = 0_usize;
        let checked = lines.split_inclusive('\n').try_for_each(|line| {
            check.add(line.trim_end_matches('\n'))?;
            good_bytes = good_bytes.saturating_add(line.len());
            Ok::<(), AuditError>(())
        });
        file.write_all(lines.as_bytes().get(..good_bytes).unwrap_or_default()).with_context(cannot)?;
        if let Err(error) = checked {
            return Err(discontinued(path, before, error).into());
        }
    }
    file.sync_all().with_context(cannot)?;
    show_report(path, &check, Some(check.lines.saturating_sub(before)), json)
}

/// The error if the daemon's events do not follow each other, or do not follow a file that had lines before.
fn discontinued(path: &Path, lines_before: u64, why: impl std::fmt::Display) -> Problem {
    let message = format!("cannot add the newer events to {}: {why}", path.display());
    let problem = Problem::new(ProblemKind::Damaged, message);
    problem.advise(if lines_before == 0 {
        "look for the change in earlier exports and backups; the file has the events before it; export the later ones to a new file, with \
         --after and the number of that event"
    } else {
        "the history is another one, was changed, or has lost events after the last export (it keeps at least the newest 20,000, and a \
         restored backup has only older ones); keep this file as evidence, and export to a new one"
    })
}

fn damaged(path: &Path, why: impl std::fmt::Display) -> Problem {
    Problem::new(ProblemKind::Damaged, format!("{} is not an unchanged audit log: {why}", path.display()))
}

/// Checks the lines of a file. Also returns how many bytes the last line has, if it does not end.
fn read(file: &File, path: &Path) -> anyhow::Result<(AuditCheck, u64)> {
    let mut check = AuditCheck::default();
    let mut lines = BufReader::new(file);
    let mut line = Vec::new();
    loop {
        line.clear();
        let len = lines.read_until(b'\n', &mut line);
        len.with_context(|| format!("cannot read {}", path.display()))?;
        let Some(text) = line.strip_suffix(b"\n") else { return Ok((check, line.len() as u64)) };
        let number = check.lines.saturating_add(1);
        let text = std::str::from_utf8(text).map_err(|_| damaged(path, AuditError::NotALine { number }))?;
        check.add(text).map_err(|error| damaged(path, error))?;
    }
}

fn show_report(path: &Path, check: &AuditCheck, added: Option<u64>, json: bool) -> anyhow::Result<()> {
    let report = Report {
        file: path.display().to_string(),
        events: check.lines,
        added,
        first_id: check.first.map(|first| first.id),
        last_id: check.last.map(|last| last.id),
        is_whole: check.is_whole,
        hash: check.hash().to_owned(),
    };
    if json {
        return show::json(&report);
    }
    let added = added.map_or_else(String::new, |count| format!("{count} new events; "));
    let (Some(first), Some(last)) = (check.first, check.last) else {
        return show::line(&format!("{}: {added}no events", report.file));
    };
    let unchanged = if check.is_whole { "unchanged" } else { "unchanged from the second one on" };
    let before = if check.is_whole {
        "nothing is missing before it"
    } else {
        "the events before it are not in the file"
    };
    show::line(&format!(
        "{}: {added}{} events, {unchanged}\nfirst  {}  event {} ({before})\nlast   {}  event {}\nhash   {}",
        report.file,
        check.lines,
        show::time(first.at_ms),
        first.id,
        show::time(last.at_ms),
        last.id,
        report.hash,
    ))
}
