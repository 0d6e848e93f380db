//! One connection from its first byte to its last: login with a deadline, then the session.

use std::fmt::Display;
use std::io::{ErrorKind, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use headwater_connections::{FrontEnd as _, Owner, Peer, Socket};

use super::session::Session;
use super::sessions::{SessionKey, SessionPermit, SessionRefusal, Wanted};
use super::{Permit, Shared, TICK_MS_MAX};
use crate::login::chap::CHALLENGE_BYTES;
use crate::login::{Established, Login, Step, status};
use crate::wire::header::{
    BHS_BYTES, Bhs, Opcode, ahs_bytes, padded, padding, segment_bytes, set_segment_bytes,
};
use crate::wire::request::LoginRequest;
use crate::wire::response::LoginResponse;

/// The longest data segment of a login PDU: the protocol's default, because nothing was negotiated yet.
const LOGIN_SEGMENT_BYTES: u32 = 8192;

/// How long to wait for an initiator to close after the last reply.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why a connection ended between two commands.
pub(super) const HUNG_UP: &str = "the initiator hung up";

/// Why a connection ended.
pub(super) enum End {
    /// The initiator closed it between commands or logged out, or the server stops.
    Orderly(&'static str),
    /// The initiator broke the protocol, or the connection broke.
    Fault(String),
}

pub(super) fn serve(shared: &Shared, permit: &Permit, socket: &Arc<Socket>, peer: &Peer) {
    let at = Shared::client(peer);
    tracing::debug!("iSCSI: {at} connected");
    let log_end = |who: &dyn Display, end: End| match end {
        End::Orderly(why) => tracing::debug!("iSCSI: {who} disconnected: {why}"),
        End::Fault(why) => shared.faults.warn(&who, &format_args!("the connection was closed: {why}")),
    };
    let limits = &shared.limits;
    let tick = Duration::from_millis((limits.keepalive_ms / 4).clamp(1, TICK_MS_MAX));
    let stall = Duration::from_millis(limits.send_stall_ms.max(1));
    if let Err(error) = socket.limit_wait(tick).and_then(|()| socket.limit_stall(stall)) {
        return log_end(&at, End::Fault(format!("the options of its socket cannot be set: {error}")));
    }
    let (established, place) = match log_in(shared, permit, socket, peer) {
        Ok(logged_in) => logged_in,
        Err(_) if permit.is_evicted() => {
            let why = format!(
                "{} connections had not logged in, which is the limit, and this one was the oldest",
                limits.half_open_logins
            );
            return log_end(&at, End::Fault(why));
        }
        Err(end) => return log_end(&at, end),
    };
    let who = format!("{} at {peer}", established.initiator);
    let target = established.target.as_ref().map_or("discovery", |(name, _)| name.as_str());
    let proved = established.proved.as_deref().unwrap_or("-").escape_debug();
    tracing::info!(tsih = place.tsih, "iSCSI: {who} logged in to {target}, CHAP name {proved}");
    let is_discovery = established.target.is_none();
    let end = match Session::new(shared, permit, socket, &who, *established) {
        Ok(mut session) => session.run(),
        Err(error) => End::Fault(format!("the session cannot be started: {error}")),
    };
    let end = match end {
        _ if permit.gave_way() => {
            let limit = limits.connections;
            let why = format!(
                "{limit} initiators were connected, which is the limit: this connection was closed for an initiator of another CHAP name or address, because this initiator had the most connections"
            );
            End::Fault(why)
        }
        End::Fault(_) if place.replaced.load(Ordering::SeqCst) => {
            End::Orderly("another login replaced the session, or the target was reset")
        }
        End::Orderly(HUNG_UP) if is_discovery => End::Orderly("the discovery is over"),
        end => end,
    };
    log_end(&who, end);
}

/// Shuts down sending, and waits a moment for the initiator to close. Closing a socket with unread bytes
/// would reset the connection, and the initiator might lose the last reply.
pub(super) fn say_farewell(socket: &Socket) {
    socket.stop_sending();
    let Some(deadline) = Instant::now().checked_add(FAREWELL) else { return };
    let mut rest = [0; 4096];
    // Further input is ignored. An initiator that sends without end is abandoned after the deadline.
    while Instant::now() < deadline && matches!(socket.receive_exact(&mut rest, deadline), Ok(true)) {}
}

fn log_in<'a>(
    shared: &'a Shared,
    permit: &Permit,
    socket: &Arc<Socket>,
    peer: &Peer,
) -> Result<(Box<Established>, SessionPermit<'a>), End> {
    let limits = &shared.limits;
    let timeout = Duration::from_millis(limits.login_timeout_ms);
    let Some(deadline) = Instant::now().checked_add(timeout) else {
        return Err(End::Fault("the login time-out is too long for the clock".into()));
    };
    let mut random = [0; CHALLENGE_BYTES + 1];
    aws_lc_rs::rand::fill(&mut random)
        .map_err(|_| End::Fault("the system gave no random bytes for a challenge".into()))?;
    let mut login = Login::new(&*shared.targets, limits, random);
    for _ in 0..limits.login_pdus {
        let (header, data) = receive_pdu(shared, permit, socket, deadline)?;
        let request = match LoginRequest::decode(&header) {
            Ok(request) => request,
            Err(_) => return Err(not_a_login(&mut login, socket, &header)),
        };
        match login.step(&request, &data) {
            Step::More(response, text) => send(socket, &response, &text)?,
            Step::Done(response, text, established) => {
                let place = match find_place(shared, permit, socket, peer, &established) {
                    Ok(place) => place,
                    Err((status, why)) => {
                        let response = LoginResponse { transit: false, next_stage: 0, status, ..response };
                        send(socket, &response, &[])?;
                        say_farewell(socket);
                        return Err(End::Fault(format!("{} was refused: {why}", established.initiator)));
                    }
                };
                let response = LoginResponse { tsih: place.tsih, ..response };
                send(socket, &response, &text)?;
                return Ok((established, place));
            }
            Step::Refused(response, why) => {
                send(socket, &response, &[])?;
                say_farewell(socket);
                return Err(End::Fault(format!("the login was refused: {why}")));
            }
        }
    }
    Err(End::Fault(format!("the login took more than {} PDUs", limits.login_pdus)))
}

fn find_place<'a>(
    shared: &'a Shared,
    permit: &Permit,
    socket: &Arc<Socket>,
    peer: &Peer,
    established: &Established,
) -> Result<SessionPermit<'a>, (u16, &'static str)> {
    let key = established.target.as_ref().map(|(target, _)| SessionKey {
        initiator: established.initiator.clone(),
        isid: established.isid,
        target: target.clone(),
    });
    let account = established.proved.clone();
    let owner = Owner::of(account.as_deref(), peer);
    let wanted = Wanted { key, tsih: established.tsih, cid: established.cid, account, owner };
    let timeout = Duration::from_millis(shared.limits.stop_timeout_ms);
    shared.sessions.establish(permit, socket, &wanted, timeout).map_err(|no_place| match no_place {
        SessionRefusal::NoSuchSession => {
            (status::SESSION_DOES_NOT_EXIST, "it asks for a session that does not exist")
        }
        SessionRefusal::TooManyConnections => (
            status::TOO_MANY_CONNECTIONS,
            "it asks for a second connection in its session, which is not supported",
        ),
        SessionRefusal::OfAnother => {
            (status::AUTHORIZATION_FAILURE, "this session exists already and belongs to another CHAP name")
        }
        SessionRefusal::Busy => {
            (status::SERVICE_UNAVAILABLE, "its previous session has commands that do not end")
        }
        SessionRefusal::Evicted => (status::OUT_OF_RESOURCES, "too many logins are in progress"),
        SessionRefusal::Full => {
            (status::OUT_OF_RESOURCES, "all connections are taken, and none may be closed for this initiator")
        }
    })
}

fn not_a_login(login: &mut Login<'_>, socket: &Socket, header: &Bhs) -> End {
    let Some(opcode) = Opcode::of(header) else {
        return End::Fault("the client does not speak iSCSI: its first bytes are not a login request".into());
    };
    let request = LoginRequest {
        transit: false,
        go_on: false,
        current_stage: 0,
        next_stage: 0,
        version_max: 0,
        version_min: 0,
        isid: [0; 6],
        tsih: 0,
        task_tag: crate::wire::header::task_tag(header),
        cid: 0,
        cmd_sn: 0,
        exp_stat_sn: 0,
    };
    let why = format!("{opcode:?} before the end of the login");
    if let Step::Refused(response, _) = login.refused(&request, status::INVALID_DURING_LOGIN, why.clone()) {
        // The send may fail: the initiator may have closed.
        let _ = send(socket, &response, &[]);
        say_farewell(socket);
    }
    End::Fault(format!("the initiator sent {why}"))
}

fn receive_pdu(
    shared: &Shared,
    permit: &Permit,
    socket: &Socket,
    deadline: Instant,
) -> Result<(Bhs, Vec<u8>), End> {
    let receive = |into: &mut [u8]| match socket.receive_exact(into, deadline) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) if permit.is_stopping() => Err(End::Orderly("the server stops")),
        Ok(false) => Err(End::Orderly("the initiator hung up before the end of its login")),
        Err(error) => Err(End::Fault(match error.kind() {
            ErrorKind::TimedOut => {
                format!("the login took more than {} ms", shared.limits.login_timeout_ms)
            }
            ErrorKind::UnexpectedEof => "the initiator hung up in the middle of a login PDU".into(),
            _ => format!("receiving a login PDU failed: {error}"),
        })),
    };
    let mut header = [0; BHS_BYTES];
    receive(&mut header)?;
    let length = segment_bytes(&header);
    if length > LOGIN_SEGMENT_BYTES || ahs_bytes(&header) > 0 {
        return Err(End::Fault(format!(
            "the client does not speak iSCSI, or sent a login PDU with {length} bytes of data and {} of further \
             headers; the limits are {LOGIN_SEGMENT_BYTES} and 0",
            ahs_bytes(&header)
        )));
    }
    let length = usize::try_from(length).unwrap_or(0);
    let mut data = vec![0; padded(length)];
    if !data.is_empty() {
        receive(&mut data)?;
    }
    data.truncate(length);
    Ok((header, data))
}

fn send(socket: &Socket, response: &LoginResponse, text: &[u8]) -> Result<(), End> {
    let mut header = response.encode();
    set_segment_bytes(&mut header, text.len());
    let mut data = text.to_vec();
    data.resize(text.len().saturating_add(padding(text.len())), 0);
    socket
        .send(&mut [IoSlice::new(&header), IoSlice::new(&data)], None)
        .map_err(|error| End::Fault(format!("sending a login response failed: {error}")))
}
