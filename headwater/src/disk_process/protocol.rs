//! The protocol between a daemon ([`super::client`]) and the disk process ([`super::server`]). Requests of guests do not use it.
//!
//! A connection carries one call at a time: a [`Call`] as a line of JSON, then any number of [`Answer::Progress`] lines, then
//! [`Answer::Done`], [`Answer::Failed`] or [`Answer::NotBegun`]. The answer to [`Call::Read`] is followed by the bytes. A frozen disk and a reader belong
//! to the connection that opened them, and end with it. A client that ends its sending half while a call runs cancels the call.
//!
//! Both ends are the same program. After an upgrade they may differ: [`VERSION`] changes with the messages, and is compared first.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use headwater_api::{
    CacheSettings, DiskCounters, HostRam, ImageVersion, Problem, ProblemKind, Progress, Sample,
};
use headwater_block::{Extent, ExtentKind, Geometry};
use headwater_db::Secret;
use headwater_service::backend::{
    BackendError, DiskRequest, Given, PersistentDiskRef, PersistentDiskRequest, Shortage,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The version of this protocol.
pub const VERSION: u32 = 4;

/// The most bytes of a message, which is one line. Boot traces are the longest messages.
const MAX_LINE_BYTES: usize = 64 << 20;

/// The most bytes of one [`Call::Read`].
pub const MAX_READ_BYTES: u64 = headwater_block::MAX_REQUEST_BYTES as u64;

/// A call of the daemon. Calls without a description are methods of the traits `Disks`, `Disk`, `DiskHost`, `BootTraces` and `KnownStore`,
/// which describe them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// Opens the chunk cache, if it is not open. The answer is a [`Welcome`].
    Begin {
        version: u32,
        /// [`super::settings::Settings`], which another version of this program may not understand.
        settings: serde_json::Value,
    },
    /// Opens the store and the write caches, if they are not open. The daemon has opened the store by then, and made it if it is new.
    OpenStore,
    /// A daemon uses the disks for as long as this connection is open. Answered at once. Boot traces for the store, which only the
    /// daemon writes, follow as further answers, each a [`StoreTrace`]; the daemon sends [`Call::Hold`] again when it has kept one.
    Hold,
    /// Ends the process unless a disk is open, or it also runs without a daemon. The answer says whether it ends.
    Quit,
    Check {
        cache: CacheSettings,
    },
    CheckChange {
        before: CacheSettings,
        after: CacheSettings,
    },
    CheckSpace {
        cache: CacheSettings,
        kept: Option<PersistentDiskRef>,
        scratch_bytes: u64,
    },
    /// The answer is an [`Opened`].
    Open {
        request: Box<DiskRequest>,
    },
    /// The answer is a list of [`OpenDisk`].
    LeftOpen,
    /// The answer is an [`Opened`].
    Adopt {
        uuid: Uuid,
    },
    Discard {
        id: Uuid,
    },
    IsThere {
        id: Uuid,
    },
    PersistentKeys,
    Sweep {
        keep: Vec<Uuid>,
    },
    /// The answer is a [`Snapshot`].
    Snapshot,
    HasBooted {
        uuid: Uuid,
    },
    CheckLimits {
        uuid: Uuid,
        cache: CacheSettings,
    },
    SetLimits {
        uuid: Uuid,
        cache: CacheSettings,
    },
    Relieve {
        uuid: Uuid,
    },
    CanFreeze {
        uuid: Uuid,
    },
    /// The answer says whether the disk was open.
    Close {
        uuid: Uuid,
    },
    /// The connection has the frozen disk from then on. The answer is an [`OpenedFrozen`].
    Freeze {
        uuid: Uuid,
    },
    /// The connection has the frozen disk from then on. The answer is an [`OpenedFrozen`].
    OpenPersistent {
        request: Box<PersistentDiskRequest>,
    },
    /// About the connection's frozen disk.
    IdentityLeft {
        given: GivenIdentity,
    },
    /// About the connection's frozen disk: the ranges that its machine changed. The answer is a list of runs, each
    /// with its length.
    Changed {
        offset: u64,
        len: u64,
        max: usize,
    },
    /// What occupies the write cache of an open disk. The answer is a [`headwater_api::CacheContents`].
    Contents {
        uuid: Uuid,
    },
    /// The same for a persistent disk that no machine uses.
    PersistentContents {
        request: Box<PersistentDiskRequest>,
    },
    GeometryOf {
        machine: String,
    },
    GeometryOver {
        version: ImageVersion,
    },
    IsBegun {
        kept: PersistentDiskRef,
    },
    /// The connection has the reader from then on. The answer is an optional [`OpenedReader`].
    ReadMachine {
        machine: String,
    },
    /// The connection has the reader from then on. The answer is an [`OpenedReader`].
    ReadPersistent {
        request: Box<PersistentDiskRequest>,
    },
    /// About the connection's reader or frozen disk. The bytes follow the answer.
    Read {
        offset: u64,
        len: u64,
    },
    /// About the connection's reader or frozen disk. The answer is a list of [`PlainExtent`].
    Extents {
        offset: u64,
        len: u64,
        max: usize,
    },
    /// The answer is an optional [`FoundTrace`].
    FindTrace {
        manifest: String,
    },
    /// The answer is a [`FoundTrace`].
    MergeTrace {
        trace: Vec<u8>,
    },
    RemoveTrace {
        manifest: String,
    },
    KeepStore {
        store: String,
        chunk_bytes: u32,
    },
    KeptStore {
        store: String,
    },
    KeepImage {
        store: String,
        name: String,
        image: Vec<u8>,
    },
    KeptImage {
        store: String,
        name: String,
    },
    ForgetImage {
        store: String,
        name: String,
    },
    CloseStore,
}

impl Call {
    /// Whether a call may be made again if the process ended before it answered.
    pub fn may_be_repeated(&self) -> bool {
        matches!(
            self,
            Self::Adopt { .. }
                | Self::CanFreeze { .. }
                | Self::Check { .. }
                | Self::CheckChange { .. }
                | Self::CheckLimits { .. }
                | Self::CheckSpace { .. }
                | Self::Close { .. }
                | Self::CloseStore
                | Self::GeometryOf { .. }
                | Self::GeometryOver { .. }
                | Self::HasBooted { .. }
                | Self::IsBegun { .. }
                | Self::IsThere { .. }
                | Self::LeftOpen
                | Self::PersistentKeys
                | Self::Relieve { .. }
                | Self::SetLimits { .. }
        )
    }

    /// Whether the process must not end before the call has an answer.
    pub fn changes_disks(&self) -> bool {
        matches!(
            self,
            Self::Close { .. }
                | Self::Discard { .. }
                | Self::Open { .. }
                | Self::SetLimits { .. }
                | Self::Sweep { .. }
        )
    }

    /// Whether only this process can answer the call, which it does to its end: it is about the process itself, or about a
    /// snapshot that its connection has.
    pub fn is_about_the_process(&self) -> bool {
        matches!(
            self,
            Self::Begin { .. }
                | Self::Changed { .. }
                | Self::Extents { .. }
                | Self::Hold
                | Self::IdentityLeft { .. }
                | Self::Read { .. }
                | Self::Snapshot
        )
    }
}

/// What the disk process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The progress of the call, which is still running.
    Progress(Progress),
    /// The call succeeded, with this result.
    Done(serde_json::Value),
    /// The call failed.
    Failed(Failure),
    /// The call was not begun, because the next process has the disks soon. Make it again.
    NotBegun,
}

/// Why a call failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    problem: Problem,
    is_unknown: bool,
}

impl Failure {
    /// A failure without the causes of a [`BackendError`].
    pub fn of(problem: Problem) -> Self {
        Self { problem, is_unknown: false }
    }

    /// The problem without its causes.
    pub fn into_problem(self) -> Problem {
        self.problem
    }
}

impl From<&BackendError> for Failure {
    fn from(error: &BackendError) -> Self {
        Self { problem: problem_of(error), is_unknown: error.is_unknown() }
    }
}

/// The problem for an error of a backend, with its advice, which is not in the chain of causes.
pub fn problem_of(error: &BackendError) -> Problem {
    let mut problem = Problem::from_error(error.kind(), error);
    problem.advice = error.advice().map(str::to_owned);
    problem
}

impl From<Failure> for BackendError {
    fn from(failure: Failure) -> Self {
        let Problem { kind, message, causes, advice, retry_after_s: _ } = failure.problem;
        let cause = causes
            .into_iter()
            .rev()
            .fold(None, |below, text| Some(Cause { text, below: below.map(Box::new) }));
        let mut error = Self::new(kind, message);
        if let Some(cause) = cause {
            error = error.because(cause);
        }
        if let Some(advice) = advice {
            error = error.advise(advice);
        }
        if failure.is_unknown { error.unknown() } else { error }
    }
}

/// A cause of a failure in the other process.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct Cause {
    text: String,
    #[source]
    below: Option<Box<Cause>>,
}

/// The answer to [`Call::Begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Welcome {
    /// The disks can be used.
    Ready,
    /// The disks can be used, with the settings of an earlier daemon, because disks are open.
    EarlierSettings,
    /// The process ends, because it has the settings or the protocol of an earlier daemon. `restarted`: somebody else
    /// starts it again, so another process listens soon; otherwise the daemon must start one.
    Ends { restarted: bool },
}

/// The answer to [`Call::Open`] and [`Call::Adopt`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opened {
    pub uuid: Uuid,
    pub socket: PathBuf,
    pub sector_bytes: u32,
    pub is_persistent: bool,
}

/// The state of an open disk at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskSnapshot {
    pub counters: DiskCounters,
    pub metrics: Vec<Sample>,
    pub shortage: Option<Shortage>,
}

/// The state of all disks at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    pub host_ram: HostRam,
    pub metrics: Vec<Sample>,
    pub reads_wait: Option<String>,
    pub unrecorded: Option<String>,
    /// The number of boot traces that the daemon has not stored yet.
    pub waiting_traces: usize,
    pub disks: BTreeMap<Uuid, DiskSnapshot>,
}

/// An identity with its private key. Only this connection carries it.
#[derive(Clone, Serialize, Deserialize)]
pub struct GivenIdentity {
    host_name: String,
    machine_id: String,
    ssh_host_key_private: String,
}

impl std::fmt::Debug for GivenIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GivenIdentity").field("host_name", &self.host_name).finish_non_exhaustive()
    }
}

impl From<Given> for GivenIdentity {
    fn from(given: Given) -> Self {
        let ssh_host_key_private = given.ssh_host_key_private.reveal().to_owned();
        Self { host_name: given.host_name, machine_id: given.machine_id, ssh_host_key_private }
    }
}

impl From<GivenIdentity> for Given {
    fn from(given: GivenIdentity) -> Self {
        let ssh_host_key_private = Secret::new(given.ssh_host_key_private);
        Self { host_name: given.host_name, machine_id: given.machine_id, ssh_host_key_private }
    }
}

/// A [`Geometry`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PlainGeometry {
    size_bytes: u64,
    logical_block_bytes: u32,
    physical_block_bytes: u32,
}

impl From<Geometry> for PlainGeometry {
    fn from(geometry: Geometry) -> Self {
        let Geometry { size_bytes, logical_block_bytes, physical_block_bytes, .. } = geometry;
        Self { size_bytes, logical_block_bytes, physical_block_bytes }
    }
}

impl From<PlainGeometry> for Geometry {
    fn from(geometry: PlainGeometry) -> Self {
        let PlainGeometry { size_bytes, logical_block_bytes, physical_block_bytes } = geometry;
        // Readers outside never write.
        Self { size_bytes, logical_block_bytes, physical_block_bytes, read_only: true, volatile_cache: false }
    }
}

/// The answer to [`Call::Freeze`] and [`Call::OpenPersistent`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpenedFrozen {
    pub geometry: PlainGeometry,
    pub below: ImageVersion,
}

/// The answer to [`Call::ReadMachine`] and [`Call::ReadPersistent`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct OpenedReader {
    pub geometry: PlainGeometry,
    pub is_first: bool,
}

/// An [`Extent`]: its length, and a number for its kind.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PlainExtent(u64, u8);

impl From<Extent> for PlainExtent {
    fn from(extent: Extent) -> Self {
        let kind = match extent.kind {
            ExtentKind::Data => 0,
            ExtentKind::Hole => 1,
            ExtentKind::Zero => 2,
        };
        Self(extent.len, kind)
    }
}

impl From<PlainExtent> for Extent {
    fn from(PlainExtent(len, kind): PlainExtent) -> Self {
        let kind = match kind {
            1 => ExtentKind::Hole,
            2 => ExtentKind::Zero,
            _ => ExtentKind::Data,
        };
        Self { len, kind }
    }
}

/// A boot trace that the daemon stores.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoreTrace {
    pub manifest: String,
    pub trace: Vec<u8>,
}

/// A boot trace as bytes, and whether it is kept on this host rather than in the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FoundTrace {
    pub trace: Vec<u8>,
    pub is_of_host: bool,
}

/// Writes one message.
pub fn send(stream: &mut UnixStream, message: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message).map_err(std::io::Error::other)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads one message. `None`: the other end has closed its sending half. After [`ErrorKind::WouldBlock`], which is
/// the read timeout of the stream, it can be called again with the same `line`.
pub fn receive<T: DeserializeOwned>(
    stream: &mut BufReader<UnixStream>,
    line: &mut Vec<u8>,
) -> std::io::Result<Option<T>> {
    loop {
        let available = match stream.fill_buf() {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            other => other?,
        };
        if available.is_empty() {
            return if line.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
        }
        let end = available.iter().position(|&byte| byte == b'\n');
        let part = end.map_or(available.len(), |end| end + 1);
        line.extend_from_slice(available.get(..part).unwrap_or(available));
        stream.consume(part);
        if end.is_some() {
            let message = serde_json::from_slice(line).map_err(std::io::Error::other);
            line.clear();
            return message.map(Some);
        }
        if line.len() > MAX_LINE_BYTES {
            return Err(std::io::Error::other(format!("a message is longer than {MAX_LINE_BYTES} bytes")));
        }
    }
}

/// The error of a call about a disk that is not open.
pub fn not_open() -> BackendError {
    BackendError::new(ProblemKind::NotFound, "the disk is not open in the disk process")
}
