//! The fence of a node: when its lease is over, the node ends the machines that another host may start, and starts none of them. Such
//! machines are called fenced: their catalog has the policy `restart` for lost hosts. The lease itself is in `lease.rs`.
//!
//! The end of the lease is also in a file for the guard (`headwater guard`), a separate process that ends these machines if the daemon is
//! gone.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use futures_util::future::join_all;
use headwater_api::{MachineState, Wanted};
use headwater_db::{DbError, MachineRecord};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::Body;
use crate::fleet::RETRY_PAUSE;
use crate::fleet::lease::{NodeLease, Renewal};
use crate::lifecycle::{FENCED, LifecycleError, StartReason};

/// The path of renewals. Only the controller can reach it.
pub(super) const LEASE: &str = "/node/v1/lease";

/// The size of the lease file is a multiple of this, so that it seldom changes.
const FILE_STEP_BYTES: usize = 4096;

/// How often a node checks whether its lease is over.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// A node's lease, and its fenced machines, which end with the lease.
#[derive(Default)]
pub(crate) struct Fence {
    lease: Mutex<NodeLease>,
    /// The names of the machines that are fenced.
    machines: Mutex<HashMap<Uuid, String>>,
    /// Serialises writes of the lease file.
    file: Arc<tokio::sync::Mutex<()>>,
}

impl Fence {
    fn lease(&self) -> MutexGuard<'_, NodeLease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn machines(&self) -> MutexGuard<'_, HashMap<Uuid, String>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection to a controller begins.
    pub(super) fn connected(&self) {
        self.lease().connected();
    }
}

/// The contents of the file from which the guard reads when to end which machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFile {
    /// The boot of the host to which the time belongs.
    pub boot_id: String,
    /// When the lease ends, in milliseconds since that boot.
    pub ends_at_ms: u64,
    /// The machines to end then.
    pub machines: Vec<String>,
}

impl LeaseFile {
    /// Reads the file. `None`: it does not exist, or is being written.
    pub fn read(path: &Path) -> Option<Self> {
        let bytes = std::fs::read(path).ok()?;
        let again = std::fs::read(path).ok()?;
        (bytes == again).then(|| serde_json::from_slice(&bytes).ok())?
    }

    /// When the lease ends. `None`: the host was rebooted since.
    pub fn ends_at_ms(&self) -> Option<u64> {
        (self.boot_id == boot_id()).then_some(self.ends_at_ms)
    }

    /// Writes the file in place, so that a renewal needs no free space on a full disk. Does not sync it, because it
    /// counts only until the host is rebooted.
    fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.resize(bytes.len().next_multiple_of(FILE_STEP_BYTES), b' ');
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        file.write_all_at(&bytes, 0)?;
        file.set_len(bytes.len() as u64)
    }
}

/// The identity of the host's present boot.
fn boot_id() -> String {
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    read.map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// `PUT /node/v1/lease`: the controller renews the lease.
pub(super) async fn renew(
    State(service): State<Service>,
    Body(renewal): Body<Renewal>,
) -> Result<Json<()>, Failure> {
    service.fleet().fence.lease().answer(renewal, service.since_boot_ms());
    service.write_lease().await;
    Ok(Json(()))
}

impl Service {
    /// Reads the lease that an earlier daemon of this node had.
    pub(super) fn read_lease(&self) {
        let Some(membership) = self.membership() else { return };
        let former = LeaseFile::read(&membership.lease_file).and_then(|file| file.ends_at_ms());
        *self.fleet().fence.lease() = NodeLease::until(former);
    }

    /// Writes the lease and the machines to the file for the guard. If the disk does not answer, only this call waits, not
    /// the ending of machines.
    async fn write_lease(&self) {
        let turn = self.fleet().fence.file.clone().lock_owned().await;
        let service = self.clone();
        let written = tokio::task::spawn_blocking(move || {
            service.write_lease_now();
            drop(turn);
        });
        // The thread itself has reported a panic.
        let _ = written.await;
    }

    fn write_lease_now(&self) {
        let Some(membership) = self.membership() else { return };
        let machines: Vec<String> = self.fleet().fence.machines().values().cloned().collect();
        let path = &membership.lease_file;
        let ends_at_ms = self.fleet().fence.lease().ends_at_ms().unwrap_or_default();
        let written = match machines.is_empty() {
            true => std::fs::remove_file(path).or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            }),
            false => LeaseFile { boot_id: boot_id(), ends_at_ms, machines }.write(path),
        };
        if let Err(error) = written {
            let path = path.display();
            tracing::error!(
                "cannot renew the lease in {path}, so the guard will end machines when the old lease is over: {error}"
            );
        }
    }

    /// Whether a machine must not run here now, because another host may run it.
    pub(crate) fn is_fenced_off(&self, record: &MachineRecord) -> bool {
        record.fenced
            && self.membership().is_some()
            && self.fleet().fence.lease().is_over(self.since_boot_ms())
    }

    /// Records whether a machine of this node is fenced.
    pub(crate) async fn is_fenced(&self, uuid: Uuid, name: &str, fenced: bool) {
        {
            let mut machines = self.fleet().fence.machines();
            let changed = match fenced {
                true => machines.insert(uuid, name.to_owned()).is_none(),
                // The guard knows names only: an earlier machine of the same name is no longer fenced.
                false => {
                    let before = machines.len();
                    machines.retain(|its, named| *its != uuid && named != name);
                    machines.len() < before
                }
            };
            if !changed {
                return;
            }
        }
        self.write_lease().await;
    }

    /// Ends machines while the lease is over, and restarts them after a new lease, until `stop` is true.
    pub async fn keep_fence(&self, mut stop: watch::Receiver<bool>) -> std::io::Result<()> {
        while let Err(error) = self.load_fenced().await {
            tracing::error!(
                "cannot read which machines are fenced (another host may run them); trying again: {}",
                problem(&error)
            );
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        let mut was_over = true;
        loop {
            let is_over = self.fleet().fence.lease().is_over(self.since_boot_ms());
            if is_over {
                self.fence_all().await;
            } else if was_over {
                self.resume_fenced().await;
            }
            was_over = is_over;
            tokio::select! {
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = stopped(&mut stop) => return Ok(()),
            }
        }
    }

    async fn load_fenced(&self) -> Result<(), DbError> {
        let own = self.own_machines().await?;
        let fenced = own.into_iter().filter(|it| it.fenced).map(|it| (it.uuid, it.name));
        self.fleet().fence.machines().extend(fenced);
        self.write_lease().await;
        Ok(())
    }

    /// Ends all fenced machines that are on.
    async fn fence_all(&self) {
        let machines = self.fleet().fence.machines().clone();
        let on: Vec<_> = self
            .active_map()
            .iter()
            .filter(|(uuid, _)| machines.contains_key(uuid))
            .map(|(uuid, active)| (*uuid, active.clone()))
            .collect();
        if on.is_empty() {
            return;
        }
        // End all of them before anything is recorded: another host may be about to start them.
        let turns: Vec<_> = on.iter().map(|(uuid, _)| self.try_lock(*uuid)).collect();
        let ended = join_all(on.iter().map(|(_, active)| active.vm.kill())).await;
        for (((uuid, active), turn), ended) in on.into_iter().zip(turns).zip(ended) {
            let machine = &active.name;
            if let Err(error) = ended {
                tracing::error!(
                    machine,
                    "cannot end a machine that another host may run; trying again: {}",
                    problem(&error)
                );
                continue;
            }
            // If another operation has the machine's lock, it records the end.
            let Some(_turn) = turn else { continue };
            tracing::warn!(machine, "ended a machine: {FENCED}");
            if let Err(error) = self.note_fenced(uuid, machine).await {
                tracing::error!(machine, "cannot record that a machine was ended: {}", problem(&error));
            }
        }
    }

    async fn note_fenced(&self, uuid: Uuid, name: &str) -> Result<(), LifecycleError> {
        if let Some(active) = self.active(uuid) {
            active.vm.exited().await;
        }
        let mut record = self.record_of(uuid, name).await?;
        let reason = Some(FENCED.to_owned());
        self.switched_off(&mut record, &Caller::daemon(), MachineState::Stopped, reason, FENCED).await
    }

    /// Restarts the machines that were ended because the lease was over. They still belong to this node: the controller
    /// has removed the others before it gave a new lease.
    async fn resume_fenced(&self) {
        let own = self.own_machines().await.unwrap_or_else(|error| {
            tracing::error!(
                "cannot read which machines were fenced, so none of them is started: {}",
                problem(&error)
            );
            Vec::new()
        });
        let is_due = |record: &MachineRecord| {
            let says_so = record.reason.as_ref().is_some_and(|reason| reason.contains(FENCED));
            let was_ended = record.state == MachineState::Lost || says_so;
            record.fenced
                && was_ended
                && record.wanted == Wanted::Running
                && self.active(record.uuid).is_none()
        };
        self.start_until_on(own.into_iter().filter(is_due), StartReason::Fenced);
    }
}

/// Waits until the daemon ends.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which is an end too.
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_renewal_changes_the_file_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease.json");
        let file = |ends_at_ms: u64, machines: usize| LeaseFile {
            boot_id: "boot".to_owned(),
            ends_at_ms,
            machines: (0..machines).map(|number| format!("class-{number}")).collect(),
        };
        let mut sizes = Vec::new();
        for (ends_at_ms, machines) in [(9, 3), (10_000, 3), (7, 900), (8, 2)] {
            let now = file(ends_at_ms, machines);
            now.write(&path).unwrap();
            assert_eq!(LeaseFile::read(&path), Some(now));
            let metadata = std::fs::metadata(&path).unwrap();
            sizes.push((metadata.len(), metadata.ino()));
        }
        // The same file with the same size, unless the list of machines is much longer.
        assert_eq!((sizes[0], sizes[0]), (sizes[1], sizes[3]));
        assert!(sizes[2].0 > sizes[0].0 && sizes[2].1 == sizes[0].1, "{sizes:?}");
    }
}
