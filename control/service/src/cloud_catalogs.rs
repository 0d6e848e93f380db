//! Catalogs whose machines are in a cloud: checks a new one, and refuses settings and operations that only machines on hosts can
//! have. Single machines are refused in `fleet/remote.rs` (`Service::not_in_cloud`).

use std::time::Duration;

use headwater_api::name::ImageRef;
use headwater_api::{
    CacheSettings, CloudScheme, CreateCatalog, CreateMachine, ImageVersion, MAX_CLOUD_USER_DATA_BYTES,
    Problem, ProblemKind, PublishedImage,
};
use headwater_db::{CatalogRecord, ConnectionRecord, DbError, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::{BackendError, CloudOrder};
use crate::lifecycle::cloud::os_disk_bytes;

/// How long the cloud is asked whether its machines can have another version.
const CHECK_TIMEOUT: Duration = Duration::from_secs(30);

/// The change that a catalog in a cloud refuses.
pub(crate) const OTHER_SETTINGS: &str = "a change of other settings than the image";

/// Why something is not possible for a catalog in a cloud.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CloudCatalogError {
    #[error(
        "its machines are in the cloud of connection '{connection}', and {what} is only for machines on hosts"
    )]
    OnlyOnHosts { connection: String, what: &'static str },
    #[error("{version} is not published to connection '{connection}'")]
    NotPublished { version: String, connection: String },
    #[error("an OS disk of {wanted_bytes} bytes does not hold {version}, which has {has_bytes} bytes")]
    SmallDisk { version: String, has_bytes: u64, wanted_bytes: u64 },
    #[error(
        "the user data has {bytes} bytes, and a machine in a cloud has {MAX_CLOUD_USER_DATA_BYTES} at most"
    )]
    LongUserData { bytes: usize },
    #[error("'{0}' cannot be the host name of a machine in a cloud")]
    HostName(String),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for CloudCatalogError {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::OnlyOnHosts { .. }
            | Self::SmallDisk { .. }
            | Self::LongUserData { .. }
            | Self::HostName(_) => ProblemKind::Invalid,
            Self::NotPublished { .. } => ProblemKind::Conflict,
            Self::Backend(source) => source.kind(),
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::OnlyOnHosts { .. } => {
                Some("leave it out, or use a catalog without --connection".to_owned())
            }
            Self::NotPublished { version, connection } => {
                Some(format!("'headwater image publish {version} --connection {connection}' publishes it"))
            }
            Self::SmallDisk { .. } => Some("leave out --os-disk, or make it larger".to_owned()),
            Self::HostName(_) => {
                Some("use 1 to 64 letters, digits and '-', without '-' at the start or end".to_owned())
            }
            Self::LongUserData { .. } => Some("have it download what is long".to_owned()),
            Self::Backend(source) => source.advice().map(str::to_owned),
            Self::Db(source) => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(source) => source.retry_after_s(),
            _ => None,
        }
    }
}

/// The first setting of a request that only machines on hosts can have.
fn setting_of_hosts(request: &CreateCatalog) -> Option<&'static str> {
    let cache = CacheSettings { persistent: request.cache.persistent, ..CacheSettings::default() };
    [
        (request.cache.persistent, "a persistent disk"),
        (request.cache != cache, "a write cache"),
        (request.memory_bytes != CreateMachine::default_memory_bytes(), "--memory"),
        (request.cpus != CreateMachine::default_cpus(), "--cpus"),
        (request.transport != Default::default(), "--transport"),
        (request.firmware != Default::default() || request.secure_boot, "firmware"),
        (request.tpm, "a TPM"),
        (request.display != Default::default(), "--display"),
        (request.network != Default::default(), "--network"),
        (request.scratch_bytes != 0, "--scratch"),
        (request.keep_ready != 0 || request.ready_hours.is_some(), "--keep-ready"),
        (request.stop_idle_s.is_some(), "--stop-idle"),
        (!request.seal_removes.is_empty(), "--seal-removes"),
        (request.on_host_loss != Default::default(), "--on-host-loss"),
    ]
    .into_iter()
    .find_map(|(is_set, what)| is_set.then_some(what))
}

/// Fails if machines of a new catalog could not be created in its cloud. Changes nothing there.
pub(crate) async fn check_new(
    service: &Service,
    request: &CreateCatalog,
    scheme: &CloudScheme,
) -> Result<(), Failure> {
    let during =
        |problem: Problem| Failure(problem.during(format!("cannot create catalog '{}'", request.name)));
    if let Some(what) = setting_of_hosts(request) {
        let connection = scheme.connection.clone();
        return Err(during(problem(&CloudCatalogError::OnlyOnHosts { connection, what })));
    }
    scheme.check().map_err(during)?;
    let connection = service.connection(&scheme.connection).await.map_err(|e| during(problem(&e)))?;
    let order = order(service, request, scheme, connection).await.map_err(|e| during(problem(&e)))?;
    let cloud = service.cloud().map_err(during)?;
    cloud.check_machines(&order).await.map_err(|e| during(problem(&e)))
}

/// The order of a machine of a new catalog.
async fn order(
    service: &Service,
    request: &CreateCatalog,
    scheme: &CloudScheme,
    connection: ConnectionRecord,
) -> Result<CloudOrder, CloudCatalogError> {
    let bytes = request.user_data.as_ref().map_or(0, String::len);
    if bytes > MAX_CLOUD_USER_DATA_BYTES {
        return Err(CloudCatalogError::LongUserData { bytes });
    }
    let reference = ImageRef::parse(&request.image)
        .map_err(|problem| BackendError::new(problem.kind, problem.message))?;
    let version = service.images().resolve(&reference).await?;
    let os_disk_bytes = large_enough(scheme, &version)?;
    let Some(published) = service.published_version(&scheme.connection, &version).await? else {
        let (version, connection) = (name_of(&version), scheme.connection.clone());
        return Err(CloudCatalogError::NotPublished { version, connection });
    };
    Ok(order_of(&request.name, scheme, connection, published, os_disk_bytes))
}

/// The size of the OS disk of machines of a catalog. Fails if it does not hold the version.
fn large_enough(scheme: &CloudScheme, version: &ImageVersion) -> Result<u64, CloudCatalogError> {
    let wanted_bytes = os_disk_bytes(scheme.os_disk_bytes, version);
    if wanted_bytes < version.size_bytes {
        let (version, has_bytes) = (name_of(version), version.size_bytes);
        return Err(CloudCatalogError::SmallDisk { version, has_bytes, wanted_bytes });
    }
    Ok(wanted_bytes)
}

/// `IMAGE@NUMBER`.
fn name_of(version: &ImageVersion) -> String {
    format!("{}@{}", version.image, version.number)
}

/// The order of any machine of a catalog, for a check.
fn order_of(
    catalog: &str,
    scheme: &CloudScheme,
    connection: ConnectionRecord,
    published: PublishedImage,
    os_disk_bytes: u64,
) -> CloudOrder {
    CloudOrder {
        connection,
        scheme: scheme.clone(),
        published,
        os_disk_bytes,
        uuid: Uuid::nil(),
        host_name: catalog.to_owned(),
        mark: catalog.to_owned(),
        user_data: None,
    }
}

/// Fails if the OS disks of a catalog in a cloud cannot hold another version. Whether its sizes can hold the disk is checked
/// only for a published version, and only if the cloud answers: otherwise a start fails later.
pub(crate) async fn check_image(
    service: &Service,
    catalog: &CatalogRecord,
    reference: &ImageRef,
) -> Result<(), Failure> {
    let Some(scheme) = &catalog.cloud else { return Ok(()) };
    let tried = format!("cannot set image '{reference}' as the image of catalog '{}'", catalog.name);
    let during = |problem: Problem| Failure(problem.during(tried.clone()));
    let version = service.images().resolve(reference).await.map_err(|e| during(problem(&e)))?;
    let larger = "create another catalog with a larger --os-disk";
    let os_disk_bytes = large_enough(scheme, &version).map_err(|e| during(problem(&e).advise(larger)))?;
    let published = service.published_version(&scheme.connection, &version).await;
    let Some(published) = published.map_err(|e| during(problem(&e)))? else { return Ok(()) };
    let connection = service.connection(&scheme.connection).await.map_err(|e| during(problem(&e)))?;
    let order = order_of(&catalog.name, scheme, connection, published, os_disk_bytes);
    let cloud = service.cloud().map_err(during)?;
    match tokio::time::timeout(CHECK_TIMEOUT, cloud.check_reset(&order)).await {
        Ok(Err(error)) if error.kind() == ProblemKind::Invalid => Err(during(problem(&error))),
        _ => Ok(()),
    }
}

/// Fails for a catalog in a cloud: `what` works only for machines on hosts.
pub(crate) fn not_in_cloud(catalog: &CatalogRecord, tried: &str, what: &'static str) -> Result<(), Failure> {
    let Some(cloud) = &catalog.cloud else { return Ok(()) };
    let connection = cloud.connection.clone();
    let why = problem(&CloudCatalogError::OnlyOnHosts { connection, what });
    Err(Failure(why.during(format!("cannot {tried} catalog '{}'", catalog.name))))
}

/// Fails for a machine of a catalog in a cloud with settings that only machines on hosts can have.
pub(crate) fn check_machine(catalog: &CatalogRecord, request: &CreateMachine) -> Result<(), Failure> {
    let Some(cloud) = &catalog.cloud else { return Ok(()) };
    let what = [
        (request.host.is_some(), "--host"),
        (request.boot.is_some(), "--boot"),
        (request.mac.is_some(), "--mac"),
        (request.address.is_some(), "a fixed IP address"),
        (request.cache.is_some_and(|cache| cache != catalog.cache), "a write cache"),
        (request.memory_bytes.is_some(), "--memory"),
        (request.cpus.is_some(), "--cpus"),
        (request.transport.is_some(), "--transport"),
        (request.firmware.is_some() || request.secure_boot.is_some(), "firmware"),
        (request.tpm.is_some(), "a TPM"),
        (request.display.is_some(), "--display"),
        (request.network.is_some(), "--network"),
        (request.scratch_bytes.is_some(), "--scratch"),
    ]
    .into_iter()
    .find_map(|(is_set, what)| is_set.then_some(what));
    let bytes = request.user_data.as_ref().map_or(0, String::len);
    let why = match what {
        Some(what) => CloudCatalogError::OnlyOnHosts { connection: cloud.connection.clone(), what },
        None if bytes > MAX_CLOUD_USER_DATA_BYTES => CloudCatalogError::LongUserData { bytes },
        None => match request.host_name.as_deref().filter(|name| !is_computer_name(name)) {
            Some(name) => CloudCatalogError::HostName(name.to_owned()),
            None => return Ok(()),
        },
    };
    Err(Failure(problem(&why).during(format!("cannot create machine '{}'", request.name))))
}

/// Whether a guest in a cloud can have this host name. It is stricter than for machines on hosts: no dots.
fn is_computer_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Fails for a new machine in a cloud whose own user data, after its template is filled in, is too long.
pub(crate) fn check_user_data(machine: &MachineRecord) -> Result<(), Failure> {
    let bytes = machine.identity.user_data.as_ref().map_or(0, String::len);
    if machine.connection.is_none() || bytes <= MAX_CLOUD_USER_DATA_BYTES {
        return Ok(());
    }
    let why = problem(&CloudCatalogError::LongUserData { bytes });
    Err(Failure(why.during(format!("cannot create machine '{}'", machine.name))))
}
