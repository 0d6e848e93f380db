//! The display of a machine in the page: the bytes of VNC over a WebSocket, with a ticket like that of the [serial
//! console](super::terminal).
//!
//! The daemon does not look into the bytes. Several pages may use a display at a time: QEMU shares it.
//!
//! A page that is slow slows down what QEMU sends to it, because nothing is read from QEMU while a message waits for the page. Input
//! that QEMU does not take waits here up to a limit; then nothing more is read from the page.

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::HeaderMap;
use axum::response::Response;
use headwater_admission::Entry;
use headwater_api::{ConsoleTicket, Problem, ProblemKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::TicketError;
use super::terminal::{refuse, ticket};
use crate::Service;
use crate::answer::Failure;
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::server;

/// The protocol of the WebSocket.
const PROTOCOL: &str = "headwater-display";

/// How the secrets of tickets for a display begin.
const PREFIX: &str = "hwd_";

/// How much is read at a time: a whole screen of 1280 by 800 pixels is 4 MiB before it is compressed.
const PIECE_BYTES: usize = 64 << 10;

/// The longest message of a page. Text of its clipboard is the longest.
const MESSAGE_MAX_BYTES: usize = 256 << 10;

/// If this much input waits for QEMU, no more is read from the page.
const AHEAD_MAX_BYTES: usize = 64 << 10;

/// The right to use the display of one machine.
#[derive(Debug)]
pub(super) struct DisplayRight {
    machine: String,
    principal: String,
}

impl Service {
    /// Makes a ticket for the display of a machine.
    pub(crate) fn make_display_ticket(
        &self,
        caller: &Caller,
        machine: String,
    ) -> Result<ConsoleTicket, TicketError> {
        if self.web().reachable().console.is_none() {
            return Err(TicketError::NoConsole);
        }
        let right = DisplayRight { machine, principal: caller.principal.clone() };
        let (ticket, expires_at_ms) =
            self.web().displays.issue(right, PREFIX, self.random(), self.now_ms())?;
        Ok(ConsoleTicket { ticket, expires_at_ms })
    }
}

/// Connects the page to the display that the ticket is for. If that is not possible the connection ends with the reason.
pub(super) async fn attach(
    State(service): State<Service>,
    headers: HeaderMap,
    entry: Option<Extension<Entry>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    let upgrade = upgrade.map_err(|error| Failure(Problem::new(ProblemKind::Invalid, error.body_text())))?;
    let now_ms = service.now_ms();
    let secret = ticket(&headers, PREFIX);
    let Some(right) = secret.and_then(|secret| service.web().displays.take(secret, now_ms)) else {
        let message = "the ticket of the display was used already, or it is older than a minute";
        return Err(Failure(Problem::new(ProblemKind::Unauthorized, message)));
    };
    server::admit(entry.as_deref()).map_err(Failure)?;
    let opened = open(&service, &right).await;
    let upgrade = upgrade.protocols([PROTOCOL]);
    let upgrade = upgrade.max_message_size(MESSAGE_MAX_BYTES).max_frame_size(MESSAGE_MAX_BYTES);
    Ok(match opened {
        // Either side hanging up ends it; there is nobody left to tell.
        Ok(display) => upgrade.on_upgrade(async move |socket| drop(carry(socket, display).await)),
        Err(Failure(problem)) => upgrade.on_upgrade(async move |socket| refuse(socket, &problem).await),
    })
}

async fn open(service: &Service, right: &DisplayRight) -> Result<UnixStream, Failure> {
    let name = &right.machine;
    let (_, active) = service.on("open the display of", name).await?;
    let path = service.hypervisor().display_socket(&service.run_dir(name));
    let display = UnixStream::connect(&path).await.map_err(|e| {
        BackendError::from_io(format!("cannot connect to the display at {}", path.display()), e)
    })?;
    active.use_it()?;
    tracing::info!(machine = %name, caller = %right.principal, "its display is used in the page");
    Ok(display)
}

/// Carries bytes both ways until either side hangs up.
async fn carry(mut socket: WebSocket, mut display: UnixStream) -> Result<(), axum::Error> {
    let (mut from_guest, mut to_guest) = display.split();
    let mut piece = vec![0; PIECE_BYTES];
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
            message = socket.recv(), if ahead.len() < AHEAD_MAX_BYTES => match message {
                Some(Ok(Message::Binary(input))) => ahead.extend_from_slice(&input),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Ok(()),
                Some(Ok(_)) => {}
            },
        }
    }
}
