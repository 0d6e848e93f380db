//! Kills commands that begin in the guest after their caller was answered with a timeout.
//!
//! A paused guest (without disk space, for instance) reads a request when it continues, and begins the command then.
//! QEMU drops the agent's messages while no client is connected, so the command's process number would be lost.
//! Therefore the connection of a request without an answer stays open. The next call on that connection, or else a
//! background task, waits for the late answer first. Then the command is killed, unless it has ended.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::connection::Connection;
use super::{
    Agent, KILL_TRIES, MAX_ANSWER_BYTES, MAX_OUTPUT_BYTES, Status, interpret, may_answer_later, unexpected,
};
use crate::error::{Error, Result};

/// The agent's command that starts a program.
pub(super) const EXEC: &str = "guest-exec";

/// How long each attempt waits for a late answer. Then the agent gets another sync.
const LOOK: Duration = Duration::from_secs(5);

/// How long other calls may use the agent between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

impl Agent {
    /// Starts a command in the guest and returns its process number. If the answer does not come within `patience`, the
    /// command is killed when the answer comes.
    pub(super) async fn begin(&self, program: &str, request: Value, patience: Duration) -> Result<i64> {
        let deadline = Instant::now() + patience;
        // The lock may be held for as long as other calls keep the guest frozen, so a timeout does not tell
        // whether there is an agent.
        let others_have_it = || Error::Timeout {
            what: format!("the turn of command '{program}' at the guest agent, which others use"),
            after: patience,
        };
        let mut slot = timeout_at(deadline, self.turn(EXEC)).await.map_err(|_| others_have_it())?;
        let taken = timeout_at(deadline, self.take_connection(&mut slot)).await;
        let mut connection = taken.map_err(|_| Error::NoAgent { after: patience })??;
        let asking = connection.request(&self.socket, EXEC, request, MAX_ANSWER_BYTES);
        let answered = timeout_at(deadline, asking).await;
        let Ok(answer) = answered else {
            connection.give_up();
            *slot = Some(connection);
            self.go_on_listening();
            let what = format!(
                "the start of command '{program}' in the guest, which may begin later and is killed then"
            );
            return Err(Error::Timeout { what, after: patience });
        };
        let answer = answer?;
        *slot = Some(connection);
        process(&interpret::<Value>(EXEC, &answer)?)
    }

    /// The connection, taken out while in use. So a call that is cancelled or fails leaves no connection behind whose
    /// next answer belongs to that call.
    pub(super) async fn take_connection(&self, slot: &mut Option<Connection>) -> Result<Connection> {
        self.hear_late_answer(slot).await;
        match slot.take() {
            Some(connection) => Ok(connection),
            None => Connection::open(&self.socket).await,
        }
    }

    /// If an answer to an abandoned request is due, waits for it, and kills the command if that runs. The connection
    /// stays in the slot, so if this call is cancelled too, the next one continues.
    async fn hear_late_answer(&self, slot: &mut Option<Connection>) {
        let Some(connection) = slot.as_mut().filter(|connection| connection.is_late()) else { return };
        let answer = connection.late_answer(&self.socket).await;
        // The rest of the answer to this sync would be stale for the next sync.
        *slot = None;
        match answer.map(|answer| process_in(&answer)) {
            Ok(Some(pid)) => {
                tracing::warn!(
                    pid,
                    "a command that was given up began late in the guest, and is killed if it runs"
                );
                self.kill_if_it_runs(pid);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "it is not known whether a command that was given up began in the guest");
            }
        }
    }

    /// Kills a command if it still runs. It asks for the status first: the number of an ended command may belong to
    /// another process by now, and the agent keeps its output until the status is read. In its own task, because the
    /// caller holds the connection.
    fn kill_if_it_runs(&self, pid: i64) {
        let agent = self.clone();
        tokio::spawn(async move {
            for left in (0..KILL_TRIES).rev() {
                let asked = json!({ "pid": pid });
                let looked = agent.call_within("guest-exec-status", asked, MAX_OUTPUT_BYTES, agent.patience);
                match looked.await {
                    Ok(Status { exited: true, .. }) => return,
                    Ok(_) => {
                        agent.begin_to_kill(pid);
                        return;
                    }
                    Err(error) if left > 0 && may_answer_later(&error) => {}
                    Err(error) => {
                        tracing::warn!(%error, pid, "it is not known whether a command that was given up goes on in the guest");
                        return;
                    }
                }
            }
        });
    }

    /// Waits for the late answer in the background, until it comes or the last handle to the machine is dropped.
    fn go_on_listening(&self) {
        let alive = Arc::downgrade(&self.connection);
        let agent = Self { connection: Arc::default(), ..self.clone() };
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_AGAIN).await;
                let Some(connection) = alive.upgrade() else { return };
                let agent = Self { connection, ..agent.clone() };
                let mut slot = agent.connection.lock().await;
                if timeout(LOOK, agent.hear_late_answer(&mut slot)).await.is_ok() {
                    return;
                }
            }
        });
    }
}

/// The process that an answer to [`EXEC`] names.
fn process(answer: &Value) -> Result<i64> {
    answer.get("pid").and_then(Value::as_i64).ok_or_else(|| unexpected(EXEC, answer))
}

/// The same for an answer among other lines: the agent also reports an error for the mark of a sync.
fn process_in(answers: &[u8]) -> Option<i64> {
    let mut lines = answers.split(|byte| *byte == b'\n');
    lines.find_map(|line| process(&interpret::<Value>(EXEC, line).ok()?).ok())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{UnixListener, UnixStream};
    use tokio::sync::oneshot;

    use super::super::Exec;
    use super::super::tests::{accept, answer, answer_to_sync};
    use super::*;

    /// Reads the next sync of a connection that is in use, and gives the answer to it as the agent sends it.
    async fn sync_again(stream: &mut BufReader<UnixStream>) -> Vec<u8> {
        let mut sync = Vec::new();
        stream.read_until(b'\n', &mut sync).await.unwrap();
        assert_eq!(sync.first(), Some(&0xFF), "no sync but {:?}", String::from_utf8_lossy(&sync));
        let sync: Value = serde_json::from_slice(&sync[1..]).unwrap();
        let mut bytes = b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"stray mark\"}}\n".to_vec();
        bytes.extend(answer_to_sync(sync["arguments"]["id"].as_u64().unwrap()));
        bytes
    }

    /// An agent that has answered so far, and a command that is abandoned without an answer.
    async fn given_up(agent: &Agent) -> Error {
        agent.ping(Duration::from_secs(60)).await.unwrap();
        // Long enough for the following steps on a busy host.
        let agent = Agent { patience: Duration::from_secs(3), ..agent.clone() };
        let (command, input) = (vec!["sleep".to_owned(), "9".to_owned()], Vec::new());
        agent.exec(&Exec { command, input, timeout: Duration::from_secs(60) }).await.unwrap_err()
    }

    /// Takes the first connection, answers to a ping, and reads the command.
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
            let ((told, has_been_told), (looked, has_looked)) = (oneshot::channel(), oneshot::channel());
            let player = tokio::spawn(async move {
                let mut stream = begin(&listener).await;
                // The agent stands still until no caller waits for the command.
                has_been_told.await.unwrap();
                stream.write_all(b"{\"return\": {\"pid\": 7}}\n").await.unwrap();
                let synced = sync_again(&mut stream).await;
                stream.write_all(&synced).await.unwrap();
                let (mut stream, id) = accept(&listener).await;
                stream.write_all(&answer_to_sync(id)).await.unwrap();
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                assert!(line.contains("guest-exec-status") && line.contains(r#""pid":7"#), "{line}");
                // The handle to the machine lives until here.
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
            told.send(()).unwrap();
            timeout(Duration::from_secs(60), has_looked).await.expect("nobody looks at it").unwrap();
            drop(agent);
            let asked = timeout(Duration::from_secs(60), player).await.unwrap().unwrap();
            assert_eq!(asked.contains(r#"["-KILL","7"]"#), is_killed, "{asked}");
            assert_eq!(asked.is_empty(), !is_killed, "{asked}");
        }
    }

    #[tokio::test]
    async fn an_agent_that_a_freeze_keeps_from_a_command_is_not_called_missing() {
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
    async fn an_agent_that_never_had_a_command_is_asked_for_other_things() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (told, has_been_told) = oneshot::channel();
        let player = tokio::spawn(async move {
            let mut stream = begin(&listener).await;
            has_been_told.await.unwrap();
            // The guest has restarted, and requests that it had not read are lost.
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
        told.send(()).unwrap();
        agent.ping(Duration::from_secs(60)).await.unwrap();
        let asked = player.await.unwrap();
        assert!(asked.contains("guest-ping"), "{asked}");
    }
}
