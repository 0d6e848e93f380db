//! Copies bytes between a client and a machine's serial console.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The most output of the guest that is buffered for a slow client; further output is dropped.
const BACKLOG_MAX_BYTES: usize = 1 << 20;

/// The size of one read.
const PIECE_BYTES: usize = 16 << 10;

/// How long the client may take to read the guest's last output after the guest has ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Copies bytes in both directions until either side disconnects. The guest's output is always read at once, because a
/// guest waits while its serial port is full.
pub(crate) async fn relay(
    client: impl AsyncRead + AsyncWrite,
    console: impl AsyncRead + AsyncWrite,
) -> std::io::Result<()> {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_guest, mut to_guest) = tokio::io::split(console);
    // Separate from the output: a guest that reads no input may still print.
    let input = tokio::io::copy(&mut from_client, &mut to_guest);
    tokio::select! {
        copied = input => copied.map(drop),
        shown = show(&mut from_guest, &mut to_client) => shown,
    }
}

async fn show(
    from_guest: &mut (impl AsyncRead + Unpin),
    to_client: &mut (impl AsyncWrite + Unpin),
) -> std::io::Result<()> {
    let mut backlog = Backlog::default();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        tokio::select! {
            read = from_guest.read(&mut piece) => match read? {
                0 => break,
                n => backlog.add(piece.get(..n).unwrap_or_default()),
            },
            written = to_client.write(backlog.next()), if !backlog.next().is_empty() => match written? {
                0 => return Err(std::io::ErrorKind::WriteZero.into()),
                n => backlog.taken(n),
            },
        }
    }
    let rest = async {
        while !backlog.next().is_empty() {
            let n = to_client.write(backlog.next()).await?;
            backlog.taken(n.max(1));
        }
        Ok(())
    };
    tokio::time::timeout(LAST_WORDS, rest).await.unwrap_or(Ok(()))
}

/// Output that the client has not read yet.
#[derive(Default)]
struct Backlog {
    bytes: VecDeque<u8>,
    left_out: u64,
}

impl Backlog {
    fn add(&mut self, piece: &[u8]) {
        if self.left_out > 0 || self.bytes.len().saturating_add(piece.len()) > BACKLOG_MAX_BYTES {
            self.left_out = self.left_out.saturating_add(u64::try_from(piece.len()).unwrap_or(u64::MAX));
        } else {
            self.bytes.extend(piece);
        }
    }

    fn next(&self) -> &[u8] {
        self.bytes.as_slices().0
    }

    fn taken(&mut self, n: usize) {
        self.bytes.drain(..n.min(self.bytes.len()));
        // The client has all output up to the gap; insert a note, and continue after the gap.
        if self.bytes.is_empty() && self.left_out > 0 {
            let gap =
                format!("\r\n[headwater: {} bytes left out here; they are in the log]\r\n", self.left_out);
            self.bytes.extend(gap.as_bytes());
            self.left_out = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    /// Timeout for waits that would otherwise never end.
    const SOON: Duration = Duration::from_secs(60);

    async fn expect(stream: &mut UnixStream, expected: &[u8]) {
        let mut found = vec![0; expected.len()];
        tokio::time::timeout(SOON, stream.read_exact(&mut found)).await.unwrap().unwrap();
        assert_eq!(String::from_utf8_lossy(&found), String::from_utf8_lossy(expected));
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_does_not_hold_up_the_guest() {
        let (mut client, clients_end) = UnixStream::pair().unwrap();
        let (mut guest, guests_end) = UnixStream::pair().unwrap();
        let relaying = tokio::spawn(relay(clients_end, guests_end));
        let lines = (0..2_000_000_u32).map(|n| format!("{n}\n")).collect::<String>().into_bytes();
        assert!(lines.len() > 10 * BACKLOG_MAX_BYTES);
        tokio::time::timeout(SOON, guest.write_all(&lines)).await.expect("it is held up").unwrap();

        // All output before the gap, and the note about its length.
        let (mut seen, mut piece) = (Vec::new(), vec![0; PIECE_BYTES]);
        let shown = loop {
            let n = tokio::time::timeout(SOON, client.read(&mut piece)).await.unwrap().unwrap();
            seen.extend(&piece[..n]);
            let text = String::from_utf8_lossy(&seen);
            if let Some((shown, gap)) = text.split_once("\r\n[headwater: ")
                && let Some((gap, rest)) = gap.split_once(" bytes left out here; they are in the log]\r\n")
            {
                assert_eq!(rest, "");
                assert_eq!(shown.len() + gap.parse::<usize>().unwrap(), lines.len());
                break shown.len();
            }
        };
        assert!(shown >= BACKLOG_MAX_BYTES - PIECE_BYTES && seen[..shown] == lines[..shown]);

        // After the gap, copying works in both directions again.
        guest.write_all(b"login: ").await.unwrap();
        expect(&mut client, b"login: ").await;
        client.write_all(b"root\n").await.unwrap();
        expect(&mut guest, b"root\n").await;
        guest.write_all(b"bye").await.unwrap();
        drop(guest);
        expect(&mut client, b"bye").await;
        tokio::time::timeout(SOON, relaying).await.unwrap().unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_guest_that_takes_nothing_is_still_heard() {
        let (mut client, clients_end) = UnixStream::pair().unwrap();
        let (mut guest, guests_end) = UnixStream::pair().unwrap();
        let relaying = tokio::spawn(relay(clients_end, guests_end));
        let keys = vec![b'k'; 64 << 10];
        // More than the sockets can buffer.
        while tokio::time::timeout(Duration::from_millis(300), client.write_all(&keys)).await.is_ok() {}
        guest.write_all(b"busy").await.unwrap();
        expect(&mut client, b"busy").await;
        drop(client);
        drop(guest);
        let _ = tokio::time::timeout(SOON, relaying).await.unwrap().unwrap();
    }
}
