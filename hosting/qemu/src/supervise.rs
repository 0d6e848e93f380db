//! The task that owns a QEMU process: it receives QEMU's events, carries out orders and publishes the state.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::agent::Agent;
use crate::console_log::{self, ConsoleLog, MAX_LOG_BYTES};
use crate::guest::{Boot, BootSign, Exit, ExitReason, GuestState, Phase};
use crate::orphan;
use crate::process::{Ended, Watched};
use crate::qmp::{Event, Qmp};
use crate::spec::RunFiles;
use crate::tpm;

/// Pauses between two reads of the logs: while the guest boots or prints much, and once it is up. An idle machine
/// should cost almost no processor time.
const CHECK_PAUSE: Duration = Duration::from_millis(200);
const CHECK_PAUSE_IDLE: Duration = Duration::from_secs(5);

/// If the logs grow by more than this between two reads, in bytes, the guest prints much.
const MUCH_BYTES: u64 = 1 << 20;

/// The pause before a machine that ran out of space continues.
const SPACE_RETRY: Duration = Duration::from_secs(2);

/// How long one ping of the agent may take while booting.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause between two pings.
const PING_PAUSE: Duration = Duration::from_millis(500);

/// How long the monitor's connection may outlive QEMU. QEMU's last messages are already in the socket, so reading them
/// takes no time. But a child of QEMU could hold the other end open.
const LAST_EVENTS_TIMEOUT: Duration = Duration::from_secs(2);

/// How long QEMU may outlive its TPM, which it ends first.
const TPM_LEAD: Duration = Duration::from_secs(5);

/// How often a machine's disk errors are logged. A guest retries a bad block for ever.
const DISK_ERROR_INTERVAL: Duration = Duration::from_secs(10);

/// Lines of QEMU's output that are kept with the exit.
const LAST_LINES: usize = 32;

/// How many bytes at the end of QEMU's log are searched for these lines.
const LAST_BYTES: u64 = 16 << 10;

/// QEMU's name for the state in which a guest cannot continue (`RunState` of its monitor).
const INTERNAL_ERROR: &str = "internal-error";

/// An order from the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Press the power button.
    PowerButton,
    /// Let QEMU end itself.
    Quit,
    /// End QEMU with a signal.
    Kill,
}

/// The parts of a supervisor.
pub(crate) struct Parts {
    pub name: String,
    pub process: Watched,
    /// Its TPM, if it has one.
    pub tpm: Option<Watched>,
    pub started: Instant,
    /// The boot of a guest that is known to be up.
    pub boot: Option<Boot>,
    pub files: RunFiles,
    pub monitor: Arc<Qmp>,
    pub agent: Arc<Agent>,
    pub orders: mpsc::UnboundedReceiver<Order>,
}

pub(crate) struct Supervisor {
    name: String,
    files: RunFiles,
    monitor: Arc<Qmp>,
    agent: Arc<Agent>,
    state: watch::Sender<GuestState>,
    console: ConsoleLog,
    /// Start of the current boot.
    boot_started: Instant,
    agent_answers: JoinHandle<()>,
    /// Orders so far; they distinguish a requested stop from a crash.
    asked_to_stop: bool,
    asked_to_end: bool,
    /// The reason in QEMU's `SHUTDOWN` event.
    shutdown_reason: Option<String>,
    retry_at: Option<Instant>,
    disk_errors: DiskErrors,
    /// Length of both logs at the last read.
    logged_bytes: u64,
    /// Logs that became too long are being cut.
    cutting: Option<JoinHandle<()>>,
}

/// Counts disk errors, so that one log line summarises many.
#[derive(Debug, Default)]
struct DiskErrors {
    /// Since the last line.
    unlogged: u64,
    logged_at: Option<Instant>,
}

impl DiskErrors {
    /// Counts one error. If a log line is due, returns the number of errors that it stands for.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.unlogged += 1;
        let due = self.logged_at.is_none_or(|at| now.saturating_duration_since(at) >= DISK_ERROR_INTERVAL);
        due.then(|| {
            self.logged_at = Some(now);
            std::mem::take(&mut self.unlogged)
        })
    }
}

impl Supervisor {
    /// Starts the task.
    pub(crate) fn spawn(parts: Parts) -> watch::Receiver<GuestState> {
        let phase = if parts.boot.is_some() { Phase::Up } else { Phase::Booting };
        let initial = GuestState { phase, boot: parts.boot, out_of_space: false, no_boot: None, exit: None };
        let (state, receiver) = watch::channel(initial);
        let events = parts.monitor.events();
        let supervisor = Self {
            agent_answers: wait_for_agent(&parts.agent),
            console: ConsoleLog::new(&parts.files.console_log()),
            name: parts.name,
            files: parts.files,
            monitor: parts.monitor,
            agent: parts.agent,
            state,
            boot_started: parts.started,
            asked_to_stop: false,
            asked_to_end: false,
            shutdown_reason: None,
            retry_at: None,
            disk_errors: DiskErrors::default(),
            logged_bytes: 0,
            cutting: None,
        };
        tokio::spawn(supervisor.run(parts.process, parts.tpm, parts.orders, events));
        receiver
    }

    async fn run(
        mut self,
        mut process: Watched,
        mut tpm: Option<Watched>,
        mut orders: mpsc::UnboundedReceiver<Order>,
        mut events: broadcast::Receiver<Event>,
    ) {
        let mut look_at = Instant::now();
        let mut listening = true;
        let mut handles = true;
        let mut tpm_lost_at = None;
        let ended = loop {
            tokio::select! {
                ended = process.wait() => break ended,
                event = events.recv(), if listening => match event {
                    Ok(event) => {
                        self.handle_event(&event);
                        if self.is_booting() {
                            look_at = look_at.min(Instant::now() + CHECK_PAUSE);
                        }
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => listening = false,
                },
                order = orders.recv(), if handles => match order {
                    Some(order) => self.execute(order, &mut process),
                    None => handles = false,
                },
                () = tpm_ended(&mut tpm) => {
                    tpm = None;
                    tpm_lost_at = Some(Instant::now() + TPM_LEAD);
                }
                () = sleep_until(tpm_lost_at.unwrap_or(look_at)), if tpm_lost_at.is_some() => {
                    tpm_lost_at = None;
                    tracing::error!(machine = self.name, "its TPM has ended; the guest has no TPM until the next start");
                }
                () = sleep_until(look_at) => look_at = Instant::now() + self.look(),
                () = sleep_until(self.retry_at.unwrap_or(look_at)), if self.retry_at.is_some() => self.retry(),
            }
        };
        // The end may be seen before the reader has taken the last event, the reason of the shutdown, from the socket.
        if tokio::time::timeout(LAST_EVENTS_TIMEOUT, self.monitor.ended()).await.is_err() {
            tracing::warn!(machine = self.name, "QEMU has ended, but its monitor connection is still open");
        }
        loop {
            match events.try_recv() {
                Ok(event) => self.handle_event(&event),
                Err(broadcast::error::TryRecvError::Lagged(_)) => {}
                Err(_) => break,
            }
        }
        self.agent_answers.abort();
        if let Some(tpm) = tpm {
            tpm::end(&self.name, tpm).await;
        }
        self.finish(ended);
    }

    fn handle_event(&mut self, event: &Event) {
        let text = |key: &str| event.data.get(key).and_then(Value::as_str).unwrap_or("");
        let flag = |key: &str| event.data.get(key).and_then(Value::as_bool).unwrap_or(false);
        match event.name.as_str() {
            "SHUTDOWN" => {
                self.shutdown_reason = Some(text("reason").to_owned());
                self.state.send_if_modified(|state| enter(state, Phase::Stopping));
            }
            // The guest, or a client of the monitor, caused it.
            "RESET" => self.guest_restarted(),
            "STOP" => self.end_if_unrecoverable(),
            "BLOCK_IO_ERROR" if flag("nospace") && text("action") == "stop" => {
                if self.retry_at.is_none() {
                    tracing::warn!(
                        machine = self.name,
                        "paused: its disk has no free space; it continues when there is some"
                    );
                }
                self.retry_at = Some(Instant::now() + SPACE_RETRY);
                self.state.send_if_modified(|state| !std::mem::replace(&mut state.out_of_space, true));
            }
            "BLOCK_IO_ERROR" => {
                if let Some(errors) = self.disk_errors.count(Instant::now()) {
                    tracing::warn!(
                        machine = self.name,
                        operation = text("operation"),
                        reason = text("reason"),
                        errors,
                        "disk error"
                    );
                }
            }
            _ => {}
        }
    }

    /// If KVM cannot carry out an instruction, QEMU stops the guest and keeps running. Such a guest cannot continue, so
    /// QEMU is ended.
    fn end_if_unrecoverable(&self) {
        let monitor = Arc::clone(&self.monitor);
        let name = self.name.clone();
        tokio::spawn(async move {
            match monitor.execute("query-status", json!({})).await {
                Ok(status) if status.get("status").and_then(Value::as_str) == Some(INTERNAL_ERROR) => {
                    tracing::error!(
                        machine = name,
                        "KVM could not execute an instruction of the guest; the machine is ended"
                    );
                    // QEMU may end before it answers.
                    let _ = monitor.execute("quit", json!({})).await;
                }
                // Stopped for another reason, or gone.
                _ => {}
            }
        });
    }

    fn guest_restarted(&mut self) {
        tracing::info!(machine = self.name, "the guest restarts");
        self.boot_started = Instant::now();
        self.console.skip_to_end();
        self.agent_answers.abort();
        self.agent_answers = wait_for_agent(&self.agent);
        self.state.send_if_modified(|state| {
            state.boot = None;
            enter(state, Phase::Booting)
        });
    }

    fn execute(&mut self, order: Order, process: &mut Watched) {
        self.state.send_if_modified(|state| enter(state, Phase::Stopping));
        let command = match order {
            Order::PowerButton => {
                self.asked_to_stop = true;
                "system_powerdown"
            }
            Order::Quit => {
                self.asked_to_end = true;
                "quit"
            }
            Order::Kill => {
                self.asked_to_end = true;
                if let Err(error) = process.kill() {
                    tracing::warn!(machine = self.name, %error, "QEMU could not be killed");
                }
                return;
            }
        };
        self.send(command);
    }

    /// Sends a command without waiting for the answer, because the loop must keep receiving events.
    fn send(&self, command: &'static str) {
        let monitor = Arc::clone(&self.monitor);
        let name = self.name.clone();
        tokio::spawn(async move {
            match monitor.execute(command, json!({})).await {
                // QEMU may end before it answers.
                Ok(_) | Err(crate::Error::Gone(_)) => {}
                Err(error) => {
                    tracing::warn!(machine = name, command, %error, "QEMU did not execute a command")
                }
            }
        });
    }

    fn is_booting(&self) -> bool {
        self.state.borrow().boot.is_none()
    }

    /// Checks whether the guest is up, and whether a log is too long. Returns when to check again.
    fn look(&mut self) -> Duration {
        let logs = [self.files.console_log(), self.files.qemu_log()];
        let lengths = logs.each_ref().map(|log| console_log::len(log));
        let [mut is_console_long, is_qemu_long] = lengths.map(|len| len > MAX_LOG_BYTES);
        if self.is_booting() {
            match self.console.look() {
                Ok(_) if self.agent_answers.is_finished() => self.booted(BootSign::Agent),
                Ok(true) => self.booted(BootSign::LoginPrompt),
                Ok(false) => {}
                Err(error) => tracing::warn!(machine = self.name, %error, "the console log cannot be read"),
            }
            self.read_firmware_message();
            // Only after the prompt was searched in it.
            is_console_long = self.console.is_long();
        }
        let long = logs.into_iter().zip([is_console_long, is_qemu_long]).filter(|(_, is_long)| *is_long);
        self.cut(long.map(|(log, _)| log).collect());
        let logged_bytes = lengths.iter().sum();
        let before_bytes = std::mem::replace(&mut self.logged_bytes, logged_bytes);
        let grown_bytes = logged_bytes.saturating_sub(before_bytes);
        pause(self.is_booting().then(|| self.boot_started.elapsed()), grown_bytes)
    }

    fn read_firmware_message(&mut self) {
        let said = self.console.no_boot().map(str::to_owned);
        self.state.send_if_modified(|state| {
            let is_new = state.no_boot != said;
            state.no_boot = said;
            is_new
        });
    }

    /// Cuts logs on a thread that may wait for the disk.
    fn cut(&mut self, logs: Vec<PathBuf>) {
        if !logs.is_empty() && self.cutting.as_ref().is_none_or(JoinHandle::is_finished) {
            let cut = move || logs.iter().for_each(|log| console_log::cut(log));
            self.cutting = Some(tokio::task::spawn_blocking(cut));
        }
    }

    /// Clears `out_of_space` and continues the guest. If there is still no space, the next disk error sets it again.
    fn retry(&mut self) {
        self.retry_at = None;
        self.state.send_if_modified(|state| std::mem::replace(&mut state.out_of_space, false));
        self.send("cont");
    }

    fn booted(&self, sign: BootSign) {
        let seconds = self.boot_started.elapsed().as_secs_f64();
        tracing::info!(machine = self.name, seconds, ?sign, "booted");
        self.state.send_modify(|state| {
            state.boot = Some(Boot { seconds, sign });
            if state.phase == Phase::Booting {
                state.phase = Phase::Up;
            }
        });
    }

    fn finish(self, ended: Ended) {
        // The exit code of an adopted process is not known. Its last event gives the same information.
        let clean = ended.is_success().unwrap_or(self.shutdown_reason.is_some());
        let reason =
            exit_reason(clean, self.asked_to_stop, self.asked_to_end, self.shutdown_reason.as_deref());
        let exit =
            Exit { reason, status: ended.to_string(), last_output: last_lines(&self.files.qemu_log()) };
        if self.disk_errors.unlogged > 0 {
            tracing::warn!(
                machine = self.name,
                errors = self.disk_errors.unlogged,
                "more disk errors until its end"
            );
        }
        if reason == ExitReason::Crashed {
            tracing::error!(machine = self.name, %exit, "a machine crashed");
        } else {
            tracing::info!(machine = self.name, %exit, "a machine ended");
        }
        if let Err(error) = orphan::remove_orphans(&self.files) {
            tracing::warn!(machine = self.name, %error, "its run directory could not be cleared");
        }
        self.state.send_modify(|state| {
            state.phase = Phase::Exited;
            state.out_of_space = false;
            state.exit = Some(exit);
        });
    }
}

/// Waits for the end of a TPM, or for ever if there is none.
async fn tpm_ended(tpm: &mut Option<Watched>) {
    match tpm {
        Some(tpm) => drop(tpm.wait().await),
        None => std::future::pending().await,
    }
}

/// When to check a guest again. `booting_for` is `None` once the guest is up. While it boots, the pause is a hundredth
/// of the boot so far, so a measured boot time is right to 1 %, and a guest that never comes up is checked ever less
/// often.
fn pause(booting_for: Option<Duration>, grown_bytes: u64) -> Duration {
    match booting_for {
        _ if grown_bytes > MUCH_BYTES => CHECK_PAUSE,
        Some(booting_for) => (booting_for / 100).clamp(CHECK_PAUSE, CHECK_PAUSE_IDLE),
        None => CHECK_PAUSE_IDLE,
    }
}

/// Moves to a phase, unless the machine has exited. Returns whether the phase changed.
fn enter(state: &mut GuestState, phase: Phase) -> bool {
    let stays = state.phase == phase || state.phase == Phase::Exited;
    if !stays {
        state.phase = phase;
    }
    !stays
}

fn exit_reason(clean: bool, stop: bool, end: bool, shutdown: Option<&str>) -> ExitReason {
    match shutdown {
        _ if end => ExitReason::Killed,
        Some("guest-shutdown") if clean && stop => ExitReason::Stopped,
        Some("guest-shutdown") if clean => ExitReason::PoweredOff,
        Some("guest-reset") if clean => ExitReason::Rebooted,
        _ => ExitReason::Crashed,
    }
}

/// A task that ends when the agent answers.
fn wait_for_agent(agent: &Arc<Agent>) -> JoinHandle<()> {
    let agent = Arc::clone(agent);
    tokio::spawn(async move {
        while agent.ping(PING_TIMEOUT).await.is_err() {
            tokio::time::sleep(PING_PAUSE).await;
        }
    })
}

/// The last lines of QEMU's log, without the empty ones.
pub(crate) fn last_lines(log: &Path) -> Vec<String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = std::fs::File::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(LAST_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(LAST_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.iter().skip(lines.len().saturating_sub(LAST_LINES)).map(|&line| line.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    #[test]
    fn an_end_without_a_request_is_a_crash() {
        use ExitReason::*;
        assert_eq!(exit_reason(true, true, false, Some("guest-shutdown")), Stopped);
        assert_eq!(exit_reason(true, false, false, Some("guest-shutdown")), PoweredOff);
        assert_eq!(exit_reason(true, false, false, Some("guest-reset")), Rebooted);
        assert_eq!(exit_reason(true, true, true, Some("host-qmp-quit")), Killed);
        assert_eq!(exit_reason(false, false, true, None), Killed);
        assert_eq!(exit_reason(false, true, false, None), Crashed);
        assert_eq!(exit_reason(true, false, false, Some("host-signal")), Crashed);
        assert_eq!(exit_reason(true, false, false, None), Crashed);
    }

    /// With a stand-in for the monitor, because its event must come late, and QEMU's seldom does.
    #[tokio::test]
    async fn the_reason_of_a_shutdown_may_be_read_after_the_end_of_qemu() {
        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles::new(dir.path());
        let listener = tokio::net::UnixListener::bind(files.monitor_socket()).unwrap();
        let child = tokio::process::Command::new("true").spawn().unwrap();
        let process = format!("/proc/{}", child.id().unwrap());
        tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            stream.write_all(b"{\"QMP\":{}}\n").await.unwrap();
            stream.read_line(&mut String::new()).await.unwrap();
            stream.write_all(b"{\"return\":{},\"id\":1}\n").await.unwrap();
            // The supervisor must see the end of the process first, so wait until nothing of the process is left.
            while Path::new(&process).exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let event = br#"{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-reset"}}"#;
            stream.write_all(event).await.unwrap();
            stream.write_all(b"\n").await.unwrap();
        });
        let monitor = Arc::new(Qmp::connect(&files.monitor_socket()).await.unwrap());
        let (_orders, orders) = mpsc::unbounded_channel();
        let mut state = Supervisor::spawn(Parts {
            name: "late".into(),
            process: Watched::Child(child),
            boot: None,
            tpm: None,
            started: Instant::now(),
            agent: Arc::new(Agent::new(&files.agent_socket())),
            files,
            monitor,
            orders,
        });
        let state = state.wait_for(|state| state.phase == Phase::Exited).await.unwrap();
        assert_eq!(state.exit.as_ref().unwrap().reason, ExitReason::Rebooted);
    }

    #[test]
    fn a_silent_guest_that_is_up_is_checked_seldom() {
        let seconds = Duration::from_secs;
        assert_eq!(
            [0, 10, 100, 3600].map(|s| pause(Some(seconds(s)), 0)),
            [CHECK_PAUSE, CHECK_PAUSE, seconds(1), CHECK_PAUSE_IDLE]
        );
        assert_eq!(pause(None, MUCH_BYTES), CHECK_PAUSE_IDLE);
        // Otherwise its logs would grow without limit until the next check.
        assert_eq!(pause(None, MUCH_BYTES + 1), CHECK_PAUSE);
    }

    /// A stand-in for QEMU, whose guest boots, prints without end, and restarts.
    #[tokio::test]
    async fn logs_stay_short_and_the_next_boot_is_detected() {
        use std::io::Write as _;

        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles::new(dir.path());
        let log = files.console_log();
        let mut console = std::fs::File::options().create(true).append(true).open(&log).unwrap();
        let listener = tokio::net::UnixListener::bind(files.monitor_socket()).unwrap();
        let (restart, mut restarts) = mpsc::unbounded_channel::<()>();
        tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            stream.write_all(b"{\"QMP\":{}}\n").await.unwrap();
            stream.read_line(&mut String::new()).await.unwrap();
            stream.write_all(b"{\"return\":{},\"id\":1}\n").await.unwrap();
            restarts.recv().await.unwrap();
            stream.write_all(b"{\"event\":\"RESET\",\"data\":{\"guest\":true}}\n").await.unwrap();
            restarts.recv().await;
        });
        let (orders, obeyed) = mpsc::unbounded_channel();
        let mut state = Supervisor::spawn(Parts {
            name: "talks".into(),
            process: Watched::Child(
                tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap(),
            ),
            boot: None,
            tpm: None,
            started: Instant::now(),
            agent: Arc::new(Agent::new(&files.agent_socket())),
            monitor: Arc::new(Qmp::connect(&files.monitor_socket()).await.unwrap()),
            files,
            orders: obeyed,
        });
        console.write_all(b"login: ").unwrap();
        state.wait_for(|state| state.phase == Phase::Up).await.unwrap();
        console.write_all(&vec![b'x'; 17 << 20]).unwrap();
        let cut = async {
            while console_log::len(&log) > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), cut).await.expect("the log is not cut");
        assert_eq!(console_log::len(&console_log::old(&log)), 7 + (17 << 20));
        restart.send(()).unwrap();
        state.wait_for(|state| state.phase == Phase::Booting).await.unwrap();
        console.write_all(b"login: ").unwrap();
        state.wait_for(|state| state.phase == Phase::Up).await.unwrap();
        orders.send(Order::Kill).unwrap();
        state.wait_for(|state| state.phase == Phase::Exited).await.unwrap();
    }

    #[test]
    fn one_line_stands_for_many_disk_errors() {
        let start = Instant::now();
        let mut errors = DiskErrors::default();
        assert_eq!(errors.count(start), Some(1));
        let said = (1..25_000).filter_map(|ms| errors.count(start + Duration::from_millis(ms)));
        assert_eq!(said.collect::<Vec<_>>(), [10_000, 10_000]);
        assert_eq!(errors.unlogged, 4_999);
    }

    #[test]
    fn the_last_lines_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let text: String = (0..5000).map(|n| format!("line {n}\n\n")).collect();
        std::fs::write(&log, text).unwrap();
        let lines = last_lines(&log);
        assert_eq!(lines.len(), LAST_LINES);
        assert_eq!(lines.last().unwrap(), "line 4999");
        assert!(last_lines(&dir.path().join("missing")).is_empty());
    }
}
