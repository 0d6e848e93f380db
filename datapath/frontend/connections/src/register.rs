//! Who is connected: how many may be, which of them are half open, and when the last has left.
//!
//! A connection is half open until its front-end has found out who it is and opens it. Those who open connections and say nothing keep
//! nobody out: where there are too many of them, a new one ends the oldest.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::socket::Socket;

/// The connections of a server.
#[derive(Debug)]
pub struct Register<S> {
    limits: Limits,
    state: Mutex<State<S>>,
    emptied: Condvar,
    stopping: AtomicBool,
}

/// How many may be connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// At the same time, half-open ones included. More are refused.
    pub connections: usize,
    /// Half open. A new one ends the oldest of them.
    pub half_open: usize,
}

#[derive(Debug)]
struct State<S> {
    last_id: u64,
    /// By age.
    connections: BTreeMap<u64, Registered<S>>,
}

#[derive(Debug)]
struct Registered<S> {
    socket: Arc<S>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    HalfOpen,
    /// Cut while it was half open, to make room for another one.
    Evicted,
    Open,
}

impl<S: AsRef<Socket>> Register<S> {
    /// Empty.
    pub fn new(limits: Limits) -> Arc<Self> {
        let state = State { last_id: 0, connections: BTreeMap::new() };
        Arc::new(Self {
            limits,
            state: Mutex::new(state),
            emptied: Condvar::new(),
            stopping: AtomicBool::new(false),
        })
    }

    /// Registers a half-open connection; `None` where there are too many.
    pub fn admit(self: &Arc<Self>, socket: &Arc<S>) -> Option<Seat<S>> {
        let mut state = self.state.lock();
        state.make_room(self.limits.half_open);
        if state.connections.len() >= self.limits.connections {
            return None;
        }
        state.last_id = state.last_id.wrapping_add(1);
        let id = state.last_id;
        state.connections.insert(id, Registered { socket: Arc::clone(socket), stage: Stage::HalfOpen });
        Some(Seat { register: Arc::clone(self), id })
    }

    /// How many are connected now, half-open ones included.
    pub fn count(&self) -> usize {
        self.state.lock().connections.len()
    }

    /// From now on the server stops.
    pub(crate) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn for_each_socket(&self, act: impl Fn(&Socket)) {
        self.state.lock().connections.values().for_each(|connection| act((*connection.socket).as_ref()));
    }

    /// `false`: the time is over.
    pub(crate) fn wait_until_empty(&self, patience: Duration) -> bool {
        let deadline = Instant::now().checked_add(patience);
        let mut state = self.state.lock();
        while !state.connections.is_empty() {
            let timed_out = match deadline {
                Some(deadline) => self.emptied.wait_until(&mut state, deadline).timed_out(),
                None => {
                    self.emptied.wait(&mut state);
                    false
                }
            };
            if timed_out {
                return state.connections.is_empty();
            }
        }
        true
    }
}

impl<S: AsRef<Socket>> State<S> {
    /// Ends the oldest half-open connection where there are `limit`.
    fn make_room(&mut self, limit: usize) {
        let is_half_open = |connection: &&mut Registered<S>| connection.stage == Stage::HalfOpen;
        if self.connections.values_mut().filter(is_half_open).count() >= limit
            && let Some(oldest) = self.connections.values_mut().find(is_half_open)
        {
            oldest.stage = Stage::Evicted;
            (*oldest.socket).as_ref().cut();
        }
    }
}

/// A connection's place in the register; leaves it when dropped, also by a panic.
#[derive(Debug)]
pub struct Seat<S> {
    register: Arc<Register<S>>,
    id: u64,
}

impl<S> Seat<S> {
    /// A number that no other connection of the server has had.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// It is half open no longer. `false`: it was cut before.
    pub fn open(&self) -> bool {
        let mut state = self.register.state.lock();
        let Some(connection) = state.connections.get_mut(&self.id) else { return false };
        let is_there = connection.stage == Stage::HalfOpen;
        if is_there {
            connection.stage = Stage::Open;
        }
        is_there
    }

    /// Whether it was cut to make room for another one.
    pub fn is_evicted(&self) -> bool {
        let state = self.register.state.lock();
        state.connections.get(&self.id).is_some_and(|connection| connection.stage == Stage::Evicted)
    }

    /// Whether the server stops: then a socket that receives nothing more says nothing about its peer.
    pub fn is_stopping(&self) -> bool {
        self.register.stopping.load(Ordering::SeqCst)
    }
}

impl<S> Drop for Seat<S> {
    fn drop(&mut self) {
        let mut state = self.register.state.lock();
        state.connections.remove(&self.id);
        if state.connections.is_empty() {
            self.register.emptied.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Received;
    use std::os::unix::net::UnixStream;

    fn connect(register: &Arc<Register<Socket>>) -> (Option<Seat<Socket>>, Socket) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (register.admit(&Arc::new(Socket::new(ours.into()))), Socket::new(theirs.into()))
    }

    fn is_cut(client: &Socket) -> bool {
        client.receive(&mut [0], false).unwrap() == Received::End
    }

    #[test]
    fn the_oldest_half_open_one_makes_room_and_open_ones_stay() {
        let register = Register::new(Limits { connections: 4, half_open: 2 });
        let (first, of_first) = connect(&register);
        let (second, of_second) = connect(&register);
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(first.open() && !first.open());
        let (third, of_third) = connect(&register);
        let (fourth, _of_fourth) = connect(&register);
        let (third, fourth) = (third.unwrap(), fourth.unwrap());
        assert!(!is_cut(&of_first) && is_cut(&of_second) && !is_cut(&of_third));
        assert!(second.is_evicted() && !second.open() && !third.is_evicted());
        // It makes room for nobody until it has left, and whoever is refused may have ended one more.
        assert!(connect(&register).0.is_none());
        assert!(third.is_evicted());
        drop(second);
        let (fifth, _of_fifth) = connect(&register);
        assert_eq!((register.count(), fifth.unwrap().id()), (4, 5));
        assert!(fourth.open());
    }

    #[test]
    fn who_waits_for_the_last_is_told() {
        let register = Register::new(Limits { connections: 2, half_open: 2 });
        let (seat, _client) = connect(&register);
        assert!(!register.wait_until_empty(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| register.wait_until_empty(Duration::MAX));
            drop(seat);
            assert!(waiting.join().unwrap());
        });
    }
}
