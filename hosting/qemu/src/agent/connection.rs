//! One connection to the guest agent. It first discards stale data of earlier connections by a sync
//! (`guest-sync-delimited`).

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::{Answer, MAX_ANSWER_BYTES, PEER};
use crate::error::{Error, Result};
use crate::qmp::read_line;

/// The longest stale data that is skipped while synchronising, in bytes.
const MAX_STALE_BYTES: usize = 64 << 20;

/// Numbers for `guest-sync-delimited`, each used once in this process. After a timeout the port may hold answers to
/// syncs of several closed connections. With a shared number the first of these answers would pass for the answer to
/// the last sync, and every later answer would belong to the request before.
static NEXT_SYNC: AtomicU64 = AtomicU64::new(0x6865_6164);

#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<UnixStream>,
    /// The part received so far of an abandoned request's answer; `None` if no such answer is due.
    late: Option<Vec<u8>>,
}

impl Connection {
    pub(super) async fn open(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(Error::io("connect to the guest agent's socket", socket))?;
        let mut connection = Self { stream: BufReader::new(stream), late: None };
        connection.synchronise(socket).await?;
        Ok(connection)
    }

    async fn synchronise(&mut self, socket: &Path) -> Result<()> {
        let id = self.ask_for_sync(socket).await?;
        loop {
            self.skip_stale(socket).await?;
            let answer = self.read(socket, MAX_ANSWER_BYTES).await?;
            let answer: Option<Answer<Value>> = serde_json::from_slice(&answer).ok();
            if answer.and_then(|answer| answer.value?.as_u64()) == Some(id) {
                return Ok(());
            }
        }
    }

    /// Sends a sync and returns the number that the agent must answer. `0xFF` resets the agent's parser, and the agent
    /// puts `0xFF` before its answer.
    async fn ask_for_sync(&mut self, socket: &Path) -> Result<u64> {
        let id = NEXT_SYNC.fetch_add(1, Ordering::Relaxed);
        let request = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        let mut bytes = vec![0xFF];
        bytes.extend_from_slice(request.to_string().as_bytes());
        bytes.push(b'\n');
        self.stream
            .write_all(&bytes)
            .await
            .map_err(Error::io("write to the guest agent's socket", socket))?;
        Ok(id)
    }

    /// Skips all data up to the next `0xFF`.
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

    /// Marks the last request as abandoned. Its answer must still be read.
    pub(super) fn give_up(&mut self) {
        self.late = Some(Vec::new());
    }

    /// Whether the answer to an abandoned request must still be read.
    pub(super) fn is_late(&self) -> bool {
        self.late.is_some()
    }

    /// Sends a sync, and returns everything that the agent sends before its answer to this sync or an earlier one. The
    /// agent works in order, so the late answer is in there, unless the guest was restarted. After a cancelled call,
    /// the next call continues.
    pub(super) async fn late_answer(&mut self, socket: &Path) -> Result<Vec<u8>> {
        self.ask_for_sync(socket).await?;
        let Self { stream, late } = self;
        let answer = late.get_or_insert_default();
        loop {
            let available =
                stream.fill_buf().await.map_err(Error::io("read from the guest agent's socket", socket))?;
            if available.is_empty() {
                return Err(Error::Gone("the guest agent's port was closed".into()));
            }
            let mark = available.iter().position(|byte| *byte == 0xFF);
            let end = mark.unwrap_or(available.len());
            answer.extend_from_slice(available.get(..end).unwrap_or_default());
            stream.consume(if mark.is_some() { end + 1 } else { end });
            if answer.len() > MAX_ANSWER_BYTES {
                let detail = format!("late answer longer than {MAX_ANSWER_BYTES} bytes");
                return Err(Error::Protocol { peer: PEER, detail });
            }
            if mark.is_some() {
                return Ok(std::mem::take(answer));
            }
        }
    }

    async fn read(&mut self, socket: &Path, max_bytes: usize) -> Result<Vec<u8>> {
        read_line(&mut self.stream, max_bytes)
            .await
            .map_err(Error::io("read from the guest agent's socket", socket))?
            .ok_or_else(|| Error::Gone("the guest agent's port was closed".into()))
    }
}
