//! `DELETE /api/v1/images/{image}`: remove an image, or one version of it.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{Channel, ImageVersion, Problem, ProblemKind, Removed};
use headwater_db::{MachineRecord, Purpose};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::BackendError;
use crate::extract::{Actor, Name};

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
    let mut reference = ImageRef::parse(&name).map_err(Failure)?;
    let version = if reference.version.is_some() || reference.channel.is_some() {
        let version = service.images().resolve(&reference).await?;
        // What a channel or the beginning of a hash means must not change between the check and the removal.
        reference.version = Some(version.number.to_string());
        reference.channel = None;
        Some(version)
    } else {
        None
    };
    // Machines are added, started and pinned in write transactions, so none can begin to use it meanwhile.
    let mut repo = service.db().write().await?;
    let mut uses = match &version {
        Some(version) => channels_of(&service, version).await?,
        None => Vec::new(),
    };
    for machine in repo.machines().list().await? {
        if let Some(how) = use_of(&service, &machine, &reference, version.as_ref()).await {
            uses.push(format!("machine '{}' {how}", machine.name));
        }
    }
    for catalog in repo.catalogs().list().await? {
        let boots = (catalog.image.as_str(), catalog.pin.as_deref());
        if let Some(how) = follows(&service, boots, &reference, version.as_ref()).await {
            uses.push(format!("catalog '{}' {how}", catalog.name));
        }
    }
    let disks = repo.kept_disks().list().await?;
    for disk in disks {
        if disk.image == reference.image && version.as_ref().is_none_or(|it| it.hash == disk.hash) {
            let machine = repo.machines().by_uuid(disk.machine).await?;
            let name = machine.map_or_else(|| disk.machine.to_string(), |machine| machine.name);
            let how = if disk.purpose == Purpose::Edit { "edits it" } else { "has a kept disk over it" };
            uses.push(format!("machine '{name}' {how}"));
        }
    }
    if !uses.is_empty() {
        return Err(Error::InUse { what: name, uses }.into());
    }
    let removed = service.images().remove(&reference).await?;
    let event =
        service.event(&actor, format!("image {}", reference.image), "removed", removed.removed.join(", "));
    repo.events().append(event).await?;
    repo.save().await?;
    Ok(Json(removed))
}

/// The channels that point, or will point, to a version.
async fn channels_of(service: &Service, version: &ImageVersion) -> Result<Vec<String>, BackendError> {
    let images = service.images().list().await?;
    let image = images.into_iter().find(|image| image.name == version.image);
    let now = version.channels.iter().filter(|channel| **channel != Channel::Maintenance);
    let now = now.map(|channel| format!("channel {channel} points to it"));
    let later = image.into_iter().flat_map(|image| image.scheduled);
    let later = later.filter(|pointer| pointer.version == version.number);
    let later = later.map(|pointer| format!("it will be promoted to {}", pointer.channel));
    Ok(now.chain(later).collect())
}

/// How a machine uses what is to be removed, if it does. Without a version the whole image is.
async fn use_of(
    service: &Service,
    machine: &MachineRecord,
    reference: &ImageRef,
    version: Option<&ImageVersion>,
) -> Option<&'static str> {
    let runs = |version: &ImageVersion| {
        service.active(machine.uuid).is_some_and(|active| active.version_hash == version.hash)
    };
    if version.is_some_and(runs) {
        return Some("runs it");
    }
    // What its catalog says is told of that.
    let image = if machine.catalog.is_some() { "" } else { &machine.image };
    follows(service, (image, machine.pin.as_deref()), reference, version).await
}

/// How an image and a pin mean what is to be removed, if they do.
async fn follows(
    service: &Service,
    (image, pin): (&str, Option<&str>),
    reference: &ImageRef,
    version: Option<&ImageVersion>,
) -> Option<&'static str> {
    let of_image = |text: &str| ImageRef::parse(text).ok().filter(|theirs| theirs.image == reference.image);
    let follows = of_image(image);
    let pinned = pin.and_then(of_image);
    let Some(version) = version else {
        return (follows.is_some() || pinned.is_some()).then_some("boots it");
    };
    if let Some(pinned) = pinned {
        let to = service.images().resolve(&pinned).await.ok()?;
        if to.number == version.number {
            return Some("is pinned to it");
        }
        // What it boots when the pin is taken away can move on to another version, unless it is a number.
        follows.as_ref()?.version.as_ref()?;
    }
    let next = service.images().resolve(&follows?).await.ok()?;
    (next.number == version.number).then_some("boots it")
}
