//! The file of `headwater export --fuse`, through which programs of this host read and write the disk. The export
//! ends when somebody unmounts it.

use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use headwater_block::Device;
use headwater_fuse::{Limits, MountError, Options, Server};
use tokio::sync::Notify;

use crate::cli::FuseArgs;

/// A mounted file.
pub struct Mounted {
    server: Server,
    unmounted: Arc<Notify>,
}

impl Mounted {
    /// The path of the file.
    pub fn path(&self) -> &std::path::Path {
        self.server.path()
    }
}

impl FuseArgs {
    /// Mounts `device` if that was requested.
    pub fn serve(&self, source: &str, device: Arc<dyn Device>) -> anyhow::Result<Option<Mounted>> {
        let Some(dir) = &self.fuse else { return Ok(None) };
        let unmounted = Arc::new(Notify::new());
        let told = Arc::clone(&unmounted);
        let options = Options {
            name: self.fuse_name.clone(),
            allow_other: self.fuse_allow_other,
            clock: SystemTime::now,
            on_unmounted: Some(Box::new(move || told.notify_one())),
            limits: Limits::default(),
        };
        let server = Server::mount(dir, device, options).map_err(problem);
        let server = server.with_context(|| format!("cannot offer '{source}' as a file"))?;
        Ok(Some(Mounted { server, unmounted }))
    }
}

/// The problem with the kind that determines the exit code.
fn problem(error: MountError) -> anyhow::Error {
    let kind = match &error {
        MountError::NoDirectory { .. } => ProblemKind::NotFound,
        MountError::InUse { .. } | MountError::ForeignStale { .. } => ProblemKind::Conflict,
        MountError::Name { .. } | MountError::NotADirectory { .. } | MountError::NotEmpty { .. } => {
            ProblemKind::Invalid
        }
        MountError::NoFuse { .. } | MountError::Unprivileged { .. } | MountError::System { .. } => {
            return error.into();
        }
    };
    Problem::new(kind, error.to_string()).into()
}

/// Waits until somebody else unmounts the file; forever if there is none.
pub async fn unmounted(mounted: Option<&Mounted>) {
    match mounted {
        Some(mounted) => mounted.unmounted.notified().await,
        None => std::future::pending().await,
    }
}
