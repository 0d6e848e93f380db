//! Which versions this daemon needs, as its store is told.

use headwater_service::backend::{BackendError, Hold, HoldPurpose};
use headwater_store::hold::{ANY_VERSION, Purpose};

use crate::adapters::images::store_failed;

/// A daemon, as others that share its store know it.
#[derive(Clone, Debug)]
pub struct DaemonName {
    /// The same after a restart, and that of no other.
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

    /// A need of its own in the store's words.
    pub fn told(&self, hold: &Hold) -> Result<headwater_store::Hold, BackendError> {
        Ok(headwater_store::Hold {
            image: hold.image.parse().map_err(store_failed)?,
            manifest: match &hold.hash {
                Some(hash) => hash.parse().map_err(store_failed)?,
                None => ANY_VERSION,
            },
            purpose: match hold.purpose {
                HoldPurpose::Disk => Purpose::Disk,
                HoldPurpose::Edit => Purpose::Edit,
                HoldPurpose::Pin => Purpose::Pin,
                HoldPurpose::Follow => Purpose::Follow,
            },
            daemon: self.id.clone(),
            id: hold.id.clone(),
            holder: format!("{} {}", hold.holder, self.place),
        })
    }
}

/// What the store holds, in the service's words.
pub fn heard(hold: headwater_store::Hold) -> Hold {
    Hold {
        purpose: match hold.purpose {
            Purpose::Disk => HoldPurpose::Disk,
            Purpose::Edit => HoldPurpose::Edit,
            Purpose::Pin => HoldPurpose::Pin,
            Purpose::Follow => HoldPurpose::Follow,
        },
        id: hold.id,
        image: hold.image.to_string(),
        hash: (hold.manifest != ANY_VERSION).then(|| hold.manifest.to_string()),
        holder: hold.holder,
    }
}
