//! The full feature phase: receiving, ordering commands, sleeping, and the end. One thread for each session.
//!
//! A round of the thread: turn events from other threads into replies; process the whole PDUs in the buffer
//! and collect their replies; send all replies; receive, and sleep if nothing has arrived. While it sends, it
//! receives nothing. So an initiator that does not read its replies stops only its own session.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod alone;
mod ending;
mod transport_id;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_block::{Inbox, Polling, Share};
use headwater_connections::{Received, Socket};
use headwater_scsi::{Initiator, Lun, Nexus};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::batch::Batch;
use super::event::Event;
use super::functions::Functions;
use super::inbound::{Found, Framing, Front, Inbound};
use super::pace::{Pace, Since};
use super::serve::{End, say_farewell};
use super::tasks::Tasks;
use super::texts::Texts;
use super::window::{Verdict, Window};
use super::{Permit, Shared};
use crate::limits::Limits;
use crate::login::keys::Parameters;
use crate::login::{Established, PORTAL_GROUP};
use crate::name::IscsiName;
use crate::wire::RESERVED_TAG;
use crate::wire::header::{Bhs, Opcode, ahs_bytes, get_u32, is_immediate, opcode_number, task_tag};
use crate::wire::request::{LogoutRequest, NopOut, SnackRequest, TextRequest};
use crate::wire::response::{NopIn, RejectReason};
use transport_id::transport_id;

/// The most memory of commands that arrived out of order, in bytes. If there are more, the connection is
/// closed.
const HELD_BYTES: usize = 8 << 20;

pub(super) struct Session<'a> {
    pub(super) shared: &'a Shared,
    pub(super) permit: &'a Permit,
    pub(super) socket: &'a Socket,
    pub(super) who: &'a str,
    pub(super) limits: &'a Limits,
    pub(super) initiator: IscsiName,
    cid: u16,
    /// `None` in a discovery.
    pub(super) target: Option<IscsiName>,
    pub(super) nexus: Option<Nexus>,
    pub(super) parameters: Parameters,
    pub(super) stat_sn: u32,
    pub(super) window: Window,
    inbound: Inbound,
    pub(super) batch: Batch,
    pub(super) inbox: Arc<Inbox<Event>>,
    events: Vec<Event>,
    /// Commands that arrived out of order.
    held: BTreeMap<u32, Pdu>,
    pub(super) held_bytes: usize,
    /// When the first of them arrived.
    pub(super) held_since: Since,
    pub(super) tasks: Tasks,
    /// Memory for the data of commands.
    pub(super) share: Share,
    /// Memory for unsolicited data.
    pub(super) unsolicited: Share,
    pub(super) functions: Functions,
    pub(super) texts: Texts,
    pub(super) last_transfer_tag: u32,
    pub(super) pace: Pace,
    /// When the pace was last checked.
    pub(super) pace_checked: Instant,
    /// How many of the commands in [`Shared::refused`] belong to this session.
    pub(super) refused_here: u64,
    keepalive: Keepalive,
    polling: Polling,
    stage: Stage,
}

/// A PDU that waits for its turn.
struct Pdu {
    header: Bhs,
    ahs: Vec<u8>,
    data: Vec<u8>,
}

impl Pdu {
    fn bytes(&self) -> usize {
        self.ahs.len().saturating_add(self.data.len())
    }
}

enum Stage {
    Open,
    /// The server is stopping: the initiator may log out until then.
    LoggingOut(Instant),
    /// Nothing more is received; when all running tasks have ended, the logout is answered.
    Closing(Option<LogoutRequest>, &'static str),
}

struct Keepalive {
    heard: Instant,
    /// Tag and time of a ping without an answer.
    unanswered: Option<(u32, Instant)>,
    /// Whether the initiator has ever answered a ping.
    has_answered: bool,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        permit: &'a Permit,
        socket: &'a Socket,
        who: &'a str,
        established: Established,
    ) -> std::io::Result<Self> {
        let limits = &shared.limits;
        let (target, nexus) = match established.target {
            None => (None, None),
            Some((name, offer)) => {
                let initiator = Initiator {
                    transport_id: transport_id(&established.initiator, established.isid),
                    target_port: PORTAL_GROUP,
                    target_port_name: format!("{name},t,0x{PORTAL_GROUP:04x}"),
                };
                (Some(name), Some(offer.scsi.nexus(initiator)))
            }
        };
        let inbox = Arc::new(Inbox::new()?);
        let share = {
            let inbox = Arc::clone(&inbox);
            shared.budget.share(move || inbox.nudge())
        };
        Ok(Self {
            shared,
            permit,
            socket,
            who,
            limits,
            initiator: established.initiator,
            cid: established.cid,
            target,
            nexus,
            parameters: established.parameters,
            stat_sn: established.stat_sn,
            window: Window::new(established.exp_cmd_sn, limits.queue_depth),
            inbound: Inbound::new(limits.receive_segment_bytes),
            batch: Batch::new(limits.batch_bytes),
            inbox,
            events: Vec::new(),
            held: BTreeMap::new(),
            held_bytes: 0,
            held_since: Since::default(),
            tasks: Tasks::default(),
            share,
            // No thread waits for memory of this budget.
            unsolicited: shared.unsolicited.share(|| {}),
            functions: Functions::default(),
            texts: Texts::default(),
            last_transfer_tag: 0,
            pace: Pace::new(),
            pace_checked: Instant::now(),
            refused_here: 0,
            keepalive: Keepalive { heard: Instant::now(), unanswered: None, has_answered: false },
            polling: Polling::new(Duration::from_micros(limits.polling_us)),
            stage: Stage::Open,
        })
    }

    /// Serves until the session ends.
    pub(super) fn run(&mut self) -> End {
        let end = loop {
            match self.round() {
                Ok(()) => {}
                Err(end) => break end,
            }
        };
        // Nobody reads the replies any more, so running tasks are aborted. A login that replaces this
        // session, and [`crate::Server::stop`], rely on the device having none of its commands.
        if let Some(nexus) = &self.nexus {
            nexus.abort_tasks();
        }
        while self.tasks.running() > 0 {
            self.inbox.take(&mut self.events);
            for event in std::mem::take(&mut self.events) {
                if let Event::Task { tag, .. } = event {
                    self.tasks.remove(tag);
                }
            }
            if self.tasks.running() > 0 && self.sleep(None, None).is_err() {
                break;
            }
        }
        if matches!(end, End::Orderly(_)) {
            say_farewell(self.socket);
        }
        end
    }

    fn round(&mut self) -> Result<(), End> {
        self.work()?;
        self.check_data_comes()?;
        match &self.stage {
            Stage::Closing(..) => self.close(),
            Stage::LoggingOut(until) if Instant::now() >= *until => {
                self.stage = Stage::Closing(None, "the server stops");
                Ok(())
            }
            Stage::LoggingOut(_) => self.receive_while_stopping(),
            Stage::Open => self.receive(),
        }
    }

    /// A whole round, except for receiving.
    fn work(&mut self) -> Result<(), End> {
        self.take_events()?;
        self.take_pdus()?;
        self.take_events()?;
        if self.batch.is_empty() { Ok(()) } else { self.flush_batch(&[]) }
    }

    /// Processes whole PDUs until there is none.
    fn take_pdus(&mut self) -> Result<(), End> {
        let inbound = std::mem::take(&mut self.inbound);
        let mut inbound = inbound;
        let mut taken = Ok(());
        while taken.is_ok() && !matches!(self.stage, Stage::Closing(..)) {
            let framing = Framing {
                header_digest: self.parameters.header_digest,
                data_digest: self.parameters.data_digest,
                segment_bytes: self.limits.receive_segment_bytes,
            };
            match inbound.front(framing) {
                Front::NeedBytes => break,
                Front::Pdu(found) => {
                    taken = self.take_pdu(&inbound, &found);
                    inbound.consume(found.total);
                }
                Front::TooLong(header) => taken = Err(self.too_long(&header)),
                Front::BadHeaderDigest => {
                    taken = Err(End::Fault("a header digest does not match its header: check the network, and the digest offload of the initiator's card".into()));
                }
            }
        }
        self.inbound = inbound;
        taken
    }

    fn too_long(&mut self, header: &Bhs) -> End {
        let length = crate::wire::header::segment_bytes(header);
        let limit = self.limits.receive_segment_bytes;
        // The reject informs the initiator of the reason; the connection is closed in any case.
        let _ = self.reject(header, RejectReason::ProtocolError).and_then(|()| self.flush_batch(&[]));
        let why = format!("the initiator sent a data segment of {length} bytes; {limit} were negotiated");
        End::Fault(why)
    }

    fn take_pdu(&mut self, inbound: &Inbound, found: &Found) -> Result<(), End> {
        let header = &found.header;
        let data = inbound.bytes(&found.data);
        if !found.data_is_intact {
            self.shared.faults.warn(
                &self.who,
                &"a data digest does not match its data: check the network, and the digest offload of the initiator's card",
            );
            self.reject(header, RejectReason::DataDigestError)?;
            // The data is lost: its task is marked as failed, and a command counts as not received.
            return match Opcode::of(header) {
                Some(Opcode::DataOut) => self.data_out(header, data, false),
                _ => Ok(()),
            };
        }
        match Opcode::of(header) {
            Some(Opcode::DataOut) => self.data_out(header, data, true),
            Some(Opcode::SnackRequest) => {
                let kind = SnackRequest::decode(header).map_or(0, |snack| snack.kind);
                tracing::debug!(
                    "iSCSI: {}: SNACK of type {kind} refused, there is no recovery level 1",
                    self.who
                );
                self.reject(header, RejectReason::SnackReject)
            }
            Some(
                Opcode::NopOut
                | Opcode::ScsiCommand
                | Opcode::TaskManagementRequest
                | Opcode::TextRequest
                | Opcode::LogoutRequest,
            ) => self.take_command(header, inbound.bytes(&found.ahs), data),
            Some(opcode) => {
                let what = format!("the initiator sent {opcode:?} after its login");
                let _ = self.reject(header, RejectReason::ProtocolError).and_then(|()| self.flush_batch(&[]));
                Err(End::Fault(what))
            }
            None => {
                let number = opcode_number(header);
                tracing::debug!("iSCSI: {}: unknown opcode {number:#x} rejected", self.who);
                self.reject(header, RejectReason::CommandNotSupported)
            }
        }
    }

    /// Puts commands in order: a command that is early waits, and one outside the window counts as not
    /// received.
    fn take_command(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) -> Result<(), End> {
        if is_immediate(header) {
            return self.command(header, ahs, data);
        }
        let number = get_u32(header, 24);
        match self.window.judge(number) {
            Verdict::Now => {}
            Verdict::Ignore => {
                tracing::debug!("iSCSI: {}: command number {number} is outside the window", self.who);
                return Ok(());
            }
            Verdict::Hold if self.held.contains_key(&number) => return Ok(()),
            Verdict::Hold => {
                let pdu = Pdu { header: *header, ahs: ahs.to_vec(), data: data.to_vec() };
                let is_first = self.held_bytes == 0;
                self.held_bytes = self.held_bytes.saturating_add(pdu.bytes());
                if self.held_bytes > HELD_BYTES {
                    return Err(End::Fault(format!(
                        "more than {HELD_BYTES} bytes wait for command number {}, which has not arrived",
                        self.window.next()
                    )));
                }
                if !self.unsolicited.take_unasked(length(pdu.bytes()), false) {
                    return Err(End::Fault(format!(
                        "there is no memory for commands that wait for command number {}, which has not arrived",
                        self.window.next()
                    )));
                }
                if is_first {
                    self.held_since = self.pace.since_now(self.refused_others());
                }
                self.held.insert(number, pdu);
                return Ok(());
            }
        }
        self.window.advance();
        self.command(header, ahs, data)?;
        self.take_held()
    }

    /// Processes commands that arrived early and are next now. After a logout nothing is processed.
    pub(super) fn take_held(&mut self) -> Result<(), End> {
        while !self.held.is_empty()
            && !matches!(self.stage, Stage::Closing(..))
            && self.window.judge(self.window.next()) == Verdict::Now
        {
            let Some(pdu) = self.held.remove(&self.window.next()) else { break };
            self.release_held(pdu.bytes());
            self.window.advance();
            self.command(&pdu.header, &pdu.ahs, &pdu.data)?;
        }
        Ok(())
    }

    /// Marks a command number as received although the command will not come, or arrived early and is
    /// aborted: a NOP-Out that needs no answer takes its place. `false`: another command has that number.
    pub(super) fn give_up(&mut self, number: u32, tag: u32) -> bool {
        if let Some(pdu) = self.held.get(&number) {
            if task_tag(&pdu.header) != tag {
                return false;
            }
            let bytes = pdu.bytes();
            self.release_held(bytes);
        }
        let nothing = NopOut {
            immediate: false,
            lun: [0; 8],
            task_tag: RESERVED_TAG,
            transfer_tag: RESERVED_TAG,
            cmd_sn: number,
            exp_stat_sn: 0,
        };
        self.held.insert(number, Pdu { header: nothing.encode(), ahs: Vec::new(), data: Vec::new() });
        true
    }

    /// The tag of the SCSI command that is held under a number, if it is for one of these logical units. If
    /// nothing is held, a tag that no task has.
    pub(super) fn held_task(&self, number: u32, concerned: Option<Lun>) -> Option<u32> {
        let Some(Pdu { header, .. }) = self.held.get(&number) else { return Some(RESERVED_TAG) };
        let is_command = Opcode::of(header) == Some(Opcode::ScsiCommand);
        let is_concerned = concerned.is_none_or(|lun| header.get(8..16) == Some(&lun.0[..]));
        (is_command && is_concerned).then(|| task_tag(header))
    }

    /// Releases the memory of a held command.
    fn release_held(&mut self, bytes: usize) {
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
        self.unsolicited.give(length(bytes), false);
    }

    fn command(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) -> Result<(), End> {
        let opcode = Opcode::of(header);
        if ahs_bytes(header) > 0 && opcode != Some(Opcode::ScsiCommand) {
            return self.reject(header, RejectReason::InvalidPduField);
        }
        match opcode {
            Some(Opcode::ScsiCommand) => self.scsi_command(header, ahs, data),
            Some(Opcode::NopOut) => self.nop_out(header, data),
            Some(Opcode::TaskManagementRequest) => self.function(header),
            Some(Opcode::TextRequest) => match TextRequest::decode(header) {
                Ok(request) => self.text(header, &request, data),
                Err(_) => self.reject(header, RejectReason::InvalidPduField),
            },
            Some(Opcode::LogoutRequest) => self.logout(header),
            _ => self.reject(header, RejectReason::CommandNotSupported),
        }
    }

    fn nop_out(&mut self, header: &Bhs, data: &[u8]) -> Result<(), End> {
        let Ok(nop) = NopOut::decode(header) else {
            return self.reject(header, RejectReason::InvalidPduField);
        };
        if nop.transfer_tag != RESERVED_TAG
            && let Some((tag, _)) = self.keepalive.unanswered
            && tag == nop.transfer_tag
        {
            self.keepalive.unanswered = None;
            self.keepalive.has_answered = true;
        }
        if nop.task_tag == RESERVED_TAG {
            return Ok(());
        }
        let numbers = self.next_numbers();
        let reply = NopIn { lun: [0; 8], task_tag: nop.task_tag, transfer_tag: RESERVED_TAG, numbers };
        let limit = usize::try_from(self.parameters.send_segment_bytes).unwrap_or(8192);
        let echo = data.get(..limit).unwrap_or(data);
        self.put_pdu(&reply.encode(), echo)
    }

    /// Receives once; sleeps if there is nothing.
    fn receive(&mut self) -> Result<(), End> {
        let idle = self.tasks.running() == 0 && self.functions.is_empty() && !self.share.is_waiting();
        match self.receive_now(idle)? {
            Received::Bytes(_) => Ok(()),
            Received::End => self.hung_up(),
            // The timer ran out.
            Received::Nothing if idle => {
                // Memory may have become free without a notification, if other sessions left some of theirs.
                if !self.tasks.is_clear() {
                    self.pump()?;
                }
                self.check_keepalive()
            }
            Received::Nothing => {
                let timeout = Duration::from_millis(self.limits.keepalive_ms);
                self.sleep(Some(PollFlags::IN), Some(timeout))?;
                self.check_keepalive()
            }
        }
    }

    /// Receives bytes that have arrived. If `may_wait`, waits for them: it polls before it sleeps, as long as
    /// polling was worthwhile recently.
    fn receive_now(&mut self, may_wait: bool) -> Result<Received, End> {
        let (socket, into) = (self.socket, self.inbound.room());
        let received = if may_wait {
            self.polling.receive(|wait| socket.receive(into, wait), |received| *received != Received::Nothing)
        } else {
            socket.receive(into, false)
        };
        let received = match received {
            // open-iscsi ends a discovery like this, without a logout.
            Err(error) if self.nexus.is_none() && error.kind() == ErrorKind::ConnectionReset => Received::End,
            received => received.map_err(|error| End::Fault(format!("receiving failed: {error}")))?,
        };
        if let Received::Bytes(count) = received {
            self.inbound.received(count);
            self.keepalive.heard = Instant::now();
        }
        Ok(received)
    }

    /// Pings a silent initiator. Disconnects an initiator that has answered pings before and no longer does.
    fn check_keepalive(&mut self) -> Result<(), End> {
        let limit = Duration::from_millis(self.limits.keepalive_ms);
        let now = Instant::now();
        let silent = now.saturating_duration_since(self.keepalive.heard);
        if silent < limit {
            return Ok(());
        }
        if let Some((_, sent)) = self.keepalive.unanswered {
            if now.saturating_duration_since(sent) < limit {
                return Ok(());
            }
            if self.keepalive.has_answered {
                let silent_s = silent.as_secs();
                let what = format!("the initiator sent nothing for {silent_s} s, and did not answer a ping");
                return Err(End::Fault(what));
            }
        }
        let tag = self.new_transfer_tag();
        self.keepalive.unanswered = Some((tag, now));
        let numbers = self.numbers();
        let ping = NopIn { lun: [0; 8], task_tag: RESERVED_TAG, transfer_tag: tag, numbers };
        self.put_pdu(&ping.encode(), &[])?;
        self.flush_batch(&[])
    }

    /// Sleeps until the inbox has events, the socket is ready for `watched` or cut, or `timeout` has passed.
    /// With `None` the socket is not watched. Returns whether the socket is cut in both directions.
    fn sleep(&self, watched: Option<PollFlags>, timeout: Option<Duration>) -> Result<bool, End> {
        if !self.inbox.fall_asleep() {
            return Ok(false);
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = [
            PollFd::from_borrowed_fd(self.inbox.event(), PollFlags::IN),
            PollFd::new(self.socket, watched.unwrap_or(PollFlags::empty())),
        ];
        // If only the inbox counts, the socket is not polled: poll would always report a hang-up.
        let count = if watched.is_some() { 2 } else { 1 };
        let polled = rustix::event::poll(fds.get_mut(..count).unwrap_or_default(), timeout.as_ref());
        let [event, socket] = &fds;
        self.inbox.wake_up(event.revents().contains(PollFlags::IN));
        match polled {
            Ok(_) | Err(Errno::INTR) => Ok(socket.revents().intersects(PollFlags::HUP | PollFlags::ERR)),
            Err(errno) => Err(End::Fault(format!("poll failed: {errno}"))),
        }
    }

    /// Turns the events in the inbox into replies.
    fn take_events(&mut self) -> Result<(), End> {
        let mut events = std::mem::take(&mut self.events);
        self.inbox.take(&mut events);
        let any = !events.is_empty();
        let mut end = Ok(());
        for event in events.drain(..) {
            end = match (end, event) {
                (Err(end), Event::Task { tag, .. }) => {
                    self.tasks.remove(tag);
                    Err(end)
                }
                (Err(end), Event::Managed { .. }) => Err(end),
                (Ok(()), Event::Task { tag, serial, outcome }) => self.task_ended(tag, serial, outcome),
                (Ok(()), Event::Managed { serial, result }) => self.function_ended(serial, result),
            };
        }
        self.events = events;
        end?;
        // Tasks that ended may have freed memory, here or in another session.
        let is_granted = self.share.is_waiting() && self.share.is_granted();
        if (any || is_granted) && !self.tasks.is_clear() {
            self.pump()?;
        }
        if is_granted {
            self.share.settle();
        }
        Ok(())
    }

    /// A new tag for an R2T, a ping or a text.
    pub(super) fn new_transfer_tag(&mut self) -> u32 {
        self.last_transfer_tag = self.last_transfer_tag.wrapping_add(1);
        if self.last_transfer_tag == RESERVED_TAG {
            self.last_transfer_tag = 0;
        }
        self.last_transfer_tag
    }

    /// Rejects a PDU, and logs that.
    pub(super) fn reject(&mut self, header: &Bhs, reason: RejectReason) -> Result<(), End> {
        let (number, tag) = (opcode_number(header), task_tag(header));
        tracing::debug!("iSCSI: {}: PDU {number:#04x} with tag {tag:#x} rejected: {reason:?}", self.who);
        self.put_reject(header, reason)
    }
}

fn length(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
