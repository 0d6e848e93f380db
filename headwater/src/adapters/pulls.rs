//! Versions that come from another store into that of the daemon.
//!
//! What was changed is read from the lists of versions before and after: it is told also of a pull that ended early, or whose last
//! answer was lost.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use headwater_api::{ProblemKind, Progress, PullReport, PulledImage};
use headwater_service::backend::{BackendError, JobControl, PullOrder, PullOutcome};
use headwater_store::{
    Access, Copied, Image, ImageReference, Selector, Store, StoreError, StoreErrorKind, Version,
};

use crate::adapters::images::{parse, store_failed};
use crate::adapters::sources;
use crate::copying::{Chosen, progress_of, stopped};
use crate::stores::{self, Credentials};

/// How often it is looked whether a pull is to end, or reads wait, while it may tell no progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Copies what is missing of another store, whose servers are shown `credentials`. As with a copy, their reads wait while none
/// answers; that is told.
pub fn pull(
    target: &dyn Store,
    order: &PullOrder,
    credentials: &Credentials,
    job: &Arc<JobControl>,
) -> Result<PullOutcome, BackendError> {
    sources::whole_host(Path::new(&order.source))?;
    let references = order.images.iter().map(parse).collect::<Result<Vec<ImageReference>, _>>()?;
    job.report_doing("reading the lists of versions".to_owned());
    let source = stores::open(&order.source, Access::Read, credentials).map_err(store_failed)?;
    let named = (!references.is_empty()).then_some(references.as_slice());
    let chosen = Chosen::of(&*source, named).and_then(|chosen| chosen.writable_in(target));
    let chosen = chosen.map_err(store_failed)?;
    let before = chosen.what.iter().map(|(image, _)| target.image(&image.name));
    let before = before.collect::<Result<Vec<Option<Image>>, _>>().map_err(store_failed)?;

    let (outcome, done) = copy(&*source, target, &chosen, job);
    // All, or those that were dealt with and the one at which it ended.
    let begun = if outcome.is_ok() { before.len() } else { done.saturating_add(1) };
    let mut pulled = PullOutcome { source: source.shown(), ..PullOutcome::default() };
    let mut images = Vec::new();
    for ((image, versions), before) in chosen.what.iter().zip(&before).take(begun) {
        match target.image(&image.name) {
            Ok(after) => {
                let became = |after: Image| became(before.as_ref(), &after, versions, chosen.with_channels);
                images.extend(after.and_then(became));
            }
            Err(e) => pulled.unknown.push((image.name.to_string(), store_failed(e))),
        }
    }
    let copied = match outcome {
        Ok(copied) => copied,
        Err(e) => {
            if let (StoreErrorKind::Unknown, Some((image, _))) = (e.kind(), chosen.what.get(done)) {
                pulled.unknown.push((image.name.to_string(), store_failed(e.clone())));
            }
            pulled.ended = Some(match job.is_cancelled() {
                true => BackendError::new(ProblemKind::Cancelled, e.to_string()),
                false => store_failed(e),
            });
            Copied::default()
        }
    };
    let Copied { versions, present, objects, bytes, followed, failed } = copied;
    pulled.report =
        PullReport { versions, present, objects, bytes, followed, images, not_copied: Vec::new() };
    let not_copied = chosen.not_copied(failed).into_iter();
    pulled.not_copied = not_copied.map(|(what, e)| (what, store_failed(e))).collect();
    Ok(pulled)
}

/// Copies what was chosen, until the job is cancelled. Also returns how many images were dealt with.
fn copy(
    source: &dyn Store,
    target: &dyn Store,
    chosen: &Chosen,
    job: &JobControl,
) -> (Result<Copied, StoreError>, usize) {
    let mut done_images = 0;
    let outcome = std::thread::scope(|scope| -> Result<Copied, StoreError> {
        let (over, is_over) = mpsc::channel();
        let watching = std::thread::Builder::new().name("pull".to_owned());
        watching
            .spawn_scoped(scope, move || watch(source, job, &is_over))
            .map_err(|e| StoreError::from_os("cannot start a thread that looks after a pull", e))?;
        let copied = chosen.copy(source, target, &mut |at| {
            done_images = at.done_images;
            tell(job, progress_of(&at));
            if job.is_cancelled() { Err(stopped()) } else { Ok(()) }
        });
        drop(over);
        copied
    });
    (outcome, usize::try_from(done_images).unwrap_or(usize::MAX))
}

/// Says that reads of the source wait, and ends them where the job is cancelled, until the pull is over.
fn watch(source: &dyn Store, job: &JobControl, is_over: &Receiver<()>) {
    while is_over.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
        if job.is_cancelled() {
            // What is written to, as a bucket is where it is said that a version is in use, ends in order.
            if source.is_read_only() {
                source.close();
            }
            return;
        }
        if let Some(traffic) = source.traffic().filter(|traffic| traffic.waiting > 0) {
            job.report_doing(format!("waits for {}: {}", source.shown(), traffic.reasons));
        }
    }
}

fn tell(job: &JobControl, Progress { done_bytes, total_bytes, doing }: Progress) {
    match doing {
        Some(doing) => job.report_doing(doing),
        None => job.report(done_bytes, total_bytes),
    }
}

/// What became of an image of which these versions were to come; `None` where it is what it was.
fn became(
    before: Option<&Image>,
    after: &Image,
    versions: &[Version],
    with_channels: bool,
) -> Option<PulledImage> {
    let is_new =
        |version: &&Version| lists(after, version) && before.is_none_or(|before| !lists(before, version));
    let mut new: Vec<u32> = versions.iter().filter(is_new).map(|version| version.number).collect();
    new.sort_unstable();
    let followed = with_channels && follows(before, after);
    if new.is_empty() && !followed {
        return None;
    }
    let booted = |image: &Image| image.select(&Selector::Default).ok().map(|it| u64::from(it.number));
    Some(PulledImage {
        image: after.name.to_string(),
        newest: after.newest().is_some_and(|newest| new.contains(&newest.number)),
        versions: new.into_iter().map(u64::from).collect(),
        followed,
        booted: before.and_then(booted),
        boots: booted(after),
        edited_by: None,
    })
}

fn lists(image: &Image, version: &Version) -> bool {
    image.versions.iter().any(|it| it.number == version.number && it.manifest == version.manifest)
}

/// Whether channels, promotions to come, or the notes or retirement of versions that were there are not what they were.
fn follows(before: Option<&Image>, after: &Image) -> bool {
    let Some(before) = before else {
        return !after.pointers().is_empty() || !after.scheduled().is_empty();
    };
    let is_marked = |version: &Version| {
        let mut there = before.versions.iter().filter(|it| it.number == version.number);
        there.any(|it| it.retired != version.retired || it.note != version.note)
    };
    before.pointers() != after.pointers()
        || before.scheduled() != after.scheduled()
        || after.versions.iter().any(is_marked)
}

#[cfg(test)]
mod tests {
    use headwater_image::{ImportOptions, import, open_source};
    use headwater_store::{Channel, LocalDir, Pointer};

    use super::*;

    /// A version of the image `disk` that has these bytes.
    fn add(store: &LocalDir, byte: u8) {
        let dir = tempfile::tempdir().unwrap();
        let raw = dir.path().join("disk.raw");
        std::fs::write(&raw, [byte; 8192]).unwrap();
        let options = ImportOptions::new("disk".parse().unwrap(), 500);
        import(open_source(&raw, None).unwrap(), store, &options, &mut |_| {}).unwrap();
    }

    fn promote(store: &LocalDir, version: u32) {
        let to = Pointer { channel: Channel::Production, version, at_s: 9, author: "ben".into() };
        store.change(&"disk".parse().unwrap(), &mut |image| image.promote(to.clone()).map(drop)).unwrap();
    }

    fn pull_from(source: &Path, target: &LocalDir, images: &[&str], job: &Arc<JobControl>) -> PullOutcome {
        let images = images.iter().map(|it| headwater_api::name::ImageRef::parse(it).unwrap()).collect();
        let order = PullOrder { source: source.display().to_string(), images };
        pull(target, &order, &Credentials::default(), job).unwrap()
    }

    #[test]
    fn what_came_is_told_with_what_machines_boot_before_and_after() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("there");
        let there = LocalDir::open(&at, Access::WRITE).unwrap();
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let job = Arc::new(JobControl::default());
        let came = |images: &[&str]| {
            let PullOutcome { report, not_copied, unknown, ended, .. } = pull_from(&at, &here, images, &job);
            assert!(not_copied.is_empty() && unknown.is_empty() && ended.is_none());
            report
        };
        let image = |versions: &[u64], followed, booted, boots| PulledImage {
            image: "disk".to_owned(),
            versions: versions.to_vec(),
            newest: !versions.is_empty(),
            followed,
            booted,
            boots,
            edited_by: None,
        };
        add(&there, 1);
        assert_eq!(came(&["disk"]).images, [image(&[1], false, None, Some(1))]);
        add(&there, 2);
        add(&there, 3);
        // Production is not set, so machines boot the newest one; a pull of names leaves it so.
        promote(&there, 2);
        assert_eq!(came(&["disk@3"]).images, [image(&[3], false, Some(1), Some(3))]);
        let report = came(&[]);
        let older = PulledImage { newest: false, ..image(&[2], true, Some(3), Some(2)) };
        assert_eq!((report.versions, report.present, report.images), (1, 2, vec![older]));
        let report = came(&[]);
        assert_eq!((report.versions, report.present, report.images), (0, 3, Vec::new()));
        promote(&there, 3);
        let report = came(&[]);
        assert_eq!((report.followed, report.images), (1, vec![image(&[], true, Some(2), Some(3))]));
    }

    #[test]
    fn a_pull_that_is_cancelled_changes_nothing_and_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("there");
        add(&LocalDir::open(&at, Access::WRITE).unwrap(), 1);
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let job = Arc::new(JobControl::default());
        job.cancel();
        let PullOutcome { report, unknown, ended, .. } = pull_from(&at, &here, &[], &job);
        assert_eq!(ended.map(|e| e.kind()), Some(ProblemKind::Cancelled));
        assert!(report.images.is_empty() && unknown.is_empty() && here.images().unwrap().is_empty());
    }

    #[test]
    fn where_a_pull_cannot_begin_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let here = LocalDir::open(&dir.path().join("here"), Access::WRITE).unwrap();
        let refused = |source: &Path| {
            let order = PullOrder { source: source.display().to_string(), images: Vec::new() };
            pull(&here, &order, &Credentials::default(), &Arc::default()).unwrap_err()
        };
        let nowhere = dir.path().join("nowhere");
        assert_eq!(refused(&nowhere).kind(), ProblemKind::NotFound);
        assert!(!nowhere.exists());
        assert_eq!(refused(Path::new("/proc/self/cwd")).kind(), ProblemKind::Invalid);
    }
}
