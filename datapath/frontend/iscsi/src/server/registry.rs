//! Who is connected, and which session is whose.
//!
//! A connection is half open until its login is done, then it is a session's. A session's name is the initiator's name, its ISID
//! and the target; a second login of the same name replaces the first: its socket is cut, its commands in flight end, and
//! only then the new session begins. That takes the same CHAP name: names of initiators and ISIDs are no secrets, and who may log in may
//! not therefore end the sessions of others.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use headwater_connections::Socket;
use parking_lot::{Condvar, Mutex};

use super::Shared;
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
}

#[derive(Default)]
pub(super) struct Registry {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    last_id: u64,
    last_tsih: u16,
    /// By age.
    connections: BTreeMap<u64, Connection>,
    /// The connection of each session.
    sessions: HashMap<SessionKey, u64>,
}

struct Connection {
    socket: Arc<Socket>,
    kind: Kind,
}

enum Kind {
    HalfOpen,
    /// Cut to make room for another login.
    Evicted,
    Session {
        tsih: u16,
        cid: u16,
        key: Option<SessionKey>,
        account: Option<String>,
        replaced: Arc<AtomicBool>,
    },
}

/// A place in the full feature phase.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) tsih: u16,
    /// Set when another login takes over.
    pub(super) replaced: Arc<AtomicBool>,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
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
}

impl Registry {
    /// Registers a half-open connection; `None` where there are too many connections. The oldest half-open one is ended where
    /// there are too many of those.
    pub(super) fn admit(&self, socket: &Arc<Socket>, limit: usize, half_open_limit: usize) -> Option<u64> {
        let mut state = self.state.lock();
        let half_open = |connection: &&mut Connection| matches!(connection.kind, Kind::HalfOpen);
        if state.connections.values_mut().filter(half_open).count() >= half_open_limit
            && let Some(oldest) = state.connections.values_mut().find(half_open)
        {
            oldest.kind = Kind::Evicted;
            oldest.socket.cut();
        }
        if state.connections.len() >= limit {
            return None;
        }
        state.last_id = state.last_id.wrapping_add(1);
        let id = state.last_id;
        let connection = Connection { socket: Arc::clone(socket), kind: Kind::HalfOpen };
        state.connections.insert(id, connection);
        Some(id)
    }

    /// Whether a connection was ended to make room for another login.
    pub(super) fn is_evicted(&self, id: u64) -> bool {
        self.state.lock().connections.get(&id).is_some_and(|c| matches!(c.kind, Kind::Evicted))
    }

    /// Makes a connection a session's. Waits up to `patience` for a session that it replaces.
    pub(super) fn establish(&self, id: u64, wanted: &Wanted, patience: Duration) -> Result<Place, NoPlace> {
        let deadline = Instant::now().checked_add(patience);
        let mut state = self.state.lock();
        let mut tsih = 0;
        let mut found = false;
        while let Some(old) = state.session_of(wanted) {
            let Kind::Session { tsih: its, cid, account, replaced, .. } = &old.kind else { break };
            if wanted.tsih != 0 && wanted.tsih != *its {
                break;
            }
            if wanted.account != *account {
                return Err(NoPlace::OfAnother);
            }
            if wanted.tsih != 0 && wanted.cid != *cid {
                return Err(NoPlace::TooManyConnections);
            }
            if wanted.tsih != 0 {
                tsih = *its;
            }
            found = true;
            replaced.store(true, Ordering::SeqCst);
            old.socket.cut();
            let Some(deadline) = deadline else { return Err(NoPlace::Busy) };
            if self.changed.wait_until(&mut state, deadline).timed_out() && state.session_of(wanted).is_some()
            {
                return Err(NoPlace::Busy);
            }
        }
        if wanted.tsih != 0 && !found {
            return Err(NoPlace::NoSuchSession);
        }
        if tsih == 0 {
            tsih = state.free_tsih();
        }
        let replaced = Arc::new(AtomicBool::new(false));
        let Some(own) = state.connections.get_mut(&id).filter(|own| matches!(own.kind, Kind::HalfOpen))
        else {
            return Err(NoPlace::Evicted);
        };
        own.kind = Kind::Session {
            tsih,
            cid: wanted.cid,
            key: wanted.key.clone(),
            account: wanted.account.clone(),
            replaced: Arc::clone(&replaced),
        };
        if let Some(key) = &wanted.key {
            state.sessions.insert(key.clone(), id);
        }
        Ok(Place { tsih, replaced })
    }

    /// Ends all sessions of a target but this connection's.
    pub(super) fn end_sessions_of(&self, target: &IscsiName, but: u64) {
        let state = self.state.lock();
        for (id, connection) in &state.connections {
            if let Kind::Session { key: Some(key), replaced, .. } = &connection.kind
                && key.target == *target
                && *id != but
            {
                replaced.store(true, Ordering::SeqCst);
                connection.socket.cut();
            }
        }
    }

    fn leave(&self, id: u64) {
        let mut state = self.state.lock();
        if let Some(Connection { kind: Kind::Session { key: Some(key), .. }, .. }) =
            state.connections.remove(&id)
        {
            state.sessions.remove(&key);
        }
        self.changed.notify_all();
    }

    pub(super) fn connections(&self) -> usize {
        self.state.lock().connections.len()
    }

    pub(super) fn sessions(&self) -> usize {
        let state = self.state.lock();
        state.connections.values().filter(|c| matches!(c.kind, Kind::Session { .. })).count()
    }

    pub(super) fn for_each_socket(&self, act: impl Fn(&Socket)) {
        self.state.lock().connections.values().for_each(|connection| act(&connection.socket));
    }

    /// `false`: the time is over.
    pub(super) fn wait_until_empty(&self, patience: Duration) -> bool {
        let Some(deadline) = Instant::now().checked_add(patience) else { return false };
        let mut state = self.state.lock();
        while !state.connections.is_empty() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.connections.is_empty();
            }
        }
        true
    }
}

impl State {
    fn session_of(&self, wanted: &Wanted) -> Option<&Connection> {
        let id = self.sessions.get(wanted.key.as_ref()?)?;
        self.connections.get(id)
    }

    /// A number that no session has. There are fewer connections than numbers.
    fn free_tsih(&mut self) -> u16 {
        loop {
            self.last_tsih = self.last_tsih.wrapping_add(1).max(1);
            let taken = self
                .connections
                .values()
                .any(|c| matches!(c.kind, Kind::Session { tsih, .. } if tsih == self.last_tsih));
            if !taken {
                return self.last_tsih;
            }
        }
    }
}

/// A connection's place in the register; leaves it when dropped, also by a panic.
pub(super) struct Seat {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.registry.leave(self.id);
    }
}
