//! One running machine: starts it, watches it and stops it.
//!
//! ```text
//!   start --> Booting --agent answers or "login:" on the console--> Up
//!                ^  |                                               | |
//!                |  +----------------- stop() -----------------+----+ |
//!                +------- the guest restarted (Continue) ------|------+
//!                                                              v
//!                                                          Stopping --> Exited(reason)
//!   QEMU ends without being asked, from any phase: Exited(Crashed, PoweredOff or Rebooted)
//! ```

use std::fmt::Write;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use tokio::process::Child;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::time::Instant;

use crate::agent::Agent;
use crate::binary;
use crate::bridge::{self, Bridge};
use crate::console_log;
use crate::error::{Error, Result};
use crate::idle_window::{IdleWait, wait_until_idle};
use crate::launch::{self, Lifetime};
use crate::orphan;
use crate::probe::{self, Probe};
use crate::process::{ProcessId, Watched};
use crate::qmp::Qmp;
use crate::screen;
use crate::spec::{Display, GuestSpec, Network, RunFiles};
use crate::supervise::{self, Order, Supervisor};
use crate::tpm;

/// How long QEMU may take to open its monitor. Generous for hosts under load.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause before the power button is pressed again: a guest that has just started may have missed the first press.
const PRESS_AGAIN: Duration = Duration::from_secs(10);

/// How long QEMU may take to end after `quit`.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The phase of a machine's lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// QEMU runs; the guest's system is not up yet.
    Booting,
    /// The guest's system is up.
    Up,
    /// The machine was asked to stop.
    Stopping,
    /// QEMU has ended.
    Exited,
}

/// The sign by which the guest's system is known to be up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BootSign {
    /// The guest agent answered.
    Agent,
    /// The serial console asked for a login.
    LoginPrompt,
}

/// A finished boot.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Boot {
    /// Seconds from the start of QEMU, or from the guest's restart.
    pub seconds: f64,
    /// The sign that the system is up.
    pub sign: BootSign,
}

/// Why QEMU ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The guest powered off by itself.
    PoweredOff,
    /// The guest restarted, and the machine is set up to end then.
    Rebooted,
    /// The machine was asked to stop, and the guest powered off.
    Stopped,
    /// The machine was asked to stop and did not stop in time, so QEMU was ended; or it was killed on request.
    Killed,
    /// The end was not requested: QEMU failed, or another process ended it.
    Crashed,
}

/// How QEMU ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exit {
    /// The reason.
    pub reason: ExitReason,
    /// Exit code or signal, as text.
    pub status: String,
    /// The last lines that QEMU printed, at most 32.
    pub last_output: Vec<String>,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.reason {
            ExitReason::PoweredOff => "the guest powered off",
            ExitReason::Rebooted => "the guest restarted",
            ExitReason::Stopped => "stopped",
            ExitReason::Killed => "killed",
            ExitReason::Crashed => "QEMU ended unexpectedly",
        };
        write!(f, "{what} ({})", self.status)?;
        // KVM prints the error before registers and code, so the last line would not help.
        let telling = self.last_output.iter().find(|line| line.starts_with("KVM internal error"));
        if let (ExitReason::Crashed, Some(line)) = (self.reason, telling.or(self.last_output.last())) {
            write!(f, ": {line}")?;
        }
        Ok(())
    }
}

/// The state of a machine at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GuestState {
    /// The phase of its lifecycle.
    pub phase: Phase,
    /// Its last finished boot; `None` while booting.
    pub boot: Option<Boot>,
    /// Set while the machine is paused because its disk has no space; it continues by itself.
    pub out_of_space: bool,
    /// The firmware's message that it found nothing to boot.
    pub no_boot: Option<String>,
    /// How it ended.
    pub exit: Option<Exit>,
}

/// The state of a machine by QEMU's monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitorStatus {
    /// Whether the guest's processors run.
    pub running: bool,
    /// QEMU's word for the state: `running`, `paused`, `io-error`, ...
    pub status: String,
}

/// A handle to a running machine. Clones refer to the same machine. The machine continues when all handles
/// are dropped. With [`Lifetime::WithParent`] it is killed when the tokio runtime that started it ends.
#[derive(Clone, Debug)]
pub struct Guest {
    name: Arc<str>,
    cpus: u32,
    process: ProcessId,
    files: RunFiles,
    monitor: Arc<Qmp>,
    agent: Arc<Agent>,
    state: watch::Receiver<GuestState>,
    orders: mpsc::UnboundedSender<Order>,
    /// Held while QEMU writes a picture, because all pictures go into one file.
    screen: Arc<Mutex<()>>,
}

impl Guest {
    /// Starts a machine that ends with this process. Otherwise as [`Guest::start_with`].
    pub async fn start(spec: &GuestSpec) -> Result<Self> {
        Self::start_with(spec, Lifetime::WithParent).await
    }

    /// Starts a machine and returns when QEMU runs. On an error nothing is left running, and no file but
    /// the logs.
    pub async fn start_with(spec: &GuestSpec, lifetime: Lifetime) -> Result<Self> {
        spec.check()?;
        let qemu = binary::find()?;
        let probe = probe::probe().await?;
        let files = spec.files();
        let bridge = match &spec.network {
            Network::Bridge(name) => Some(bridge::find(name).await?),
            Network::None | Network::User => None,
        };
        prepare(&files)?;
        let started = Instant::now();
        let mut tpm = None;
        let ready = async {
            if let Some(state) = &spec.tpm {
                tpm = Some(tpm::start(&spec.name, &files, state, lifetime).await?);
            }
            let mut child = spawn(&qemu, spec, &probe, &files, lifetime).await?;
            // Until the end of the start, dropping `child` kills a QEMU that ends with this process.
            let outcome = Self::finish_start(spec, bridge.as_ref(), &mut child, &files).await;
            if outcome.is_err() {
                // A child that has ended already gives an error that says nothing new.
                let _ = child.kill().await;
            }
            outcome.map(|(process, monitor)| (child, process, monitor))
        };
        let (child, process, monitor) = match ready.await {
            Ok(ready) => ready,
            Err(error) => {
                if let Some(tpm) = tpm {
                    tpm::end(&spec.name, tpm).await;
                }
                let _ = orphan::remove_orphans(&files);
                return Err(error);
            }
        };
        let monitor = Arc::new(monitor);
        let agent = Arc::new(Agent::new(&files.agent_socket()));
        let (orders, order_queue) = mpsc::unbounded_channel();
        let state = Supervisor::spawn(supervise::Parts {
            name: spec.name.clone(),
            process: Watched::Child(child),
            tpm,
            started,
            boot: None,
            files: files.clone(),
            monitor: Arc::clone(&monitor),
            agent: Arc::clone(&agent),
            orders: order_queue,
        });
        let (name, cpus) = (spec.name.as_str().into(), spec.cpus);
        let screen = Arc::new(Mutex::new(()));
        Ok(Self { name, cpus, process, files, monitor, agent, state, orders, screen })
    }

    /// Takes over a machine that an earlier process started with [`Lifetime::Own`]. `boot` is its boot, if it is known
    /// to be up. `None`: its QEMU has ended.
    pub async fn adopt(name: &str, run_dir: &Path, cpus: u32, boot: Option<Boot>) -> Result<Option<Self>> {
        let files = RunFiles::new(run_dir);
        let Some(process) = orphan::left_process(&files) else { return Ok(None) };
        let handle = Watched::adopt(process).map_err(Error::io("watch the process of", run_dir))?;
        let Some(handle) = handle else { return Ok(None) };
        // A QEMU that ends now closes its monitor, and one that hangs does not answer: neither is worth waiting for.
        let monitor = Arc::new(Qmp::connect(&files.monitor_socket()).await?);
        // The earlier process received the event with the reason of the pause. If the disk still has no space, another
        // event follows.
        let status = monitor.execute("query-status", json!({})).await?;
        if status.get("status").and_then(serde_json::Value::as_str) == Some("io-error") {
            monitor.execute("cont", json!({})).await?;
        }
        let agent = Arc::new(Agent::new(&files.agent_socket()));
        let (orders, order_queue) = mpsc::unbounded_channel();
        let state = Supervisor::spawn(supervise::Parts {
            name: name.to_owned(),
            process: handle,
            tpm: tpm::left(&files),
            started: Instant::now(),
            boot,
            files: files.clone(),
            monitor: Arc::clone(&monitor),
            agent: Arc::clone(&agent),
            orders: order_queue,
        });
        let screen = Arc::new(Mutex::new(()));
        Ok(Some(Self { name: name.into(), cpus, process, files, monitor, agent, state, orders, screen }))
    }

    async fn finish_start(
        spec: &GuestSpec,
        bridge: Option<&Bridge>,
        child: &mut Child,
        files: &RunFiles,
    ) -> Result<(ProcessId, Qmp)> {
        let pid_file = files.pid_file();
        if let Some(process) = child.id().and_then(ProcessId::of) {
            std::fs::write(&pid_file, process.to_line())
                .map_err(Error::io("write the pid file", &pid_file))?;
            tokio::select! {
                monitor = connect(files) => match monitor {
                    Ok(monitor) => {
                        if spec.display == Display::Vnc {
                            own(&files.display_socket())?;
                        }
                        if let Some(bridge) = bridge {
                            bridge.join(spec.uuid, spec.mac).await?;
                        }
                        return Ok((process, monitor));
                    }
                    // QEMU has closed its monitor because it ends, and its log says why.
                    Err(gone @ Error::Gone(_)) => {
                        tokio::time::timeout(QUIT_TIMEOUT, child.wait()).await.map_err(|_| gone)?.ok();
                    }
                    Err(error) => return Err(error),
                },
                _ = child.wait() => {}
            }
        }
        let status = child.wait().await.map_err(Error::io("wait for the process of", &files.dir))?;
        let mut stderr = supervise::last_lines(&files.qemu_log()).join("; ");
        if spec.tpm.is_some() {
            // QEMU says only that the TPM failed.
            let _ = write!(stderr, "; swtpm: {}", tpm::last_output(files));
        }
        Err(Error::StartFailed { machine: spec.name.clone(), status: status.to_string(), stderr })
    }

    /// The machine's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process number.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Its sockets and logs. The console socket is free for a terminal.
    pub fn files(&self) -> &RunFiles {
        &self.files
    }

    /// The agent in the guest.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// QEMU's monitor.
    pub fn monitor(&self) -> &Qmp {
        &self.monitor
    }

    /// The current state.
    pub fn state(&self) -> GuestState {
        self.state.borrow().clone()
    }

    /// A receiver of the current state and of its changes.
    pub fn watch(&self) -> watch::Receiver<GuestState> {
        self.state.clone()
    }

    /// Asks QEMU for the state of the machine.
    pub async fn status(&self) -> Result<MonitorStatus> {
        let answer = self.monitor.execute("query-status", json!({})).await?;
        let running = answer.get("running").and_then(serde_json::Value::as_bool).unwrap_or(false);
        let status = answer.get("status").and_then(serde_json::Value::as_str).unwrap_or("unknown").to_owned();
        Ok(MonitorStatus { running, status })
    }

    /// Whether QEMU runs the guest with KVM.
    pub async fn has_kvm(&self) -> Result<bool> {
        let answer = self.monitor.execute("query-kvm", json!({})).await?;
        Ok(answer.get("enabled").and_then(serde_json::Value::as_bool).unwrap_or(false))
    }

    /// The machine's display as a PNG.
    pub async fn screenshot(&self) -> Result<Vec<u8>> {
        // QEMU carries out commands one after another, so an abandoned picture is complete before the next begins.
        // The thread below holds the lock, because it outlives a request that is dropped.
        let turn = Arc::clone(&self.screen).lock_owned().await;
        let path = self.files.screen_dump();
        self.monitor.execute("screendump", json!({ "filename": path.to_string_lossy() })).await?;
        let read = tokio::task::spawn_blocking(move || {
            let png = screen::read_as_png(&path);
            // The next picture replaces this file; the end of the machine removes it.
            let _ = std::fs::remove_file(&path);
            drop(turn);
            png
        });
        read.await.map_err(|error| Error::Gone(error.to_string()))?
    }

    /// Waits until the guest's system is up.
    pub async fn wait_booted(&self, timeout: Duration) -> Result<Boot> {
        let mut state = self.state.clone();
        let ready = state.wait_for(|state| state.boot.is_some() || state.exit.is_some());
        let timed_out =
            || Error::Timeout { what: format!("boot of machine '{}'", self.name), after: timeout };
        let seen = tokio::time::timeout(timeout, ready).await.map_err(|_| timed_out())?;
        let state = seen.map_err(|_| unsupervised())?;
        match (&state.exit, state.boot) {
            (Some(exit), _) => Err(Error::Gone(exit.to_string())),
            (None, Some(boot)) => Ok(boot),
            (None, None) => Err(timed_out()),
        }
    }

    /// Waits until the firmware says that it finds nothing to boot, and returns what it says. An error if the machine
    /// ends before.
    pub async fn wait_no_boot(&self) -> Result<String> {
        let mut state = self.state.clone();
        let seen = state.wait_for(|state| state.no_boot.is_some() || state.exit.is_some()).await;
        let state = seen.map_err(|_| unsupervised())?;
        match (&state.no_boot, &state.exit) {
            (Some(said), _) => Ok(said.clone()),
            (None, Some(exit)) => Err(Error::Gone(exit.to_string())),
            (None, None) => Err(unsupervised()),
        }
    }

    /// Waits until the guest leaves one processor idle for a moment. Returns `true` if `timeout` ends first.
    pub async fn was_busy(&self, timeout: Duration) -> bool {
        wait_until_idle(self.process.pid, self.cpus, timeout).await == IdleWait::TimedOut
    }

    /// Waits until QEMU has ended.
    pub async fn wait_exit(&self) -> Result<Exit> {
        let mut state = self.state.clone();
        let ended = state.wait_for(|state| state.exit.is_some()).await.map_err(|_| unsupervised())?;
        ended.exit.clone().ok_or_else(unsupervised)
    }

    /// Stops the machine: presses its power button (ACPI) every 10 s until it is off. Ends QEMU if the guest has not
    /// powered off within `grace`, and at once if `grace` is zero.
    pub async fn stop(&self, grace: Duration) -> Result<Exit> {
        if !grace.is_zero() {
            let until = Instant::now() + grace;
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                self.power_down();
                let pause = left.min(PRESS_AGAIN);
                if let Ok(exit) = tokio::time::timeout(pause, self.wait_exit()).await {
                    return exit;
                }
            }
            tracing::warn!(
                machine = &*self.name,
                grace_s = grace.as_secs(),
                "the guest did not power off in time"
            );
        }
        self.order(Order::Quit);
        match tokio::time::timeout(QUIT_TIMEOUT, self.wait_exit()).await {
            Ok(exit) => exit,
            Err(_) => self.kill().await,
        }
    }

    /// Presses the power button (ACPI) and returns at once.
    pub fn power_down(&self) {
        self.order(Order::PowerButton);
    }

    /// Ends QEMU at once.
    pub async fn kill(&self) -> Result<Exit> {
        self.order(Order::Kill);
        self.wait_exit().await
    }

    fn order(&self, order: Order) {
        // The supervisor accepts orders until it has published the exit. Callers wait for the exit in any case.
        let _ = self.orders.send(order);
    }
}

fn unsupervised() -> Error {
    Error::Gone("the runtime that watched it has ended".into())
}

/// Restricts a socket to its owner. The directory of the machines belongs to the daemon, so no other user opened it
/// before.
fn own(socket: &Path) -> Result<()> {
    std::fs::set_permissions(socket, Permissions::from_mode(0o600))
        .map_err(Error::io("restrict access to the display's socket", socket))
}

/// Makes the run directory, without what an earlier run left in it.
fn prepare(files: &RunFiles) -> Result<()> {
    std::fs::create_dir_all(&files.dir).map_err(Error::io("create the run directory", &files.dir))?;
    orphan::remove_orphans(files).map_err(Error::io("clear the run directory", &files.dir))?;
    for log in [files.console_log(), files.qemu_log()] {
        std::fs::write(&log, "").map_err(Error::io("create the log", &log))?;
        let old = console_log::old(&log);
        match std::fs::remove_file(&old) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("remove the log", &old)(error));
            }
            _ => {}
        }
    }
    Ok(())
}

async fn spawn(
    qemu: &Path,
    spec: &GuestSpec,
    probe: &Probe,
    files: &RunFiles,
    lifetime: Lifetime,
) -> Result<Child> {
    let log_path = files.qemu_log();
    let log = std::fs::File::options()
        .append(true)
        .open(&log_path)
        .map_err(Error::io("open the log", &log_path))?;
    let stdout = log.try_clone().map_err(Error::io("open the log", &log_path))?;
    let mut command = launch::command(qemu, lifetime).await;
    command
        .args(spec.arguments(probe.sandbox, probe.version))
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(log)
        // Not in the terminal's process group: Ctrl-C is for us, and we stop the machine in order.
        .process_group(0)
        .kill_on_drop(lifetime == Lifetime::WithParent);
    launch::spawn(command).await.map_err(Error::io("run", qemu))
}

/// Connects to the monitor as soon as QEMU has opened it.
async fn connect(files: &RunFiles) -> Result<Qmp> {
    let socket = files.monitor_socket();
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        match Qmp::connect(&socket).await {
            Err(Error::Io { .. }) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => return other,
        }
    }
}
