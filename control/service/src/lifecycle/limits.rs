//! Changes the limits of a machine's write cache, and the memory and processors of its guest, for `PATCH /machines/{machine}`. Limits
//! apply at once if the machine is on; memory and processors can be changed only while it is off.

use headwater_api::platform::Platform;
use headwater_api::words::size;
use headwater_api::{CacheSettings, Change, Machine, SetMachine};
use headwater_db::{DbError, MachineRecord, Purpose};
use serde_json::json;

use crate::Service;
use crate::backend::VmPlan;
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;
use crate::lifecycle::boot::{files_of, session_cache};

impl Service {
    /// Records new limits, and applies them to the disk of a machine that is on. Memory and processors can be changed only
    /// while it is off.
    pub(crate) async fn set_limits(
        &self,
        name: &str,
        limits: SetMachine,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let (_turn, mut record) = self.turn_of(name).await?;
        if !self.is_own(&record) {
            return self.set_remote(record, limits, caller).await;
        }
        let uuid = record.uuid;
        let active = self.active(uuid);
        // This also records earlier limits that could not be recorded.
        let noted_before = record.cache;
        let before = active.as_ref().and_then(|active| *active.pending_limits()).unwrap_or(noted_before);
        let guest_before = (record.memory_bytes, record.cpus);
        record.memory_bytes = limits.memory_bytes.unwrap_or(record.memory_bytes);
        record.cpus = limits.cpus.unwrap_or(record.cpus);
        if (record.memory_bytes, record.cpus) != guest_before {
            self.check_guest(&record, active.is_some()).await?;
        }
        record.cache = before;
        let was_in_use = self.cache_in_use(&record).await?;
        record.cache.ram_bytes = limits.ram_bytes.unwrap_or(before.ram_bytes);
        record.cache.disk_bytes = limits.disk_bytes.unwrap_or(before.disk_bytes);
        record.cache.weight = limits.weight.unwrap_or(before.weight);
        let in_use = self.cache_in_use(&record).await?;
        let checked = self.disks().check_change(&was_in_use, &in_use).await;
        checked.map_err(LifecycleError::backend("change", name))?;
        if let Some(active) = &active {
            active.disk.check_limits(&in_use).map_err(LifecycleError::backend("change", name))?;
        }
        let changes = changed(&noted_before, guest_before, &record);
        let event = self.event(caller, format!("machine {name}"), "set", changes);
        let fields = |cache: &CacheSettings, (memory_bytes, cpus): (u64, u32)| {
            let CacheSettings { ram_bytes, disk_bytes, weight, .. } = *cache;
            json!({
                "ram_bytes": ram_bytes, "disk_bytes": disk_bytes, "weight": weight, "memory_bytes": memory_bytes, "cpus": cpus,
            })
        };
        let after = fields(&record.cache, (record.memory_bytes, record.cpus));
        let event = event.changing(Change::between(&fields(&noted_before, guest_before), &after));
        let note = async {
            let mut repo = self.db().write().await?;
            let found = repo.machines().set_limits(&record).await?;
            if found {
                repo.events().append(event).await?;
                repo.save().await?;
            }
            Ok(found)
        };
        let noted: Result<bool, DbError> = note.await;
        if let Ok(false) = noted {
            return Err(LifecycleError::Unknown(name.to_owned()));
        }
        let Some(active) = active else { return noted.map(|_| record).map_err(LifecycleError::Db) };
        // Even if they cannot be recorded: on a full disk they may be what lets the machine continue.
        active.disk.set_limits(&in_use);
        *active.pending_limits() = noted.is_err().then_some(record.cache);
        tracing::info!(machine = name, caller = %caller.principal, ?limits, "new limits");
        noted
            .map(|_| record)
            .map_err(|source| LifecycleError::LimitsNotNoted { machine: name.to_owned(), source })
    }
}

impl Service {
    /// Fails for memory and processors that the host cannot provide, and for any such change while the machine is on.
    async fn check_guest(&self, record: &MachineRecord, is_on: bool) -> Result<(), LifecycleError> {
        if is_on {
            let (machine, state) = (record.name.clone(), record.state.name());
            return Err(LifecycleError::StillOn {
                what: "change memory or processors".to_owned(),
                machine,
                state,
            });
        }
        let plan = VmPlan {
            name: &record.name,
            memory_bytes: record.memory_bytes,
            cpus: record.cpus,
            // The platform does not change here, and a start checks it.
            platform: &Platform::default(),
            host_name: &record.identity.host_name,
            user_data: record.identity.user_data.as_deref(),
        };
        self.hypervisor().check(plan).await.map_err(LifecycleError::backend("change", &record.name))
    }

    /// Why a machine that is off could not be started now for lack of disk space. Only a warning, because no space is
    /// reserved, and there may be space at the start.
    pub(crate) async fn lacks_space(&self, machine: &Machine) -> Option<String> {
        if self.active(machine.uuid).is_some() {
            return None;
        }
        // Only its node knows the space on another host.
        let record = self.record_of(machine.uuid, &machine.name).await.ok()?;
        if !self.is_own(&record) {
            return None;
        }
        let kept = |purpose| self.persistent_disk(machine.uuid, purpose);
        // The start reports what cannot be determined now.
        let (disk, cache) = match kept(Purpose::MaintenanceSession).await.ok()? {
            Some(edit) => (Some(edit), session_cache(machine.cache)),
            None if machine.cache.persistent => (kept(Purpose::Persistent).await.ok()?, machine.cache),
            None => (None, machine.cache),
        };
        let scratch_bytes = record.platform.scratch_bytes;
        let checked = self.disks().check_space(&cache, disk.as_ref().map(files_of), scratch_bytes).await;
        checked.err().map(|why| format!("machine '{}' could not be started now: {why}", machine.name))
    }
}

/// The changes, in words.
fn changed(before: &CacheSettings, guest_before: (u64, u32), record: &MachineRecord) -> String {
    let (mut changes, after, (memory_before, cpus_before)) = (Vec::new(), &record.cache, guest_before);
    for (what, before, after) in [
        ("RAM", before.ram_bytes, after.ram_bytes),
        ("disk", before.disk_bytes, after.disk_bytes),
        ("memory of the guest", memory_before, record.memory_bytes),
    ] {
        if before != after {
            changes.push(format!("{what} {} -> {}", size(before), size(after)));
        }
    }
    if before.weight != after.weight {
        changes.push(format!("weight {} -> {}", before.weight, after.weight));
    }
    if cpus_before != record.cpus {
        changes.push(format!("processors {cpus_before} -> {}", record.cpus));
    }
    if changes.is_empty() { "as before".to_owned() } else { changes.join(", ") }
}
