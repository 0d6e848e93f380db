//! `DELETE /api/v1/images/{image}`: remove an image, or one version of it.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{Problem, ProblemKind, Removed};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::{Name, Parameters};
use crate::uses;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot remove '{what}': {}", .uses.join("; "))]
    InUse { what: String, uses: Vec<String> },
    #[error(
        "cannot remove '{what}' with channels: '--force' removes an image with its channels, but this names one version"
    )]
    OfVersion { what: String },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::InUse { .. } => ProblemKind::Conflict,
            Self::OfVersion { .. } => ProblemKind::Invalid,
        }
    }

    fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::InUse { .. } => {
                "promote another version, unpin, reset or remove the machines; 'headwater machine list' shows them"
            }
            Self::OfVersion { .. } => {
                "promote another version and remove this one without --force, or name the whole image"
            }
        };
        Some(advice.to_owned())
    }
}

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// For a whole image: remove it even if channels point to its versions, now or by schedule; the channels are removed
    /// with it.
    #[serde(default)]
    force: bool,
}

/// Removes an image with all its versions, or one version. It fails if a machine, a pin or a channel uses the version, and
/// names the user; `force` removes an image together with its channels.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`"), Query),
    responses(
        (status = 200, body = Removed),
        (status = 400, description = "`force` for a single version", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "A machine, a pin or a channel uses it", body = Problem),
    ),
)]
pub(super) async fn remove_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(how): Parameters<Query>,
) -> Result<Json<Removed>, Failure> {
    let handle = service.clone();
    service.to_the_end(async move { remove(&handle, &caller, name, how.force).await }).await.map(Json)
}

async fn remove(
    service: &Service,
    caller: &Caller,
    name: String,
    with_channels: bool,
) -> Result<Removed, Failure> {
    let mut reference = ImageRef::parse(&name).map_err(Failure)?;
    if with_channels && (reference.version.is_some() || reference.channel.is_some()) {
        return Err(Error::OfVersion { what: name }.into());
    }
    // Before the check of uses, so that no new use begins until the version is removed.
    let _removing = service.removing_versions().await;
    let version = if reference.version.is_some() || reference.channel.is_some() {
        let version = service.images().resolve(&reference).await?;
        // Fix the number, because a channel or the beginning of a hash could mean another version after the check.
        reference.version = Some(version.number.to_string());
        reference.channel = None;
        Some(version)
    } else {
        None
    };
    let uses = uses::of(service, &reference, version.as_ref()).await?;
    if !uses.is_empty() {
        return Err(Error::InUse { what: name, uses }.into());
    }
    // Release roots that this daemon does not need any more, so that they do not prevent the removal.
    service.match_roots().await;
    let removed = match service.images().remove(&reference, with_channels).await {
        Ok(removed) => removed,
        Err(e) => {
            if may_have_removed(e.kind()) {
                let what = reference.to_string();
                service.image_change_tried(caller, &reference.image, ("removal tried", &what), &e).await;
            }
            return Err(e.into());
        }
    };
    service.versions_removed(&removed.removed);
    service.image_changed(caller, &reference.image, "removed", removed.removed.join(", ")).await;
    Ok(removed)
}

/// Whether data may have been removed although the operation failed with this kind. Errors of other kinds come before
/// anything is removed. The
/// removal has several steps, so this is more than a lost answer.
fn may_have_removed(kind: ProblemKind) -> bool {
    !matches!(kind, ProblemKind::Invalid | ProblemKind::NotFound | ProblemKind::Conflict)
}
