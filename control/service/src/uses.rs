//! Finds what uses an image or a version: machines, catalogs, channels, persistent disks, tasks that publish. Nobody may remove a version in use,
//! and the report of damage lists these uses. It also records in the history what the scrub found and repaired.

use std::collections::HashMap;

use headwater_api::name::ImageRef;
use headwater_api::{Channel, ImageVersion, Problem, ProblemKind};
use headwater_db::{MachineRecord, Purpose};

use crate::Service;
use crate::answer::Failure;
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::tasks::publish::publishing;

/// All uses of a version, or of the whole image if there is no version, in words: `machine 'x' runs it`. No transaction is
/// open while the store is asked.
pub(crate) async fn of(
    service: &Service,
    reference: &ImageRef,
    version: Option<&ImageVersion>,
) -> Result<Vec<String>, Failure> {
    let mut uses = match version {
        Some(version) => channels_of(service, version).await?,
        // The channels of a whole image are checked by the store itself when it removes the image.
        None => Vec::new(),
    };
    let mut repo = service.db().read().await?;
    let machines = repo.machines().list().await?;
    let catalogs = repo.catalogs().list().await?;
    let disks = repo.persistent_disks().list().await?;
    let publishing = publishing(&mut *repo, &reference.image, version).await?;
    drop(repo);
    uses.extend(publishing.into_iter().map(|task| format!("task {task} publishes it")));
    let mut references = ResolvedReferences { service, reference, version, found: HashMap::new() };
    for machine in &machines {
        if let Some(how) = references.use_of(machine).await? {
            uses.push(format!("machine '{}' {how}", machine.name));
        }
    }
    for catalog in catalogs {
        if let Some(how) = references.use_by(&catalog.image, catalog.pin.as_deref()).await? {
            uses.push(format!("catalog '{}' {how}", catalog.name));
        }
    }
    for disk in disks {
        if disk.image == reference.image && version.is_none_or(|it| it.hash == disk.hash) {
            let machine = machines.iter().find(|machine| machine.uuid == disk.machine);
            let name = machine.map_or_else(|| disk.machine.to_string(), |machine| machine.name.clone());
            let how = if disk.purpose == Purpose::MaintenanceSession {
                "edits it"
            } else {
                "has a persistent disk over it"
            };
            uses.push(format!("machine '{name}' {how}"));
        }
    }
    Ok(uses)
}

impl Service {
    /// What uses a version, given as `IMAGE@NUMBER`: lines such as `debian@3: machine 'x' runs it`. Empty if the version
    /// was removed meanwhile. If the uses cannot be determined, the error is a line that says why, for the report of damage.
    pub async fn users_of(&self, version: &str) -> Result<Vec<String>, String> {
        let uses = self.uses_of(version).await;
        uses.map_err(|why| format!("{version}: cannot determine who uses it: {why}"))
    }

    /// What uses any version of an image, whose version list need not be readable: lines such as `debian: machine 'x'
    /// boots it`.
    pub(crate) async fn users_of_image(&self, image: &str) -> Vec<String> {
        let uses = self.uses_of_image(image).await;
        uses.unwrap_or_else(|why| vec![format!("{image}: cannot determine who uses it: {why}")])
    }

    /// Records in the history that the scrub found damage in an image.
    pub async fn note_damage(&self, image: &str, detail: String) {
        self.note(self.event(&Caller::daemon(), format!("image {image}"), "damaged", detail)).await;
    }

    /// Records in the history that the scrub repaired damage in an image.
    pub async fn note_repair(&self, image: &str, detail: String) {
        self.note(self.event(&Caller::daemon(), format!("image {image}"), "repaired", detail)).await;
    }

    async fn uses_of_image(&self, image: &str) -> Result<Vec<String>, Problem> {
        let uses = of(self, &ImageRef::parse(image)?, None).await.map_err(|failure| failure.0)?;
        Ok(uses.into_iter().map(|how| format!("{image}: {how}")).collect())
    }

    async fn uses_of(&self, version: &str) -> Result<Vec<String>, Problem> {
        let reference = ImageRef::parse(version)?;
        let told = |failure: Failure| failure.0;
        let found = resolve(self, &reference).await.map_err(|e| told(e.into()))?;
        let Some(found) = found else { return Ok(Vec::new()) };
        let uses = of(self, &reference, Some(&found)).await.map_err(told)?;
        Ok(uses.into_iter().map(|how| format!("{version}: {how}")).collect())
    }
}

/// The channels that point, or will point, to a version.
async fn channels_of(service: &Service, version: &ImageVersion) -> Result<Vec<String>, BackendError> {
    let image = service.images().image(&version.image).await?;
    let now = version.channels.iter().filter(|channel| **channel != Channel::Maintenance);
    let now = now.map(|channel| format!("channel {channel} points to it"));
    let later = image.into_iter().flat_map(|image| image.scheduled);
    let later = later.filter(|pointer| pointer.version == version.number);
    let later = later.map(|pointer| format!("it will be promoted to {}", pointer.channel));
    Ok(now.chain(later).collect())
}

/// The versions to which references resolve; the store is asked once for each.
struct ResolvedReferences<'a> {
    service: &'a Service,
    /// The image whose uses are searched.
    reference: &'a ImageRef,
    /// The version whose uses are searched. `None`: those of the whole image.
    version: Option<&'a ImageVersion>,
    /// The numbers of the versions to which references resolve.
    found: HashMap<String, Option<u64>>,
}

impl ResolvedReferences<'_> {
    /// How a machine uses the version or image. `None`: it does not.
    async fn use_of(&mut self, machine: &MachineRecord) -> Result<Option<&'static str>, BackendError> {
        if let Some(active) = self.service.active(machine.uuid) {
            // The version that a machine runs may differ from the one that it boots next, and other images may have
            // versions with the same hash.
            let running = machine.version.as_deref().and_then(|text| ImageRef::parse(text).ok());
            if running.is_none_or(|running| running.image == self.reference.image)
                && self.version.is_none_or(|version| version.hash == active.version_hash)
            {
                return Ok(Some("runs it"));
            }
        }
        if !self.service.is_own(machine) {
            // Its node may not be connected, so use the last known state. Both texts name a version, as a pin
            // does; the empty image means that there is no image reference.
            let on = machine.version.as_deref().filter(|_| machine.state.is_active());
            for (text, how) in [(on, "runs it"), (machine.kept.as_deref(), "has a persistent disk over it")] {
                if self.use_by("", text).await?.is_some() {
                    return Ok(Some(how));
                }
            }
        }
        // A reference of the catalog counts for the catalog.
        let image = if machine.catalog.is_some() { "" } else { &machine.image };
        self.use_by(image, machine.pin.as_deref()).await
    }

    /// How an image reference (empty if there is none) and a pin, which has precedence, use the version or image. `None`: they
    /// do not.
    async fn use_by(&mut self, image: &str, pin: Option<&str>) -> Result<Option<&'static str>, BackendError> {
        let named = &self.reference.image;
        let of_image = |text: &str| ImageRef::parse(text).ok().filter(|theirs| theirs.image == *named);
        let unpinned = of_image(image);
        let pinned = pin.and_then(of_image);
        let Some(number) = self.version.map(|version| version.number) else {
            return Ok((unpinned.is_some() || pinned.is_some()).then_some("boots it"));
        };
        if let Some(pinned) = &pinned
            && self.number_of(pinned).await? == Some(number)
        {
            return Ok(Some("is pinned to it"));
        }
        // Without the pin the machine would follow its image reference. Beside a pin, that reference counts as a use only if
        // it names a version number.
        let Some(boots) = unpinned.filter(|boots| pinned.is_none() || boots.version.is_some()) else {
            return Ok(None);
        };
        Ok((self.number_of(&boots).await? == Some(number)).then_some("boots it"))
    }

    async fn number_of(&mut self, reference: &ImageRef) -> Result<Option<u64>, BackendError> {
        let text = reference.to_string();
        if let Some(number) = self.found.get(&text) {
            return Ok(*number);
        }
        let number = resolve(self.service, reference).await?.map(|version| version.number);
        self.found.insert(text, number);
        Ok(number)
    }
}

/// The version to which a reference resolves, if there is one. A failing store is an error, because otherwise a version in use
/// could be removed.
pub(crate) async fn resolve(
    service: &Service,
    reference: &ImageRef,
) -> Result<Option<ImageVersion>, BackendError> {
    match service.images().resolve(reference).await {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == ProblemKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}
