//! One connection to the guest agent: it starts in step with the agent, whatever is left in the port.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::{Answer, MAX_ANSWER_BYTES};
use crate::error::{Error, Result};
use crate::qmp::read_line;

/// The longest stale data that is skipped while synchronising, in bytes.
const MAX_STALE_BYTES: usize = 64 << 20;

/// Numbers for `guest-sync-delimited`, each used once in this process. After a time-out the port may hold
/// answers to several syncs of connections that were given up; a number that they shared would let the first of
/// them pass for the answer to the last, and all later answers would belong to the question before.
static NEXT_SYNC: AtomicU64 = AtomicU64::new(0x6865_6164);

#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<UnixStream>,
}

impl Connection {
    pub(super) async fn open(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(Error::io("connect to the guest agent's socket", socket))?;
        let mut connection = Self { stream: BufReader::new(stream) };
        connection.synchronise(socket).await?;
        Ok(connection)
    }

    /// `0xFF` resets the agent's parser, and the agent puts one before its answer.
    async fn synchronise(&mut self, socket: &Path) -> Result<()> {
        let id = NEXT_SYNC.fetch_add(1, Ordering::Relaxed);
        let request = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        let mut bytes = vec![0xFF];
        bytes.extend_from_slice(request.to_string().as_bytes());
        bytes.push(b'\n');
        self.stream
            .write_all(&bytes)
            .await
            .map_err(Error::io("write to the guest agent's socket", socket))?;
        loop {
            self.skip_stale(socket).await?;
            let answer = self.read(socket, MAX_ANSWER_BYTES).await?;
            let answer: Option<Answer<Value>> = serde_json::from_slice(&answer).ok();
            if answer.and_then(|answer| answer.value?.as_u64()) == Some(id) {
                return Ok(());
            }
        }
    }

    /// Skips what is there up to the next `0xFF`.
    async fn skip_stale(&mut self, socket: &Path) -> Result<()> {
        let mut skipped = 0;
        while skipped < MAX_STALE_BYTES {
            let available = self
                .stream
                .fill_buf()
                .await
                .map_err(Error::io("read from the guest agent's socket", socket))?;
            if available.is_empty() {
                break;
            }
            let mark = available.iter().position(|byte| *byte == 0xFF);
            let count = mark.map_or(available.len(), |at| at + 1);
            self.stream.consume(count);
            skipped += count;
            if mark.is_some() {
                return Ok(());
            }
        }
        Err(Error::Gone("the guest agent's port was closed".into()))
    }

    pub(super) async fn request(
        &mut self,
        socket: &Path,
        command: &str,
        arguments: Value,
        max_bytes: usize,
    ) -> Result<Vec<u8>> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream
            .write_all(line.as_bytes())
            .await
            .map_err(Error::io("write to the guest agent's socket", socket))?;
        self.read(socket, max_bytes).await
    }

    async fn read(&mut self, socket: &Path, max_bytes: usize) -> Result<Vec<u8>> {
        read_line(&mut self.stream, max_bytes)
            .await
            .map_err(Error::io("read from the guest agent's socket", socket))?
            .ok_or_else(|| Error::Gone("the guest agent's port was closed".into()))
    }
}
