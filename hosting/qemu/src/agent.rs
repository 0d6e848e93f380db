//! A client of the QEMU guest agent (qemu-ga), over the unix socket of its virtio-serial port.
//!
//! The guest is not trusted: the length of its messages is limited before they are parsed. They are parsed into the
//! expected types, because generic JSON values take up to 40 times the length of the line.
//!
//! The port carries one conversation. A request that the guest never read stays in the pipe, so each connection starts
//! with `guest-sync-delimited`: everything before the marked answer is stale and is dropped. After a timeout the
//! connection is closed, and the next call makes a new one. The connection of a `guest-exec` without an answer stays
//! open until it is known whether the command began (`abandoned_exec.rs`).

mod abandoned_exec;
mod connection;
mod freeze;
mod generalise;
mod guest_facts;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::agent::abandoned_exec::EXEC;
use crate::agent::connection::Connection;
use crate::agent::freeze::{FREEZE, THAW};
use crate::error::{Error, Result};

pub use crate::agent::generalise::Generalised;

/// How long the agent may take for one answer. Generous: an emulated guest under load is slow.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a guest may write out before it is frozen. The rest is written while the guest stands still.
const SYNC_TIMEOUT: Duration = Duration::from_secs(60);

/// The script that runs in a guest before it is frozen: it expedites RCU grace periods, and writes out.
///
/// To freeze a file system, Linux keeps out its writers at three levels, and waits at each for an RCU grace period of
/// several ticks. Expedited grace periods take a fraction of that.
///
/// - The guest resets the setting by itself after ten seconds, even if the freeze fails or its client is gone, and at
///   once if the agent's service ends. It does not reset the setting of a later freeze: any number except 0 expedites,
///   so each freeze writes its own number.
/// - The script sets it again after `sync`, which may take longer than ten seconds.
/// - A guest without this file, or with a permanent 1 in it, is left alone.
/// - The subshell that waits ten seconds has none of the shell's files open, or the agent would wait for it, too. It
///   starts before `sync`, and starts no program at its end, to take no processor from a guest that stands still.
const WRITE_OUT: &str = "\
f=/sys/kernel/rcu_expedited
expedite() {
  read v <$f && [ $v != 1 ] && [ $v != $$ ] && echo $$ >$f || return
  (trap : TERM; sleep 10; read v <$f; if [ $v = $$ ]; then echo 0 >$f; fi) </dev/null >/dev/null 2>&1 &
}
expedite
sync
expedite";

/// First and longest pause between two status queries of a command that runs in the guest.
const POLL_FIRST: Duration = Duration::from_millis(20);
const POLL_LONGEST: Duration = Duration::from_millis(500);
/// The shortest timeout for starting a command, and for the last status query after the command's timeout.
const LEAST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a caller waits until the agent has taken the request to kill a command after its timeout. The requests
/// continue in the background.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// The most requests to kill a command.
const KILL_ATTEMPTS: u32 = 2;

/// The longest answer that is accepted, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// The longest answer with a command's output, in bytes. The agent gives 16 MiB each of its standard output and
/// standard error, in base64 and in one line: 43 MiB.
const MAX_OUTPUT_BYTES: usize = 48 << 20;

/// The most characters of a guest's text in a message.
const MAX_TEXT_CHARS: usize = 256;

const PEER: &str = "the guest agent";

/// A command to run in the guest.
#[derive(Clone, Debug)]
pub struct Exec {
    /// Program (looked up in the guest's `PATH`) and its arguments.
    pub command: Vec<String>,
    /// Standard input of the command.
    pub input: Vec<u8>,
    /// How long the command may take to begin and to run. After that it is killed in the guest, even if it begins
    /// later.
    pub timeout: Duration,
}

/// The result of a command in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// Exit code; 128 + the signal's number if a signal ended the command, as in shells.
    pub exit_code: i32,
    /// Standard output, at most 16 MiB.
    pub stdout: Vec<u8>,
    /// Standard error, at most 16 MiB.
    pub stderr: Vec<u8>,
    /// Whether the agent cut the output off.
    pub truncated: bool,
}

/// The agent of one guest. Calls may come from many tasks and are carried out one at a time. A running command does not
/// delay other calls, but frozen file systems do: the agent refuses all other commands until the thaw.
#[derive(Clone, Debug)]
pub struct Agent {
    socket: PathBuf,
    connection: Arc<Mutex<Option<Connection>>>,
    /// Changed only while holding the connection.
    is_frozen: watch::Sender<bool>,
    /// A thaw was not answered; it is repeated until it is answered. Cleared only while holding the connection.
    owes_thaw: Arc<AtomicBool>,
    /// How long an answer may take.
    timeout: Duration,
}

/// An answer of the agent.
#[derive(Deserialize)]
struct Answer<T> {
    #[serde(rename = "return")]
    value: Option<T>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    desc: Option<String>,
}

/// The answer to `guest-exec-status`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Status {
    exited: bool,
    exitcode: Option<i32>,
    signal: Option<i32>,
    out_data: Option<String>,
    err_data: Option<String>,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

impl Agent {
    /// The agent behind `socket`. Connects at the first call.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_path_buf(),
            connection: Arc::default(),
            is_frozen: watch::Sender::new(false),
            owes_thaw: Arc::default(),
            timeout: ANSWER_TIMEOUT,
        }
    }

    /// Whether the agent answers, within `timeout`.
    pub async fn ping(&self, timeout: Duration) -> Result<()> {
        self.call_within::<Value>("guest-ping", json!({}), MAX_ANSWER_BYTES, timeout).await.map(drop)
    }

    /// Prepares a freeze: the running guest writes out, and expedites its RCU grace periods, so that the freeze is
    /// short. An error if the agent does not answer within `timeout`. A guest without `sync`, or whose `sync` takes
    /// long, is not an error.
    pub async fn write_file_systems_out(&self, timeout: Duration) -> Result<()> {
        self.ping(timeout).await?;
        let command = ["sh", "-c", WRITE_OUT].map(str::to_owned).to_vec();
        let prepare = Exec { command, input: Vec::new(), timeout: SYNC_TIMEOUT };
        if let Err(error) = self.exec(&prepare).await {
            tracing::debug!(%error, "the guest did not write out its file systems before the freeze");
        }
        Ok(())
    }

    /// Runs a command in the guest and waits for its end. If the future is dropped, the command is killed.
    pub async fn exec(&self, exec: &Exec) -> Result<ExecOutput> {
        let (agent, exec) = (self.clone(), exec.clone());
        let (_waits, given_up) = oneshot::channel();
        // In its own task, because the PID to kill is known only after the agent has answered.
        let work = tokio::spawn(async move { agent.exec_unless(given_up, &exec).await });
        work.await.unwrap_or_else(|error| {
            Err(Error::Gone(format!("cannot tell how a command in the guest ended: {error}")))
        })
    }

    async fn exec_unless(&self, mut given_up: oneshot::Receiver<()>, exec: &Exec) -> Result<ExecOutput> {
        let Some((program, arguments)) = exec.command.split_first() else {
            return Err(Error::Agent { command: EXEC.into(), description: "no command given".into() });
        };
        let mut request = json!({ "path": program, "arg": arguments, "capture-output": true });
        if let (false, Some(map)) = (exec.input.is_empty(), request.as_object_mut()) {
            map.insert("input-data".into(), BASE64.encode(&exec.input).into());
        }
        let pid =
            self.start_exec(program, request, self.timeout.min(exec.timeout.max(LEAST_TIMEOUT))).await?;
        let deadline = Instant::now() + exec.timeout;
        let mut pause = POLL_FIRST;
        let mut is_unsure = false;
        loop {
            let asked = json!({ "pid": pid });
            let left = deadline.saturating_duration_since(Instant::now()).max(LEAST_TIMEOUT);
            let timeout = self.timeout.min(left);
            let looked = self.call_within("guest-exec-status", asked, MAX_OUTPUT_BYTES, timeout);
            match looked.await {
                Ok(status @ Status { exited: true, .. }) => return output(status),
                Ok(_) => {}
                // The guest is under load, or frozen: the command continues, and a later query may be
                // answered.
                Err(error) if may_answer_later(&error) => {
                    tracing::debug!(%error, pid, "cannot tell yet whether a command in the guest has ended");
                    is_unsure = true;
                }
                // The agent does not know the PID, so it may belong to another process by now.
                Err(Error::Agent { command, description }) => {
                    let lost = if is_unsure {
                        " (the command has ended, but the answer with its result was lost)"
                    } else {
                        ""
                    };
                    return Err(Error::Agent { command, description: description + lost });
                }
                Err(error) => {
                    self.kill_in_guest(pid).await;
                    return Err(error);
                }
            }
            if Instant::now() >= deadline {
                self.kill_in_guest(pid).await;
                return Err(Error::Timeout {
                    what: format!("command '{program}' in the guest"),
                    after: exec.timeout,
                });
            }
            tokio::select! {
                () = tokio::time::sleep_until((Instant::now() + pause).min(deadline)) => {}
                _ = &mut given_up => {
                    self.kill_in_guest(pid).await;
                    return Err(Error::Gone(format!("the caller of command '{program}' has gone")));
                }
            }
            pause = (pause * 2).min(POLL_LONGEST);
        }
    }

    async fn kill_in_guest(&self, pid: i64) {
        let _ = timeout(KILL_TIMEOUT, self.begin_to_kill(pid)).await;
    }

    /// Kills in its own task, because a busy agent may take the request only after the caller has stopped waiting.
    fn begin_to_kill(&self, pid: i64) -> JoinHandle<()> {
        let agent = self.clone();
        tokio::spawn(async move {
            for left in (0..KILL_ATTEMPTS).rev() {
                let request = json!({ "path": "kill", "arg": ["-KILL", pid.to_string()] });
                match agent.call(EXEC, request).await {
                    Ok(_) => return,
                    Err(error) if left > 0 && may_answer_later(&error) => {}
                    Err(error) => {
                        tracing::warn!(%error, pid, "cannot kill a command in the guest");
                        return;
                    }
                }
            }
        })
    }

    /// Executes one command of the agent.
    pub async fn call(&self, command: &str, arguments: Value) -> Result<Value> {
        self.call_within(command, arguments, MAX_ANSWER_BYTES, self.timeout).await
    }

    async fn call_within<T: DeserializeOwned>(
        &self,
        command: &str,
        arguments: Value,
        max_bytes: usize,
        timeout: Duration,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        let timed_out =
            || Error::Timeout { what: format!("guest agent command '{command}'"), after: timeout };
        let slot = timeout_at(deadline, self.lock(command)).await.map_err(|_| timed_out())?;
        timeout_at(deadline, self.converse(slot, command, arguments, max_bytes))
            .await
            .map_err(|_| timed_out())?
    }

    /// Sends one request to the agent. The caller holds the connection.
    async fn converse<T: DeserializeOwned>(
        &self,
        mut slot: MutexGuard<'_, Option<Connection>>,
        command: &str,
        arguments: Value,
        max_bytes: usize,
    ) -> Result<T> {
        let mut connection = self.take_connection(&mut slot).await?;
        let answer = connection.request(&self.socket, command, arguments, max_bytes).await?;
        *slot = Some(connection);
        let answer = interpret(command, &answer);
        match (command, &answer) {
            (FREEZE, Ok(_)) => {
                self.is_frozen.send_replace(true);
            }
            // An agent that refuses the thaw will refuse it again.
            (THAW, Ok(_) | Err(Error::Agent { .. })) => self.owes_thaw.store(false, Ordering::Relaxed),
            _ => {}
        }
        answer
    }

    /// Locks the connection. While file systems are frozen, only the thaw may lock it, so that it never waits for
    /// another call. A call that came before the answer to the freeze checks again.
    async fn lock(&self, command: &str) -> MutexGuard<'_, Option<Connection>> {
        if command == THAW {
            // Cleared even after an error: other calls must not wait for a thaw that is never answered.
            let slot = self.connection.lock().await;
            self.is_frozen.send_replace(false);
            return slot;
        }
        let mut is_frozen = self.is_frozen.subscribe();
        loop {
            // The sender lives as long as `self`.
            let _ = is_frozen.wait_for(|frozen| !frozen).await;
            let slot = self.connection.lock().await;
            if !*self.is_frozen.borrow() {
                return slot;
            }
        }
    }
}

fn interpret<T: DeserializeOwned>(command: &str, answer: &[u8]) -> Result<T> {
    let unexpected = || {
        let start = answer.get(..MAX_TEXT_CHARS).unwrap_or(answer);
        Error::Protocol {
            peer: PEER,
            detail: format!("answer to '{command}': {}", shown(&String::from_utf8_lossy(start))),
        }
    };
    let answer: Answer<T> = serde_json::from_slice(answer).map_err(|_| unexpected())?;
    if let Some(refusal) = answer.error {
        let description = shown(refusal.desc.as_deref().unwrap_or("no reason given"));
        return Err(Error::Agent { command: command.to_owned(), description });
    }
    answer.value.ok_or_else(unexpected)
}

/// Whether the same request may be answered on another connection. If no connection is possible, the machine is off.
fn may_answer_later(error: &Error) -> bool {
    match error {
        Error::Timeout { .. } | Error::Gone(_) => true,
        Error::Io { source, .. } => {
            matches!(source.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
        }
        _ => false,
    }
}

fn unexpected(command: &str, answer: &Value) -> Error {
    Error::Protocol { peer: PEER, detail: format!("answer to '{command}': {}", shown(&answer.to_string())) }
}

/// A text of the guest for a message: short, and without control characters.
fn shown(text: &str) -> String {
    text.chars().take(MAX_TEXT_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn output(status: Status) -> Result<ExecOutput> {
    let bytes = |field: &str, encoded: Option<String>| {
        BASE64
            .decode(encoded.unwrap_or_default())
            .map_err(|error| Error::Protocol { peer: PEER, detail: format!("field '{field}': {error}") })
    };
    let exit_code = match (status.exitcode, status.signal) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128_i32.saturating_add(signal),
        (None, None) => {
            let detail = "a command ended with neither a code nor a signal".into();
            return Err(Error::Protocol { peer: PEER, detail });
        }
    };
    Ok(ExecOutput {
        exit_code,
        stdout: bytes("out-data", status.out_data)?,
        stderr: bytes("err-data", status.err_data)?,
        truncated: status.out_truncated || status.err_truncated,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{UnixListener, UnixStream};

    /// Accepts a connection, reads its sync request, and returns the number in it.
    pub(super) async fn accept(listener: &UnixListener) -> (BufReader<UnixStream>, u64) {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut sync = Vec::new();
        stream.read_until(b'\n', &mut sync).await.unwrap();
        assert_eq!(sync.first(), Some(&0xFF));
        let sync: Value = serde_json::from_slice(&sync[1..]).unwrap();
        let id = sync["arguments"]["id"].as_u64().unwrap();
        (stream, id)
    }

    pub(super) fn answer_to_sync(id: u64) -> Vec<u8> {
        let mut bytes = vec![0xFF];
        bytes.extend_from_slice(json!({ "return": id }).to_string().as_bytes());
        bytes.push(b'\n');
        bytes
    }

    pub(super) async fn answer(stream: &mut BufReader<UnixStream>, answers: &[&str]) {
        for answer in answers {
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream.write_all(b"\n").await.unwrap();
        }
    }

    /// Plays an agent that first sends what an earlier conversation left behind.
    async fn play(listener: UnixListener, answers: Vec<&'static str>) {
        let (mut stream, id) = accept(&listener).await;
        stream.write_all(b"{\"return\": {\"stale\": 1}}\n{\"ret").await.unwrap();
        stream.write_all(&answer_to_sync(id)).await.unwrap();
        answer(&mut stream, &answers).await;
    }

    fn command(program: &str) -> Exec {
        let command = vec![program.to_owned(), "x".to_owned()];
        Exec { command, input: b"in".to_vec(), timeout: Duration::from_secs(60) }
    }

    #[tokio::test]
    async fn all_output_that_the_agent_gives_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let full: Vec<u8> = (0..16_u32 << 20).map(|at| (at % 251) as u8).collect();
        let text = BASE64.encode(&full);
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let status =
                json!({ "return": { "exited": true, "exitcode": 0, "out-data": text, "err-data": text } });
            answer(&mut stream, &[r#"{"return": {"pid": 7}}"#, &status.to_string()]).await;
        });
        let done = Agent::new(&socket).exec(&command("cat")).await.unwrap();
        assert!(done.stdout == full && done.stderr == full);
        player.await.unwrap();
    }

    #[tokio::test]
    async fn answers_to_the_syncs_of_earlier_connections_are_stale() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            // A guest that boots: the pings time out, and their syncs stay in the port.
            let mut stale = Vec::new();
            for _ in 0..2 {
                let (stream, id) = accept(&listener).await;
                stale.push(id);
                drop(stream);
            }
            let (mut stream, id) = accept(&listener).await;
            for id in stale.into_iter().chain([id]) {
                stream.write_all(&answer_to_sync(id)).await.unwrap();
            }
            let ended = r#"{"return": {"exited": true, "exitcode": 3}}"#;
            answer(&mut stream, &[r#"{"return": {"pid": 7}}"#, ended]).await;
        });
        let agent = Agent::new(&socket);
        for _ in 0..2 {
            agent.ping(Duration::from_secs(60)).await.unwrap_err();
        }
        assert_eq!(agent.exec(&command("true")).await.unwrap().exit_code, 3);
        player.await.unwrap();
    }

    #[tokio::test]
    async fn stale_answers_are_skipped_and_a_command_runs_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(play(
            listener,
            vec![
                r#"{"return": {"pid": 7}}"#,
                r#"{"return": {"exited": false}}"#,
                r#"{"return": {"exited": true, "signal": 9, "out-data": "aGk=", "err-truncated": true}}"#,
                r#"{"error": {"class": "GenericError", "desc": "no such file"}}"#,
            ],
        ));
        let agent = Agent::new(&socket);
        let done = agent.exec(&command("true")).await.unwrap();
        let want = ExecOutput { exit_code: 137, stdout: b"hi".to_vec(), stderr: Vec::new(), truncated: true };
        assert_eq!(done, want);
        let error = agent.exec(&command("nothing")).await.unwrap_err();
        assert!(error.to_string().contains("no such file"), "{error}");
        player.await.unwrap();
    }

    #[tokio::test]
    async fn a_running_command_is_not_queried_while_the_guest_is_frozen() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (asked, mut was_asked) = watch::channel(false);
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let (mut is_frozen, mut was_frozen) = (false, false);
            let mut line = String::new();
            while stream.read_line(&mut line).await.unwrap() > 0 {
                let request: Value = serde_json::from_str(&line).unwrap();
                line.clear();
                let answer = match request["execute"].as_str().unwrap() {
                    "guest-exec" => json!({ "return": { "pid": 7 } }),
                    FREEZE => {
                        // Long enough for another call to arrive meanwhile.
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        (is_frozen, was_frozen) = (true, true);
                        json!({ "return": 1 })
                    }
                    THAW => {
                        is_frozen = false;
                        json!({ "return": 1 })
                    }
                    _ if is_frozen => json!({ "error": { "desc": "the agent is in frozen state" } }),
                    _ => {
                        asked.send_replace(true);
                        json!({ "return": { "exited": was_frozen, "exitcode": 5 } })
                    }
                };
                stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        let agent = std::sync::Arc::new(Agent::new(&socket));
        let running = tokio::spawn({
            let agent = std::sync::Arc::clone(&agent);
            async move { agent.exec(&command("sleep")).await }
        });
        was_asked.wait_for(|asked| *asked).await.unwrap();
        assert_eq!(agent.freeze_file_systems().await.unwrap(), 1);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!running.is_finished());
        agent.thaw_file_systems().await.unwrap();
        assert_eq!(running.await.unwrap().unwrap().exit_code, 5);
        drop(agent);
        player.await.unwrap();
    }

    #[tokio::test]
    async fn a_command_whose_caller_is_gone_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = Agent::new(&socket);
        let waiting = tokio::spawn(async move { agent.exec(&command("sleep")).await });
        let (mut stream, id) = accept(&listener).await;
        stream.write_all(&answer_to_sync(id)).await.unwrap();
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        // The PID is not known yet.
        waiting.abort();
        waiting.await.unwrap_err();
        stream.write_all(b"{\"return\": {\"pid\": 7}}\n").await.unwrap();
        let (mut asked, mut times) = (String::new(), 0);
        while !asked.contains("kill") {
            asked.clear();
            times += 1;
            let read = stream.read_line(&mut asked).await.unwrap();
            assert!(read > 0 && times < 5, "the command was left alone");
            let answer = if asked.contains("status") { r#"{"exited": false}"# } else { r#"{"pid": 8}"# };
            stream.write_all(format!("{{\"return\": {answer}}}\n").as_bytes()).await.unwrap();
        }
        assert!(asked.contains(r#"["-KILL","7"]"#), "{asked}");
    }

    #[tokio::test]
    async fn a_silent_agent_does_not_end_a_running_command() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": {"pid": 7}}"#]).await;
            // The agent is silent until the connection is closed, and closes the next connection in the middle.
            let mut asked = String::new();
            while stream.read_line(&mut asked).await.unwrap() > 0 {}
            assert!(asked.contains("guest-exec-status") && !asked.contains("kill"), "{asked}");
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            stream.read_line(&mut asked).await.unwrap();
            drop(stream);
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": {"exited": true, "exitcode": 3}}"#]).await;
        });
        let agent = Agent { timeout: Duration::from_secs(20), ..Agent::new(&socket) };
        assert_eq!(agent.exec(&command("sleep")).await.unwrap().exit_code, 3);
        player.await.unwrap();
    }

    #[tokio::test]
    async fn an_agent_that_reads_the_request_late_kills_the_command() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (given_up, has_given_up) = oneshot::channel();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": {"pid": 7}}"#]).await;
            // The agent is silent until no caller waits for it.
            has_given_up.await.unwrap();
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let mut asked = String::new();
            stream.read_line(&mut asked).await.unwrap();
            asked
        });
        let agent = Agent { timeout: Duration::from_secs(600), ..Agent::new(&socket) };
        // Long enough for its start on a busy host.
        let exec = Exec { timeout: Duration::from_secs(3), ..command("sleep") };
        let error = agent.exec(&exec).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        given_up.send(()).unwrap();
        let asked = player.await.unwrap();
        assert!(asked.contains(r#"["-KILL","7"]"#), "{asked}");
    }

    #[tokio::test]
    async fn a_command_whose_status_is_nonsense_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            answer(&mut stream, &[r#"{"return": {"pid": 7}}"#, r#"{"return": []}"#]).await;
            let mut asked = String::new();
            stream.read_line(&mut asked).await.unwrap();
            // The caller waits no longer than necessary.
            let _ = stream.write_all(b"{\"return\": {\"pid\": 8}}\n").await;
            asked
        });
        let error = Agent::new(&socket).exec(&command("sleep")).await.unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        let asked = player.await.unwrap();
        assert!(asked.contains(r#"["-KILL","7"]"#), "{asked}");
    }

    #[tokio::test]
    async fn a_hostile_agent_fills_neither_memory_nor_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let player = tokio::spawn(async move {
            let (mut stream, id) = accept(&listener).await;
            stream.write_all(&answer_to_sync(id)).await.unwrap();
            let long = json!({ "error": { "desc": format!("\u{1b}[2J{}", "x".repeat(60 << 10)) } });
            answer(&mut stream, &[&long.to_string(), &format!("[{}0]", "[0],".repeat(10 << 10))]).await;
            // As a command's output this would be taken; as the answer to a ping it is too long.
            let nested = format!("{{\"return\": [{}0]}}", "[0],".repeat(1 << 20));
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            // The other side goes away in the middle.
            stream.write_all(nested.as_bytes()).await.unwrap_err();
        });
        let agent = Agent::new(&socket);
        let error = agent.ping(Duration::from_secs(60)).await.unwrap_err().to_string();
        assert!(error.len() < 400 && !error.contains('\u{1b}'), "{error}");
        let error = agent.ping(Duration::from_secs(60)).await.unwrap_err().to_string();
        assert!(error.len() < 400 && error.contains("[0],"), "{error}");
        let error = agent.ping(Duration::from_secs(60)).await.unwrap_err().to_string();
        assert!(error.contains("longer than"), "{error}");
        player.await.unwrap();
    }

    #[tokio::test]
    async fn a_silent_agent_is_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let error = Agent::new(&socket).ping(Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }

    #[tokio::test]
    async fn without_an_agent_a_command_fails_after_its_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let exec = Exec { timeout: Duration::from_secs(2), ..command("true") };
        let error = Agent::new(&socket).exec(&exec).await.unwrap_err();
        assert!(matches!(error, Error::NoAgent { after } if after == exec.timeout), "{error}");
    }
}
