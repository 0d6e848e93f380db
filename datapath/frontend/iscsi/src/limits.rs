//! All limits of the server, with names, units and defaults.

use crate::wire::header::SEGMENT_BYTES_MAX;

/// What one initiator, and all together, may cost, and what is negotiated with them.
///
/// Memory of one session is at most the two buffers (about `2 * receive_segment_bytes + batch_bytes`), and
/// `queue_depth * first_burst_bytes`, and 5/4 of `bytes_collected` and of `bytes_executing` with two transfers more of either. Of all but
/// the two buffers all sessions together take at most 19/16 of `shared_bytes` and 3/4 MiB each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time, those that have not logged in included. More are closed at once. But where the sessions of one CHAP
    /// name, or without CHAP those of one address, are more than half of all, others may still log in: who has none gets the newest
    /// connection of whoever has most.
    pub connections: usize,
    /// Connections that have not logged in. A new one ends the oldest of them.
    pub half_open_logins: usize,
    /// From accepting a connection to the end of its login, in milliseconds. Then it is closed.
    pub login_timeout_ms: u64,
    /// PDUs in one login. Then it is closed.
    pub login_pdus: u32,
    /// Text of one login step or of one text request, in bytes, all its PDUs together.
    pub text_bytes: usize,
    /// The longest data segment that is taken, in bytes (MaxRecvDataSegmentLength).
    pub receive_segment_bytes: u32,
    /// Most data that comes unasked with a command, in bytes (FirstBurstLength).
    pub first_burst_bytes: u32,
    /// Most data of one sequence, in bytes (MaxBurstLength).
    pub max_burst_bytes: u32,
    /// R2Ts of one task at the same time (MaxOutstandingR2T).
    pub outstanding_r2t: u16,
    /// Commands of one session at the same time (the window of MaxCmdSN); immediate ones come on top, as many again. More than initiators
    /// have, since commands keep their order: behind writes that fill the window and wait for room on the disk no read could come.
    pub queue_depth: u32,
    /// Data of one session that R2Ts have asked for or that waits to be carried out, in bytes; one burst more than fits is taken. Commands
    /// that store nothing have a quarter besides, so that writes which wait for room on the disk do not hold them up.
    pub bytes_collected: u64,
    /// Data of one session that the device works on, in bytes, in the same way; one request more than fits is taken.
    pub bytes_executing: u64,
    /// What the commands of all sessions share besides [`headwater_block::budget::OWN_BYTES`] each for those that store data and for
    /// others, in bytes: their data, from when an R2T asks for it or it comes unasked until their reply was sent, and what they read to
    /// compare or write many times. Commands for which there is nothing wait. Those that store data have three quarters of it. For data
    /// that has come unasked, with commands that wait, there are 3/16 of it besides (48 MiB at least); where there is no more of that, they
    /// are answered TASK SET FULL.
    pub shared_bytes: u64,
    /// Replies are sent when this much is collected, in bytes, if not earlier; at least 128 KiB.
    pub batch_bytes: usize,
    /// How long a session's thread looks for the next command before it sleeps, in microseconds; 0 sleeps at once. Looking ends
    /// by itself where commands come more slowly ([`headwater_block::Polling`]).
    pub polling_us: u64,
    /// Silence after which a session is asked whether it is there (NOP-In), and time to answer, in milliseconds. An initiator
    /// that never answered one is only asked: some boot firmware cannot.
    pub keepalive_ms: u64,
    /// How long an initiator may take nothing of what is sent, in milliseconds. The connection is cut then, or up to two such times later;
    /// never while it takes something, however little. Also how long data that was asked for, or announced, may not
    /// come, where others wait for the memory that was set aside for it or were refused for want of it; and that of one command may then
    /// take so long, and a second more for each 32 KiB of the session that came meanwhile (of at most `bytes_collected` and 64 MiB).
    pub send_stall_ms: u64,
    /// How long [`crate::Server::stop`] waits for initiators to log out when asked to, in milliseconds.
    pub logout_grace_ms: u64,
    /// How long [`crate::Server::stop`] waits after that for requests in flight and for initiators to take their replies, in
    /// milliseconds. Then connections are cut. Also how long a login waits for the session that it replaces.
    pub stop_timeout_ms: u64,
    /// Warnings about initiators in ten seconds; further ones are counted and told later.
    pub warnings_per_10_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            half_open_logins: 128,
            login_timeout_ms: 15_000,
            login_pdus: 64,
            text_bytes: 16 << 10,
            receive_segment_bytes: 128 << 10,
            first_burst_bytes: 128 << 10,
            max_burst_bytes: 1 << 20,
            outstanding_r2t: 4,
            queue_depth: 320,
            bytes_collected: 32 << 20,
            bytes_executing: 64 << 20,
            shared_bytes: 256 << 20,
            batch_bytes: 256 << 10,
            polling_us: 100,
            keepalive_ms: 30_000,
            send_stall_ms: 120_000,
            logout_grace_ms: 2_000,
            stop_timeout_ms: 10_000,
            warnings_per_10_s: 20,
        }
    }
}

impl Limits {
    /// The same, with values that cannot work raised or lowered to those that can.
    pub(crate) fn sane(mut self) -> Self {
        self.connections = self.connections.max(1);
        self.half_open_logins = self.half_open_logins.clamp(1, self.connections);
        self.text_bytes = self.text_bytes.clamp(8192, 1 << 20);
        self.receive_segment_bytes = self.receive_segment_bytes.clamp(8192, SEGMENT_BYTES_MAX);
        self.max_burst_bytes = self.max_burst_bytes.clamp(512, SEGMENT_BYTES_MAX);
        self.first_burst_bytes = self.first_burst_bytes.clamp(512, self.max_burst_bytes);
        self.outstanding_r2t = self.outstanding_r2t.max(1);
        self.queue_depth = self.queue_depth.clamp(1, 1 << 16);
        self.bytes_collected = self.bytes_collected.max(1);
        self.bytes_executing = self.bytes_executing.max(1);
        self.batch_bytes = self.batch_bytes.max(128 << 10);
        self.keepalive_ms = self.keepalive_ms.max(10);
        self
    }
}
