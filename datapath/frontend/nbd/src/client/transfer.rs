//! The client's transmission phase: commands out on one thread, replies in on another.
//!
//! A command is entered into `pending` before it is queued for the writer, so a reply always finds it. The reader
//! takes a command out of `pending` while it receives that command's data, so no lock is held across I/O.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use headwater_block::{ByteRange, IoError, IoErrorKind};
use parking_lot::{Condvar, Mutex};

use super::ClientOptions;
use super::whole::Whole;
use crate::error::NbdError;
use crate::socket::{Received, Socket};
use crate::wire::transmission::{
    REPLY_BYTES, ReplyHead, RequestHead, chunk, command, decode_block_status, decode_error, decode_hole,
};

/// The writer sends when this much is collected, in bytes.
const SEND_BATCH_BYTES: usize = 64 << 10;
/// Payloads from this length on are sent without copying them first.
const SEND_LARGE_BYTES: usize = 16 << 10;
const RECEIVE_BUFFER_BYTES: usize = 64 << 10;
/// Longest chunk that is neither data nor a hole.
const CHUNK_LIMIT_BYTES: usize = 1 << 20;
/// The most chunks of one reply that bring neither data nor a hole.
const OTHER_CHUNKS_MAX: usize = 1024;
/// How often the reader checks whether the server has been silent for too long, at least.
const SILENCE_CHECK: Duration = Duration::from_secs(1);

pub(super) struct Transfer {
    socket: Arc<Socket>,
    uri: String,
    structured: bool,
    commands_limit: usize,
    bytes_limit: usize,
    silence_limit: Option<Duration>,
    state: Mutex<State>,
    room: Condvar,
    queue: Mutex<Option<mpsc::Sender<Command>>>,
    reader: OnceLock<ThreadId>,
}

#[derive(Default)]
struct State {
    pending: HashMap<u64, Pending>,
    next_cookie: u64,
    /// Commands and bytes in flight, including the command that the reader has taken out of `pending`.
    commands: usize,
    bytes: usize,
    /// Since when there has been at least one command.
    busy_since: Option<Instant>,
    broken: Option<IoError>,
}

struct Command {
    head: RequestHead,
    payload: Option<(Arc<Vec<u8>>, usize)>,
}

struct Pending {
    head: RequestHead,
    /// The buffer that the data of a read goes to.
    buffer: Vec<u8>,
    /// The offset of `buffer` in the whole request, if it is only a part of it.
    at: Option<usize>,
    /// Bytes that chunks have filled.
    filled: u64,
    /// Chunks that filled nothing.
    other_chunks: usize,
    error: Option<IoError>,
    whole: Arc<Whole>,
}

impl Pending {
    fn bytes(&self) -> usize {
        match self.head.command {
            command::READ | command::WRITE => usize::try_from(self.head.length).unwrap_or(usize::MAX),
            _ => 0,
        }
    }
}

impl Transfer {
    pub(super) fn start(
        socket: Socket,
        uri: String,
        structured: bool,
        options: &ClientOptions,
    ) -> std::io::Result<(Arc<Self>, Vec<JoinHandle<()>>)> {
        let (sender, receiver) = mpsc::channel();
        let silence_limit = options.silence_limit_ms.map(Duration::from_millis);
        if let Some(limit) = silence_limit {
            socket.limit_wait(silence_check(limit))?;
        }
        let socket = Arc::new(socket);
        let transfer = Arc::new(Self {
            socket: Arc::clone(&socket),
            uri,
            structured,
            commands_limit: options.commands_in_flight.max(1),
            bytes_limit: options.bytes_in_flight.max(1),
            silence_limit,
            state: Mutex::default(),
            room: Condvar::new(),
            queue: Mutex::new(Some(sender)),
            reader: OnceLock::new(),
        });
        let writer = std::thread::Builder::new().name("nbd-client-out".into()).spawn({
            let socket = Arc::clone(&socket);
            move || {
                if write_commands(&socket, &receiver).is_err() {
                    // The reader notices the end and fails everything.
                    socket.cut();
                }
            }
        })?;
        let reader = std::thread::Builder::new().name("nbd-client-in".into()).spawn({
            let transfer = Arc::clone(&transfer);
            move || transfer.read_replies()
        });
        let reader = match reader {
            Ok(reader) => reader,
            Err(error) => {
                transfer.queue.lock().take();
                let _ = writer.join();
                return Err(error);
            }
        };
        Ok((transfer, vec![writer, reader]))
    }

    /// Tells the server and closes; requests in flight fail.
    pub(super) fn disconnect(&self) {
        if let Some(queue) = self.queue.lock().take() {
            let head = RequestHead { flags: 0, command: command::DISC, cookie: 0, offset: 0, length: 0 };
            let _ = queue.send(Command { head, payload: None });
        }
        let idle = self.state.lock().commands == 0;
        self.break_off(IoError::new(
            IoErrorKind::Closed,
            format!("the connection to {} was closed", self.uri),
        ));
        if idle {
            // The goodbye can still be sent.
            self.socket.stop_receiving();
        } else {
            self.socket.cut();
        }
    }

    pub(super) fn read(&self, range: ByteRange, buffer: Vec<u8>, at: Option<usize>, whole: Arc<Whole>) {
        self.send(command::READ, 0, range, buffer, at, None, whole);
    }

    pub(super) fn write(
        &self,
        range: ByteRange,
        flags: u16,
        payload: &Arc<Vec<u8>>,
        start: usize,
        whole: Arc<Whole>,
    ) {
        let payload = Some((Arc::clone(payload), start));
        self.send(command::WRITE, flags, range, Vec::new(), None, payload, whole);
    }

    pub(super) fn command(&self, number: u16, flags: u16, range: ByteRange, whole: Arc<Whole>) {
        self.send(number, flags, range, Vec::new(), None, None, whole);
    }

    pub(super) fn block_status(&self, flags: u16, range: ByteRange, whole: Arc<Whole>) {
        self.send(command::BLOCK_STATUS, flags, range, Vec::new(), None, None, whole);
    }

    pub(super) fn read_only(&self) -> IoError {
        IoError::new(IoErrorKind::ReadOnly, format!("{} is read-only", self.uri))
    }

    pub(super) fn violation(&self, what: &str) -> IoError {
        IoError::new(IoErrorKind::Device, format!("{} broke the NBD protocol: {what}", self.uri))
    }

    #[expect(clippy::too_many_arguments, reason = "private, and called by the four functions above only")]
    fn send(
        &self,
        number: u16,
        flags: u16,
        range: ByteRange,
        buffer: Vec<u8>,
        at: Option<usize>,
        payload: Option<(Arc<Vec<u8>>, usize)>,
        whole: Arc<Whole>,
    ) {
        let mut pending = Pending {
            // It fits: callers cut ranges far below 4 GiB.
            head: RequestHead {
                flags,
                command: number,
                cookie: 0,
                offset: range.offset(),
                length: range.len(),
            },
            buffer,
            at,
            filled: 0,
            other_chunks: 0,
            error: None,
            whole,
        };
        let bytes = pending.bytes();
        let mut state = self.state.lock();
        // The reader must not wait for itself: a completion that submits may exceed the limit by one.
        let may_wait = self.reader.get() != Some(&std::thread::current().id());
        while may_wait
            && state.broken.is_none()
            && (state.commands >= self.commands_limit || state.bytes >= self.bytes_limit)
        {
            self.room.wait(&mut state);
        }
        if let Some(error) = state.broken.clone() {
            drop(state);
            return pending.whole.part_done(Err(error), pending.buffer, pending.at);
        }
        state.next_cookie = state.next_cookie.wrapping_add(1);
        if state.commands == 0 {
            state.busy_since = Some(Instant::now());
        }
        state.commands = state.commands.saturating_add(1);
        state.bytes = state.bytes.saturating_add(bytes);
        let cookie = state.next_cookie;
        pending.head.cookie = cookie;
        let command = Command { head: pending.head, payload };
        state.pending.insert(cookie, pending);
        drop(state);
        let queued = self.queue.lock().as_ref().is_some_and(|queue| queue.send(command).is_ok());
        if !queued {
            self.break_off(self.lost(None));
        }
    }

    fn lost(&self, source: Option<std::io::Error>) -> IoError {
        let message = format!("the connection to {} was lost", self.uri);
        match source {
            Some(source) => IoError::with_source(IoErrorKind::Device, message, source),
            None => IoError::new(IoErrorKind::Device, message),
        }
    }

    /// Breaks the connection: fails all requests in flight and later ones with `error`. The first error
    /// stays.
    fn break_off(&self, error: IoError) {
        let mut state = self.state.lock();
        let error = state.broken.get_or_insert(error).clone();
        let pending: Vec<Pending> = state.pending.drain().map(|(_, pending)| pending).collect();
        drop(state);
        self.room.notify_all();
        for pending in pending {
            self.finish(pending, Err(error.clone()));
        }
    }

    fn finish(&self, pending: Pending, result: Result<(), IoError>) {
        {
            let mut state = self.state.lock();
            state.commands = state.commands.saturating_sub(1);
            state.bytes = state.bytes.saturating_sub(pending.bytes());
        }
        self.room.notify_one();
        pending.whole.part_done(result, pending.buffer, pending.at);
    }

    fn read_replies(&self) {
        // Only this line sets it.
        let _ = self.reader.set(std::thread::current().id());
        let mut input = Input::new(self);
        let error = loop {
            match self.read_reply(&mut input) {
                Ok(true) => {}
                Ok(false) => break self.lost(None),
                Err(error) => break error,
            }
        };
        self.socket.cut();
        // Ends the writer.
        self.queue.lock().take();
        self.break_off(error);
    }

    /// A receive that returned nothing in less than this time did not wait for its full time.
    fn shortest_silence(&self) -> Duration {
        self.silence_limit.map_or(Duration::ZERO, |limit| silence_check(limit) / 2)
    }

    /// Fails if commands have been in flight and nothing has arrived since `heard_at` for longer than
    /// allowed.
    fn check_silence(&self, heard_at: Instant) -> std::io::Result<()> {
        let Some(limit) = self.silence_limit else { return Ok(()) };
        let state = self.state.lock();
        let (true, Some(busy_since)) = (state.commands > 0, state.busy_since) else { return Ok(()) };
        drop(state);
        let silent = Instant::now().saturating_duration_since(heard_at.max(busy_since));
        if silent < limit {
            return Ok(());
        }
        let message = format!("nothing came from the server for {} s", limit.as_secs_f32());
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, message))
    }

    /// `Ok(false)`: the server closed between replies.
    fn read_reply(&self, input: &mut Input<'_>) -> Result<bool, IoError> {
        let mut head = [0; REPLY_BYTES];
        if !input.fill(&mut head).map_err(|e| self.lost(Some(e)))? {
            return Ok(false);
        }
        match ReplyHead::decode(&head).map_err(|e| self.violation(&e.to_string()))? {
            ReplyHead::Simple { error, cookie } => {
                let mut pending = self.take(cookie)?;
                if error != 0 {
                    pending.error = Some(self.refused(&pending, error, ""));
                } else if pending.head.command == command::READ && self.structured {
                    return Err(self.violation_of(
                        pending,
                        "it sent a simple reply to a read, although structured replies were negotiated",
                    ));
                } else if pending.head.command == command::READ {
                    let mut buffer = std::mem::take(&mut pending.buffer);
                    let filled = self.fill(input, &mut buffer);
                    pending.buffer = buffer;
                    pending.filled = pending.head.length;
                    if let Err(error) = filled {
                        self.finish(pending, Err(error.clone()));
                        return Err(error);
                    }
                }
                self.conclude(pending);
            }
            ReplyHead::Chunk { flags, kind, cookie } => {
                let mut length = [0; 4];
                self.fill(input, &mut length)?;
                let mut pending = self.take(cookie)?;
                let is_last = flags & chunk::FLAG_DONE != 0;
                let read = self.read_chunk(input, &mut pending, kind, u32::from_be_bytes(length));
                if let Err(error) = read.and_then(|()| self.check_end(&mut pending, kind, is_last)) {
                    self.finish(pending, Err(error.clone()));
                    return Err(error);
                }
                if is_last {
                    self.conclude(pending);
                } else {
                    self.put_back(cookie, pending);
                }
            }
        }
        Ok(true)
    }

    fn take(&self, cookie: u64) -> Result<Pending, IoError> {
        let found = self.state.lock().pending.remove(&cookie);
        found.ok_or_else(|| self.violation("it answered a request that is not in flight"))
    }

    fn put_back(&self, cookie: u64, pending: Pending) {
        let mut state = self.state.lock();
        if let Some(error) = state.broken.clone() {
            drop(state);
            return self.finish(pending, Err(error));
        }
        state.pending.insert(cookie, pending);
    }

    fn violation_of(&self, pending: Pending, what: &str) -> IoError {
        let error = self.violation(what);
        self.finish(pending, Err(error.clone()));
        error
    }

    fn read_chunk(
        &self,
        input: &mut Input<'_>,
        pending: &mut Pending,
        kind: u16,
        length: u32,
    ) -> Result<(), IoError> {
        if kind == chunk::OFFSET_DATA {
            let mut offset = [0; 8];
            let Some(length) = length.checked_sub(8) else {
                return Err(self.violation("a data chunk is too short"));
            };
            self.fill(input, &mut offset)?;
            let place = self.place(pending, u64::from_be_bytes(offset), length)?;
            return self.fill(input, place);
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > CHUNK_LIMIT_BYTES {
            return Err(self.violation("a chunk is too long"));
        }
        let mut payload = vec![0; length];
        self.fill(input, &mut payload)?;
        if kind != chunk::OFFSET_HOLE {
            pending.other_chunks += 1;
        }
        let malformed = |e: crate::wire::WireError| self.violation(&e.to_string());
        match kind {
            chunk::NONE => {}
            chunk::OFFSET_HOLE => {
                let (offset, length) = decode_hole(&payload).map_err(malformed)?;
                self.place(pending, offset, length)?.fill(0);
            }
            chunk::BLOCK_STATUS if pending.head.command == command::BLOCK_STATUS => {
                let (context, extents) = decode_block_status(&payload).map_err(malformed)?;
                if !pending.whole.set_extents(context, extents) {
                    return Err(self.violation("it sent a second chunk of block status in one reply"));
                }
            }
            kind if kind & chunk::ERROR_BIT != 0 => {
                let (code, message) = decode_error(&payload).map_err(malformed)?;
                let error = self.refused(pending, code, &message);
                pending.error.get_or_insert(error);
            }
            kind => return Err(self.violation(&format!("it sent an unexpected chunk of type {kind}"))),
        }
        Ok(())
    }

    /// Checks that the reply can end. Otherwise a server could continue one reply for ever.
    fn check_end(&self, pending: &mut Pending, kind: u16, is_last: bool) -> Result<(), IoError> {
        if kind == chunk::NONE && !is_last {
            return Err(self.violation("it sent an empty chunk that does not end its reply"));
        }
        if pending.other_chunks > OTHER_CHUNKS_MAX {
            return Err(self.violation("a reply has too many chunks"));
        }
        Ok(())
    }

    /// Returns the part of a read's buffer that a chunk fills.
    fn place<'p>(&self, pending: &'p mut Pending, offset: u64, length: u32) -> Result<&'p mut [u8], IoError> {
        pending.filled = pending.filled.saturating_add(length.into());
        if pending.filled > pending.head.length {
            return Err(self.violation("chunks of a read overlap"));
        }
        if length == 0 {
            pending.other_chunks += 1;
        }
        let start = offset.checked_sub(pending.head.offset).and_then(|start| usize::try_from(start).ok());
        let place = start.and_then(|start| {
            let end = start.checked_add(usize::try_from(length).ok()?)?;
            pending.buffer.get_mut(start..end)
        });
        place.ok_or_else(|| self.violation("a chunk lies outside of the range that was read"))
    }

    fn conclude(&self, mut pending: Pending) {
        let result = match pending.error.take() {
            Some(error) => Err(error),
            None if pending.head.command == command::READ && pending.filled != pending.head.length => {
                Err(self.violation("the chunks do not cover the range that was read"))
            }
            None => Ok(()),
        };
        self.finish(pending, result);
    }

    fn refused(&self, pending: &Pending, code: u32, message: &str) -> IoError {
        let code = NbdError(code);
        let RequestHead { command, offset, length, .. } = pending.head;
        let name = command::Named(command);
        let text = format!("{}: {name} on {offset}+{length} failed with {code}", self.uri);
        if message.is_empty() {
            return IoError::new(code.to_kind(), text);
        }
        IoError::new(code.to_kind(), format!("{text}: {}", message.escape_debug()))
    }

    fn fill(&self, input: &mut Input<'_>, into: &mut [u8]) -> Result<(), IoError> {
        match input.fill(into) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.lost(None)),
            Err(error) => Err(self.lost(Some(error))),
        }
    }
}

/// How long a receive waits before the next check for silence.
fn silence_check(limit: Duration) -> Duration {
    // Zero would mean no limit.
    limit.checked_div(4).unwrap_or(limit).clamp(Duration::from_millis(1), SILENCE_CHECK)
}

/// Sends commands as they arrive; several with one system call if they arrive quickly.
fn write_commands(socket: &Socket, queue: &mpsc::Receiver<Command>) -> std::io::Result<()> {
    let mut out = Vec::with_capacity(SEND_BATCH_BYTES);
    while let Ok(first) = queue.recv() {
        let mut next = Some(first);
        while let Some(command) = next {
            out.extend_from_slice(&command.head.encode());
            if let Some((payload, start)) = &command.payload {
                let len = usize::try_from(command.head.length).unwrap_or(usize::MAX);
                let bytes = payload.get(*start..start.saturating_add(len)).unwrap_or_default();
                if bytes.len() >= SEND_LARGE_BYTES {
                    socket.send_all(&mut [IoSlice::new(&out), IoSlice::new(bytes)])?;
                    out.clear();
                } else {
                    out.extend_from_slice(bytes);
                }
            }
            if out.len() >= SEND_BATCH_BYTES {
                socket.send_all(&mut [IoSlice::new(&out)])?;
                out.clear();
            }
            next = queue.try_recv().ok();
        }
        socket.send_all(&mut [IoSlice::new(&out)])?;
        out.clear();
    }
    Ok(())
}

/// Buffered receiving; long data bypasses the buffer.
struct Input<'a> {
    transfer: &'a Transfer,
    /// When bytes last arrived.
    heard_at: Instant,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<'a> Input<'a> {
    fn new(transfer: &'a Transfer) -> Self {
        let buffer = vec![0; RECEIVE_BUFFER_BYTES].into_boxed_slice();
        Self { transfer, heard_at: Instant::now(), buffer, start: 0, end: 0 }
    }

    /// Fills `into`. `Ok(false)`: the server closed before its first byte.
    fn fill(&mut self, into: &mut [u8]) -> std::io::Result<bool> {
        let mut have = 0_usize;
        while let Some(rest) = into.get_mut(have..)
            && !rest.is_empty()
        {
            let here = self.buffer.get(self.start..self.end).unwrap_or_default();
            if !here.is_empty() {
                let count = here.len().min(rest.len());
                if let (Some(to), Some(from)) = (rest.get_mut(..count), here.get(..count)) {
                    to.copy_from_slice(from);
                }
                self.start = self.start.saturating_add(count);
                have = have.saturating_add(count);
                continue;
            }
            let direct = rest.len() >= RECEIVE_BUFFER_BYTES / 2;
            let asked_at = Instant::now();
            let received = if direct {
                self.transfer.socket.receive(rest, true)?
            } else {
                self.transfer.socket.receive(&mut self.buffer, true)?
            };
            match received {
                Received::Nothing => {
                    if asked_at.elapsed() < self.transfer.shortest_silence() {
                        // A part of a TLS record has arrived.
                        self.heard_at = Instant::now();
                    }
                    self.transfer.check_silence(self.heard_at)?;
                    continue;
                }
                Received::Bytes(count) if direct => have = have.saturating_add(count),
                Received::Bytes(count) => (self.start, self.end) = (0, count),
                Received::End if have == 0 => return Ok(false),
                Received::End => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            }
            self.heard_at = Instant::now();
        }
        Ok(true)
    }
}
