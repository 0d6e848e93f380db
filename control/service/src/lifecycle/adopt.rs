//! Takes over machines that kept running while no daemon ran. `recover.rs` calls this at the start of the daemon, before any machine is
//! started. A machine is taken over if its disk is still open and its VM answers; all others are reported, and `recover.rs` ends them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use headwater_api::MachineState;
use headwater_db::MachineRecord;

use crate::Service;
use crate::answer::problem;
use crate::backend::{Disk, LeftVm, OpenDisk};
use crate::caller::Caller;
use crate::lifecycle::{Active, LifecycleError};

/// How often the takeover of a machine whose process does not answer is tried, and the pause between attempts.
const ATTEMPTS: u32 = 3;
const ATTEMPTS_PAUSE: Duration = Duration::from_secs(1);

/// The result of taking over disks that an earlier daemon left open.
#[derive(Default)]
pub(super) struct Adopted {
    /// The names of the machines that were taken over.
    pub machines: Vec<String>,
    /// The disks of all other machines. Each is closed when its machine's process has ended.
    pub left: Vec<(OpenDisk, Arc<dyn Disk>)>,
}

impl Service {
    /// Takes over every machine whose disk is open and whose process runs. Must be called before any machine is started.
    pub(super) async fn adopt_machines(&self) -> Result<Adopted, LifecycleError> {
        let failed = |e| LifecycleError::Orphans("take over the disks that it left", e);
        let mut adopted = Adopted::default();
        for open in self.disks().left_open().await.map_err(failed)? {
            let disk = self.disks().adopt(&open).await.map_err(failed)?;
            let record = self.db().read().await?.machines().by_uuid(open.uuid).await?;
            let is_adopted = match record.filter(|record| record.state.is_active()) {
                Some(record) => self.adopt_machine(record, &open, &disk).await?,
                None => false,
            };
            if is_adopted {
                adopted.machines.push(open.machine);
            } else {
                adopted.left.push((open, disk));
            }
        }
        Ok(adopted)
    }

    /// Takes over a machine, and returns whether it runs. It does not if its process has ended or cannot be controlled.
    async fn adopt_machine(
        &self,
        mut record: MachineRecord,
        open: &OpenDisk,
        disk: &Arc<dyn Disk>,
    ) -> Result<bool, LifecycleError> {
        let is_up = record.state == MachineState::Running;
        let left = LeftVm {
            name: record.name.clone(),
            run_dir: self.run_dir(&record.name),
            cpus: record.cpus,
            boot_ms: record.boot_ms.filter(|_| is_up),
        };
        let mut adopted = self.hypervisor().adopt(left.clone()).await;
        for _ in 1..ATTEMPTS {
            if let Err(error) = &adopted {
                tracing::warn!(
                    machine = record.name,
                    "cannot take the machine over yet; trying again: {}",
                    problem(error)
                );
                tokio::time::sleep(ATTEMPTS_PAUSE).await;
                adopted = self.hypervisor().adopt(left.clone()).await;
            }
        }
        let vm = match adopted {
            Ok(Some(vm)) => vm,
            Ok(None) => return Ok(false),
            Err(error) => {
                tracing::error!(
                    machine = record.name,
                    "cannot take over the running machine, so its VM is ended (unless its disk is persistent, its changes \
                     are lost); start it again: {}",
                    problem(&error)
                );
                return Ok(false);
            }
        };
        let since_ms = record.started_at_ms.map_or(0, |at| self.now_ms().saturating_sub(at));
        let now = Instant::now();
        let asked_at = now.checked_sub(Duration::from_millis(since_ms)).unwrap_or(now);
        let hash = open.version.hash.clone();
        let names = (record.name.clone(), record.catalog.clone());
        let active = Arc::new(Active::new(names, Arc::clone(disk), vm, hash, asked_at));
        active.read_unused_note(&left.run_dir);
        self.is_on_now(record.uuid, active.clone());
        if record.state == MachineState::Starting {
            record.state = MachineState::Booting;
        }
        let detail = format!("taken over: {} kept running while no daemon ran", active.in_words());
        self.save(&record, &Caller::daemon(), "state", detail).await?;
        self.watch(record.uuid, record.name, active);
        Ok(true)
    }

    /// Closes disks whose machines have ended.
    pub(super) async fn close_left(&self, left: Vec<(OpenDisk, Arc<dyn Disk>)>) {
        for (open, disk) in left {
            tracing::warn!(machine = open.machine, "closing the disk of a machine whose process has ended");
            if let Err(error) = disk.close().await {
                tracing::error!(
                    machine = open.machine,
                    "closing the disk of a machine failed: {}",
                    problem(&error)
                );
            }
        }
    }
}
