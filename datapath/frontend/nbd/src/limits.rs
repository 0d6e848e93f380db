//! All limits of the server, with names, units and defaults.

use std::time::Duration;

use headwater_block::MAX_REQUEST_BYTES;

/// What one client, and all together, may cost.
///
/// Memory of one connection is at most `receive_buffer_bytes + 2 * batch_bytes`, a MiB of buffers that are used again, 5/4 of
/// `bytes_in_flight` and two requests more; of these last two all connections together take `shared_bytes` and half a MiB each. With TLS a
/// connection has up to 2 MiB more: records that have come (128 KiB), and those on their way to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time, half-open ones included. More are closed at once. But where the clients of one certificate, or without
    /// certificates those of one address, have more than half of all, others may still connect: who has none gets the newest
    /// connection of whoever has most.
    pub connections: usize,
    /// Connections that are still in their handshake. A new one ends the oldest of them, so that those who open connections and say
    /// nothing keep nobody out.
    pub half_open: usize,
    /// From accepting a connection to the end of its handshake, in milliseconds. Then it is closed.
    pub handshake_timeout_ms: u64,
    /// Options in one handshake, besides three about each export that was listed in it. Then it is closed.
    pub handshake_options: u32,
    /// Data of one option, in bytes. A longer one is answered `TOO_BIG` and the connection is closed.
    pub option_bytes: u32,
    /// Name of an export or of a metadata context, in bytes.
    pub name_bytes: u32,
    /// One read or write, in bytes; told to clients as the maximum block size. A longer read or write of a client that does not keep it is
    /// carried out in parts. Of a longer cache request the device may do a part.
    pub request_bytes: u32,
    /// The longest read or write that is carried out, in bytes. A longer write drops the connection, since its payload cannot be
    /// taken; a longer read is an error.
    pub longest_request_bytes: u32,
    /// Requests of one connection that wait for the device. Then a write is not taken, nor what comes behind it; other requests are,
    /// as long as they are less than a quarter of this.
    pub requests_in_flight: usize,
    /// Payload of such requests, in bytes, in the same way. One more request than fits is taken, so that any legal one can be.
    pub bytes_in_flight: usize,
    /// What the requests of all connections share besides [`headwater_block::budget::OWN_BYTES`] each for writes and for others, in
    /// bytes: those that wait for the device, whose payload is under way, or whose reply is being sent. What does not fit waits in the
    /// client's socket. Writes have three quarters of it.
    pub shared_bytes: u64,
    /// Extents in one answer to block status.
    pub extents_per_reply: usize,
    /// What one receive takes at most, in bytes; at least 192 KiB.
    pub receive_buffer_bytes: usize,
    /// Replies are sent when this much is collected, in bytes, if not earlier; at least 128 KiB.
    pub batch_bytes: usize,
    /// How long a connection with one request at a time is watched before its thread sleeps, in microseconds; 0 sleeps
    /// at once. Watching ends by itself where requests come more slowly ([`headwater_block::Polling`]).
    pub polling_us: u64,
    /// How long a client may take nothing of a reply that is being sent, in milliseconds. The connection is cut then, or up to two such
    /// times later; never while it takes something, however little. Also how long it may send nothing of a write that it has begun, where
    /// others wait for the memory that was set aside for it; and all of its data may then take so long, and a second more for each 128 KiB.
    pub send_stall_ms: u64,
    /// How long [`crate::Server::stop`] waits for requests in flight and for clients to take
    /// their replies, in milliseconds. Then connections are cut.
    pub stop_timeout_ms: u64,
    /// Warnings about clients in ten seconds; further ones are counted and told later.
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

    /// The same, with values that cannot work raised or lowered to those that can.
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
