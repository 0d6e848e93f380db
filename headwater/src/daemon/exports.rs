//! Serves the daemon's machines as NBD exports: who may read which machine, and what an export contains.
//!
//! | the machine | its export |
//! |---|---|
//! | is on | a snapshot of its disk, made when the first of the present readers opened it |
//! | is off, with a persistent disk or the disk of a maintenance session | that disk; a machine that starts revokes it |
//! | is off, with neither | none |

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use headwater_api::name::check_machine;
use headwater_block::Geometry;
use headwater_nbd::{
    Address, ClientIdentity, Described, Export, ExportInfo, Exports, Limits, NotOpened, Right, Server,
    ServerTls, ServerTlsOptions,
};
use headwater_service::Service;
use headwater_service::backend::BackendError;
use headwater_service::lifecycle::{LifecycleError, OfflineDisk, ReadableDisk};
use tokio::runtime::Handle;

use crate::adapters::disk_host::{DiskHost, OpenReader};
use crate::failure::invalid;

/// Parses the right of a client certificate: `NAME` or `NAME=MACHINE[,MACHINE..]`.
pub fn right(text: &str) -> Result<Right, String> {
    Right::parse(text, |machine| check_machine(machine).map_err(|e| e.to_string()))
}

/// The settings of the NBD server for machines' disks.
pub struct Offer {
    address: Address,
    tls: Option<ServerTls>,
    /// Empty: everybody who can connect may read everything.
    rights: Vec<Right>,
}

impl Offer {
    /// Loads the certificates. Fails for a TCP address if certificates or rights are missing, also for a loopback address:
    /// every user of this host, and every guest through QEMU's user-mode network, can reach it.
    pub fn new(address: Address, certificates: Option<PathBuf>, rights: Vec<Right>) -> anyhow::Result<Self> {
        if matches!(address, Address::Tcp { .. }) && (certificates.is_none() || rights.is_empty()) {
            return Err(invalid(format!(
                "cannot offer machines' disks at {address}, which other hosts or guests of this one can reach, to \
                 everybody: give --nbd-certificates DIR and --nbd-allow NAME, or listen on unix:PATH"
            )));
        }
        let options = ServerTlsOptions { is_required: true, verifies_clients: true };
        let tls = certificates.map(|directory| ServerTls::load(&directory, options)).transpose();
        Ok(Self { address, tls: tls.context("cannot offer machines' disks over NBD")?, rights })
    }

    /// Begins to serve.
    pub fn serve(self, service: Service, disks: Arc<dyn DiskHost>) -> anyhow::Result<Server> {
        let exports = MachineExports { service, disks, rights: self.rights, runtime: Handle::current() };
        let options = headwater_nbd::Options { limits: Limits::default(), tls: self.tls };
        Server::bind(self.address, Arc::new(exports), options)
            .context("cannot offer machines' disks over NBD")
    }
}

struct MachineExports {
    service: Service,
    disks: Arc<dyn DiskHost>,
    rights: Vec<Right>,
    /// The service's runtime; connections have their own threads.
    runtime: Handle,
}

impl MachineExports {
    fn allows(&self, client: &ClientIdentity, machine: &str) -> bool {
        Right::any_allows(&self.rights, client, machine)
    }

    fn find(&self, name: &str, client: &ClientIdentity) -> Result<ReadableDisk, NotOpened> {
        if name.is_empty() {
            return Err(NotOpened::Unavailable(
                "the export name is empty: give a machine's name; the client's list of exports shows which"
                    .into(),
            ));
        }
        // Whether a machine exists is revealed only to clients that may read it.
        if !self.allows(client, name) {
            return Err(NotOpened::Forbidden);
        }
        match self.runtime.block_on(self.service.readable_disk(name)) {
            Ok(found) => found.ok_or(NotOpened::Unknown),
            Err(error) => Err(failed(name, error)),
        }
    }

    fn geometry(&self, found: &ReadableDisk) -> Result<Option<Geometry>, NotOpened> {
        match &found.disk {
            OfflineDisk::On(_) => {
                let geometry = self.disks.geometry_of(&found.machine);
                geometry.map_err(|error| failed(&found.machine, error))
            }
            OfflineDisk::PersistentDiskRef(kept) => {
                let geometry = self.disks.geometry_over(&kept.version);
                geometry.map(Some).map_err(|error| failed(&found.machine, error))
            }
            OfflineDisk::None => Ok(None),
        }
    }

    fn description(&self, found: &ReadableDisk) -> Option<String> {
        let ReadableDisk { machine, state, disk } = found;
        let (version, what) = match disk {
            OfflineDisk::On(version) => (version.clone(), "a snapshot of its disk"),
            // No machine has created it yet, and a reader must not.
            OfflineDisk::PersistentDiskRef(kept) if !self.disks.is_begun(kept.kept) => return None,
            OfflineDisk::PersistentDiskRef(kept) => {
                (format!("{}@{}", kept.version.image, kept.version.number), "its persistent disk")
            }
            OfflineDisk::None => return None,
        };
        Some(format!("machine {machine}, {state}, over {version}: {what}"))
    }

    fn open_reader(&self, found: &ReadableDisk) -> Result<OpenReader, NotOpened> {
        let machine = found.machine.as_str();
        let reader = match &found.disk {
            OfflineDisk::On(_) => {
                self.disks.open_reader(machine).and_then(|reader| reader.ok_or_else(switching))
            }
            OfflineDisk::PersistentDiskRef(kept) => self.disks.read_persistent(kept),
            OfflineDisk::None => return Err(no_disk(found)),
        };
        reader.map_err(|error| failed(machine, error))
    }

    fn note(&self, machine: &str, client: &ClientIdentity, what: &str) {
        let who = match client.names.first() {
            Some(name) => format!("nbd {name}"),
            None => "nbd".to_owned(),
        };
        tracing::info!(machine, client = %who, "the disk of a machine is read over NBD: {what}");
        let _runtime = self.runtime.enter();
        self.service.note_reading(machine, &who, what);
    }
}

impl Exports for MachineExports {
    fn list(&self, client: &ClientIdentity) -> Vec<ExportInfo> {
        let disks = self.runtime.block_on(self.service.readable_disks()).unwrap_or_else(|error| {
            tracing::error!("cannot list the machines for an NBD client: {error}");
            Vec::new()
        });
        let mut list = Vec::new();
        for disk in disks.iter().filter(|disk| self.allows(client, &disk.machine)) {
            if let Some(description) = self.description(disk) {
                list.push(ExportInfo { name: disk.machine.clone(), description });
            }
        }
        list
    }

    fn describe(&self, name: &str, client: &ClientIdentity) -> Result<Described, NotOpened> {
        let found = self.find(name, client)?;
        let described = self.description(&found).zip(self.geometry(&found)?);
        let (description, geometry) = described.ok_or_else(|| no_disk(&found))?;
        Ok(Described { geometry, description })
    }

    fn open(&self, name: &str, client: &ClientIdentity) -> Result<Export, NotOpened> {
        let found = self.find(name, client)?;
        let description = self.description(&found).ok_or_else(|| no_disk(&found))?;
        let reader = self.open_reader(&found)?;
        if reader.is_first {
            self.note(name, client, &description);
        }
        Ok(Export { device: reader.device, description })
    }
}

fn no_disk(found: &ReadableDisk) -> NotOpened {
    let ReadableDisk { machine, state, disk } = found;
    let why = if matches!(disk, OfflineDisk::PersistentDiskRef(_)) {
        "has not created its persistent disk yet"
    } else {
        "has no persistent disk"
    };
    NotOpened::Unavailable(format!(
        "machine {machine} is {state} and {why}, so there is no disk to read; start the machine"
    ))
}

fn switching() -> BackendError {
    BackendError::new(headwater_api::ProblemKind::Conflict, "the machine is being switched on or off")
}

/// The error with all causes, for the client's user, and for the log.
fn failed(machine: &str, error: impl Into<Failed>) -> NotOpened {
    let Failed { chain, advice } = error.into();
    let advice = advice.map(|advice| format!("; {advice}")).unwrap_or_default();
    let why = format!("cannot open the disk of machine {machine}: {chain}{advice}");
    tracing::warn!("for an NBD client: {why}");
    NotOpened::Failed(why)
}

struct Failed {
    chain: String,
    advice: Option<String>,
}

impl From<BackendError> for Failed {
    fn from(error: BackendError) -> Self {
        let advice = error.advice().map(ToOwned::to_owned);
        Self { chain: format!("{:#}", anyhow::Error::new(error)), advice }
    }
}

impl From<LifecycleError> for Failed {
    fn from(error: LifecycleError) -> Self {
        Self { chain: format!("{:#}", anyhow::Error::new(error)), advice: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_name_machines() {
        assert!(right("backup").is_ok() && right("desk 7=web-1,web-2").is_ok());
        for bad in ["", "=web", "x=", "x=web,", "x=Web", "x=a b"] {
            assert!(right(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nobody_offers_disks_to_the_world_by_mistake() {
        let offer = |address: &str, rights: &[&str]| {
            let rights = rights.iter().map(|text| right(text).unwrap()).collect();
            Offer::new(address.parse().unwrap(), None, rights).map(|_| ()).map_err(|e| e.to_string())
        };
        assert_eq!(offer("unix:/run/x", &[]), Ok(()));
        for open in ["tcp:0.0.0.0", "tcp:[::]:0", "tcp:192.0.2.1", "tcp:127.0.0.1", "tcp:[::1]:0"] {
            assert!(offer(open, &["x"]).unwrap_err().contains("--nbd-certificates"), "{open}");
        }
    }
}
