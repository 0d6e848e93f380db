//! `headwater serve`: the daemon.

use std::net::SocketAddr;
use std::time::Duration;

use sd_notify::NotifyState;

use crate::cli::ServeArgs;
use crate::cmd::store;
use crate::daemon::{Daemon, Options, boot, starting};
use crate::data_dir::DataDir;
use crate::failure::invalid;
use crate::logging;
use crate::signals::EndSignals;
use crate::stores;
use crate::verification::Scrub;

/// How much time the service manager is asked for at a time, while a start or a stop takes longer.
const MORE_TIME: Duration = Duration::from_secs(60);

/// How often it is asked while the daemon stops: often enough that one of them may be late.
const STOP_TOLD_EVERY: Duration = Duration::from_secs(20);

/// Serves until SIGTERM or SIGINT; a second one ends machines that take their time.
pub async fn run(data_dir: DataDir, args: ServeArgs) -> anyhow::Result<u8> {
    logging::to_stderr(&args.log, args.log_format)?;
    check_offer(&args)?;
    if args.boot.boot.is_some() {
        boot::check(args.store_listen, args.offer.tls_cert.is_some())?;
    }
    let is_for_the_check = |store: &&String| args.scrub.is_none() && !stores::is_server(store);
    if let Some(store) = args.repair_from.iter().find(is_for_the_check) {
        return Err(invalid(format!("--repair-from {store} is about what a check finds: give --scrub too")));
    }
    let mut signals = EndSignals::catch()?;
    let scrub = args.scrub.map(|rate| Scrub {
        rate: Some(rate),
        repair_from: args.repair_from.clone(),
        credentials: args.credentials.clone(),
    });
    let options = Options {
        listen: args.listen,
        console: args.console,
        tls: args.offer.tls(),
        store: args.store,
        new_store: args.new_store,
        history_counts: true,
        offer: args.store_listen.map(|listen| args.offer.options(listen)),
        boot: args.boot.offer(&args.offer),
        nbd: args.nbd.offer()?,
        repair_from: args.repair_from,
        scrub,
        scrub_pause: args.scrub_pause.map(Duration::from_secs),
        caches: args.caches,
        stream: args.stream,
        credentials: args.credentials,
        resume: args.resume,
        seal_removes: args.seal_removes,
    };
    let say = |text: &str| {
        tracing::info!("{text}");
        // A store or a host may answer later than a start may take.
        tell_to_wait();
    };
    let warning = options.offer.as_ref().filter(|_| options.boot.is_none()).and_then(store::offered_to_all);
    let daemon = starting::start(data_dir, options, &mut signals, say).await?;
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
        "ready"
    );
    tell(NotifyState::Ready);
    let signal = signals.next().await;
    tracing::info!(signal, "stopping: requests in flight are finished, then machines are stopped");
    tell(NotifyState::Stopping);
    let hurry = daemon.hurry();
    tokio::spawn(async move {
        signals.next().await;
        tracing::warn!("told twice: machines are ended at once");
        hurry.await;
    });
    stop(daemon).await;
    tracing::info!("stopped");
    Ok(0)
}

/// Refuses options that change nothing.
fn check_offer(args: &ServeArgs) -> anyhow::Result<()> {
    if args.store_listen.is_some() {
        return Ok(());
    }
    if args.offer.token_file.is_some() {
        // It might be taken for a protection of the API.
        return Err(invalid("--token-file is about the store that others read: give --store-listen too"));
    }
    let is_public = |address: &SocketAddr| !address.ip().is_loopback();
    if args.offer.tls_cert.is_some() && !args.listen.iter().chain(&args.console).any(is_public) {
        return Err(invalid(
            "--tls-cert is for addresses that others reach: give --store-listen, or such an address to --listen or --console",
        ));
    }
    Ok(())
}

/// Stops, however long that takes: killed before a persistent disk's last commit, the daemon would lose writes that were answered.
async fn stop(daemon: Daemon) {
    let stopping = daemon.stop();
    tokio::pin!(stopping);
    let mut late = tokio::time::interval(STOP_TOLD_EVERY);
    loop {
        tokio::select! {
            // In this order, so that each stop asks for time before anything else, also one that turns out to be short.
            biased;
            _ = late.tick() => tell_to_wait(),
            () = &mut stopping => return,
        }
    }
}

fn tell_to_wait() {
    tell(NotifyState::ExtendTimeoutUsec(u32::try_from(MORE_TIME.as_micros()).unwrap_or(u32::MAX)));
}

fn tell(state: NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot tell the service manager: {e}");
    }
}
