//! `headwater serve`: runs the daemon ([`crate::daemon`]) until a signal ends it, and tells the service manager when
//! it is ready, reloads or needs more time.

use std::process::Stdio;
use std::time::Duration;

use headwater_api::{Problem, ProblemKind};
use sd_notify::NotifyState;

use crate::adapters::wake::Waker;
use crate::cli::ServeArgs;
use crate::cmd::store;
use crate::config::Effective;
use crate::daemon::{Daemon, DisksIn, Options, starting};
use crate::data_dir::DataDir;
use crate::logging;
use crate::oidc::Provider;
use crate::signals::{EndSignals, ReloadSignal, is_hang_up_ignored};
use crate::verification::Scrub;

/// The time by which a timeout of the service manager is extended at a time, while a start or a stop takes longer.
const MORE_TIME: Duration = Duration::from_secs(60);

/// The states of a service manager (systemd) while the host stays up.
const UP: [&str; 5] = ["running", "degraded", "starting", "initializing", "maintenance"];

/// Timeout of the service manager's answer whether the host shuts down.
const SYSTEMCTL_TIMEOUT: Duration = Duration::from_secs(5);

/// The unit of the disk process, as in the package.
const DISKS_UNIT: &str = "headwater-disks.service";

/// How often the timeout is extended while the daemon stops, with reserve for a late extension.
const EXTEND_INTERVAL: Duration = Duration::from_secs(20);

/// Serves until SIGTERM or SIGINT. A second signal ends machines at once.
pub async fn run(data_dir: DataDir, args: ServeArgs) -> anyhow::Result<u8> {
    logging::to_stderr(&args.log, args.log_format)?;
    args.check()?;
    let has_file = args.config.is_some();
    let mut reload = ReloadSignal::catch(has_file)?;
    let mut signals = EndSignals::catch_with(!has_file && !is_hang_up_ignored())?;
    let settings = if has_file { Some(Effective::of(std::env::args_os().collect())?) } else { None };
    let (scrub, scrub_pause) = scrub(&args);
    let options = Options {
        disks: DisksIn::OwnProcess { filter: args.log.clone(), format: args.log_format },
        database: args.database.shared(&args.sharing)?,
        secrets_key: args.database.secrets_key.clone(),
        keep_machines: args.keep_machines,
        group_access: args.group_access,
        listen: args.listen,
        console: args.console,
        people: Provider::of(args.oidc),
        nodes: args.nodes.map(|address| (address, Duration::from_secs(args.node_lease))),
        tls: args.offer.tls(),
        store: args.store,
        new_store: args.new_store,
        history_counts: true,
        offer: args.store_listen.map(|listen| args.offer.options(listen)),
        waker: Waker::new(args.boot.wake_command.clone(), args.boot.boot.as_deref()),
        boot: args.boot.offer(&args.offer),
        nbd: args.nbd.offer()?,
        alarm_channels: args.alarms.channels()?,
        repair_from: args.repair_from,
        scrub,
        scrub_pause,
        caches: args.caches,
        stream: args.stream,
        credentials: args.credentials,
        recordings: None,
        resume: args.resume,
        seal_removes: args.seal_removes,
    };
    let say = |text: &str| {
        tracing::info!("{text}");
        // A store or a host may need longer than the service manager's timeout of a start.
        extend_timeout();
    };
    let warning = options.offer.as_ref().filter(|_| options.boot.is_none()).and_then(store::offered_to_all);
    if args.sharing.standby {
        // It may stand by for months, which is not a slow start.
        notify(NotifyState::Ready);
    }
    let mut daemon = starting::start(data_dir, options, &mut signals, say).await?;
    if let Some(warning) = warning {
        tracing::warn!("{warning}");
    }
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        pid = std::process::id(),
        socket = %daemon.data_dir().socket().display(),
        api = daemon.reachable().api.as_deref(),
        console = daemon.reachable().console.as_deref(),
        fingerprint = daemon.reachable().fingerprint.as_deref(),
        store = daemon.offer_url(),
        nbd = daemon.nbd_uri(),
        boot = daemon.boot_url(),
        nodes = daemon.nodes_url(),
        "ready"
    );
    notify(NotifyState::Ready);
    let mut reloading = settings.map(Reloading);
    let (disks_ended, database_lost) = (daemon.disks_ended(), daemon.database_lost());
    tokio::pin!(disks_ended, database_lost);
    let why = loop {
        tokio::select! {
            signal = signals.next() => break Why::Signal(signal),
            () = &mut disks_ended => break Why::DisksEnded,
            why = &mut database_lost => break Why::DatabaseLost(why),
            () = reload.next() => if let Some(reloading) = &mut reloading {
                reloading.reload(&mut daemon);
            },
        }
    };
    prepare_end(&mut daemon, &why).await;
    notify(NotifyState::Stopping);
    let (hurry, keeps_machines) = (daemon.hurry(), daemon.keeps_machines());
    tokio::spawn(async move {
        signals.next().await;
        if keeps_machines {
            tracing::warn!("second signal: machines stay on; requests in flight are still finished");
        } else {
            tracing::warn!("second signal: machines are ended at once");
        }
        hurry.await;
    });
    stop(daemon).await;
    tracing::info!("stopped");
    match why {
        Why::Signal(_) => Ok(0),
        Why::DisksEnded => Err(disks_ended_error().into()),
        Why::DatabaseLost(why) => Err(database_lost_error(why).into()),
    }
}

/// Decides whether machines are stopped or stay on.
async fn prepare_end(daemon: &mut Daemon, why: &Why) {
    match &why {
        // Ctrl-C ends everything.
        Why::Signal(signal) if daemon.keeps_machines() && *signal == "SIGTERM" && !disks_go_down().await => {
            tracing::info!(signal, "stopping: requests in flight are finished, and machines stay on");
        }
        Why::Signal(signal) => {
            daemon.keep_no_machines();
            tracing::info!(signal, "stopping: requests in flight are finished, then machines are stopped");
        }
        Why::DatabaseLost(why) => {
            // Other controllers do not touch the machines of this host, and its next daemon takes them over.
            daemon.keep_all_machines();
            tracing::error!("this daemon ends, because another controller may have the database: {why}");
        }
        Why::DisksEnded => {
            daemon.keep_no_machines();
            tracing::error!("the disk process has ended, and with it the disks: all machines are ended");
            // Guests wait for disks that never return, so they cannot shut down.
            tokio::spawn(daemon.hurry());
        }
    }
}

/// Why a daemon ends.
enum Why {
    /// A signal, with its name.
    Signal(&'static str),
    /// Its disk process has ended.
    DisksEnded,
    /// Another controller may have its database.
    DatabaseLost(String),
}

fn database_lost_error(why: String) -> Problem {
    let mut problem = Problem::new(ProblemKind::Conflict, "another controller may have the database");
    problem.causes.push(why);
    problem.advise(
        "machines of this host stay on; start the daemon again with --standby, and it waits until the database is free",
    )
}

/// The error if the disk process has ended.
fn disks_ended_error() -> Problem {
    let message = "the process that had the disks of all machines has ended, so they were ended too";
    let advice = "its log has the reason; start the daemon again with --resume to start them";
    Problem::new(ProblemKind::Failed, message).advise(advice)
}

/// Whether the disks of machines are about to end too, because the host shuts down or the unit of the disk process is
/// being stopped. Then machines must not stay on. Only the service manager knows.
async fn disks_go_down() -> bool {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return false;
    }
    let state = systemctl(&["is-system-running"]).await;
    // A service manager that does not answer is shutting down itself.
    let is_up = state.is_some_and(|state| UP.iter().any(|up| state.trim() == *up));
    let jobs = async { systemctl(&["list-jobs", "--no-legend", DISKS_UNIT]).await.unwrap_or_default() };
    !is_up || ends_disks(&jobs.await)
}

/// Whether a job stops the disk process, in lines "NUMBER UNIT TYPE STATE".
fn ends_disks(jobs: &str) -> bool {
    jobs.lines().any(|job| {
        let mut words = job.split_whitespace().skip(1);
        words.next() == Some(DISKS_UNIT) && matches!(words.next(), Some("stop" | "restart"))
    })
}

/// The output of systemctl. Its exit code has another meaning, and is ignored.
async fn systemctl(words: &[&str]) -> Option<String> {
    let mut command = tokio::process::Command::new("systemctl");
    command.args(words).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(SYSTEMCTL_TIMEOUT, command.output()).await.ok()?.ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The background verification from the arguments, and its pause.
fn scrub(args: &ServeArgs) -> (Option<Scrub>, Option<Duration>) {
    let scrub = args.scrub.map(|rate| Scrub {
        rate: Some(rate),
        repair_from: args.repair_from.clone(),
        credentials: args.credentials.clone(),
    });
    (scrub, args.scrub_pause.map(Duration::from_secs))
}

/// Keys whose changes take effect when the file is reloaded. All others need a restart.
const RELOADED: [&str; 3] = ["log", "scrub", "scrub-pause"];

/// The settings in effect, and those that wait for a restart.
struct Reloading(Effective);

impl Reloading {
    /// Reloads the configuration file. If it has an error, nothing changes.
    fn reload(&mut self, daemon: &mut Daemon) {
        let later = match Effective::of(std::env::args_os().collect()) {
            Ok(later) => later,
            Err(e) => {
                return tracing::error!(
                    "cannot reload the configuration, so no setting changes: {}",
                    crate::failure::one_line(&e)
                );
            }
        };
        let changed = self.0.changed(&later);
        let (now, later_keys): (Vec<String>, Vec<String>) =
            changed.into_iter().partition(|key| RELOADED.contains(&key.as_str()));
        if now.iter().any(|key| key == "log")
            && let Err(e) = logging::set_filter(&later.args.log)
        {
            tracing::error!("cannot change what is logged: {e:#}");
        }
        if now.iter().any(|key| key != "log") {
            // A change of --repair-from waits for a restart.
            let (mut scrub, pause) = scrub(&later.args);
            if let Some(scrub) = &mut scrub {
                scrub.repair_from.clone_from(&self.0.args.repair_from);
                scrub.credentials = self.0.args.credentials.clone();
            }
            if let Err(e) = daemon.set_scrub(scrub, pause) {
                tracing::error!("cannot start the background verification: {e:#}");
            }
        }
        let repair_from = std::mem::take(&mut self.0.args.repair_from);
        let credentials = std::mem::take(&mut self.0.args.credentials);
        self.0 = later;
        (self.0.args.repair_from, self.0.args.credentials) = (repair_from, credentials);
        if !later_keys.is_empty() {
            tracing::warn!(keys = later_keys.join(", "), "changed settings take effect after a restart");
        }
        tracing::info!(changed = now.join(", "), "reloaded the configuration");
    }
}

/// Stops without a time limit: if the daemon was killed before the last commit of a persistent disk, answered writes
/// would be lost.
async fn stop(daemon: Daemon) {
    let stopping = daemon.stop();
    tokio::pin!(stopping);
    let mut late = tokio::time::interval(EXTEND_INTERVAL);
    loop {
        tokio::select! {
            // Biased, so that the timeout is extended first, even for a short stop.
            biased;
            _ = late.tick() => extend_timeout(),
            () = &mut stopping => return,
        }
    }
}

fn extend_timeout() {
    notify(NotifyState::ExtendTimeoutUsec(u32::try_from(MORE_TIME.as_micros()).unwrap_or(u32::MAX)));
}

fn notify(state: NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot notify the service manager: {e}");
    }
}
