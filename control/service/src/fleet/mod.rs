//! Several hosts: a controller keeps what is wanted, and a node on each host runs the machines of that host.
//!
//! ```text
//!   node                                                   controller
//!    | --- TLS with the certificates of both ---------------> |   serve --nodes
//!    | <-- ToNode::Ready -----------------------------------  |
//!    | --- FromNode::Hello -------------------------------->  |   (lines of JSON: protocol.rs)
//!    | <-- ToNode::Welcome {generation} --------------------  |
//!    | <== HTTP/2 requests: the API of the node ============  |   the roles are turned here
//! ```
//!
//! A node is a daemon like every other: its database has the machines of its host, and it starts and watches them by itself. The
//! controller asks it by the API that everybody uses, over the connection that the node has opened. Nothing of a machine that runs
//! depends on that connection.
//!
//! # Guarantees
//! - What a node does to a machine is the node's to say. The controller has a copy, which it takes from the node's history and list.
//! - A node refuses requests of an older connection than its newest one.
//! - One connection a host: a second node with the same identity is refused while the first one is connected.
//! - A controller changes nothing of a machine whose node is not connected, except that it gives machines of a lost host to others if
//!   their catalog says so: no two hosts run one machine ([`lease`]).
//!
//! # Not here
//! Sockets, TLS and certificates are the program's (`headwater/src/fleet`). A disk that is kept is not moved to another host.
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

/// How often each side looks whether the other one is there, and how long that may take to answer.
pub(crate) const BEAT: Duration = Duration::from_secs(5);
pub(crate) const BEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long nothing is heard of a node before its host is lost.
pub(crate) const LOST_AFTER: Duration = Duration::from_secs(15);

/// The pause after something failed that is tried again.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The host of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnHost {
    /// Its identity, unless the database knows another one.
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its processors.
    pub cpus: u32,
    /// Whether no other daemon uses the same database in turn. Then the host without a certificate in it is this one, whatever its
    /// identity was.
    pub owns_database: bool,
}

/// What a service knows of hosts.
#[derive(Default)]
pub(crate) struct FleetState {
    own: OnceLock<Uuid>,
    /// Who signs the certificates of nodes, if this daemon takes any.
    authority: OnceLock<Arc<dyn Authority>>,
    /// Whose node this daemon is, if it is one.
    membership: OnceLock<Membership>,
    /// Which hosts have a connection, or are getting one, and from where.
    places: Mutex<HashMap<Uuid, String>>,
    links: Mutex<HashMap<Uuid, Arc<Link>>>,
    /// The leases of nodes, if this daemon takes any.
    leases: Leases,
    /// Its own lease, if this daemon is a node.
    fence: Fence,
}

impl FleetState {
    fn places(&self) -> MutexGuard<'_, HashMap<Uuid, String>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
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
        // A machine that boots from the network runs on no host.
        record.boot == BootFrom::Network || record.host == self.own_host()
    }

    /// The machines that this daemon runs, by name.
    pub(crate) async fn own_machines(&self) -> Result<Vec<MachineRecord>, DbError> {
        self.db().read().await?.machines().of_host(self.own_host()).await
    }

    /// Writes the host of this daemon to the database, before anything else is looked at.
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
                    // Machines are to go on while controllers change, so they belong on nodes.
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
        // Nobody has asked before.
        let _ = self.fleet().own.set(id);
        Ok(())
    }
}

impl Service {
    /// Notes that the hosts of other controllers are lost: one controller runs at a time.
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

/// The host of this daemon under an earlier identity: with a database of its own, the only host that is no node.
fn former_self<'a>(own: &OwnHost, known: &'a [HostRecord]) -> Option<&'a HostRecord> {
    let mut without_node = known.iter().filter(|host| host.fingerprint.is_none());
    let first = without_node.next().filter(|_| own.owns_database)?;
    without_node.next().is_none().then_some(first)
}

/// The name, or one with a number if another host has it.
fn free_name(name: &str, known: &[HostRecord]) -> String {
    let is_free = |name: &String| known.iter().all(|host| host.name != *name);
    let numbered = (2u32..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.to_owned()).chain(numbered).find(is_free).unwrap_or_else(|| name.to_owned())
}
