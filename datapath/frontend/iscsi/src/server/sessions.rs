//! The register of sessions.
//!
//! A connection is half open until its login is done. Then it belongs to a session. A session is identified
//! by the initiator's name, its ISID and the target. A second login with the same identity replaces the first
//! session: its socket is cut and its commands in flight end before the new session begins. Both logins must
//! have the same CHAP name: names of initiators and ISIDs are not secret, and the right to log in does not
//! include ending the sessions of others.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_connections::{NotOpened, Owner, Socket};
use parking_lot::{Condvar, Mutex};

use super::Permit;
use crate::name::IscsiName;

/// The identity of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionKey {
    pub(super) initiator: IscsiName,
    pub(super) isid: [u8; 6],
    pub(super) target: IscsiName,
}

/// What a login asks for.
#[derive(Debug)]
pub(super) struct Wanted {
    /// `None` for a discovery: discoveries never share a session.
    pub(super) key: Option<SessionKey>,
    /// The session to take over by its number; 0 for a new one.
    pub(super) tsih: u16,
    /// Connection number.
    pub(super) cid: u16,
    /// The name that CHAP proved.
    pub(super) account: Option<String>,
    /// The owner of the connection.
    pub(super) owner: Option<Owner>,
}

/// The sessions of a server, discoveries included.
#[derive(Default)]
pub(super) struct Sessions {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    last_tsih: u16,
    /// By connection.
    sessions: BTreeMap<u64, Registered>,
    /// The connection of each session.
    named: HashMap<SessionKey, u64>,
}

struct Registered {
    socket: Arc<Socket>,
    tsih: u16,
    cid: u16,
    key: Option<SessionKey>,
    account: Option<String>,
    replaced: Arc<AtomicBool>,
}

/// The registration of a session; dropping it removes the session, even after a panic.
pub(super) struct SessionPermit<'a> {
    sessions: &'a Sessions,
    connection: u64,
    pub(super) tsih: u16,
    /// Set when another login replaces the session.
    pub(super) replaced: Arc<AtomicBool>,
}

/// Why a session cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionRefusal {
    /// There is no session with that TSIH.
    NoSuchSession,
    /// The session has its only connection already.
    TooManyConnections,
    /// The session belongs to another CHAP name.
    OfAnother,
    /// The previous session did not end in time.
    Busy,
    /// This connection was cut during its login.
    Evicted,
    /// There are too many connections.
    Full,
}

impl Sessions {
    /// Turns a connection into a session. Waits up to `timeout` for the end of a session that it replaces.
    pub(super) fn establish(
        &self,
        permit: &Permit,
        socket: &Arc<Socket>,
        wanted: &Wanted,
        timeout: Duration,
    ) -> Result<SessionPermit<'_>, SessionRefusal> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.state.lock();
        let mut tsih = 0;
        let mut found = false;
        while let Some(old) = state.session_of(wanted) {
            if wanted.tsih != 0 && wanted.tsih != old.tsih {
                break;
            }
            if wanted.account != old.account {
                return Err(SessionRefusal::OfAnother);
            }
            if wanted.tsih != 0 && wanted.cid != old.cid {
                return Err(SessionRefusal::TooManyConnections);
            }
            if wanted.tsih != 0 {
                tsih = old.tsih;
            }
            found = true;
            old.end();
            let Some(deadline) = deadline else { return Err(SessionRefusal::Busy) };
            if self.left.wait_until(&mut state, deadline).timed_out() && state.session_of(wanted).is_some() {
                return Err(SessionRefusal::Busy);
            }
        }
        if wanted.tsih != 0 && !found {
            return Err(SessionRefusal::NoSuchSession);
        }
        permit.open(wanted.owner.clone()).map_err(|not_opened| match not_opened {
            NotOpened::Cut => SessionRefusal::Evicted,
            NotOpened::Full => SessionRefusal::Full,
        })?;
        if tsih == 0 {
            tsih = state.free_tsih();
        }
        let replaced = Arc::new(AtomicBool::new(false));
        let connection = permit.id();
        let session = Registered {
            socket: Arc::clone(socket),
            tsih,
            cid: wanted.cid,
            key: wanted.key.clone(),
            account: wanted.account.clone(),
            replaced: Arc::clone(&replaced),
        };
        state.sessions.insert(connection, session);
        if let Some(key) = &wanted.key {
            state.named.insert(key.clone(), connection);
        }
        Ok(SessionPermit { sessions: self, connection, tsih, replaced })
    }

    /// Ends all sessions of a target except that of this connection.
    pub(super) fn end_sessions_of(&self, target: &IscsiName, but: u64) {
        let state = self.state.lock();
        let others = state.sessions.iter().filter(|(connection, _)| **connection != but);
        for (_, session) in others {
            if session.key.as_ref().is_some_and(|key| key.target == *target) {
                session.end();
            }
        }
    }

    /// The number of sessions.
    pub(super) fn count(&self) -> usize {
        self.state.lock().sessions.len()
    }
}

impl Drop for SessionPermit<'_> {
    fn drop(&mut self) {
        let mut state = self.sessions.state.lock();
        if let Some(Registered { key: Some(key), .. }) = state.sessions.remove(&self.connection) {
            state.named.remove(&key);
        }
        self.sessions.left.notify_all();
    }
}

impl Registered {
    /// Ends the session, because another login replaces it or its target is reset.
    fn end(&self) {
        self.replaced.store(true, Ordering::SeqCst);
        self.socket.cut();
    }
}

impl State {
    fn session_of(&self, wanted: &Wanted) -> Option<&Registered> {
        self.sessions.get(self.named.get(wanted.key.as_ref()?)?)
    }

    /// A number that no session has. There are fewer connections than numbers.
    fn free_tsih(&mut self) -> u16 {
        loop {
            self.last_tsih = self.last_tsih.wrapping_add(1).max(1);
            if self.sessions.values().all(|session| session.tsih != self.last_tsih) {
                return self.last_tsih;
            }
        }
    }
}
