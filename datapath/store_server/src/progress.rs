//! Tracks whether a connection makes progress: it sends requests, is being answered, or its client reads
//! answers. Connections without progress are closed.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use headwater_admission::Entry;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// The first byte of an HTTP/1 answer; an HTTP/2 connection begins with the length of a small frame.
const HTTP1_FIRST: u8 = b'H';
/// The header of a frame of HTTP/2: length, type, flags, stream.
const FRAME_HEADER_BYTES: usize = 9;
/// The type of frames that carry bodies.
const FRAME_DATA: u8 = 0;

/// The progress of a connection.
pub(crate) struct Progress {
    state: Mutex<State>,
    entry: Entry,
}

struct State {
    /// The number of requests that the server works on. While there is one, nothing is expected from the
    /// client.
    busy: usize,
    /// When the client last did something, or the server finished.
    last: Instant,
    began: Instant,
    /// Whether a request was admitted.
    is_admitted: bool,
}

impl Progress {
    pub(crate) fn new(entry: Entry) -> Arc<Self> {
        let began = Instant::now();
        let state = Mutex::new(State { busy: 0, last: began, began, is_admitted: false });
        Arc::new(Self { state, entry })
    }

    /// The server works for this connection until the returned value is dropped.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.state.lock().busy += 1;
        Busy(Arc::clone(self))
    }

    fn taken(&self) {
        self.state.lock().last = Instant::now();
    }

    /// Records that a request was admitted. `false`: the connection was chosen to be closed for another one,
    /// so no request may begin, because its answer would be cut off.
    pub(crate) fn admit(&self) -> bool {
        // Recorded only once, because all connections share this lock.
        if self.state.lock().is_admitted {
            return true;
        }
        let is_admitted = self.entry.let_in();
        self.state.lock().is_admitted |= is_admitted;
        is_admitted
    }

    /// Waits until the client has neither sent a request nor read bytes for `limit`, or no request was
    /// admitted for `admission`, however many were sent.
    pub(crate) async fn stalled(&self, limit: Duration, admission: Duration) {
        loop {
            let until = {
                let state = self.state.lock();
                let since = if state.busy > 0 { Instant::now() } else { state.last };
                let until = since + limit;
                if state.is_admitted { until } else { until.min(state.began + admission) }
            };
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// Work of the server for a connection.
pub(crate) struct Busy(Arc<Progress>);

impl Drop for Busy {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.busy = state.busy.saturating_sub(1);
        state.last = Instant::now();
    }
}

/// A stream that notices when its client reads bytes of answers. Pings, and everything else that HTTP/2
/// answers by itself, do not count.
pub(crate) struct Watched<S> {
    stream: S,
    progress: Arc<Progress>,
    written: Written,
}

impl<S> Watched<S> {
    pub(crate) fn new(stream: S, progress: Arc<Progress>) -> Self {
        Self { stream, progress, written: Written::Nothing }
    }
}

/// What has been written: the position in a frame.
enum Written {
    Nothing,
    Http1,
    Header { bytes: [u8; FRAME_HEADER_BYTES], have: usize },
    Payload { left_bytes: usize, is_data: bool },
}

impl Written {
    const FRAME: Self = Self::Header { bytes: [0; FRAME_HEADER_BYTES], have: 0 };

    /// Whether `bytes`, which are written next, contain a part of an answer.
    fn advance(&mut self, mut bytes: &[u8]) -> bool {
        let mut answers = false;
        while let Some(first) = bytes.first() {
            let taken = match self {
                Self::Http1 => return true,
                Self::Nothing => {
                    *self = if *first == HTTP1_FIRST { Self::Http1 } else { Self::FRAME };
                    0
                }
                Self::Payload { left_bytes, is_data } => {
                    let taken = bytes.len().min(*left_bytes);
                    answers |= *is_data && taken > 0;
                    *left_bytes -= taken;
                    if *left_bytes == 0 {
                        *self = Self::FRAME;
                    }
                    taken
                }
                Self::Header { bytes: header, have } => {
                    if let Some(byte) = header.get_mut(*have) {
                        *byte = *first;
                    }
                    *have += 1;
                    if *have == FRAME_HEADER_BYTES {
                        let [a, b, c, kind, ..] = *header;
                        let left_bytes = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                        *self = Self::Payload { left_bytes, is_data: kind == FRAME_DATA };
                    }
                    1
                }
            };
            bytes = bytes.get(taken..).unwrap_or_default();
        }
        answers
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let len = std::task::ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        if self.written.advance(buf.get(..len).unwrap_or(buf)) {
            self.progress.taken();
        }
        Poll::Ready(Ok(len))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let len = std::task::ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        let (mut left, mut answers) = (len, false);
        for buf in bufs {
            let part = buf.get(..left).unwrap_or(buf);
            answers |= self.written.advance(part);
            left -= part.len();
        }
        if answers {
            self.progress.taken();
        }
        Poll::Ready(Ok(len))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&len[1..], &[kind, 0, 0, 0, 0, 1], payload].concat()
    }

    #[test]
    fn bodies_alone_are_bytes_of_answers_however_they_are_cut() {
        let (settings, ping) = (frame(4, &[0; 36]), frame(6, &[0; 8]));
        let none = [settings, frame(4, &[]), ping.clone(), frame(0, &[]), frame(1, &[0; 70])].concat();
        let data = frame(0, &[7; 300]);
        for len in [1, 2, 8, 9, 10, 17, 4096] {
            let mut written = Written::Nothing;
            let mut parts = |bytes: &[u8]| bytes.chunks(len).filter(|part| written.advance(part)).count();
            assert_eq!(parts(&none), 0, "{len}");
            assert!(parts(&data) >= 300usize.div_ceil(len), "{len}");
            assert_eq!(parts(&ping), 0, "{len}");
        }
        let mut written = Written::Nothing;
        assert!(written.advance(b"HTTP/1.1 200 OK\r\n") && written.advance(&ping));
    }
}
