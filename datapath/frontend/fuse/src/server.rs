//! The server of one volume: the mount, and the threads that answer the kernel.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use headwater_block::{Device, FaultLog};
use parking_lot::{Condvar, Mutex};

use crate::channel::Channel;
use crate::clone::clone_device;
use crate::data::Disk;
use crate::files::Files;
use crate::flow::{Gate, InFlight};
use crate::limits::Limits;
use crate::mount::{Mount, MountError, Unmounted};
use crate::parts;
use crate::reader::Reader;

/// Stack of a thread; buffers are on the heap.
const STACK_BYTES: usize = 256 << 10;

/// After this time, a stop logs what it waits for.
const LOG_AFTER: Duration = Duration::from_secs(1);

/// The name of the file, the users that may access it, its clock, the callback for an unmount, and limits.
pub struct Options {
    /// Name of the file in the directory.
    pub name: String,
    /// Whether users other than the server's own may access the directory, as far as the file's permissions
    /// allow. The file belongs to the server's user, who can `chmod` and `chown` it.
    pub allow_other: bool,
    /// The clock for the file's times; 1970 by default.
    pub clock: fn() -> SystemTime,
    /// Called once if the directory is unmounted by another program.
    pub on_unmounted: Option<Box<dyn FnOnce() + Send>>,
    /// Limits.
    pub limits: Limits,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "disk".into(),
            allow_other: false,
            clock: || SystemTime::UNIX_EPOCH,
            on_unmounted: None,
            limits: Limits::default(),
        }
    }
}

/// A mounted file. Dropping it unmounts the directory.
pub struct Server {
    mount: Mount,
    path: PathBuf,
    disk: Arc<Disk>,
    stop_timeout: Duration,
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    is_stopping: AtomicBool,
    readers_left: AtomicUsize,
    threads_left: Mutex<usize>,
    thread_ended: Condvar,
    on_unmounted: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Server {
    /// Mounts `device` as a file in `dir`, which can be used when this returns, and serves it until
    /// [`Server::stop`] or until the directory is unmounted by another program.
    pub fn mount(dir: &Path, device: Arc<dyn Device>, options: Options) -> Result<Self, MountError> {
        let Options { name, allow_other, clock, on_unmounted, limits } = options;
        let limits = limits.sane();
        let is_name =
            (1..=255).contains(&name.len()) && !name.contains(['/', '\0']) && name != "." && name != "..";
        if !is_name {
            return Err(MountError::Name { name });
        }
        let geometry = device.geometry();
        let (mount, session) = Mount::new(dir, geometry.read_only, allow_other)?;
        let path = mount.dir().join(&name);
        // Writes of partial blocks, for the thread in `parts`.
        let (parts, jobs) = mpsc::channel();
        let disk = Arc::new(Disk {
            device,
            geometry,
            gate: Gate::new(),
            in_flight: InFlight::new(limits.bytes_in_flight),
            faults: FaultLog::new("fuse", limits.warnings_per_10_s),
            name: path.display().to_string(),
            written: AtomicBool::new(false),
            parts: Mutex::new(Some(parts)),
        });
        let files = Arc::new(Files::new(Arc::clone(&disk), name.into_bytes(), clock, allow_other));
        let readers: Vec<Reader> = channels(session, limits.readers)
            .into_iter()
            .map(|channel| {
                Reader::new(Arc::clone(&disk), Arc::clone(&files), channel, limits.background_requests)
            })
            .collect();
        let shared = Arc::new(Shared {
            is_stopping: AtomicBool::new(false),
            readers_left: AtomicUsize::new(readers.len()),
            threads_left: Mutex::new(0),
            thread_ended: Condvar::new(),
            on_unmounted: Mutex::new(on_unmounted),
        });
        // From here on, dropping this value after a failure unmounts.
        let stop_timeout = Duration::from_millis(limits.stop_timeout_ms);
        let threads = Mutex::default();
        let server = Self { mount, path, disk: Arc::clone(&disk), stop_timeout, shared, threads };
        server.start(disk, readers, jobs).map_err(|source| MountError::System { dir: dir.into(), source })?;
        Ok(server)
    }

    fn start(
        &self,
        disk: Arc<Disk>,
        readers: Vec<Reader>,
        jobs: mpsc::Receiver<parts::Job>,
    ) -> std::io::Result<()> {
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let builder = std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
            let left = Left::new(&self.shared);
            let work = move || {
                let _left = left;
                work();
            };
            builder.spawn(work).map(|thread| self.threads.lock().push(thread))
        };
        spawn("fuse-parts", Box::new(move || parts::run(&disk, &jobs)))?;
        for mut reader in readers {
            let shared = Arc::clone(&self.shared);
            spawn(
                "fuse-reader",
                Box::new(move || {
                    while reader.serve_one().is_some() {}
                    reader.disk.end();
                    shared.leave(&reader);
                }),
            )?;
        }
        Ok(())
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts, and waits up to [`Limits::stop_timeout_ms`] for the threads to end: for readers, for requests that the
    /// device has not answered, and for changes of parts of blocks. Programs that still have the file open get errors
    /// from then on; that is logged. Exception: if a helper program made the mount, the mount and the threads stay until
    /// these programs close the file. A second call does nothing.
    pub fn stop(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        if self.shared.is_stopping.swap(true, Ordering::SeqCst) {
            return;
        }
        let shown = self.path.display();
        match self.mount.unmount() {
            Ok(Unmounted::Cleanly) => {}
            Ok(Unmounted::WhileBusy) => {
                tracing::warn!("fuse: {shown} is unmounted while programs use it; they get errors now")
            }
            Ok(Unmounted::Later) => {
                tracing::warn!(
                    "fuse: {shown} is unmounted while programs use it; the mount stays until they close the file"
                );
                return;
            }
            Err(error) => {
                tracing::error!("fuse: cannot unmount {shown}: {error}; run: umount {shown}");
                return;
            }
        }
        self.disk.end();
        if !self.wait_for_threads() {
            return;
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("fuse: a thread of {shown} has panicked");
            }
        }
    }
}

impl Server {
    /// Waits for the threads to end; returns whether they did in time. Logs what it waits for if that takes
    /// long.
    fn wait_for_threads(&self) -> bool {
        let shown = self.path.display();
        let waited_for = || match self.shared.readers_left.load(Ordering::SeqCst) {
            0 => {
                "an unfinished write of less than one block; the volume may be waiting for write cache space or for image data"
            }
            _ => "programs that still use the unmounted file, or a request that the volume has not answered",
        };
        let quiet = LOG_AFTER.min(self.stop_timeout);
        if self.shared.wait_for_threads(quiet) {
            return true;
        }
        let left_s = (self.stop_timeout - quiet).as_secs_f64();
        tracing::info!("fuse: {shown} is unmounted; waiting up to {left_s:.0} s for {}", waited_for());
        let have_ended = self.shared.wait_for_threads(self.stop_timeout - quiet);
        if !have_ended {
            let waited_ms = self.stop_timeout.as_millis();
            tracing::warn!("fuse: {shown}: gave up after {waited_ms} ms of waiting for {}", waited_for());
        }
        have_ended
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Counts a thread until it ends, including by a panic.
struct Left(Arc<Shared>);

impl Left {
    fn new(shared: &Arc<Shared>) -> Self {
        *shared.threads_left.lock() += 1;
        Self(Arc::clone(shared))
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let mut left = self.0.threads_left.lock();
        *left = left.saturating_sub(1);
        self.0.thread_ended.notify_all();
    }
}

impl Shared {
    fn wait_for_threads(&self, timeout: Duration) -> bool {
        let mut left = self.threads_left.lock();
        !self.thread_ended.wait_while_for(&mut left, |left| *left > 0, timeout).timed_out()
    }

    /// Called by each reader at its end; the last one ends the partial-block thread and reports the unmount.
    fn leave(&self, reader: &Reader) {
        if self.readers_left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        drop(reader.disk.parts.lock().take());
        let on_unmounted = self.on_unmounted.lock().take();
        if !self.is_stopping.load(Ordering::SeqCst)
            && let Some(tell) = on_unmounted
        {
            tell();
        }
    }
}

/// A channel for each reader: with queues of their own if the kernel provides them, or else with a shared
/// queue.
fn channels(session: OwnedFd, readers: u16) -> Vec<Arc<Channel>> {
    let mut all: Vec<Arc<Channel>> = Vec::new();
    for _ in 1..readers {
        match clone_device(session.as_fd()) {
            Ok(device) => all.push(Arc::new(Channel::new(device))),
            Err(errno) => {
                // The user may not open the device if a helper has mounted for the user.
                tracing::debug!("fuse: readers share one queue: {errno}");
                break;
            }
        }
    }
    let session = Arc::new(Channel::new(session));
    let missing = usize::from(readers).saturating_sub(all.len());
    all.extend(std::iter::repeat_n(session, missing));
    all
}
