//! One connection from its first byte to its last: handshake with a deadline, then transmission.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use headwater_connections::{FrontEnd as _, NotOpened, Owner, Peer};

use super::connection::Connection;
use super::handshake::{Chosen, Denial, Encryption, Handshake, Step};
use super::{Permit, Shared};
use crate::limits::Limits;
use crate::socket::Socket;
use crate::wire::handshake::{OPTION_BYTES, decode_option, encode_option_reply, greeting, reply};

/// Why a connection ended.
pub(super) enum End {
    /// The client closed it between requests or disconnected in order, or the server stops.
    Orderly(&'static str),
    /// The client broke the protocol, or the connection broke.
    Fault(String),
}

impl End {
    /// The end if replies could not be sent.
    pub(super) fn unsent(error: &std::io::Error, limits: &Limits) -> Self {
        Self::Fault(match error.kind() {
            ErrorKind::TimedOut => {
                format!("the client accepted no bytes of a reply for {} ms", limits.send_stall_ms)
            }
            _ => format!("sending replies failed: {error}"),
        })
    }
}

pub(super) fn serve(shared: &Shared, permit: &Permit, socket: &Socket, peer: &Peer) {
    let who = Shared::client(peer);
    let who = who.as_str();
    tracing::debug!("NBD: {who} connected");
    let end = match shake_hands(shared, permit, socket, who, peer) {
        _ if permit.is_evicted() => {
            let limit = shared.limits.half_open;
            End::Fault(format!(
                "{limit} connections were in their handshake, which is the limit, and this one was the oldest"
            ))
        }
        Ok(chosen) => transmit(shared, permit, socket, who, chosen),
        Err(end) => end,
    };
    let end = if permit.gave_way() {
        let limit = shared.limits.connections;
        End::Fault(format!(
            "{limit} clients were connected, which is the limit: this connection was closed for a client of another certificate or address, because this client had the most connections"
        ))
    } else {
        end
    };
    match end {
        End::Orderly(why) => tracing::debug!("NBD: {who} disconnected: {why}"),
        End::Fault(why) => {
            shared.faults.warn(&who, &format_args!("the connection was closed: {why}"));
        }
    }
}

/// Opens the connection in the register for the owner of the certificate, or for the host.
fn register_owner(shared: &Shared, permit: &Permit, socket: &Socket, peer: &Peer) -> Result<(), End> {
    let names = socket.peer_names();
    let name = (!names.is_empty()).then(|| names.join(","));
    permit.open(Owner::of(name.as_deref(), peer)).map_err(|not_opened| match not_opened {
        NotOpened::Cut => End::Orderly("the server closed the connection in its handshake"),
        NotOpened::Full => {
            let limit = shared.limits.connections;
            End::Fault(format!(
                "{limit} clients are connected, which is the limit, and none may be disconnected for this one"
            ))
        }
    })
}

fn transmit(shared: &Shared, permit: &Permit, socket: &Socket, who: &str, chosen: Chosen) -> End {
    tracing::debug!(
        "NBD: {who} opened the export '{}', replies: {:?}, base:allocation: {}",
        chosen.name.escape_debug(),
        chosen.form,
        chosen.base_allocation
    );
    let stall = Duration::from_millis(shared.limits.send_stall_ms);
    let limited = socket.limit_wait(shared.limits.send_check()).and_then(|()| socket.limit_stall(stall));
    match limited.and_then(|()| Connection::new(shared, permit, socket, who, chosen)) {
        Ok(mut connection) => {
            let end = connection.run();
            socket.say_goodbye();
            end
        }
        Err(error) => End::Fault(format!(
            "the server could not set up the transfer after the handshake (timeouts of the socket, or memory and \
             descriptors for replies): {error}"
        )),
    }
}

fn shake_hands(
    shared: &Shared,
    permit: &Permit,
    socket: &Socket,
    who: &str,
    peer: &Peer,
) -> Result<Chosen, End> {
    let limits = &shared.limits;
    let patience = Duration::from_millis(limits.handshake_timeout_ms);
    let Some(deadline) = Instant::now().checked_add(patience) else {
        return Err(End::Fault("the handshake time-out is too long for the clock".into()));
    };
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::TimedOut => {
            End::Fault(format!("the handshake took more than {} ms", limits.handshake_timeout_ms))
        }
        ErrorKind::UnexpectedEof => End::Fault("the client hung up in the middle of its handshake".into()),
        _ => End::Fault(format!("receiving the handshake failed: {error}")),
    };
    let receive = |into: &mut [u8]| match socket.receive_exact(into, deadline) {
        Ok(true) => Ok(()),
        Ok(false) if permit.is_stopping() => Err(End::Orderly("the server stops")),
        Ok(false) => Err(End::Orderly("the client hung up in the handshake")),
        Err(error) => Err(failed(error)),
    };
    socket.send_before(&greeting(), deadline).map_err(failed)?;
    let mut flags = [0; 4];
    receive(&mut flags)?;
    let encryption = match &shared.tls {
        None => Encryption::None,
        Some(tls) if tls.is_required => Encryption::Demanded,
        Some(_) => Encryption::Offered,
    };
    let mut handshake = Handshake::new(&*shared.exports, limits, encryption, u32::from_be_bytes(flags))
        .map_err(End::Fault)?;
    // A client that was denied an export may try again in other ways; it is logged once.
    let mut is_logged = false;
    let mut data = Vec::new();
    let mut out = Vec::new();
    loop {
        let mut head = [0; OPTION_BYTES];
        receive(&mut head)?;
        let (number, length) = decode_option(&head).map_err(|error| End::Fault(error.to_string()))?;
        out.clear();
        if length > limits.option_bytes {
            encode_option_reply(&mut out, number, reply::ERR_TOO_BIG, b"the option is too long");
            socket.send_before(&out, deadline).map_err(failed)?;
            return Err(End::Fault(format!(
                "the client sent option {number} with {length} bytes; the limit is {}",
                limits.option_bytes
            )));
        }
        data.clear();
        data.resize(usize::try_from(length).unwrap_or(0), 0);
        if !data.is_empty() {
            receive(&mut data)?;
        }
        let step = handshake.option(number, &data, &mut out);
        if let Some(denial) = handshake.take_denial() {
            is_logged |= log_denial(shared, who, &denial, is_logged);
        }
        if matches!(step, Step::Start(_)) {
            register_owner(shared, permit, socket, peer)?;
        }
        let sent = socket.send_before(&out, deadline);
        match step {
            Step::More => sent.map_err(failed)?,
            Step::Encrypt => {
                sent.map_err(failed)?;
                encrypt(shared, socket, deadline)?;
                handshake.encrypted(socket.peer_names());
            }
            Step::Start(chosen) => {
                sent.map_err(failed)?;
                return Ok(chosen);
            }
            // A client may close without waiting for the answer.
            Step::Abort => return Err(End::Orderly("the client aborted the handshake")),
            Step::Fault(why) => return Err(End::Fault(why)),
        }
    }
}

/// Logs that a client was denied an export. Returns whether it was logged as a warning.
fn log_denial(shared: &Shared, who: &str, denial: &Denial, is_logged: bool) -> bool {
    if denial.is_forbidden && !is_logged {
        shared.faults.warn(&who, &denial.what);
        return true;
    }
    tracing::debug!("NBD: {who}: {}", denial.what);
    false
}

fn encrypt(shared: &Shared, socket: &Socket, deadline: Instant) -> Result<(), End> {
    let failed = |why: String| End::Fault(format!("TLS did not start: {why}"));
    let Some(tls) = &shared.tls else { return Err(failed("the server has no certificate".into())) };
    let connection = tls.connection().map_err(|error| failed(error.to_string()))?;
    socket.secure(connection, deadline).map_err(|error| match error.kind() {
        ErrorKind::TimedOut => {
            failed(format!("the handshake took more than {} ms", shared.limits.handshake_timeout_ms))
        }
        ErrorKind::UnexpectedEof => {
            failed("the client hung up, perhaps because it does not trust this server's certificate".into())
        }
        _ => failed(error.to_string()),
    })
}
