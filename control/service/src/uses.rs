//! Who uses an image, or one version of it: machines, catalogs, channels, kept disks.

use headwater_api::name::ImageRef;
use headwater_api::{Channel, ImageVersion, Problem, ProblemKind};
use headwater_db::{MachineRecord, Purpose, Repository};

use crate::Service;
use crate::answer::Failure;
use crate::backend::BackendError;

/// All uses of a version, or of the whole image where there is none, in words: `machine 'x' runs it`.
pub(crate) async fn of(
    service: &Service,
    repo: &mut dyn Repository,
    reference: &ImageRef,
    version: Option<&ImageVersion>,
) -> Result<Vec<String>, Failure> {
    let mut uses = match version {
        Some(version) => channels_of(service, version).await?,
        None => Vec::new(),
    };
    for machine in repo.machines().list().await? {
        if let Some(how) = use_of(service, &machine, reference, version).await? {
            uses.push(format!("machine '{}' {how}", machine.name));
        }
    }
    for catalog in repo.catalogs().list().await? {
        let boots = (catalog.image.as_str(), catalog.pin.as_deref());
        if let Some(how) = follows(service, boots, reference, version).await? {
            uses.push(format!("catalog '{}' {how}", catalog.name));
        }
    }
    let disks = repo.kept_disks().list().await?;
    for disk in disks {
        if disk.image == reference.image && version.is_none_or(|it| it.hash == disk.hash) {
            let machine = repo.machines().by_uuid(disk.machine).await?;
            let name = machine.map_or_else(|| disk.machine.to_string(), |machine| machine.name);
            let how = if disk.purpose == Purpose::Edit { "edits it" } else { "has a kept disk over it" };
            uses.push(format!("machine '{name}' {how}"));
        }
    }
    Ok(uses)
}

impl Service {
    /// Who uses a version, given as `IMAGE@NUMBER`: lines such as `debian@3: machine 'x' runs it`. Nobody where it was removed
    /// meanwhile.
    pub async fn users_of(&self, version: &str) -> Result<Vec<String>, Problem> {
        let reference = ImageRef::parse(version)?;
        let told = |failure: Failure| failure.0;
        let found = resolve(self, &reference).await.map_err(|e| told(e.into()))?;
        let Some(found) = found else { return Ok(Vec::new()) };
        let mut repo = self.db().read().await.map_err(|e| told(e.into()))?;
        let uses = of(self, &mut *repo, &reference, Some(&found)).await.map_err(told)?;
        Ok(uses.into_iter().map(|how| format!("{version}: {how}")).collect())
    }
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

/// How a machine uses a version, if it does; without a version, the whole image.
async fn use_of(
    service: &Service,
    machine: &MachineRecord,
    reference: &ImageRef,
    version: Option<&ImageVersion>,
) -> Result<Option<&'static str>, BackendError> {
    let runs = |version: &ImageVersion| {
        service.active(machine.uuid).is_some_and(|active| active.version_hash == version.hash)
    };
    if version.is_some_and(runs) {
        return Ok(Some("runs it"));
    }
    // What its catalog says is told of that.
    let image = if machine.catalog.is_some() { "" } else { &machine.image };
    follows(service, (image, machine.pin.as_deref()), reference, version).await
}

/// How an image and a pin mean a version, or an image, if they do.
async fn follows(
    service: &Service,
    (image, pin): (&str, Option<&str>),
    reference: &ImageRef,
    version: Option<&ImageVersion>,
) -> Result<Option<&'static str>, BackendError> {
    let of_image = |text: &str| ImageRef::parse(text).ok().filter(|theirs| theirs.image == reference.image);
    let follows = of_image(image);
    let pinned = pin.and_then(of_image);
    let Some(version) = version else {
        return Ok((follows.is_some() || pinned.is_some()).then_some("boots it"));
    };
    let is_it = |found: Option<ImageVersion>| found.is_some_and(|found| found.number == version.number);
    if let Some(pinned) = &pinned
        && is_it(resolve(service, pinned).await?)
    {
        return Ok(Some("is pinned to it"));
    }
    // What it boots when the pin is taken away can move on to another version, unless it is a number.
    let Some(boots) = follows.filter(|boots| pinned.is_none() || boots.version.is_some()) else {
        return Ok(None);
    };
    Ok(is_it(resolve(service, &boots).await?).then_some("boots it"))
}

/// The version that a reference means, if it means one. A store that cannot say is an error: it would let a version go that is
/// in use.
async fn resolve(service: &Service, reference: &ImageRef) -> Result<Option<ImageVersion>, BackendError> {
    match service.images().resolve(reference).await {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == ProblemKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}
