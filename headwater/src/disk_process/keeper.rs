//! The keeper: the parent of the disk process. It holds what the next disk process needs (the descriptors of the memory of write caches, of
//! overflow files, keys, the socket and the settings), and starts that process if one crashes. `headwater disks` runs it. It serves no disk.
//!
//! ```text
//!   headwater disks (keeper) --starts, hands all descriptors over--> headwater disks (disk process)
//!          ^------------------- put NAME, remove NAME ------------------------------+
//! ```
//! It holds descriptors under names, and never maps or reads one. A disk process that ends with code 0 was asked to end, and so the
//! keeper ends too.
//!
//! | the disk process ended | next |
//! |---|---|
//! | with code 0, or the keeper was told to end | the keeper ends |
//! | by SIGKILL, from somebody, or from the kernel because memory is short | another one, always |
//! | otherwise, while it took a disk over, and it was the third time within a minute | another one, without that disk |
//! | otherwise, for the fourth time within a minute | the keeper ends, and all machines with it |
//! | after it was told to hand its disks over ([`super::upgrade`]) | that of the new program. If it refuses to hand them over, it does not end. If it is late, it is killed, unless a persistent disk may be in use: then it does not end |
//! | after it was told to give its disks back, because it is the new program's and does not serve them in time | that of the old program. If it cannot save persistent disks, it does not end, and the new program goes on |
//! | otherwise | another one; after two times within a minute it takes the disks over one by one, and waits after each |

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

use super::kept::{LISTENER, LOCK, MEMORY, Message, SETTINGS, is_of, is_request, receive, send, watched};
use super::server::lock;
use super::upgrade::{self, Asked, HANDED_OVER, Versions};
use crate::adapters::persistent_disks;
use crate::data_dir::DataDir;
use crate::signals::EndSignals;

/// How often a disk process may crash within [`CRASHES_WITHIN`] before the keeper gives up.
const MAX_CRASHES: usize = 3;
/// The crash, within that time, after which a disk is given up that is being taken over.
const MAX_CRASHES_OF_A_DISK: usize = 3;
/// The crashes after which disks are taken over one by one.
const CRASHES_UNTIL_CAREFUL: usize = 2;
const CRASHES_WITHIN: Duration = Duration::from_secs(60);

/// How long a disk process may take to hand its disks over, or to give them back. A persistent disk is saved then.
const HANDS_OVER_WITHIN: Duration = Duration::from_secs(60);
/// How long a new program may take to end if all disks are held here: it has none to save.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// How long the reader of the marks of persistent disks may take. The disk of the host may hang.
const MARKS_WITHIN: Duration = Duration::from_secs(5);
/// How long the disk process of a new program may take to serve the disks.
const SERVES_WITHIN: Duration = Duration::from_secs(10);

/// The pause after a connection of `headwater upgrade` could not be accepted, for instance for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Only the child of a keeper has this variable.
const KEPT: &str = "HEADWATER_KEPT";
const CAREFUL: &str = "careful";

/// Only a disk process that an upgrade tries has this variable.
const TRIED: &str = "HEADWATER_TRIED";

/// Whether an upgrade tries this program: if it cannot take all disks over, the old program serves again.
pub fn is_tried() -> bool {
    std::env::var_os(TRIED).is_some()
}

/// Whether a keeper has started this process.
pub fn is_kept() -> bool {
    std::env::var_os(KEPT).is_some()
}

/// Whether this process is to take the disks over one by one: the ones before it have crashed, and one of the disks may be why.
pub fn is_careful() -> bool {
    std::env::var_os(KEPT).is_some_and(|how| how == CAREFUL)
}

/// Keeps disk processes until one ends in order, or too many crash. Returns the exit code.
pub fn keep(data_dir: &DataDir) -> anyhow::Result<u8> {
    let lock = lock(data_dir)?;
    let mut kept = BTreeMap::from([(LOCK.to_owned(), OwnedFd::from(lock))]);
    match memory_directory(data_dir) {
        Ok(directory) => drop(kept.insert(MEMORY.to_owned(), directory)),
        Err(why) => tracing::debug!("the memory of write caches has no tmpfs with huge pages: {why}"),
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let control = upgrade::listen(data_dir)?;
    runtime.context("cannot start the keeper of disks")?.block_on(keep_on(kept, control, data_dir.keys()))
}

/// A tmpfs that was mounted for the memory of write caches, below the data directory.
fn memory_directory(data_dir: &DataDir) -> Result<OwnedFd, String> {
    /// `fstatfs` names a tmpfs so.
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    let path = data_dir.memory();
    let failed = |error: rustix::io::Errno| format!("{}: {error}", path.display());
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let directory = rustix::fs::open(path.as_path(), flags, rustix::fs::Mode::empty()).map_err(failed)?;
    let is_tmpfs = rustix::fs::fstatfs(&directory).map_err(failed)?.f_type == TMPFS_MAGIC;
    if is_tmpfs { Ok(directory) } else { Err(format!("{} is not a tmpfs", path.display())) }
}

/// The state of the keeper.
struct Keeping {
    /// The descriptors that the keeper holds, by name.
    kept: BTreeMap<String, OwnedFd>,
    /// The UUID of the machine whose disk is being taken over, or nothing.
    taken_over: String,
    /// The directory of the marks of persistent disks.
    keys: PathBuf,
    crashes: Crashes,
    /// The program of disk processes. `None`: that of the keeper.
    program: Option<OwnedFd>,
    /// The versions of that program.
    versions: Versions,
    /// The disk process has taken all disks over.
    is_serving: bool,
    /// When the disk process last took over a disk, or said which disk is next.
    progress: Instant,
    upgrade: Option<Upgrade>,
}

/// An upgrade under way.
struct Upgrade {
    asked: Asked,
    versions: Versions,
    begun: Instant,
    step: Step,
    /// How many disks the new program gets.
    disks: usize,
}

/// The step of an upgrade that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The old disk process hands its disks over.
    HandsOver,
    /// The disk process of the new program takes them over.
    TakesOver,
    /// It was late, and gives them back since then.
    GivesBack(Instant),
}

impl Upgrade {
    /// Gives it up: the old program serves the disks again.
    async fn go_back(self, why: &str) {
        let text = format!("{why}; the old program serves the disks again, and the log says more");
        self.asked.answer(Err(text)).await;
    }
}

/// What happens next while a disk process runs.
enum Event {
    Ended(ExitStatus),
    Signal(&'static str),
    Message(std::io::Result<Option<Message<OwnedFd>>>),
    Asked(std::io::Result<OwnedFd>),
    Late,
}

/// How a disk process ended.
struct End {
    status: ExitStatus,
    is_asked: bool,
}

/// When disk processes crashed, within [`CRASHES_WITHIN`].
#[derive(Default)]
struct Crashes(VecDeque<Instant>);

/// What follows a crash.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    /// Without the disk that was being taken over.
    Fence,
    GiveUp,
}

impl Crashes {
    fn count(&mut self, now: Instant, is_of_a_disk: bool) -> Next {
        self.0.push_back(now);
        self.0.retain(|at| now.duration_since(*at) < CRASHES_WITHIN);
        if is_of_a_disk && self.0.len() >= MAX_CRASHES_OF_A_DISK {
            // The others have nothing to do with them.
            self.0.clear();
            return Next::Fence;
        }
        if self.0.len() > MAX_CRASHES { Next::GiveUp } else { Next::GoOn }
    }

    fn is_careful(&self) -> bool {
        self.0.len() >= CRASHES_UNTIL_CAREFUL
    }
}

async fn keep_on(kept: BTreeMap<String, OwnedFd>, control: OwnedFd, keys: PathBuf) -> anyhow::Result<u8> {
    let mut signals = EndSignals::catch_with(false)?;
    let _hang_up = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    let control = watched(control).context("cannot start the keeper of disks")?;
    let mut keeping = Keeping {
        kept,
        taken_over: String::new(),
        keys,
        crashes: Crashes::default(),
        program: None,
        versions: Versions::own(),
        is_serving: false,
        progress: Instant::now(),
        upgrade: None,
    };
    loop {
        let End { status, is_asked } = keeping.run_one(&mut signals, &control).await?;
        if keeping.goes_on_with_upgrade(status, is_asked).await {
            continue;
        }
        if is_asked || status.success() || !keeping.kept.contains_key(SETTINGS) {
            // Nobody has used the process, or somebody has ended it.
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.unwrap_or(1));
        }
        keeping.after_crash(status)?;
    }
}

impl Keeping {
    /// Decides whether there is another disk process, and with which disks.
    fn after_crash(&mut self, status: ExitStatus) -> anyhow::Result<()> {
        let uuid = std::mem::take(&mut self.taken_over);
        if status.code() == Some(i32::from(HANDED_OVER)) {
            return Ok(());
        }
        if status.signal() == Some(Signal::KILL.as_raw()) {
            // That is no mistake of the process, so it is not counted.
            tracing::error!("the disk process was killed: the next one takes its disks over");
            return Ok(());
        }
        match self.crashes.count(Instant::now(), !uuid.is_empty()) {
            Next::GoOn => {
                tracing::error!(
                    disks = self.disks(),
                    "the disk process has crashed ({status}): the next one takes its disks over"
                );
                Ok(())
            }
            Next::Fence => {
                tracing::error!(
                    uuid,
                    "a disk is given up, and its machine with it: the disk process has crashed {MAX_CRASHES_OF_A_DISK} times within {} s, \
                     the last time ({status}) when it took this disk over; the log of the disk process says why",
                    CRASHES_WITHIN.as_secs()
                );
                self.kept.retain(|name, _| !is_of(name, &uuid));
                Ok(())
            }
            Next::GiveUp => {
                let message = format!(
                    "the disk process has crashed {} times within {} s, the last time with {status}",
                    self.crashes.0.len(),
                    CRASHES_WITHIN.as_secs()
                );
                let advice = "what its machines wrote is lost; its log says why it crashed";
                Err(Problem::new(ProblemKind::Failed, message).advise(advice).into())
            }
        }
    }

    /// Goes on with an upgrade after a disk process has ended. `false`: there is none, or no disk process is to follow.
    async fn goes_on_with_upgrade(&mut self, status: ExitStatus, is_asked: bool) -> bool {
        let Some(mut upgrade) = self.upgrade.take() else { return false };
        let is_tried = upgrade.step != Step::HandsOver;
        if is_asked || (status.success() && !is_tried) {
            upgrade.asked.answer(Err("the disk process was told to end meanwhile".to_owned())).await;
            return false;
        }
        self.taken_over.clear();
        if let Step::GivesBack(_) = upgrade.step {
            let why =
                format!("the new program has not served the disks within {} s", SERVES_WITHIN.as_secs());
            upgrade.go_back(&why).await;
        } else if is_tried {
            let why = format!("the new program has ended before it served the disks ({status})");
            upgrade.go_back(&why).await;
        } else {
            if status.code() != Some(i32::from(HANDED_OVER)) {
                tracing::error!("the disk process has crashed while it handed its disks over ({status})");
            }
            upgrade.step = Step::TakesOver;
            self.upgrade = Some(upgrade);
        }
        true
    }

    /// The disk process has taken all disks over. That ends an upgrade.
    async fn serves(&mut self) {
        self.is_serving = true;
        if let Some(upgrade) = self.upgrade.take_if(|upgrade| upgrade.step == Step::TakesOver) {
            let machines = match upgrade.disks {
                1 => "1 machine".to_owned(),
                disks => format!("{disks} machines"),
            };
            let took_ms = upgrade.begun.elapsed().as_millis();
            let text = format!(
                "version {} serves the disks of {machines} after {took_ms} ms",
                upgrade.versions.program()
            );
            self.adopt(upgrade, Ok(text)).await;
        }
    }

    /// Ends an upgrade: the new program is that of this disk process and later ones.
    async fn adopt(&mut self, upgrade: Upgrade, outcome: Result<String, String>) {
        if let Ok(program) = upgrade.asked.program.try_clone() {
            self.program = Some(program);
            self.versions = upgrade.versions;
        }
        upgrade.asked.answer(outcome).await;
    }

    /// Begins an upgrade that a user asks for, if the new program fits.
    async fn begin_upgrade(&mut self, asked: Asked, child: &Child) {
        if !self.is_serving || self.upgrade.is_some() {
            let text = "the disk process is just starting; try again in a moment; nothing has changed";
            return asked.answer(Err(text.to_owned())).await;
        }
        if self.crashes.is_careful() {
            let text = "disk processes have crashed within the last minute; try again in a minute; nothing has changed";
            return asked.answer(Err(text.to_owned())).await;
        }
        if is_stopped(child) {
            let text = "the disk process is stopped (SIGSTOP): have it go on (SIGCONT), and try again; nothing has changed";
            return asked.answer(Err(text.to_owned())).await;
        }
        match upgrade::check(&asked.program, &self.versions).await {
            Err(why) => asked.answer(Err(why)).await,
            Ok(versions) => {
                let version = versions.program();
                tracing::info!(version, "an upgrade begins: the disk process is told to hand its disks over");
                tell(child, Signal::USR1);
                let (begun, step) = (Instant::now(), Step::HandsOver);
                self.upgrade = Some(Upgrade { asked, versions, begun, step, disks: 0 });
            }
        }
    }

    /// The disk process does not hand its disks over, and goes on.
    async fn refuses(&mut self, id: u32, why: String) {
        let Some(upgrade) = self.upgrade.take_if(|upgrade| upgrade.step != Step::TakesOver) else { return };
        if upgrade.step == Step::HandsOver {
            upgrade.asked.answer(Err(format!("{why}; nothing has changed"))).await;
        } else {
            self.go_on_late(upgrade, id, &why).await;
        }
    }

    /// The new program has not taken all disks over in time, and cannot give them back either.
    async fn go_on_late(&mut self, upgrade: Upgrade, id: u32, why: &str) {
        let text = format!(
            "the new program (process {id}) has not served the disks within {} s, and does not give them back ({why}): it goes on, because persistent \
             disks would lose their last writes with it; see whether a disk of the host hangs",
            SERVES_WITHIN.as_secs()
        );
        self.adopt(upgrade, Err(text)).await;
    }

    /// A step of an upgrade is late. A disk process that may have persistent disks is not killed: their last writes are nowhere else.
    /// Returns whether it was killed.
    async fn late(&mut self, child: &Child) -> bool {
        let Some(mut upgrade) = self.upgrade.take() else { return false };
        let within = HANDS_OVER_WITHIN.as_secs();
        match upgrade.step {
            Step::HandsOver => {
                // Stopped, so that no use of a persistent disk begins between the look and the kill.
                let is_stopped = is_stopped(child);
                tell(child, Signal::STOP);
                let Err(why) = no_persistent_disk(self.keys.clone()).await else {
                    tracing::error!(
                        "the disk process has not handed its disks over after {within} s, and no machine uses a persistent disk: it is killed"
                    );
                    self.upgrade = Some(upgrade);
                    tell(child, Signal::KILL);
                    return true;
                };
                if !is_stopped {
                    tell(child, Signal::CONT);
                }
                let id = child.id().unwrap_or_default();
                let text = format!(
                    "disk process {id} has not handed its disks over after {within} s, and is left alone, because {why}: see whether a \
                     disk of the host hangs; if guests wait, 'kill -KILL {id}' has another process take over all disks except persistent ones, \
                     which lose what was not flushed"
                );
                upgrade.asked.answer(Err(text)).await;
                false
            }
            Step::TakesOver => {
                tracing::error!(
                    "the new program has not served the disks within {} s: the keeper tells it to give them back, and starts the old program \
                     again after that",
                    SERVES_WITHIN.as_secs()
                );
                upgrade.step = Step::GivesBack(Instant::now());
                self.upgrade = Some(upgrade);
                tell(child, Signal::USR1);
                false
            }
            // All are held here.
            Step::GivesBack(_) if self.disks() >= upgrade.disks => {
                tracing::error!(
                    "the new program has given all disks back, and has not ended within {} s: it is killed, and the old program serves the \
                     disks again",
                    ENDS_WITHIN.as_secs()
                );
                self.upgrade = Some(upgrade);
                tell(child, Signal::KILL);
                true
            }
            Step::GivesBack(_) => {
                let id = child.id().unwrap_or_default();
                self.go_on_late(upgrade, id, &format!("it does not answer within {within} s")).await;
                false
            }
        }
    }

    /// The number of disks that are held.
    fn disks(&self) -> usize {
        self.kept.keys().filter(|name| is_request(name)).count()
    }

    /// Starts a disk process: of the new program, if there is one to try, and it can be started.
    async fn start(&mut self) -> anyhow::Result<(Child, OwnedFd)> {
        let failed = "cannot start the disk process";
        if let Some(mut upgrade) = self.upgrade.take_if(|upgrade| upgrade.step == Step::TakesOver) {
            upgrade.disks = self.disks();
            let (ours, theirs) = pair().context(failed)?;
            match start(theirs, self.crashes.is_careful(), true, Some(&upgrade.asked.program)) {
                Ok(child) => {
                    self.upgrade = Some(upgrade);
                    return Ok((child, ours));
                }
                Err(error) => upgrade.go_back(&format!("the new program cannot be started: {error}")).await,
            }
        }
        let (ours, theirs) = pair().context(failed)?;
        let child = start(theirs, self.crashes.is_careful(), false, self.program.as_ref()).context(failed)?;
        Ok((child, ours))
    }

    /// When a step of an upgrade is late.
    fn deadline(&self, started: Instant) -> Option<Instant> {
        let upgrade = self.upgrade.as_ref()?;
        Some(match upgrade.step {
            Step::HandsOver => upgrade.begun + HANDS_OVER_WITHIN,
            Step::TakesOver => started.max(self.progress) + SERVES_WITHIN,
            Step::GivesBack(since) if self.disks() >= upgrade.disks => since + ENDS_WITHIN,
            Step::GivesBack(since) => since + HANDS_OVER_WITHIN,
        })
    }

    /// Runs a disk process to its end.
    async fn run_one(&mut self, signals: &mut EndSignals, control: &AsyncFd<OwnedFd>) -> anyhow::Result<End> {
        let failed = "cannot start the disk process";
        self.is_serving = false;
        let (mut child, ours) = self.start().await?;
        let started = Instant::now();
        rustix::io::ioctl_fionbio(&ours, true).context(failed)?;
        let ours = watched(ours).context(failed)?;
        let (mut is_asked, mut is_killed) = (false, false);
        let handing = hand_over(&ours, &self.kept);
        let mut is_open = match self.deadline(started) {
            // A program that is no disk process does not take them.
            Some(until) => tokio::time::timeout_at(until.into(), handing).await.unwrap_or(false),
            None => handing.await,
        };
        let status = loop {
            let deadline = self.deadline(started).filter(|_| !is_killed);
            let until = tokio::time::Instant::from_std(deadline.unwrap_or(started));
            let event = tokio::select! {
                status = child.wait() => Event::Ended(status.context("cannot wait for the disk process")?),
                signal = signals.next() => Event::Signal(signal),
                message = ours.async_io(Interest::READABLE, |socket| receive(socket.as_fd())), if is_open => {
                    Event::Message(message)
                }
                asker = upgrade::accept(control) => Event::Asked(asker),
                () = tokio::time::sleep_until(until), if deadline.is_some() => Event::Late,
            };
            match event {
                Event::Ended(status) => break status,
                Event::Signal(signal) => {
                    tracing::debug!(signal, "the disk process is told to end");
                    is_asked = true;
                    tell(&child, Signal::TERM);
                }
                Event::Message(Ok(Some(Message::Serves))) => self.serves().await,
                Event::Message(Ok(Some(Message::Refuses(why)))) => {
                    self.refuses(child.id().unwrap_or_default(), why).await;
                }
                Event::Message(message) => is_open = self.note(message),
                Event::Asked(Ok(asker)) => {
                    if let Some(asked) = upgrade::receive_program(asker, child.id()).await {
                        self.begin_upgrade(asked, &child).await;
                    }
                }
                Event::Asked(Err(error)) => {
                    tracing::warn!(%error, "cannot accept a connection of 'headwater upgrade'");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                Event::Late => is_killed = self.late(&child).await,
            }
        };
        // What it sent before its end counts.
        while self.note(receive(ours.get_ref().as_fd())) {}
        Ok(End { status, is_asked })
    }

    /// Does what the disk process asks for. `false`: it asks for nothing now, or never again.
    fn note(&mut self, message: std::io::Result<Option<Message<OwnedFd>>>) -> bool {
        match message {
            Ok(Some(Message::Put(name, fd))) => drop(self.kept.insert(name, fd)),
            Ok(Some(Message::Remove(name))) if ![LOCK, LISTENER, MEMORY].contains(&&*name) => {
                self.kept.remove(&name);
            }
            Ok(Some(Message::TakesOver(uuid))) => {
                self.taken_over = uuid;
                self.progress = Instant::now();
            }
            Ok(Some(_)) => {}
            // The message is gone, and the next one can be read.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                tracing::error!(%error, "a machine does not outlive a crash of the disk process, because the keeper could not keep a descriptor of its disk: raise the limit of open files of 'headwater disks' (ulimit -n, LimitNOFILE=), and start the machine again");
            }
            Ok(None) | Err(_) => return false,
        }
        true
    }
}

/// A pair of sockets that keep the boundaries of messages.
fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
}

/// A program as the disk process. Its standard input is the socket of the keeper.
fn start(
    socket: OwnedFd,
    is_careful: bool,
    is_tried: bool,
    program: Option<&OwnedFd>,
) -> std::io::Result<Child> {
    let mut command = upgrade::command(program);
    if is_tried {
        command.env(TRIED, "1");
    }
    command.env(KEPT, if is_careful { CAREFUL } else { "1" }).stdin(Stdio::from(socket)).spawn()
}

/// Whether somebody has stopped a process. It would be taken for one that hangs.
fn is_stopped(child: &Child) -> bool {
    let stat = child.id().and_then(|id| std::fs::read_to_string(format!("/proc/{id}/stat")).ok());
    // The state is after the name of the program, which is in parentheses.
    let state = stat.as_deref().and_then(|stat| stat.rsplit(')').next()).unwrap_or_default();
    state.trim_start().starts_with(['T', 't'])
}

/// Fails if a persistent disk may be in use, and says why.
async fn no_persistent_disk(keys: PathBuf) -> Result<(), String> {
    let (say, said) = tokio::sync::oneshot::channel();
    let place = keys.display().to_string();
    // On a thread of its own, for which nobody waits at the end: the disk of the host may hang.
    let look = move || drop(say.send(persistent_disks::mark_in(&keys)));
    let started = std::thread::Builder::new().name("hw-marks".into()).spawn(look);
    started.map_err(|error| format!("{place} cannot be read ({error})"))?;
    match tokio::time::timeout(MARKS_WITHIN, said).await {
        Ok(Ok(Ok(None))) => Ok(()),
        Ok(Ok(Ok(Some(mark)))) => {
            Err(format!("{} marks a persistent disk that may be in use", mark.display()))
        }
        Ok(Ok(Err(error))) => Err(format!("{place} cannot be read ({error})")),
        Ok(Err(_)) | Err(_) => Err(format!("{place} cannot be read within {} s", MARKS_WITHIN.as_secs())),
    }
}

fn tell(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid
        && let Err(error) = rustix::process::kill_process(pid, signal)
    {
        tracing::warn!(%error, "cannot send a signal to the disk process");
    }
}

/// Gives the disk process all that is kept. `false`: it has ended before it took that.
async fn hand_over(socket: &AsyncFd<OwnedFd>, kept: &BTreeMap<String, OwnedFd>) -> bool {
    for (name, fd) in kept {
        let message = Message::Put(name.clone(), fd);
        let sent = socket.async_io(Interest::WRITABLE, |socket| send(socket.as_fd(), &message));
        if sent.await.is_err() {
            return false;
        }
    }
    let all = Message::<&OwnedFd>::All;
    socket.async_io(Interest::WRITABLE, |socket| send(socket.as_fd(), &all)).await.is_ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use uuid::Uuid;

    use super::*;
    use crate::adapters::persistent_disks::PersistentDiskFiles;

    /// A keeper with an upgrade at a step, for a disk of a machine; the user who waits for it.
    fn upgrading(step: Step, keys: &Path) -> (Keeping, OwnedFd) {
        let (here, there) = pair().unwrap();
        rustix::io::ioctl_fionbio(&there, true).unwrap();
        let program = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
        let asked = Asked::new(program, there).unwrap();
        let (versions, begun) = (Versions::own(), Instant::now());
        let keeping = Keeping {
            kept: BTreeMap::new(),
            taken_over: String::new(),
            keys: keys.to_owned(),
            crashes: Crashes::default(),
            program: None,
            versions: versions.clone(),
            is_serving: false,
            progress: begun,
            upgrade: Some(Upgrade { asked, versions, begun, step, disks: 1 }),
        };
        (keeping, here)
    }

    fn failure(user: &OwnedFd) -> String {
        match receive(user.as_fd()).unwrap() {
            Some(Message::Failed(text)) => text,
            _ => panic!("no failure"),
        }
    }

    #[tokio::test]
    async fn a_late_disk_process_with_persistent_disks_is_not_killed() {
        let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let keys = tempfile::tempdir().unwrap();
        let files = PersistentDiskFiles::new(keys.path().join("cache"), keys.path().to_owned());
        let id = Uuid::from_u128(7);
        files.begin_use(id).unwrap();
        let (mut keeping, user) = upgrading(Step::HandsOver, keys.path());
        assert!(!keeping.late(&child).await && keeping.upgrade.is_none() && keeping.program.is_none());
        let text = failure(&user);
        assert!(text.contains("has not handed its disks over") && text.contains("left alone"), "{text}");
        assert!(text.contains(&format!("disk-{id}.incomplete marks")), "{text}");
        // It goes on.
        headwater_testkit::wait_until("the process goes on", || !is_stopped(&child));
        // A new program has the disk, which is not held here any more.
        let (mut keeping, user) = upgrading(Step::GivesBack(Instant::now()), keys.path());
        assert!(!keeping.late(&child).await && keeping.upgrade.is_none() && keeping.program.is_some());
        let text = failure(&user);
        assert!(text.contains("does not give them back") && text.contains("it goes on"), "{text}");
        assert!(child.try_wait().unwrap().is_none());
        // It has none: it is held here.
        let (mut keeping, user) = upgrading(Step::GivesBack(Instant::now()), keys.path());
        let request = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        keeping.kept.insert("6f1c2a54-0000-4000-8000-000000000001 request".to_owned(), request);
        assert!(keeping.late(&child).await);
        let status = child.wait().await.unwrap();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        assert!(keeping.goes_on_with_upgrade(status, false).await && keeping.program.is_none());
        assert!(failure(&user).contains("the old program serves the disks again"));
    }

    #[tokio::test]
    async fn a_late_disk_process_without_persistent_disks_is_killed_and_the_upgrade_goes_on() {
        let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let keys = tempfile::tempdir().unwrap();
        let files = PersistentDiskFiles::new(keys.path().join("cache"), keys.path().to_owned());
        // The disk was used, and its last writes are saved.
        let id = Uuid::from_u128(7);
        files.begin_use(id).unwrap();
        files.set_incomplete(id, false).unwrap();
        let (mut keeping, _user) = upgrading(Step::HandsOver, keys.path());
        assert!(keeping.late(&child).await);
        let status = child.wait().await.unwrap();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
        assert!(keeping.goes_on_with_upgrade(status, false).await);
        assert!(keeping.upgrade.is_some_and(|upgrade| upgrade.step == Step::TakesOver));
    }

    #[tokio::test]
    async fn a_late_new_program_is_told_to_give_its_disks_back() {
        let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let (mut keeping, user) = upgrading(Step::TakesOver, Path::new("/"));
        assert!(!keeping.late(&child).await);
        // That is no disk process, and so the signal ends it.
        let status = child.wait().await.unwrap();
        assert_eq!(status.signal(), Some(Signal::USR1.as_raw()));
        assert!(keeping.goes_on_with_upgrade(status, false).await && keeping.upgrade.is_none());
        let text = failure(&user);
        assert!(text.contains("has not served the disks within 10 s"), "{text}");
        assert!(text.contains("the old program serves the disks again"), "{text}");
        // A refusal to give them back leaves it in charge.
        let (mut keeping, user) = upgrading(Step::GivesBack(Instant::now()), Path::new("/"));
        keeping.refuses(7, "a persistent disk cannot be saved".to_owned()).await;
        assert!(keeping.upgrade.is_none() && keeping.program.is_some());
        assert!(failure(&user).contains("(a persistent disk cannot be saved): it goes on"));
    }

    #[tokio::test]
    async fn a_new_program_without_a_disk_has_less_time_to_end() {
        let since = Instant::now();
        let (mut keeping, _user) = upgrading(Step::GivesBack(since), Path::new("/"));
        // It has the disk, and may have to save it.
        assert_eq!(keeping.deadline(since), Some(since + HANDS_OVER_WITHIN));
        let request = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        keeping.kept.insert("6f1c2a54-0000-4000-8000-000000000001 request".to_owned(), request);
        assert_eq!(keeping.deadline(since), Some(since + ENDS_WITHIN));
    }

    #[test]
    fn only_crashes_within_a_minute_count() {
        let (mut crashes, begun) = (Crashes::default(), Instant::now());
        for _ in 0..MAX_CRASHES {
            assert_eq!(crashes.count(begun, false), Next::GoOn);
        }
        assert!(crashes.is_careful());
        assert_eq!(crashes.count(begun + CRASHES_WITHIN, false), Next::GoOn);
        assert!(!crashes.is_careful());
        for _ in 1..MAX_CRASHES {
            assert_eq!(crashes.count(begun + CRASHES_WITHIN, false), Next::GoOn);
        }
        assert_eq!(crashes.count(begun + CRASHES_WITHIN, false), Next::GiveUp);
    }

    #[test]
    fn a_disk_is_given_up_alone() {
        let (mut crashes, begun) = (Crashes::default(), Instant::now());
        assert_eq!(crashes.count(begun, false), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::Fence);
        // Another disk has as many attempts.
        assert_eq!(crashes.count(begun, true), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::GoOn);
        assert_eq!(crashes.count(begun, true), Next::Fence);
    }
}
