//! Keeps the identity of a machine out of versions that others boot: its SSH host key, machine-id and host name. `seal.rs` calls this.
//!
//! ```text
//!   image seal, machine on    removed in the guest -> switched off -> searched: found -> error
//!   image seal, machine off                                           searched: found -> error
//!   machine seal, machine on                                          searched: found -> the version is marked
//! ```
//! A version is also marked as not generalised if the guest removed nothing, and either file systems could not be searched, or the parent
//! version is marked. With `keep_identity` nothing is removed or searched, and the version is marked.

use std::sync::Arc;

use headwater_api::{ImageVersion, MachineState, ProblemKind};
use headwater_db::{MachineRecord, PersistentDisk};

use crate::Service;
use crate::answer::Explain;
use crate::backend::{BackendError, FrozenDisk, Given, IdentityLeft, TaskControl};
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::lifecycle::seal::{cancelled, given_up};
use crate::lifecycle::{Active, LifecycleError};

/// Whether a version is marked because it may contain a machine's identity. The search knows the identity of the sealed
/// machine, but not that of the machine from which the parent version was made. So the child of a marked version is
/// marked too, unless the guest removed all identities.
pub(super) fn keeps_identity(left: &IdentityLeft, parent: &ImageVersion, is_generalised: bool) -> bool {
    let may_be_elsewhere = !left.unread.is_empty() || parent.keeps_identity;
    !left.found.is_empty() || (may_be_elsewhere && !is_generalised)
}

/// The error if a catalog's setting could not be read.
fn of_catalog(error: CatalogError) -> BackendError {
    BackendError::new(error.kind(), "cannot read the catalog's list of files that a seal removes")
        .because(error)
}

impl Service {
    /// Asks the guest of a maintenance session to remove the machine's identity. The caller holds the machine's lock.
    pub(super) async fn generalise(
        &self,
        edit: &PersistentDisk,
        record: &MachineRecord,
        active: &Arc<Active>,
        control: &TaskControl,
    ) -> Result<Vec<String>, LifecycleError> {
        if record.state != MachineState::Running {
            let (what, machine) = (format!("seal image '{}'", edit.image), record.name.clone());
            return Err(LifecycleError::StillOn { what, machine, state: record.state.name() });
        }
        let failed = LifecycleError::backend("seal", &record.name);
        if let Err(e) = active.disk.can_freeze() {
            return Err(failed(e));
        }
        let also = match &record.catalog {
            Some(catalog) => self.catalog(catalog).await.map_err(|e| failed(of_catalog(e)))?.seal_removes,
            None => Vec::new(),
        };
        let failed = LifecycleError::backend("seal", &record.name);
        let doing = format!("removing the identity of {} in its guest", record.name);
        control.report_doing(doing);
        let removed = tokio::select! {
            biased;
            removed = active.vm.generalise(&record.identity.host_name, &also) => removed,
            () = given_up(control) => return Err(failed(cancelled())),
            _ = active.vm.exited() => {
                Err(BackendError::new(ProblemKind::Conflict, "the machine was switched off meanwhile"))
            }
        };
        removed.map_err(|source| {
            let (image, machine) = (edit.image.clone(), record.name.clone());
            LifecycleError::NotGeneralised { image, machine, source }
        })
    }

    /// Switches off a machine whose guest has removed its identity. If the guest does not shut down, the seal fails,
    /// because writes of the guest may be missing on its disk. The caller holds the machine's lock.
    pub(super) async fn switch_off_generalised(
        &self,
        edit: &PersistentDisk,
        record: MachineRecord,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let record = self.stop_locked(record, false, caller).await?;
        match &record.reason {
            None => Ok(record),
            Some(how) => {
                let (image, how) = (edit.image.clone(), how.clone());
                Err(LifecycleError::NotInOrder { image, machine: record.name, how })
            }
        }
    }

    /// Searches a disk for its machine's identity.
    pub(super) async fn identity_left(
        &self,
        disk: &dyn FrozenDisk,
        record: &MachineRecord,
        control: &Arc<TaskControl>,
    ) -> Result<IdentityLeft, LifecycleError> {
        control.report_doing(format!("searching the disk of {} for its identity", record.name));
        let given = Given {
            host_name: record.identity.host_name.clone(),
            machine_id: record.identity.machine_id.clone(),
            ssh_host_key_private: record.ssh_host_key_private.clone(),
        };
        let left = disk.identity_left(given, Arc::clone(control)).await;
        left.map_err(LifecycleError::backend("seal", &record.name))
    }
}
