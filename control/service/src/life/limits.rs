//! Changing the limits of a machine's write cache.

use headwater_api::words::size;
use headwater_api::{CacheSettings, SetMachine};
use headwater_db::{DbError, MachineRecord};

use crate::Service;
use crate::extract::Actor;
use crate::life::LifeError;

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
