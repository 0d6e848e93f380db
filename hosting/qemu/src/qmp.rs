//! A client of QEMU's monitor protocol (QMP) over a unix socket.
//!
//! One task reads. An answer goes to the caller that waits for its id, an event to a bounded broadcast channel. A
//! receiver that lags more than [`EVENT_BACKLOG`] events behind loses the oldest events.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, oneshot, watch};
use tokio::task::JoinHandle;

use crate::error::{Error, Result};

/// Events kept for a slow receiver.
pub const EVENT_BACKLOG: usize = 64;

/// The longest message that is accepted from a monitor, in bytes.
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// How long QEMU may take to answer a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// An event that QEMU announced, such as `SHUTDOWN`.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its name.
    pub name: String,
    /// Its data; an empty object if it has none.
    pub data: Value,
}

type Waiting = Mutex<Option<HashMap<u64, oneshot::Sender<Value>>>>;

/// A connection to a monitor that has been negotiated. Commands may be in flight side by side.
#[derive(Debug)]
pub struct Qmp {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    /// `None` once the connection has ended.
    waiting: Arc<Waiting>,
    events: broadcast::Sender<Event>,
    next_id: AtomicU64,
    reader: JoinHandle<()>,
    /// The reading task owns the sender, and drops it when it ends.
    reading: watch::Receiver<()>,
}

impl Qmp {
    /// Connects to the monitor's socket and negotiates.
    pub async fn connect(socket: &Path) -> Result<Self> {
        let stream =
            UnixStream::connect(socket).await.map_err(Error::io("connect to the monitor socket", socket))?;
        let (read, write) = stream.into_split();
        let mut read = BufReader::new(read);
        tokio::time::timeout(COMMAND_TIMEOUT, read_greeting(&mut read))
            .await
            .map_err(|_| Error::Timeout {
                what: "greeting of QEMU's monitor".into(),
                after: COMMAND_TIMEOUT,
            })?
            // QEMU may end while it starts, after it took the connection. Its log says why, and the caller waits for
            // that.
            .map_err(Error::io("read from the monitor socket", socket))?;
        let waiting: Arc<Waiting> = Arc::new(Mutex::new(Some(HashMap::new())));
        let (events, _) = broadcast::channel(EVENT_BACKLOG);
        let (until_ended, reading) = watch::channel(());
        let dispatching = dispatch(read, Arc::clone(&waiting), events.clone());
        let reader = tokio::spawn(async move {
            dispatching.await;
            drop(until_ended);
        });
        let qmp = Self {
            writer: tokio::sync::Mutex::new(write),
            waiting,
            events,
            next_id: AtomicU64::new(1),
            reader,
            reading,
        };
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// The events from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Waits until the connection has ended: receivers then have all events that were ever sent.
    pub async fn ended(&self) {
        let mut reading = self.reading.clone();
        // No value is ever sent, so an error here means that the reading task has ended.
        let _ = reading.changed().await;
    }

    /// Executes a command, and returns QEMU's answer.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (tx, rx) = oneshot::channel();
        match self.waiting.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(waiting) => waiting.insert(id, tx),
            None => return Err(gone()),
        };
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        // The lock is held over the write so that two commands do not mix on the wire.
        let sent = self.writer.lock().await.write_all(line.as_bytes()).await;
        if sent.is_err() {
            self.forget(id);
            return Err(gone());
        }
        let Ok(answer) = tokio::time::timeout(COMMAND_TIMEOUT, rx).await else {
            self.forget(id);
            return Err(Error::Timeout { what: format!("QEMU command '{command}'"), after: COMMAND_TIMEOUT });
        };
        let mut answer = answer.map_err(|_| gone())?;
        if let Some(error) = answer.get("error") {
            let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
            return Err(Error::Monitor {
                command: command.to_owned(),
                class: text("class"),
                description: text("desc"),
            });
        }
        Ok(answer.get_mut("return").map(Value::take).unwrap_or_default())
    }

    fn forget(&self, id: u64) {
        if let Some(waiting) = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            waiting.remove(&id);
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn gone() -> Error {
    Error::Gone("QEMU closed its monitor".into())
}

async fn dispatch(
    mut read: BufReader<OwnedReadHalf>,
    waiting: Arc<Waiting>,
    events: broadcast::Sender<Event>,
) {
    loop {
        let mut message = match read_message(&mut read, MAX_MESSAGE_BYTES).await {
            Ok(Some(message)) => message,
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "the connection to QEMU's monitor ended");
                break;
            }
        };
        if let Some(name) = message.get("event").and_then(Value::as_str) {
            let name = name.to_owned();
            let data = message.get_mut("data").map(Value::take).unwrap_or_else(|| json!({}));
            // No receiver is not an error: only subscribers get events.
            let _ = events.send(Event { name, data });
        } else if let Some(id) = message.get("id").and_then(Value::as_u64) {
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(tx) = waiting.as_mut().and_then(|waiting| waiting.remove(&id)) {
                // The waiter may have timed out in this moment.
                let _ = tx.send(message);
            }
        }
    }
    // Dropping the senders wakes every waiting caller with `Error::Gone`.
    waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
}

/// Reads until QEMU's greeting. An event of a virtual CPU that is already running can come before it.
async fn read_greeting(read: &mut (impl AsyncBufRead + Unpin)) -> std::io::Result<()> {
    loop {
        let message = read_message(read, MAX_MESSAGE_BYTES).await?.ok_or(ErrorKind::UnexpectedEof)?;
        if message.get("QMP").is_some() {
            return Ok(());
        }
        if message.get("event").is_none() {
            return Err(std::io::Error::other(format!("QEMU sent {message} instead of its greeting")));
        }
    }
}

/// Reads one message of at most `max_bytes` and parses it; `None` at the end of the stream.
async fn read_message(
    read: &mut (impl AsyncBufRead + Unpin),
    max_bytes: usize,
) -> std::io::Result<Option<Value>> {
    let line = read_line(read, max_bytes).await?;
    line.map(|line| serde_json::from_slice(&line).map_err(std::io::Error::other)).transpose()
}

/// Reads one line of at most `max_bytes` that is not empty; `None` at the end of the stream.
pub(crate) async fn read_line(
    read: &mut (impl AsyncBufRead + Unpin),
    max_bytes: usize,
) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    loop {
        let available = read.fill_buf().await?;
        if available.is_empty() {
            return Ok(None);
        }
        let (part, ended) = match available.iter().position(|&byte| byte == b'\n') {
            Some(end) => (end + 1, true),
            None => (available.len(), false),
        };
        line.extend_from_slice(available.get(..part).unwrap_or(available));
        read.consume(part);
        if line.len() > max_bytes {
            return Err(std::io::Error::other(format!("message longer than {max_bytes} bytes")));
        }
        if ended && line.iter().any(|byte| !byte.is_ascii_whitespace()) {
            return Ok(Some(line));
        }
        if ended {
            line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn events_before_the_greeting_are_skipped() {
        let greeting = async |lines: &str| read_greeting(&mut lines.as_bytes()).await;
        let (event, hello) = ("{\"event\": \"RESUME\", \"data\": {}}\n", "{\"QMP\": {\"version\": {}}}\n");
        greeting(hello).await.unwrap();
        greeting(&format!("{event}\n{event}{hello}")).await.unwrap();
        let ended = greeting(event).await.unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::UnexpectedEof);
        let other = greeting("{\"return\": 7}\n").await.unwrap_err();
        assert!(other.to_string().contains("\"return\":7"), "{other}");
    }
}
