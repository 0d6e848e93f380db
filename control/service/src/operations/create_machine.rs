//! Creates machines: on request (`POST /api/v1/machines`), and on a node those that its controller assigns ([`assign`]).
//! Starts none.
//!
//! [`make`] has these steps:
//!
//! 1. [`settle`] fills in the settings of the catalog and the defaults, and chooses the host.
//! 2. [`choose_firmware`] chooses UEFI if the image needs it.
//! 3. [`check`] asks the hypervisor and the disks whether this host can run the machine.
//! 4. [`create`] retains the version and stores the record.
//! 5. [`give_to_node`] sends the record to its node, if the machine is for another host.

use std::net::Ipv4Addr;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::name::{self, ImageRef};
use headwater_api::platform::{Firmware, Network, Platform};
use headwater_api::{
    BootFrom, CacheMode, CacheSettings, CreateMachine, DiskTransport, FixedAddress, Identity, ImageVersion,
    Machine, MachineState, Problem, ProblemKind, Wanted,
};
use headwater_db::{CatalogRecord, DbError, HostRecord, IN_A_CLOUD, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::{BackendError, VmPlan};
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::cloud_catalogs;
use crate::extract::Body;
use crate::fleet::placement::{NoRoom, place};
use crate::fleet::protocol::AssignedMachine;
use crate::identity::{self, IdentityError, NewIdentity};
use crate::retention::{ReferenceKind, Referrer};
use crate::server::MAX_SOCKET_PATH_BYTES;
use crate::template;

/// The longest name of a socket in a machine's directory, with its separator.
const MAX_SOCKET_NAME_BYTES: usize = "/console.sock".len();

/// The most attempts to generate an identity with a MAC address that no other machine has. 24 bits of the address are
/// random.
const IDENTITIES_MAX: u32 = 16;

/// Why a machine cannot be created on a host.
const NO_SUCH_HOST: &str = "there is no such host";
const IS_AWAY: &str = "its node is not connected";
const IS_CORDONED: &str = "it is cordoned";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot create machine '{0}': a machine of that name exists")]
    Exists(String),
    #[error(
        "cannot create machine '{0}': a catalog of that name exists, and 'image pin NAME' could mean either"
    )]
    IsCatalog(String),
    #[error("cannot create machine '{machine}': machine '{other}' already has the MAC address {mac}")]
    MacTaken { machine: String, mac: String, other: String },
    #[error("cannot create machine '{machine}': machine '{other}' already has the address {ip}")]
    IpTaken { machine: String, ip: Ipv4Addr, other: String },
    #[error("cannot create machine '{0}': a fixed address needs a network card on a bridge of a host")]
    NoBridge(String),
    #[error("cannot create machine '{machine}' on host '{host}': {why}")]
    Host { machine: String, host: String, why: &'static str },
    #[error("cannot create machine '{machine}'")]
    NoRoom {
        machine: String,
        #[source]
        source: NoRoom,
    },
    #[error("cannot create machine '{machine}': {why}")]
    NetworkBoot { machine: String, why: &'static str },
    #[error("cannot create machine '{0}': give either an image or a catalog")]
    ImageOrCatalog(String),
    #[error(
        "cannot create machine '{machine}': sockets in its directory {run_dir} would have paths of {len} bytes, and \
         a socket's path has at most {MAX_SOCKET_PATH_BYTES}"
    )]
    PathTooLong { machine: String, run_dir: String, len: usize },
    #[error("cannot create machine '{machine}'")]
    Backend {
        machine: String,
        #[source]
        source: BackendError,
    },
    #[error("cannot create machine '{machine}'")]
    Identity {
        machine: String,
        #[source]
        source: IdentityError,
    },
    #[error("cannot create machine '{machine}'")]
    Template {
        machine: String,
        #[source]
        source: Box<Problem>,
    },
    #[error("cannot create machine '{machine}'")]
    Db {
        machine: String,
        #[source]
        source: DbError,
    },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Exists(_) | Self::IsCatalog(_) | Self::MacTaken { .. } | Self::IpTaken { .. } => {
                ProblemKind::Conflict
            }
            Self::Host { why, .. } if *why == NO_SUCH_HOST => ProblemKind::NotFound,
            Self::Host { why, .. } if *why == IS_AWAY => ProblemKind::Unavailable,
            Self::Host { .. } | Self::NoRoom { .. } => ProblemKind::Conflict,
            Self::ImageOrCatalog(_)
            | Self::PathTooLong { .. }
            | Self::NetworkBoot { .. }
            | Self::NoBridge(_) => ProblemKind::Invalid,
            Self::Backend { source, .. } => source.kind(),
            Self::Template { source, .. } => source.kind,
            Self::Identity { .. } => ProblemKind::Failed,
            Self::Db { source, .. } => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::PathTooLong { .. } => {
                Some("use a shorter name or a data directory with a shorter path".to_owned())
            }
            Self::Backend { source, .. } => source.advice().map(str::to_owned),
            Self::Template { source, .. } => source.advice.clone(),
            Self::Exists(_) | Self::IsCatalog(_) | Self::ImageOrCatalog(_) | Self::Identity { .. } => None,
            Self::Host { .. } => Some("'headwater node list' shows the hosts".to_owned()),
            Self::NoRoom { .. } => Some(
                "stop machines, add a host ('headwater node token'), or choose a host with --host, whose memory is then not checked"
                    .to_owned(),
            ),
            Self::NoBridge(_) => Some(
                "use --network bridge:NAME, or no fixed address: guests then ask a DHCP server".to_owned(),
            ),
            Self::MacTaken { .. } | Self::IpTaken { .. } | Self::NetworkBoot { .. } => None,
            Self::Db { source, .. } => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db { source, .. } => source.retry_after_s(),
            _ => None,
        }
    }
}

/// Creates a machine with its own identity. The machine is not started.
#[utoipa::path(
    post,
    path = "/api/v1/machines",
    security(("token" = ["operator", "scoped"])),
    tag = "machines",
    request_body = CreateMachine,
    responses(
        (status = 201, body = Machine),
        (status = 400, description = "The name is not valid, or the host cannot provide the settings", body = Problem),
        (status = 404, description = "No such image, version, catalog or host", body = Problem),
        (status = 409, description = "A machine or catalog of that name exists, another machine has the MAC or IP address, or the host is cordoned or lacks memory", body = Problem),
        (status = 503, description = "The node of the host is not connected", body = Problem),
    ),
)]
pub(super) async fn create_machine(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<CreateMachine>,
) -> Result<(StatusCode, Json<Machine>), Failure> {
    match (&request.catalog, &request.image) {
        (Some(catalog), _) => caller.must_have_catalog(catalog).map_err(Failure)?,
        (None, Some(image)) => caller.must_have_image(image).map_err(Failure)?,
        // Fails later.
        (None, None) => {}
    }
    let is_on_a_bridge = matches!(request.network, Some(Network::Bridge(_)));
    let has_address = request.mac.is_some() || request.address.is_some();
    if is_on_a_bridge || request.host.is_some() || has_address {
        // Networks, hosts and network cards belong to the whole fleet, so a token with a scope may not choose them.
        caller.must_have_everything().map_err(Failure)?;
    }
    let handle = service.clone();
    let record = service.to_the_end(async move { make(&handle, &caller, request).await }).await?;
    let mut machine =
        if service.is_own(&record) { service.view(record) } else { service.changed_view(record).await };
    machine.warning = service.lacks_space(&machine).await;
    Ok((StatusCode::CREATED, Json(machine)))
}

/// Creates a machine from a request. The module's documentation lists the steps.
pub(crate) async fn make(
    service: &Service,
    caller: &Caller,
    request: CreateMachine,
) -> Result<MachineRecord, Failure> {
    let mut plan = settle(service, request).await?;
    choose_firmware(service, &mut plan).await;
    check(service, &plan).await?;
    let record = create(service, caller, plan).await?;
    if service.is_own(&record) || record.connection.is_some() {
        return Ok(record);
    }
    give_to_node(service, caller, record).await
}

/// Sends a new machine to its node. If the node refuses it, the machine is removed again.
async fn give_to_node(
    service: &Service,
    caller: &Caller,
    record: MachineRecord,
) -> Result<MachineRecord, Failure> {
    let _turn = service.lock(record.uuid).await;
    let name = record.name.clone();
    let problem = match service.give_to_node(&record).await {
        Ok(()) => return Ok(record),
        // The node may have got it. The controller sends it again.
        Err(problem) if problem.kind == ProblemKind::Unavailable => {
            tracing::warn!(machine = name, "cannot give a new machine to its host; trying again: {problem}");
            service.boots_changed();
            return Ok(record);
        }
        Err(problem) => problem,
    };
    let failed = |source| Error::Db { machine: name.clone(), source };
    let mut repo = service.db().write().await.map_err(failed)?;
    repo.machines().remove(record.uuid).await.map_err(failed)?;
    let detail = format!("its host did not accept the machine: {problem}");
    let event = service.event(caller, format!("machine {name}"), "removed", detail);
    repo.events().append(event).await.map_err(failed)?;
    repo.save().await.map_err(failed)?;
    service.roots_changed();
    Err(Failure(problem.during(format!("cannot create machine '{name}'"))))
}

/// Adds a machine that the controller assigns to this node. If the node has the machine, updates what it boots, its
/// settings, its SSH host key, and whether it is fenced (the node ends it when its lease is over).
pub(crate) async fn assign(service: &Service, machine: AssignedMachine) -> Result<(), Failure> {
    let caller = Caller::daemon();
    let known = service.db().read().await?.machines().by_uuid(machine.uuid).await?;
    if let Some(mut known) = known {
        let mut repo = service.db().write().await?;
        // The controller has given it the settings of another scheme version, for its next boot.
        if machine.scheme != known.scheme && service.active(known.uuid).is_none() {
            known.take_settings(machine.settings(), machine.scheme);
            repo.machines().set_scheme(&known).await?;
        }
        if known.identity.ssh_host_key_public != machine.identity.ssh_host_key_public {
            // The controller has given it another one, which its guest gets at its next boot.
            let secret = machine.secret();
            let now =
                MachineRecord { identity: machine.identity.clone(), ssh_host_key_private: secret, ..known };
            repo.machines().set_host_key(&now).await?;
        }
        let personality = &machine.identity.personality;
        if repo.personality().of_machine(machine.uuid).await? != *personality {
            repo.personality().set_of_machine(machine.uuid, personality).await?;
        }
        repo.hosts().set_boot(machine.uuid, &machine.image, machine.pin.as_deref()).await?;
        repo.machines().set_fenced(machine.uuid, machine.fenced).await?;
        repo.save().await?;
        service.is_fenced(machine.uuid, &machine.name, machine.fenced).await;
        service.roots_changed();
        return Ok(());
    }
    let (secret, plan) = (machine.secret(), plan_of(&machine));
    check(service, &plan).await?;
    let _using = service.using_versions().await;
    resolve_and_hold(service, &plan).await?;
    let record = MachineRecord {
        uuid: machine.uuid,
        mac: machine.mac,
        image: machine.image,
        pin: machine.pin,
        scheme: machine.scheme,
        identity: machine.identity,
        ssh_host_key_private: secret,
        fenced: machine.fenced,
        created_at_ms: machine.created_at_ms,
        ..record(service, plan)?
    };
    let mut repo = service.db().write().await?;
    // The controller may have sent it twice.
    if repo.machines().by_uuid(record.uuid).await?.is_some() {
        return Ok(());
    }
    repo.machines().add(&record).await?;
    repo.personality().set_of_machine(record.uuid, &record.identity.personality).await?;
    let subject = format!("machine {}", record.name);
    repo.events().append(service.event(&caller, subject, "assigned", record.uuid.to_string())).await?;
    repo.save().await?;
    service.is_fenced(record.uuid, &record.name, record.fenced).await;
    tracing::info!(machine = record.name, "the controller has given a machine to this host");
    Ok(())
}

/// The plan of a machine that the controller assigns to this node. The controller has resolved all settings.
fn plan_of(machine: &AssignedMachine) -> Plan {
    Plan {
        name: machine.name.clone(),
        boot: BootFrom::Vm,
        host: None,
        mac: None,
        address: None,
        image: machine.pin.clone().unwrap_or_else(|| machine.image.clone()),
        catalog: None,
        cache: machine.cache,
        transport: machine.transport,
        memory_bytes: machine.memory_bytes,
        cpus: machine.cpus,
        platform: machine.platform(),
        chooses_platform: true,
        chooses_firmware: true,
        host_name: machine.identity.host_name.clone(),
        user_data: machine.identity.user_data.clone(),
    }
}

/// Fails if this host cannot run a machine that the controller wants to move here from another host.
pub(crate) async fn check_assigned(service: &Service, machine: &AssignedMachine) -> Result<(), Failure> {
    check(service, &plan_of(machine)).await
}

/// Retains the version to boot, and stores the machine's record.
async fn create(service: &Service, caller: &Caller, plan: Plan) -> Result<MachineRecord, Failure> {
    let _using = service.using_versions().await;
    resolve_and_hold(service, &plan).await?;
    let (user_data, mac) = (plan.user_data.clone(), plan.mac.clone());
    let mut record = record(service, plan)?;
    cloud_catalogs::check_user_data(&record)?;
    let name = record.name.clone();
    let failed = |source| Error::Db { machine: name.clone(), source };
    let mut repo = service.db().write().await.map_err(failed)?;
    if repo.catalogs().by_name(&name).await.map_err(failed)?.is_some() {
        return Err(Error::IsCatalog(name).into());
    }
    if let Some(catalog) = &record.catalog
        && repo.catalogs().by_name(catalog).await.map_err(failed)?.is_none()
    {
        return Err(CatalogError::Unknown(catalog.clone()).into());
    }
    if repo.machines().by_name(&name).await.map_err(failed)?.is_some() {
        return Err(Error::Exists(name).into());
    }
    if let Some(other) = repo.machines().by_mac(&record.mac).await.map_err(failed)?
        && mac.is_some()
    {
        let (machine, mac) = (name, record.mac);
        return Err(Error::MacTaken { machine, mac, other: other.name }.into());
    }
    if let Some(address) = &record.identity.address
        && let Some(other) = repo.machines().by_ip(address.ip).await.map_err(failed)?
    {
        return Err(Error::IpTaken { machine: name, ip: address.ip, other: other.name }.into());
    }
    let mut identities = 1;
    while let Err(e) = repo.machines().add(&record).await {
        let is_made = record.boot == BootFrom::Vm;
        if !matches!(e, DbError::Taken { .. }) || identities >= IDENTITIES_MAX || !is_made {
            return Err(failed(e).into());
        }
        give_another_identity(service, &mut record, mac.as_deref(), user_data.as_deref())?;
        identities += 1;
    }
    let detail = format!("{}, {}", record.uuid, record.image);
    let event = service.event(caller, format!("machine {name}"), "created", detail);
    repo.events().append(event).await.map_err(failed)?;
    repo.save().await.map_err(failed)?;
    tracing::info!(machine = %name, image = %record.image, caller = %caller.principal, "created");
    Ok(record)
}

/// A machine to create, with all settings resolved from the request, the catalog and the defaults.
struct Plan {
    name: String,
    boot: BootFrom,
    /// The host of the machine; `None`: this host. [`IN_A_CLOUD`]: no host runs it.
    host: Option<Uuid>,
    mac: Option<String>,
    address: Option<FixedAddress>,
    image: String,
    catalog: Option<CatalogRecord>,
    cache: CacheSettings,
    transport: DiskTransport,
    memory_bytes: u64,
    cpus: u32,
    platform: Platform,
    /// Whether the request sets a field of `platform`. Only read for network boot, where none may be set.
    chooses_platform: bool,
    /// Whether the request or its catalog sets the firmware.
    chooses_firmware: bool,
    host_name: String,
    user_data: Option<String>,
}

impl Plan {
    fn is_in_cloud(&self) -> bool {
        self.host == Some(IN_A_CLOUD)
    }
}

/// Resolves the settings of a request: its own, else those of its catalog, else the defaults. Chooses the host.
async fn settle(service: &Service, request: CreateMachine) -> Result<Plan, Failure> {
    name::check_machine(&request.name).map_err(Failure)?;
    let catalog = match &request.catalog {
        Some(name) => Some(service.catalog(name).await?),
        None => None,
    };
    if let Some(catalog) = &catalog {
        cloud_catalogs::check_machine(catalog, &request)?;
    }
    let image = match (request.image, &catalog) {
        (Some(image), None) => image,
        (None, Some(catalog)) => catalog.image.clone(),
        _ => return Err(Error::ImageOrCatalog(request.name).into()),
    };
    let of = catalog.as_ref();
    let boot = request.boot.unwrap_or_default();
    let default_cache = match boot {
        BootFrom::Vm => CacheSettings::default(),
        BootFrom::Network => CacheSettings::of_target(),
    };
    let chooses_platform = request.firmware.is_some()
        || request.secure_boot.is_some()
        || request.tpm.is_some()
        || request.display.is_some()
        || request.network.is_some()
        || request.scratch_bytes.is_some();
    let default_platform = of.map(|it| it.platform.clone()).unwrap_or_default();
    let firmware = match (request.firmware, request.secure_boot) {
        (None, Some(true)) => Some(Firmware::Uefi),
        (firmware, _) => firmware,
    };
    // Machines of a pool are always on this host.
    let is_spread = of.is_some_and(|catalog| catalog.keep_ready == 0) && boot == BootFrom::Vm;
    let cache = request.cache.or(of.map(|it| it.cache)).unwrap_or(default_cache);
    let memory_bytes = request
        .memory_bytes
        .or(of.map(|it| it.memory_bytes))
        .unwrap_or(CreateMachine::default_memory_bytes());
    let need_bytes = is_spread.then(|| memory_bytes.saturating_add(cache.ram_bytes));
    let host = match of.and_then(|catalog| catalog.cloud.as_ref()) {
        Some(_) => Some(IN_A_CLOUD),
        None => choose_host(service, &request.name, request.host.as_deref(), boot, need_bytes).await?,
    };
    let plan = Plan {
        boot,
        host,
        mac: request.mac.as_deref().map(name::check_mac).transpose().map_err(Failure)?,
        address: request.address,
        image,
        cache,
        transport: request.transport.or(of.map(|it| it.transport)).unwrap_or_default(),
        memory_bytes,
        cpus: request.cpus.or(of.map(|it| it.cpus)).unwrap_or(CreateMachine::default_cpus()),
        platform: Platform {
            firmware: firmware.unwrap_or(default_platform.firmware),
            secure_boot: request.secure_boot.unwrap_or(default_platform.secure_boot),
            tpm: request.tpm.unwrap_or(default_platform.tpm),
            display: request.display.unwrap_or(default_platform.display),
            network: request.network.unwrap_or(default_platform.network),
            scratch_bytes: request.scratch_bytes.unwrap_or(default_platform.scratch_bytes),
        },
        chooses_platform,
        chooses_firmware: firmware.is_some() || catalog.is_some(),
        host_name: request.host_name.unwrap_or_else(|| request.name.clone()),
        user_data: request.user_data.or_else(|| of.and_then(|it| it.user_data.clone())),
        name: request.name,
        catalog,
    };
    check_network_boot(&plan)?;
    check_address(&plan)?;
    Ok(plan)
}

/// Chooses the host of a new machine: `named`; or, with `need_bytes`, one with that much free memory; or this one. Returns
/// `None` for this host.
async fn choose_host(
    service: &Service,
    machine: &str,
    named: Option<&str>,
    boot: BootFrom,
    need_bytes: Option<u64>,
) -> Result<Option<Uuid>, Failure> {
    let refused = |host: &str, why| Error::Host { machine: machine.to_owned(), host: host.to_owned(), why };
    let hosts = service.db().read().await?.hosts().list().await?;
    let own = service.own_host();
    if boot == BootFrom::Network {
        let why = "a machine with --boot network is a physical computer and has no host; leave out --host";
        let refused = Error::NetworkBoot { machine: machine.to_owned(), why };
        return if named.is_some() { Err(refused.into()) } else { Ok(None) };
    }
    // A single host is not checked for room.
    if let (None, Some(need_bytes), true) = (named, need_bytes, hosts.len() > 1) {
        let no_room = |source| Error::NoRoom { machine: machine.to_owned(), source };
        let chosen = place(&mut service.candidates(&hosts).await?, need_bytes).map_err(no_room)?;
        return Ok((chosen != own).then_some(chosen));
    }
    let is_meant = |host: &&HostRecord| named.map_or(host.id == own, |name| host.name == name);
    let Some(host) = hosts.iter().find(is_meant) else {
        return named.map_or(Ok(None), |name| Err(refused(name, NO_SUCH_HOST).into()));
    };
    if host.cordoned {
        return Err(refused(&host.name, IS_CORDONED).into());
    }
    if host.id == own {
        return Ok(None);
    }
    if service.link(host.id).is_none() {
        return Err(refused(&host.name, IS_AWAY).into());
    }
    Ok(Some(host.id))
}

/// Fails for settings that are not possible with network boot, or only with network boot.
fn check_network_boot(plan: &Plan) -> Result<(), Error> {
    let cache = plan.cache;
    let why = match (plan.boot, &plan.mac) {
        (BootFrom::Vm, _) => return Ok(()),
        (BootFrom::Network, None) => "give --mac, the address of the network card that it boots from",
        _ if cache.mode != CacheMode::Ram => {
            "the write cache of a machine that boots from the network is in the machine's memory; give --cache ram"
        }
        _ if cache.persistent => "a write cache in memory cannot be persistent",
        _ if cache.ram_bytes < CacheSettings::MIN_RAM_BYTES => "its write cache needs 16 MiB or more",
        _ if plan.chooses_platform => {
            "firmware, TPM, display, network and disks of a machine that boots from the network are those of the computer; leave out --firmware, \
             --secure-boot, --tpm, --display, --network and --scratch"
        }
        _ if plan.user_data.is_some() => "--boot network has no user data; leave out --user-data",
        _ => return Ok(()),
    };
    Err(Error::NetworkBoot { machine: plan.name.clone(), why })
}

/// Fails for a fixed address that is not valid, and for one of a machine that is not on a bridge.
fn check_address(plan: &Plan) -> Result<(), Failure> {
    let Some(address) = &plan.address else { return Ok(()) };
    let tried = |problem: Problem| Failure(problem.during(format!("cannot create machine '{}'", plan.name)));
    address.check().map_err(tried)?;
    match plan.platform.network {
        Network::Bridge(_) => Ok(()),
        Network::User => Err(Error::NoBridge(plan.name.clone()).into()),
    }
}

/// Chooses UEFI if the image boots only with UEFI, and neither the request nor a catalog sets the firmware.
async fn choose_firmware(service: &Service, plan: &mut Plan) {
    if plan.boot == BootFrom::Network || plan.chooses_firmware {
        return;
    }
    // A missing image is an error later.
    let Ok((_, version)) = resolve(service, &plan.name, &plan.image).await else { return };
    let images = service.images();
    let refused = images.check_bootable(&version, plan.platform.firmware).await.err();
    if refused.is_some_and(|error| error.kind() == ProblemKind::Invalid)
        && images.check_bootable(&version, Firmware::Uefi).await.is_ok()
    {
        plan.platform.firmware = Firmware::Uefi;
    }
}

/// Fails if the host name is not valid, or if the machine is for this host and the host cannot run it.
async fn check(service: &Service, plan: &Plan) -> Result<(), Failure> {
    name::check_host_name(&plan.host_name)
        .map_err(|problem| Failure(problem.during(format!("cannot create machine '{}'", plan.name))))?;
    // It will not run on this host.
    if plan.boot == BootFrom::Network || plan.host.is_some() {
        return Ok(());
    }
    let run_dir = service.run_dir(&plan.name);
    let len = run_dir.as_os_str().len() + MAX_SOCKET_NAME_BYTES;
    if len > MAX_SOCKET_PATH_BYTES {
        let (machine, run_dir) = (plan.name.clone(), run_dir.display().to_string());
        return Err(Error::PathTooLong { machine, run_dir, len }.into());
    }
    let failed = |source| Error::Backend { machine: plan.name.clone(), source };
    let user_data = plan.user_data.as_deref().map(template::sample).transpose().map_err(|problem| {
        let (machine, source) = (plan.name.clone(), Box::new(problem));
        Error::Template { machine, source }
    })?;
    let vm = VmPlan {
        name: &plan.name,
        memory_bytes: plan.memory_bytes,
        cpus: plan.cpus,
        platform: &plan.platform,
        host_name: &plan.host_name,
        user_data: user_data.as_deref(),
    };
    service.hypervisor().check(vm).await.map_err(failed)?;
    service.disks().check(&plan.cache).await.map_err(failed)?;
    Ok(())
}

async fn resolve(service: &Service, machine: &str, image: &str) -> Result<(ImageRef, ImageVersion), Failure> {
    let reference = ImageRef::parse(image).map_err(Failure)?;
    let failed = |source| Error::Backend { machine: machine.to_owned(), source };
    let version = service.images().resolve(&reference).await.map_err(failed)?;
    Ok((reference, version))
}

/// Checks that the version to boot exists, and retains it. For a machine of a catalog the catalog retains it.
async fn resolve_and_hold(service: &Service, plan: &Plan) -> Result<(), Failure> {
    let (reference, version) = resolve(service, &plan.name, &plan.image).await?;
    let failed = |source| Error::Backend { machine: plan.name.clone(), source };
    // A machine that boots from the network has its own firmware, and so has a machine in a cloud.
    if plan.boot == BootFrom::Vm && !plan.is_in_cloud() {
        service.images().check_bootable(&version, plan.platform.firmware).await.map_err(failed)?;
    }
    if plan.catalog.is_none() {
        let namer = Referrer::Machine(&plan.name);
        service.retain_named(namer, ReferenceKind::Image, &reference, &version).await.map_err(failed)?;
    }
    Ok(())
}

/// Makes an identity, with a MAC address if one is given, and fills the machine's values into the user data.
fn identity(
    service: &Service,
    (machine, host_name): (&str, &str),
    catalog: Option<&str>,
    mac: Option<&str>,
    user_data: Option<&str>,
) -> Result<NewIdentity, Error> {
    let made = identity::make(service.random(), host_name, None);
    let mut new = made.map_err(|source| Error::Identity { machine: machine.to_owned(), source })?;
    if let Some(mac) = mac {
        mac.clone_into(&mut new.mac);
    }
    let uuid = new.uuid.to_string();
    let catalog = catalog.unwrap_or_default();
    let values = template::Values { name: machine, host_name, catalog, mac: &new.mac, uuid: &uuid };
    let rendered = user_data.map(|text| template::render(text, &values)).transpose();
    new.identity.user_data = rendered.map_err(|problem| {
        let (machine, source) = (machine.to_owned(), Box::new(problem));
        Error::Template { machine, source }
    })?;
    Ok(new)
}

fn give_another_identity(
    service: &Service,
    record: &mut MachineRecord,
    mac: Option<&str>,
    user_data: Option<&str>,
) -> Result<(), Error> {
    let names = (&*record.name, &*record.identity.host_name);
    let new = identity(service, names, record.catalog.as_deref(), mac, user_data)?;
    record.uuid = new.uuid;
    record.mac = new.mac;
    record.identity = Identity { address: record.identity.address.take(), ..new.identity };
    record.ssh_host_key_private = new.ssh_host_key_private;
    Ok(())
}

/// Makes the record of a planned machine, with a new identity.
fn record(service: &Service, plan: Plan) -> Result<MachineRecord, Error> {
    let catalog = plan.catalog.as_ref().map(|it| &*it.name);
    let names = (&*plan.name, &*plan.host_name);
    let new = identity(service, names, catalog, plan.mac.as_deref(), plan.user_data.as_deref())?;
    let on_host_loss = plan.catalog.as_ref().map(|it| it.on_host_loss).unwrap_or_default();
    // A machine that boots from the network takes no settings of a scheme.
    let of_scheme = plan.catalog.as_ref().filter(|_| plan.boot == BootFrom::Vm);
    let scheme = of_scheme.map(|catalog| catalog.scheme);
    let cloud = plan.catalog.as_ref().and_then(|catalog| catalog.cloud.as_ref());
    let connection = cloud.map(|cloud| cloud.connection.clone());
    let (catalog, catalog_pin) = plan.catalog.map(|it| (it.name, it.pin)).unzip();
    Ok(MachineRecord {
        uuid: new.uuid,
        name: plan.name,
        host: plan.host.unwrap_or_else(|| service.own_host()),
        connection,
        cloud: None,
        mac: new.mac,
        boot: plan.boot,
        image: plan.image,
        pin: None,
        catalog,
        catalog_pin: catalog_pin.flatten(),
        scheme,
        catalog_scheme: scheme,
        cache: plan.cache,
        transport: plan.transport,
        memory_bytes: plan.memory_bytes,
        cpus: plan.cpus,
        platform: plan.platform,
        identity: Identity { address: plan.address, ..new.identity },
        ssh_host_key_private: new.ssh_host_key_private,
        wanted: Wanted::Stopped,
        state: MachineState::Created,
        reason: None,
        version: None,
        kept: None,
        boot_ms: None,
        started_at_ms: None,
        fenced: false,
        to_start: false,
        on_host_loss,
        created_at_ms: service.now_ms(),
    })
}
