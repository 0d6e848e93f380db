//! The daemon's client of the disk process: implements the traits for disks ([`Disks`], [`DiskHost`]) with calls over the unix socket
//! `DIR/disks.sock`. [`super::start`] creates it. It opens no disk itself; it notices when the disk process ends, and which disks the
//! next disk process did not take over.

mod connection;

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use headwater_api::{CacheContents, CacheSettings, DiskCounters, HostRam, ImageVersion, ProblemKind, Sample};
use headwater_block::{ByteRange, Geometry};
use headwater_image::{ChunkCache, Trace};
use headwater_service::backend::{
    BackendError, Disk, DiskRequest, Disks, FrozenDisk, Given, IdentityLeft, OpenDisk, PersistentDiskRef,
    PersistentDiskRequest, SealOrder, SealOutcome, Shortage, TaskControl,
};
use headwater_store::{Hash, Image, ImageName, Store};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use uuid::Uuid;

use self::connection::{CallError, Waiting, gone};
pub use self::connection::{Connection, WAITS_FOR_DISKS};
use super::protocol::{
    Answer, Call, DiskSnapshot, Failure, FoundTrace, Opened, OpenedFrozen, OpenedReader, PlainGeometry,
    Snapshot, StoreTrace, VERSION, Welcome, receive, send,
};
use super::reader::RemoteDevice;
use super::settings::Settings;
use crate::adapters::disk_host::{BootTraces, DiskHost, KnownStore, OpenReader};
use crate::adapters::disks::blocking;
use crate::adapters::frozen;
use crate::adapters::images::image_failed;
use crate::traces::{Place, Traces};

/// How old figures may be before they are fetched again; one call fetches those of all machines.
const FRESH: Duration = Duration::from_millis(10);

/// How long the daemon waits for figures before it uses the last ones.
const FIGURES_PATIENCE: Duration = Duration::from_secs(2);

/// How long the disk process may be silent before that is an alarm of each machine. A crash and an upgrade take less.
const SILENCE: Duration = Duration::from_secs(5);

/// How often it is looked whether a long call is to be cancelled.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// How long the daemon waits for a boot that was just recorded to be in the store.
const TRACES_PATIENCE: Duration = Duration::from_secs(5);

/// The pause before a call is made again that was not begun: the next disk process is about to answer.
const AGAIN_PAUSE: Duration = Duration::from_millis(20);

/// How long a call is made again and again that is not begun. A handover, which may go back to the program from before, takes less:
/// the keeper waits at most 60 s for each of three steps.
const NOT_BEGUN_WITHIN: Duration = Duration::from_secs(240);

/// The size of the chunk cache of a process that reads no chunks.
const NO_CHUNKS_BYTES: u64 = 1 << 20;

/// The most idle connections that are kept for later calls.
const MAX_IDLE: usize = 16;

/// A client of the disk process.
pub struct DiskClient {
    link: Arc<Link>,
    /// Becomes true when the process has ended.
    ended: watch::Receiver<bool>,
    has_earlier_settings: bool,
}

/// The disks that this daemon has open.
#[derive(Default)]
struct OpenHere {
    /// How many disk processes this daemon has used.
    process: u64,
    /// For each disk, the number of the process that opened it or took it over.
    disks: BTreeMap<Uuid, u64>,
}

/// The connections to the disk process, and its last figures.
struct Link {
    socket: PathBuf,
    idle: Mutex<Vec<Connection>>,
    figures: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    /// Since when the disk process has not answered requests for figures.
    silent_since: Mutex<Option<Instant>>,
    open: Mutex<OpenHere>,
    /// Those of them that a disk process did not take over from one that crashed.
    lost: watch::Sender<BTreeSet<Uuid>>,
    /// The store, once it is open. This process writes it.
    store: OnceLock<Arc<dyn Store>>,
    not_begun_within: Duration,
}

/// The result of [`begin`].
pub enum Begun {
    /// The process can be used.
    Ready(DiskClient),
    /// The process ends. If it is `restarted`, another process listens soon.
    Ends { restarted: bool },
}

/// Begins to use the process that listens on a socket.
pub fn begin(socket: &Path, settings: Settings, say: &dyn Fn(&str)) -> Result<Begun, BackendError> {
    let mut holding = Connection::open(socket).map_err(gone)?;
    // From the first moment on: it opens the store only as long as somebody waits for that.
    holding.hold(say)?;
    let mut first = Connection::open(socket).map_err(gone)?;
    let settings = serde_json::to_value(settings).map_err(|e| gone(e.into()))?;
    let begin = Call::Begin { version: VERSION, settings: settings.clone() };
    let mut progress = |now: headwater_api::Progress| say(now.doing.as_deref().unwrap_or_default());
    let welcome: Welcome = first.long_call(&begin, &mut progress, &|| Waiting::GoOn)?;
    if let Welcome::Ends { restarted } = welcome {
        return Ok(Begun::Ends { restarted });
    }
    let (end, ended) = watch::channel(false);
    let link = Arc::new(Link::new(socket.to_owned()));
    link.give_back(first);
    let keeping = Arc::clone(&link);
    let watching = std::thread::Builder::new().name("hw-disks-end".into());
    watching
        .spawn(move || {
            let begin = Call::Begin { version: VERSION, settings };
            loop {
                if let Err(error) = keep_traces(&mut holding, &keeping) {
                    tracing::debug!(%error, "the connection that holds the disk process ended");
                }
                match connect_again(&keeping, &begin) {
                    Some(again) => holding = again,
                    None => break,
                }
            }
            end.send_replace(true);
        })
        .map_err(gone)?;
    let has_earlier_settings = welcome == Welcome::EarlierSettings;
    Ok(Begun::Ready(DiskClient { link, ended, has_earlier_settings }))
}

/// Uses the disk process that takes the place of one that crashed. While its keeper lives, somebody listens. `None`: nobody does, because
/// the disk process ended in order, or with its keeper.
fn connect_again(link: &Link, begin: &Call) -> Option<Connection> {
    let mut said = String::new();
    loop {
        let error = match Connection::open(&link.socket) {
            Ok(holding) => match link.begin_again(holding, begin) {
                Ok(again) => return again,
                Err(error) => Failure::from(&error).into_problem().to_string(),
            },
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return None,
            Err(error) => error.to_string(),
        };
        if said != error {
            tracing::warn!("the disk process has ended, and the next one cannot be used yet: {error}");
            said = error;
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// Keeps the boot traces that the disk process sends, until it ends.
fn keep_traces(holding: &mut Connection, link: &Link) -> std::io::Result<()> {
    while let Some(answer) = receive::<Answer>(&mut holding.reading, &mut holding.line)? {
        let keep = |answer| -> anyhow::Result<()> {
            if let Answer::Done(value) = answer {
                let StoreTrace { manifest, trace } = serde_json::from_value(value)?;
                // The store is open soon after the disk process.
                link.store.wait().set_trace(manifest.parse()?, Some(&trace))?;
            }
            Ok(())
        };
        if let Err(error) = keep(answer) {
            tracing::info!("the recording of a boot cannot be stored: {error:#}");
        }
        send(&mut holding.writing, &Call::Hold)?;
    }
    Ok(())
}

impl Link {
    fn new(socket: PathBuf) -> Self {
        let (idle, figures, open) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (lost, silent_since) = (watch::Sender::new(BTreeSet::new()), Mutex::default());
        let (store, not_begun_within) = (OnceLock::new(), NOT_BEGUN_WITHIN);
        Self { socket, idle, figures, silent_since, open, lost, store, not_begun_within }
    }

    /// Begins to use the next disk process, and notes which disks it has not taken over. `None`: it is of no use.
    fn begin_again(&self, mut holding: Connection, begin: &Call) -> Result<Option<Connection>, BackendError> {
        holding.hold(&|_| {})?;
        let mut first = Connection::open(&self.socket).map_err(gone)?;
        if let Welcome::Ends { .. } = first.call(begin)? {
            return Ok(None);
        }
        if self.store.get().is_some() {
            first.call::<()>(&Call::OpenStore)?;
        }
        // Those to the earlier process are of no use.
        self.idle.lock().clear();
        // A disk that is opened from now on is not lost. If the earlier process has opened it, `note_open` looks for it.
        let process = {
            let mut open = self.open.lock();
            open.process += 1;
            open.process
        };
        let left: Vec<OpenDisk> = first.call(&Call::LeftOpen)?;
        self.give_back(first);
        let open = self.open.lock();
        let is_left = |uuid: Uuid| left.iter().any(|disk| disk.uuid == uuid);
        let of_before = open.disks.iter().filter(|(_, of)| **of < process).map(|(uuid, _)| *uuid);
        let lost: BTreeSet<_> = of_before.filter(|uuid| !is_left(*uuid)).collect();
        tracing::info!(disks = left.len(), lost = lost.len(), "the next disk process serves the disks");
        self.lost.send_replace(lost);
        Ok(Some(holding))
    }

    fn connection(&self) -> Result<Connection, BackendError> {
        let idle = self.idle.lock().pop();
        idle.map_or_else(|| Connection::open(&self.socket).map_err(gone), Ok)
    }

    /// Makes a call on any connection. A call that was not begun is made again, by the next disk process if this one hands its disks over.
    fn ask<T: DeserializeOwned>(
        &self,
        call: &Call,
        timeout: Option<Duration>,
        waiting: &dyn Fn() -> Waiting,
    ) -> Result<(Connection, Result<T, BackendError>), BackendError> {
        let mut connection = self.connection()?;
        let begun = Instant::now();
        loop {
            if timeout.is_some() {
                connection.writing.set_read_timeout(timeout).map_err(gone)?;
            }
            match connection.attempt(call, &mut |_| {}, waiting) {
                Ok(value) => return Ok((connection, Ok(value))),
                Err(CallError::Failed(error)) => return Ok((connection, Err(error))),
                Err(CallError::NotBegun(error)) => {
                    let goes_on = waiting() == Waiting::GoOn;
                    let patience = if goes_on { self.not_begun_within } else { FIGURES_PATIENCE };
                    if begun.elapsed() > patience {
                        return Err(gone(error));
                    }
                    std::thread::sleep(AGAIN_PAUSE);
                    connection = Connection::open(&self.socket).map_err(gone)?;
                }
            }
        }
    }

    /// Makes a call without a limit of time.
    fn call<T: DeserializeOwned>(&self, call: &Call) -> Result<T, BackendError> {
        let is_lost = |outcome: &Result<T, BackendError>| {
            outcome.as_ref().err().is_some_and(|error| error.kind() == ProblemKind::Unavailable)
        };
        let go_on = || Waiting::GoOn;
        let (mut connection, mut outcome) = self.ask(call, None, &go_on)?;
        if is_lost(&outcome) && call.may_be_repeated() {
            // The process may have crashed. The next one answers when it has the disks.
            (connection, outcome) = self.ask(call, None, &go_on)?;
        }
        if !is_lost(&outcome) {
            self.give_back(connection);
        }
        outcome
    }

    /// Opens a disk. If the disk process ends before it answers, the disk is open in no process.
    fn open_disk(&self, request: DiskRequest) -> Result<Opened, BackendError> {
        let (uuid, process) = (request.uuid, self.open.lock().process);
        let opened = self.call(&Call::Open { request: Box::new(request) });
        match opened {
            Ok(opened) => {
                self.note_open(uuid, process)?;
                Ok(opened)
            }
            Err(error) => {
                // The next process may have taken it over. If nobody closes it there, it stays.
                if error.kind() == ProblemKind::Unavailable
                    && let Err(close) = self.call::<bool>(&Call::Close { uuid })
                {
                    tracing::debug!(%uuid, %close, "a disk that could not be opened is not closed");
                }
                Err(error)
            }
        }
    }

    /// Notes that a disk is open. `process`: that of the time before the disk process was asked.
    fn note_open(&self, uuid: Uuid, process: u64) -> Result<(), BackendError> {
        let now = {
            let mut open = self.open.lock();
            let now = open.process;
            open.disks.insert(uuid, now);
            // Under the lock with which `begin_again` sends the disks that are lost.
            self.lost.send_if_modified(|lost| lost.remove(&uuid));
            now
        };
        if now == process {
            return Ok(());
        }
        // The process that has answered may have ended before the next one was asked for its disks.
        let taken_over = self.call::<Opened>(&Call::Adopt { uuid });
        taken_over.map(drop).map_err(|error| {
            self.open.lock().disks.remove(&uuid);
            BackendError::new(
                ProblemKind::Unavailable,
                "the disk process ended just after it had opened the disk",
            )
            .because(error)
            .advise("try again")
        })
    }

    /// Closes a disk. Fails if the disk process ended before it had saved a persistent disk.
    fn close_disk(&self, uuid: Uuid, is_persistent: bool) -> Result<(), BackendError> {
        let was_open = self.call::<bool>(&Call::Close { uuid });
        let is_first = self.open.lock().disks.remove(&uuid).is_some();
        if was_open? || !is_first || !is_persistent {
            return Ok(());
        }
        let message = "the machine's last writes may be missing on its persistent disk: the disk process ended before it had saved them, \
                       and the persistent disk has the state of its last successful flush, or a later state";
        let advice = "start the machine, and check its files; if they are damaged, reset the machine";
        Err(BackendError::new(ProblemKind::Failed, message).advise(advice))
    }

    /// Makes a call that ends early if its task is cancelled.
    fn cancellable<T: DeserializeOwned>(
        &self,
        call: &Call,
        control: &TaskControl,
    ) -> Result<T, BackendError> {
        let waiting = || Waiting::unless_cancelled(control);
        let (connection, outcome) = self.ask(call, Some(LOOK_INTERVAL), &waiting)?;
        let value = outcome?;
        // After a failure, the connection may have been shut down to cancel the call.
        if !control.is_cancelled() && connection.writing.set_read_timeout(None).is_ok() {
            self.give_back(connection);
        }
        Ok(value)
    }

    fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    /// The figures of all disks; the last ones if the process does not answer in time.
    fn figures(&self) -> Option<Arc<Snapshot>> {
        // Held while they are asked for: who comes meanwhile gets the same ones.
        let mut figures = self.figures.lock();
        if let Some((at, last)) = &*figures
            && at.elapsed() < FRESH
        {
            return Some(Arc::clone(last));
        }
        let ask = || {
            let give_up = || Waiting::GiveUp;
            let (connection, snapshot) = self.ask(&Call::Snapshot, Some(FIGURES_PATIENCE), &give_up)?;
            let snapshot: Snapshot = snapshot?;
            connection.writing.set_read_timeout(None).map_err(gone)?;
            self.give_back(connection);
            Ok::<_, BackendError>(snapshot)
        };
        let begun = Instant::now();
        match ask() {
            Ok(snapshot) => {
                *figures = Some((Instant::now(), Arc::new(snapshot)));
                *self.silent_since.lock() = None;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read the counters of the disks: the last ones that were read are shown");
                self.silent_since.lock().get_or_insert(begun);
                // For as long again nobody asks: those who come next would all wait.
                if let Some((at, _)) = &mut *figures {
                    *at = Instant::now() + FIGURES_PATIENCE;
                }
            }
        }
        figures.as_ref().map(|(_, last)| Arc::clone(last))
    }

    /// Whether the disk process has not answered for longer than a crash or an upgrade takes.
    fn is_silent(&self) -> bool {
        self.silent_since.lock().is_some_and(|since| since.elapsed() >= SILENCE)
    }

    fn of_disk(&self, uuid: Uuid) -> Option<DiskSnapshot> {
        self.figures()?.disks.get(&uuid).cloned()
    }
}

impl DiskClient {
    /// Makes the process open the store. This process also uses it: for versions of disks, and for boot traces.
    pub fn open_store(&self, store: &Arc<dyn Store>) -> Result<(), BackendError> {
        // A seal waits for an unreachable bucket, as a disk does.
        let store = store.retrying().unwrap_or_else(|| Arc::clone(store));
        let _ = self.link.store.set(store);
        self.link.call(&Call::OpenStore)
    }

    /// Whether the process still uses the settings of an earlier daemon.
    pub fn has_earlier_settings(&self) -> bool {
        self.has_earlier_settings
    }

    /// The storage for the last known state of the store.
    pub fn known_store(&self) -> Arc<dyn KnownStore> {
        Arc::clone(&self.link) as Arc<dyn KnownStore>
    }

    /// Waits until the process has ended.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.ended.clone();
        async move {
            // The sender is dropped only after it has sent.
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }

    /// Makes the process end if it serves only this daemon and no disk is open, and waits for that.
    pub async fn end_if_unused(&self, patience: Duration) {
        let ending = async {
            if let Ok(true) = self.call::<bool>("end the disk process", Call::Quit).await {
                self.ended().await;
            }
        };
        if tokio::time::timeout(patience, ending).await.is_err() {
            tracing::warn!("the disk process has not ended after {} s; its log says why", patience.as_secs());
        }
    }

    async fn call<T: DeserializeOwned + Send + 'static>(
        &self,
        what: &'static str,
        call: Call,
    ) -> Result<T, BackendError> {
        let link = Arc::clone(&self.link);
        blocking(what, move || link.call(&call)).await
    }

    fn disk(&self, opened: Opened) -> Arc<dyn Disk> {
        let Opened { uuid, socket, sector_bytes, is_persistent } = opened;
        Arc::new(RemoteDisk { link: Arc::clone(&self.link), uuid, socket, sector_bytes, is_persistent })
    }

    fn reader(&self, call: &Call) -> Result<Option<OpenReader>, BackendError> {
        let (connection, opened) = self.link.ask(call, None, &|| Waiting::GoOn)?;
        let opened: Option<OpenedReader> = opened?;
        Ok(opened.map(|OpenedReader { geometry, is_first }| {
            let connection = Arc::new(Mutex::new(connection));
            let device = Arc::new(RemoteDevice::new(geometry.into(), connection));
            OpenReader { device, is_first }
        }))
    }
}

#[async_trait]
impl Disks for DiskClient {
    async fn check(&self, cache: &CacheSettings) -> Result<(), BackendError> {
        self.call("check a write cache", Call::Check { cache: *cache }).await
    }

    async fn check_change(&self, before: &CacheSettings, after: &CacheSettings) -> Result<(), BackendError> {
        self.call("check a write cache", Call::CheckChange { before: *before, after: *after }).await
    }

    async fn check_space(
        &self,
        cache: &CacheSettings,
        kept: Option<PersistentDiskRef>,
        scratch_bytes: u64,
    ) -> Result<(), BackendError> {
        let call = Call::CheckSpace { cache: *cache, kept, scratch_bytes };
        self.call("determine how much space is free", call).await
    }

    async fn open(&self, request: DiskRequest) -> Result<Arc<dyn Disk>, BackendError> {
        let link = Arc::clone(&self.link);
        let opened = blocking("open the disk", move || link.open_disk(request)).await?;
        Ok(self.disk(opened))
    }

    async fn left_open(&self) -> Result<Vec<OpenDisk>, BackendError> {
        self.call("list the open disks", Call::LeftOpen).await
    }

    async fn adopt(&self, disk: &OpenDisk) -> Result<Arc<dyn Disk>, BackendError> {
        let (link, uuid) = (Arc::clone(&self.link), disk.uuid);
        let taken_over = blocking("take the disk over", move || {
            let process = link.open.lock().process;
            let opened = link.call::<Opened>(&Call::Adopt { uuid })?;
            link.note_open(uuid, process)?;
            Ok(opened)
        });
        Ok(self.disk(taken_over.await?))
    }

    async fn open_persistent(
        &self,
        request: PersistentDiskRequest,
    ) -> Result<Box<dyn FrozenDisk>, BackendError> {
        let link = Arc::clone(&self.link);
        blocking("open the disk", move || {
            RemoteFrozen::open(&link, &Call::OpenPersistent { request: Box::new(request) })
        })
        .await
    }

    async fn persistent_contents(
        &self,
        request: PersistentDiskRequest,
        control: Arc<TaskControl>,
    ) -> Result<CacheContents, BackendError> {
        let (link, call) = (Arc::clone(&self.link), Call::PersistentContents { request: Box::new(request) });
        blocking("scan the write cache", move || link.cancellable(&call, &control)).await
    }

    async fn discard(&self, id: Uuid) -> Result<(), BackendError> {
        self.call("remove a disk", Call::Discard { id }).await
    }

    async fn is_there(&self, id: Uuid) -> Result<bool, BackendError> {
        self.call("look for a persistent disk", Call::IsThere { id }).await
    }

    fn host_ram(&self) -> HostRam {
        self.link.figures().map(|figures| figures.host_ram).unwrap_or_default()
    }

    fn metrics(&self) -> Vec<Sample> {
        let mut samples = self.link.figures().map(|figures| figures.metrics.clone()).unwrap_or_default();
        // Checks, exports and seals read the store in this process.
        let own = self.link.store.get().and_then(|store| store.traffic()).unwrap_or_default();
        for sample in &mut samples {
            sample.value += match sample.metric.as_str() {
                "headwater_image_requests_total" => own.requests as f64,
                "headwater_image_received_bytes_total" => own.fetched_bytes as f64,
                "headwater_image_failovers_total" => own.failovers as f64,
                "headwater_image_wrong_answers_total" => own.wrong_answers as f64,
                "headwater_image_waits_total" => own.waits as f64,
                "headwater_image_waited_seconds_total" => own.waited_ms as f64 / 1e3,
                _ => 0.0,
            };
        }
        samples
    }

    async fn persistent_keys(&self) -> Result<Vec<PathBuf>, BackendError> {
        self.call("look for persistent disks", Call::PersistentKeys).await
    }

    async fn sweep(&self, keep: &[Uuid]) -> Result<Vec<String>, BackendError> {
        self.call("clean up the overflow directory", Call::Sweep { keep: keep.to_vec() }).await
    }
}

impl DiskHost for DiskClient {
    fn geometry_of(&self, machine: &str) -> Result<Option<Geometry>, BackendError> {
        let call = Call::GeometryOf { machine: machine.to_owned() };
        Ok(self.link.call::<Option<PlainGeometry>>(&call)?.map(Geometry::from))
    }

    fn geometry_over(&self, version: &ImageVersion) -> Result<Geometry, BackendError> {
        let call = Call::GeometryOver { version: version.clone() };
        self.link.call::<PlainGeometry>(&call).map(Geometry::from)
    }

    fn is_begun(&self, kept: PersistentDiskRef) -> bool {
        self.link.call(&Call::IsBegun { kept }).unwrap_or_else(|error| {
            tracing::warn!(disk = %kept.id, %error, "cannot look for a persistent disk");
            false
        })
    }

    fn open_reader(&self, machine: &str) -> Result<Option<OpenReader>, BackendError> {
        self.reader(&Call::ReadMachine { machine: machine.to_owned() })
    }

    fn read_persistent(&self, request: &PersistentDiskRequest) -> Result<OpenReader, BackendError> {
        let reader = self.reader(&Call::ReadPersistent { request: Box::new(request.clone()) })?;
        reader.ok_or_else(super::protocol::not_open)
    }

    fn boot_traces(&self) -> Arc<dyn BootTraces> {
        match self.link.store.get() {
            Some(store) if !store.is_read_only() => {
                let traces = Traces::new(Arc::clone(store), ChunkCache::new(NO_CHUNKS_BYTES));
                Arc::new(StoreTraces { link: Arc::clone(&self.link), traces })
            }
            // Traces are kept with the chunk cache of the disk process.
            _ => Arc::clone(&self.link) as Arc<dyn BootTraces>,
        }
    }

    fn reads_wait(&self) -> Option<String> {
        self.link.figures()?.reads_wait.clone()
    }

    fn close_store(&self) {
        if let Err(error) = self.link.call::<()>(&Call::CloseStore) {
            tracing::warn!(%error, "cannot make the disk process fail the reads that wait for the store");
        }
    }
}

/// A disk in the disk process. Dropping this does not close the disk.
struct RemoteDisk {
    link: Arc<Link>,
    uuid: Uuid,
    socket: PathBuf,
    sector_bytes: u32,
    is_persistent: bool,
}

impl RemoteDisk {
    /// Makes a call from a function that cannot be async. Other tasks move to other threads of the daemon, however
    /// long the disk process takes.
    fn call<T: DeserializeOwned>(&self, call: &Call) -> Result<T, BackendError> {
        in_place(|| self.link.call(call))
    }

    /// Makes a call without an answer. A failure is only logged.
    fn tell(&self, call: &Call) {
        if let Err(error) = self.call::<()>(call) {
            tracing::warn!(disk = %self.uuid, %error, "cannot send a call to the disk process");
        }
    }
}

/// Runs blocking work on this thread, and moves the tasks of this thread to another one.
fn in_place<T>(work: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    if matches!(flavor, Ok(RuntimeFlavor::MultiThread)) { tokio::task::block_in_place(work) } else { work() }
}

#[async_trait]
impl Disk for RemoteDisk {
    fn socket(&self) -> &Path {
        &self.socket
    }

    fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    fn counters(&self) -> DiskCounters {
        self.link.of_disk(self.uuid).map(|disk| disk.counters).unwrap_or_default()
    }

    fn has_booted(&self) {
        self.tell(&Call::HasBooted { uuid: self.uuid });
    }

    fn metrics(&self) -> Vec<Sample> {
        self.link.of_disk(self.uuid).map(|disk| disk.metrics).unwrap_or_default()
    }

    fn check_limits(&self, cache: &CacheSettings) -> Result<(), BackendError> {
        self.call(&Call::CheckLimits { uuid: self.uuid, cache: *cache })
    }

    fn set_limits(&self, cache: &CacheSettings) {
        self.tell(&Call::SetLimits { uuid: self.uuid, cache: *cache });
    }

    fn shortage(&self) -> Option<Shortage> {
        let disk = self.link.of_disk(self.uuid);
        if self.link.is_silent() {
            return Some(Shortage {
                message: "the process that has its disk does not answer, and the machine waits".to_owned(),
                advice:
                    "see whether that process ('headwater disks') is stopped, or a disk of the host hangs"
                        .to_owned(),
            });
        }
        disk?.shortage
    }

    fn relieve(&self) {
        // The disk process has just been asked for a shortage: if that had no answer, this would wait for one.
        if self.link.silent_since.lock().is_some() {
            return;
        }
        self.tell(&Call::Relieve { uuid: self.uuid });
    }

    fn can_freeze(&self) -> Result<(), BackendError> {
        self.call(&Call::CanFreeze { uuid: self.uuid })
    }

    fn freeze(&self) -> Result<Box<dyn FrozenDisk>, BackendError> {
        in_place(|| RemoteFrozen::open(&self.link, &Call::Freeze { uuid: self.uuid }))
    }

    async fn contents(&self, control: Arc<TaskControl>) -> Result<CacheContents, BackendError> {
        let (link, call) = (Arc::clone(&self.link), Call::Contents { uuid: self.uuid });
        blocking("scan the write cache", move || link.cancellable(&call, &control)).await
    }

    async fn close(&self) -> Result<(), BackendError> {
        let (link, uuid, is_persistent) = (Arc::clone(&self.link), self.uuid, self.is_persistent);
        blocking("close the disk", move || link.close_disk(uuid, is_persistent)).await
    }

    async fn lost(&self) -> String {
        let mut lost = self.link.lost.subscribe();
        // Its sender lives as long as the disk.
        if lost.wait_for(|lost| lost.contains(&self.uuid)).await.is_err() {
            std::future::pending::<()>().await;
        }
        "its disk was lost when the disk process crashed; the log of the disk process says why".to_owned()
    }
}

/// A frozen disk in the disk process, which thaws it when the connection ends.
struct RemoteFrozen {
    link: Arc<Link>,
    connection: Arc<Mutex<Connection>>,
    geometry: Geometry,
    below: ImageVersion,
}

impl RemoteFrozen {
    fn open(link: &Arc<Link>, call: &Call) -> Result<Box<dyn FrozenDisk>, BackendError> {
        let (connection, opened) = link.ask(call, None, &|| Waiting::GoOn)?;
        let OpenedFrozen { geometry, below } = opened?;
        connection.writing.set_read_timeout(Some(LOOK_INTERVAL)).map_err(gone)?;
        let connection = Arc::new(Mutex::new(connection));
        Ok(Box::new(Self { link: Arc::clone(link), connection, geometry: geometry.into(), below }))
    }

    fn make_version(
        &self,
        order: &SealOrder,
        control: &Arc<TaskControl>,
    ) -> Result<SealOutcome, BackendError> {
        let connection = Arc::clone(&self.connection);
        let changes = move |range: ByteRange, max: usize| {
            let call = Call::Changed { offset: range.offset(), len: range.len(), max };
            let runs = connection.lock().call::<Vec<(u64, bool)>>(&call);
            runs.unwrap_or_else(|error| {
                // The next read fails, and then the seal.
                tracing::warn!(%error, "cannot fetch the changed ranges of a disk, so its seal fails");
                vec![(range.len(), true)]
            })
        };
        let source = Arc::new(RemoteDevice::new(self.geometry, Arc::clone(&self.connection)));
        frozen::seal(&**self.link.store.wait(), &self.below, source, Arc::new(changes), order, control)
    }
}

#[async_trait]
impl FrozenDisk for RemoteFrozen {
    async fn identity_left(
        &self,
        given: Given,
        control: Arc<TaskControl>,
    ) -> Result<IdentityLeft, BackendError> {
        let connection = Arc::clone(&self.connection);
        blocking("look for the machine's identity", move || {
            let mut report = |now: headwater_api::Progress| match now.doing {
                Some(doing) => control.report_doing(doing),
                None => control.report(now.done_bytes, now.total_bytes),
            };
            let call = Call::IdentityLeft { given: given.into() };
            connection.lock().long_call(&call, &mut report, &|| Waiting::unless_cancelled(&control))
        })
        .await
    }

    async fn seal(
        self: Box<Self>,
        order: SealOrder,
        control: Arc<TaskControl>,
    ) -> Result<SealOutcome, BackendError> {
        blocking("make a version", move || self.make_version(&order, &control)).await
    }
}

/// The boot traces of a store that this process writes. The disk process records them.
struct StoreTraces {
    link: Arc<Link>,
    traces: Traces,
}

impl StoreTraces {
    /// Waits until all recorded boots are in the store.
    fn settle(&self) {
        let begun = Instant::now();
        while self.link.figures().is_some_and(|figures| figures.waiting_traces > 0) {
            if begun.elapsed() > TRACES_PATIENCE {
                tracing::warn!("a boot that was just recorded is not in the store yet");
                return;
            }
            std::thread::sleep(FRESH);
        }
    }
}

impl BootTraces for StoreTraces {
    fn unrecorded(&self) -> Option<String> {
        BootTraces::unrecorded(&*self.link)
    }

    fn find(&self, manifest: Hash) -> Result<Option<(Trace, Place)>, BackendError> {
        self.settle();
        Ok(self.traces.find(manifest))
    }

    fn merge(&self, boots: Trace) -> Result<(Trace, Place), BackendError> {
        self.settle();
        self.traces.merge(boots).map_err(image_failed)
    }

    fn remove(&self, manifest: Hash) -> Result<(), BackendError> {
        self.settle();
        self.traces.remove(manifest).map_err(image_failed)
    }
}

impl BootTraces for Link {
    fn unrecorded(&self) -> Option<String> {
        self.figures()?.unrecorded.clone()
    }

    fn find(&self, manifest: Hash) -> Result<Option<(Trace, Place)>, BackendError> {
        let found: Option<FoundTrace> = self.call(&Call::FindTrace { manifest: manifest.to_string() })?;
        found.map(decoded).transpose()
    }

    fn merge(&self, boots: Trace) -> Result<(Trace, Place), BackendError> {
        decoded(self.call(&Call::MergeTrace { trace: boots.encode() })?)
    }

    fn remove(&self, manifest: Hash) -> Result<(), BackendError> {
        self.call(&Call::RemoveTrace { manifest: manifest.to_string() })
    }
}

fn decoded(found: FoundTrace) -> Result<(Trace, Place), BackendError> {
    let trace = Trace::decode(&found.trace).map_err(image_failed)?;
    Ok((trace, if found.is_of_host { Place::Host } else { Place::Store }))
}

impl Link {
    /// Makes a call about the last known state of a store. A failure counts as "nothing is known".
    fn kept<T: DeserializeOwned + Default>(&self, call: &Call) -> T {
        self.call(call).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot use the last known state of the store");
            T::default()
        })
    }
}

impl KnownStore for Link {
    fn keep_store(&self, store: &str, chunk_bytes: u32) {
        self.kept::<Value>(&Call::KeepStore { store: store.to_owned(), chunk_bytes });
    }

    fn kept_store(&self, store: &str) -> Option<(u32, SystemTime)> {
        self.kept(&Call::KeptStore { store: store.to_owned() })
    }

    fn keep_image(&self, store: &str, image: &Image) {
        match image.encode() {
            Ok(bytes) => {
                let (store, name) = (store.to_owned(), image.name.to_string());
                self.kept::<Value>(&Call::KeepImage { store, name, image: bytes });
            }
            Err(error) => {
                tracing::warn!(image = %image.name, %error, "cannot keep the last known state of an image")
            }
        }
    }

    fn kept_image(&self, store: &str, name: &ImageName) -> Option<(Image, SystemTime)> {
        let (bytes, at): (Vec<u8>, SystemTime) =
            self.kept::<Option<_>>(&Call::KeptImage { store: store.to_owned(), name: name.to_string() })?;
        Some((Image::decode(name, &bytes).ok()?, at))
    }

    fn forget_image(&self, store: &str, name: &ImageName) {
        self.kept::<Value>(&Call::ForgetImage { store: store.to_owned(), name: name.to_string() });
    }
}

#[cfg(test)]
mod tests;
