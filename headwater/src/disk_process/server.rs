//! The disk process: serves the daemon's calls (open, close, snapshot, limits) on `DIR/disks.sock`. Requests of guests do not pass here:
//! each disk has a socket of its own for QEMU. Disks themselves are opened by [`crate::adapters::disks`].
//!
//! Order: `prepare` (descriptors from the keeper, settings from the first daemon, sandbox), `serve`, recovery of the disks of the process
//! before this one, one thread for each connection. It ends by closing all disks, or by handing them over to the next process.

mod calls;
mod late_open;
mod recovery;
mod running;

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_image::DiskCache;
use headwater_service::backend::{BackendError, Disk, Disks, OpenDisk};
use headwater_store::{Access, LocalDir, Store};
use parking_lot::Mutex;
use sd_notify::NotifyState;
use serde_json::Value;
use tokio::runtime::Handle;
use uuid::Uuid;

use self::late_open::LateOpen;
use self::running::RunningCalls;
use super::first_call::{self, Early};
use super::kept::{Handed, Keeper, LISTENER, LOCK};
use super::notifier::Notifier;
use super::protocol::{DiskSnapshot, Failure, Snapshot, VERSION, Welcome, not_open, problem_of};
use super::sandbox::Sandbox;
use super::settings::Settings;
use super::upgrade::HANDED_OVER;
use crate::adapters::disk_host::{DiskHost, KnownStore};
use crate::adapters::disks::{Directories, Volumes};
use crate::data_dir::DataDir;
use crate::failure;
use crate::last_known::LastKnown;
use crate::signals::EndSignals;
use crate::traces::TraceOutbox;

/// The interval at which the process checks whether to end, and reports the progress of calls.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// The time that the process requests from the service manager at once, while disks are closed.
const MORE_TIME: Duration = Duration::from_secs(60);

/// How often it is checked whether calls that change disks have ended.
const CALLS_LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// How long such a call may take before an upgrade is refused. A disk that is opened may wait for the store.
const CALLS_WITHIN: Duration = Duration::from_secs(10);

/// How long persistent disks may take to be saved before an upgrade is refused.
const SAVED_WITHIN: Duration = Duration::from_secs(20);

/// How the disk process runs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Ends when no daemon is connected and no disk is open.
    pub ends_unused: bool,
}

/// An open disk.
struct Entry {
    info: OpenDisk,
    disk: Arc<dyn Disk>,
    is_persistent: bool,
}

/// The chunk cache, once it is open.
struct Host {
    chunk_cache: Option<Arc<DiskCache>>,
}

/// The store and the write caches, once the daemon has opened the store.
struct OpenStore {
    volumes: Arc<Volumes>,
    /// The queue of boot traces for a store that the daemon writes.
    outbox: Option<Arc<TraceOutbox>>,
}

/// The state that all connections share.
struct Shared {
    /// The settings of the first daemon.
    settings: Settings,
    sandbox: Sandbox,
    host: OnceLock<Host>,
    opened: LateOpen<OpenStore>,
    /// Held while the chunk cache or the store is opened.
    beginning: Mutex<()>,
    disks: Mutex<BTreeMap<Uuid, Entry>>,
    holds: AtomicUsize,
    is_ending: AtomicBool,
    /// Keeps the disks for the next disk process.
    keeper: Arc<Keeper>,
    /// This process takes the place of another one.
    is_next: bool,
    /// The same, and its daemon has not come again yet.
    is_replacement: AtomicBool,
    started: Instant,
    /// Disks of the process before this one are taken over.
    is_recovering: AtomicBool,
    calls: RunningCalls,
    /// Reads of images fail: a daemon that stops does not wait for the store.
    is_store_closed: AtomicBool,
    options: Options,
    runtime: Handle,
}

/// A disk process that has its settings, and has given up all permissions that they do not need.
pub struct Prepared {
    lock: Option<OwnedFd>,
    socket: PathBuf,
    listener: UnixListener,
    connections: Vec<Early>,
    settings: Settings,
    sandbox: Sandbox,
    notifier: Notifier,
    options: Options,
    keeper: Keeper,
    /// What the keeper held for the disk process before this one, if that crashed or handed over.
    left: Option<Handed>,
}

/// Waits for the first daemon and its settings, and gives up what they do not need. No other thread runs yet. `None`: no daemon
/// has a use for this process.
pub fn prepare(data_dir: &DataDir, options: Options) -> anyhow::Result<Option<Prepared>> {
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    anyhow::ensure!(threads == 1, "the disk process cannot restrict itself: {threads} threads run already");
    let (keeper, mut handed) = Keeper::connect()?;
    // It is held for as long as one of the two processes lives.
    let lock = handed.take(LOCK);
    let socket = data_dir.disks_socket();
    let listener = match handed.take(LISTENER) {
        Some(listener) => listener.into(),
        None => {
            let listener = bind(&socket)?;
            keeper.put(LISTENER, &listener).context("the keeper has ended")?;
            listener
        }
    };
    let notifier = Notifier::connect();
    notifier.say(&NotifyState::Ready);
    let (settings, connections, left) = match handed.settings()? {
        Some(settings) => (settings, Vec::new(), Some(handed)),
        None => {
            keeper.serves().context("the keeper has ended")?;
            let Some((settings, connections)) = first_call::wait(&listener, &socket, options)? else {
                return Ok(None);
            };
            keeper.put_settings(&settings)?;
            (settings, connections, None)
        }
    };
    let sandbox = settings.needs(data_dir).restrict().context("cannot start the disk process")?;
    Ok(Some(Prepared {
        lock,
        socket,
        listener,
        connections,
        settings,
        sandbox,
        notifier,
        options,
        keeper,
        left,
    }))
}

impl Prepared {
    /// Serves until it is not needed any more, or a signal comes. Closes all disks then, or hands them over. Returns the exit code.
    pub async fn serve(self) -> anyhow::Result<u8> {
        let Self { lock: _lock, socket, listener, connections, settings, sandbox, notifier, options, .. } =
            self;
        let (keeper, left) = (Arc::new(self.keeper), self.left);
        // The end of a terminal is the end of its daemon, and not of the machines.
        let mut signals = EndSignals::catch_with(false)?;
        let _hang_up = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
        let mut hand_over = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::user_defined1())?;
        tracing::info!(pid = std::process::id(), socket = %socket.display(), "serving disks");
        sandbox.log();
        let shared = Arc::new(Shared {
            settings,
            sandbox,
            host: OnceLock::new(),
            opened: LateOpen::default(),
            beginning: Mutex::new(()),
            disks: Mutex::default(),
            holds: AtomicUsize::new(connections.iter().filter(|connection| connection.is_held).count()),
            is_ending: AtomicBool::new(false),
            keeper,
            is_next: left.is_some(),
            is_replacement: AtomicBool::new(left.is_some()),
            started: Instant::now(),
            is_recovering: AtomicBool::new(left.is_some()),
            calls: RunningCalls::default(),
            is_store_closed: AtomicBool::new(false),
            options,
            runtime: Handle::current(),
        });
        for connection in connections {
            serve_on_thread(connection, &shared)?;
        }
        let (accepting, closing) = (Arc::clone(&shared), listener.try_clone()?);
        let accept = move || {
            // Daemons wait for this.
            if let Some(left) = left {
                accepting.recover(left);
                accepting.is_recovering.store(false, Ordering::SeqCst);
            }
            // Without a keeper nobody waits for it.
            let _ = accepting.keeper.serves();
            accept(&listener, &accepting);
        };
        std::thread::Builder::new().name("hw-disks".into()).spawn(accept)?;
        let why = loop {
            tokio::select! {
                signal = signals.next() => break format!("told to by {signal}"),
                _ = hand_over.recv() => match shared.hand_over().await? {
                    Ok(()) => return Ok(HANDED_OVER),
                    Err(why) => shared.refuse_hand_over(why),
                },
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
            if matches!(socket.try_exists(), Ok(false)) {
                break "its socket was removed".to_owned();
            }
            if shared.is_unused() {
                break "no daemon uses it, and no disk is open".to_owned();
            }
        };
        shared.is_ending.store(true, Ordering::SeqCst);
        tracing::info!("ending: {why}");
        shared.close_all(&notifier).await;
        // Before the lock goes: whoever waits for that would reach this process again. Its socket cannot be removed from here.
        rustix::net::shutdown(&closing, rustix::net::Shutdown::Read)
            .context("cannot refuse further connections")?;
        Ok(0)
    }
}

/// Takes the lock of the disks. Fails if another process has it.
pub fn lock(data_dir: &DataDir) -> anyhow::Result<File> {
    let path = data_dir.disks_lock();
    let failed = || format!("cannot open {}", path.display());
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .with_context(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // The holder is only for the message.
            let _ = file.read_to_string(&mut holder);
            let message = format!(
                "process {} serves the disks of {} already",
                holder.trim(),
                data_dir.path().display()
            );
            let advice = "machines may be on: start 'headwater serve', and stop them";
            return Err(Problem::new(ProblemKind::Conflict, message).advise(advice).into());
        }
        Err(TryLockError::Error(e)) => return Err(e).with_context(failed),
    }
    file.set_len(0)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .and_then(|_| write!(file, "{}", std::process::id()))
        .with_context(failed)?;
    Ok(file)
}

fn bind(socket: &Path) -> anyhow::Result<UnixListener> {
    let failed = || format!("cannot listen on {}", socket.display());
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e).with_context(failed),
        _ => {}
    }
    // A process that can connect controls all disks, so only the owner may connect, from the start.
    let private = socket.with_extension("new");
    let _ = std::fs::remove_file(&private);
    let listener = UnixListener::bind(&private).with_context(failed)?;
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&private, socket))
        .with_context(failed)?;
    Ok(listener)
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        let connection = stream.map(|stream| Early { stream, is_held: false, call: None });
        if let Err(error) = connection.and_then(|connection| serve_on_thread(connection, shared)) {
            if shared.is_ending.load(Ordering::SeqCst) {
                return;
            }
            tracing::warn!(%error, "cannot serve a daemon");
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

fn serve_on_thread(connection: Early, shared: &Arc<Shared>) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    let serving = std::thread::Builder::new().name("hw-disk-call".into());
    serving.spawn(move || calls::serve(connection, &shared)).map(drop)
}

impl Shared {
    fn is_unused(&self) -> bool {
        if self.is_ending.load(Ordering::SeqCst) {
            return true;
        }
        let is_held = self.holds.load(Ordering::SeqCst) > 0
            || self.is_recovering.load(Ordering::SeqCst)
            || (self.is_replacement.load(Ordering::SeqCst) && self.started.elapsed() < first_call::PATIENCE);
        self.options.ends_unused && !is_held && self.disks.lock().is_empty()
    }

    /// Answers what machines have asked for, saves persistent disks, and leaves all disks to the next process. Daemons connect again.
    /// The inner error says why not; the disks are served as before then, once calls are begun again.
    async fn hand_over(&self) -> anyhow::Result<Result<(), String>> {
        self.calls.close();
        if !self.changes_end(CALLS_WITHIN).await {
            let within = CALLS_WITHIN.as_secs();
            let text = format!(
                "a disk is still being opened or closed after {within} s: try again, and see whether the store answers"
            );
            return Ok(Err(text));
        }
        // Without a store, this process has taken over no disk, and takes over none any more: the keeper holds all.
        let Some(volumes) = self.opened.get_or_refuse().map(|opened| Arc::clone(&opened.volumes)) else {
            return Ok(Ok(()));
        };
        let checked = Arc::clone(&volumes);
        let checking = tokio::task::spawn_blocking(move || checked.can_hand_over());
        match tokio::time::timeout(SAVED_WITHIN, checking).await {
            Err(_) => {
                let within = SAVED_WITHIN.as_secs();
                return Ok(Err(format!(
                    "persistent disks are not saved after {within} s: try again, and see whether a disk of the host hangs"
                )));
            }
            Ok(Err(error)) => return Ok(Err(format!("cannot check the disks: {error}"))),
            Ok(Ok(Err(error))) => return Ok(Err(Failure::from(&error).into_problem().to_string())),
            Ok(Ok(Ok(()))) => {}
        }
        tracing::info!(disks = self.disks.lock().len(), "the disks are handed over to another program");
        let handing = tokio::task::spawn_blocking(move || volumes.hand_over());
        handing.await.context("cannot hand the disks over")?;
        Ok(Ok(()))
    }

    /// Goes on with the disks, because they cannot be handed over.
    fn refuse_hand_over(&self, why: String) {
        tracing::error!("the disks are not handed over to another program: {why}");
        self.calls.open();
        // Without a keeper nobody asks.
        let _ = self.keeper.refuses(why);
    }

    /// Waits until no call changes a disk. `false`: one still does.
    async fn changes_end(&self, within: Duration) -> bool {
        let begun = Instant::now();
        while self.calls.changes() > 0 {
            if begun.elapsed() > within {
                return false;
            }
            tokio::time::sleep(CALLS_LOOK_INTERVAL).await;
        }
        true
    }

    async fn close_all(&self, notifier: &Notifier) {
        if let Some(opened) = self.opened.get() {
            // A guest whose reads wait would hold the end up, and its disk goes anyway.
            opened.volumes.close_store();
        }
        // The disks stay in the list: a daemon that closes one of them at the same time waits for the same closing, and gets its outcome.
        let named = |entry: &Entry| (entry.info.machine.clone(), Arc::clone(&entry.disk));
        let disks: Vec<_> = self.disks.lock().values().map(named).collect();
        let mut closing = tokio::task::JoinSet::new();
        for (machine, disk) in disks {
            tracing::warn!(machine, "its disk is closed: the disk process ends");
            closing.spawn(async move {
                if let Err(error) = disk.close().await {
                    let problem = problem_of(&error);
                    tracing::error!(machine, "closing the disk of a machine failed: {problem}");
                }
            });
        }
        let mut late = tokio::time::interval(MORE_TIME / 3);
        loop {
            tokio::select! {
                biased;
                _ = late.tick() => {
                    let more = u32::try_from(MORE_TIME.as_micros()).unwrap_or(u32::MAX);
                    notifier.say(&NotifyState::ExtendTimeoutUsec(more));
                }
                closed = closing.join_next() => if closed.is_none() { break },
            }
        }
        // The answers of closings at the same time are sent, and openings have ended.
        self.changes_end(MORE_TIME / 3).await;
        let opened_late = std::mem::take(&mut *self.disks.lock());
        for Entry { info, disk, .. } in opened_late.into_values() {
            // A disk that is closed already has nothing to save.
            if let Err(error) = disk.close().await {
                let problem = problem_of(&error);
                tracing::error!(machine = info.machine, "closing the disk of a machine failed: {problem}");
            }
        }
    }

    fn opened_volumes(&self) -> Option<Arc<Volumes>> {
        self.opened.get().map(|opened| Arc::clone(&opened.volumes))
    }

    fn volumes(&self) -> Result<Arc<Volumes>, BackendError> {
        if let Some(volumes) = self.opened_volumes() {
            return Ok(volumes);
        }
        if self.is_next {
            // The daemon had the process before this one open the store, or it would not call.
            self.open_store().map_err(|error| Failure::of(failure::problem(&error)))?;
        }
        self.opened_volumes().ok_or_else(too_early)
    }

    fn disk(&self, uuid: Uuid) -> Result<Arc<dyn Disk>, BackendError> {
        self.disks.lock().get(&uuid).map(|entry| Arc::clone(&entry.disk)).ok_or_else(not_open)
    }

    fn begin(
        &self,
        version: u32,
        settings: Value,
        say: &mut dyn FnMut(&'static str),
    ) -> anyhow::Result<Welcome> {
        let _alone = self.beginning.lock();
        let is_idle = self.disks.lock().is_empty();
        let ends = || {
            self.is_ending.store(true, Ordering::SeqCst);
            Ok(Welcome::Ends { restarted: !self.options.ends_unused })
        };
        if self.is_ending.load(Ordering::SeqCst) {
            return ends();
        }
        if version != VERSION {
            if is_idle {
                return ends();
            }
            let message = format!(
                "the daemon uses version {version} of the protocol, and the disk process uses version {VERSION}"
            );
            let advice = if version > VERSION {
                "machines are on: 'headwater upgrade' has the disk process run the daemon's program"
            } else {
                "machines are on: restart the daemon with the program of the disk process"
            };
            return Err(Problem::new(ProblemKind::Conflict, message).advise(advice).into());
        }
        let settings: Settings = serde_json::from_value(settings).context("cannot parse the settings")?;
        let is_usable = self.settings == settings && !self.is_store_closed.load(Ordering::SeqCst);
        if is_idle && (!is_usable || self.sandbox.has_moved()) {
            return ends();
        }
        if !is_usable && !self.settings.is_same_store(&settings) {
            let message = "machines are on, and their disks use another store";
            let advice = "start the daemon with that store, and stop the machines first";
            return Err(Problem::new(ProblemKind::Conflict, message).advise(advice).into());
        }
        if self.settings.stream().chunk_cache.is_some() {
            say("opening the chunk cache");
        }
        self.open_host()?;
        self.is_replacement.store(false, Ordering::SeqCst);
        Ok(if is_usable { Welcome::Ready } else { Welcome::EarlierSettings })
    }

    /// Opens the chunk cache, if it is not open. The caller has the lock `beginning`.
    fn open_host(&self) -> anyhow::Result<()> {
        if self.host.get().is_none() {
            let chunk_cache = self.settings.stream().open_disk()?;
            let _ = self.host.set(Host { chunk_cache });
        }
        Ok(())
    }

    /// Opens the chunk cache, the store and the write caches, if they are not open.
    fn open_store(&self) -> anyhow::Result<()> {
        let _alone = self.beginning.lock();
        self.open_host()?;
        let host = self.host.get().context("the chunk cache is not open")?;
        if self.opened.get().is_none() {
            let opened = open(&self.settings, host.chunk_cache.clone(), &self.keeper)?;
            anyhow::ensure!(self.opened.set(opened), "the disks are handed over to another program");
        }
        Ok(())
    }

    fn snapshot(&self) -> Result<Snapshot, BackendError> {
        let volumes = self.opened_volumes().ok_or_else(too_early)?;
        let disks: Vec<_> =
            self.disks.lock().iter().map(|(uuid, entry)| (*uuid, Arc::clone(&entry.disk))).collect();
        let of_disk = |disk: &dyn Disk| DiskSnapshot {
            counters: disk.counters(),
            metrics: disk.metrics(),
            shortage: disk.shortage(),
        };
        Ok(Snapshot {
            host_ram: volumes.host_ram(),
            metrics: volumes.metrics(),
            reads_wait: DiskHost::reads_wait(&*volumes),
            unrecorded: volumes.boot_traces().unrecorded(),
            waiting_traces: self.outbox().map_or(0, |outbox| outbox.len()),
            disks: disks.iter().map(|(uuid, disk)| (*uuid, of_disk(&**disk))).collect(),
        })
    }

    fn outbox(&self) -> Option<&TraceOutbox> {
        self.opened.get()?.outbox.as_deref()
    }

    fn known(&self) -> Option<&DiskCache> {
        self.host.get()?.chunk_cache.as_deref()
    }
}

fn too_early() -> BackendError {
    BackendError::new(ProblemKind::Conflict, "the disk process has not opened the store")
}

/// Opens the store and the write caches.
fn open(
    settings: &Settings,
    chunk_cache: Option<Arc<DiskCache>>,
    keeper: &Arc<Keeper>,
) -> anyhow::Result<OpenStore> {
    let known = chunk_cache.clone().map(|cache| cache as Arc<dyn KnownStore>);
    // The daemon writes the store, and only one process of a host does.
    let store: Arc<dyn Store> = match settings.store() {
        Some(name) => LastKnown::new(name, known).open(Access::Read, &settings.credentials())?,
        None => Arc::new(LocalDir::open(&settings.own_store(), Access::Read)?),
    };
    let is_written = settings.store().is_none_or(|name| !crate::stores::is_server(name));
    let outbox = is_written.then(Arc::<TraceOutbox>::default);
    let volumes = Volumes::new(
        store,
        Directories {
            overflow: settings.cache_dir(),
            keys: settings.keys_dir(),
            recordings: settings.recordings_dir(),
        },
        settings.caches(),
        &settings.stream(),
        chunk_cache,
        outbox.clone(),
    );
    let volumes = volumes.map_err(|error| anyhow::Error::new(Failure::from(&error).into_problem()))?;
    Ok(OpenStore { volumes: Arc::new(volumes.kept_by(Arc::clone(keeper))), outbox })
}
