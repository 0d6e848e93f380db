//! The client: an export of another server as a [`Device`], for importing and for tests.
//!
//! ```text
//! submit --> pending[cookie], command queue --> writer thread --> socket
//! completion <-- whole request <-- parts <-- reader thread <----- socket
//! ```
//!
//! - Negotiates structured replies, `base:allocation` and `GO`; works without the first two.
//! - Many requests are in flight ([`ClientOptions`]); replies come in any order. A request that exceeds the
//!   server's limit is cut into parts, which are in flight together.
//! - Features that a server does not offer are replaced: zero writes by writing zeroes, FUA by a flush,
//!   extents by reporting everything as data. `Discard` is sent as a zero write that may unmap, because NBD's
//!   trim promises no zeroes.
//! - A server that hangs breaks the connection, too: it happens when nothing arrives for
//!   [`ClientOptions::silence_limit_ms`] while commands are in flight.
//! - When the connection breaks, all requests in flight and later ones fail with an error that says so. The
//!   client does not reconnect.
//!
//! Start reading at `transfer`.

mod extents;
mod negotiate;
mod transfer;
pub mod uri;
mod whole;

use std::sync::Arc;
use std::thread::JoinHandle;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Request,
};

pub use negotiate::ConnectError;
pub use uri::{NbdUri, ServerAddress};

use crate::wire::handshake::transmission_flag;
use crate::wire::transmission::{command, command_flag};
use negotiate::Negotiated;
use transfer::Transfer;
use whole::Whole;

/// Limits of one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// Time for connecting and the handshake, in milliseconds.
    pub connect_timeout_ms: u64,
    /// How long the server may send nothing while commands are in flight, in milliseconds. After that the
    /// connection breaks. `None`: no limit.
    pub silence_limit_ms: Option<u64>,
    /// Commands in flight. `submit` waits for room.
    pub commands_in_flight: usize,
    /// Payload in flight, in bytes. `submit` waits for room. The limit may be exceeded by one command.
    pub bytes_in_flight: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout_ms: 10_000,
            silence_limit_ms: Some(60_000),
            commands_in_flight: 64,
            bytes_in_flight: 64 << 20,
        }
    }
}

/// An export of another server.
pub struct Client {
    transfer: Arc<Transfer>,
    export: Negotiated,
    threads: Vec<JoinHandle<()>>,
}

/// Longest zero write in one command.
const ZEROES_PART_BYTES: u64 = 1 << 30;
/// Longest range of one request for extents.
const EXTENTS_PART_BYTES: u64 = 1 << 30;
/// How much is written at once if a server has no zero writes.
const ZERO_DATA_BYTES: u64 = 1 << 20;

impl Client {
    /// Connects to what a URI names, with default options.
    pub fn open(uri: &str) -> Result<Arc<Self>, ConnectError> {
        Self::connect(&uri.parse()?, &ClientOptions::default())
    }

    /// Connects.
    pub fn connect(uri: &NbdUri, options: &ClientOptions) -> Result<Arc<Self>, ConnectError> {
        let (socket, export) = negotiate::connect(uri, options)?;
        let (transfer, threads) = Transfer::start(socket, uri.to_string(), export.structured, options)
            .map_err(|source| ConnectError::System { uri: uri.to_string(), source })?;
        Ok(Arc::new(Self { transfer, export, threads }))
    }

    /// The server's description of the export, for people. May be empty.
    pub fn description(&self) -> &str {
        &self.export.description
    }

    /// Closes the connection: requests in flight and later ones fail at once, whatever the server does.
    pub fn close(&self) {
        self.transfer.disconnect();
    }

    fn has(&self, flag: u16) -> bool {
        self.export.flags & flag != 0
    }

    fn read(&self, range: ByteRange, buffer: Vec<u8>, done: Completion) {
        let parts = cut(range, self.export.maximum_bytes);
        let [single] = parts.as_slice() else {
            let whole = Whole::with_buffer(parts.len(), buffer, done);
            for part in parts {
                // Both fit: a part lies within a buffer.
                let at = usize::try_from(part.offset().saturating_sub(range.offset())).unwrap_or(0);
                let len = usize::try_from(part.len()).unwrap_or(0);
                self.transfer.read(part, vec![0; len], Some(at), Arc::clone(&whole));
            }
            return;
        };
        self.transfer.read(*single, buffer, None, Whole::new(1, done));
    }

    fn write(&self, range: ByteRange, buffer: Vec<u8>, fua: bool, done: Completion) {
        let flags = if fua { command_flag::FUA } else { 0 };
        let parts = cut(range, self.export.maximum_bytes);
        let payload = Arc::new(buffer);
        let whole = Whole::with_payload(parts.len(), Arc::clone(&payload), done);
        for part in parts {
            let start = usize::try_from(part.offset().saturating_sub(range.offset())).unwrap_or(0);
            self.transfer.write(part, flags, &payload, start, Arc::clone(&whole));
        }
    }

    fn write_zeroes(&self, range: ByteRange, may_unmap: bool, fua: bool, done: Completion) {
        let mut flags = if fua { command_flag::FUA } else { 0 };
        if self.has(transmission_flag::SEND_WRITE_ZEROES) {
            if !may_unmap {
                flags |= command_flag::NO_HOLE;
            }
            let parts = cut(range, ZEROES_PART_BYTES);
            let whole = Whole::new(parts.len(), done);
            for part in parts {
                self.transfer.command(command::WRITE_ZEROES, flags, part, Arc::clone(&whole));
            }
            return;
        }
        let parts = cut(range, self.export.maximum_bytes.min(ZERO_DATA_BYTES));
        let longest = parts.iter().map(ByteRange::len).max().unwrap_or(0);
        let zeroes = Arc::new(vec![0; usize::try_from(longest).unwrap_or(0)]);
        let whole = Whole::new(parts.len(), done);
        for part in parts {
            self.transfer.write(part, flags, &zeroes, 0, Arc::clone(&whole));
        }
    }

    /// Carries out a write with FUA on a server that has none: the write, then a flush, then the answer.
    fn flush_after(&self, done: Completion) -> Completion {
        if !self.has(transmission_flag::SEND_FLUSH) {
            // The server says that nothing is ever volatile.
            return done;
        }
        let transfer = Arc::clone(&self.transfer);
        Completion::new(move |outcome| {
            if outcome.result.is_err() {
                return done.complete(outcome.result, outcome.buffer);
            }
            let after = Completion::new(move |flushed| done.complete(flushed.result, outcome.buffer));
            transfer.command(command::FLUSH, 0, EMPTY, Whole::new(1, after));
        })
    }
}

const EMPTY: ByteRange = match ByteRange::new(0, 0) {
    Some(range) => range,
    None => unreachable!(),
};

impl Device for Client {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.export.size_bytes,
            logical_block_bytes: self.export.logical_block_bytes,
            physical_block_bytes: self.export.physical_block_bytes,
            read_only: self.has(transmission_flag::READ_ONLY),
            volatile_cache: self.has(transmission_flag::SEND_FLUSH),
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { .. } => Ok(Attempt::MustWait),
            Op::Flush if !self.has(transmission_flag::SEND_FLUSH) => Ok(Attempt::Done),
            Op::Flush => Ok(Attempt::MustWait),
            _ if self.has(transmission_flag::READ_ONLY) => Err(self.transfer.read_only()),
            _ => Ok(Attempt::MustWait),
        }
    }

    fn submit(&self, request: Request, done: Completion) {
        let changes = !matches!(request, Request::Read { .. } | Request::Flush | Request::Prefetch { .. });
        if changes && self.has(transmission_flag::READ_ONLY) {
            return done.complete(Err(self.transfer.read_only()), request.into_buffer());
        }
        let fua_works = self.has(transmission_flag::SEND_FUA);
        match request {
            Request::Read { range, buffer } => self.read(range, buffer, done),
            Request::Write { range, buffer, fua } => {
                let done = if fua && !fua_works { self.flush_after(done) } else { done };
                self.write(range, buffer, fua && fua_works, done);
            }
            Request::WriteZeroes { range, may_unmap, fua } => {
                let done = if fua && !fua_works { self.flush_after(done) } else { done };
                self.write_zeroes(range, may_unmap, fua && fua_works, done);
            }
            Request::Discard { range } => self.write_zeroes(range, true, false, done),
            Request::Flush if self.has(transmission_flag::SEND_FLUSH) => {
                self.transfer.command(command::FLUSH, 0, EMPTY, Whole::new(1, done));
            }
            Request::Prefetch { range } if self.has(transmission_flag::SEND_CACHE) => {
                let parts = cut(range, self.export.maximum_bytes);
                let whole = Whole::new(parts.len(), done);
                for part in parts {
                    self.transfer.command(command::CACHE, 0, part, Arc::clone(&whole));
                }
            }
            Request::Flush | Request::Prefetch { .. } => done.complete(Ok(()), Vec::new()),
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let Some(context) = self.export.base_allocation else {
            return Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }]);
        };
        let asked = range.clipped_to(range.offset().saturating_add(EXTENTS_PART_BYTES));
        let flags = if max_extents == 1 { command_flag::REQ_ONE } else { 0 };
        let (tx, rx) = std::sync::mpsc::sync_channel(1);
        let done = Completion::new(move |outcome| {
            // The receiver waits for this message.
            let _ = tx.send(outcome.result);
        });
        let whole = Whole::new(1, done);
        self.transfer.block_status(flags, asked, Arc::clone(&whole));
        let answer = rx
            .recv()
            .map_err(|e| IoError::with_source(IoErrorKind::Device, "block status was never answered", e))?;
        answer?;
        let block = u64::from(self.export.logical_block_bytes);
        let extents = extents::aligned(&whole.extents(context), asked.len(), block, max_extents);
        if extents.is_empty() {
            return Err(self.transfer.violation("it answered block status without base:allocation"));
        }
        Ok(extents)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.transfer.disconnect();
        for thread in self.threads.drain(..) {
            // If a completion drops the last reference, it does so on one of these threads.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Cuts a range into parts of at most `longest` bytes; at least one.
fn cut(range: ByteRange, longest: u64) -> Vec<ByteRange> {
    let mut parts = Vec::new();
    let mut at = range.offset();
    while at < range.end() {
        let len = longest.max(1).min(range.end().saturating_sub(at));
        parts.extend(ByteRange::new(at, len));
        at = at.saturating_add(len);
    }
    if parts.is_empty() {
        parts.push(range);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_without_gaps() {
        let range = ByteRange::new(512, 10_000).unwrap();
        let parts = cut(range, 4096);
        assert_eq!(parts.iter().map(ByteRange::len).collect::<Vec<_>>(), [4096, 4096, 1808]);
        assert!(parts.windows(2).all(|pair| pair[0].end() == pair[1].offset()));
        assert_eq!(cut(EMPTY, 4096), [EMPTY]);
    }
}
