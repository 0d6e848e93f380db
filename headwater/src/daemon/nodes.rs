//! The daemon as a controller of nodes, or as a node.

use std::net::SocketAddr;

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

/// Its port for nodes, or the fleet that it has joined, if there is either. The database is not open yet.
pub struct BoundNodes {
    port: Option<BoundPort>,
    joined: Option<Joined>,
}

/// The same with what the database has.
pub struct Nodes {
    port: Option<NodePort>,
    joined: Option<Joined>,
}

impl BoundNodes {
    /// Binds the port. One host is not both a node and a controller of nodes, and a node has a database of its own.
    pub async fn open(
        data_dir: &DataDir,
        address: Option<SocketAddr>,
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
        if let (Some(joined), Some(_)) = (&joined, address) {
            let (controller, name) = (joined.fleet.controllers(), &joined.fleet.name);
            let message =
                format!("this host is the node '{name}' of {controller}, and a node has no nodes of its own");
            return Err(Problem::new(ProblemKind::Conflict, message).advise("leave out --nodes").into());
        }
        let port = match address {
            Some(address) => Some(BoundPort::bind(address).await?),
            None => None,
        };
        Ok(Self { port, joined })
    }

    /// Reads or makes the authority of its nodes.
    pub async fn with_database(self, database: &dyn Database) -> anyhow::Result<Nodes> {
        let port = match self.port {
            Some(port) => Some(port.with_authority(database).await?),
            None => None,
        };
        Ok(Nodes { port, joined: self.joined })
    }
}

impl Nodes {
    /// Where nodes reach it.
    pub fn url(&self) -> Option<String> {
        self.port.as_ref().map(NodePort::url)
    }

    /// Serves nodes, or keeps the connection to the controller, until `stopped` says true.
    pub fn serve(
        self,
        service: &Service,
        stopped: &watch::Receiver<bool>,
    ) -> Vec<JoinHandle<std::io::Result<()>>> {
        let (service, stopped) = (service.clone(), stopped.clone());
        match self {
            Self { port: Some(port), .. } => vec![tokio::spawn(port.serve(service, stopped))],
            Self { joined: Some(joined), .. } => {
                let (controller, name) = (joined.fleet.controllers(), joined.fleet.name.clone());
                // Before a request is answered: what the controller keeps is not to be changed here.
                service.is_node_of(Membership { controller, name });
                vec![tokio::spawn(connect::keep_connected(service, joined, stopped))]
            }
            _ => Vec::new(),
        }
    }
}
