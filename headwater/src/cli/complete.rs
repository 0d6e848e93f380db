//! Shell completion of names: machines, images and catalogs of the daemon, and sizes of virtual machines.
//!
//! The shell runs this program with `COMPLETE` in its environment each time the user presses the completion key. So
//! the daemon gets a short timeout; if it does not answer, nothing is offered.

use std::future::Future;
use std::time::Duration;

use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};

use crate::client::Client;
use crate::contexts::Contexts;

/// The timeout of the daemon's answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Names of machines.
pub fn machines() -> ArgValueCandidates {
    ArgValueCandidates::new(|| offered(async |client| Ok(machine_names(&client).await?)))
}

/// Names of images.
pub fn images() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        offered(async |client| {
            Ok(client.images().await?.images.into_iter().map(|image| image.name).collect())
        })
    })
}

/// Names of catalogs.
pub fn catalogs() -> ArgValueCandidates {
    ArgValueCandidates::new(|| offered(async |client| catalog_names(&client).await))
}

/// Names of connections.
pub fn connections() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        offered(async |client| {
            Ok(client.connections().await?.connections.into_iter().map(|it| it.name).collect())
        })
    })
}

/// Names of machines and catalogs.
pub fn machines_and_catalogs() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        offered(async |client| {
            let mut names = machine_names(&client).await?;
            names.extend(catalog_names(&client).await?);
            Ok(names)
        })
    })
}

/// Names of the servers that the user has logged in to.
pub fn contexts() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let contexts = Contexts::load().unwrap_or_default();
        contexts.contexts.into_keys().map(CompletionCandidate::new).collect()
    })
}

/// Names of sizes in the built-in table.
pub fn sizes() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let sizes = headwater_sizes::SizeTable::built_in().sizes;
        sizes.into_iter().map(|size| CompletionCandidate::new(size.name)).collect()
    })
}

async fn machine_names(client: &Client) -> anyhow::Result<Vec<String>> {
    Ok(client.machines().await?.machines.into_iter().map(|machine| machine.name).collect())
}

async fn catalog_names(client: &Client) -> anyhow::Result<Vec<String>> {
    Ok(client.catalogs().await?.catalogs.into_iter().map(|catalog| catalog.name).collect())
}

fn offered<F>(names: impl FnOnce(Client) -> F) -> Vec<CompletionCandidate>
where
    F: Future<Output = anyhow::Result<Vec<String>>>,
{
    let asked = || -> anyhow::Result<Vec<String>> {
        let data_dir = std::env::var_os("HEADWATER_DATA_DIR").map(Into::into);
        let client = Client::choose(std::env::var("HEADWATER_CONTEXT").ok().as_deref(), data_dir)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async { tokio::time::timeout(TIMEOUT, names(client)).await? })
    };
    // Errors are ignored: a user who presses the completion key has no use for them.
    asked().unwrap_or_default().into_iter().map(CompletionCandidate::new).collect()
}
