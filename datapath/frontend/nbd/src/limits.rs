//! All limits of the server, with names, units and defaults.

use std::time::Duration;

use headwater_block::MAX_REQUEST_BYTES;

/// Limits for one client and for all together.
///
/// One connection uses at most `receive_buffer_bytes + 2 * batch_bytes`, a MiB of buffers that are reused,
/// 5/4 of `bytes_in_flight` and two requests more. Of the last two, all connections together use
/// `shared_bytes` and half a MiB each. With TLS a connection uses up to 2 MiB more: records that have arrived
/// (128 KiB), and records on their way to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time, including half-open ones. Further connections are closed at once. There
    /// is one exception. If the clients of one certificate (without certificates: of one address) have more
    /// than half of all, a client of another owner without any connection may still connect. It gets the
    /// place of the newest connection of the owner with the most connections.
    pub connections: usize,
    /// Connections in their handshake. A new connection ends the oldest of them, so that clients that connect
    /// and send nothing keep nobody out.
    pub half_open: usize,
    /// From accepting a connection to the end of its handshake, in milliseconds. After that the connection is
    /// closed.
    pub handshake_timeout_ms: u64,
    /// Options in one handshake, plus three for each export that was listed in it. If there are more, the
    /// connection is closed.
    pub handshake_options: u32,
    /// Data of one option, in bytes. A longer option is answered `TOO_BIG` and the connection is closed.
    pub option_bytes: u32,
    /// Name of an export or of a metadata context, in bytes.
    pub name_bytes: u32,
    /// Longest read or write, in bytes; reported to clients as the maximum block size. If a client ignores
    /// it, a longer read or write is executed in parts. A longer cache request may be executed only partly.
    pub request_bytes: u32,
    /// The longest read or write that is executed, in bytes. A longer write closes the connection, because
    /// its payload cannot be received; a longer read is an error.
    pub longest_request_bytes: u32,
    /// Requests of one connection that wait for the device. When there are this many, neither a write nor
    /// anything behind it is taken; other requests are taken while they use less than another quarter of
    /// this.
    pub requests_in_flight: usize,
    /// Payload of these requests, in bytes, with the same rule. The limit may be exceeded by one request, so
    /// that every legal request fits.
    pub bytes_in_flight: usize,
    /// Memory that the requests of all connections share, in bytes. In addition each connection has
    /// [`headwater_block::budget::OWN_BYTES`] for writes, and as much for other requests. A request counts
    /// while it waits for the device, while its payload arrives, and while its reply is sent. Requests that
    /// do not fit wait in the client's socket. Writes may use three quarters.
    pub shared_bytes: u64,
    /// Extents in one answer to block status.
    pub extents_per_reply: usize,
    /// The most that one receive takes, in bytes; at least 192 KiB.
    pub receive_buffer_bytes: usize,
    /// Replies are sent when this many bytes are collected, if not earlier; at least 128 KiB.
    pub batch_bytes: usize,
    /// How long the thread of a connection with one request at a time polls before it sleeps, in
    /// microseconds; 0 sleeps at once. Polling stops by itself if requests arrive more slowly
    /// ([`headwater_block::Polling`]).
    pub polling_us: u64,
    /// How long a client may take no bytes of a reply, in milliseconds. The connection is then cut after one
    /// to three times this time, and never while the client takes any bytes.
    ///
    /// It is also how long a client may send nothing of a write that it has begun, if others wait for the
    /// memory that is reserved for it. All data of the write may then take this time, and a second more for
    /// each 128 KiB.
    pub send_stall_ms: u64,
    /// How long [`crate::Server::stop`] waits for requests in flight and for clients to take
    /// their replies, in milliseconds. Then connections are cut.
    pub stop_timeout_ms: u64,
    /// Warnings about clients in ten seconds; further ones are counted and reported later.
    pub warnings_per_10_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            half_open: 128,
            handshake_timeout_ms: 10_000,
            handshake_options: 64,
            option_bytes: 64 << 10,
            name_bytes: 4096,
            request_bytes: MAX_REQUEST_BYTES,
            longest_request_bytes: 64 << 20,
            requests_in_flight: 128,
            bytes_in_flight: 64 << 20,
            shared_bytes: 256 << 20,
            extents_per_reply: 4096,
            receive_buffer_bytes: 256 << 10,
            batch_bytes: 256 << 10,
            polling_us: 100,
            send_stall_ms: 120_000,
            stop_timeout_ms: 10_000,
            warnings_per_10_s: 20,
        }
    }
}

impl Limits {
    /// How long a connection sleeps at most in the middle of a write's data.
    pub(crate) fn send_check(&self) -> Duration {
        Duration::from_millis((self.send_stall_ms / 4).max(1))
    }

    /// The same limits, with impossible values replaced by the nearest possible ones.
    pub(crate) fn sane(mut self) -> Self {
        self.connections = self.connections.max(1);
        self.half_open = self.half_open.clamp(1, self.connections);
        self.name_bytes = self.name_bytes.min(crate::wire::handshake::STRING_BYTES);
        self.request_bytes = self.request_bytes.clamp(1 << 16, MAX_REQUEST_BYTES);
        self.longest_request_bytes = self.longest_request_bytes.clamp(self.request_bytes, 64 << 20);
        self.requests_in_flight = self.requests_in_flight.max(1);
        self.bytes_in_flight = self.bytes_in_flight.max(1);
        self.extents_per_reply = self.extents_per_reply.clamp(1, 1 << 16);
        self.receive_buffer_bytes = self.receive_buffer_bytes.max(192 << 10);
        self.send_stall_ms = self.send_stall_ms.max(1);
        self.batch_bytes = self.batch_bytes.max(128 << 10);
        self
    }
}
