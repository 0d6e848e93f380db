//! The rows, as the service sees them.

use std::borrow::Cow;

use headwater_api::platform::Platform;
use headwater_api::{
    BootFrom, CacheSettings, DiskTransport, HostState, Hours, Identity, MachineState, OnHostLoss, ResetOn,
    Role, SchemeSettings, Scopes, TaskState, Wanted,
};
use uuid::Uuid;

/// Text that must not reach a log: its `Debug` says nothing.
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

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineRecord {
    /// Its identity for good.
    pub uuid: Uuid,
    /// Its name; unique.
    pub name: String,
    /// The host that runs it.
    pub host: Uuid,
    /// Its network address; unique.
    pub mac: String,
    /// What starts it.
    pub boot: BootFrom,
    /// The image reference as given, or that of its catalog.
    pub image: String,
    /// The version that it boots in place of that, as `IMAGE@NUMBER`.
    pub pin: Option<String>,
    /// The catalog that it belongs to.
    pub catalog: Option<String>,
    /// The version that its catalog is pinned to, as it is read; it is stored with the catalog.
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
    /// What its guest is told. In a list of machines without its user data.
    pub identity: Identity,
    /// The private half of its SSH host key, as an OpenSSH file. Unread in a list of machines.
    pub ssh_host_key_private: Secret,
    /// What it should do.
    pub wanted: Wanted,
    /// What it does.
    pub state: MachineState,
    /// Why.
    pub reason: Option<String>,
    /// The version it runs, or ran last: `debian@3 (9f2c...)`.
    pub version: Option<String>,
    /// The version below the persistent disk that a machine of another host has there, as its node said last. `None` for machines of
    /// this host: theirs are in `persistent_disks`.
    pub kept: Option<String>,
    /// How long the last boot took.
    pub boot_ms: Option<u64>,
    /// When it was started last.
    pub started_at_ms: Option<u64>,
    /// Its node ends it when the lease of the node is over. With several hosts: the node has said that it does.
    pub fenced: bool,
    /// It was moved to its host, or a move of it has failed, and it is to be started.
    pub to_start: bool,
    /// The policy of its catalog for machines whose host is lost.
    pub on_host_loss: OnHostLoss,
    /// When it was created.
    pub created_at_ms: u64,
}

impl MachineRecord {
    /// Whether another host may start it when its own host is lost: nothing of it is kept there.
    pub fn may_restart_elsewhere(&self) -> bool {
        self.on_host_loss == OnHostLoss::Restart && self.boot == BootFrom::Vm && !self.cache.persistent
    }

    /// Whether it is wanted. A machine that was moved may be still to be started, and then its new node does not say so.
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
    /// The version that its machines boot in place of that, as `IMAGE@NUMBER`.
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
    /// The names of machines that it makes: `#` signs stand for the digits of a number.
    pub name_rule: String,
    /// The number of the first of them.
    pub first_number: u32,
    /// How many of its machines are kept on, fresh and unclaimed.
    pub keep_ready: u32,
    /// The hours in which so many are kept on. `None`: always.
    pub ready_hours: Option<Hours>,
    /// After how many seconds a free machine that is not to be ready is switched off; 0: never.
    pub stop_idle_s: u64,
    /// Paths that a seal also removes in their guests. None has a line break.
    pub seal_removes: Vec<String>,
    /// The policy for machines whose host is lost.
    pub on_host_loss: OnHostLoss,
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
    /// So many.
    pub keep_ready: u32,
    /// The hours in which they are. `None`: always.
    pub ready_hours: Option<Hours>,
    /// After how many seconds a free machine that is not to be ready is switched off; 0: never.
    pub stop_idle_s: u64,
}

/// A computer that runs machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRecord {
    /// Its identity for good.
    pub id: Uuid,
    /// Its name; unique.
    pub name: String,
    /// The fingerprint of the certificate that its node connects with; unique. `None`: it is the host of the daemon that owns the
    /// database.
    pub fingerprint: Option<String>,
    /// Whether its node is connected.
    pub state: HostState,
    /// New machines go to other hosts.
    pub cordoned: bool,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
    /// The number of its newest connection. A node refuses what comes with an older one.
    pub generation: u64,
    /// The number of the newest event of its node that is in the history here; -1 before its first connection.
    pub seen_event: i64,
    /// The longest lease that its node may have.
    pub lease_ms: u64,
    /// When it joined.
    pub joined_at_ms: u64,
    /// When its node was connected last.
    pub seen_at_ms: Option<u64>,
}

/// A token with which a node joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinTokenRecord {
    /// The hash of its secret, in hexadecimal digits; unique.
    pub hash: String,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at_ms: u64,
    /// When it ends.
    pub expires_at_ms: u64,
    /// The host that joined with it.
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

/// What a disk is kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// It is the disk of a machine with a persistent write cache.
    Persistent,
    /// A machine edits an image with it.
    MaintenanceSession,
}

impl Purpose {
    /// As stored.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Persistent => "persistent",
            Self::MaintenanceSession => "edit",
        }
    }

    /// Reads what [`Purpose::name`] gave.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Persistent, Self::MaintenanceSession].into_iter().find(|purpose| purpose.name() == text)
    }
}

/// A disk that outlives the runs of its machine: a persistent write cache over one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistentDisk {
    /// Its identity: it names its files and its key.
    pub id: Uuid,
    /// Whose it is.
    pub machine: Uuid,
    /// What for.
    pub purpose: Purpose,
    /// The image below.
    pub image: String,
    /// The number of its version.
    pub version: u64,
    /// The hash of that version's manifest.
    pub hash: String,
    /// Who began it.
    pub author: String,
    /// When.
    pub created_at_ms: u64,
    /// A machine had it open: from then on its files are there, or lost.
    pub is_begun: bool,
}

impl PersistentDisk {
    /// The version below, as `IMAGE@NUMBER`.
    pub fn below(&self) -> String {
        format!("{}@{}", self.image, self.version)
    }
}

/// An event to append; the database numbers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// When.
    pub at_ms: u64,
    /// Who.
    pub caller: String,
    /// On what.
    pub subject: String,
    /// What happened.
    pub action: Cow<'static, str>,
    /// In words.
    pub detail: String,
}

/// A machine that is lent to somebody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRecord {
    /// Its identity.
    pub id: Uuid,
    /// The machine; it has one claim at most.
    pub machine: Uuid,
    /// Who has it.
    pub holder: String,
    /// The key of the request, after the name of its catalog and a `/`; unique.
    pub key: Option<String>,
    /// Who asked for it.
    pub claimed_by: String,
    /// When.
    pub created_at_ms: u64,
    /// When it ends.
    pub expires_at_ms: Option<u64>,
    /// What of the guest ends it.
    pub reset_on: ResetOn,
    /// Why it has ended.
    pub ended: Option<String>,
}

/// A named token of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRecord {
    /// Its name; unique.
    pub name: String,
    /// The hash of its secret, in hexadecimal digits; unique.
    pub hash: String,
    /// The role of its holder.
    pub role: Role,
    /// The catalogs and images that the role is for. `None`: all, and the daemon itself.
    pub scopes: Option<Scopes>,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at_ms: u64,
    /// When it ends; `None` if only a revocation ends it.
    pub expires_at_ms: Option<u64>,
}

/// A session of the web console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// The hash of its secret, in hexadecimal digits; unique.
    pub hash: String,
    /// Who opened it.
    pub principal: String,
    /// The role of its holder.
    pub role: Role,
    /// When it was opened.
    pub created_at_ms: u64,
    /// When it was used last, to about a minute.
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

/// A task to add; the database numbers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTask {
    /// What it does: `import`, `roll`.
    pub kind: &'static str,
    /// On what: `image debian`, `catalog class`.
    pub subject: String,
    /// Who asked for it.
    pub caller: String,
    /// What it needs to go on after a restart, as JSON. Without it, a restart ends it.
    pub plan: Option<String>,
    /// When.
    pub created_at_ms: u64,
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskRecord {
    /// Its number; later tasks have higher ones.
    pub id: i64,
    /// What it does.
    pub kind: String,
    /// On what.
    pub subject: String,
    /// Who asked for it.
    pub caller: String,
    /// How far it is.
    pub state: TaskState,
    /// Somebody asked for its end.
    pub cancelling: bool,
    /// What it needs to go on after a restart, as JSON.
    pub plan: Option<String>,
    /// A [`headwater_api::TaskProgress`], as JSON.
    pub progress: Option<String>,
    /// A result, or a problem, as JSON.
    pub outcome: Option<String>,
    /// When it was asked for.
    pub created_at_ms: u64,
    /// When it began.
    pub started_at_ms: Option<u64>,
    /// When it ended. It does not change after that.
    pub ended_at_ms: Option<u64>,
}
