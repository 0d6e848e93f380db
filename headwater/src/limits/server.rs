//! Server half of `headwater cache list` and `cache set`: in each `export` or `attach` process, answers requests on a
//! unix socket to show or change the limits of its write caches. See [`super`] for the protocol. It does not serve
//! the daemon's machines.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::{CacheMode, Problem, ProblemKind};
use headwater_block::{IoErrorKind, size};
use headwater_volume::Volume;
use headwater_writecache::MAX_WEIGHT;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::{Answer, Cache, Change, DEADLINE, Process, REQUEST_BYTES, Request, State, places};
use crate::caches::{CacheArgs, unfit_limit};

/// The most concurrent requests; further clients wait.
const CLIENTS: usize = 8;

/// How long to wait before the next accept() if one has failed, for instance for lack of file descriptors.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// The volumes that this process serves, with the settings that they share.
pub struct Served {
    /// Name of the image or file below the volumes.
    pub source: String,
    /// The block devices of this kernel that it serves, and the user's own names for them.
    pub devices: Vec<String>,
    /// Where writes go.
    pub mode: CacheMode,
    /// Settings that the volumes share.
    pub caches: CacheArgs,
    /// The volumes with their names.
    pub volumes: Vec<(String, Arc<Volume>)>,
}

/// The socket on which requests are answered. Dropping it removes the socket.
pub struct Listening {
    path: PathBuf,
    task: JoinHandle<()>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Begins to answer requests, in the caller's runtime.
pub fn listen(served: Served) -> std::io::Result<Listening> {
    let (listener, path) = places::listen(&places::socket_dirs())?;
    let listener = listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
    let listener = listener.inspect_err(|_| drop(std::fs::remove_file(&path)))?;
    let pid = std::process::id();
    for (name, volume) in &served.volumes {
        // The volume's warnings about missing space then tell the user to run `headwater cache set`.
        volume.advise(served.command(pid, name));
    }
    let task = tokio::spawn(accept(listener, Arc::new(served)));
    Ok(Listening { path, task })
}

async fn accept(listener: UnixListener, served: Arc<Served>) {
    let permits = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let served = Arc::clone(&served);
                tokio::spawn(async move {
                    // A client that is too slow or gone gets no answer.
                    let _ = tokio::time::timeout(DEADLINE, serve(stream, &served)).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection of 'headwater cache': {error}");
                tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
            }
        }
    }
}

async fn serve(mut stream: UnixStream, served: &Served) -> std::io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    let peer = stream.peer_cred()?.uid();
    let (from, mut to) = stream.split();
    // Read the request before refusing it; closing a socket with unread data resets it, and the client would not see
    // the answer.
    let mut line = Vec::new();
    BufReader::new(from).take(REQUEST_BYTES).read_until(b'\n', &mut line).await?;
    let answer = if is_allowed(peer, user) {
        served.answer(&line)
    } else {
        let why = format!("user {peer} may not see or change the limits of a process of user {user}");
        Answer::Problem(Problem::new(ProblemKind::Failed, why))
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    to.write_all(&text).await
}

/// Whether a client may ask: the user of this process may, and root, who could change the process anyway.
fn is_allowed(peer: u32, user: u32) -> bool {
    peer == user || peer == 0
}

impl Served {
    /// The command line with which a user raises a volume's limits.
    fn command(&self, pid: u32, volume: &str) -> String {
        let which = if self.volumes.len() > 1 { format!(" --volume {volume}") } else { String::new() };
        let limits = match self.mode {
            CacheMode::Ram => "--ram SIZE",
            CacheMode::RamDisk => "--ram SIZE --disk SIZE",
            CacheMode::Disk => "--disk SIZE",
        };
        format!("headwater cache set {pid}{which} {limits}")
    }

    fn answer(&self, line: &[u8]) -> Answer {
        let done = match serde_json::from_slice(line) {
            Ok(Request::List) => Ok(()),
            Ok(Request::Set(change)) => self.set(&change),
            Err(error) => {
                Err(Problem::new(ProblemKind::Invalid, format!("cannot understand the request: {error}")))
            }
        };
        match done {
            Ok(()) => Answer::Caches(self.process()),
            Err(problem) => Answer::Problem(problem),
        }
    }

    fn process(&self) -> Process {
        Process {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            source: self.source.clone(),
            devices: self.devices.clone(),
            caches: self.volumes.iter().map(|(name, volume)| self.cache(name, volume)).collect(),
        }
    }

    fn cache(&self, name: &str, volume: &Volume) -> Cache {
        let (cache, shortage) = (volume.counters().cache, volume.shortage());
        Cache {
            volume: name.to_owned(),
            mode: self.mode,
            ram_limit_bytes: cache.ram_target_bytes,
            ram_used_bytes: cache.ram_used_bytes,
            disk_limit_bytes: cache.disk_limit_bytes,
            disk_used_bytes: cache.disk_used_bytes,
            weight: volume.weight(),
            state: match (shortage.refusing, shortage.waited.is_zero()) {
                (true, _) => State::Full,
                (false, false) => State::Waiting,
                (false, true) if volume.is_failing() => State::Failing,
                (false, true) => State::Ok,
            },
        }
    }

    /// Changes the limits of all volumes of the request, or of none.
    fn set(&self, change: &Change) -> Result<(), Problem> {
        let is_meant = |name: &str| match change.volume.as_deref() {
            None => true,
            // The prefix may be omitted: `desk-1` for `nbd:desk-1`.
            Some(wanted) => name == wanted || name.split_once(':').is_some_and(|(_, rest)| rest == wanted),
        };
        let failed = |kind, why: String| {
            Problem::new(kind, format!("cannot change the limits of '{}': {why}", self.source))
        };
        let (meant, others): (Vec<_>, Vec<_>) = self.volumes.iter().partition(|(name, _)| is_meant(name));
        if meant.is_empty() {
            let names: Vec<_> = self.volumes.iter().map(|(name, _)| name.as_str()).collect();
            let why = format!("there is no volume '{}'", change.volume.as_deref().unwrap_or_default());
            return Err(failed(ProblemKind::NotFound, why).advise(format!("there are {}", names.join(", "))));
        }
        if let Some((limit, why)) = unfit_limit(self.mode, change.ram_bytes, change.disk_bytes) {
            let why = format!("{limit} was given, but the cache mode '{}' {why}", self.mode);
            return Err(failed(ProblemKind::Invalid, why).advise(format!("leave {limit} out")));
        }
        if change.disk_bytes == Some(0) {
            let why = format!("the cache mode '{}' needs disk space, so --disk cannot be 0", self.mode);
            return Err(failed(ProblemKind::Invalid, why));
        }
        if let Some(weight) = change.weight.filter(|weight| !(1..=MAX_WEIGHT).contains(weight)) {
            let why = format!("{weight} is not a valid weight; use 1 to {MAX_WEIGHT}");
            return Err(failed(ProblemKind::Invalid, why));
        }
        if let Some(ram_bytes) = change.ram_bytes {
            let of_others = others.iter().map(|(_, volume)| volume.counters().cache.ram_target_bytes);
            let of_meant = meant.iter().map(|_| ram_bytes);
            let checked = self.caches.check_limits(of_others.chain(of_meant));
            checked.map_err(|why| failed(ProblemKind::Invalid, why))?;
        }
        for (_, volume) in &meant {
            volume.check_limits(change.ram_bytes, change.disk_bytes).map_err(|error| {
                let kind = match error.kind() {
                    IoErrorKind::Invalid => ProblemKind::Invalid,
                    IoErrorKind::NoSpace => ProblemKind::NoSpace,
                    _ => ProblemKind::Failed,
                };
                failed(kind, error.to_string())
            })?;
        }
        for (name, volume) in meant {
            if let Some(bytes) = change.ram_bytes {
                volume.set_ram_bytes(bytes);
            }
            if let Some(bytes) = change.disk_bytes {
                volume.set_disk_bytes(bytes);
            }
            if let Some(weight) = change.weight {
                volume.set_weight(weight);
            }
            let text = |bytes: Option<u64>| bytes.map_or_else(|| "as before".to_owned(), size::format);
            let (ram, disk) = (text(change.ram_bytes), text(change.disk_bytes));
            tracing::info!(volume = %name, %ram, %disk, weight = volume.weight(), "new limits");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_and_root_may_ask() {
        assert!(is_allowed(1000, 1000) && is_allowed(0, 1000) && is_allowed(0, 0));
        assert!(!is_allowed(1001, 1000) && !is_allowed(1000, 0));
    }

    #[test]
    fn a_request_that_cannot_be_understood_is_answered() {
        let served = Served {
            source: "desktop".into(),
            devices: Vec::new(),
            mode: CacheMode::Ram,
            caches: CacheArgs::default(),
            volumes: Vec::new(),
        };
        for bad in ["", "x", "{\"set\":{\"ram\":1}}", "\"end\"", "{\"set\":{\"ram_bytes\":-1}}"] {
            let answer = served.answer(bad.as_bytes());
            assert!(matches!(&answer, Answer::Problem(it) if it.kind == ProblemKind::Invalid), "{answer:?}");
        }
        assert!(matches!(served.answer(b"\"list\"\n"), Answer::Caches(it) if it.source == "desktop"));
    }

    #[test]
    fn what_is_to_be_done_names_the_limits_that_the_mode_has() {
        let served = |mode| Served {
            source: "desktop".into(),
            devices: Vec::new(),
            mode,
            caches: CacheArgs::default(),
            volumes: Vec::new(),
        };
        assert_eq!(served(CacheMode::Ram).command(7, "x"), "headwater cache set 7 --ram SIZE");
        assert_eq!(served(CacheMode::Disk).command(7, "x"), "headwater cache set 7 --disk SIZE");
    }
}
