//! `POST /api/v1/pull`: bring versions of another store here.

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

/// The history names so many versions of an image at most, of one pull.
const NUMBERS_MAX: usize = 20;

/// Most images of a pull that are done and wait to be noted. It goes on when there is room.
const WAIT_TO_BE_NOTED: usize = 16;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot pull from '{0}': it is neither an absolute path nor a URL")]
    Source(String),
    #[error("cannot pull from '{0}': the store of this daemon is only read here")]
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
            Self::ReadOnly(_) => "bring versions to where that store is written",
        };
        Some(advice.to_owned())
    }
}

/// Brings versions of another store here, each under its own number; what is here already is not sent again. Without names all that
/// it has come, and the channels, scheduled promotions, notes and what is retired are that store's from then on. A pull that ends
/// early leaves the versions that are here as a whole, and the next one goes on from there.
#[utoipa::path(
    post,
    path = "/api/v1/pull",
    security(("token" = ["admin", "everything"])),
    tag = "images",
    request_body = PullRequest,
    responses(
        (status = 200, description = "Progress, then what came", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 400, description = "Not a store, the daemon's own one, no reference to an image or version, another chunk size, or the daemon only reads its own store", body = Problem),
        (status = 404, description = "No such store, image or version", body = Problem),
        (status = 409, description = "Both stores have made a version of their own under one number", body = Problem),
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
    let (tell, mut told) = mpsc::channel(WAIT_TO_BE_NOTED);
    let noting = async {
        let mut images = Vec::new();
        // Until the pull has ended, and with it who tells.
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

/// Notes what was done to an image. Returns that, where anything was.
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
        // A remark, for which what was done is not called a failure.
        image.edited_by = service.maintainer_of(&name).await.unwrap_or_else(|e| {
            tracing::error!(image = %name, "cannot tell who edits it: {}", problem(&e));
            None
        });
    }
    is_changed.then_some(image)
}

/// What a pull did to an image, in words.
fn in_words(image: &PulledImage, source: &str) -> String {
    let PulledImage { versions, followed, noted, retired, unretired, booted, boots, .. } = image;
    let mut told = match (versions.is_empty(), followed) {
        (false, true) => {
            format!("{} from {source}, with channels, notes and what is retired", numbers(versions))
        }
        (false, false) => format!("{} from {source}", numbers(versions)),
        (true, _) => format!("channels, notes and what is retired from {source}"),
    };
    for ChannelMove { channel, from, to } in &image.channels {
        let from = from.map(|from| format!(" from version {from}")).unwrap_or_default();
        let to = to.map_or_else(|| "not being set".to_owned(), |to| format!("version {to}"));
        told.push_str(&format!("; {channel}{from} to {to}"));
    }
    for it in &image.scheduled {
        told.push_str(&format!("; {} to version {} at {}", it.channel, it.version, time(it.at_ms)));
    }
    for it in &image.forgets {
        told.push_str(&format!("; {} forgets version {} at {}", it.channel, it.version, time(it.at_ms)));
    }
    for (what, versions) in
        [("another note of", noted), ("out of use:", retired), ("in use again:", unretired)]
    {
        if !versions.is_empty() {
            told.push_str(&format!("; {what} {}", numbers(versions)));
        }
    }
    // Where there was none to boot nothing was taken from anybody.
    if let Some(booted) = booted.filter(|_| booted != boots) {
        let boots = boots.map_or_else(|| "none".to_owned(), |boots| format!("version {boots}"));
        told.push_str(&format!("; machines boot {boots} from now on, and no more version {booted}"));
    }
    told
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
            "versions 3, 4 from /srv, with channels, notes and what is retired; machines boot version 4 from now on, and no more \
             version 2"
        );
        assert_eq!(
            says(image(&[], true, Some(2), None)),
            "channels, notes and what is retired from /srv; machines boot none from now on, and no more version 2"
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
            "channels, notes and what is retired from /srv; production from version 2 to version 4; test to version 5; test from \
             version 3 to not being set; test to version 6 at 1970-01-01 00:00:00Z; production forgets version 3 at 1970-01-01 \
             00:00:00Z; another note of versions 1, 2; out of use: version 2; in use again: version 7"
        );
    }
}
