//! Sets up the daemon as a controller of nodes, or as a node.

use std::net::SocketAddr;
use std::time::Duration;

use headwater_api::{Problem, ProblemKind};
use headwater_db::Database;
use headwater_service::Service;
use headwater_service::fleet::Membership;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::data_dir::DataDir;
use crate::database::Shared;
use crate::fleet::connect;
use crate::fleet::listener::{BoundPort, NodePort};
use crate::fleet::membership::{self, Joined};
use crate::guard;

/// The port for nodes, or the fleet that this host has joined, if there is either. The database is not open yet.
pub struct BoundNodes {
    /// The port, and how long the leases of nodes last.
    port: Option<(BoundPort, Duration)>,
    joined: Option<Joined>,
    data_dir: DataDir,
}

/// The same after the database was opened.
pub struct Nodes {
    port: Option<(NodePort, Duration)>,
    joined: Option<Joined>,
    data_dir: DataDir,
}

impl BoundNodes {
    /// Binds the port. Fails if the host is a node and has --nodes or --database: a node has no nodes, and its own
    /// database.
    pub async fn open(
        data_dir: &DataDir,
        offered: Option<(SocketAddr, Duration)>,
        database: Option<&Shared>,
    ) -> anyhow::Result<Self> {
        let joined = membership::load(data_dir)?;
        if let (Some(joined), Some(_)) = (&joined, database) {
            let (controller, name) = (joined.fleet.controllers(), &joined.fleet.name);
            let message = format!(
                "this host is the node '{name}' of {controller}, and a node keeps its machines in its data directory"
            );
            return Err(Problem::new(ProblemKind::Conflict, message).advise("leave out --database").into());
        }
        if let (Some(joined), Some(_)) = (&joined, offered) {
            let (controller, name) = (joined.fleet.controllers(), &joined.fleet.name);
            let message =
                format!("this host is the node '{name}' of {controller}, and a node has no nodes of its own");
            return Err(Problem::new(ProblemKind::Conflict, message).advise("leave out --nodes").into());
        }
        let port = match offered {
            Some((address, lease)) => Some((BoundPort::bind(address).await?, lease)),
            None => None,
        };
        Ok(Self { port, joined, data_dir: data_dir.clone() })
    }

    /// Reads or creates the certificate authority of the nodes.
    pub async fn with_database(self, database: &dyn Database) -> anyhow::Result<Nodes> {
        let port = match self.port {
            Some((port, lease)) => Some((port.with_authority(database).await?, lease)),
            None => None,
        };
        Ok(Nodes { port, joined: self.joined, data_dir: self.data_dir })
    }
}

impl Nodes {
    /// The URL at which nodes reach it.
    pub fn url(&self) -> Option<String> {
        self.port.as_ref().map(|(port, _)| port.url())
    }

    /// Serves nodes, or keeps the connection to the controller, until `stopped` is true.
    pub fn serve(
        self,
        service: &Service,
        stopped: &watch::Receiver<bool>,
    ) -> Vec<JoinHandle<std::io::Result<()>>> {
        let (service, stopped) = (service.clone(), stopped.clone());
        match self {
            Self { port: Some((port, lease)), .. } => {
                service.leases_last(u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
                vec![tokio::spawn(port.serve(service, stopped))]
            }
            Self { joined: Some(joined), data_dir, .. } => {
                let (controller, name) = (joined.fleet.controllers(), joined.fleet.name.clone());
                // Before a request is answered: settings that the controller manages must not be changed here.
                let lease_file = guard::lease_file(&data_dir);
                service.is_node_of(Membership { controller, name, lease_file });
                let (fence, stop) = (service.clone(), stopped.clone());
                vec![
                    tokio::spawn(async move { fence.keep_fence(stop).await }),
                    tokio::spawn(guard::keep(data_dir, stopped.clone())),
                    tokio::spawn(connect::keep_connected(service, joined, stopped)),
                ]
            }
            _ => Vec::new(),
        }
    }
}
