//! The serial console and the display of a machine in the page, over a WebSocket.
//!
//! ```text
//!   POST ../console/ticket or ../display/ticket --> ticket for one socket of one machine (60 s, one use)
//!   WebSocket /console or /display with it      --> socket of QEMU, bytes both ways
//! ```
//! A page cannot give a WebSocket the header `Authorization`. So it gets a ticket by an ordinary request, and sends it as the second of
//! the WebSocket's protocols: the address, which is logged in many places, has no secret. A ticket is for the machine with that UUID: not
//! for another machine that got its name meanwhile.
//!
//! The daemon does not look into the bytes. One client at a time has a serial console, and what the page does not take of its output is
//! left out. Up to [`DISPLAYS_MAX`](crate::lifecycle::DISPLAYS_MAX) pages have a display; a slow page slows down what QEMU sends to it.
//! A page that takes nothing for [`SEND_TIMEOUT`] loses its connection, so that it does not keep others out.

use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use headwater_admission::Entry;
use headwater_api::{ConsoleTicket, Problem, ProblemKind};
use headwater_db::MachineRecord;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

use super::TicketError;
use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::console;
use crate::lifecycle::DISPLAYS_MAX;
use crate::operations::attach_console::{PROTOCOL, open_console};
use crate::server;

/// How much is read at a time: a whole screen of 1280 by 800 pixels is 4 MiB before it is compressed.
const PIECE_BYTES: usize = 64 << 10;

/// The longest message of a page. Text of its clipboard is the longest; a paste into a console comes in pieces.
const MESSAGE_MAX_BYTES: usize = 256 << 10;

/// How much input waits for a guest that takes none. More than that ends the connection, with the reason.
const AHEAD_MAX_BYTES: usize = 512 << 10;

/// How long the page may take for a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// The close code of a socket that cannot be used; codes from 4000 on are for applications.
const REFUSED: u16 = 4000;

/// The longest reason in bytes: a close frame has 125, of which two are the code.
const REASON_MAX_BYTES: usize = 123;

/// A socket that a machine has for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MachineSocket {
    /// Its serial console.
    Console,
    /// Its display, by the protocol of VNC.
    Display,
}

impl MachineSocket {
    /// The protocol of the WebSocket.
    fn protocol(self) -> &'static str {
        match self {
            Self::Console => PROTOCOL,
            Self::Display => "headwater-display",
        }
    }

    /// How the secrets of its tickets begin.
    fn prefix(self) -> &'static str {
        match self {
            Self::Console => "hwc_",
            Self::Display => "hwd_",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Console => "console",
            Self::Display => "display",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Console => "attach to the console of",
            Self::Display => "open the display of",
        }
    }
}

/// The right to use a socket of one machine.
#[derive(Debug)]
pub(super) struct MachineRight {
    socket: MachineSocket,
    uuid: Uuid,
    name: String,
    principal: String,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot open the display of machine '{machine}': {DISPLAYS_MAX} pages have it open")]
    Taken { machine: String },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Conflict
    }

    fn advice(&self) -> Option<String> {
        Some("close it in one of them".to_owned())
    }
}

impl Service {
    /// Makes a ticket for a socket of a machine.
    pub(crate) fn make_machine_ticket(
        &self,
        caller: &Caller,
        machine: &MachineRecord,
        socket: MachineSocket,
    ) -> Result<ConsoleTicket, TicketError> {
        if self.web().reachable().console.is_none() {
            return Err(TicketError::NoConsole);
        }
        let (name, principal) = (machine.name.clone(), caller.principal.clone());
        let right = MachineRight { socket, uuid: machine.uuid, name, principal };
        let (ticket, expires_at_ms) =
            self.web().sockets.issue(right, socket.prefix(), self.random(), self.now_ms())?;
        Ok(ConsoleTicket { ticket, expires_at_ms })
    }
}

/// Connects the page to the socket that the ticket is for. If that is not possible, the connection ends with the reason, because a page
/// does not see the answer to a refused WebSocket.
pub(super) async fn attach(
    State(service): State<Service>,
    Extension(socket): Extension<MachineSocket>,
    headers: HeaderMap,
    entry: Option<Extension<Entry>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    let upgrade = upgrade.map_err(|error| Failure(Problem::new(ProblemKind::Invalid, error.body_text())))?;
    let now_ms = service.now_ms();
    let right =
        ticket(&headers, socket.prefix()).and_then(|secret| service.web().sockets.take(secret, now_ms));
    let Some(right) = right.filter(|right| right.socket == socket) else {
        let name = socket.name();
        let message = format!("the ticket of the {name} was used already, or it is older than a minute");
        return Err(Failure(Problem::new(ProblemKind::Unauthorized, message)));
    };
    server::admit(entry.as_deref()).map_err(Failure)?;
    let opened = open(&service, &right).await;
    let upgrade = upgrade.protocols([socket.protocol()]);
    let upgrade = upgrade.max_message_size(MESSAGE_MAX_BYTES).max_frame_size(MESSAGE_MAX_BYTES);
    Ok(match opened {
        Ok((permit, guest)) => upgrade.on_upgrade(async move |page| {
            match socket {
                MachineSocket::Console => {
                    let (relayed, end) = tokio::io::duplex(PIECE_BYTES);
                    // The end of one ends the other; there is nobody left to tell why.
                    let _ = tokio::join!(console::relay(end, guest), carry(page, relayed, SEND_TIMEOUT));
                }
                MachineSocket::Display => carry(page, guest, SEND_TIMEOUT).await,
            }
            drop(permit);
        }),
        Err(Failure(problem)) => upgrade.on_upgrade(async move |page| refuse(page, &problem).await),
    })
}

async fn open(
    service: &Service,
    right: &MachineRight,
) -> Result<(OwnedSemaphorePermit, UnixStream), Failure> {
    let MachineRight { socket, uuid, name, principal } = right;
    let active = service.still_on(socket.what(), *uuid, name).await?;
    if *socket == MachineSocket::Console {
        return open_console(service, &active, principal).await;
    }
    let permit = active.take_display().ok_or_else(|| Error::Taken { machine: name.clone() })?;
    let path = service.hypervisor().display_socket(&service.run_dir(name));
    let display = UnixStream::connect(&path).await.map_err(|e| {
        BackendError::from_io(format!("cannot connect to the display at {}", path.display()), e)
    })?;
    active.use_it()?;
    tracing::info!(machine = %name, caller = %principal, "its display is used in the page");
    Ok((permit, display))
}

/// The ticket in the list of protocols, after the protocol itself.
fn ticket<'a>(headers: &'a HeaderMap, prefix: &str) -> Option<&'a str> {
    let protocols = headers.get(header::SEC_WEBSOCKET_PROTOCOL)?.to_str().ok()?;
    protocols.split(',').map(str::trim).find(|protocol| protocol.starts_with(prefix))
}

fn closing(reason: &str) -> Message {
    let mut reason = reason.to_owned();
    while reason.len() > REASON_MAX_BYTES {
        reason.pop();
    }
    Message::Close(Some(CloseFrame { code: REFUSED, reason: reason.into() }))
}

/// Ends a connection with the reason, as far as a close frame has space for it.
async fn refuse(mut page: WebSocket, problem: &Problem) {
    // A page that is gone needs no reason.
    let _ = page.send(closing(&problem.message)).await;
}

/// Carries bytes both ways until either side hangs up, or the page takes nothing for `timeout`.
async fn carry(mut page: WebSocket, guest: impl AsyncRead + AsyncWrite, timeout: Duration) {
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let mut piece = vec![0; PIECE_BYTES];
    // Input that the guest has not taken: its output goes on meanwhile.
    let mut ahead: Vec<u8> = Vec::new();
    loop {
        let message = tokio::select! {
            read = from_guest.read(&mut piece) => match read {
                Ok(n @ 1..) => Message::Binary(piece.get(..n).unwrap_or_default().to_vec().into()),
                _ => Message::Close(None),
            },
            written = to_guest.write(&ahead), if !ahead.is_empty() => match written {
                Ok(n @ 1..) => {
                    ahead.drain(..n);
                    continue;
                }
                _ => Message::Close(None),
            },
            message = page.recv() => match message {
                Some(Ok(Message::Binary(input))) if ahead.len() + input.len() <= AHEAD_MAX_BYTES => {
                    ahead.extend_from_slice(&input);
                    continue;
                }
                Some(Ok(Message::Binary(_))) => {
                    closing("the machine does not take what was typed or pasted: 512 KiB of it wait")
                }
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                Some(Ok(_)) => continue,
            },
        };
        let is_last = matches!(message, Message::Close(_));
        let sent = tokio::time::timeout(timeout, page.send(message)).await;
        if is_last || !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::any;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// For what would else be waited for for ever.
    const SOON: Duration = Duration::from_secs(60);

    /// A page that shook hands and is connected to a guest, and the guest's end.
    async fn connected(timeout: Duration) -> (TcpStream, UnixStream) {
        let (guest, page_end) = UnixStream::pair().unwrap();
        let page_end = std::sync::Arc::new(std::sync::Mutex::new(Some(page_end)));
        let carried = move |upgrade: WebSocketUpgrade| {
            let page_end = page_end.lock().unwrap().take().unwrap();
            async move { upgrade.on_upgrade(async move |page| carry(page, page_end, timeout).await) }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", any(carried));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let mut page = TcpStream::connect(address).await.unwrap();
        let asked = "GET / HTTP/1.1\r\nhost: pc\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                     sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        page.write_all(asked.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(tokio::time::timeout(SOON, page.read_u8()).await.unwrap().unwrap());
        }
        assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
        (page, guest)
    }

    #[tokio::test]
    async fn a_page_that_takes_nothing_loses_its_connection() {
        let (page, mut guest) = connected(Duration::from_millis(100)).await;
        let screens = vec![7; 256 << 20];
        let written = tokio::time::timeout(SOON, guest.write_all(&screens)).await;
        assert!(written.expect("the page keeps its connection").is_err(), "all of it was taken");
        drop(page);
    }

    #[tokio::test]
    async fn input_that_the_guest_does_not_take_has_a_limit() {
        let (mut page, guest) = connected(SOON).await;
        // A masked binary message of 64 KiB of zeroes.
        let mut message = vec![0x82, 0xff, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        message.resize(message.len() + (64 << 10), 0);
        let sending = async {
            let mut taken = 0;
            // The socket of the guest takes some, too.
            while taken < (16 << 20) && page.write_all(&message).await.is_ok() {
                taken += message.len();
            }
            taken
        };
        let taken = tokio::time::timeout(SOON, sending).await.expect("the page neither sends nor is refused");
        assert!((AHEAD_MAX_BYTES..16 << 20).contains(&taken), "{taken} bytes");
        drop(guest);
    }
}
