//! Pulls: copies versions from another store into the daemon's store. Called by [`super::images`] for `POST /pull`.
//!
//! The changes of each image are reported when they are complete. Changes by others at the same time are not included, and changes that
//! were made are known even if the pull fails later.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use headwater_api::{ChannelMove, ProblemKind, Progress, PullReport, PulledImage};
use headwater_service::backend::{BackendError, PullOrder, PullOutcome, Pulled, TaskControl};
use headwater_store::{Copied, CopiedImage, CopyProgress, ImageReference, Store, StoreError, WhileBusy};

use crate::adapters::images::{channel_view, parse, pointer_view, store_failed};
use crate::adapters::sources;
use crate::copying::{Chosen, progress_of, stopped};
use crate::stores::NamedServers;

/// How often a pull that makes no progress checks whether it is cancelled, or its reads wait.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Copies missing versions from another store, and reports the changes to each image. If no server answers, reads wait,
/// and the progress says so.
pub fn pull(
    target: &dyn Store,
    order: &PullOrder,
    servers: &NamedServers,
    control: &Arc<TaskControl>,
    told: &mut dyn FnMut(Pulled),
) -> Result<PullOutcome, BackendError> {
    let references = order.images.iter().map(parse).collect::<Result<Vec<ImageReference>, _>>()?;
    control.report_doing("reading the lists of versions".to_owned());
    let ended = |e: BackendError| match control.is_cancelled() {
        true => BackendError::new(ProblemKind::Cancelled, e.to_string()),
        false => e,
    };
    let source = sources::open_store(&order.source, servers, while_busy(order, control)).map_err(ended)?;
    must_be_another(&*source, target)?;
    let named = (!references.is_empty()).then_some(references.as_slice());
    let outcome = watched(&*source, control, || copy(&*source, target, named, control, told));
    outcome.map_err(|e| ended(store_failed(e)))
}

/// A pull waits for busy servers without a timeout; the progress says so.
fn while_busy(order: &PullOrder, control: &Arc<TaskControl>) -> WhileBusy {
    let (source, control) = (order.source.clone(), Arc::clone(control));
    WhileBusy::as_long_as(move |why| {
        control.report_doing(format!("waiting for {source}: {why}"));
        !control.is_cancelled()
    })
}

/// Copies the named versions, or with `None` all versions and the channels.
fn copy(
    source: &dyn Store,
    target: &dyn Store,
    named: Option<&[ImageReference]>,
    control: &TaskControl,
    told: &mut dyn FnMut(Pulled),
) -> Result<PullOutcome, StoreError> {
    let go_on = || if control.is_cancelled() { Err(stopped()) } else { Ok(()) };
    let chosen = Chosen::of(source, named)?;
    go_on()?;
    let chosen = chosen.writable_in(target)?;
    let shown = source.shown();
    let progress = &mut |at: CopyProgress| {
        tell(control, progress_of(&at));
        go_on()
    };
    let each_is_told = &mut |did: CopiedImage| told(pulled(&shown, did));
    let copied = chosen.copy(source, target, (progress, each_is_told))?;
    let Copied { versions, present, objects, bytes, followed, failed } = copied;
    let report = PullReport { versions, present, objects, bytes, followed, ..PullReport::default() };
    let not_copied = chosen.not_copied(failed).into_iter();
    Ok(PullOutcome { report, not_copied: not_copied.map(|(what, e)| (what, store_failed(e))).collect() })
}

/// Fails if the source is the store itself.
fn must_be_another(source: &dyn Store, target: &dyn Store) -> Result<(), BackendError> {
    let is_same = match (source.directory(), target.directory()) {
        (Some(source), Some(target)) => is_same_directory(source, target)
            .map_err(|e| BackendError::from_io("cannot compare the source with the daemon's own store", e))?,
        _ => source.shown() == target.shown(),
    };
    if !is_same {
        return Ok(());
    }
    let own = BackendError::new(ProblemKind::Invalid, "the source is the daemon's own store");
    Err(own.advise("name the store from which to copy"))
}

fn is_same_directory(one: &Path, other: &Path) -> std::io::Result<bool> {
    let (one, other) = (std::fs::metadata(one)?, std::fs::metadata(other)?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Reads from the source while a thread watches it.
fn watched<T>(
    source: &dyn Store,
    control: &TaskControl,
    work: impl FnOnce() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    std::thread::scope(|scope| -> Result<T, StoreError> {
        let (over, is_over) = mpsc::channel();
        let watching = std::thread::Builder::new().name("pull".to_owned());
        watching
            .spawn_scoped(scope, move || watch(source, control, &is_over))
            .map_err(|e| StoreError::from_os("cannot start a thread for the pull (pull again later)", e))?;
        let outcome = work();
        drop(over);
        outcome
    })
}

/// Until the pull is over: reports that reads of the source wait, and makes them fail if the task is cancelled.
fn watch(source: &dyn Store, control: &TaskControl, is_over: &Receiver<()>) {
    while is_over.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        if control.is_cancelled() {
            // A source that the pull writes to, such as a bucket where it records that a version is in use, ends in order.
            if source.is_read_only() {
                source.close();
            }
            return;
        }
        if let Some(traffic) = source.traffic().filter(|traffic| traffic.waiting > 0) {
            control.report_doing(format!("waiting for {}: {}", source.shown(), traffic.reasons));
        }
    }
}

fn tell(control: &TaskControl, Progress { done_bytes, total_bytes, doing }: Progress) {
    match doing {
        Some(doing) => control.report_doing(doing),
        None => control.report(done_bytes, total_bytes),
    }
}

/// Converts the changes of an image.
fn pulled(source: &str, did: CopiedImage) -> Pulled {
    let numbers = |versions: Vec<u32>| versions.into_iter().map(u64::from).collect();
    let moved = |moved: &headwater_store::ChannelMove| ChannelMove {
        channel: channel_view(moved.channel),
        from: moved.from.map(u64::from),
        to: moved.to.map(u64::from),
    };
    let image = PulledImage {
        image: did.name.to_string(),
        versions: numbers(did.versions),
        newest: did.has_newest,
        followed: did.is_followed,
        channels: did.moves.iter().map(moved).collect(),
        forgets: did.forgotten.iter().map(pointer_view).collect(),
        scheduled: did.scheduled.iter().map(pointer_view).collect(),
        noted: numbers(did.noted),
        retired: numbers(did.retired),
        unretired: numbers(did.unretired),
        booted: did.booted.map(u64::from),
        boots: did.boots.map(u64::from),
        edited_by: None,
    };
    Pulled { source: source.to_owned(), image, tried: did.tried.map(store_failed) }
}

#[cfg(test)]
mod tests {
    use headwater_image::{ImportOptions, import, open_source};
    use headwater_store::{Access, Channel, LocalDir, Pointer};

    use super::*;

    /// Adds a version with these bytes to an image.
    fn add(store: &LocalDir, image: &str, byte: u8) {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("disk.raw");
        std::fs::write(&raw, [byte; 8192]).unwrap();
        let options = ImportOptions::new(image.parse().unwrap(), 500);
        import(open_source(&raw, None).unwrap(), store, &options, &mut |_| {}).unwrap();
    }

    /// Points production of the image `disk` to a version.
    fn promote(store: &LocalDir, version: u32) {
        let to = Pointer { channel: Channel::Production, version, at_s: 9, author: "ben".into() };
        store.change(&"disk".parse().unwrap(), &mut |image| image.promote(to.clone()).map(drop)).unwrap();
    }

    /// The report of a pull, and what was reported before.
    fn pull_from(
        source: &Path,
        target: &LocalDir,
        images: &[&str],
        control: &Arc<TaskControl>,
        each: &dyn Fn(&Pulled),
    ) -> (Result<PullOutcome, BackendError>, Vec<Pulled>) {
        let images = images.iter().map(|it| headwater_api::name::ImageRef::parse(it).unwrap()).collect();
        let order = PullOrder { source: source.display().to_string(), images };
        let mut all = Vec::new();
        let told = &mut |pulled: Pulled| {
            each(&pulled);
            all.push(pulled);
        };
        let outcome = pull(target, &order, &NamedServers::default(), control, told);
        (outcome, all)
    }

    #[test]
    fn what_came_is_told_with_what_machines_boot_before_and_after() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("there");
        let there = LocalDir::open(&at, Access::WRITE).unwrap();
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let control = Arc::new(TaskControl::default());
        let came = |images: &[&str]| {
            let (outcome, told) = pull_from(&at, &here, images, &control, &|_| ());
            let PullOutcome { report, not_copied } = outcome.unwrap();
            assert!(not_copied.is_empty() && report.images.is_empty());
            assert!(told.iter().all(|it| it.tried.is_none() && it.source == at.display().to_string()));
            (report, told.into_iter().map(|it| it.image).collect::<Vec<_>>())
        };
        let image = |versions: &[u64], followed, booted, boots| PulledImage {
            image: "disk".to_owned(),
            versions: versions.to_vec(),
            newest: !versions.is_empty(),
            followed,
            booted,
            boots,
            ..PulledImage::default()
        };
        let production = |from, to| {
            let channel = headwater_api::Channel::Production;
            vec![ChannelMove { channel, from, to: Some(to) }]
        };
        add(&there, "disk", 1);
        assert_eq!(came(&["disk"]).1, [image(&[1], false, None, Some(1))]);
        add(&there, "disk", 2);
        add(&there, "disk", 3);
        // `production` is not set, so machines boot the newest version; a pull of named versions does not set it.
        promote(&there, 2);
        assert_eq!(came(&["disk@3"]).1, [image(&[3], false, Some(1), Some(3))]);
        let (report, told) = came(&[]);
        let older = image(&[2], true, Some(3), Some(2));
        let older = PulledImage { newest: false, channels: production(None, 2), ..older };
        assert_eq!((report.versions, report.present, told), (1, 2, vec![older]));
        let (report, told) = came(&[]);
        assert_eq!((report.versions, report.present, told), (0, 3, Vec::new()));
        promote(&there, 3);
        let (report, told) = came(&[]);
        let moved = image(&[], true, Some(2), Some(3));
        let moved = PulledImage { channels: production(Some(2), 3), ..moved };
        assert_eq!((report.followed, told), (1, vec![moved]));
    }

    #[test]
    fn a_pull_that_is_cancelled_changes_nothing_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("there");
        add(&LocalDir::open(&at, Access::WRITE).unwrap(), "disk", 1);
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let control = Arc::new(TaskControl::default());
        control.cancel();
        let (outcome, told) = pull_from(&at, &here, &[], &control, &|_| ());
        assert_eq!(outcome.unwrap_err().kind(), ProblemKind::Cancelled);
        assert!(told.is_empty() && here.images().unwrap().is_empty());
    }

    #[test]
    fn what_was_done_before_a_pull_ends_is_told_and_what_others_do_meanwhile_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("there");
        let there = LocalDir::open(&at, Access::WRITE).unwrap();
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let told_of = |images: &[&str], control: &Arc<TaskControl>, each: &dyn Fn(&Pulled)| {
            let (outcome, told) = pull_from(&at, &here, images, control, each);
            let told = told.into_iter().map(|Pulled { image, .. }| {
                let boots_another = image.booted != image.boots;
                (image.image, image.versions, boots_another)
            });
            (outcome.map(drop).map_err(|e| e.kind()), told.collect::<Vec<_>>())
        };
        let did = |image: &str, versions: &[u64], boots_another: bool| {
            (image.to_owned(), versions.to_vec(), boots_another)
        };
        for (image, byte) in [("apt", 1), ("disk", 2), ("disk", 3)] {
            add(&there, image, byte);
        }
        let control = Arc::new(TaskControl::default());
        let (outcome, told) = told_of(&[], &control, &|_| control.cancel());
        assert_eq!((outcome, told), (Err(ProblemKind::Cancelled), vec![did("apt", &[1], true)]));

        let control = Arc::new(TaskControl::default());
        assert_eq!(told_of(&[], &control, &|_| ()), (Ok(()), vec![did("disk", &[1, 2], true)]));
        add(&there, "apt", 4);
        add(&there, "disk", 5);
        let promoted_by_another = |it: &Pulled| {
            if it.image.image == "apt" {
                promote(&here, 1);
            }
        };
        let (outcome, told) = told_of(&["apt", "disk"], &control, &promoted_by_another);
        assert_eq!((outcome, told), (Ok(()), vec![did("apt", &[2], true), did("disk", &[3], false)]));
    }

    #[test]
    fn where_a_pull_cannot_begin_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let refused = |source: &Path| {
            let (outcome, told) = pull_from(source, &here, &[], &Arc::default(), &|_| ());
            assert!(told.is_empty());
            outcome.unwrap_err()
        };
        let nowhere = dir.path().join("nowhere");
        assert_eq!(refused(&nowhere).kind(), ProblemKind::NotFound);
        assert!(!nowhere.exists());
        assert_eq!(refused(Path::new("/proc/self/cwd")).kind(), ProblemKind::Invalid);
        // The same directory under another name.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("here"), &link).unwrap();
        for own in [dir.path().join("here"), link] {
            let refused = refused(&own);
            assert_eq!(refused.kind(), ProblemKind::Invalid, "{refused}");
            assert!(refused.to_string().contains("the daemon's own store"), "{refused}");
        }
    }
}
