//! Catalogs as clients see them, and the errors of operations on them.

use futures_util::future::join_all;
use std::collections::HashMap;

use headwater_api::{CacheSettings, Catalog, OnHostLoss, ProblemKind};
use headwater_db::{CatalogRecord, DbError};

use crate::Service;
use crate::answer::{Explain, problem};

/// A failed operation on a catalog.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CatalogError {
    #[error("there is no catalog '{0}'")]
    Unknown(String),
    #[error("cannot remove catalog '{catalog}': it has machines: {}", .machines.join(", "))]
    InUse { catalog: String, machines: Vec<String> },
    #[error("cannot set image '{image}' as the image of catalog '{catalog}': it is pinned to '{pin}'")]
    Pinned { catalog: String, pin: String, image: String },
    #[error("cannot pin catalog '{catalog}' to '{version}': the catalog boots image '{image}'")]
    OtherImage { catalog: String, version: String, image: String },
    #[error("cannot change catalog '{catalog}': task {task} changes its machines")]
    Busy { catalog: String, task: i64 },
    #[error(
        "cannot have machines of catalog '{0}' start on another host: they have persistent disks, which are on their host"
    )]
    KeepsDisks(String),
    #[error(transparent)]
    Db(#[from] DbError),
}

/// Fails if machines with persistent disks are to restart on another host.
pub(crate) fn check_on_host_loss(
    catalog: &str,
    on_host_loss: OnHostLoss,
    cache: &CacheSettings,
) -> Result<(), CatalogError> {
    match on_host_loss == OnHostLoss::Restart && cache.persistent {
        true => Err(CatalogError::KeepsDisks(catalog.to_owned())),
        false => Ok(()),
    }
}

impl Explain for CatalogError {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Unknown(_) => ProblemKind::NotFound,
            Self::InUse { .. } | Self::Pinned { .. } | Self::Busy { .. } => ProblemKind::Conflict,
            Self::OtherImage { .. } | Self::KeepsDisks(_) => ProblemKind::Invalid,
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Unknown(_) => Some("'headwater catalog list' shows all catalogs".to_owned()),
            Self::InUse { .. } => Some("remove its machines first".to_owned()),
            Self::KeepsDisks(_) => Some("use a catalog without --persistent".to_owned()),
            Self::Pinned { catalog, .. } => Some(format!("'headwater image unpin {catalog}' first")),
            Self::OtherImage { image, .. } => {
                Some(format!("'headwater image versions {image}' shows the possible versions"))
            }
            Self::Busy { task, .. } => Some(format!("run 'headwater task wait {task}', or cancel the task")),
            Self::Db(e) => e.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(e) => e.retry_after_s(),
            _ => None,
        }
    }
}

impl Service {
    /// The record of a catalog; an error if it does not exist.
    pub(crate) async fn catalog(&self, name: &str) -> Result<CatalogRecord, CatalogError> {
        let found = self.db().read().await?.catalogs().by_name(name).await?;
        found.ok_or_else(|| CatalogError::Unknown(name.to_owned()))
    }

    /// Fails if a task works on the catalog.
    pub(crate) async fn is_not_busy(&self, catalog: &str) -> Result<(), CatalogError> {
        match self.task_that_changes(catalog).await? {
            Some(task) => Err(CatalogError::Busy { catalog: catalog.to_owned(), task }),
            None => Ok(()),
        }
    }

    /// Catalogs as clients see them.
    pub(crate) async fn catalog_views(&self, records: Vec<CatalogRecord>) -> Result<Vec<Catalog>, DbError> {
        let mut repo = self.db().read().await?;
        let machines = repo.machines().list().await?;
        let rotations: HashMap<String, u64> = repo.keys().rotate_after().await?.into_iter().collect();
        drop(repo);
        let reference = |record: &CatalogRecord| record.pin.as_ref().unwrap_or(&record.image).clone();
        let next: Vec<_> = records.iter().map(|record| self.version_to_show(&reference(record))).collect();
        let machines = self.views(machines).await?;
        let mut next = join_all(next).await.into_iter();
        let mut views = Vec::new();
        for record in records {
            let theirs = || machines.iter().filter(|it| it.catalog.as_ref() == Some(&record.name));
            let next = next.next().flatten();
            views.push(Catalog {
                next_version: next.map(|version| format!("{}@{}", version.image, version.number)),
                rotate_after_s: rotations.get(&record.name).copied().unwrap_or(0),
                machines: theirs().map(|machine| machine.name.clone()).collect(),
                scheme_old: theirs()
                    .filter(|machine| machine.scheme_old)
                    .map(|machine| machine.name.clone())
                    .collect(),
                old: theirs().filter(|machine| machine.old).map(|machine| machine.name.clone()).collect(),
                ..alone(record)
            });
        }
        Ok(views)
    }

    /// One catalog as clients see it.
    pub(crate) async fn catalog_view(&self, record: CatalogRecord) -> Result<Catalog, CatalogError> {
        let name = record.name.clone();
        self.catalog_views(vec![record]).await?.pop().ok_or(CatalogError::Unknown(name))
    }

    /// The same for a catalog that was just changed. If it cannot be read completely this is not an error, because the
    /// client must not repeat the change.
    pub(crate) async fn changed_catalog_view(&self, record: CatalogRecord) -> Catalog {
        self.catalog_view(record.clone()).await.unwrap_or_else(|error| {
            tracing::warn!(
                catalog = record.name,
                "cannot list the machines of a catalog: {}",
                problem(&error)
            );
            alone(record)
        })
    }
}

/// A catalog without its machines and what they boot.
fn alone(record: CatalogRecord) -> Catalog {
    Catalog {
        next_version: None,
        machines: Vec::new(),
        old: Vec::new(),
        scheme: record.scheme,
        scheme_old: Vec::new(),
        name: record.name,
        image: record.image,
        pin: record.pin,
        cache: record.cache,
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        transport: record.transport,
        firmware: record.platform.firmware,
        secure_boot: record.platform.secure_boot,
        tpm: record.platform.tpm,
        display: record.platform.display,
        network: record.platform.network,
        scratch_bytes: record.platform.scratch_bytes,
        user_data: record.user_data,
        name_rule: record.name_rule,
        first_number: record.first_number,
        keep_ready: record.keep_ready,
        ready_hours: record.ready_hours,
        stop_idle_s: record.stop_idle_s,
        seal_removes: record.seal_removes,
        on_host_loss: record.on_host_loss,
        rotate_after_s: 0,
        cloud: record.cloud,
        created_at_ms: record.created_at_ms,
    }
}
