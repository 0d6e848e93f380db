//! `headwater store`: copies versions between stores, serves a store, and verifies and repairs a store, without a
//! daemon.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind, Progress};
use headwater_block::{size, small_file};
use headwater_image::{Cancel, VerifyRound};
use headwater_store::copy::{Readable, everything_readable, selected};
use headwater_store::{Access, Copied, CopyProgress, Hash, ImageReference, Store, StoreError, WhileBusy};
use headwater_store_server::{Options, StoreServer, TOKEN_FILE_MAX_BYTES, token_line};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use crate::cli::{LogFormat, StoreCommand};
use crate::copying::{Chosen, progress_of, stopped};
use crate::failure::{DAMAGED, invalid, one_line, store_kind};
use crate::logging;
use crate::show::{self, progress::Shown};
use crate::signals::EndSignals;
use crate::stores::{self, Credentials};
use crate::verification::{self, Checked, Doing, Scrub, distinct};

/// Runs a command.
pub fn run(command: StoreCommand, json: bool) -> anyhow::Result<u8> {
    if let Some(filter) = command.log(json) {
        logging::to_stderr(filter, LogFormat::Text)?;
    }
    let serves = matches!(command, StoreCommand::Serve { .. });
    let outcome = carry_out(command, json);
    if outcome.is_err() && !serves {
        // The error lists everything that was not copied, which may be more than the log buffers for a slow reader.
        logging::end();
    }
    outcome
}

fn carry_out(command: StoreCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        StoreCommand::Copy { source, target, images, credentials, .. } => {
            let references =
                images.iter().map(|image| image.parse()).collect::<Result<Vec<ImageReference>, _>>()?;
            copy_some(&Between { source, target, credentials }, Some(&references), json)?;
            Ok(0)
        }
        StoreCommand::Sync { source, target, credentials, .. } => {
            copy_some(&Between { source, target, credentials }, None, json)?;
            Ok(0)
        }
        StoreCommand::Serve { store, listen, offer, .. } => serve(&store, &offer.options(listen), json),
        StoreCommand::Token { name, token_file } => add_token(&name, &token_file, json).map(|()| 0),
        StoreCommand::Verify { store, images, rate, repair_from, credentials, .. } => {
            check(&store, &images, &Scrub { rate, repair_from, credentials }, json)
        }
    }
}

/// The source and the target.
struct Between {
    source: String,
    target: String,
    credentials: Credentials,
}

#[derive(Serialize)]
struct CopyReport {
    versions: u32,
    present: u32,
    objects: u32,
    bytes: u64,
    /// The number of images whose channels, scheduled promotions, notes or retired marks were changed to those of the
    /// source.
    followed: u32,
}

/// The result of a copy in words. `is_all` is set if everything was to be copied and nothing failed.
pub fn told(copied: &Copied, is_all: bool, source: &str, target: &str) -> String {
    let Copied { versions, present, objects, bytes, followed, .. } = copied;
    let told = match (versions, objects, present) {
        (0, 0, 0) if is_all => format!("nothing to copy: there is no version in {source}"),
        (0, 0, 1) if is_all => format!("nothing to copy: the version is in {target} already"),
        (0, 0, _) if is_all => format!("nothing to copy: all {present} versions are in {target} already"),
        _ => {
            let sent = size::format(*bytes);
            format!(
                "{versions} versions copied to {target}, {present} were already there; {sent} in {objects} data objects"
            )
        }
    };
    let of = match followed {
        0 => return told,
        1 => "an image".to_owned(),
        _ => format!("{followed} images"),
    };
    format!("{told}; channels, notes and retired marks of {of} were set to those of the source")
}

fn copy_some(between: &Between, references: Option<&[ImageReference]>, json: bool) -> anyhow::Result<()> {
    let shown = Shown::begin(if references.is_some() { "copy" } else { "sync" }, json);
    let shown = Arc::new(Mutex::new(shown));
    let is_stopped = Arc::new(AtomicBool::new(false));
    let while_busy = || show_busy(&shown, &is_stopped);
    // Reading the lists of a bucket may take long too.
    shown.lock().doing("reading the lists of versions");
    let source = stores::open_waiting(&between.source, Access::Read, &between.credentials, while_busy())?;
    let chosen = Chosen::of(&*source, references)?;
    let access = Access::Copy { new_chunk_bytes: source.chunk_bytes() };
    let target = stores::open_waiting(&between.target, access, &between.credentials, while_busy())?;
    let chosen = chosen.writable_in(&*target)?;
    stop_on_signals(vec![Arc::clone(&source)], &is_stopped)?;
    let progress = &mut |at: CopyProgress| {
        shown.lock().update(progress_of(&at));
        if is_stopped.load(Ordering::Relaxed) { Err(stopped()) } else { Ok(()) }
    };
    let outcome = chosen.copy(&*source, &*target, (progress, &mut |_| {}));
    shown.lock().end();
    let failed = || format!("cannot copy from {} to {}", source.shown(), target.shown());
    let outcome = match outcome {
        Err(e) if is_stopped.load(Ordering::Relaxed) => {
            return Err(Problem::new(ProblemKind::Cancelled, format!("{}: {e}", failed())).into());
        }
        outcome => outcome,
    };
    let copied = outcome.with_context(failed)?;
    let is_all = chosen.unreadable.is_empty() && copied.failed.is_empty();
    let printed = if json {
        let Copied { versions, present, objects, bytes, followed, .. } = copied;
        show::json(&CopyReport { versions, present, objects, bytes, followed })
    } else {
        show::line(&told(&copied, is_all, &source.shown(), &target.shown()))
    };
    // Versions that were not copied are an error even if nobody reads the output.
    show::if_read(printed)?;
    must_be_copied(chosen.not_copied(copied.failed))
}

/// Waits for busy servers without a timeout, shows that, and ends the wait if the user or the system stops this
/// command.
fn show_busy(shown: &Arc<Mutex<Shown>>, is_stopped: &Arc<AtomicBool>) -> WhileBusy {
    let (shown, is_stopped) = (Arc::clone(shown), Arc::clone(is_stopped));
    WhileBusy::as_long_as(move |why| {
        shown.lock().doing(&format!("waiting for a busy server: {why}"));
        !is_stopped.load(Ordering::Relaxed)
    })
}

/// Fails with the versions that were not copied, each with its reason. If any of them is damaged, the error is of
/// that kind.
fn must_be_copied(mut not_copied: Vec<(String, StoreError)>) -> anyhow::Result<()> {
    // The last error decides the exit code.
    not_copied.sort_by_key(|(_, e)| store_kind(e.kind()) == ProblemKind::Damaged);
    let told: Vec<String> = not_copied.iter().map(|(what, e)| format!("{what}: {e}")).collect();
    match not_copied.pop() {
        Some((_, e)) => Err(e).with_context(|| format!("not copied: {}", told.join("; "))),
        None => Ok(()),
    }
}

/// Sets `stopped` when the user or the system stops this command. Waiting reads of the servers among `stores` fail
/// from then on.
fn stop_on_signals(stores: Vec<Arc<dyn Store>>, stopped: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let told = Arc::clone(stopped);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime.block_on(async move {
            let caught = EndSignals::catch();
            let sound = caught.is_ok();
            // The receiver still waits.
            let _ = ready.send(caught.as_ref().err().map(ToString::to_string));
            if let (true, Ok(mut signals)) = (sound, caught) {
                signals.next().await;
                told.store(true, Ordering::Relaxed);
                // Stores that are written to end in order.
                stores.iter().filter(|store| store.is_read_only()).for_each(|store| store.close());
                // A second signal ends it at once.
                signals.next().await;
                std::process::exit(130);
            }
        });
    });
    match is_ready.recv() {
        Ok(Some(e)) => anyhow::bail!("{e}"),
        _ => Ok(()),
    }
}

/// The warning if a store is offered to everybody, because on disk only its owner can read it.
pub fn offered_to_all(options: &Options) -> Option<String> {
    options.token_file.is_none().then(|| {
        format!(
            "the store is offered at {} without tokens: every user of this host can read all of its images, and every guest \
             that reaches the host's loopback (as 10.0.2.2); --token-file FILE asks for tokens",
            options.listen
        )
    })
}

fn serve(store: &str, options: &Options, json: bool) -> anyhow::Result<u8> {
    let store = stores::open(store, Access::Read, &Credentials::default())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
    let outcome = runtime.block_on(async {
        let mut signals = EndSignals::catch()?;
        let server = StoreServer::bind(store, options).await?;
        if let Some(warning) = offered_to_all(options) {
            show::aside(&format!("headwater: {warning}\n"));
            // The warning must be visible before the server's address is printed.
            logging::flush();
        }
        // Serves even if nobody reads the output.
        show::if_read(show::uri(&server.url(), json))?;
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(server.run(stopped));
        signals.next().await;
        // If the server has already ended, the receiver is gone.
        let _ = stop.send(true);
        tokio::select! {
            ended = serving => ended.context("the server failed")?,
            // A second signal ends it at once.
            _ = signals.next() => return Ok(130),
        }
        Ok(0)
    });
    // Operations may wait for a bucket that does not answer: marks in it expire by themselves.
    runtime.shutdown_background();
    outcome
}

#[derive(Serialize)]
struct NewToken<'a> {
    name: &'a str,
    token: &'a str,
}

fn add_token(name: &str, file: &Path, json: bool) -> anyhow::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let token = format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    let line = token_line(name, &token)?;
    let failed = || format!("cannot add a token to {}", file.display());
    let known = match small_file::read(file, TOKEN_FILE_MAX_BYTES).and_then(small_file::text) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            return Err(invalid(format!("{}: {e}", failed())));
        }
        Err(e) => return Err(e).with_context(failed),
    };
    if known.lines().any(|line| line.split(' ').next() == Some(name)) {
        let taken = format!(
            "{} has a token named '{name}' already: remove its line first, or choose another name",
            file.display()
        );
        return Err(Problem::new(ProblemKind::Conflict, taken).into());
    }
    let mut options = std::fs::File::options();
    let mut open = options.append(true).create(true).mode(0o600).open(file).with_context(failed)?;
    let separator = if known.is_empty() || known.ends_with('\n') { "" } else { "\n" };
    open.write_all(format!("{separator}{line}\n").as_bytes()).with_context(failed)?;
    open.sync_all().with_context(failed)?;
    if json { show::json(&NewToken { name, token: &token }) } else { show::line(&token) }
}

#[derive(Default, Serialize)]
struct CheckReport {
    versions: Vec<CheckedVersion>,
    /// Images whose version lists cannot be read.
    images: Vec<DamagedImage>,
    /// Why the verification ended before everything was read. Absent if everything was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_early: Option<String>,
    /// The versions that were not read completely, as `IMAGE@NUMBER`.
    unchecked: Vec<String>,
}

/// An image whose version list cannot be read.
#[derive(Serialize)]
struct DamagedImage {
    image: String,
    damage: String,
}

/// The result for one version.
#[derive(Serialize)]
struct CheckedVersion {
    /// All names (`IMAGE@NUMBER`) of versions with these contents.
    names: Vec<String>,
    /// The manifest's hash.
    hash: String,
    #[serde(flatten)]
    checked: Checked,
}

impl CheckedVersion {
    fn is_intact(&self) -> bool {
        self.checked.damage.is_empty()
    }

    fn show(&self) -> anyhow::Result<()> {
        let names = self.names.join(", ");
        for line in &self.checked.damage {
            show::line(&format!("{names}: {}", show::printable(line)))?;
        }
        for file in &self.checked.files {
            show::line(&format!("{names}: a file cannot be read: {}", show::printable(file)))?;
        }
        for remark in &self.checked.remarks {
            show::line(&format!("{names}: {}", verification::not_named(remark)))?;
        }
        for version in self.checked.versions.iter().filter(|version| !self.names.contains(version)) {
            show::line(&format!("{version} contains some of the damaged data, too"))?;
        }
        if self.checked.repaired > 0 {
            show::line(&format!(
                "{names}: {} damaged chunks or data objects repaired",
                self.checked.repaired
            ))?;
        }
        let verdict = match self.is_intact() {
            true => "is intact".to_owned(),
            false => verification::is_damaged(self.checked.damaged_chunks),
        };
        show::line(&format!("{names} {verdict}: {} chunks checked", self.checked.chunks))
    }
}

fn check(name: &str, images: &[String], scrub: &Scrub, json: bool) -> anyhow::Result<u8> {
    let access = if scrub.repair_from.is_empty() {
        Access::Read
    } else {
        // Nothing is removed, only damaged bytes are repaired.
        Access::Copy { new_chunk_bytes: headwater_store::CHUNK_BYTES_DEFAULT }
    };
    // A verification never creates a store.
    let mut store = stores::open(name, Access::Read, &scrub.credentials)?;
    if access != Access::Read {
        store = stores::open(name, access, &scrub.credentials)?;
    }
    // If the store does not answer, the verification fails, as for a bucket.
    let store = store.fail_fast().unwrap_or(store);
    let sources = scrub.open_sources()?;
    let references = images.iter().map(|image| image.parse()).collect::<Result<Vec<ImageReference>, _>>()?;
    let Readable { what, unreadable } = if images.is_empty() {
        everything_readable(&*store)?
    } else {
        Readable { what: selected(&*store, &references)?, unreadable: Vec::new() }
    };
    let stopped = Arc::new(AtomicBool::new(false));
    stop_on_signals([&[Arc::clone(&store)], &sources[..]].concat(), &stopped)?;
    let cancel = Cancel::when(move || stopped.load(Ordering::Relaxed));
    let round = VerifyRound::new(scrub.rate);
    let (contents, mut report) = (distinct(&what), CheckReport::default());
    let ended = check_each(&*store, &contents, (&round, &sources), &cancel, json, &mut report);
    for (name, e) in unreadable {
        let damaged = DamagedImage { image: name.to_string(), damage: e.to_string() };
        if !json {
            let line = format!("{} is damaged: {}", damaged.image, show::printable(&damaged.damage));
            show::if_read(show::line(&line))?;
        }
        report.images.push(damaged);
    }
    let sound = report.images.is_empty() && report.versions.iter().all(CheckedVersion::is_intact);
    // The results so far may be hours of reading, so they are reported.
    report.ended_early = ended.as_ref().err().map(one_line);
    let printed = if json {
        show::json(&report)
    } else if ended.is_ok() && report.versions.is_empty() && report.images.is_empty() {
        show::line(&format!("{}: there is no version to verify", store.shown()))
    } else {
        Ok(())
    };
    show::if_read(printed)?;
    let is_damaged = report.versions.iter().any(|version| !version.is_intact());
    if is_damaged && !json && sources.is_empty() && !stores::is_server(name) {
        show::if_read(show::line(&verification::how_to_repair(&format!("store verify {name}"))))?;
    }
    ended?;
    Ok(if sound { 0 } else { DAMAGED })
}

/// Verifies versions one after the other, and adds the results to the report. An error ends that; the rest is then
/// listed as unchecked.
fn check_each(
    store: &dyn Store,
    contents: &[(Hash, Vec<String>)],
    how: (&VerifyRound, &[Arc<dyn Store>]),
    cancel: &Cancel,
    json: bool,
    report: &mut CheckReport,
) -> anyhow::Result<()> {
    for (at, (hash, names)) in contents.iter().enumerate() {
        let checked = check_one(store, *hash, names, how, cancel, json);
        if checked.is_err() {
            report.unchecked =
                contents.iter().skip(at).flat_map(|(_, names)| names.iter().cloned()).collect();
        }
        // It was removed meanwhile.
        let Some(checked) = checked? else { continue };
        if !json {
            show::if_read(checked.show())?;
        }
        report.versions.push(checked);
    }
    Ok(())
}

fn check_one(
    store: &dyn Store,
    hash: Hash,
    names: &[String],
    how: (&VerifyRound, &[Arc<dyn Store>]),
    cancel: &Cancel,
    json: bool,
) -> anyhow::Result<Option<CheckedVersion>> {
    let mut shown = Shown::begin(&format!("verify {}", names.join(", ")), json);
    let told = &mut |doing: Doing| match doing {
        Doing::Reading(at) => {
            shown.update(Progress { done_bytes: at.done_bytes, total_bytes: at.total_bytes, doing: None });
        }
        other => shown.doing(&other.to_string()),
    };
    let checked = verification::check(store, hash, names, how, cancel, told);
    shown.end();
    let failed = || format!("cannot verify {}", names.join(", "));
    let checked = match checked {
        Err(e) if cancel.is_cancelled() => {
            return Err(Problem::new(ProblemKind::Cancelled, format!("{}: {e}", failed())).into());
        }
        checked => checked.with_context(failed)?,
    };
    let of_these = |checked| CheckedVersion { names: names.to_vec(), hash: hash.to_string(), checked };
    Ok(checked.map(of_these))
}

#[cfg(test)]
mod tests {
    use headwater_store::StoreErrorKind;

    use super::*;

    #[test]
    fn a_copy_of_nothing_says_so_unless_something_was_left_out() {
        let of = |versions, present, is_all| {
            told(&Copied { versions, present, ..Copied::default() }, is_all, "/from", "/to")
        };
        assert_eq!(of(0, 0, true), "nothing to copy: there is no version in /from");
        assert_eq!(of(0, 1, true), "nothing to copy: the version is in /to already");
        assert_eq!(of(0, 7, true), "nothing to copy: all 7 versions are in /to already");
        assert_eq!(of(0, 7, false), "0 versions copied to /to, 7 were already there; 0 B in 0 data objects");
        assert_eq!(of(2, 7, true), "2 versions copied to /to, 7 were already there; 0 B in 0 data objects");
    }

    #[test]
    fn a_copy_says_that_channels_are_others_now() {
        let of = |versions, followed| {
            told(&Copied { versions, present: 7, followed, ..Copied::default() }, true, "/from", "/to")
        };
        let is_there = "nothing to copy: all 7 versions are in /to already";
        assert_eq!(of(0, 0), is_there);
        let now =
            |of: &str| format!("; channels, notes and retired marks of {of} were set to those of the source");
        assert_eq!(of(0, 1), format!("{is_there}{}", now("an image")));
        assert!(of(2, 3).ends_with(&now("3 images")), "{}", of(2, 3));
    }

    #[test]
    fn what_was_not_copied_is_named_and_damage_decides() {
        assert!(must_be_copied(Vec::new()).is_ok());
        let failed = |what: &str, kind, why: &str| (what.to_owned(), StoreError::new(kind, why));
        let error = must_be_copied(vec![
            failed("a@1", StoreErrorKind::Damaged, "it is cut"),
            failed("b@2", StoreErrorKind::NotFound, "it was removed"),
        ]);
        let error = error.unwrap_err();
        assert_eq!(crate::failure::one_line(&error), "not copied: b@2: it was removed; a@1: it is cut");
        let cause = error.root_cause().downcast_ref::<StoreError>().map(StoreError::kind);
        assert_eq!(cause, Some(StoreErrorKind::Damaged));
    }
}
