//! A session without a listener and without a thread of its own, for fuzzing. Its creator decides when it
//! receives and works, and sees its counters.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use headwater_block::{Budget, FaultLog};
use headwater_connections::{Peer, Received, Register, Socket};

use super::super::Shared;
use super::super::serve::End;
use super::super::sessions::Sessions;
use super::{Session, Stage};
use crate::limits::Limits;
use crate::login::Established;
use crate::targets::Targets;

/// A session in the full feature phase, and the initiator's end of its connection.
pub(crate) struct Alone<'a> {
    session: Session<'a>,
    peer: &'a UnixStream,
    sent: usize,
    end: Option<Ended>,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Orderly,
    Fault,
}

/// Counters of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) exp_cmd_sn: u32,
    pub(crate) max_cmd_sn: u32,
    pub(crate) tasks: usize,
    pub(crate) running: usize,
    pub(crate) bytes_collected: u64,
    pub(crate) bytes_executing: u64,
    /// Commands that arrived out of order.
    pub(crate) held: usize,
    pub(crate) held_bytes: usize,
}

/// Makes a session in the state after a login, and calls `act` with it.
pub(crate) fn with_session(
    targets: Arc<dyn Targets>,
    limits: Limits,
    established: Established,
    act: impl FnOnce(&mut Alone<'_>),
) -> std::io::Result<()> {
    let limits = limits.sane();
    let (ours, peer) = UnixStream::pair()?;
    peer.set_nonblocking(true)?;
    let socket = Socket::new(ours.into());
    // Sends never block here: replies that do not fit are a fault.
    socket.limit_wait(Duration::from_millis(1))?;
    socket.limit_stall(Duration::from_secs(5))?;
    let shared = Shared {
        faults: FaultLog::new("iSCSI", limits.warnings_per_10_s),
        budget: Budget::new(limits.shared_bytes),
        unsolicited: Budget::new(limits.shared_bytes / 4),
        refused: AtomicU64::new(0),
        sessions: Sessions::default(),
        targets,
        limits,
    };
    let socket = Arc::new(socket);
    let register = Register::new(headwater_connections::Limits { connections: 1, half_open: 1 });
    let permit = register.admit(&socket, &Peer::Unix(None)).ok_or(std::io::ErrorKind::ResourceBusy)?;
    let session = Session::new(&shared, &permit, &socket, "an initiator", established)?;
    act(&mut Alone { session, peer: &peer, sent: 0, end: None });
    Ok(())
}

impl Alone<'_> {
    /// Sends bytes as the initiator, at most 8 KiB at a time.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        assert!(self.sent == 0 && bytes.len() <= 8192);
        // A session that has ended receives nothing more.
        if self.end.is_none() && !matches!(self.session.stage, Stage::Closing(..)) {
            let sent = self.peer.write(bytes);
            assert!(sent.as_ref().is_ok_and(|sent| *sent == bytes.len()), "{sent:?}");
            self.sent = bytes.len();
        }
    }

    /// Disconnects as the initiator.
    pub(crate) fn hang_up(&mut self) {
        let _ = self.peer.shutdown(std::net::Shutdown::Write);
        if self.end.is_none() && !matches!(self.session.stage, Stage::Closing(..)) {
            let end = match self.session.receive_now(false) {
                Ok(Received::End) => self.session.hung_up(),
                received => panic!("no end was received, but {:?}", received.is_ok()),
            };
            self.note(end);
        }
        self.close();
    }

    /// Runs one round: receives the bytes that were sent, and does all work that can be done.
    pub(crate) fn round(&mut self) {
        if self.end.is_some() {
            return;
        }
        if self.sent > 0 {
            let received = self.session.receive_now(false);
            assert!(matches!(received, Ok(Received::Bytes(count)) if count == self.sent));
            self.sent = 0;
        }
        let end = self.session.work();
        self.note(end);
        self.close();
    }

    fn close(&mut self) {
        if self.end.is_none()
            && self.session.tasks.running() == 0
            && matches!(self.session.stage, Stage::Closing(..))
        {
            let end = self.session.close();
            self.note(end);
            assert!(self.end.is_some(), "a session without tasks does not close");
        }
    }

    fn note(&mut self, end: Result<(), End>) {
        match end {
            Ok(()) => {}
            Err(End::Orderly(_)) => self.end = Some(Ended::Orderly),
            Err(End::Fault(_)) => self.end = Some(Ended::Fault),
        }
    }

    /// How the session ended, if it has.
    pub(crate) fn end(&self) -> Option<Ended> {
        self.end
    }

    /// All bytes that the initiator can receive now.
    pub(crate) fn replies(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut piece = [0; 4096];
        while let Ok(count) = (&mut &*self.peer).read(&mut piece)
            && count > 0
        {
            bytes.extend_from_slice(piece.get(..count).unwrap_or_default());
        }
        bytes
    }

    pub(crate) fn counts(&self) -> Counts {
        let session = &self.session;
        let held_bytes = session.held.values().map(|pdu| pdu.data.len().saturating_add(pdu.ahs.len())).sum();
        assert_eq!(session.held_bytes, held_bytes, "bytes are counted that are not held");
        Counts {
            exp_cmd_sn: session.window.next(),
            max_cmd_sn: session.window.max(),
            tasks: session.tasks.len(),
            running: session.tasks.running(),
            bytes_collected: session.tasks.bytes_collected(),
            bytes_executing: session.tasks.bytes_executing(),
            held: session.held.len(),
            held_bytes,
        }
    }
}
