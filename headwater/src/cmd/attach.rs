//! `headwater attach`, `detach` and `attachments`: makes a volume a block device of this kernel. The process serves
//! the device until it is removed; `orphans.rs` handles devices whose process died.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_attach::{
    AttachError, Attached, Intent, Mark, Options, Owner, Record, Registry, Way, choose, is_in_use,
    is_waiting, owner, write_through,
};
use headwater_block::Device;
use headwater_nbd::{Address, Limits, Server, SingleExport};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::cli::{AttachArgs, DetachArgs, Via};
use crate::cmd::orphans::{
    KernelDevices, NAMES_DIR, OrphanAction, RECORDS_TIMEOUT, clear, clear_all, forget, kept,
    settle_unless_left,
};
use crate::cmd::persistent::Kept;
use crate::show;

/// Where records of attached devices are, and the sockets of the kernel's NBD client.
const RUN_DIR: &str = "/run/headwater/attached";

/// How long `detach` waits for a server to end.
const DETACH_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a device's removal at the end of a server, which then closes the volume anyway: less than
/// [`DETACH_TIMEOUT`].
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an attach waits for other attaches.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a server checks whether somebody else has removed its device.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A device by its kernel name.
type KernelDevice = (Way, u32);

/// An attached device.
pub struct AttachedDisk {
    attached: Attached,
    record: Record,
    server: Option<Server>,
    why: String,
}

impl AttachedDisk {
    /// Path of the device.
    pub fn path(&self) -> String {
        self.record.device()
    }

    /// The path of the device, and the user's own name for it if there is one.
    pub fn names(&self) -> Vec<String> {
        std::iter::once(self.record.device()).chain(self.record.name.clone()).collect()
    }

    /// Removes the device and its record in the background. Returns a handle that waits for it, with a timeout:
    /// writes of the kernel may wait for space until the volume is closed.
    pub fn stop(self) -> Stopping {
        let device = self.record.device();
        let (done, stopped) = mpsc::channel();
        let work = move || {
            self.remove();
            let _ = done.send(());
        };
        let thread = std::thread::Builder::new().name("detach".into()).spawn(work);
        let thread = thread
            .inspect_err(|e| tracing::error!("cannot start the thread that removes {device}: {e}"))
            .ok();
        if stopped.recv_timeout(STOP_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "{device} was not removed within {} s; the remaining requests will fail",
                STOP_TIMEOUT.as_secs()
            );
        }
        Stopping(thread)
    }

    fn remove(self) {
        let Self { attached, record, server, .. } = self;
        if is_in_use(record.way, record.number) {
            tracing::warn!("removing {} while it is in use; its users get errors", record.device());
        }
        let is_gone = attached.stop();
        drop(server);
        if is_gone {
            forget(&registry(), &record);
        } else {
            tracing::warn!("{}", kept(&record));
        }
    }
}

/// A device that is being removed. Dropping this waits for the removal.
pub struct Stopping(Option<JoinHandle<()>>);

impl Drop for Stopping {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take()
            && thread.join().is_err()
        {
            tracing::error!("internal error: the removal of a device panicked; please report this as a bug");
        }
    }
}

impl AttachArgs {
    /// Attaches `device` if that was requested. `kept` is the persistent cache with its contents, if there is one.
    pub fn serve(
        &self,
        source: &str,
        kept: Option<&Kept>,
        device: &Arc<dyn Device>,
    ) -> anyhow::Result<Option<AttachedDisk>> {
        if !self.attach {
            return Ok(None);
        }
        let failed = || format!("cannot attach '{source}'");
        // Check this before anything on this host is searched or removed.
        let (name, asked) = self.asked().with_context(failed)?;
        if !rustix::process::geteuid().is_root() {
            let text =
                "a block device can only be made by root; run it as root, or use --fuse and a loop device";
            return Err(Problem::new(ProblemKind::Failed, text)).with_context(failed);
        }
        // Each way of attaching can use it.
        let device = Arc::clone(device);
        let device = if self.write_through { write_through(device) } else { device };
        let geometry = device.geometry();
        // Only if nothing that was answered can be lost with this process.
        let survives = geometry.read_only || (kept.is_some() && self.write_through);
        let identity = identity(source, kept, geometry.size_bytes);
        let kept_in = kept.map(|kept| kept.dir.as_path());
        let fate = |record: &Record| {
            let is_meant = self.device.as_deref().is_none_or(|device| record.is_meant_by(device));
            match OrphanAction::of(record, &identity, kept_in) {
                OrphanAction::GoesOn if !survives || !is_meant => OrphanAction::Waits,
                fate => fate,
            }
        };
        // Held until the device is recorded: two concurrent attaches could take the same name, or resume the same
        // device.
        let lock = registry().turn(LOCK_TIMEOUT).with_context(failed)?;
        let waiting = clear_all(&registry(), &KernelDevices, fate).with_context(failed)?;
        let is_free = |name| check_free(&registry(), name, waiting.as_ref());
        name.as_deref().map_or(Ok(()), is_free).with_context(failed)?;
        let (way, why) = match &waiting {
            Some(record) => (record.way, "its former server died, and the kernel kept the device".into()),
            None => {
                let asked_way = asked.map(|(way, _)| way).or(self.via.map(Via::way));
                choose(asked_way).map_err(problem).with_context(failed)?
            }
        };
        let server = match way {
            Way::Ublk => None,
            Way::Nbd => {
                if self.queues > 1 {
                    tracing::warn!("--queues {} is for ublk: kernel NBD has one connection", self.queues);
                }
                Some(nbd_server(source, &device).with_context(failed)?)
            }
        };
        let mark = waiting.as_ref().map_or_else(Mark::of_this_thread, Record::mark);
        let options = Options {
            number: asked.map(|(_, number)| number),
            queues: self.queues,
            survives,
            resume: waiting.as_ref().map(|record| record.number),
            nbd_socket: nbd_socket(),
            mark,
            ..Options::default()
        };
        // A device that is resumed is found by its existing record.
        let intended = if waiting.is_some() { None } else { Some(Intended::new(way, mark)) };
        let intended = intended.transpose().with_context(failed)?;
        let attached = Attached::start(way, &device, &options).map_err(problem).with_context(failed)?;
        // The kernel is connected; nobody else needs the socket.
        let _ = std::fs::remove_file(nbd_socket());
        let name = name.or_else(|| waiting.and_then(|record| record.name));
        let record = Record::of_this_process(way, attached.number(), name, source.into(), identity, survives);
        let record = Record { made_by: Some(mark), kept_in: kept_in.map(Path::to_owned), ..record };
        note(&record).with_context(failed)?;
        if let Some(intended) = intended {
            intended.settle();
        }
        drop(lock);
        Ok(Some(AttachedDisk { attached, record, server, why }))
    }

    /// The user's own name, and the kernel's number if the name is the kernel's.
    fn asked(&self) -> Result<(Option<String>, Option<KernelDevice>), Problem> {
        let Some(text) = &self.device else { return Ok((None, None)) };
        let plain = text.strip_prefix("/dev/").unwrap_or(text);
        for (way, prefix) in [(Way::Ublk, "ublkb"), (Way::Nbd, "nbd")] {
            if let Some(number) = plain.strip_prefix(prefix).and_then(|digits| digits.parse().ok()) {
                if let Some(via) = self.via.filter(|via| via.way() != way) {
                    let text = format!("{plain} is not a device of --via {}", via.text());
                    return Err(Problem::new(ProblemKind::Invalid, text));
                }
                return Ok((None, Some((way, number))));
            }
        }
        let is_name = (1..=63).contains(&plain.len())
            && plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
            && !plain.starts_with('.');
        if !is_name {
            let text =
                format!("'{text}' is not a name for a device: use 1 to 63 letters, digits, '-', '_' and '.'");
            return Err(Problem::new(ProblemKind::Invalid, text));
        }
        Ok((Some(plain.to_owned()), None))
    }
}

impl Via {
    fn way(self) -> Way {
        match self {
            Via::Ublk => Way::Ublk,
            Via::Nbd => Way::Nbd,
        }
    }

    /// The name on the command line.
    fn text(self) -> &'static str {
        match self {
            Via::Ublk => "ublk",
            Via::Nbd => "nbd",
        }
    }
}

/// A note about a device that is about to be attached. If it is dropped before the device is recorded, the attach has
/// failed. Declared before the device, so that the device is removed first.
struct Intended(Option<Intent>);

impl Intended {
    fn new(way: Way, mark: Mark) -> anyhow::Result<Self> {
        let intent = Intent { way, mark };
        registry().intend(&intent).with_context(|| format!("cannot write a record to {RUN_DIR}"))?;
        Ok(Self(Some(intent)))
    }

    /// Removes the note: the device has a record now.
    fn settle(mut self) {
        self.0.take().iter().for_each(|intent| settled(registry().settle(intent)));
    }
}

impl Drop for Intended {
    fn drop(&mut self) {
        self.0.iter().for_each(|intent| settled(settle_unless_left(&registry(), &KernelDevices, intent)));
    }
}

fn settled(result: std::io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!("cannot remove a record in {RUN_DIR}: {error}");
    }
}

/// The identity that another server must have to resume a device. Names are not enough: another cache may have the
/// same.
fn identity(source: &str, kept: Option<&Kept>, size_bytes: u64) -> String {
    let what = kept.map_or_else(|| source.to_owned(), Kept::identity);
    format!("{what}|{size_bytes}")
}

/// Fails if another device has the name: one that is served, or one that waits for its server, which will return with
/// that name. Orphans were removed before. `ours` is the record of the device to resume.
fn check_free(registry: &Registry, name: &str, ours: Option<&Record>) -> anyhow::Result<()> {
    let is_ours = |record: &Record| ours.is_some_and(|ours| ours.device() == record.device());
    let others = registry.all()?.into_iter().find(|record| record.is_meant_by(name) && !is_ours(record));
    let Some(other) = others else { return Ok(()) };
    let waits = if other.is_served() {
        String::new()
    } else {
        format!(", which waits for the server of '{}'", other.source)
    };
    let text = format!(
        "a device with the name '{name}' exists already: {}{waits}; detach it or choose another name",
        other.device()
    );
    Err(Problem::new(ProblemKind::Conflict, text).into())
}

/// Prints to standard error how a device is attached, and why in this way.
pub fn explain(disk: &AttachedDisk) {
    let (path, way, why) = (disk.path(), disk.record.way, &disk.why);
    show::aside(&format!("headwater: {path} is attached by {way}: {why}\n"));
}

/// Waits until somebody else has removed the device; forever if there is none.
pub async fn gone(disk: Option<&AttachedDisk>) {
    match disk {
        Some(disk) => loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if disk.attached.is_gone() {
                return;
            }
        },
        None => std::future::pending().await,
    }
}

/// `headwater detach`.
pub fn detach(args: &DetachArgs, json: bool) -> anyhow::Result<u8> {
    let device = detached(args)?;
    if json {
        show::removed(&[device])?;
    }
    Ok(0)
}

/// Detaches a device, and returns its path.
fn detached(args: &DetachArgs) -> anyhow::Result<String> {
    let failed = || format!("cannot detach '{}'", args.device);
    let record = registry().all()?.into_iter().find(|record| record.is_meant_by(&args.device));
    let record = record.ok_or_else(|| {
        let text = "no such device was attached by headwater; 'headwater attachments' lists them";
        Problem::new(ProblemKind::NotFound, text)
    });
    let record = record.with_context(failed)?;
    let unknown = || Err(Problem::new(ProblemKind::Failed, kept(&record))).with_context(failed);
    if !record.is_served() {
        match owner(record.way, record.number, &record.mark()) {
            Owner::Others => {
                forget(&registry(), &record);
                let text = format!("its server died, and {} now belongs to another program", record.device());
                return Err(Problem::new(ProblemKind::NotFound, text)).with_context(failed);
            }
            Owner::Unknown => return unknown(),
            Owner::Ours | Owner::Nobody => {}
        }
    }
    if !args.force && is_in_use(record.way, record.number) {
        let text = format!("{} is mounted or otherwise in use; umount it, or give --force", record.device());
        return Err(Problem::new(ProblemKind::Conflict, text)).with_context(failed);
    }
    if !record.is_served() {
        if clear(&registry(), &KernelDevices, &record) == Owner::Unknown {
            return unknown();
        }
        return Ok(record.device());
    }
    ask_to_end(&record).with_context(failed)?;
    let start = Instant::now();
    while record.is_served() {
        if start.elapsed() > DETACH_TIMEOUT {
            anyhow::bail!(
                "cannot detach '{}': process {} got SIGTERM and did not end within {} s; its log says what it waits for",
                args.device,
                record.pid,
                DETACH_TIMEOUT.as_secs()
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    // If the server could not remove the device, or was killed, its record still exists.
    let is_left = registry().all()?.contains(&record);
    if is_left && clear(&registry(), &KernelDevices, &record) == Owner::Unknown {
        return unknown();
    }
    Ok(record.device())
}

/// Asks the server of a device to end. Succeeds if it has ended already.
fn ask_to_end(record: &Record) -> anyhow::Result<()> {
    let pid = i32::try_from(record.pid)
        .ok()
        .and_then(Pid::from_raw)
        .context("its record has an invalid process id")?;
    let ended = |result: Result<(), Errno>| match result {
        Err(Errno::SRCH) => Ok(()),
        other => other.context("cannot send SIGTERM to its process"),
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        // Check the record again with the process handle open: meanwhile the process id may belong to another
        // process.
        Ok(process) if record.is_served() => ended(pidfd_send_signal(&process, Signal::TERM)),
        Ok(_) => Ok(()),
        Err(error) => ended(Err(error)),
    }
}

/// `headwater attachments`.
pub fn list(json: bool) -> anyhow::Result<u8> {
    let records = registry().all()?;
    if json {
        show::json(&records)?;
        return Ok(0);
    }
    let rows = records.into_iter().map(|record| {
        let state =
            if record.is_served() { format!("served by process {}", record.pid) } else { left(&record) };
        let device = record.device();
        vec![device, record.name.unwrap_or_default(), record.source, record.way.to_string(), state]
    });
    show::table(&["DEVICE", "NAME", "SOURCE", "VIA", "STATE"], rows)?;
    Ok(0)
}

/// The state of a device whose server died, in words.
fn left(record: &Record) -> String {
    let (way, number, mark) = (record.way, record.number, record.mark());
    if record.survives && is_waiting(way, number, &mark) == Some(true) {
        return "its process died; requests wait until the same command is started again".into();
    }
    match owner(way, number, &mark) {
        Owner::Ours | Owner::Nobody => {
            "its process died; the next attach or detach removes the device".into()
        }
        Owner::Others => {
            "belongs to another program now; the next attach or detach removes the record".into()
        }
        Owner::Unknown if !rustix::process::geteuid().is_root() => {
            "its process died; only root can see to which program it belongs now".into()
        }
        Owner::Unknown => {
            "its process died, and the kernel does not report to which program it belongs now".into()
        }
    }
}

fn registry() -> Registry {
    Registry::new(RUN_DIR)
}

fn nbd_socket() -> PathBuf {
    Path::new(RUN_DIR).join(format!("{}.sock", std::process::id()))
}

fn nbd_server(source: &str, device: &Arc<dyn Device>) -> anyhow::Result<Server> {
    std::fs::create_dir_all(RUN_DIR).with_context(|| format!("cannot create {RUN_DIR}"))?;
    let export = SingleExport::new(Arc::clone(device), source.to_owned());
    Ok(Server::bind(Address::Unix(nbd_socket()), export, Limits::default())?)
}

/// Writes the record, and creates the user's own name.
fn note(record: &Record) -> anyhow::Result<()> {
    // Held until the name exists: another process may be about to remove an old record with this number, and its
    // name.
    let lock = registry().lock_records(RECORDS_TIMEOUT);
    let recorded = lock.and_then(|lock| registry().record(record).map(|()| lock));
    let _lock = recorded.with_context(|| format!("cannot write a record to {RUN_DIR}"))?;
    let Some(name) = &record.name else { return Ok(()) };
    let link = Path::new(NAMES_DIR).join(name);
    let made = std::fs::create_dir_all(NAMES_DIR).and_then(|()| {
        // A link that a dead server left.
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(record.device(), &link)
    });
    made.with_context(|| format!("cannot make {}", link.display()))
}

/// The problem with the kind that determines the exit code.
fn problem(error: AttachError) -> anyhow::Error {
    match &error {
        AttachError::Taken { .. } => Problem::new(ProblemKind::Conflict, error.to_string()).into(),
        AttachError::Missing(_) | AttachError::System { .. } => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_with_the_number_of_a_server_is_left_alone() {
        use std::os::unix::process::ExitStatusExt;

        let mut other = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let ours = Record::of_this_process(Way::Ublk, 3, None, "win11".into(), "id".into(), false);
        ask_to_end(&Record { pid: other.id(), started: 0, ..ours }).unwrap();
        other.kill().unwrap();
        assert_eq!(other.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn a_name_is_free_when_no_device_has_it_that_is_served_or_waits() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let served =
            Record::of_this_process(Way::Ublk, 3, Some("lab".into()), "win11".into(), "id".into(), true);
        // Its process is dead. Devices that were not to survive were removed before names are checked.
        let waits =
            Record { number: 4, name: Some("desk".into()), started: served.started + 1, ..served.clone() };
        registry.record(&served).unwrap();
        registry.record(&waits).unwrap();
        assert!(check_free(&registry, "other", None).is_ok());
        let refused = |name, ours| check_free(&registry, name, ours).unwrap_err().to_string();
        assert!(refused("lab", None).contains("/dev/ublkb3; detach it"));
        assert!(refused("desk", None).contains("/dev/ublkb4, which waits for the server of 'win11'"));
        // Its own server returns.
        assert!(check_free(&registry, "desk", Some(&waits)).is_ok());
        assert!(refused("lab", Some(&waits)).contains("/dev/ublkb3"));
    }
}
