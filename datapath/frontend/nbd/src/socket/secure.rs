//! TLS on a socket: encrypts and decrypts between the socket's records and its user's plain bytes.
//!
//! One thread may receive while another sends: the state of the connection is locked only while the cipher
//! works, never while waiting for the peer.

use std::io::{Error, ErrorKind, IoSlice, Read, Result, Write};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustls::Connection;

use super::{Plain, Received};
use crate::tls::names_of;

/// The most that one receive from the socket takes. A record has at most 16 KiB and a little.
const ARRIVED_BYTES: usize = 128 << 10;
/// Bytes that are encrypted before they are sent.
const SEALED_BYTES: usize = 256 << 10;

pub(super) struct Secure {
    connection: Mutex<Connection>,
    arrived: Mutex<Arrived>,
    /// Encrypted records on their way. Locked during encryption and sending, so that they are sent in order.
    sealed: Mutex<Vec<u8>>,
}

/// Records that are not decrypted yet: `start .. end`.
struct Arrived {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Secure {
    /// Performs the handshake before `deadline`.
    pub(super) fn start(plain: &Plain, mut connection: Connection, deadline: Instant) -> Result<Self> {
        connection.set_buffer_limit(None);
        let secure = Self {
            connection: Mutex::new(connection),
            arrived: Mutex::new(Arrived {
                bytes: vec![0; ARRIVED_BYTES].into_boxed_slice(),
                start: 0,
                end: 0,
            }),
            sealed: Mutex::new(Vec::new()),
        };
        let done = secure.shake_hands(plain, deadline);
        if done.is_err() {
            // Tells the peer the reason, if it still listens.
            let _ = secure.flush(plain, Some(deadline));
        }
        done.map(|()| secure)
    }

    fn shake_hands(&self, plain: &Plain, deadline: Instant) -> Result<()> {
        let mut arrived = self.arrived.lock();
        loop {
            self.flush(plain, Some(deadline))?;
            if !self.connection.lock().is_handshaking() {
                return Ok(());
            }
            match arrived.receive(plain, false)? {
                Received::Bytes(_) => {}
                Received::Nothing => {
                    plain.wait_until(PollFlags::IN, deadline)?;
                    continue;
                }
                Received::End => return Err(ErrorKind::UnexpectedEof.into()),
            }
            let mut connection = self.connection.lock();
            while !arrived.is_empty() && connection.is_handshaking() {
                arrived.feed(&mut connection)?;
            }
        }
    }

    /// Names in the peer's certificate.
    pub(super) fn peer_names(&self) -> Vec<String> {
        let connection = self.connection.lock();
        connection.peer_certificates().and_then(<[_]>::first).map(names_of).unwrap_or_default()
    }

    /// Waits at most once. So if a peer sends a record byte by byte, the caller gets control in between.
    pub(super) fn receive(&self, plain: &Plain, into: &mut [u8], wait: bool) -> Result<Received> {
        if into.is_empty() {
            return Ok(Received::Nothing);
        }
        let mut arrived = self.arrived.lock();
        let opened = self.open(&mut arrived, into)?;
        if opened != Received::Nothing {
            return Ok(opened);
        }
        match arrived.receive(plain, wait)? {
            Received::Bytes(_) => self.open(&mut arrived, into),
            nothing => Ok(nothing),
        }
    }

    /// Decrypts arrived records, as many as fit into `into`.
    fn open(&self, arrived: &mut Arrived, into: &mut [u8]) -> Result<Received> {
        let mut connection = self.connection.lock();
        let mut have = 0_usize;
        while let Some(room) = into.get_mut(have..)
            && !room.is_empty()
        {
            match connection.reader().read(room) {
                Ok(0) if have == 0 => return Ok(Received::End),
                Ok(0) => break,
                Ok(count) => {
                    have = have.saturating_add(count);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if arrived.is_empty() {
                break;
            }
            arrived.feed(&mut connection)?;
        }
        Ok(if have == 0 { Received::Nothing } else { Received::Bytes(have) })
    }

    pub(super) fn send(&self, plain: &Plain, parts: &[IoSlice<'_>], deadline: Option<Instant>) -> Result<()> {
        let mut sealed = self.sealed.lock();
        let mut unsealed = 0_usize;
        for part in parts.iter().flat_map(|part| part.chunks(SEALED_BYTES)) {
            self.connection.lock().writer().write_all(part)?;
            unsealed = unsealed.saturating_add(part.len());
            if unsealed >= SEALED_BYTES {
                self.flush_sealed(&mut sealed, plain, deadline)?;
                unsealed = 0;
            }
        }
        self.flush_sealed(&mut sealed, plain, deadline)
    }

    fn flush(&self, plain: &Plain, deadline: Option<Instant>) -> Result<()> {
        self.flush_sealed(&mut self.sealed.lock(), plain, deadline)
    }

    fn flush_sealed(&self, sealed: &mut Vec<u8>, plain: &Plain, deadline: Option<Instant>) -> Result<()> {
        sealed.clear();
        {
            let mut connection = self.connection.lock();
            while connection.wants_write() {
                connection.write_tls(sealed)?;
            }
        }
        plain.send(&mut [IoSlice::new(sealed)], deadline)
    }

    /// Sends the TLS close alert, so that the peer can distinguish the end from a cut connection.
    pub(super) fn close(&self, plain: &Plain) {
        if let Some(mut sealed) = self.sealed.try_lock() {
            self.connection.lock().send_close_notify();
            // If the peer does not accept even the alert, do not wait.
            let _ = self.flush_sealed(&mut sealed, plain, Some(Instant::now()));
        }
    }
}

impl Arrived {
    fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    fn receive(&mut self, plain: &Plain, wait: bool) -> Result<Received> {
        if self.is_empty() {
            self.start = 0;
            self.end = 0;
        }
        let room = self.bytes.get_mut(self.end..).unwrap_or_default();
        let received = plain.receive(room, wait)?;
        if let Received::Bytes(count) = received {
            self.end = self.end.saturating_add(count);
        }
        Ok(received)
    }

    /// Gives the TLS connection the bytes that it accepts now, and decrypts them.
    fn feed(&mut self, connection: &mut Connection) -> Result<()> {
        let mut rest = self.bytes.get(self.start..self.end).unwrap_or_default();
        let taken = connection.read_tls(&mut rest)?;
        self.start = self.start.saturating_add(taken);
        connection.process_new_packets().map_err(|error| Error::new(ErrorKind::InvalidData, error))?;
        Ok(())
    }
}
