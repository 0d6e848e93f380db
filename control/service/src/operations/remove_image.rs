//! `DELETE /api/v1/images/{image}`: remove an image, or one version of it.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{Problem, ProblemKind, Removed};

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::extract::{Actor, Name};
use crate::uses;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot remove '{what}': {}", .uses.join("; "))]
    InUse { what: String, uses: Vec<String> },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Conflict
    }

    fn advice(&self) -> Option<String> {
        Some(
            "promote another version, unpin, reset or remove the machines; 'headwater machine list' shows them"
                .to_owned(),
        )
    }
}

/// Removes an image with all its versions and channels, or one version. What a machine, a pin or a channel uses stays, and the answer says who that is.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}",
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`, `IMAGE@NUMBER` or `IMAGE@HASH`")),
    responses(
        (status = 200, body = Removed),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "A machine, a pin or a channel uses it", body = Problem),
    ),
)]
pub(super) async fn remove_image(
    State(service): State<Service>,
    actor: Actor,
    Name(name): Name,
) -> Result<Json<Removed>, Failure> {
    let handle = service.clone();
    service.to_the_end(async move { remove(&handle, &actor, name).await }).await.map(Json)
}

async fn remove(service: &Service, actor: &Actor, name: String) -> Result<Removed, Failure> {
    let mut reference = ImageRef::parse(&name).map_err(Failure)?;
    // Before its uses are looked for, so that none begins until it is gone.
    let _removing = service.removing_versions().await;
    let version = if reference.version.is_some() || reference.channel.is_some() {
        let version = service.images().resolve(&reference).await?;
        // What a channel or the beginning of a hash means must not change between the check and the removal.
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
    // What this daemon does not need any more is not to stand in its own way.
    service.match_holds().await;
    let removed = match service.images().remove(&reference).await {
        Ok(removed) => removed,
        Err(e) => {
            if may_have_removed(e.kind()) {
                let detail = format!("{reference}, and whether it is gone is not known: {}", problem(&e));
                service.image_changed(actor, &reference.image, "removal tried", detail).await;
            }
            return Err(e.into());
        }
    };
    service.versions_removed(&removed.removed);
    service.image_changed(actor, &reference.image, "removed", removed.removed.join(", ")).await;
    Ok(removed)
}

/// Whether something may be gone after such an error. The others come before anything is removed.
fn may_have_removed(kind: ProblemKind) -> bool {
    !matches!(kind, ProblemKind::Invalid | ProblemKind::NotFound | ProblemKind::Conflict)
}
