//! The records of all tables.

use std::borrow::Cow;

use headwater_api::platform::Platform;
use headwater_api::{
    BootFrom, CacheSettings, Change, CloudMachine, CloudScheme, Connection, DiskTransport, HostState, Hours,
    Identity, MachineState, OnHostLoss, ResetOn, Role, SchemeSettings, Scopes, TaskState, Wanted,
};
use uuid::Uuid;

/// Text that must not appear in a log: its `Debug` output hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Option<String>);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: String) -> Self {
        Self(Some(text))
    }

    /// A secret that was left in the database.
    pub const fn unread() -> Self {
        Self(None)
    }

    /// The secret, unless it was left in the database.
    pub fn read(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// The secret; empty if it was left in the database.
    pub fn reveal(&self) -> &str {
        self.read().unwrap_or_default()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The host of machines that no host runs, because they are in a cloud: no host has this identity.
pub const IN_A_CLOUD: Uuid = Uuid::nil();

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineRecord {
    /// Its permanent identity.
    pub uuid: Uuid,
    /// Its name; unique.
    pub name: String,
    /// The host that runs it; [`IN_A_CLOUD`] for a machine in a cloud.
    pub host: Uuid,
    /// The connection of the cloud that it is in. `None`: a host runs it.
    pub connection: Option<String>,
    /// The machine in the cloud, if it exists there.
    pub cloud: Option<CloudMachine>,
    /// Its MAC address; unique.
    pub mac: String,
    /// What starts it.
    pub boot: BootFrom,
    /// The image reference as given, or that of its catalog.
    pub image: String,
    /// The version that it boots instead of `image`, as `IMAGE@NUMBER`.
    pub pin: Option<String>,
    /// The catalog that it belongs to.
    pub catalog: Option<String>,
    /// The version to which its catalog is pinned. Read only; it is stored with the catalog.
    pub catalog_pin: Option<String>,
    /// The version of its catalog's scheme whose settings it has.
    pub scheme: Option<u32>,
    /// The newest version of that, as it is read; it is stored with the catalog.
    pub catalog_scheme: Option<u32>,
    /// Its write cache.
    pub cache: CacheSettings,
    /// How it reaches its disk.
    pub transport: DiskTransport,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// Its firmware, TPM, display, network and scratch disk.
    pub platform: Platform,
    /// The identity for its guest. Lists of machines do not contain its user data.
    pub identity: Identity,
    /// The private half of its SSH host key, as an OpenSSH file. Unread in a list of machines.
    pub ssh_host_key_private: Secret,
    /// The wanted state.
    pub wanted: Wanted,
    /// The present state.
    pub state: MachineState,
    /// Why it is in this state.
    pub reason: Option<String>,
    /// The version it runs, or ran last: `debian@3 (9f2c...)`.
    pub version: Option<String>,
    /// The version below the persistent disk of a machine of another host, as its node last reported it. `None` for
    /// machines of this host, whose disks are in `persistent_disks`.
    pub kept: Option<String>,
    /// How long the last boot took.
    pub boot_ms: Option<u64>,
    /// When it was started last.
    pub started_at_ms: Option<u64>,
    /// Whether its node ends it when the node's lease is over. On the controller: whether the node has confirmed that.
    pub fenced: bool,
    /// Whether it must be started because it was moved to its host, or its move has failed.
    pub to_start: bool,
    /// The policy of its catalog for machines whose host is lost.
    pub on_host_loss: OnHostLoss,
    /// When it was created.
    pub created_at_ms: u64,
}

impl MachineRecord {
    /// Whether another host may start it when its own host is lost, which needs a disk that is not persistent.
    pub fn may_restart_elsewhere(&self) -> bool {
        self.on_host_loss == OnHostLoss::Restart && self.boot == BootFrom::Vm && !self.cache.persistent
    }

    /// Whether it should be on. A machine that was moved may still have to be started, which its new node does not know.
    pub fn is_to_be_on(&self) -> bool {
        self.wanted == Wanted::Running || self.to_start
    }

    /// Whether its settings are those of an older version of the scheme of its catalog.
    pub fn has_old_scheme(&self) -> bool {
        matches!((self.scheme, self.catalog_scheme), (Some(own), Some(newest)) if own < newest)
    }

    /// Its settings, as a scheme has them.
    pub fn settings(&self) -> SchemeSettings {
        let Self { cache, memory_bytes, cpus, transport, .. } = *self;
        SchemeSettings::new(cache, memory_bytes, cpus, transport)
            .on(&self.platform)
            .with_user_data(self.identity.user_data.clone())
    }

    /// Gives it the settings of a version of the scheme of its catalog.
    pub fn take_settings(&mut self, settings: SchemeSettings, version: Option<u32>) {
        self.platform = settings.platform();
        let SchemeSettings { cache, memory_bytes, cpus, transport, user_data, .. } = settings;
        (self.cache, self.memory_bytes, self.cpus, self.transport) = (cache, memory_bytes, cpus, transport);
        self.identity.user_data = user_data;
        self.scheme = version;
    }

    /// What it boots: its pin, else that of its catalog, else its image.
    pub fn reference(&self) -> &str {
        self.pin().unwrap_or(&self.image)
    }

    /// Its pin, else that of its catalog.
    pub fn pin(&self) -> Option<&str> {
        self.pin.as_deref().or(self.catalog_pin.as_deref())
    }
}

/// A catalog: what its machines boot, and how they are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogRecord {
    /// Its name; unique.
    pub name: String,
    /// The image reference as given.
    pub image: String,
    /// The version that its machines boot instead of `image`, as `IMAGE@NUMBER`.
    pub pin: Option<String>,
    /// The number of the newest version of its scheme, whose settings follow.
    pub scheme: u32,
    /// The write cache of its machines.
    pub cache: CacheSettings,
    /// How they reach their disks.
    pub transport: DiskTransport,
    /// Their guests' memory.
    pub memory_bytes: u64,
    /// Their guests' processors.
    pub cpus: u32,
    /// Their firmware, TPM, display, network and scratch disk.
    pub platform: Platform,
    /// Their cloud-init user data.
    pub user_data: Option<String>,
    /// The pattern for names of machines that `scale` creates: `#` signs stand for the digits of a number.
    pub name_rule: String,
    /// The number of the first of them.
    pub first_number: u32,
    /// How many machines are kept on, freshly booted and unclaimed.
    pub keep_ready: u32,
    /// The hours in which they are kept on. `None`: always.
    pub ready_hours: Option<Hours>,
    /// After how many seconds a surplus machine is switched off; 0: never.
    pub stop_idle_s: u64,
    /// Paths that a seal also removes in their guests. No path contains a line break.
    pub seal_removes: Vec<String>,
    /// The policy for machines whose host is lost.
    pub on_host_loss: OnHostLoss,
    /// How its machines are created in a cloud. `None`: they run on hosts.
    pub cloud: Option<CloudScheme>,
    /// When it was created.
    pub created_at_ms: u64,
}

impl CatalogRecord {
    /// The settings of the newest version of its scheme.
    pub fn settings(&self) -> SchemeSettings {
        let Self { cache, memory_bytes, cpus, transport, .. } = *self;
        SchemeSettings::new(cache, memory_bytes, cpus, transport)
            .on(&self.platform)
            .with_user_data(self.user_data.clone())
    }

    /// Gives it the settings of another version of its scheme.
    pub fn take_settings(&mut self, settings: SchemeSettings, version: u32) {
        self.platform = settings.platform();
        let SchemeSettings { cache, memory_bytes, cpus, transport, user_data, .. } = settings;
        (self.cache, self.memory_bytes, self.cpus, self.transport) = (cache, memory_bytes, cpus, transport);
        self.user_data = user_data;
        self.scheme = version;
    }
}

/// A version of the scheme of a catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemeRecord {
    /// The catalog.
    pub catalog: String,
    /// Its number.
    pub version: u32,
    /// Its settings.
    pub settings: SchemeSettings,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at_ms: u64,
}

/// How many machines of a catalog are kept ready, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRecord {
    /// The catalog.
    pub catalog: String,
    /// The number of ready machines.
    pub keep_ready: u32,
    /// The hours in which they are kept ready. `None`: always.
    pub ready_hours: Option<Hours>,
    /// After how many seconds a surplus machine is switched off; 0: never.
    pub stop_idle_s: u64,
}

/// A computer that runs machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRecord {
    /// Its permanent identity.
    pub id: Uuid,
    /// Its name; unique.
    pub name: String,
    /// The fingerprint of its node's certificate; unique. `None`: the host of the daemon that owns the
    /// database.
    pub fingerprint: Option<String>,
    /// Whether its node is connected.
    pub state: HostState,
    /// Whether new machines are placed on other hosts.
    pub cordoned: bool,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
    /// The number (generation) of its newest connection. A node refuses requests of an older connection.
    pub generation: u64,
    /// The number of the newest event of its node that was copied to this history; -1 before its first connection.
    pub seen_event: i64,
    /// The longest lease that any controller may have given to its node.
    pub lease_ms: u64,
    /// When it joined.
    pub joined_at_ms: u64,
    /// When its node was last connected.
    pub seen_at_ms: Option<u64>,
}

/// A token with which one node joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinTokenRecord {
    /// The hash of its secret, in hexadecimal digits; unique.
    pub hash: String,
    /// The caller that created it.
    pub created_by: String,
    /// When it was created.
    pub created_at_ms: u64,
    /// When it expires.
    pub expires_at_ms: u64,
    /// The name of the host that joined with it.
    pub used_by: Option<String>,
}

/// The authority that signs the certificates of nodes.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthorityRecord {
    /// Its private key, in PEM.
    pub key: String,
    /// Its certificate, in PEM.
    pub certificate: String,
}

impl std::fmt::Debug for AuthorityRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthorityRecord").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The purpose of a persistent disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The disk of a machine with a persistent write cache.
    Persistent,
    /// The private disk of a maintenance session.
    MaintenanceSession,
}

impl Purpose {
    /// The name in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Persistent => "persistent",
            Self::MaintenanceSession => "edit",
        }
    }

    /// Parses the output of [`Purpose::name`].
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Persistent, Self::MaintenanceSession].into_iter().find(|purpose| purpose.name() == text)
    }
}

/// A persistent disk: a write cache over one version that survives the runs of its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistentDisk {
    /// Its identity, which names its files and its key.
    pub id: Uuid,
    /// The machine to which it belongs.
    pub machine: Uuid,
    /// Its purpose.
    pub purpose: Purpose,
    /// The image of the version below.
    pub image: String,
    /// The number of the version below.
    pub version: u64,
    /// The hash of that version's manifest.
    pub hash: String,
    /// The caller that created it.
    pub author: String,
    /// When it was created.
    pub created_at_ms: u64,
    /// Whether a machine had it open: from then on missing files mean that it is lost.
    pub is_begun: bool,
}

impl PersistentDisk {
    /// The version below, as `IMAGE@NUMBER`.
    pub fn below(&self) -> String {
        format!("{}@{}", self.image, self.version)
    }
}

/// An event to append. The database assigns its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// When it happened.
    pub at_ms: u64,
    /// Who caused it.
    pub caller: String,
    /// Its subject.
    pub subject: String,
    /// Its action.
    pub action: Cow<'static, str>,
    /// A sentence that describes it.
    pub detail: String,
    /// What it changed, if it is a change of settings.
    pub change: Option<Change>,
}

impl NewEvent {
    /// The same event, with what it changed.
    #[must_use]
    pub fn changing(self, change: Option<Change>) -> Self {
        Self { change, ..self }
    }
}

/// A claim: a machine that is lent to a holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRecord {
    /// Its identity.
    pub id: Uuid,
    /// The machine; it has one claim at most.
    pub machine: Uuid,
    /// The holder.
    pub holder: String,
    /// The key of the request, after the name of its catalog and a `/`; unique.
    pub key: Option<String>,
    /// The caller that requested it.
    pub claimed_by: String,
    /// When it was created.
    pub created_at_ms: u64,
    /// When it expires.
    pub expires_at_ms: Option<u64>,
    /// The event in the guest that ends it.
    pub reset_on: ResetOn,
    /// Why it has ended.
    pub ended: Option<String>,
}

/// A named token of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRecord {
    /// Its name; unique.
    pub name: String,
    /// The hash of its secret, in hexadecimal digits, or the fingerprint of its client certificate, which begins with
    /// `sha256:`; unique.
    pub hash: String,
    /// Its role.
    pub role: Role,
    /// The catalogs and images to which the role is limited. `None`: no limit.
    pub scopes: Option<Scopes>,
    /// The caller that created it.
    pub created_by: String,
    /// When it was created.
    pub created_at_ms: u64,
    /// When it expires; `None`: it is valid until it is revoked.
    pub expires_at_ms: Option<u64>,
}

/// A session of the web console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// The hash of its secret, in hexadecimal digits; unique.
    pub hash: String,
    /// The caller that opened it.
    pub principal: String,
    /// Its role.
    pub role: Role,
    /// When it was opened.
    pub created_at_ms: u64,
    /// When it was last used, to about a minute.
    pub used_at_ms: u64,
}

/// What the write cache of a machine of a catalog took, from a start to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRecord {
    /// The catalog.
    pub catalog: String,
    /// The machine's name.
    pub machine: String,
    /// When the machine was on.
    pub began_at_ms: u64,
    /// When its disk was closed.
    pub ended_at_ms: u64,
    /// Bytes that the machine wrote.
    pub written_bytes: u64,
    /// Of which moved to the overflow disk.
    pub spilled_bytes: u64,
    /// The most bytes that lived in the write cache at one time.
    pub live_peak_bytes: u64,
    /// The most RAM that it took.
    pub ram_peak_bytes: u64,
    /// The most overflow disk that it took.
    pub disk_peak_bytes: u64,
    /// Whether writes waited for space: then the peaks may be less than what the machine needed.
    pub is_limited: bool,
}

/// A connection to a cloud.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionRecord {
    /// All except its secret. Its name is unique.
    pub connection: Connection,
    /// The owner of all resources that are made with it, as in their tags. It stays, whichever controller uses the database.
    pub owner: String,
    /// Its client secret, if it has one. Unread in a list.
    pub secret: Option<Secret>,
}

/// A request to a cloud that was begun and whose end is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloudOperation {
    /// The connection.
    pub connection: String,
    /// The work that sends it. A path occurs once in a scope.
    pub scope: String,
    /// The path of the resource.
    pub path: String,
    /// The request: a word of the sender.
    pub verb: String,
    /// The API version.
    pub api_version: String,
    /// The hash of the request body.
    pub body_hash: String,
    /// The URL of the operation that the cloud has begun.
    pub operation: Option<String>,
}

/// A task to add; the database numbers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTask {
    /// The operation: `import`, `roll`.
    pub kind: &'static str,
    /// The subject: `image debian`, `catalog class`.
    pub subject: String,
    /// The caller that requested it.
    pub caller: String,
    /// The plan with which it continues after a restart, as JSON. Without a plan, a restart ends the task.
    pub plan: Option<String>,
    /// When it was requested.
    pub created_at_ms: u64,
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskRecord {
    /// Its number; later tasks have higher ones.
    pub id: i64,
    /// The operation.
    pub kind: String,
    /// The subject.
    pub subject: String,
    /// The caller that requested it.
    pub caller: String,
    /// Its state.
    pub state: TaskState,
    /// Whether its cancellation was requested.
    pub cancelling: bool,
    /// The plan with which it continues after a restart, as JSON.
    pub plan: Option<String>,
    /// A [`headwater_api::TaskProgress`], as JSON.
    pub progress: Option<String>,
    /// The result or the problem, as JSON.
    pub outcome: Option<String>,
    /// When it was requested.
    pub created_at_ms: u64,
    /// When it began.
    pub started_at_ms: Option<u64>,
    /// When it ended. The record does not change after that.
    pub ended_at_ms: Option<u64>,
}
