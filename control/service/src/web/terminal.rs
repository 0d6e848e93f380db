//! The serial console of a machine in the page, over a WebSocket.
//!
//! A page cannot give a WebSocket the header `Authorization`. So it gets a ticket for one machine by an ordinary request, and sends it
//! as the second of its protocols: the address, which is logged in many places, has no secret.

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use headwater_admission::Entry;
use headwater_api::{ConsoleTicket, Problem, ProblemKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::UnixStream;

use super::TicketError;
use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::console;
use crate::operations::attach_console::{PROTOCOL, open_console};
use crate::server;

/// How the secrets of tickets for a console begin.
const PREFIX: &str = "hwc_";

/// How much is read at a time.
const PIECE_BYTES: usize = 16 << 10;

/// The longest message of a page, which sends a paste in pieces.
const MESSAGE_MAX_BYTES: usize = 64 << 10;

/// How much typed input waits for a guest that takes none. More than that ends the connection, with the reason.
const TYPED_AHEAD_MAX_BYTES: usize = 64 << 10;

/// The close code of a console that cannot be attached to; codes from 4000 on are for applications.
const REFUSED: u16 = 4000;

/// The longest reason in bytes: a close frame has 125, of which two are the code.
const REASON_MAX_BYTES: usize = 123;

/// The right to attach to the console of one machine.
#[derive(Debug)]
pub(super) struct TerminalRight {
    machine: String,
    principal: String,
}

impl Service {
    /// Makes a ticket for the console of a machine.
    pub(crate) fn make_terminal_ticket(
        &self,
        caller: &Caller,
        machine: String,
    ) -> Result<ConsoleTicket, TicketError> {
        if self.web().reachable().console.is_none() {
            return Err(TicketError::NoConsole);
        }
        let right = TerminalRight { machine, principal: caller.principal.clone() };
        let (ticket, expires_at_ms) =
            self.web().terminals.issue(right, PREFIX, self.random(), self.now_ms())?;
        Ok(ConsoleTicket { ticket, expires_at_ms })
    }
}

/// Attaches to the console that the ticket is for. If that is not possible the connection ends with the reason, because a page does
/// not see the answer to a refused WebSocket.
pub(super) async fn attach(
    State(service): State<Service>,
    headers: HeaderMap,
    entry: Option<Extension<Entry>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    let upgrade = upgrade.map_err(|error| Failure(Problem::new(ProblemKind::Invalid, error.body_text())))?;
    let now_ms = service.now_ms();
    let Some(right) =
        ticket(&headers, PREFIX).and_then(|secret| service.web().terminals.take(secret, now_ms))
    else {
        let message = "the ticket of the console was used already, or it is older than a minute";
        return Err(Failure(Problem::new(ProblemKind::Unauthorized, message)));
    };
    server::admit(entry.as_deref()).map_err(Failure)?;
    let opened = open_console(&service, &right.machine, &right.principal).await;
    let upgrade = upgrade.protocols([PROTOCOL]);
    let upgrade = upgrade.max_message_size(MESSAGE_MAX_BYTES).max_frame_size(MESSAGE_MAX_BYTES);
    Ok(match opened {
        Ok((taken, guest)) => upgrade.on_upgrade(async move |socket| {
            carry(socket, guest).await;
            drop(taken);
        }),
        Err(Failure(problem)) => upgrade.on_upgrade(async move |socket| refuse(socket, &problem).await),
    })
}

/// The ticket in the list of protocols, after the protocol itself.
pub(super) fn ticket<'a>(headers: &'a HeaderMap, prefix: &str) -> Option<&'a str> {
    let protocols = headers.get(header::SEC_WEBSOCKET_PROTOCOL)?.to_str().ok()?;
    protocols.split(',').map(str::trim).find(|protocol| protocol.starts_with(prefix))
}

/// Ends a connection with the reason, as far as a close frame has space for it.
pub(super) async fn refuse(mut socket: WebSocket, problem: &Problem) {
    let mut reason = problem.message.clone();
    while reason.len() > REASON_MAX_BYTES {
        reason.pop();
    }
    let close = CloseFrame { code: REFUSED, reason: reason.into() };
    // A page that is gone needs no reason.
    let _ = socket.send(Message::Close(Some(close))).await;
}

/// Carries bytes both ways until either side hangs up.
async fn carry(socket: WebSocket, guest: UnixStream) {
    let (page, relayed) = tokio::io::duplex(PIECE_BYTES);
    // The end of one ends the other; there is nobody left to tell why.
    let _ = tokio::join!(console::relay(relayed, guest), pump(socket, page));
}

/// Between the messages of the page and the bytes of the relay.
async fn pump(mut socket: WebSocket, page: DuplexStream) -> Result<(), axum::Error> {
    let (mut from_guest, mut to_guest) = tokio::io::split(page);
    let mut piece = vec![0; PIECE_BYTES];
    // Keys that the guest has not taken: its output goes on meanwhile.
    let mut ahead: Vec<u8> = Vec::new();
    loop {
        tokio::select! {
            read = from_guest.read(&mut piece) => match read {
                Ok(n @ 1..) => {
                    let bytes = piece.get(..n).unwrap_or_default().to_vec();
                    socket.send(Message::Binary(bytes.into())).await?;
                }
                _ => return socket.send(Message::Close(None)).await,
            },
            written = to_guest.write(&ahead), if !ahead.is_empty() => match written {
                Ok(n @ 1..) => drop(ahead.drain(..n)),
                _ => return socket.send(Message::Close(None)).await,
            },
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(keys))) if ahead.len() + keys.len() <= TYPED_AHEAD_MAX_BYTES => {
                    ahead.extend_from_slice(&keys);
                }
                Some(Ok(Message::Binary(_))) => {
                    let reason = "the machine does not take what was typed or pasted: 64 KiB of it wait".into();
                    return socket.send(Message::Close(Some(CloseFrame { code: REFUSED, reason }))).await;
                }
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Ok(()),
                Some(Ok(_)) => {}
            },
        }
    }
}
