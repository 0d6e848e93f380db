//! Answers the calls of daemons ([`crate::disk_process::protocol`]), with one thread for each connection. Requests of guests do not pass here.
//!
//! [`answer`] runs long calls and reports their progress; [`quick`] runs all others. After [`Call::Hold`], a connection carries no other calls:
//! it keeps this process alive, and boot traces are sent to the daemon over it. A frozen disk or a reader belongs to the connection that opened
//! it, and is dropped with that connection.

use std::io::{BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};

use headwater_api::{Problem, ProblemKind, Progress};
use headwater_block::{ByteRange, Completion, Device, IoErrorKind, Request};
use headwater_image::{DiskCache, Trace};
use headwater_service::backend::{BackendError, Disks, FrozenDisk, OpenDisk, TaskControl};
use headwater_store::{Hash, Image, ImageName};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use super::{Entry, LOOK_INTERVAL, Shared};
use crate::adapters::disk_host::{BootTraces, DiskHost, OpenReader};
use crate::adapters::disks::Volumes;
use crate::adapters::frozen::FrozenVolume;
use crate::disk_process::first_call::Early;
use crate::disk_process::protocol::{
    Answer, Call, Failure, FoundTrace, MAX_READ_BYTES, Opened, OpenedFrozen, OpenedReader, PlainExtent,
    PlainGeometry, StoreTrace, not_open, receive, send,
};
use crate::failure;
use crate::traces::Place;

/// The state of a connection.
#[derive(Default)]
struct Session {
    frozen: Option<FrozenVolume>,
    reader: Option<Arc<dyn Device>>,
    /// The daemon has sent [`Call::Hold`]: this process does not end while the connection is open.
    is_held: bool,
}

/// Serves a connection to its end.
pub(super) fn serve(connection: Early, shared: &Shared) {
    let Early { stream, is_held, call } = connection;
    let mut session = Session { is_held, ..Session::default() };
    if let Err(error) = serve_calls(stream, shared, &mut session, call)
        && !matches!(
            error.kind(),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof
        )
    {
        tracing::warn!(%error, "the connection of a daemon broke");
    }
    if session.is_held {
        shared.holds.fetch_sub(1, Ordering::SeqCst);
    }
}

fn serve_calls(
    mut stream: UnixStream,
    shared: &Shared,
    session: &mut Session,
    first: Option<Call>,
) -> std::io::Result<()> {
    let mut reading = BufReader::new(stream.try_clone()?);
    if session.is_held {
        return hold(&mut stream, &mut reading, shared);
    }
    let (mut line, mut waiting) = (Vec::new(), first);
    loop {
        let received = match waiting.take() {
            Some(call) => Some(call),
            None => receive::<Call>(&mut reading, &mut line)?,
        };
        let Some(call) = received else { return Ok(()) };
        // If the call changes disks, this process does not end before the answer is sent.
        let Some(_running) = shared.calls.begin(&call) else {
            send(&mut stream, &Answer::NotBegun)?;
            continue;
        };
        let mut bytes = Vec::new();
        let opens = match &call {
            Call::Open { request } => Some(request.uuid),
            _ => None,
        };
        let answer = answer(call, shared, session, &mut stream, &mut bytes);
        if let Some(uuid) = opens.filter(|_| answer.is_ok() && has_hung_up(&stream)) {
            tracing::warn!(%uuid, "closing a disk: the daemon that asked for it has ended");
            if let Err(error) = quick(Call::Close { uuid }, shared, session, &mut Vec::new()) {
                tracing::warn!(%uuid, "the disk was not closed cleanly: {error}");
            }
        }
        let answer = match answer {
            Ok(value) => Answer::Done(value),
            Err(failure) => Answer::Failed(failure),
        };
        send(&mut stream, &answer)?;
        stream.write_all(&bytes)?;
        if session.is_held {
            return hold(&mut stream, &mut reading, shared);
        }
    }
}

/// Keeps this process alive while a daemon is connected, and sends boot traces to the daemon.
fn hold(
    stream: &mut UnixStream,
    reading: &mut BufReader<UnixStream>,
    shared: &Shared,
) -> std::io::Result<()> {
    while !has_hung_up(stream) {
        let Some((outbox, (manifest, trace))) =
            shared.outbox().and_then(|outbox| Some((outbox, outbox.next()?)))
        else {
            std::thread::sleep(LOOK_INTERVAL);
            continue;
        };
        let sent = StoreTrace { manifest: manifest.to_string(), trace };
        let value = serde_json::to_value(&sent).map_err(std::io::Error::other)?;
        send(stream, &Answer::Done(value))?;
        if receive::<Call>(reading, &mut Vec::new())?.is_none() {
            return Ok(());
        }
        outbox.remove_stored(manifest, &sent.trace);
    }
    Ok(())
}

fn done(value: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(value).map_err(|e| Failure::of(Problem::new(ProblemKind::Failed, e.to_string())))
}

fn answer(
    call: Call,
    shared: &Shared,
    session: &mut Session,
    stream: &mut UnixStream,
    bytes: &mut Vec<u8>,
) -> Result<Value, Failure> {
    match call {
        Call::Begin { version, settings } => {
            let mut say = |doing: &'static str| {
                let progress = Progress { doing: Some(doing.to_owned()), ..Progress::default() };
                // If the daemon has ended, sending the answer fails later.
                let _ = send(stream, &Answer::Progress(progress));
            };
            let welcome = shared.begin(version, settings, &mut say);
            done(&welcome.map_err(|error| Failure::of(failure::problem(&error)))?)
        }
        Call::OpenStore => done(&shared.open_store().map_err(|error| Failure::of(failure::problem(&error)))?),
        Call::Hold => {
            if !std::mem::replace(&mut session.is_held, true) {
                shared.holds.fetch_add(1, Ordering::SeqCst);
            }
            Ok(Value::Null)
        }
        Call::Quit => {
            let ends = shared.options.ends_unused && shared.disks.lock().is_empty();
            if ends {
                shared.is_ending.store(true, Ordering::SeqCst);
            }
            done(&ends)
        }
        Call::IdentityLeft { given } => {
            let frozen = session.frozen.take().ok_or_else(not_open).map_err(|e| Failure::from(&e))?;
            let work = move |control| async move {
                let left = frozen.identity_left(given.into(), control).await;
                (frozen, left)
            };
            let (frozen, left) = followed(stream, shared, work)?;
            session.frozen = Some(frozen);
            done(&left.map_err(|e| Failure::from(&e))?)
        }
        Call::Contents { uuid } => {
            let disk = shared.disk(uuid).map_err(|e| Failure::from(&e))?;
            let contents =
                followed(stream, shared, move |control| async move { disk.contents(control).await })?;
            done(&contents.map_err(|e| Failure::from(&e))?)
        }
        Call::PersistentContents { request } => {
            let volumes = shared.volumes().map_err(|e| Failure::from(&e))?;
            let work = move |control| async move { volumes.persistent_contents(*request, control).await };
            done(&followed(stream, shared, work)?.map_err(|e| Failure::from(&e))?)
        }
        call => quick(call, shared, session, bytes).map_err(|error| Failure::from(&error)),
    }
}

/// Runs a long call and reports its progress. Cancels the call if the daemon closes its sending half of the connection, if a progress message
/// cannot be sent, or if this process is ending.
fn followed<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    stream: &mut UnixStream,
    shared: &Shared,
    work: impl FnOnce(Arc<TaskControl>) -> F,
) -> Result<T, Failure> {
    let control = Arc::new(TaskControl::default());
    let (result, ended) = mpsc::channel();
    let working = work(Arc::clone(&control));
    shared.runtime.spawn(async move {
        // The receiver is gone only if this thread has panicked.
        let _ = result.send(working.await);
    });
    let mut said = Progress::default();
    loop {
        match ended.recv_timeout(LOOK_INTERVAL) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::of(Problem::new(
                    ProblemKind::Failed,
                    "the operation crashed in the disk process, whose log has the details",
                )));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let progress = control.progress();
        if progress != said {
            if send(stream, &Answer::Progress(progress.clone())).is_err() {
                control.cancel();
            }
            said = progress;
        }
        if has_hung_up(stream) || shared.is_ending.load(Ordering::SeqCst) {
            control.cancel();
        }
    }
}

/// Whether the other end has closed its sending half.
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = rustix::event::poll(&mut fds, Some(&now));
    let [fd] = fds;
    polled.is_ok() && fd.revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

/// Handles calls without progress, which cannot be cancelled. Most end soon, but some wait for the store or for disks.
fn quick(
    call: Call,
    shared: &Shared,
    session: &mut Session,
    bytes: &mut Vec<u8>,
) -> Result<Value, BackendError> {
    if let Call::KeepStore { .. }
    | Call::KeptStore { .. }
    | Call::KeepImage { .. }
    | Call::KeptImage { .. }
    | Call::ForgetImage { .. } = call
    {
        return of_known_store(call, shared.known());
    }
    if let Call::Snapshot = call {
        return value(&shared.snapshot()?);
    }
    let volumes = shared.volumes()?;
    let runtime = &shared.runtime;
    match call {
        Call::Check { cache } => value(&runtime.block_on(volumes.check(&cache))?),
        Call::CheckChange { before, after } => {
            value(&runtime.block_on(volumes.check_change(&before, &after))?)
        }
        Call::CheckSpace { cache, kept, scratch_bytes } => {
            value(&runtime.block_on(volumes.check_space(&cache, kept, scratch_bytes))?)
        }
        Call::Discard { id } => value(&runtime.block_on(volumes.discard(id))?),
        Call::IsThere { id } => value(&runtime.block_on(volumes.is_there(id))?),
        Call::PersistentKeys => value(&runtime.block_on(volumes.persistent_keys())?),
        Call::Sweep { keep } => value(&runtime.block_on(volumes.sweep(&keep))?),
        Call::GeometryOf { machine } => {
            value(&DiskHost::geometry_of(&*volumes, &machine)?.map(PlainGeometry::from))
        }
        Call::GeometryOver { version } => {
            value(&PlainGeometry::from(DiskHost::geometry_over(&*volumes, &version)?))
        }
        Call::IsBegun { kept } => value(&DiskHost::is_begun(&*volumes, kept)),
        Call::CloseStore => {
            shared.is_store_closed.store(true, Ordering::SeqCst);
            value(&DiskHost::close_store(&*volumes))
        }
        Call::OpenPersistent { request } => {
            let frozen = volumes.freeze_persistent(*request)?;
            value(&session.freezes(frozen))
        }
        Call::Changed { offset, len, max } => {
            let frozen = session.frozen.as_ref().ok_or_else(not_open)?;
            let runs = frozen.view().changed(range(offset, len)?, max);
            value(&runs.into_iter().map(|run| (run.len, run.changed)).collect::<Vec<_>>())
        }
        Call::ReadMachine { machine } => {
            let reader = DiskHost::open_reader(&*volumes, &machine)?;
            value(&reader.map(|reader| session.reads(reader)))
        }
        Call::ReadPersistent { request } => {
            let reader = DiskHost::read_persistent(&*volumes, &request)?;
            value(&session.reads(reader))
        }
        Call::Read { offset, len } => {
            *bytes = session.read(offset, len)?;
            Ok(Value::Null)
        }
        Call::Extents { offset, len, max } => {
            let extents = session.reader()?.extents(range(offset, len)?, max).map_err(io_failed)?;
            value(&extents.into_iter().map(PlainExtent::from).collect::<Vec<_>>())
        }
        Call::FindTrace { .. } | Call::MergeTrace { .. } | Call::RemoveTrace { .. } => {
            of_traces(call, &*volumes.boot_traces())
        }
        call => of_disk(call, shared, session, &volumes),
    }
}

fn value(value: &impl Serialize) -> Result<Value, BackendError> {
    serde_json::to_value(value).map_err(|e| BackendError::new(ProblemKind::Failed, e.to_string()))
}

/// Handles calls about one open disk.
fn of_disk(
    call: Call,
    shared: &Shared,
    session: &mut Session,
    volumes: &Volumes,
) -> Result<Value, BackendError> {
    match call {
        Call::Open { request } => {
            let (uuid, machine, version) = (request.uuid, request.machine.clone(), request.version.clone());
            let is_persistent = request.kept.is_some();
            if shared.is_ending.load(Ordering::SeqCst) {
                let message = "the disk process is ending, and opens no more disks";
                return Err(BackendError::new(ProblemKind::Unavailable, message));
            }
            // The process before this one opened the disk and crashed before it answered, so the daemon does not know that the disk is open.
            // This process has taken the disk over.
            let left = shared.disks.lock().remove(&uuid);
            if let Some(Entry { disk, .. }) = left {
                tracing::warn!(%uuid, "a machine's earlier disk is closed, because it is opened again");
                let _ = shared.runtime.block_on(disk.close());
            }
            let disk = shared.runtime.block_on(volumes.open(*request))?;
            let entry = Entry { info: OpenDisk { machine, uuid, version }, disk, is_persistent };
            let opened = opened(uuid, &entry);
            shared.disks.lock().insert(uuid, entry);
            value(&opened)
        }
        Call::LeftOpen => {
            value(&shared.disks.lock().values().map(|entry| entry.info.clone()).collect::<Vec<_>>())
        }
        Call::Adopt { uuid } => {
            let adopted = shared.disks.lock().get(&uuid).map(|entry| opened(uuid, entry));
            value(&adopted.ok_or_else(not_open)?)
        }
        Call::HasBooted { uuid } => value(&shared.disk(uuid)?.has_booted()),
        Call::CheckLimits { uuid, cache } => value(&shared.disk(uuid)?.check_limits(&cache)?),
        Call::SetLimits { uuid, cache } => value(&shared.disk(uuid)?.set_limits(&cache)),
        Call::Relieve { uuid } => value(&shared.disk(uuid)?.relieve()),
        Call::CanFreeze { uuid } => value(&shared.disk(uuid)?.can_freeze()?),
        Call::Freeze { uuid } => {
            let machine = shared.disks.lock().get(&uuid).map(|entry| entry.info.machine.clone());
            let frozen = volumes.freeze(&machine.ok_or_else(not_open)?)?;
            value(&session.freezes(frozen))
        }
        Call::Close { uuid } => {
            // Closing twice is harmless.
            let Ok(disk) = shared.disk(uuid) else { return value(&false) };
            let closed = shared.runtime.block_on(disk.close());
            shared.disks.lock().remove(&uuid);
            closed?;
            value(&true)
        }
        other => {
            Err(BackendError::new(ProblemKind::Invalid, format!("the call {other:?} is not possible here")))
        }
    }
}

fn opened(uuid: Uuid, Entry { disk, is_persistent, .. }: &Entry) -> Opened {
    let (socket, sector_bytes) = (PathBuf::from(disk.socket()), disk.sector_bytes());
    Opened { uuid, socket, sector_bytes, is_persistent: *is_persistent }
}

fn of_traces(call: Call, traces: &dyn BootTraces) -> Result<Value, BackendError> {
    let hash =
        |text: &str| text.parse::<Hash>().map_err(|e| BackendError::new(ProblemKind::Invalid, e.to_string()));
    let found = |(trace, place): (Trace, Place)| FoundTrace {
        trace: trace.encode(),
        is_of_host: place == Place::Host,
    };
    match call {
        Call::FindTrace { manifest } => value(&traces.find(hash(&manifest)?)?.map(found)),
        Call::MergeTrace { trace } => {
            let trace = Trace::decode(&trace).map_err(crate::adapters::images::image_failed)?;
            value(&found(traces.merge(trace)?))
        }
        Call::RemoveTrace { manifest } => value(&traces.remove(hash(&manifest)?)?),
        other => Err(BackendError::new(
            ProblemKind::Invalid,
            format!("{other:?} is not a call about a boot trace"),
        )),
    }
}

/// Handles calls about the last known state of a store across a network. Without a chunk cache nothing is kept.
fn of_known_store(call: Call, known: Option<&DiskCache>) -> Result<Value, BackendError> {
    let name = |text: &str| {
        text.parse::<ImageName>().map_err(|e| BackendError::new(ProblemKind::Invalid, e.to_string()))
    };
    let Some(known) = known else { return Ok(Value::Null) };
    match call {
        Call::KeepStore { store, chunk_bytes } => value(&known.keep_store(&store, chunk_bytes)),
        Call::KeptStore { store } => value(&known.kept_store(&store)),
        Call::KeepImage { store, name: image_name, image } => {
            let image = Image::decode(&name(&image_name)?, &image);
            match image {
                Ok(image) => value(&known.keep_image(&store, &image)),
                Err(e) => Err(BackendError::new(ProblemKind::Invalid, e.to_string())),
            }
        }
        Call::KeptImage { store, name: image_name } => {
            let kept = known.kept_image(&store, &name(&image_name)?);
            value(&kept.and_then(|(image, at)| Some((image.encode().ok()?, at))))
        }
        Call::ForgetImage { store, name: image_name } => {
            value(&known.forget_image(&store, &name(&image_name)?))
        }
        other => Err(BackendError::new(
            ProblemKind::Invalid,
            format!("{other:?} is not a call about the last known state of a store"),
        )),
    }
}

fn range(offset: u64, len: u64) -> Result<ByteRange, BackendError> {
    ByteRange::new(offset, len)
        .ok_or_else(|| BackendError::new(ProblemKind::Invalid, "a range ends past 2^64"))
}

/// Maps an I/O error to the kinds from which [`crate::disk_process::reader`] makes an [`headwater_block::IoError`] again.
fn io_failed(error: headwater_block::IoError) -> BackendError {
    let kind = match error.kind() {
        IoErrorKind::Closed => ProblemKind::Conflict,
        IoErrorKind::Corrupt => ProblemKind::Damaged,
        IoErrorKind::Invalid => ProblemKind::Invalid,
        _ => ProblemKind::Failed,
    };
    BackendError::new(kind, error.to_string())
}

impl Session {
    fn reads(&mut self, reader: OpenReader) -> OpenedReader {
        let geometry = reader.device.geometry().into();
        self.reader = Some(reader.device);
        OpenedReader { geometry, is_first: reader.is_first }
    }

    fn freezes(&mut self, frozen: FrozenVolume) -> OpenedFrozen {
        let opened =
            OpenedFrozen { geometry: frozen.view().geometry().into(), below: frozen.below().clone() };
        self.frozen = Some(frozen);
        opened
    }

    fn reader(&self) -> Result<Arc<dyn Device>, BackendError> {
        let frozen = || self.frozen.as_ref().map(|frozen| Arc::clone(frozen.view()) as Arc<dyn Device>);
        self.reader.clone().or_else(frozen).ok_or_else(not_open)
    }

    fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, BackendError> {
        let (reader, range) = (self.reader()?, range(offset, len)?);
        if len > MAX_READ_BYTES {
            return Err(BackendError::new(ProblemKind::Invalid, "a read is too long"));
        }
        reader.geometry().check_data(range).map_err(io_failed)?;
        let buffer = vec![0; usize::try_from(len).unwrap_or(0)];
        let (sender, ended) = mpsc::channel();
        let completion = Completion::new(move |outcome| {
            // The receiver is gone only if this thread has panicked.
            let _ = sender.send(outcome);
        });
        reader.submit(Request::Read { range, buffer }, completion);
        let broke_off = |_| BackendError::new(ProblemKind::Failed, "a read ended without a result");
        let outcome = ended.recv().map_err(broke_off)?;
        outcome.result.map_err(io_failed)?;
        Ok(outcome.buffer)
    }
}
