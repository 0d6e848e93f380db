//! Several hosts: a controller stores what should run where, and a node on each host runs the machines of that host.
//!
//! ```text
//!   node                                                   controller
//!    | --- TLS with the certificates of both ---------------> |   serve --nodes
//!    | <-- ToNode::Ready -----------------------------------  |
//!    | --- FromNode::Hello -------------------------------->  |   (lines of JSON: protocol.rs)
//!    | <-- ToNode::Welcome {generation} --------------------  |
//!    | <== HTTP/2 requests: the API of the node ============  |   the roles are turned here
//!    | <== HTTP/2 requests to the API of the node ==========  |   from here on the controller is the client
//!
//! A node is a complete daemon: its database has the machines of its host, and it starts and watches them by itself. The
//! controller uses the same API as other clients, over the connection that the node has opened. Running machines do not
//! depend on that connection.
//!
//! # Guarantees
//! - The node decides the state of a machine. The controller stores a copy, which it takes from the node's history and
//!   list.
//! - A node refuses requests of an older connection than its newest one.
//! - A host has one connection: a second node with the same identity is refused while the first one is connected.
//! - A controller changes no machine whose node is not connected. The exception are machines of a lost host, which it gives
//!   to other hosts if their catalog says so; no two hosts run one machine ([`lease`]).
//!
//! A host is *lost* if the controller has not heard its node for a time; a machine is *fenced* if its node ends it when the
//! node's *lease* is over, so that another host can start it.
//!
//! # Not here
//! Sockets, TLS and certificates: they are in `headwater/src/fleet`. Persistent disks are never moved to another host.
//!
//! Start reading at [`controller`].

pub mod controller;
pub mod fence;
pub(crate) mod follow;
pub(crate) mod forward;
pub(crate) mod lease;
#[cfg(test)]
mod lease_model;
pub(crate) mod link;
mod loss;
pub(crate) mod moving;
pub(crate) mod node;
pub(crate) mod placement;
pub mod protocol;
mod remote;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use headwater_api::{BootFrom, HostState};
use headwater_db::{DbError, HostRecord, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::fleet::controller::Authority;
use crate::fleet::fence::Fence;
use crate::fleet::link::Link;
use crate::fleet::loss::Leases;

pub use node::Membership;
pub(crate) use placement::free_memory;

/// The interval of keep-alive pings from each side, and their timeout.
pub(crate) const BEAT: Duration = Duration::from_secs(5);
pub(crate) const BEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// A host is lost if nothing was heard from its node for this time.
pub(crate) const LOST_AFTER: Duration = Duration::from_secs(15);

/// The pause before a retry.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The host on which a daemon runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnHost {
    /// Its identity. A different one in the database has priority.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
    /// Whether this daemon is the only user of its database. The host without a certificate in the database is then this
    /// one, even if its identity changed.
    pub owns_database: bool,
}

/// The state in memory that concerns other hosts: of a controller, of a node, or empty for a daemon that is neither.
#[derive(Default)]
pub(crate) struct FleetState {
    own: OnceLock<Uuid>,
    /// The certificate authority, if this daemon accepts nodes.
    authority: OnceLock<Arc<dyn Authority>>,
    /// The fleet of which this daemon is a node, if it is one.
    membership: OnceLock<Membership>,
    /// The hosts whose connections exist or are being made, with the address of each.
    connecting: Mutex<HashMap<Uuid, String>>,
    links: Mutex<HashMap<Uuid, Arc<Link>>>,
    /// The leases of nodes, if this daemon accepts nodes.
    leases: Leases,
    /// Its own lease, if this daemon is a node.
    fence: Fence,
}

impl FleetState {
    pub(crate) fn connecting(&self) -> MutexGuard<'_, HashMap<Uuid, String>> {
        self.connecting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn links(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service {
    /// The identity of the host of this daemon.
    pub(crate) fn own_host(&self) -> Uuid {
        *self.fleet().own.get_or_init(|| self.host_parts().id)
    }

    /// Whether a machine is run by this daemon.
    pub(crate) fn is_own(&self, record: &MachineRecord) -> bool {
        // A machine that boots from the network runs on no host, and a machine in a cloud has a host that does not exist.
        record.boot == BootFrom::Network || record.host == self.own_host()
    }

    /// The machines that this daemon runs, by name.
    pub(crate) async fn own_machines(&self) -> Result<Vec<MachineRecord>, DbError> {
        self.db().read().await?.machines().of_host(self.own_host()).await
    }

    /// Writes the host of this daemon to the database. Runs before everything else.
    pub(crate) async fn note_own_host(&self) -> Result<(), DbError> {
        let host = self.host_parts().clone();
        let mut repo = self.db().write().await?;
        let known = repo.hosts().list().await?;
        let found = known.iter().find(|it| it.id == host.id).or_else(|| former_self(&host, &known));
        let now_ms = self.now_ms();
        let id = match found {
            Some(found) => {
                let (memory_bytes, cpus) = (host.memory_bytes, host.cpus);
                let (state, seen_at_ms) = (HostState::Up, Some(now_ms));
                let same = HostRecord { seen_at_ms: found.seen_at_ms, ..found.clone() };
                let now = HostRecord { memory_bytes, cpus, state, ..same };
                if now != *found {
                    repo.hosts().update(&HostRecord { seen_at_ms, ..now }).await?;
                    repo.save().await?;
                }
                found.id
            }
            None => {
                let name = free_name(&host.name, &known);
                let record = HostRecord {
                    id: host.id,
                    name,
                    fingerprint: None,
                    state: HostState::Up,
                    // With a shared database, machines belong on nodes, so that they keep running while controllers change.
                    cordoned: !host.owns_database,
                    memory_bytes: host.memory_bytes,
                    cpus: host.cpus,
                    generation: 0,
                    seen_event: 0,
                    lease_ms: 0,
                    joined_at_ms: now_ms,
                    seen_at_ms: Some(now_ms),
                };
                repo.hosts().add(&record).await?;
                repo.save().await?;
                host.id
            }
        };
        if !host.owns_database {
            self.note_other_controllers(id, &known).await?;
        }
        // Nothing has read it before.
        let _ = self.fleet().own.set(id);
        Ok(())
    }
}

impl Service {
    /// Records that the hosts of other controllers are lost, because only one controller runs at a time.
    async fn note_other_controllers(&self, own: Uuid, known: &[HostRecord]) -> Result<(), DbError> {
        let is_other = |host: &&HostRecord| {
            host.id != own && host.fingerprint.is_none() && host.state != HostState::Lost
        };
        for host in known.iter().filter(is_other) {
            let mut repo = self.db().write().await?;
            let Some(host) = repo.hosts().by_id(host.id).await? else { continue };
            repo.hosts().update(&HostRecord { state: HostState::Lost, ..host }).await?;
            repo.save().await?;
        }
        Ok(())
    }
}

/// The host of this daemon under an earlier identity: in a database of its own, the only host that is not a node.
fn former_self<'a>(own: &OwnHost, known: &'a [HostRecord]) -> Option<&'a HostRecord> {
    let mut without_node = known.iter().filter(|host| host.fingerprint.is_none());
    let first = without_node.next().filter(|_| own.owns_database)?;
    without_node.next().is_none().then_some(first)
}

/// The name, with a number appended if another host has it.
fn free_name(name: &str, known: &[HostRecord]) -> String {
    let is_free = |name: &String| known.iter().all(|host| host.name != *name);
    let numbered = (2u32..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.to_owned()).chain(numbered).find(is_free).unwrap_or_else(|| name.to_owned())
}
