//! New keys for a machine: its SSH host key, which its guest gets at its next boot.
//!
//! A key that is on a disk which outlives the change would go on there, and the seal of that disk would not know it. So a machine that is on,
//! keeps its disk or edits an image is refused.

use headwater_db::{MachineRecord, Purpose};
use ssh_key::{HashAlg, PublicKey};

use crate::Service;
use crate::caller::Caller;
use crate::identity;
use crate::lifecycle::LifecycleError;

/// What is done, for messages.
const WHAT: &str = "rotate the keys of";

impl Service {
    /// Gives a machine that is off another SSH host key.
    pub(crate) async fn rotate(&self, name: &str, caller: &Caller) -> Result<MachineRecord, LifecycleError> {
        let (_turn, mut record) = self.turn_of(name).await?;
        Self::is_vm(WHAT, &record)?;
        self.must_be_own(WHAT, &record).await?;
        if self.active(record.uuid).is_some() || self.is_restarting(record.uuid) {
            let what = format!("{WHAT} '{name}'");
            let state = record.state.name();
            return Err(LifecycleError::StillOn { what, machine: name.to_owned(), state });
        }
        let keys = identity::new_host_key(self.random(), &record.identity.host_name);
        let (public, private) =
            keys.map_err(|source| LifecycleError::NoKeys { machine: name.to_owned(), source })?;
        let mut repo = self.db().write().await?;
        if let Some(disk) = repo.persistent_disks().of_machine(record.uuid).await?.into_iter().next() {
            let machine = name.to_owned();
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
            "SSH host key {} -> {}",
            fingerprint(&record.identity.ssh_host_key_public),
            fingerprint(&public)
        );
        record.identity.ssh_host_key_public = public;
        record.ssh_host_key_private = private;
        repo.machines().set_host_key(&record).await?;
        repo.events().append(self.event(caller, format!("machine {name}"), "rotated", detail)).await?;
        repo.save().await?;
        Ok(record)
    }
}
