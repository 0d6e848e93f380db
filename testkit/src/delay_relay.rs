//! A TCP relay that delivers everything with a fixed delay. It simulates a long-distance link, for hosts whose
//! kernel has no netem.
//!
//! Bytes are read as they arrive and delivered in order, each after the delay, in both directions. At most about
//! [`HELD_MAX_BYTES`] are in transit in each direction of a connection, which limits the rate to that many bytes
//! in the time of the delay.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How much is read at a time.
const PART_BYTES: usize = 64 << 10;
/// How many parts are in transit in one direction of a connection.
const HELD_PARTS: usize = 256;
/// The most bytes in transit in one direction of a connection.
pub const HELD_MAX_BYTES: usize = PART_BYTES * HELD_PARTS;

/// A relay on a port of the loopback address. Dropping it stops accepting; open connections stay.
pub struct DelayRelay {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    accepting: Option<JoinHandle<()>>,
}

impl DelayRelay {
    /// Relays to `target`, with `delay` in each direction.
    pub fn start(target: SocketAddr, delay: Duration) -> std::io::Result<Self> {
        Self::listen((Ipv4Addr::LOCALHOST, 0).into(), target, delay)
    }

    /// As [`DelayRelay::start`], listening at the given address.
    pub fn listen(at: SocketAddr, target: SocketAddr, delay: Duration) -> std::io::Result<Self> {
        let listener = TcpListener::bind(at)?;
        let address = listener.local_addr()?;
        let stopped = Arc::new(AtomicBool::new(false));
        let bytes = Arc::new(AtomicU64::new(0));
        let (until, counted) = (Arc::clone(&stopped), Arc::clone(&bytes));
        let accepting = std::thread::spawn(move || {
            for client in listener.incoming() {
                if until.load(Ordering::Acquire) {
                    return;
                }
                let (Ok(client), counted) = (client, Arc::clone(&counted)) else { continue };
                std::thread::spawn(move || {
                    // If one side disconnects, the other side is closed too.
                    if let Ok(server) = TcpStream::connect(target) {
                        let _ = relay(client, server, delay, counted);
                    }
                });
            }
        });
        Ok(Self { address, stopped, bytes, accepting: Some(accepting) })
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes that came from the target so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }
}

impl Drop for DelayRelay {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        drop(TcpStream::connect(self.address));
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

fn relay(
    client: TcpStream,
    server: TcpStream,
    delay: Duration,
    counted: Arc<AtomicU64>,
) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from, to) = (client.try_clone()?, server.try_clone()?);
    let up = std::thread::spawn(move || one_way(from, to, delay, None));
    one_way(server, client, delay, Some(counted));
    let _ = up.join();
    Ok(())
}

fn one_way(mut from: TcpStream, to: TcpStream, delay: Duration, counted: Option<Arc<AtomicU64>>) {
    let (parts, due) = mpsc::sync_channel::<(Instant, Vec<u8>)>(HELD_PARTS);
    let mut target = to;
    let delivering = std::thread::spawn(move || {
        for (at, part) in due {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if target.write_all(&part).is_err() {
                break;
            }
        }
        let _ = target.shutdown(Shutdown::Write);
    });
    let mut buffer = vec![0; PART_BYTES];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if let Some(counted) = &counted {
            counted.fetch_add(u64::try_from(len).unwrap_or(0), Ordering::AcqRel);
        }
        let part = buffer.get(..len).unwrap_or_default().to_vec();
        if parts.send((Instant::now() + delay, part)).is_err() {
            break;
        }
    }
    drop(parts);
    let _ = delivering.join();
    let _ = from.shutdown(Shutdown::Both);
}
