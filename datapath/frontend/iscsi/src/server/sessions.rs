//! Which session is whose.
//!
//! A connection is half open until its login is done, then it is a session's. A session's name is the initiator's name, its ISID
//! and the target; a second login of the same name replaces the first: its socket is cut, its commands in flight end, and
//! only then the new session begins. That takes the same CHAP name: names of initiators and ISIDs are no secrets, and who may log in may
//! not therefore end the sessions of others.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_connections::{NotOpened, Owner, Socket};
use parking_lot::{Condvar, Mutex};

use super::Permit;
use crate::name::IscsiName;

/// What makes two logins the same session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionKey {
    pub(super) initiator: IscsiName,
    pub(super) isid: [u8; 6],
    pub(super) target: IscsiName,
}

/// What a login asks for.
#[derive(Debug)]
pub(super) struct Wanted {
    /// `None` for a discovery: two are never the same.
    pub(super) key: Option<SessionKey>,
    /// The session to take over by its number; 0 for a new one.
    pub(super) tsih: u16,
    /// Connection number.
    pub(super) cid: u16,
    /// The name that was proved by CHAP.
    pub(super) account: Option<String>,
    /// Whose connection it is.
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
    /// By the connection of each.
    sessions: BTreeMap<u64, Registered>,
    /// Their connections.
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

/// A place in the full feature phase; leaves it when dropped, also by a panic.
pub(super) struct SessionPermit<'a> {
    sessions: &'a Sessions,
    connection: u64,
    pub(super) tsih: u16,
    /// Set when another login takes over.
    pub(super) replaced: Arc<AtomicBool>,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionRefusal {
    /// There is no session with that TSIH.
    NoSuchSession,
    /// The session has its one connection.
    TooManyConnections,
    /// The session is one of another CHAP name.
    OfAnother,
    /// The session before did not end in time.
    Busy,
    /// This connection was cut while it logged in.
    Evicted,
    /// There are too many connections.
    Full,
}

impl Sessions {
    /// Makes a connection a session's. Waits up to `patience` for a session that it replaces.
    pub(super) fn establish(
        &self,
        permit: &Permit,
        socket: &Arc<Socket>,
        wanted: &Wanted,
        patience: Duration,
    ) -> Result<SessionPermit<'_>, SessionRefusal> {
        let deadline = Instant::now().checked_add(patience);
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

    /// Ends all sessions of a target but this connection's.
    pub(super) fn end_sessions_of(&self, target: &IscsiName, but: u64) {
        let state = self.state.lock();
        let others = state.sessions.iter().filter(|(connection, _)| **connection != but);
        for (_, session) in others {
            if session.key.as_ref().is_some_and(|key| key.target == *target) {
                session.end();
            }
        }
    }

    /// How many there are.
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
    /// Has it end, since another login or a reset of its target wants that.
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
