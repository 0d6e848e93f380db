//! `headwater serve`: the daemon.

use sd_notify::NotifyState;

use crate::cli::ServeArgs;
use crate::daemon::{Options, starting};
use crate::data_dir::DataDir;
use crate::logging;
use crate::signals::EndSignals;
use crate::verification::Scrub;

/// Serves until SIGTERM or SIGINT; a second one ends machines that take their time.
pub async fn run(data_dir: DataDir, args: ServeArgs) -> anyhow::Result<u8> {
    logging::to_stderr(&args.log, args.log_format)?;
    let mut signals = EndSignals::catch()?;
    let scrub = args.scrub.map(|rate| Scrub {
        rate: Some(rate),
        repair_from: args.repair_from,
        credentials: args.credentials.clone(),
    });
    let options = Options {
        listen: args.listen,
        store: args.store,
        new_store: args.new_store,
        history_counts: true,
        offer: args.store_listen.map(|listen| args.offer.options(listen)),
        nbd: args.nbd.offer()?,
        scrub,
        caches: args.caches,
        stream: args.stream,
        credentials: args.credentials,
    };
    let daemon = starting::start(data_dir, options, &mut signals, |text| tracing::info!("{text}")).await?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        pid = std::process::id(),
        socket = %daemon.data_dir().socket().display(),
        tcp = daemon.tcp().map(tracing::field::display),
        store = daemon.offer_url(),
        nbd = daemon.nbd_uri(),
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
    daemon.stop().await;
    tracing::info!("stopped");
    Ok(0)
}

fn tell(state: NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot tell the service manager: {e}");
    }
}
