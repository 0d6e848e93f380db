//! Kills commands that start in the guest after their caller has already got a timeout error.
//!
//! A paused guest (for instance, because its disk has no space) reads a request only when it continues, and starts
//! the command then. QEMU drops the agent's messages while no client is connected, so the command's PID would be
//! lost. Therefore the connection of an unanswered request stays open. The next call on that connection, or else a
//! background task, reads the late answer first. Then the command is killed, unless it has ended.
//!
//! To find the late answer, the client sends a *sync* (`guest-sync-delimited`): the byte `0xFF`, which resets the
//! agent's parser, and a new number. The agent answers requests in order and sends `0xFF` before its answer to the
//! sync. So everything before that byte includes the late answer.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::Connection;
use super::{
    Agent, KILL_ATTEMPTS, MAX_ANSWER_BYTES, MAX_OUTPUT_BYTES, Status, interpret, may_answer_later, unexpected,
};
use crate::error::{Error, Result};

/// The agent's command that starts a program in the guest.
pub(super) const EXEC: &str = "guest-exec";

/// How long each attempt waits for a late answer. The next attempt sends another sync.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between two attempts, in which other calls may use the agent.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(500);

impl Agent {
    /// Starts a command in the guest, and returns its PID. If the answer does not arrive within `timeout`, the
    /// command is killed when the answer arrives.
    pub(super) async fn start_exec(&self, program: &str, request: Value, timeout: Duration) -> Result<i64> {
        let deadline = Instant::now() + timeout;
        // Other calls may hold the lock as long as the guest is frozen, so a timeout here does not prove that no
        // agent runs.
        let in_use_error = || Error::Timeout {
            what: format!("waiting for other calls to the guest agent before command '{program}'"),
            after: timeout,
        };
        let mut slot = timeout_at(deadline, self.lock(EXEC)).await.map_err(|_| in_use_error())?;
        let taken = timeout_at(deadline, self.take_connection(&mut slot)).await;
        let mut connection = taken.map_err(|_| Error::NoAgent { after: timeout })??;
        let asking = connection.request(&self.socket, EXEC, request, MAX_ANSWER_BYTES);
        let answered = timeout_at(deadline, asking).await;
        let Ok(answer) = answered else {
            connection.give_up();
            *slot = Some(connection);
            self.listen_in_background();
            let what =
                format!("starting command '{program}' in the guest (if it starts later, it is killed)");
            return Err(Error::Timeout { what, after: timeout });
        };
        let answer = answer?;
        *slot = Some(connection);
        pid_of(&interpret::<Value>(EXEC, &answer)?)
    }

    /// Takes the connection out of the slot, so that a cancelled or failed call leaves no connection whose next
    /// answer belongs to that call.
    pub(super) async fn take_connection(&self, slot: &mut Option<Connection>) -> Result<Connection> {
        self.read_late_answer(slot).await;
        match slot.take() {
            Some(connection) => Ok(connection),
            None => Connection::open(&self.socket).await,
        }
    }

    /// If the answer to an abandoned request is due, reads it, and kills its command if that still runs. The
    /// connection stays in the slot, so the next call continues if this one is cancelled.
    async fn read_late_answer(&self, slot: &mut Option<Connection>) {
        let Some(connection) = slot.as_mut().filter(|connection| connection.is_late()) else { return };
        let answer = connection.late_answer(&self.socket).await;
        // The rest of the answer to this sync would be stale for the next sync.
        *slot = None;
        match answer.map(|answer| pid_in(&answer)) {
            Ok(Some(pid)) => {
                tracing::warn!(
                    pid,
                    "a command started in the guest after its caller's timeout; it is killed if it still runs"
                );
                self.kill_if_it_runs(pid);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot tell whether a command started in the guest after its caller's timeout");
            }
        }
    }

    /// Kills a command if it still runs. It reads the status first: the PID of an ended command may belong to another
    /// process by now, and the agent keeps the command's output until its status is read. It runs in its own task,
    /// because the caller holds the connection.
    fn kill_if_it_runs(&self, pid: i64) {
        let agent = self.clone();
        tokio::spawn(async move {
            for left in (0..KILL_ATTEMPTS).rev() {
                let asked = json!({ "pid": pid });
                let looked = agent.call_within("guest-exec-status", asked, MAX_OUTPUT_BYTES, agent.timeout);
                match looked.await {
                    Ok(Status { exited: true, .. }) => return,
                    Ok(_) => {
                        agent.begin_to_kill(pid);
                        return;
                    }
                    Err(error) if left > 0 && may_answer_later(&error) => {}
                    Err(error) => {
                        tracing::warn!(%error, pid, "cannot tell whether a command whose caller timed out still runs in the guest");
                        return;
                    }
                }
            }
        });
    }

    /// Reads the late answer in the background, until it arrives or the last handle to the machine is dropped.
    fn listen_in_background(&self) {
        let alive = Arc::downgrade(&self.connection);
        let agent = Self { connection: Arc::default(), ..self.clone() };
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(ATTEMPT_PAUSE).await;
                let Some(connection) = alive.upgrade() else { return };
                let agent = Self { connection, ..agent.clone() };
                let mut slot = agent.connection.lock().await;
                if timeout(ATTEMPT_TIMEOUT, agent.read_late_answer(&mut slot)).await.is_ok() {
                    return;
                }
            }
        });
    }
}

/// The PID in an answer to [`EXEC`].
fn pid_of(answer: &Value) -> Result<i64> {
    answer.get("pid").and_then(Value::as_i64).ok_or_else(|| unexpected(EXEC, answer))
}

/// The PID in several lines of answers. One of the lines may be an error, because the agent reports `0xFF` as invalid
/// JSON.
fn pid_in(answers: &[u8]) -> Option<i64> {
    let mut lines = answers.split(|byte| *byte == b'\n');
    lines.find_map(|line| pid_of(&interpret::<Value>(EXEC, line).ok()?).ok())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{UnixListener, UnixStream};
    use tokio::sync::oneshot;

    use super::super::Exec;
    use super::super::tests::{accept, answer, answer_to_sync};
    use super::*;

    /// Reads the next sync of an open connection, and returns the agent's answer to it.
    async fn sync_again(stream: &mut BufReader<UnixStream>) -> Vec<u8> {
        let mut sync = Vec::new();
        stream.read_until(b'\n', &mut sync).await.unwrap();
        assert_eq!(sync.first(), Some(&0xFF), "no sync but {:?}", String::from_utf8_lossy(&sync));
        let sync: Value = serde_json::from_slice(&sync[1..]).unwrap();
        let mut bytes = b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"stray mark\"}}\n".to_vec();
        bytes.extend(answer_to_sync(sync["arguments"]["id"].as_u64().unwrap()));
        bytes
    }

    /// Lets a command time out at an agent that has answered until then.
    async fn given_up(agent: &Agent) -> Error {
        agent.ping(Duration::from_secs(60)).await.unwrap();
        // Long enough for the next steps on a busy host.
        let agent = Agent { timeout: Duration::from_secs(3), ..agent.clone() };
        let (command, input) = (vec!["sleep".to_owned(), "9".to_owned()], Vec::new());
        agent.exec(&Exec { command, input, timeout: Duration::from_secs(60) }).await.unwrap_err()
    }

    /// Accepts the first connection, answers to its ping, and reads the command.
    async fn begin(listener: &UnixListener) -> BufReader<UnixStream> {
        let (mut stream, id) = accept(listener).await;
        stream.write_all(&answer_to_sync(id)).await.unwrap();
        answer(&mut stream, &[r#"{"return": {}}"#]).await;
        let mut asked = String::new();
        stream.read_line(&mut asked).await.unwrap();
        assert!(asked.contains(EXEC) && asked.contains("sleep"), "{asked}");
        stream
    }

    #[tokio::test]
    async fn a_command_that_begins_after_its_timeout_is_killed() {
        for (status, is_killed) in
            [(r#"{"exited": false}"#, true), (r#"{"exited": true, "exitcode": 0}"#, false)]
        {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("agent.sock");
            let listener = UnixListener::bind(&socket).unwrap();
            let ((gave_up, has_given_up), (looked, has_looked)) = (oneshot::channel(), oneshot::channel());
            let player = tokio::spawn(async move {
                let mut stream = begin(&listener).await;
                // The agent does nothing until no caller waits for the command.
                has_given_up.await.unwrap();
                stream.write_all(b"{\"return\": {\"pid\": 7}}\n").await.unwrap();
                let synced = sync_again(&mut stream).await;
                stream.write_all(&synced).await.unwrap();
                let (mut stream, id) = accept(&listener).await;
                stream.write_all(&answer_to_sync(id)).await.unwrap();
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                assert!(line.contains("guest-exec-status") && line.contains(r#""pid":7"#), "{line}");
                // The handle to the machine must live until here.
                looked.send(()).unwrap();
                stream.write_all(format!("{{\"return\": {status}}}\n").as_bytes()).await.unwrap();
                line.clear();
                if stream.read_line(&mut line).await.unwrap() > 0 {
                    stream.write_all(b"{\"return\": {\"pid\": 8}}\n").await.unwrap();
                }
                line
            });
            let agent = Agent::new(&socket);
            let error = given_up(&agent).await;
            assert!(matches!(error, Error::Timeout { .. }) && error.to_string().contains("later"), "{error}");
            gave_up.send(()).unwrap();
            timeout(Duration::from_secs(60), has_looked).await.expect("its status was not read").unwrap();
            drop(agent);
            let asked = timeout(Duration::from_secs(60), player).await.unwrap().unwrap();
            assert_eq!(asked.contains(r#"["-KILL","7"]"#), is_killed, "{asked}");
            assert_eq!(asked.is_empty(), !is_killed, "{asked}");
        }
    }

    #[tokio::test]
    async fn a_frozen_agent_is_not_reported_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": 1}"#]).await;
            stream
        });
        let agent = Agent::new(&socket);
        assert_eq!(agent.freeze_file_systems().await.unwrap(), 1);
        let _stream = player.await.unwrap();
        let command = vec!["true".to_owned()];
        let exec = Exec { command, input: Vec::new(), timeout: Duration::from_secs(1) };
        let error = agent.exec(&exec).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }) && error.to_string().contains("'true'"), "{error}");
    }

    #[tokio::test]
    async fn a_lost_command_does_not_block_other_calls() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (gave_up, has_given_up) = oneshot::channel();
        let player = tokio::spawn(async move {
            let mut stream = begin(&listener).await;
            has_given_up.await.unwrap();
            // The guest has restarted, and the requests that it had not read are lost.
            let synced = sync_again(&mut stream).await;
            stream.write_all(&synced).await.unwrap();
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let mut asked = String::new();
            stream.read_line(&mut asked).await.unwrap();
            stream.write_all(b"{\"return\": {}}\n").await.unwrap();
            asked
        });
        let agent = Agent::new(&socket);
        given_up(&agent).await;
        gave_up.send(()).unwrap();
        agent.ping(Duration::from_secs(60)).await.unwrap();
        let asked = player.await.unwrap();
        assert!(asked.contains("guest-ping"), "{asked}");
    }
}
