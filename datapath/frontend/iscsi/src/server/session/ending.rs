//! How a session ends: a logout, an initiator that hangs up, and a server that stops.

use std::time::{Duration, Instant};

use headwater_connections::Received;
use rustix::event::PollFlags;

use super::super::serve::{End, HUNG_UP};
use super::{Session, Stage};
use crate::wire::header::Bhs;
use crate::wire::request::LogoutRequest;
use crate::wire::response::{AsyncMessage, LogoutResponse, RejectReason};

/// While the server stops, receives do not block: the thread sleeps this long between two attempts.
const STOPPING_TICK: Duration = Duration::from_millis(5);

impl Session<'_> {
    pub(super) fn logout(&mut self, header: &Bhs) -> Result<(), End> {
        let Ok(request) = LogoutRequest::decode(header) else {
            return self.reject(header, RejectReason::InvalidPduField);
        };
        let refusal = match request.reason {
            0 => None,
            1 if request.cid == self.cid => None,
            1 => Some(1),
            // Recovery would need error recovery level 1.
            2 => Some(2),
            _ => return self.reject(header, RejectReason::InvalidPduField),
        };
        if let Some(response) = refusal {
            return self.answer_logout(request.task_tag, response);
        }
        for tag in self.tasks.waiting() {
            self.forget(tag);
        }
        self.stage = Stage::Closing(Some(request), "the initiator logged out");
        Ok(())
    }

    fn answer_logout(&mut self, task_tag: u32, response: u8) -> Result<(), End> {
        let reply = LogoutResponse {
            response,
            task_tag,
            numbers: self.next_numbers(),
            time_to_wait_s: self.parameters.time_to_wait_s,
            time_to_retain_s: 0,
        };
        self.put_pdu(&reply.encode(), &[])
    }

    /// Answers the logout when no task runs any more.
    pub(super) fn close(&mut self) -> Result<(), End> {
        if self.tasks.running() > 0 {
            // Nothing is received, but a login that replaces this session may cut the connection.
            return if self.sleep(Some(PollFlags::empty()), None)? {
                Err(End::Fault("the connection was cut before its commands had ended".into()))
            } else {
                Ok(())
            };
        }
        let Stage::Closing(logout, why) = &self.stage else { return Ok(()) };
        let (tag, why) = (logout.as_ref().map(|request| request.task_tag), *why);
        if let Some(tag) = tag {
            self.answer_logout(tag, 0)?;
            self.flush_batch(&[])?;
        }
        Err(End::Orderly(why))
    }

    pub(super) fn receive_while_stopping(&mut self) -> Result<(), End> {
        match self.receive_now(false)? {
            Received::Bytes(_) => Ok(()),
            // The server itself ended receiving, so this does not tell whether the initiator is still
            // connected.
            Received::End | Received::Nothing => self.sleep(None, Some(STOPPING_TICK)).map(drop),
        }
    }

    pub(super) fn hung_up(&mut self) -> Result<(), End> {
        if self.permit.is_stopping() {
            return self.ask_for_logout();
        }
        if self.inbound.is_empty() && self.tasks.is_clear() {
            return Err(End::Orderly(HUNG_UP));
        }
        let why = "the initiator hung up in the middle of a command, which was not executed";
        Err(End::Fault(why.into()))
    }

    fn ask_for_logout(&mut self) -> Result<(), End> {
        let grace = Duration::from_millis(self.limits.logout_grace_ms);
        let Some(until) = Instant::now().checked_add(grace).filter(|_| self.nexus.is_some()) else {
            self.stage = Stage::Closing(None, "the server stops");
            return Ok(());
        };
        self.stage = Stage::LoggingOut(until);
        let message = AsyncMessage {
            event: 1,
            numbers: self.next_numbers(),
            parameter1: 0,
            parameter2: 0,
            parameter3: u16::try_from(grace.as_secs().max(1)).unwrap_or(u16::MAX),
        };
        self.put_pdu(&message.encode(), &[])
    }
}
