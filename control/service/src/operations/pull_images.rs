//! `POST /api/v1/pull`: copy versions from another store.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::words::time;
use headwater_api::{
    ChannelMove, Problem, ProblemKind, PullReport, PullRequest, PulledImage, TaskEvent, TaskResult,
};
use tokio::sync::mpsc;

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::{BackendError, PullOrder, PullOutcome, Pulled, TaskControl};
use crate::caller::Caller;
use crate::extract::Body;
use crate::operations::is_store;
use crate::tasks::{self, Work};

/// The most version numbers of an image that an event about a pull names.
const NUMBERS_MAX: usize = 20;

/// The most images of a pull whose events wait to be written. The pull waits while there are more.
const PENDING_MAX: usize = 16;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot pull from '{0}': it is neither an absolute path nor a URL")]
    Source(String),
    #[error("cannot pull from '{0}': the store of this daemon is read-only")]
    ReadOnly(String),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Invalid
    }

    fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::Source(_) => {
                "name a directory of the daemon's host, beginning with '/', s3://BUCKET/PREFIX or https://HOST"
            }
            Self::ReadOnly(_) => "run the pull on the daemon that writes this store",
        };
        Some(advice.to_owned())
    }
}

/// Copies versions from another store, where each keeps its number. Data that is here already is not copied again. If no
/// versions are named, all are copied, and the channels, scheduled promotions, notes and retired marks are set to those of
/// that store. A pull that is interrupted leaves complete versions, and the next pull continues there.
#[utoipa::path(
    post,
    path = "/api/v1/pull",
    security(("token" = ["admin", "everything"])),
    tag = "images",
    request_body = PullRequest,
    responses(
        (status = 200, description = "Progress, then the report", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "Not a store, the daemon's own one, no reference to an image or version, another chunk size, or the daemon only reads its own store", body = Problem),
        (status = 404, description = "No such store, image or version", body = Problem),
        (status = 409, description = "The two stores have different versions with the same number", body = Problem),
        (status = 422, description = "The other store, or an image's list of versions, is damaged", body = Problem),
        (status = 507, description = "The disk of the daemon's store is full", body = Problem),
    ),
)]
pub(super) async fn pull_images(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<PullRequest>,
) -> Result<Response, Failure> {
    let PullRequest { source, images } = request;
    if !is_store(&source) {
        return Err(Error::Source(source).into());
    }
    if service.images().is_read_only() {
        return Err(Error::ReadOnly(source).into());
    }
    let images = images.iter().map(|image| ImageRef::parse(image)).collect::<Result<Vec<_>, _>>();
    let order = PullOrder { source, images: images.map_err(Failure)? };
    let handle = service.clone();
    let what = Work { kind: "pull", subject: format!("store {}", order.source), caller: caller.clone() };
    let work = async move |control| {
        let report = pull(&handle, &caller, order, control).await?;
        Ok(TaskResult::Pulled(Box::new(report)))
    };
    Ok(tasks::run(&service, what, work).await)
}

async fn pull(
    service: &Service,
    caller: &Caller,
    order: PullOrder,
    control: Arc<TaskControl>,
) -> Result<PullReport, Problem> {
    let what = format!("cannot pull from '{}'", order.source);
    let failed = |e: BackendError| problem(&e).during(what.as_str());
    let (tell, mut told) = mpsc::channel(PENDING_MAX);
    let noting = async {
        let mut images = Vec::new();
        // The channel ends when the pull ends, which drops the sender.
        while let Some(pulled) = told.recv().await {
            images.extend(note(service, caller, pulled).await);
        }
        images
    };
    let (outcome, images) = tokio::join!(service.images().pull(order, control, tell), noting);
    let PullOutcome { report, not_copied } = outcome.map_err(failed)?;
    let not_copied = not_copied.iter().map(|(what, e)| problem(e).during(what.as_str())).collect();
    Ok(PullReport { images, not_copied, ..report })
}

/// Writes an event about the changes to an image. Returns the changes, if there are any.
async fn note(service: &Service, caller: &Caller, pulled: Pulled) -> Option<PulledImage> {
    let Pulled { source, mut image, tried } = pulled;
    let name = image.image.clone();
    let is_changed = !image.versions.is_empty() || image.followed;
    if is_changed {
        service.image_changed(caller, &name, "pulled", in_words(&image, &source)).await;
    }
    if let Some(e) = tried {
        let what = format!("versions from {source}");
        service.image_change_tried(caller, &name, ("pull tried", &what), &e).await;
    }
    if image.newest {
        // The machine is only a remark: without it, the pull does not fail, because the versions were copied.
        image.edited_by = service.maintainer_of(&name).await.unwrap_or_else(|e| {
            tracing::error!(image = %name, "cannot determine the maintenance session of the image: {}", problem(&e));
            None
        });
    }
    is_changed.then_some(image)
}

/// The changes of an image by a pull, in words.
fn in_words(image: &PulledImage, source: &str) -> String {
    let PulledImage { versions, followed, noted, retired, unretired, booted, boots, .. } = image;
    let mut text = match (versions.is_empty(), followed) {
        (false, true) => {
            format!("{} from {source}, with channels, notes and retired marks", numbers(versions))
        }
        (false, false) => format!("{} from {source}", numbers(versions)),
        (true, _) => format!("set as in {source}"),
    };
    for ChannelMove { channel, from, to } in &image.channels {
        let from = from.map(|from| format!(" from version {from}")).unwrap_or_default();
        let to = to.map_or_else(|| "not being set".to_owned(), |to| format!("version {to}"));
        text.push_str(&format!("; {channel}{from} to {to}"));
    }
    for it in &image.scheduled {
        text.push_str(&format!("; {} to version {} at {}", it.channel, it.version, time(it.at_ms)));
    }
    for it in &image.forgets {
        let at = time(it.at_ms);
        text.push_str(&format!(
            "; cancels the promotion of {} to version {} at {at}",
            it.channel, it.version
        ));
    }
    for (what, versions) in [("changed note of", noted), ("retired:", retired), ("in use again:", unretired)]
    {
        if !versions.is_empty() {
            text.push_str(&format!("; {what} {}", numbers(versions)));
        }
    }
    // If no version was booted before, none was replaced.
    if let Some(booted) = booted.filter(|_| booted != boots) {
        let boots = boots.map_or_else(|| "none".to_owned(), |boots| format!("version {boots}"));
        text.push_str(&format!("; machines now boot {boots} instead of version {booted}"));
    }
    text
}

fn numbers(versions: &[u64]) -> String {
    let word = if versions.len() == 1 { "version" } else { "versions" };
    let named: Vec<String> = versions.iter().take(NUMBERS_MAX).map(ToString::to_string).collect();
    match versions.len().saturating_sub(NUMBERS_MAX) {
        0 => format!("{word} {}", named.join(", ")),
        more => format!("{word} {} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use headwater_api::{Channel, ChannelPointer};

    use super::*;

    #[test]
    fn the_history_says_what_came_and_what_machines_boot_now() {
        let image = |versions: &[u64], followed, booted, boots| PulledImage {
            image: "deb".to_owned(),
            versions: versions.to_vec(),
            followed,
            booted,
            boots,
            ..PulledImage::default()
        };
        let says = |image: PulledImage| in_words(&image, "/srv");
        assert_eq!(says(image(&[3], false, None, Some(3))), "version 3 from /srv");
        assert_eq!(says(image(&[3, 4], false, Some(2), Some(2))), "versions 3, 4 from /srv");
        assert_eq!(
            says(image(&[3, 4], true, Some(2), Some(4))),
            "versions 3, 4 from /srv, with channels, notes and retired marks; machines now boot version 4 instead of \
             version 2"
        );
        assert_eq!(
            says(image(&[], true, Some(2), None)),
            "set as in /srv; machines now boot none instead of version 2"
        );
        let many: Vec<u64> = (1..=1000).collect();
        let told = says(image(&many, false, None, None));
        assert!(told.ends_with("19, 20 and 980 more from /srv") && told.len() < 200, "{told}");
    }

    #[test]
    fn the_history_has_all_channels_and_what_goes_with_them() {
        let moved = |channel, from, to| ChannelMove { channel, from, to };
        let promotion =
            |channel, version| ChannelPointer { channel, version, at_ms: 0, author: "ben".to_owned() };
        let image = PulledImage {
            image: "deb".to_owned(),
            followed: true,
            channels: vec![
                moved(Channel::Production, Some(2), Some(4)),
                moved(Channel::Test, None, Some(5)),
                moved(Channel::Test, Some(3), None),
            ],
            forgets: vec![promotion(Channel::Production, 3)],
            scheduled: vec![promotion(Channel::Test, 6)],
            noted: vec![1, 2],
            retired: vec![2],
            unretired: vec![7],
            ..PulledImage::default()
        };
        assert_eq!(
            in_words(&image, "/srv"),
            "set as in /srv; production from version 2 to version 4; test to version 5; test from \
             version 3 to not being set; test to version 6 at 1970-01-01 00:00:00Z; cancels the promotion of production to version 3 at 1970-01-01 \
             00:00:00Z; changed note of versions 1, 2; retired: version 2; in use again: version 7"
        );
    }
}
