//! Disks of machines for external readers: the program's NBD server (`serve --nbd`) asks here which disks there are, and has the history
//! record who read one. The disks are opened elsewhere (`DiskHost` of the program).

use std::time::Duration;

use headwater_api::MachineState;
use headwater_db::{MachineRecord, Purpose};

use crate::Service;
use crate::answer::problem;
use crate::backend::PersistentDiskRequest;
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;
use crate::lifecycle::boot::{files_of, session_cache};

/// The most records of readers that wait to be written.
pub(crate) const MAX_NOTES: usize = 256;

/// The disk of a machine, for a reader.
#[derive(Clone, Debug)]
pub struct ReadableDisk {
    /// The machine.
    pub machine: String,
    /// The machine's state.
    pub state: MachineState,
    /// Which disk can be read.
    pub disk: OfflineDisk,
}

/// The disk of a machine that a client can read, whether the machine is on or off.
#[derive(Clone, Debug)]
pub enum OfflineDisk {
    /// The machine is on; this is the version below, as `IMAGE@NUMBER`.
    On(String),
    /// The machine is off and has a persistent disk, or the disk of a maintenance session.
    PersistentDiskRef(Box<PersistentDiskRequest>),
    /// The machine is off, and has no disk.
    None,
}

impl Service {
    /// The disks of all machines of this host, by name.
    pub async fn readable_disks(&self) -> Result<Vec<ReadableDisk>, LifecycleError> {
        let records = self.own_machines().await?;
        let mut disks = Vec::new();
        for record in records {
            let (machine, state) = (record.name.clone(), record.state);
            // A version that cannot be found does not hide the other machines.
            let disk = self.residue(record).await.unwrap_or_else(|e| {
                tracing::warn!(%machine, "cannot determine the disk of the machine: {}", problem(&e));
                OfflineDisk::None
            });
            disks.push(ReadableDisk { machine, state, disk });
        }
        Ok(disks)
    }

    /// The disk of one machine. `None`: there is no such machine.
    pub async fn readable_disk(&self, name: &str) -> Result<Option<ReadableDisk>, LifecycleError> {
        let found = self.db().read().await?.machines().by_name(name).await?;
        let Some(record) = found.filter(|record| self.is_own(record)) else { return Ok(None) };
        let (machine, state) = (record.name.clone(), record.state);
        Ok(Some(ReadableDisk { machine, state, disk: self.residue(record).await? }))
    }

    /// Records in the history who reads a machine's disk. It is written in the background: a reader does not wait for the
    /// database. Must be called within a Tokio runtime.
    pub fn note_reading(&self, machine: &str, who: &str, detail: &str) {
        let Ok(place) = self.note_places().try_acquire_owned() else {
            tracing::error!(
                machine,
                who,
                "the history misses that the disk of a machine is read, because {MAX_NOTES} such events already wait to be written"
            );
            return;
        };
        let caller = Caller::admin(who);
        let event = self.event(&caller, format!("machine {machine}"), "disk read", detail);
        let (service, machine) = (self.clone(), machine.to_owned());
        tokio::spawn(async move {
            if let Err(error) = service.append(event).await {
                tracing::error!(
                    machine,
                    "cannot write to the history who reads the disk of a machine: {}",
                    problem(&error)
                );
            }
            drop(place);
        });
    }

    /// Waits until all records are written, at most `limit`. Returns whether they are.
    pub async fn notes_written(&self, limit: Duration) -> bool {
        let all = u32::try_from(MAX_NOTES).unwrap_or(u32::MAX);
        let written = async {
            let places = self.note_places().acquire_many_owned(all).await;
            self.write_pending_events().await.is_ok() && places.is_ok()
        };
        tokio::time::timeout(limit, written).await.is_ok_and(|written| written)
    }

    async fn residue(&self, record: MachineRecord) -> Result<OfflineDisk, LifecycleError> {
        if self.active(record.uuid).is_some() {
            return Ok(OfflineDisk::On(record.version.unwrap_or_default()));
        }
        let disks = self.db().read().await?.persistent_disks().of_machine(record.uuid).await?;
        let find = |purpose| disks.iter().find(|disk| disk.purpose == purpose);
        let (kept, cache) = match (find(Purpose::MaintenanceSession), find(Purpose::Persistent)) {
            (Some(edit), _) => (edit, session_cache(record.cache)),
            (None, Some(own)) if record.cache.persistent => (own, record.cache),
            _ => return Ok(OfflineDisk::None),
        };
        let version = self.version_of("read the disk of", &record, &kept.below()).await?;
        // Checked last, because a store may be slow. A version of a machine that was on may still be made while it is off,
        // from blocks that the disk no longer refers to. Opening the disk for a reader would free these blocks, and the
        // version would fail as damaged.
        if self.is_sealing(kept.id) {
            return Err(LifecycleError::BeingSealed { what: "read the disk of", machine: record.name });
        }
        let is_edit = kept.purpose == Purpose::MaintenanceSession;
        Ok(OfflineDisk::PersistentDiskRef(Box::new(PersistentDiskRequest {
            kept: files_of(kept),
            version,
            cache,
            is_edit,
        })))
    }
}
