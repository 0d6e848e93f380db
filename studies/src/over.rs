//! Connects the load generator to a volume: directly in this process, or through a protocol server and its client on a
//! unix socket.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use headwater_block::Device;
use headwater_nbd::client::ClientOptions;
use headwater_nbd::{Address, Client, SingleExport};
use headwater_testkit::vhost::{Setup, VhostDisk};
use serde::Serialize;

/// Requests in flight in one queue of the vhost-user client.
const REQUESTS_OF_A_QUEUE: usize = 16;

/// The most queues of the vhost-user client.
const MOST_QUEUES: usize = 16;

/// The connection between the load generator and a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Over {
    /// Direct access.
    #[default]
    InProcess,
    /// An NBD server, and a client with one connection, on a unix socket.
    Nbd,
    /// A vhost-user-blk server, and a client with shared memory.
    VhostUser,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InProcess => "in-process",
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
        })
    }
}

/// A protocol server in this process, with its socket.
pub struct Front {
    server: Server,
    _dir: tempfile::TempDir,
}

enum Server {
    Nbd(headwater_nbd::Server),
    VhostUser(headwater_vhost_user::Server),
}

impl Front {
    /// Serves a device, and connects a client to it. `None` for direct access.
    pub fn open(
        over: Over,
        device: &Arc<dyn Device>,
        in_flight: usize,
    ) -> Result<Option<(Self, Arc<dyn Device>)>> {
        if over == Over::InProcess {
            return Ok(None);
        }
        // In the system's temporary directory, because the path of a socket must be short.
        let dir = tempfile::tempdir().context("cannot create a directory for a socket")?;
        let (socket, device) = (dir.path().join("disk.sock"), Arc::clone(device));
        let (server, client) = match over {
            Over::InProcess => return Ok(None),
            Over::Nbd => {
                let export = SingleExport::new(device, "study");
                let address = Address::Unix(socket.clone());
                let server = headwater_nbd::Server::bind(address, export, headwater_nbd::Limits::default());
                let server = server.map_err(|error| anyhow!("cannot start the NBD server: {error}"))?;
                let uri = format!("nbd+unix:///?socket={}", socket.display());
                let options =
                    ClientOptions { commands_in_flight: in_flight.max(64), ..ClientOptions::default() };
                let client = Client::connect(
                    &uri.parse().context("the path of the socket is not valid in a URI")?,
                    &options,
                );
                let client = client.map_err(|error| anyhow!("cannot connect the NBD client: {error}"))?;
                (Server::Nbd(server), client as Arc<dyn Device>)
            }
            Over::VhostUser => {
                let options = headwater_vhost_user::Options {
                    name: "study".into(),
                    serial: "study".into(),
                    resume: None,
                    recovered: false,
                    sealed_memory: false,
                    limits: headwater_vhost_user::Limits::default(),
                };
                let server = headwater_vhost_user::Server::bind(&socket, device, options);
                let server =
                    server.map_err(|error| anyhow!("cannot start the vhost-user server: {error}"))?;
                let queues = in_flight.div_ceil(REQUESTS_OF_A_QUEUE).clamp(1, MOST_QUEUES);
                let client = VhostDisk::connect(&socket, Setup { queues, event_idx: true });
                (Server::VhostUser(server), Arc::new(client) as Arc<dyn Device>)
            }
        };
        Ok(Some((Self { server, _dir: dir }, client)))
    }

    /// Ends the server. The caller drops the client first.
    pub fn stop(&self) {
        match &self.server {
            Server::Nbd(server) => server.stop(),
            Server::VhostUser(server) => server.stop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use headwater_block::blocking;
    use headwater_testkit::ReferenceDisk;

    use super::*;

    #[test]
    fn a_device_is_the_same_over_each_protocol() {
        for over in [Over::Nbd, Over::VhostUser] {
            let disk = Arc::new(ReferenceDisk::new(1 << 20));
            let device = Arc::clone(&disk) as Arc<dyn Device>;
            let (front, client) = Front::open(over, &device, 100).unwrap().unwrap();
            let data = headwater_testkit::Rng::new(1).bytes(4096);
            blocking::write(&*client, 512, &data).unwrap();
            let mut found = vec![0; 4096];
            blocking::read(&*device, 512, &mut found).unwrap();
            assert!(found == data, "{over}");
            assert_eq!(disk.counts().writes, 1, "{over}");
            drop(client);
            front.stop();
        }
        let device = Arc::new(ReferenceDisk::new(1 << 20)) as Arc<dyn Device>;
        assert!(Front::open(Over::InProcess, &device, 1).unwrap().is_none());
    }
}
