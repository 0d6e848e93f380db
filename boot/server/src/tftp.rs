//! TFTP server (port 69): sends loaders to firmware. Each transfer has its own socket and task.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use headwater_tftp::{ErrorCode, Packet, REQUEST_BYTES_MAX, Request, Step, Transfer, refusal};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use crate::interface;
use crate::loaders::Loaders;

/// The most transfers at a time. Further requests are ignored, because clients repeat them.
pub const TRANSFERS_MAX: usize = 256;
/// The most transfers to one address at a time. Further requests are ignored.
pub const TRANSFERS_OF_ADDRESS_MAX: usize = 4;

/// Active transfers, by the address and port of the client.
#[derive(Default)]
struct UnderWay(Mutex<HashSet<SocketAddr>>);

/// Registration of an active transfer. Dropping it ends the registration.
struct Registration {
    all: Arc<UnderWay>,
    client: SocketAddr,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.client);
    }
}

impl UnderWay {
    /// `None`: the client already has a transfer (a repeated request), or the limit is reached.
    fn take(self: &Arc<Self>, client: SocketAddr) -> Option<Registration> {
        let mut all = self.0.lock();
        let of_address = |address: IpAddr| all.iter().filter(|other| other.ip() == address).count();
        let is_free = all.len() < TRANSFERS_MAX
            && of_address(client.ip()) < TRANSFERS_OF_ADDRESS_MAX
            && !all.contains(&client);
        is_free.then(|| {
            all.insert(client);
            Registration { all: Arc::clone(self), client }
        })
    }
}

/// Answers requests, without end.
pub(crate) async fn serve(socket: UdpSocket, interface: String, loaders: Loaders) {
    let under_way = Arc::new(UnderWay::default());
    let mut buffer = [0; REQUEST_BYTES_MAX + 1];
    loop {
        let (len, client) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::debug!(%error, "cannot receive a TFTP request");
                continue;
            }
        };
        let refused = match Packet::parse(buffer.get(..len).unwrap_or_default()) {
            Ok(Packet::Read(request)) => match start(&request, client, &under_way, &interface, &loaders) {
                Ok(()) => continue,
                Err(refused) => refused,
            },
            Ok(Packet::Write) => refusal(ErrorCode::AccessViolation, "files can only be read"),
            Ok(_) | Err(_) => refusal(ErrorCode::IllegalOperation, "not a request"),
        };
        // A client that does not receive the refusal repeats its request.
        let _ = socket.send_to(&refused, client).await;
    }
}

fn start(
    request: &Request,
    client: SocketAddr,
    under_way: &Arc<UnderWay>,
    interface: &str,
    loaders: &Loaders,
) -> Result<(), Vec<u8>> {
    if request.mode != "octet" {
        return Err(refusal(ErrorCode::IllegalOperation, "only the mode octet is supported"));
    }
    let Some(file) = loaders.find(&request.file) else {
        // Loaders ask for files that do not exist, and wait long if they get no answer.
        tracing::debug!(%client, file = request.file, "a client asked for a file that is not a loader");
        return Err(refusal(ErrorCode::NotFound, "there is no such file"));
    };
    let Some(registration) = under_way.take(client) else { return Ok(()) };
    let (transfer, step) = Transfer::start(request, file);
    let socket = interface::udp(interface, 0).and_then(UdpSocket::from_std);
    let socket = socket.map_err(|e| refusal(ErrorCode::Undefined, &format!("cannot open a socket: {e}")))?;
    let name = request.file.clone();
    tokio::spawn(async move {
        match send(&socket, client, transfer, step).await {
            Ok(true) => tracing::debug!(%client, file = name, "a loader was sent"),
            Ok(false) => {
                tracing::debug!(%client, file = name, "a client ended a transfer, or stopped answering")
            }
            Err(error) => tracing::debug!(%client, file = name, %error, "a transfer broke off"),
        }
        drop(registration);
    });
    Ok(())
}

/// Sends a file. Returns whether the client received all of it.
async fn send(
    socket: &UdpSocket,
    client: SocketAddr,
    mut transfer: Transfer,
    mut step: Step,
) -> io::Result<bool> {
    socket.connect(client).await?;
    let mut buffer = [0; REQUEST_BYTES_MAX + 1];
    loop {
        match step {
            Step::Send(datagrams) => {
                for datagram in datagrams {
                    socket.send(&datagram).await?;
                }
            }
            Step::Wait => {}
            Step::Done => return Ok(true),
            Step::GivenUp => return Ok(false),
        }
        let timeout = Duration::from_secs(transfer.timeout_s());
        step = match tokio::time::timeout(timeout, socket.recv(&mut buffer)).await {
            Ok(received) => match Packet::parse(buffer.get(..received?).unwrap_or_default()) {
                Ok(packet) => transfer.received(&packet),
                Err(_) => Step::Wait,
            },
            Err(_) => transfer.timed_out(),
        };
    }
}
