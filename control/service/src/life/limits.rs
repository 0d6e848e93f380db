//! Changing the limits of a machine's write cache.

use headwater_api::words::size;
use headwater_api::{CacheSettings, Machine, SetMachine};
use headwater_db::{DbError, MachineRecord, Purpose};

use crate::Service;
use crate::extract::Actor;
use crate::life::LifeError;
use crate::life::boot::{cache_of_edit, files_of};

impl Service {
    /// Notes new limits, and gives them to the disk of a machine that is on.
    pub(crate) async fn set_limits(
        &self,
        name: &str,
        limits: SetMachine,
        actor: &Actor,
    ) -> Result<MachineRecord, LifeError> {
        let (_turn, mut record) = self.turn_of(name).await?;
        let uuid = record.uuid;
        let active = self.active(uuid);
        // What it has and could not be noted is noted with this.
        let noted_before = record.cache;
        let before = active.as_ref().and_then(|active| *active.unnoted_limits()).unwrap_or(noted_before);
        record.cache.ram_bytes = limits.ram_bytes.unwrap_or(before.ram_bytes);
        record.cache.disk_bytes = limits.disk_bytes.unwrap_or(before.disk_bytes);
        record.cache.weight = limits.weight.unwrap_or(before.weight);
        let in_use = self.cache_in_use(&record).await?;
        self.disks().check(&in_use).await.map_err(LifeError::backend("change", name))?;
        if let Some(active) = &active {
            active.disk.check_limits(&in_use).map_err(LifeError::backend("change", name))?;
        }
        let event =
            self.event(actor, format!("machine {name}"), "set", changed(&noted_before, &record.cache));
        let note = async {
            let mut repo = self.db().write().await?;
            let found = repo.machines().set_limits(uuid, &record.cache).await?;
            if found {
                repo.events().append(event).await?;
                repo.save().await?;
            }
            Ok(found)
        };
        let noted: Result<bool, DbError> = note.await;
        if let Ok(false) = noted {
            return Err(LifeError::Unknown(name.to_owned()));
        }
        let Some(active) = active else { return noted.map(|_| record).map_err(LifeError::Db) };
        // Also where that cannot be noted: on a full disk it may be what lets the machine go on.
        active.disk.set_limits(&in_use);
        *active.unnoted_limits() = noted.is_err().then_some(record.cache);
        tracing::info!(machine = name, actor = %actor.0, ?limits, "new limits");
        noted.map(|_| record).map_err(|source| LifeError::LimitsNotNoted { machine: name.to_owned(), source })
    }
}

impl Service {
    /// Why a machine that is off could not be started now for want of disk space. Its limits are not refused for that: none is reserved
    /// ahead, and there may be space by then.
    pub(crate) async fn lacks_space(&self, machine: &Machine) -> Option<String> {
        if self.active(machine.uuid).is_some() {
            return None;
        }
        let kept = |purpose| self.kept_disk(machine.uuid, purpose);
        // What cannot be told now is told by the start.
        let (disk, cache) = match kept(Purpose::Edit).await.ok()? {
            Some(edit) => (Some(edit), cache_of_edit(machine.cache)),
            None if machine.cache.persistent => (kept(Purpose::Persistent).await.ok()?, machine.cache),
            None => (None, machine.cache),
        };
        let checked = self.disks().check_space(&cache, disk.as_ref().map(files_of)).await;
        checked.err().map(|why| format!("machine '{}' could not be started now: {why}", machine.name))
    }
}

/// What is another one than before.
fn changed(before: &CacheSettings, after: &CacheSettings) -> String {
    let mut changes = Vec::new();
    for (what, before, after) in
        [("RAM", before.ram_bytes, after.ram_bytes), ("disk", before.disk_bytes, after.disk_bytes)]
    {
        if before != after {
            changes.push(format!("{what} {} -> {}", size(before), size(after)));
        }
    }
    if before.weight != after.weight {
        changes.push(format!("weight {} -> {}", before.weight, after.weight));
    }
    if changes.is_empty() { "as before".to_owned() } else { changes.join(", ") }
}
