//! All limits of a server, with names, units and defaults.

/// The longest read or write that the kernel sends: the maximum that FUSE allows by default.
pub(crate) const MAX_TRANSFER_BYTES: u32 = 1 << 20;

/// The limits of one mounted file.
///
/// Memory use: two buffers of 1 MiB for each reader, of which only touched pages count; 5/4 of
/// `bytes_in_flight`; and one request for each reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Threads that take requests, 1 to 16.
    pub readers: u16,
    /// Asynchronous requests that the kernel has under way at a time (`max_background`), 1 to 1024. Further asynchronous requests wait in the
    /// kernel, where a read may wait behind writes. Synchronous requests are not counted. The default is twice the queue depth of a
    /// loop device, because one request of a loop device may be longer than one FUSE request.
    pub background_requests: u16,
    /// Data of requests that wait for the device, in bytes. When so much waits, a reader thread that took a write request waits, too. Read
    /// requests may take a quarter more. The default holds the 128 requests of 1 MiB that a loop device sends, so they block no reader
    /// thread while the write cache is full.
    pub bytes_in_flight: usize,
    /// How long [`crate::Server::stop`] waits for its threads, which may have unanswered requests or unfinished changes of parts of
    /// blocks, in milliseconds. After that they finish in the background.
    pub stop_timeout_ms: u64,
    /// Warnings about a mount in ten seconds; further ones are counted and reported later.
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
    /// The same limits, with impossible values replaced by the nearest possible ones.
    pub(crate) fn sane(mut self) -> Self {
        self.readers = self.readers.clamp(1, 16);
        self.background_requests = self.background_requests.clamp(1, 1024);
        self.bytes_in_flight = self.bytes_in_flight.max(1);
        self
    }
}
