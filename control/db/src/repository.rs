//! The traits of a database and its tables.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use async_trait::async_trait;
use headwater_api::{Event, Filter, MachineSort, OnHostLoss, Position, PublishedImage};
use uuid::Uuid;

use crate::error::DbError;
use crate::record::{
    AuthorityRecord, CatalogRecord, ClaimRecord, CloudOperation, ConnectionRecord, HostRecord,
    JoinTokenRecord, MachineRecord, NewEvent, NewTask, PersistentDisk, PoolRecord, RunRecord, SchemeRecord,
    Secret, SessionRecord, TaskRecord, TokenRecord,
};

/// A database.
#[async_trait]
pub trait Database: Send + Sync + 'static {
    /// Begins a read transaction, which sees one state of the database until it is dropped.
    async fn read(&self) -> Result<Box<dyn Repository>, DbError>;

    /// Begins a write transaction. Waits for other writers, so that what it reads stays true until it saves.
    async fn write(&self) -> Result<Box<dyn Repository>, DbError>;

    /// A number that grows with each unit of work that is saved here. While it is the same, nothing has changed, except by
    /// other programs.
    fn revision(&self) -> u64;

    /// Closes every connection; later calls fail.
    async fn close(&self);
}

/// A unit of work. If it is dropped without [`Repository::save`], nothing is changed.
#[async_trait]
pub trait Repository: Send {
    /// The machines.
    fn machines(&mut self) -> Box<dyn MachineRepository + '_>;

    /// The hosts.
    fn hosts(&mut self) -> Box<dyn HostRepository + '_>;

    /// The catalogs.
    fn catalogs(&mut self) -> Box<dyn CatalogRepository + '_>;

    /// The persistent disks.
    fn persistent_disks(&mut self) -> Box<dyn PersistentDiskRepository + '_>;

    /// The age of machines' SSH host keys.
    fn keys(&mut self) -> Box<dyn KeyRepository + '_>;

    /// The personality strings.
    fn personality(&mut self) -> Box<dyn PersonalityRepository + '_>;

    /// The claims.
    fn claims(&mut self) -> Box<dyn ClaimRepository + '_>;

    /// The named tokens of the API.
    fn tokens(&mut self) -> Box<dyn TokenRepository + '_>;

    /// The sessions of the web console.
    fn sessions(&mut self) -> Box<dyn SessionRepository + '_>;

    /// The connections to clouds, and what is there.
    fn clouds(&mut self) -> Box<dyn CloudRepository + '_>;

    /// What write caches took.
    fn runs(&mut self) -> Box<dyn RunRepository + '_>;

    /// The tasks.
    fn tasks(&mut self) -> Box<dyn TaskRepository + '_>;

    /// The history.
    fn events(&mut self) -> Box<dyn EventRepository + '_>;

    /// Makes all changes durable and visible, together.
    async fn save(self: Box<Self>) -> Result<(), DbError>;
}

/// Machines, by name or UUID.
#[async_trait]
pub trait MachineRepository: Send {
    /// Adds a machine. Its name, MAC and UUID must be new.
    async fn add(&mut self, machine: &MachineRecord) -> Result<(), DbError>;

    /// The machine of that name.
    async fn by_name(&mut self, name: &str) -> Result<Option<MachineRecord>, DbError>;

    /// The machine of that UUID.
    async fn by_uuid(&mut self, uuid: Uuid) -> Result<Option<MachineRecord>, DbError>;

    /// The machine with this network address, in lower case with colons.
    async fn by_mac(&mut self, mac: &str) -> Result<Option<MachineRecord>, DbError>;

    /// The machine with this fixed IP address.
    async fn by_ip(&mut self, ip: Ipv4Addr) -> Result<Option<MachineRecord>, DbError>;

    /// All machines, in natural order of names (`pc-2` before `pc-10`), without their user data, which may be large.
    async fn list(&mut self) -> Result<Vec<MachineRecord>, DbError>;

    /// At most `limit` machines that match the stored terms of a filter, in an order that is not live, after a position
    /// in that order. Without their user data.
    async fn page(
        &mut self,
        filter: &Filter,
        sort: MachineSort,
        after: Option<&Position>,
        limit: u32,
    ) -> Result<Vec<MachineRecord>, DbError>;

    /// The machines of a catalog, in natural order of names, without their user data.
    async fn of_catalog(&mut self, catalog: &str) -> Result<Vec<MachineRecord>, DbError>;

    /// The machines of a host, in natural order of names, without their user data.
    async fn of_host(&mut self, host: Uuid) -> Result<Vec<MachineRecord>, DbError>;

    /// The machines in clouds, in natural order of names, without their user data. No other list by host has them.
    async fn of_clouds(&mut self) -> Result<Vec<MachineRecord>, DbError>;

    /// How many machines match the stored terms of a filter.
    async fn count(&mut self, filter: &Filter) -> Result<u64, DbError>;

    /// Stores the state of a machine: wanted, state, reason, version, boot time, start time, and what it is in the cloud.
    /// Returns whether the machine exists.
    async fn update_state(&mut self, machine: &MachineRecord) -> Result<bool, DbError>;

    /// Stores the host of a machine that is moved, with its wanted and present state, reason, whether it must be
    /// started, and whether it is fenced. It has no persistent disk on the new host. Returns whether the machine
    /// exists.
    async fn set_host(&mut self, machine: &MachineRecord) -> Result<bool, DbError>;

    /// The machines that were moved and must be started, in natural order of names, without their user data.
    async fn to_start(&mut self) -> Result<Vec<MachineRecord>, DbError>;

    /// Records that a machine that was moved was started. Returns whether the machine exists.
    async fn is_started(&mut self, uuid: Uuid) -> Result<bool, DbError>;

    /// Stores whether the node of a machine ends it when the node's lease is over. Returns whether the machine exists.
    async fn set_fenced(&mut self, uuid: Uuid, fenced: bool) -> Result<bool, DbError>;

    /// Sets or removes a machine's pin. Returns whether the machine exists.
    async fn set_pin(&mut self, uuid: Uuid, pin: Option<&str>) -> Result<bool, DbError>;

    /// Stores a machine's SSH host key, both halves. Returns whether the machine exists.
    async fn set_host_key(&mut self, machine: &MachineRecord) -> Result<bool, DbError>;

    /// Stores the settings of another version of its catalog's scheme, with its user data. Returns whether the machine exists.
    async fn set_scheme(&mut self, machine: &MachineRecord) -> Result<bool, DbError>;

    /// Stores new limits and weight of its write cache, memory and processors. Returns whether the machine exists.
    async fn set_limits(&mut self, machine: &MachineRecord) -> Result<bool, DbError>;

    /// Removes a machine that has no persistent disks. Returns whether it existed.
    async fn remove(&mut self, uuid: Uuid) -> Result<bool, DbError>;
}

/// Hosts, and the tokens with which they join.
#[async_trait]
pub trait HostRepository: Send {
    /// Adds a host; `Taken` if its name, id or certificate belongs to another one.
    async fn add(&mut self, host: &HostRecord) -> Result<(), DbError>;

    /// The host with this identity.
    async fn by_id(&mut self, id: Uuid) -> Result<Option<HostRecord>, DbError>;

    /// All hosts, in natural order of names.
    async fn list(&mut self) -> Result<Vec<HostRecord>, DbError>;

    /// Stores everything except its identity, name, certificate and when it joined. Returns whether the host exists.
    async fn update(&mut self, host: &HostRecord) -> Result<bool, DbError>;

    /// Removes a host without machines. Returns whether it existed.
    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError>;

    /// Stores the image and the pin of a machine. Returns whether the machine exists.
    async fn set_boot(&mut self, machine: Uuid, image: &str, pin: Option<&str>) -> Result<bool, DbError>;

    /// The authority that signs the certificates of nodes.
    async fn authority(&mut self) -> Result<Option<AuthorityRecord>, DbError>;

    /// Adds the authority. There must be none.
    async fn add_authority(&mut self, authority: &AuthorityRecord) -> Result<(), DbError>;

    /// Adds a token, and removes those that expired before `ended_ms`.
    async fn add_token(&mut self, token: &JoinTokenRecord, ended_ms: u64) -> Result<(), DbError>;

    /// The token whose secret has this hash.
    async fn token(&mut self, hash: &str) -> Result<Option<JoinTokenRecord>, DbError>;

    /// Records the host that joined with a token.
    async fn use_token(&mut self, hash: &str, host: &str) -> Result<(), DbError>;
}

/// Catalogs, by name. The machines of a catalog are stored with the machines.
#[async_trait]
pub trait CatalogRepository: Send {
    /// Adds a catalog. Its name must be new.
    async fn add(&mut self, catalog: &CatalogRecord) -> Result<(), DbError>;

    /// The catalog of that name.
    async fn by_name(&mut self, name: &str) -> Result<Option<CatalogRecord>, DbError>;

    /// All catalogs, ordered by name.
    async fn list(&mut self) -> Result<Vec<CatalogRecord>, DbError>;

    /// Adds the newest version of a scheme, and has the catalog have its settings. Removes versions that exceed
    /// [`headwater_api::scheme::KEPT_SCHEMES`] and that no machine has. Returns whether the catalog exists.
    async fn add_scheme(&mut self, scheme: &SchemeRecord) -> Result<bool, DbError>;

    /// The versions of a catalog's scheme, newest first.
    async fn schemes(&mut self, catalog: &str) -> Result<Vec<SchemeRecord>, DbError>;

    /// Sets what its machines boot. Returns whether the catalog exists.
    async fn set_image(&mut self, name: &str, image: &str) -> Result<bool, DbError>;

    /// Sets the files that a seal also removes in its guests. Returns whether the catalog exists.
    async fn set_seal_removes(&mut self, name: &str, paths: &[String]) -> Result<bool, DbError>;

    /// Sets the policy for its machines whose host is lost. Returns whether the catalog exists.
    async fn set_on_host_loss(&mut self, name: &str, on_host_loss: OnHostLoss) -> Result<bool, DbError>;

    /// Sets or removes its pin. Returns whether the catalog exists.
    async fn set_pin(&mut self, name: &str, pin: Option<&str>) -> Result<bool, DbError>;

    /// The catalogs that keep machines ready, or switch off surplus machines, ordered by name.
    async fn pools(&mut self) -> Result<Vec<PoolRecord>, DbError>;

    /// Sets the number of ready machines, and their hours. Returns whether the catalog exists.
    async fn set_pool(&mut self, pool: &PoolRecord) -> Result<bool, DbError>;

    /// Removes a catalog without machines. Returns whether it existed.
    async fn remove(&mut self, name: &str) -> Result<bool, DbError>;
}

/// Persistent disks: a machine has at most one for each purpose, and an image at most one maintenance session.
#[async_trait]
pub trait PersistentDiskRepository: Send {
    /// Adds a disk; `Taken` if there is one already.
    async fn add(&mut self, disk: &PersistentDisk) -> Result<(), DbError>;

    /// The disks of a machine.
    async fn of_machine(&mut self, machine: Uuid) -> Result<Vec<PersistentDisk>, DbError>;

    /// The disk of an image's maintenance session.
    async fn session_of(&mut self, image: &str) -> Result<Option<PersistentDisk>, DbError>;

    /// All disks, oldest first.
    async fn list(&mut self) -> Result<Vec<PersistentDisk>, DbError>;

    /// Records that a machine had a disk open, so its files exist.
    async fn begun(&mut self, id: Uuid) -> Result<(), DbError>;

    /// Removes a disk. Returns whether it existed.
    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError>;
}

/// The age of machines' SSH host keys.
#[async_trait]
pub trait KeyRepository: Send {
    /// Sets after how many seconds machines of a catalog get another key at a boot; 0: never. The catalog must exist.
    async fn set_rotate_after(&mut self, catalog: &str, after_s: u64) -> Result<(), DbError>;

    /// The catalogs whose machines get other keys, by name, and after how many seconds.
    async fn rotate_after(&mut self) -> Result<Vec<(String, u64)>, DbError>;

    /// Notes when the key of a machine was made. The machine must exist.
    async fn set_made_at(&mut self, machine: Uuid, made_at_ms: u64) -> Result<(), DbError>;

    /// When the key of a machine was made. `None`: when the machine was created.
    async fn made_at(&mut self, machine: Uuid) -> Result<Option<u64>, DbError>;
}

/// Personality strings, by name. They go with their machine or catalog.
#[async_trait]
pub trait PersonalityRepository: Send {
    /// Those of a machine, without those of its catalog.
    async fn of_machine(&mut self, machine: Uuid) -> Result<BTreeMap<String, String>, DbError>;

    /// Those of a catalog.
    async fn of_catalog(&mut self, catalog: &str) -> Result<BTreeMap<String, String>, DbError>;

    /// Replaces all of a machine. The machine must exist.
    async fn set_of_machine(
        &mut self,
        machine: Uuid,
        strings: &BTreeMap<String, String>,
    ) -> Result<(), DbError>;

    /// Replaces all of a catalog. The catalog must exist.
    async fn set_of_catalog(
        &mut self,
        catalog: &str,
        strings: &BTreeMap<String, String>,
    ) -> Result<(), DbError>;
}

/// Claims: at most one for each machine. They go with their machine.
#[async_trait]
pub trait ClaimRepository: Send {
    /// Adds a claim; `Taken` if its machine has one, or another claim has its key.
    async fn add(&mut self, claim: &ClaimRecord) -> Result<(), DbError>;

    /// All claims, oldest first.
    async fn list(&mut self) -> Result<Vec<ClaimRecord>, DbError>;

    /// Records why a claim ends. Returns whether the claim exists and had not ended.
    async fn end(&mut self, id: Uuid, why: &str) -> Result<bool, DbError>;

    /// Removes a claim. Returns whether it existed.
    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError>;
}

/// Named tokens, by the hash of their secret.
#[async_trait]
pub trait TokenRepository: Send {
    /// Adds a token. Its name and hash must be new.
    async fn add(&mut self, token: &TokenRecord) -> Result<(), DbError>;

    /// The token whose secret has this hash.
    async fn by_hash(&mut self, hash: &str) -> Result<Option<TokenRecord>, DbError>;

    /// All tokens, by name.
    async fn list(&mut self) -> Result<Vec<TokenRecord>, DbError>;

    /// Removes a token. Returns whether it existed.
    async fn remove(&mut self, name: &str) -> Result<bool, DbError>;
}

/// How many sessions of the web console are stored. A new session removes the one that was unused for longest.
pub const KEPT_SESSIONS: i64 = 64;

/// Sessions of the web console, by the hash of their secret.
#[async_trait]
pub trait SessionRepository: Send {
    /// Adds a session, and removes those that exceed [`KEPT_SESSIONS`]. Its hash must be new.
    async fn add(&mut self, session: &SessionRecord) -> Result<(), DbError>;

    /// The session whose secret has this hash.
    async fn by_hash(&mut self, hash: &str) -> Result<Option<SessionRecord>, DbError>;

    /// Records when a session was last used. Does nothing if there is no such session.
    async fn used(&mut self, hash: &str, at_ms: u64) -> Result<(), DbError>;

    /// Removes a session. Returns whether it existed.
    async fn remove(&mut self, hash: &str) -> Result<bool, DbError>;

    /// Removes all sessions that were opened before `created_ms`, or last used before `used_ms`.
    async fn remove_ended(&mut self, created_ms: u64, used_ms: u64) -> Result<(), DbError>;
}

/// Connections to clouds, and what is there.
#[async_trait]
pub trait CloudRepository: Send {
    /// Adds a connection. Its name must be new.
    async fn add(&mut self, connection: &ConnectionRecord) -> Result<(), DbError>;

    /// The connection of that name, with its secret.
    async fn by_name(&mut self, name: &str) -> Result<Option<ConnectionRecord>, DbError>;

    /// All connections, in natural order of names, without their secrets.
    async fn list(&mut self) -> Result<Vec<ConnectionRecord>, DbError>;

    /// Replaces the secret of a connection. Returns whether the connection exists.
    async fn set_secret(&mut self, name: &str, secret: &Secret) -> Result<bool, DbError>;

    /// Removes a connection without published versions, with its operations and orphans. Returns whether it existed.
    async fn remove(&mut self, name: &str) -> Result<bool, DbError>;

    /// The published versions, ordered by image, version and connection.
    async fn published(&mut self) -> Result<Vec<PublishedImage>, DbError>;

    /// Adds a published version, or replaces the row of the same version and connection.
    async fn set_published(&mut self, published: &PublishedImage) -> Result<(), DbError>;

    /// Removes a published version. Returns whether it existed.
    async fn remove_published(&mut self, published: &PublishedImage) -> Result<bool, DbError>;

    /// Adds an operation. Replaces that of the same connection, scope and path.
    async fn begin_operation(&mut self, operation: &CloudOperation) -> Result<(), DbError>;

    /// Stores the URL of the operation that the cloud has begun. Returns whether there is such an operation.
    async fn operation_accepted(&mut self, operation: &CloudOperation) -> Result<bool, DbError>;

    /// Removes an operation, if it exists.
    async fn end_operation(&mut self, connection: &str, scope: &str, path: &str) -> Result<(), DbError>;

    /// The operations of a connection, oldest first.
    async fn operations(&mut self, connection: &str) -> Result<Vec<CloudOperation>, DbError>;

    /// The orphans of a connection, ordered by name, and when each was seen first.
    async fn orphans(&mut self, connection: &str) -> Result<Vec<(String, u64)>, DbError>;

    /// Replaces the orphans of a connection.
    async fn set_orphans(&mut self, connection: &str, orphans: &[(String, u64)]) -> Result<(), DbError>;
}

/// How many runs of a catalog are kept: the newest ones.
pub const KEPT_RUNS: i64 = 1000;

/// What write caches took, by catalog.
#[async_trait]
pub trait RunRepository: Send {
    /// Adds a run, and removes those of its catalog that exceed [`KEPT_RUNS`].
    async fn add(&mut self, run: &RunRecord) -> Result<(), DbError>;

    /// The runs of a catalog, newest first.
    async fn of_catalog(&mut self, catalog: &str) -> Result<Vec<RunRecord>, DbError>;

    /// Removes the runs of a catalog.
    async fn remove_of_catalog(&mut self, catalog: &str) -> Result<(), DbError>;
}

/// How many tasks are kept: ended ones with lower numbers are removed as new ones come.
pub const KEPT_TASKS: i64 = 10_000;

/// Tasks, by number. A task that has ended does not change.
#[async_trait]
pub trait TaskRepository: Send {
    /// Adds a task that waits, and returns its number.
    async fn add(&mut self, task: &NewTask) -> Result<i64, DbError>;

    /// The task with this number.
    async fn by_id(&mut self, id: i64) -> Result<Option<TaskRecord>, DbError>;

    /// The newest `limit` tasks with numbers below `before`, newest first.
    async fn older(&mut self, before: i64, limit: u32) -> Result<Vec<TaskRecord>, DbError> {
        self.page(&Filter::default(), false, before, limit).await
    }

    /// The newest `limit` tasks with numbers below `before` that match a filter, newest first; only unended ones if
    /// `is_unended` is set.
    async fn page(
        &mut self,
        filter: &Filter,
        is_unended: bool,
        before: i64,
        limit: u32,
    ) -> Result<Vec<TaskRecord>, DbError>;

    /// All unended tasks, oldest first.
    async fn unended(&mut self) -> Result<Vec<TaskRecord>, DbError>;

    /// Stores the changes of a task: state, plan, progress, outcome and times. Returns whether there is an unended
    /// task of that number.
    async fn update(&mut self, task: &TaskRecord) -> Result<bool, DbError>;

    /// Records that the cancellation of a task was requested. Returns whether there is an unended task of that number.
    async fn cancel(&mut self, id: i64) -> Result<bool, DbError>;
}

/// The least number of events that are stored; older ones are removed from time to time when new ones are added.
pub const KEPT_EVENTS: i64 = 100_000;

/// The least number of stored events that are not the daemon's own about machines, so that guests that reboot all day
/// do not push out events about users.
pub const KEPT_ACTIONS: i64 = 20_000;

/// A part of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventWindow {
    /// The newest events with smaller numbers, newest first.
    Before(i64),
    /// The oldest events with larger numbers, oldest first.
    After(i64),
}

/// The history. Events are only added. An event is removed after [`KEPT_EVENTS`] newer ones; events about users'
/// actions after [`KEPT_ACTIONS`] newer ones of these.
#[async_trait]
pub trait EventRepository: Send {
    /// Appends an event.
    async fn append(&mut self, event: NewEvent) -> Result<(), DbError>;

    /// The newest `limit` events, newest first, of one subject or of all.
    async fn newest(&mut self, subject: Option<&str>, limit: u32) -> Result<Vec<Event>, DbError> {
        self.older(subject, i64::MAX, limit).await
    }

    /// The same for events older than the one with the number `before`.
    async fn older(&mut self, subject: Option<&str>, before: i64, limit: u32) -> Result<Vec<Event>, DbError> {
        self.page(&Filter::default(), subject, EventWindow::Before(before), limit).await
    }

    /// The oldest `limit` events newer than the event with the number `after`, oldest first.
    async fn newer(&mut self, subject: Option<&str>, after: i64, limit: u32) -> Result<Vec<Event>, DbError> {
        self.page(&Filter::default(), subject, EventWindow::After(after), limit).await
    }

    /// The oldest `limit` events of the audit ([`headwater_api::audit`]) newer than the event with the number `after`, oldest
    /// first, each with its hash.
    async fn audit(&mut self, after: i64, limit: u32) -> Result<Vec<(Event, String)>, DbError>;

    /// At most `limit` events that match a filter, of one subject or of all.
    async fn page(
        &mut self,
        filter: &Filter,
        subject: Option<&str>,
        window: EventWindow,
        limit: u32,
    ) -> Result<Vec<Event>, DbError>;

    /// Whether there are events whose subject begins with a prefix.
    async fn any(&mut self, prefix: &str) -> Result<bool, DbError>;
}
