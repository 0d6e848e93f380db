//! All limits of the server, with names, units and defaults.

use crate::wire::header::SEGMENT_BYTES_MAX;

/// Limits for one initiator and for all together, and the values that are negotiated with initiators.
///
/// The memory of one session is at most the sum of:
///
/// | part | bytes |
/// |---|---|
/// | its receive and send buffers | about `2 * receive_segment_bytes + batch_bytes` |
/// | unsolicited data of waiting commands | `2 * queue_depth * first_burst_bytes`, because as many immediate commands are accepted as others |
/// | data that R2Ts requested, or that waits to be executed | 5/4 of `bytes_collected`, and two commands more |
/// | data that the device works on | 5/4 of `bytes_executing`, and two commands more |
///
/// All sessions together use at most `shared_bytes` for commands (64 MiB if it is less) and 3/16 of `shared_bytes`
/// for unsolicited data (48 MiB if that is less). In addition, each session has its two buffers and three times
/// [`headwater_block::budget::OWN_BYTES`]: for commands that store data, for other commands, and for unsolicited data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time, including those that have not logged in. Further connections are closed
    /// at once. There is one exception. If the sessions of one CHAP name (without CHAP: of one address) are
    /// more than half of all, an initiator of another name without any connection may still log in. It gets
    /// the place of the newest connection of the name with the most connections.
    pub connections: usize,
    /// Connections that have not logged in. If there are that many, a new connection ends the oldest of them.
    pub half_open_logins: usize,
    /// From accepting a connection to the end of its login, in milliseconds. After that the connection is
    /// closed.
    pub login_timeout_ms: u64,
    /// PDUs in one login. If there are more, the connection is closed.
    pub login_pdus: u32,
    /// Text of one login step or of one text request, in bytes, in all its PDUs together.
    pub text_bytes: usize,
    /// The longest data segment that is accepted, in bytes (MaxRecvDataSegmentLength).
    pub receive_segment_bytes: u32,
    /// The most unsolicited data of a command, in bytes (FirstBurstLength).
    pub first_burst_bytes: u32,
    /// The most data of one sequence, in bytes (MaxBurstLength).
    pub max_burst_bytes: u32,
    /// R2Ts of one task at the same time (MaxOutstandingR2T).
    pub outstanding_r2t: u16,
    /// Commands of one session at the same time (the window of MaxCmdSN), and in addition as many immediate
    /// commands. Larger than the queues of initiators: commands keep their order, so if writes that wait for
    /// disk space filled the window, no read could pass them.
    pub queue_depth: u32,
    /// Data of one session that R2Ts have requested, or that waits to be executed, in bytes. Commands that
    /// store nothing have another quarter for themselves, so that writes that wait for disk space do not delay
    /// them. The limit and the quarter may each be exceeded by the data of one command.
    pub bytes_collected: u64,
    /// Data of one session that the device works on, in bytes. As with `bytes_collected`, commands that store
    /// nothing have another quarter, and the limit and the quarter may each be exceeded by one command.
    pub bytes_executing: u64,
    /// Memory that the commands of all sessions share, in bytes, at least 64 MiB. In addition each session has
    /// [`headwater_block::budget::OWN_BYTES`] for commands that store data, as much for others, and as much for
    /// unsolicited data (see above). A
    /// command's data counts from its R2T, or from its unsolicited arrival, until its reply was sent. Data
    /// that is read for comparing, or written many times, counts as well.
    ///
    /// Commands wait if there is not enough memory. Those that store data may use three quarters. Unsolicited
    /// data of waiting commands has another 3/16 (at least 48 MiB); when that is used up, such commands get
    /// TASK SET FULL.
    pub shared_bytes: u64,
    /// Replies are sent when this many bytes are collected, if not earlier; at least 128 KiB.
    pub batch_bytes: usize,
    /// How long a session's thread polls for the next command before it sleeps, in microseconds; 0 sleeps at
    /// once. Polling stops by itself if commands arrive more slowly ([`headwater_block::Polling`]).
    pub polling_us: u64,
    /// After this silence a session gets a ping (NOP-In), and has as long to answer, in milliseconds. An
    /// initiator that never answered a ping is not disconnected for that, because some boot firmware cannot
    /// answer.
    pub keepalive_ms: u64,
    /// How long an initiator may accept no bytes of its replies, in milliseconds. The connection is then cut
    /// after one to three times this time, and never while the initiator accepts any bytes.
    ///
    /// It also limits how long an initiator may keep memory reserved for data that it does not send, while
    /// other sessions wait for that memory or were refused because of it. Two sessions are ended: one in which no
    /// data arrives for this time; and one in which the data of one command is incomplete after `send_stall_ms` +
    /// 1 s for each 32 KiB that the session received meanwhile. At most min(`bytes_collected`, 64 MiB) of these
    /// bytes count.
    pub send_stall_ms: u64,
    /// How long [`crate::Server::stop`] waits for initiators to log out when asked to, in milliseconds.
    pub logout_grace_ms: u64,
    /// How long [`crate::Server::stop`] waits after that for requests in flight and for initiators to take
    /// their replies, in milliseconds. Then connections are cut. It is also how long a login waits for the
    /// session that it replaces.
    pub stop_timeout_ms: u64,
    /// Warnings about initiators in ten seconds; further ones are counted and reported later.
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
    /// The same limits, with impossible values raised or lowered to possible ones.
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
