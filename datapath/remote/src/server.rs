//! One server: its addresses and its idle connections.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::connection::{AfterAnswer, Connection, TlsPeer};
use crate::transfer::Fault;
use crate::url::ServerUrl;

pub(crate) struct Server {
    pub url: ServerUrl,
    pub tls: Option<TlsPeer>,
    idle: Mutex<Vec<(Connection, Instant)>>,
    addresses: Mutex<Vec<SocketAddr>>,
    /// Whether its name is being looked up in the background.
    pub resolving: AtomicBool,
}

impl Server {
    pub(crate) fn new(url: ServerUrl, tls: Option<TlsPeer>) -> Self {
        let (idle, addresses) = (Mutex::default(), Mutex::default());
        Self { url, tls, idle, addresses, resolving: AtomicBool::new(false) }
    }

    #[cfg(test)]
    pub(crate) fn set_addresses(&self, addresses: Vec<SocketAddr>) {
        *self.addresses.lock() = addresses;
    }

    #[cfg(test)]
    pub(crate) fn known_addresses(&self) -> Vec<SocketAddr> {
        self.addresses.lock().clone()
    }

    /// Looks up the server's name. If that fails, the known addresses stay: an unreachable name server must
    /// not make reachable servers unusable.
    pub(crate) fn resolve(&self) -> Result<(), Fault> {
        let host = self.url.host.as_str();
        let found = (host, self.url.port).to_socket_addrs();
        let mut addresses = self.addresses.lock();
        let found: Vec<SocketAddr> = match found {
            Ok(found) => found.collect(),
            Err(e) if addresses.is_empty() => {
                return Err(Fault::Gone(format!("its name '{host}' cannot be looked up: {e}")));
            }
            Err(e) => {
                tracing::debug!(%host, error = %e, "cannot look up a server's name: the known addresses are used");
                return Ok(());
            }
        };
        let mut known = addresses.clone();
        known.sort_unstable();
        let mut sorted = found.clone();
        sorted.sort_unstable();
        // The order of the known addresses shows which of them works.
        if known != sorted {
            *addresses = found;
        }
        Ok(())
    }

    /// The number of its addresses.
    pub(crate) fn address_count(&self) -> usize {
        self.addresses.lock().len()
    }

    /// Uses the server's next address from now on.
    pub(crate) fn next_address(&self) {
        let mut addresses = self.addresses.lock();
        if !addresses.is_empty() {
            addresses.rotate_left(1);
        }
    }

    pub(crate) fn connect(&self) -> Result<Connection, Fault> {
        let address = self.addresses.lock().first().copied();
        let address = address.ok_or_else(|| Fault::Gone("its name has no address".into()))?;
        Connection::start(address, self.tls.as_ref()).map_err(|e| Fault::Gone(e.to_string()))
    }

    /// Keeps an idle connection for the next request, unless `most` are kept, and closes those idle for
    /// longer than `longest`.
    pub(crate) fn keep(&self, connection: Connection, most: usize, longest: Duration) {
        self.drop_old(longest);
        let mut idle = self.idle.lock();
        if idle.len() < most {
            idle.push((connection, Instant::now()));
        }
    }

    /// Closes connections that have been idle for longer than `longest`. The most recently used one is used
    /// first, so that the others become old.
    pub(crate) fn drop_old(&self, longest: Duration) {
        self.idle.lock().retain(|(_, since)| since.elapsed() < longest);
    }

    /// Closes all idle connections.
    pub(crate) fn drop_kept(&self) {
        self.idle.lock().clear();
    }

    /// Takes an idle connection that is not older than `idle`. Connections that the server has closed, or
    /// announced to close, are dropped.
    pub(crate) fn kept(&self, idle: Duration) -> Option<Connection> {
        loop {
            let (mut connection, since) = self.idle.lock().pop()?;
            if since.elapsed() < idle && connection.after_answer() == AfterAnswer::Quiet {
                return Some(connection);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_idle_connection_is_replaced_by_a_new_one() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let server = Server::new("http://127.0.0.1:1".parse().unwrap(), None);
        server.set_addresses(vec![listener.local_addr().unwrap()]);
        let [old, new] = [(); 2].map(|()| {
            let mut connection = server.connect().unwrap();
            let end = listener.accept().unwrap().0;
            connection.drive().unwrap();
            (connection, end)
        });
        let (long, at) = (Duration::from_secs(600), new.0.local());
        server.keep(old.0, 1, long);
        server.keep(new.0, 1, Duration::ZERO);
        assert_eq!(server.kept(long).unwrap().local(), at);
        assert!(server.kept(long).is_none());
    }

    #[test]
    fn a_connection_on_which_the_server_announced_its_end_is_not_used() {
        use std::io::Write;
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let server = Server::new("http://127.0.0.1:1".parse().unwrap(), None);
        server.set_addresses(vec![listener.local_addr().unwrap()]);
        let idle = Duration::from_secs(600);
        let mut ends = Vec::new();
        for _ in 0..2 {
            let mut connection = server.connect().unwrap();
            ends.push(listener.accept().unwrap().0);
            connection.drive().unwrap();
            assert!(connection.is_connected());
            server.keep(connection, 2, idle);
        }
        // The most recently used connection, which would be taken first.
        ends[1].write_all(b"HTTP/1.1 408 x\r\nConnection: close\r\n\r\n").unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let quiet = ends[0].peer_addr().unwrap();
        loop {
            let connection = server.kept(idle).unwrap();
            if connection.local() == quiet {
                break;
            }
            // The answer has not arrived yet.
            server.keep(connection, 2, idle);
            assert!(Instant::now() < until, "the connection is used although the server closed it");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(server.kept(idle).is_none());
    }

    #[test]
    fn a_lookup_that_fails_leaves_the_addresses_that_are_known() {
        // No name has a label of more than 63 letters, so no name server is asked.
        let url: ServerUrl = format!("http://{}.invalid", "x".repeat(64)).parse().unwrap();
        let server = Server::new(url, None);
        let Err(Fault::Gone(why)) = server.resolve() else { panic!("it has an address") };
        assert!(why.contains("cannot be looked up"), "{why}");
        server.set_addresses(vec![([127, 0, 0, 1], 1).into(), ([127, 0, 0, 2], 1).into()]);
        assert_eq!(server.resolve(), Ok(()));
        assert_eq!(server.address_count(), 2);
    }
}
