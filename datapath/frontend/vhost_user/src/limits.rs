//! All limits of a server, with names, units and defaults.

/// Limits for one machine.
///
/// Memory of one machine, besides its rings in guest memory: at most 5/4 of `bytes_in_flight`, and for each
/// queue one request (32 MiB) more and 4 MiB of buffers for reuse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queues that a machine may use, 1 to 256. Each queue in use has a thread.
    pub queues: u16,
    /// Data of requests that wait for the device, in bytes, in equal parts for the running queues. If a part
    /// is used up, writes wait in the guest's memory, and reads have another quarter of the part. A queue
    /// that has used up that takes no more requests.
    pub bytes_in_flight: usize,
    /// Guest memory that may be mapped here for one machine, in bytes: the memory that it shares now, and
    /// memory that it withdrew while a request still uses it. This counts addresses, not memory; a process
    /// has 128 TiB of them.
    pub mapped_bytes: u64,
    /// How long an idle queue polls at most before its thread sleeps, in microseconds; 0 never polls.
    pub polling_us: u64,
    /// How long until a write that found no space is tried again, in milliseconds.
    pub no_space_retry_ms: u64,
    /// How long [`crate::Server::stop`] waits for requests that the device has, in milliseconds.
    pub stop_timeout_ms: u64,
    /// How long a front-end may take to send the rest of a message, in milliseconds; then it is disconnected.
    /// A front-end that has sent nothing for this time since it connected is disconnected if another one
    /// connects.
    pub message_timeout_ms: u64,
    /// Warnings about a machine in ten seconds; further ones are counted and reported later.
    pub warnings_per_10_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queues: 64,
            bytes_in_flight: 64 << 20,
            mapped_bytes: 1 << 40,
            polling_us: 32,
            no_space_retry_ms: 1000,
            stop_timeout_ms: 10_000,
            message_timeout_ms: 10_000,
            warnings_per_10_s: 20,
        }
    }
}

impl Limits {
    /// The same limits, with impossible values replaced by the nearest possible ones.
    pub(crate) fn sane(mut self) -> Self {
        self.queues = self.queues.clamp(1, 256);
        self.bytes_in_flight = self.bytes_in_flight.max(1);
        self.no_space_retry_ms = self.no_space_retry_ms.max(1);
        self
    }
}
