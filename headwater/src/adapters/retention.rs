//! Converts retention roots between the service and the store, and names the daemon that owns them. A retention root is a record in the
//! store that keeps a version from being removed, because a machine, a catalog or a pin of this daemon needs it. The service decides
//! which roots there are.

use headwater_service::backend::{BackendError, RetentionPurpose, RetentionRoot};
use headwater_store::retention::{ANY_VERSION, RetentionPurpose as StorePurpose};

use crate::adapters::images::store_failed;

/// The name of a daemon, for others that share its store.
#[derive(Clone, Debug)]
pub struct DaemonName {
    /// Its identity, which is unique and survives restarts.
    pub id: String,
    /// Where it is, for people.
    pub place: String,
}

impl DaemonName {
    /// The daemon on this host with this identity and data directory.
    pub fn here(id: String, data_dir: &std::path::Path) -> Self {
        let system = rustix::system::uname();
        let host = system.nodename().to_string_lossy();
        Self { id, place: format!("of host {host} ({})", data_dir.display()) }
    }

    /// Converts a root of this daemon for the store.
    pub fn to_store(&self, root: &RetentionRoot) -> Result<headwater_store::RetentionRoot, BackendError> {
        Ok(headwater_store::RetentionRoot {
            image: root.image.parse().map_err(store_failed)?,
            manifest: match &root.hash {
                Some(hash) => hash.parse().map_err(store_failed)?,
                None => ANY_VERSION,
            },
            purpose: match root.purpose {
                RetentionPurpose::Disk => StorePurpose::Disk,
                RetentionPurpose::MaintenanceSession => StorePurpose::MaintenanceSession,
                RetentionPurpose::Pin => StorePurpose::Pin,
                RetentionPurpose::Follow => StorePurpose::Follow,
            },
            daemon: self.id.clone(),
            id: root.id.clone(),
            holder: format!("{} {}", root.holder, self.place),
        })
    }
}

/// Converts a root from the store.
pub fn from_store(root: headwater_store::RetentionRoot) -> RetentionRoot {
    RetentionRoot {
        purpose: match root.purpose {
            StorePurpose::Disk => RetentionPurpose::Disk,
            StorePurpose::MaintenanceSession => RetentionPurpose::MaintenanceSession,
            StorePurpose::Pin => RetentionPurpose::Pin,
            StorePurpose::Follow => RetentionPurpose::Follow,
        },
        id: root.id,
        image: root.image.to_string(),
        hash: (root.manifest != ANY_VERSION).then(|| root.manifest.to_string()),
        holder: root.holder,
    }
}
