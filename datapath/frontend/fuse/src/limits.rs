//! All limits of a server, with names, units and defaults.

/// The longest read or write that the kernel sends. It is the most that FUSE allows by default.
pub(crate) const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// What one mounted file may cost.
///
/// Memory: for each reader two buffers of 1 MiB, of which only touched pages count, and 5/4 of `bytes_in_flight` and one
/// request for each reader more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Threads that take requests, 1 to 16.
    pub readers: u16,
    /// Asynchronous requests that the kernel has under way at a time (`max_background`), 1 to 1024. Others wait in the
    /// kernel, reads behind writes too; those of programs that wait for each answer are not counted. Twice the depth of a loop device, whose
    /// requests may be longer than one of ours.
    pub background_requests: u16,
    /// Data of requests that wait for the device, in bytes. Then a reader that has taken a write waits; reads have a quarter besides.
    /// The 128 requests of a loop device fit, of 1 MiB each, so that while they wait for room in the write cache they stop no reader.
    pub bytes_in_flight: usize,
    /// How long [`crate::Server::stop`] waits for changes of parts of blocks that the device is at, in milliseconds. Then they are left to
    /// end by themselves.
    pub stop_timeout_ms: u64,
    /// Warnings about a mount in ten seconds; further ones are counted and told later.
    pub warnings_per_10_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            readers: 2,
            background_requests: 256,
            bytes_in_flight: 128 << 20,
            stop_timeout_ms: 10_000,
            warnings_per_10_s: 20,
        }
    }
}

impl Limits {
    /// The same, with values that cannot work replaced by the nearest that can.
    pub(crate) fn sane(mut self) -> Self {
        self.readers = self.readers.clamp(1, 16);
        self.background_requests = self.background_requests.clamp(1, 1024);
        self.bytes_in_flight = self.bytes_in_flight.max(1);
        self
    }
}
