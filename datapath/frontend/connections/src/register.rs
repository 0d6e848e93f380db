//! The register of a server's connections: how many may be connected, which of them are half open, and when
//! the last one has ended.
//!
//! A connection is half open until its front-end has identified the client and calls [`Permit::open`].
//! Clients that connect and send nothing do not keep others out: if too many connections are half open, a new
//! one cuts the oldest of them.
//!
//! Neither can one client that takes all connections. As long as there are free ones, nothing is counted per
//! owner: a host may have many machines, and many hosts may share an address. If all are taken and one
//! [owner](Owner) has more than half of them, further clients may still identify themselves. A client whose
//! owner has no connection then replaces the newest connection of the largest owner. A client whose owner has
//! one already is refused.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::listener::Peer;
use crate::socket::Socket;

/// An owner with more than this part of all connections may lose one to another owner. At least half, because
/// a cut connection is a machine's disk.
const LARGE_PART: usize = 2;

/// Low bits of an IPv6 address, which a client can choose freely within its network.
const IPV6_HOST_BITS: u32 = 64;

/// All connections of a server.
#[derive(Debug)]
pub struct Register<S> {
    limits: Limits,
    state: Mutex<State<S>>,
    emptied: Condvar,
    stopping: AtomicBool,
}

/// Limits on the number of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// At the same time, including half-open ones; further ones are refused. Exception: if one owner has more
    /// than half of them, up to `half_open` more are admitted, and stay only if they replace another
    /// connection.
    pub connections: usize,
    /// Half-open connections. A new one cuts the oldest.
    pub half_open: usize,
}

/// The owner to which a connection counts when all connections are taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// A client that proved this name.
    Name(String),
    /// A host; for IPv6, a network.
    Host(IpAddr),
}

impl Owner {
    /// The proved name, or else the address. `None` without either, such as for a local process: such a
    /// connection replaces no other and is never replaced.
    pub fn of(name: Option<&str>, peer: &Peer) -> Option<Self> {
        match (name, peer) {
            (Some(name), _) => Some(Self::Name(name.to_owned())),
            (None, Peer::Tcp(address)) => Some(Self::host(address.ip())),
            (None, Peer::Unix(_)) => None,
        }
    }

    fn host(address: IpAddr) -> Self {
        Self::Host(match address.to_canonical() {
            IpAddr::V6(address) => {
                Ipv6Addr::from_bits(address.to_bits() >> IPV6_HOST_BITS << IPV6_HOST_BITS).into()
            }
            address => address,
        })
    }
}

/// Why a connection was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotOpened {
    /// It was cut before.
    Cut,
    /// All connections are taken, and none may be replaced.
    Full,
}

#[derive(Debug)]
struct State<S> {
    last_id: u64,
    /// By age: the key is the id.
    connections: BTreeMap<u64, Registered<S>>,
}

#[derive(Debug)]
struct Registered<S> {
    socket: Arc<S>,
    stage: Stage,
    /// Set when the connection is opened.
    owner: Option<Owner>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    HalfOpen,
    /// Cut while half open, because a new connection came.
    Evicted,
    Open,
    /// Cut while open, for a client whose owner had no connection.
    GaveWay,
}

impl<S: AsRef<Socket>> Register<S> {
    /// Makes an empty register.
    pub fn new(limits: Limits) -> Arc<Self> {
        let state = State { last_id: 0, connections: BTreeMap::new() };
        Arc::new(Self {
            limits,
            state: Mutex::new(state),
            emptied: Condvar::new(),
            stopping: AtomicBool::new(false),
        })
    }

    /// Registers a half-open connection; `None` if there are too many.
    pub fn admit(self: &Arc<Self>, socket: &Arc<S>, peer: &Peer) -> Option<Permit<S>> {
        let Limits { connections, half_open } = self.limits;
        let mut state = self.state.lock();
        state.make_room(half_open);
        let taken = state.connections.len();
        if taken >= connections {
            // A client of the same host might prove another name, but a host with most connections has proved
            // none for them.
            let from = Owner::of(None, peer);
            let may_get_one = || state.largest(connections).is_some_and(|owner| Some(owner) != from);
            if taken >= connections.saturating_add(half_open) || !may_get_one() {
                return None;
            }
        }
        state.last_id = state.last_id.wrapping_add(1);
        let id = state.last_id;
        state
            .connections
            .insert(id, Registered { socket: Arc::clone(socket), stage: Stage::HalfOpen, owner: None });
        Some(Permit { register: Arc::clone(self), id })
    }

    /// How many are connected now, half-open ones included.
    pub fn count(&self) -> usize {
        self.state.lock().connections.len()
    }

    /// Marks the server as stopping.
    pub(crate) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn for_each_socket(&self, act: impl Fn(&Socket)) {
        self.state.lock().connections.values().for_each(|connection| act((*connection.socket).as_ref()));
    }

    /// Waits until all connections have ended; `false` after `timeout`.
    pub(crate) fn wait_until_empty(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
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
    /// Cuts the oldest half-open connection if there are `limit` of them.
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

impl<S> State<S> {
    fn open(&self) -> impl Iterator<Item = &Registered<S>> {
        self.connections.values().filter(|connection| connection.stage == Stage::Open)
    }

    /// The owner with most open connections, if it has more than the part [`LARGE_PART`] of all.
    fn largest(&self, connections: usize) -> Option<Owner> {
        let mut counts = HashMap::<&Owner, usize>::new();
        for owner in self.open().filter_map(|connection| connection.owner.as_ref()) {
            let count = counts.entry(owner).or_default();
            *count = count.saturating_add(1);
        }
        let (owner, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        (count > (connections / LARGE_PART).max(1)).then(|| owner.clone())
    }
}

impl<S: AsRef<Socket>> State<S> {
    /// Cuts the newest connection of the largest owner, in favour of `owner`. `false` if `owner` has a
    /// connection already, or no owner is large.
    fn evict_largest(&mut self, owner: Option<&Owner>, connections: usize) -> bool {
        let has_some = |owner| self.open().any(|connection| connection.owner.as_ref() == Some(owner));
        if owner.is_none_or(has_some) {
            return false;
        }
        let Some(largest) = self.largest(connections) else { return false };
        if matches!((owner, &largest), (Some(Owner::Host(_)), Owner::Name(_))) {
            // A client without a name does not displace one with a name: an attacker can have any number of
            // addresses.
            return false;
        }
        let is_theirs = |connection: &&mut Registered<S>| {
            connection.stage == Stage::Open && connection.owner.as_ref() == Some(&largest)
        };
        let Some(newest) = self.connections.values_mut().rev().find(is_theirs) else { return false };
        newest.stage = Stage::GaveWay;
        (*newest.socket).as_ref().cut();
        true
    }
}

/// A registered connection; removed from the register when dropped, including by a panic.
#[derive(Debug)]
pub struct Permit<S> {
    register: Arc<Register<S>>,
    id: u64,
}

impl<S> Permit<S> {
    /// A number that is unique among all connections of the server.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether it was cut while half open, because a new connection came.
    pub fn is_evicted(&self) -> bool {
        self.is_in(Stage::Evicted)
    }

    /// Whether it was cut while open, for a client whose owner had no connection.
    pub fn gave_way(&self) -> bool {
        self.is_in(Stage::GaveWay)
    }

    fn is_in(&self, stage: Stage) -> bool {
        let state = self.register.state.lock();
        state.connections.get(&self.id).is_some_and(|connection| connection.stage == stage)
    }

    /// Whether the server is stopping: then the end of input does not mean that the peer has closed.
    pub fn is_stopping(&self) -> bool {
        self.register.stopping.load(Ordering::SeqCst)
    }
}

impl<S: AsRef<Socket>> Permit<S> {
    /// Makes the connection open: its client is identified.
    pub fn open(&self, owner: Option<Owner>) -> Result<(), NotOpened> {
        let connections = self.register.limits.connections;
        let mut state = self.register.state.lock();
        if state.connections.get(&self.id).is_none_or(|connection| connection.stage != Stage::HalfOpen) {
            return Err(NotOpened::Cut);
        }
        if state.open().count() >= connections && !state.evict_largest(owner.as_ref(), connections) {
            return Err(NotOpened::Full);
        }
        if let Some(connection) = state.connections.get_mut(&self.id) {
            (connection.stage, connection.owner) = (Stage::Open, owner);
        }
        Ok(())
    }
}

impl<S> Drop for Permit<S> {
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

    fn connect(register: &Arc<Register<Socket>>) -> (Option<Permit<Socket>>, Socket) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (register.admit(&Arc::new(Socket::new(ours.into())), &NOBODY), Socket::new(theirs.into()))
    }

    const NOBODY: Peer = Peer::Unix(None);

    fn name(name: &str) -> Option<Owner> {
        Owner::of(Some(name), &NOBODY)
    }

    fn is_cut(client: &Socket) -> bool {
        client.receive(&mut [0], false).unwrap() == Received::End
    }

    #[test]
    fn the_oldest_half_open_connection_makes_room() {
        let register = Register::new(Limits { connections: 4, half_open: 2 });
        let (first, of_first) = connect(&register);
        let (second, of_second) = connect(&register);
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!((first.open(None), first.open(None)), (Ok(()), Err(NotOpened::Cut)));
        let (third, of_third) = connect(&register);
        let (fourth, _of_fourth) = connect(&register);
        let (third, fourth) = (third.unwrap(), fourth.unwrap());
        assert!(!is_cut(&of_first) && is_cut(&of_second) && !is_cut(&of_third));
        assert!(second.is_evicted() && !third.is_evicted());
        assert_eq!(second.open(None), Err(NotOpened::Cut));
        // A half-open connection keeps its place until it has ended, so the new client is refused and may
        // cause another cut.
        assert!(connect(&register).0.is_none());
        assert!(third.is_evicted());
        drop(second);
        let (fifth, _of_fifth) = connect(&register);
        assert_eq!((register.count(), fifth.unwrap().id()), (4, 5));
        assert_eq!(fourth.open(None), Ok(()));
    }

    #[test]
    fn the_largest_owner_gives_way_only_to_new_owners() {
        let register = Register::new(Limits { connections: 16, half_open: 2 });
        let open = |owner: Option<Owner>| {
            let (permit, client) = connect(&register);
            let permit = permit?;
            permit.open(owner).ok()?;
            Some((permit, client))
        };
        let greedy: Vec<_> = std::iter::from_fn(|| open(name("greedy"))).collect();
        assert_eq!((greedy.len(), register.count()), (16, 16));
        let first = open(name("first")).unwrap();
        assert!(greedy[15].0.gave_way() && is_cut(&greedy[15].1));
        // An owner with a connection gets no more, nor does a client without an owner; the owner that lost
        // one cannot take another's.
        assert!([name("first"), None, name("greedy")].into_iter().all(|owner| open(owner).is_none()));
        let second = open(name("second")).unwrap();
        assert!(greedy[14].0.gave_way() && greedy[..14].iter().all(|(_, client)| !is_cut(client)));
        assert!(!is_cut(&first.1) && !is_cut(&second.1));
        // Nor does a client that proved no name.
        assert!(open(Some(Owner::Host("10.0.0.9".parse().unwrap()))).is_none());
        // They end, and the register is as before.
        drop(greedy);
        assert_eq!(register.count(), 2);
        let nobodys: Vec<_> = std::iter::from_fn(|| open(None)).collect();
        assert_eq!((nobodys.len(), register.count()), (14, 16));
        assert!(open(name("third")).is_none(), "no owner is large");
    }

    #[test]
    fn owners_are_proved_names_or_hosts() {
        let at = |address: &str| Peer::Tcp(address.parse().unwrap());
        let host = |address| Owner::of(None, &at(address));
        assert_eq!(host("10.0.0.1:1"), host("[::ffff:10.0.0.1]:2"));
        assert_ne!(host("10.0.0.1:1"), host("10.0.0.2:1"));
        assert_eq!(host("[2001:db8::1]:1"), host("[2001:db8::ffff:0:0:1]:1"));
        assert_ne!(host("[2001:db8::1]:1"), host("[2001:db8:0:1::1]:1"));
        assert_eq!(Owner::of(Some("a"), &at("10.0.0.1:1")), name("a"));
        assert_eq!(Owner::of(None, &NOBODY), None);
        let register = Register::new(Limits { connections: 2, half_open: 2 });
        let admit = |address| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (register.admit(&Arc::new(Socket::new(ours.into())), &at(address)), theirs)
        };
        let both = [admit("10.0.0.1:1"), admit("10.0.0.1:2")];
        both.iter().for_each(|(permit, _)| permit.as_ref().unwrap().open(host("10.0.0.1:1")).unwrap());
        // A host with most connections is refused before it sends anything; another host is not.
        assert!(admit("10.0.0.1:3").0.is_none());
        assert_eq!(admit("10.0.0.2:1").0.unwrap().open(host("10.0.0.2:1")), Ok(()));
    }

    #[test]
    fn the_end_of_the_last_connection_is_notified() {
        let register = Register::new(Limits { connections: 2, half_open: 2 });
        let (permit, _client) = connect(&register);
        assert!(!register.wait_until_empty(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| register.wait_until_empty(Duration::MAX));
            drop(permit);
            assert!(waiting.join().unwrap());
        });
    }
}
