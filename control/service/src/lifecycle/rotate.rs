//! Gives a machine a new SSH host key, which its guest gets at its next boot.
//!
//! A user asks for that, or the catalog of the machine says how old a key may be: then `start.rs` has a new key made before the boot.
//!
//! A key on a disk that outlives the change would stay in use there, and the seal of that disk would not know it. So the change is
//! refused for a machine that is on, has a persistent disk or is in a maintenance session.

use headwater_api::BootFrom;
use headwater_db::{MachineRecord, Purpose};
use ssh_key::{HashAlg, PublicKey};

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::identity;
use crate::lifecycle::LifecycleError;

/// The name of the operation in messages.
const WHAT: &str = "rotate the SSH host key of";

impl Service {
    /// Gives a machine that is off a new SSH host key.
    pub(crate) async fn rotate(&self, name: &str, caller: &Caller) -> Result<MachineRecord, LifecycleError> {
        let (_turn, record) = self.turn_of(name).await?;
        Self::is_vm(WHAT, &record)?;
        self.must_be_own(WHAT, &record).await?;
        if self.active(record.uuid).is_some() || self.is_restarting(record.uuid) {
            let what = format!("{WHAT} '{name}'");
            let state = record.state.name();
            return Err(LifecycleError::StillOn { what, machine: name.to_owned(), state });
        }
        self.give_other_key(record, caller, "").await
    }

    /// Gives a machine another key, if nothing of the one from before is kept on a disk. The caller has its turn.
    async fn give_other_key(
        &self,
        mut record: MachineRecord,
        caller: &Caller,
        because: &str,
    ) -> Result<MachineRecord, LifecycleError> {
        let name = &record.name.clone();
        let keys = identity::new_host_key(self.random(), &record.identity.host_name);
        let (public, private) =
            keys.map_err(|source| LifecycleError::NoKeys { machine: name.clone(), source })?;
        let mut repo = self.db().write().await?;
        if let Some(disk) = repo.persistent_disks().of_machine(record.uuid).await?.into_iter().next() {
            let machine = name.clone();
            return Err(match disk.purpose {
                Purpose::MaintenanceSession => {
                    LifecycleError::Edits { what: WHAT, machine, image: disk.image }
                }
                Purpose::Persistent => LifecycleError::KeepsKeys { machine },
            });
        }
        let fingerprint = |key: &str| {
            PublicKey::from_openssh(key)
                .map_or_else(|_| "none".to_owned(), |key| key.fingerprint(HashAlg::Sha256).to_string())
        };
        let detail = format!(
            "SSH host key {} -> {}{because}",
            fingerprint(&record.identity.ssh_host_key_public),
            fingerprint(&public)
        );
        record.identity.ssh_host_key_public = public;
        record.ssh_host_key_private = private;
        repo.machines().set_host_key(&record).await?;
        repo.keys().set_made_at(record.uuid, self.now_ms()).await?;
        repo.events().append(self.event(caller, format!("machine {name}"), "rotated", detail)).await?;
        repo.save().await?;
        Ok(record)
    }

    /// A machine that is about to boot with a pristine disk, with another key if its catalog says that its key is too old. If it cannot get
    /// another one it boots with the key that it has. The caller has its turn.
    pub(crate) async fn with_young_key(&self, record: MachineRecord) -> MachineRecord {
        let due = async {
            match self.key_is_due(&record).await? {
                Some(days) => {
                    let because = format!(", because it was {days} days old");
                    self.give_other_key(record.clone(), &Caller::daemon(), &because).await
                }
                None => Ok(record.clone()),
            }
        };
        due.await.unwrap_or_else(|error| {
            let machine = &record.name;
            tracing::warn!(
                machine,
                "cannot give a machine another SSH host key, so it boots with one that is too old: {}",
                problem(&error)
            );
            record
        })
    }

    /// The age in days of a key that is to be replaced. `None`: it may be used on.
    async fn key_is_due(&self, record: &MachineRecord) -> Result<Option<u64>, LifecycleError> {
        let Some(catalog) = &record.catalog else { return Ok(None) };
        if record.boot != BootFrom::Vm || record.cache.persistent || record.kept.is_some() {
            return Ok(None);
        }
        let mut repo = self.db().read().await?;
        let rules = repo.keys().rotate_after().await?;
        let Some((_, after_s)) = rules.into_iter().find(|(its, _)| its == catalog) else { return Ok(None) };
        let made_at_ms = repo.keys().made_at(record.uuid).await?.unwrap_or(record.created_at_ms);
        let age_s = self.now_ms().saturating_sub(made_at_ms) / 1000;
        // The key of an edit is on its disk.
        let is_kept = !repo.persistent_disks().of_machine(record.uuid).await?.is_empty();
        Ok((age_s >= after_s && !is_kept).then_some(age_s / 86_400))
    }
}
