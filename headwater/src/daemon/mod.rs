//! The daemon of `serve` and `run`: sets up lock, store, database, service and sockets, and ends them in order.
//!
//! ```text
//!   start: lock the data directory -> bind ports and sockets -> database -> store, disk process
//!          -> service -> recover -> serve
//!   stop:  no new requests, long operations cancelled, requests in flight finished
//!          -> machines stopped, or left on with their disks -> database closed -> socket removed
//! ```
//! With `run`, disks are in this process, and machines end with it in any case. With `serve`, disks are in a process
//! of their own, and machines that are left on run without a daemon. If machines are stopped, reads that wait for a store
//! that does not answer fail after `READS_GRACE`, so that the end does not wait for them.

pub mod boot;
pub mod database;
mod dhcp_table;
pub mod exports;
pub mod network;
mod nodes;
mod scrub;
pub mod starting;

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_db::{Database, DbError};
use headwater_service::backend::{AlarmChannel, IdentityProvider, SystemClock, SystemRandom, Wake};
use headwater_service::fleet::OwnHost;
use headwater_service::lifecycle::STOP_GRACE_MS;
use headwater_service::web::Reachable;
use headwater_service::{Parts, Service, Token, operations, server, web};
use headwater_store::{Access, LocalDir, Store, StoreErrorKind};
use headwater_store_server::{ServeError, StoreServer, TlsFiles};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::adapters::cloud::AzureClouds;
use crate::adapters::disk_host::{DiskHost, KnownStore};
use crate::adapters::disks::{Directories, Volumes};
use crate::adapters::hypervisor::Qemu;
use crate::adapters::images::StoredImages;
use crate::adapters::retention::DaemonName;
use crate::adapters::wake::Waker;
use crate::caches::CacheArgs;
use crate::cli::LogFormat;
use crate::daemon::database::OpenDatabase;
use crate::daemon::exports::Offer;
use crate::daemon::network::{Ports, host_name};
use crate::daemon::nodes::BoundNodes;
use crate::daemon::scrub::Scrubbing;
use crate::data_dir::{DataDir, DataDirLock};
use crate::database::{Shared, Usage};
use crate::disk_process::{self, DiskClient, Settings};
use crate::last_known::LastKnown;
use crate::oidc::Provider;
use crate::secrets_key::SecretsKeyFile;
use crate::stores::{self, Credentials, NamedServers};
use crate::streaming::StreamArgs;
use crate::verification::Scrub;

/// Timeout of requests in flight when the daemon stops. The longest request is a stop of a machine.
const REQUESTS_GRACE: Duration = Duration::from_millis(STOP_GRACE_MS + 15_000);

/// Timeout of cancelled operations that clean up.
const TASKS_GRACE: Duration = Duration::from_secs(30);

/// Timeout of killed VMs. After it, reads of their disks fail.
const KILL_GRACE: Duration = Duration::from_secs(5);

/// Timeout of events that must still be written to the history. A write may wait for another process that uses the database.
const NOTES_GRACE: Duration = Duration::from_secs(15);

/// How long reads may still wait for the store after the daemon began to stop. If the store answers by then,
/// guests shut down as usual.
const READS_GRACE: Duration = Duration::from_secs(10);

/// Timeout of the disk process's end, after all disks are closed.
const DISKS_GRACE: Duration = Duration::from_secs(10);

/// How often the daemon checks whether reads wait.
const READS_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Timeout of machines that are stopped. After it, reads of their disks fail. The longest stop of one machine, and
/// more.
const MACHINES_GRACE: Duration = REQUESTS_GRACE;

/// Where the disks of machines are.
#[derive(Clone, Debug, Default)]
pub enum DisksIn {
    /// In this process: machines end with it.
    #[default]
    Daemon,
    /// In a separate process with this log: machines survive the daemon.
    OwnProcess { filter: String, format: LogFormat },
}

/// The options of a daemon.
#[derive(Default)]
pub struct Options {
    /// Where the disks of machines are.
    pub disks: DisksIn,
    /// Leave machines on when the daemon is told to end.
    pub keep_machines: bool,
    /// The PostgreSQL database, if it is not the SQLite file of the data directory.
    pub database: Option<Shared>,
    /// The file with the key of the secrets in the database, where it is not the usual one.
    pub secrets_key: Option<PathBuf>,
    /// Whether members of its group may use it.
    pub group_access: bool,
    /// A TCP address to listen on besides the socket.
    pub listen: Option<SocketAddr>,
    /// A TCP address for the web console.
    pub console: Option<SocketAddr>,
    /// The identity provider of people who log in.
    pub people: Option<Provider>,
    /// A TCP address for nodes of other hosts, and how long the leases of these nodes last.
    pub nodes: Option<(SocketAddr, Duration)>,
    /// The certificate of API and console, if they are not only on loopback addresses. Without it, the daemon makes
    /// one.
    pub tls: Option<TlsFiles>,
    /// The store, if it is not that of the data directory.
    pub store: Option<String>,
    /// Create an empty store if there is none, even if the database knows machines or images.
    pub new_store: bool,
    /// Whether images in the history prove that there was a store. With `run`, they may have been in a remote store.
    pub history_counts: bool,
    /// The address and options of the store server, if the store is offered.
    pub offer: Option<headwater_store_server::Options>,
    /// The boot server's settings.
    pub boot: Option<boot::BootOffer>,
    /// How machines that boot from the network are switched on.
    pub waker: Option<Waker>,
    /// How machines' disks are offered over NBD.
    pub nbd: Option<Offer>,
    /// The channels by which alarms are sent.
    pub alarm_channels: Vec<Arc<dyn AlarmChannel>>,
    /// Stores from which this one may be repaired. Their servers get the credentials also if only a request names them.
    pub repair_from: Vec<String>,
    /// The background verification.
    pub scrub: Option<Scrub>,
    /// The pause between two rounds of the verification, if it is not the default.
    pub scrub_pause: Option<Duration>,
    /// Settings that all write caches share.
    pub caches: CacheArgs,
    /// How images of other hosts are read.
    pub stream: StreamArgs,
    /// The credentials for servers.
    pub credentials: Credentials,
    /// The directory of recordings, if it is not that of the data directory. Only if the disks are in this process.
    pub recordings: Option<PathBuf>,
    /// Start the machines that were on when the last daemon ended.
    pub resume: bool,
    /// Additional files that a seal removes in a guest.
    pub seal_removes: Vec<String>,
}

/// The server that offers the store to others, if it is offered.
async fn offer_store(
    store: &Arc<dyn Store>,
    options: Option<&headwater_store_server::Options>,
    issued: Option<&Path>,
) -> Result<Option<StoreServer>, ServeError> {
    match options {
        Some(options) => StoreServer::bind_with_issued(store.clone(), options, issued).await.map(Some),
        None => Ok(None),
    }
}

/// The name of the step in which a controller on standby waits.
const STANDING_BY: &str = "standing by until no other controller has the database";

/// If the database is shared by several controllers, waits until no other one has it. The ports are not open before
/// that, so that a node tries the next controller.
async fn stand_by(
    data_dir: &DataDir,
    database: Option<&Shared>,
    keys: &SecretsKeyFile,
    step: &watch::Sender<&'static str>,
) -> anyhow::Result<Option<OpenDatabase>> {
    match database {
        Some(shared) if shared.usage == Usage::InTurn => {
            step.send_replace(STANDING_BY);
            OpenDatabase::open(data_dir, Some(shared.clone()), keys).await.map(Some)
        }
        _ => Ok(None),
    }
}

async fn run_offer(offer: StoreServer, stopped: watch::Receiver<bool>) -> std::io::Result<()> {
    offer.run(stopped).await;
    Ok(())
}

/// Opens the database, unless it is already open.
async fn open_database(
    data_dir: &DataDir,
    waited: Option<OpenDatabase>,
    database: Option<Shared>,
    secrets_key: Option<PathBuf>,
) -> anyhow::Result<OpenDatabase> {
    let keys = SecretsKeyFile::of(data_dir, secrets_key.as_deref());
    match waited {
        Some(database) => Ok(database),
        None => OpenDatabase::open(data_dir, database, &keys).await,
    }
}

/// Sets the URLs of a service, the identity provider of its people, what switches on its machines, and its clouds.
fn set_surroundings(
    service: &Service,
    reachable: &Reachable,
    people: Option<Provider>,
    waker: Option<Waker>,
    clouds: AzureClouds,
) {
    service.is_reached_at(reachable.clone());
    service.logs_in_with(people.map(|people| Arc::new(people) as Arc<dyn IdentityProvider>));
    service.wakes_with(waker.map(|waker| Arc::new(waker) as Arc<dyn Wake>));
    service.connects_with(Arc::new(clouds));
}

/// Starts the background work of a daemon that serves.
async fn start_background(service: &Service, resume: bool, left_tasks: Vec<i64>) -> anyhow::Result<()> {
    // The first question to the hypervisor takes seconds, so ask before the first machine starts.
    let looking = service.clone();
    tokio::spawn(async move { looking.look_at_hypervisor().await });
    if resume {
        service.resume().await;
    }
    let clouds = service.clone();
    tokio::spawn(async move { clouds.keep_clouds().await });
    let recovered = service.recover_tasks(left_tasks).await;
    recovered.context("cannot continue the tasks of an earlier daemon")
}

/// Begins what a daemon does again and again: it compares wanted and actual state, and sends alarms.
fn tick(service: &Service, channels: Vec<Arc<dyn AlarmChannel>>) -> [JoinHandle<()>; 2] {
    let (ticking, sending) = (service.clone(), service.clone());
    let ticker = tokio::spawn(async move { ticking.keep_reconciling().await });
    let alarms = tokio::spawn(async move { sending.keep_alarms(channels).await });
    [ticker, alarms]
}

/// A running daemon.
pub struct Daemon {
    data_dir: DataDir,
    _socket_file: SocketFile,
    _lock: DataDirLock,
    _disks_lock: Option<File>,
    service: Service,
    disks: Arc<dyn DiskHost>,
    /// The disk process, if there is one.
    disk_process: Option<Arc<DiskClient>>,
    keep_machines: bool,
    database: OpenDatabase,
    store: Arc<dyn Store>,
    stop: watch::Sender<bool>,
    servers: Vec<JoinHandle<std::io::Result<()>>>,
    ticker: JoinHandle<()>,
    alarms: JoinHandle<()>,
    reachable: Reachable,
    offer_url: Option<String>,
    boot_url: Option<String>,
    nodes_url: Option<String>,
    nbd: Option<headwater_nbd::Server>,
    scrubbing: Option<Scrubbing>,
}

impl Daemon {
    /// Starts a daemon on a data directory. `step` shows the present step. The daemon serves when this returns.
    async fn start(
        data_dir: DataDir,
        options: Options,
        step: watch::Sender<&'static str>,
    ) -> anyhow::Result<Self> {
        let lock = data_dir.lock()?;
        let keys = SecretsKeyFile::of(&data_dir, options.secrets_key.as_deref());
        let waited = stand_by(&data_dir, options.database.as_ref(), &keys, &step).await?;
        let turn = waited.as_ref().and_then(OpenDatabase::shared);
        let started = Self::start_locked(data_dir, lock, waited, options, step).await;
        if started.is_err()
            && let Some(turn) = turn
            && let Err(error) = turn.end_lease().await
        {
            tracing::warn!(
                "cannot release the lease on the database, so other controllers wait for a few seconds: {error}"
            );
        }
        started
    }

    async fn start_locked(
        data_dir: DataDir,
        lock: DataDirLock,
        waited: Option<OpenDatabase>,
        options: Options,
        step: watch::Sender<&'static str>,
    ) -> anyhow::Result<Self> {
        // Checked before anything is changed: most wrong options show here.
        let servers = options.store.iter().chain(&options.repair_from);
        let named = NamedServers::new(servers, options.credentials.clone())?;
        let load = || Token::load_or_make(&data_dir.token(), &SystemRandom);
        let own = options.listen.map(|_| load()).transpose()?;
        let nodes = BoundNodes::open(&data_dir, options.nodes, options.database.as_ref()).await?;
        let ports = Ports::bind(options.listen, options.console, options.tls, &data_dir).await?;
        let unix = server::bind_unix(&data_dir.socket()).await?;
        let socket_file = SocketFile(data_dir.socket());
        if options.group_access {
            data_dir.open_to_group()?;
        }
        step.send_replace("opening the database");
        let in_turn = waited.is_some();
        let database = open_database(&data_dir, waited, options.database, options.secrets_key).await?;
        let nodes = nodes.with_database(&*database.repository).await?;
        let known = match options.new_store {
            true => StoreKnown::default(),
            false => StoreKnown::of(&*database.repository, options.history_counts).await?,
        };
        let wanted = StoreOptions {
            name: options.store,
            credentials: options.credentials,
            stream: options.stream,
            caches: options.caches,
            recordings: options.recordings,
            disks: options.disks,
        };
        let OpenStore { store, last_known, disks, disk_process, disks_lock } =
            open_store(&data_dir, wanted, known, &step).await?;
        let boot = options.boot.map(|boot| boot::Opened::new(&boot, &data_dir)).transpose()?;
        let (boot_url, issued) = boot.as_ref().map(|boot| (boot.url(), boot.issued())).unzip();
        let offer = offer_store(&store, options.offer.as_ref(), issued.as_deref()).await?;
        let offer_url = offer.as_ref().map(StoreServer::url);
        let daemon = DaemonName::here(database.identity(&data_dir).await?, data_dir.path());
        let clouds = AzureClouds::new(store.clone(), database.repository.clone(), daemon.id.clone());
        let images = StoredImages::new(store.clone(), disks.boot_traces(), named, last_known, daemon);
        let hypervisor = Qemu { also_removed: options.seal_removes.into(), outlives: disk_process.is_some() };
        let host = OwnHost { owns_database: !in_turn, ..own_host(&data_dir)? };
        let service =
            service(&data_dir, host, images, database.repository.clone(), disks.clone(), hypervisor);
        let Ports { api, console, reachable } = ports;
        set_surroundings(&service, &reachable, options.people, options.waker, clouds);
        step.send_replace("looking for what an earlier daemon left");
        service.recover().await.context("cannot clean up after an earlier daemon")?;
        let left_tasks = service.left_tasks().await.context("cannot list the tasks of an earlier daemon")?;

        step.send_replace("beginning to serve");
        // After the recovery, because disks that an earlier daemon left must not be read.
        let nbd = options.nbd.map(|offer| offer.serve(service.clone(), disks.clone())).transpose()?;
        let router = operations::router(service.clone());
        let (stop, stopped) = watch::channel(false);
        let (nodes_url, mut servers) = (nodes.url(), nodes.serve(&service, &stopped));
        servers.push(tokio::spawn(server::serve_unix(unix, router.clone(), stopped.clone())));
        servers.extend(api.zip(own).map(|(port, own)| {
            let tokens = server::Tokens { own, named: service.clone() };
            tokio::spawn(server::serve_tcp(port, router.clone(), tokens, stopped.clone()))
        }));
        servers.extend(
            console.map(|port| tokio::spawn(web::serve(port, router, service.clone(), stopped.clone()))),
        );
        if let (Some(boot), Some(offer)) = (boot, &offer) {
            servers.push(boot.serve(service.clone(), store.clone(), offer.address(), stopped.clone()).await?);
        }
        servers.extend(offer.map(|offer| tokio::spawn(run_offer(offer, stopped))));
        let (scrub, pause) = (options.scrub, options.scrub_pause);
        let scrubbing =
            scrub.map(|rate| Scrubbing::start(store.clone(), rate, pause, service.clone())).transpose()?;
        start_background(&service, options.resume, left_tasks).await?;
        let [ticker, alarms] = tick(&service, options.alarm_channels);
        Ok(Self {
            data_dir,
            _socket_file: socket_file,
            _lock: lock,
            _disks_lock: disks_lock,
            service,
            disks,
            disk_process,
            keep_machines: options.keep_machines,
            database,
            store,
            stop,
            servers,
            ticker,
            alarms,
            reachable,
            offer_url,
            boot_url,
            nodes_url,
            nbd,
            scrubbing,
        })
    }

    /// The URLs of the API and the console over TCP.
    pub fn reachable(&self) -> &Reachable {
        &self.reachable
    }

    /// The URL at which the store is offered.
    pub fn offer_url(&self) -> Option<&str> {
        self.offer_url.as_deref()
    }

    /// The URL of the boot server.
    pub fn boot_url(&self) -> Option<&str> {
        self.boot_url.as_deref()
    }

    /// The URL at which nodes of other hosts connect.
    pub fn nodes_url(&self) -> Option<&str> {
        self.nodes_url.as_deref()
    }

    /// The URI of the NBD server for machines' disks.
    pub fn nbd_uri(&self) -> Option<String> {
        self.nbd.as_ref().map(headwater_nbd::Server::uri)
    }

    /// The data directory.
    pub fn data_dir(&self) -> &DataDir {
        &self.data_dir
    }

    /// Replaces the background verification, or ends it.
    pub fn set_scrub(&mut self, scrub: Option<Scrub>, pause: Option<Duration>) -> anyhow::Result<()> {
        if let Some(old) = self.scrubbing.take() {
            // Its end may wait for the store.
            tokio::task::spawn_blocking(move || drop(old));
        }
        let start = |scrub| Scrubbing::start(self.store.clone(), scrub, pause, self.service.clone());
        self.scrubbing = scrub.map(start).transpose()?;
        Ok(())
    }

    /// Waits until the disk process has ended. Never returns if the disks are in this process.
    pub fn disks_ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let ended = self.disk_process.as_ref().map(|process| process.ended());
        async move {
            match ended {
                Some(ended) => ended.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Waits until another daemon may have the database, and returns the reason. Never returns if the database is not
    /// shared.
    pub fn database_lost(&self) -> impl Future<Output = String> + Send + 'static {
        self.database.lost()
    }

    /// Whether machines stay on when the daemon stops.
    pub fn keeps_machines(&self) -> bool {
        self.keep_machines
    }

    /// Makes a stop leave all machines on.
    pub fn keep_all_machines(&mut self) {
        self.keep_machines = true;
    }

    /// Makes a stop switch all machines off.
    pub fn keep_no_machines(&mut self) {
        self.keep_machines = false;
    }

    /// Ends all machines at once, even while [`Daemon::stop`] waits for their guests. Machines that are to stay on
    /// are not ended.
    pub fn hurry(&self) -> impl Future<Output = ()> + Send + 'static {
        let (service, disks) = (self.service.clone(), Arc::clone(&self.disks));
        let keep_machines = self.keep_machines;
        async move {
            if keep_machines {
                return;
            }
            let ended = service.vms_ended();
            let stopping = tokio::spawn(async move { service.stop_all(true).await });
            // A guest that still runs would take failed reads for a broken disk.
            if tokio::time::timeout(KILL_GRACE, ended).await.is_err() {
                let grace_s = KILL_GRACE.as_secs();
                tracing::warn!(
                    "a machine did not end within {grace_s} s of being killed: reads of its disk fail now"
                );
            }
            // The machines need their disks no more, and the disks end when their reads do.
            disks.close_store();
            // A thread that panicked has reported that itself.
            let _ = stopping.await;
        }
    }

    /// Finishes requests in flight, stops all machines unless they are to stay on, and ends.
    pub async fn stop(self) {
        self.service.begin_stop();
        let giving_up =
            (!self.keep_machines).then(|| tokio::spawn(fail_waiting_reads(Arc::clone(&self.disks))));
        if let Some(scrubbing) = self.scrubbing {
            // The verification checks for its end often, but the store may be slow.
            tokio::task::spawn_blocking(move || drop(scrubbing));
        }
        // Takes as long as clients take to read replies. Needs the service, which ends later.
        let nbd = self.nbd.map(|nbd| tokio::task::spawn_blocking(move || nbd.stop()));
        // An error means that all servers have ended.
        let _ = self.stop.send(true);
        let finish = async {
            for server in self.servers {
                match server.await {
                    Ok(Ok(())) => {}
                    Ok(Err(e)) => tracing::error!("a listener failed: {e}"),
                    Err(e) => tracing::error!("a listener failed: {e}"),
                }
            }
        };
        if tokio::time::timeout(REQUESTS_GRACE, finish).await.is_err() {
            let grace_s = REQUESTS_GRACE.as_secs();
            tracing::warn!("some requests did not end within {grace_s} s: their clients get no answer");
        }
        if let Some(nbd) = nbd
            && let Err(e) = nbd.await
        {
            tracing::error!("the NBD server failed while it ended: {e}");
        }
        if !self.service.tasks_ended(TASKS_GRACE).await {
            let grace_s = TASKS_GRACE.as_secs();
            tracing::warn!(
                "a task did not end within {grace_s} s of being cancelled: the daemon ends without it"
            );
        }
        if !self.keep_machines {
            stop_machines(&self.service, &*self.disks).await;
        }
        if let Some(giving_up) = giving_up {
            giving_up.abort();
            // Reads that still wait for the store would keep the process alive.
            self.disks.close_store();
        }
        let ticker = self.ticker;
        ticker.abort();
        self.alarms.abort();
        // Events that it was writing return to the queue of waiting events.
        let _ = ticker.await;
        // Operations whose clients have disconnected write to the history last.
        if !self.service.operations_ended(TASKS_GRACE).await {
            let grace_s = TASKS_GRACE.as_secs();
            tracing::warn!(
                "an operation did not end within {grace_s} s: its event may be missing in the history"
            );
        }
        if !self.service.notes_written(NOTES_GRACE).await {
            let grace_s = NOTES_GRACE.as_secs();
            tracing::warn!(
                "some events could not be written to the history within {grace_s} s, and are lost"
            );
        }
        self.database.close(self.service.has_machines_on()).await;
        if let Some(process) = self.disk_process {
            process.end_if_unused(DISKS_GRACE).await;
        }
    }
}

/// Switches all machines off.
async fn stop_machines(service: &Service, disks: &dyn DiskHost) {
    let stopping = service.stop_all(false);
    tokio::pin!(stopping);
    if tokio::time::timeout(MACHINES_GRACE, &mut stopping).await.is_err() {
        tracing::warn!(
            "a machine has not ended {} s after it was told to: its disk waits for the store, and its reads fail now",
            MACHINES_GRACE.as_secs()
        );
        // The guests were killed by now; only reads that wait keep their disks open.
        disks.close_store();
        stopping.await;
    }
}

/// After a timeout, makes reads fail that wait for a store that does not answer.
async fn fail_waiting_reads(disks: Arc<dyn DiskHost>) {
    let mut since = None;
    loop {
        let Some(reasons) = disks.reads_wait() else {
            since = None;
            tokio::time::sleep(READS_POLL_INTERVAL).await;
            continue;
        };
        if since.get_or_insert_with(tokio::time::Instant::now).elapsed() >= READS_GRACE {
            tracing::warn!(
                "reads still wait for a server of the image, and fail now, because the daemon ends: {reasons}"
            );
            return disks.close_store();
        }
        tokio::time::sleep(READS_POLL_INTERVAL).await;
    }
}

/// The socket's file. Dropping this removes it, while the lock is still held.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.0) {
            tracing::warn!("cannot remove the socket {}: {e}", self.0.display());
        }
    }
}

/// An open store, its last known state, and the disks over its images.
struct OpenStore {
    store: Arc<dyn Store>,
    last_known: Arc<LastKnown>,
    disks: Arc<dyn DiskHost>,
    disk_process: Option<Arc<DiskClient>>,
    /// Locked if the disks are in this process.
    disks_lock: Option<File>,
}

/// The options for opening a store and its disks.
struct StoreOptions {
    name: Option<String>,
    credentials: Credentials,
    stream: StreamArgs,
    caches: CacheArgs,
    recordings: Option<PathBuf>,
    disks: DisksIn,
}

async fn open_store(
    data_dir: &DataDir,
    options: StoreOptions,
    known: StoreKnown,
    step: &watch::Sender<&'static str>,
) -> anyhow::Result<OpenStore> {
    let (data_dir, step) = (data_dir.clone(), step.clone());
    let opened = tokio::task::spawn_blocking(move || open_store_here(&data_dir, options, &known, &step));
    opened.await.context("cannot open the store")?
}

fn open_store_here(
    data_dir: &DataDir,
    options: StoreOptions,
    known: &StoreKnown,
    step: &watch::Sender<&'static str>,
) -> anyhow::Result<OpenStore> {
    let StoreOptions { name, credentials, stream, caches, recordings, disks } = options;
    match disks {
        DisksIn::Daemon => {
            // Machines of 'serve' may be on, with their disks in another process.
            let disks_lock = disk_process::lock(data_dir)?;
            // Opened first, because it has the last known state of a store that cannot be reached.
            if stream.chunk_cache.is_some() {
                step.send_replace("opening the chunk cache");
            }
            let cache = stream.open_disk()?;
            step.send_replace("opening the store");
            let kept = cache.clone().map(|cache| cache as Arc<dyn KnownStore>);
            let last_known = Arc::new(LastKnown::new(name.as_deref().unwrap_or_default(), kept));
            check_or_make_store(data_dir, name.as_deref(), known)?;
            let store = open_named(data_dir, name.as_deref(), &last_known, &credentials)?;
            let directories = Directories {
                overflow: data_dir.cache(),
                keys: data_dir.keys(),
                recordings: recordings.unwrap_or_else(|| data_dir.recordings()),
            };
            let volumes = Volumes::new(store.clone(), directories, caches, &stream, cache, None);
            let disks = volumes.map_err(|error| disk_process::problem_of(&error))?;
            let (disks, disks_lock) = (Arc::new(disks), Some(disks_lock));
            Ok(OpenStore { store, last_known, disks, disk_process: None, disks_lock })
        }
        DisksIn::OwnProcess { filter, format } => {
            step.send_replace("opening the store");
            check_or_make_store(data_dir, name.as_deref(), known)?;
            let settings = Settings::new(data_dir, name.as_deref(), &credentials, &caches, &stream)
                .context("cannot start the disk process")?;
            let say = |text: &str| {
                step.send_replace(match text {
                    "opening the chunk cache" => "opening the chunk cache",
                    disk_process::WAITS_FOR_DISKS => disk_process::WAITS_FOR_DISKS,
                    _ => "starting the disk process",
                });
            };
            let process = Arc::new(disk_process::connect(data_dir, &settings, (&filter, format), &say)?);
            if process.has_earlier_settings() {
                tracing::warn!(
                    "machines are on, and their disks keep the settings of the last daemon: changed settings take effect after all machines were off"
                );
            }
            step.send_replace("opening the store");
            let last_known =
                Arc::new(LastKnown::new(name.as_deref().unwrap_or_default(), Some(process.known_store())));
            let store = open_named(data_dir, name.as_deref(), &last_known, &credentials)?;
            let opened = process.open_store(&store);
            opened.map_err(|error| disk_process::problem_of(&error))?;
            let (disks, disk_process) = (process.clone(), Some(process));
            Ok(OpenStore { store, last_known, disks, disk_process, disks_lock: None })
        }
    }
}

/// Fails for a store that existed and is missing, and creates the directory of a new store, because the disk process
/// can use only directories that exist when it starts.
fn check_or_make_store(data_dir: &DataDir, name: Option<&str>, known: &StoreKnown) -> anyhow::Result<()> {
    let own = data_dir.store();
    if let Some(directory) = name.map_or(Some(own.as_path()), stores::directory) {
        known.check(directory)?;
    }
    match name {
        Some(name) => {
            if let Some(directory) = stores::directory(name) {
                // An error is reported when the store is opened.
                let _ = std::fs::create_dir_all(directory);
            }
            Ok(())
        }
        None => data_dir.make_store(),
    }
}

fn open_named(
    data_dir: &DataDir,
    name: Option<&str>,
    last_known: &LastKnown,
    credentials: &Credentials,
) -> anyhow::Result<Arc<dyn Store>> {
    Ok(match name {
        Some(name) => {
            let access = if stores::is_server(name) { Access::Read } else { Access::WRITE };
            last_known.open(access, credentials)?
        }
        None => Arc::new(LocalDir::open(&data_dir.store(), Access::WRITE)?),
    })
}

/// What the database knows about a store that existed.
#[derive(Default)]
struct StoreKnown {
    /// The number of machines that boot its images.
    machines: usize,
    /// Whether the history has events about its images.
    has_images: bool,
}

impl StoreKnown {
    async fn of(database: &dyn Database, history_counts: bool) -> Result<Self, DbError> {
        let mut repo = database.read().await?;
        let machines = repo.machines().list().await?.len();
        let has_images = history_counts && repo.events().any("image ").await?;
        Ok(Self { machines, has_images })
    }

    /// Fails if a store is missing, for instance because its file system is not mounted: an empty store in its place
    /// would look valid.
    fn check(&self, directory: &Path) -> anyhow::Result<()> {
        let Self { machines, has_images } = *self;
        let known = match (machines, has_images) {
            (0, false) => return Ok(()),
            (0, true) => "the history has events about images".to_owned(),
            _ => format!("the database has {machines} machine(s)"),
        };
        match LocalDir::open(directory, Access::Read) {
            Err(e) if e.kind() == StoreErrorKind::NotFound => {
                let place = directory.display();
                let message = format!("there is no store in {place}, although {known}");
                let advice = match store_within(directory) {
                    // As after `mv` into an existing directory.
                    Some(inside) => {
                        format!(
                            "a store was found in {0}: move the contents of {0} to {place}",
                            inside.display()
                        )
                    }
                    None => "mount its file system, or restore the store".to_owned(),
                };
                let advice = format!("{advice}; 'headwater serve --new-store' begins with an empty store");
                Err(Problem::new(ProblemKind::NotFound, message).advise(advice).into())
            }
            // Without machines, the last image may have been removed.
            Ok(store) if machines > 0 && store.images().is_ok_and(|images| images.is_empty()) => {
                tracing::warn!(store = %directory.display(), machines, "the store has no images, but the database has machines, which cannot start; check that the right directory is mounted");
                Ok(())
            }
            // Opening the store reports other errors.
            _ => Ok(()),
        }
    }
}

/// A store in a subdirectory of a directory that is not a store.
fn store_within(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| LocalDir::open(path, Access::Read).is_ok())
}

/// This host's description for the fleet.
pub fn own_host(data_dir: &DataDir) -> anyhow::Result<OwnHost> {
    let id = data_dir.identity()?.parse().context("the identity of the data directory is not a UUID")?;
    let system = rustix::system::sysinfo();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(OwnHost {
        id,
        name: host_name(),
        memory_bytes: system.totalram.saturating_mul(u64::from(system.mem_unit)),
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        owns_database: true,
    })
}

fn service(
    data_dir: &DataDir,
    host: OwnHost,
    images: StoredImages,
    db: Arc<dyn Database>,
    disks: Arc<dyn DiskHost>,
    hypervisor: Qemu,
) -> Service {
    Service::new(Parts {
        db,
        images: Arc::new(images),
        disks,
        hypervisor: Arc::new(hypervisor),
        clock: Arc::new(SystemClock),
        random: Arc::new(SystemRandom),
        data_dir: data_dir.path().to_owned(),
        host,
    })
}
