//! Keeping the identity of a machine out of versions that others boot: its SSH host key, machine-id and host name.
//!
//! ```text
//!   image seal, machine on    removed in the guest -> switched off -> searched: found -> refused
//!   image seal, machine off                                           searched: found -> refused
//!   machine seal of one that runs                                     searched: found -> the version is marked
//! ```
//! A version is marked, too, if the guest removed nothing and either file systems could not be looked into, or the version below is
//! marked. With `keep_identity` nothing is removed, looked for or refused, and the version is marked.

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

/// Whether a version says of itself that it may hold a machine's identity. The search knows the identity of the sealed machine, and
/// not that of the machine that its version was made of. So a version over a marked one is marked, too, unless the guest removed all
/// identities.
pub(super) fn keeps_identity(left: &IdentityLeft, parent: &ImageVersion, is_generalised: bool) -> bool {
    let may_be_elsewhere = !left.unread.is_empty() || parent.keeps_identity;
    !left.found.is_empty() || (may_be_elsewhere && !is_generalised)
}

/// What a catalog says could not be read.
fn of_catalog(error: CatalogError) -> BackendError {
    BackendError::new(error.kind(), "cannot read what a seal removes for its catalog").because(error)
}

impl Service {
    /// Has the guest of a machine that edits an image remove the machine's identity. The caller has its turn.
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
                Err(BackendError::new(ProblemKind::Conflict, "it ended meanwhile"))
            }
        };
        removed.map_err(|source| {
            let (image, machine) = (edit.image.clone(), record.name.clone());
            LifecycleError::NotGeneralised { image, machine, source }
        })
    }

    /// Switches a machine off whose guest has removed that. One that does not go off in order is not sealed in the same breath: what it had
    /// still to write is not on its disk. The caller has its turn.
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

    /// Looks on a disk for its machine's identity.
    pub(super) async fn identity_left(
        &self,
        disk: &dyn FrozenDisk,
        record: &MachineRecord,
        control: &Arc<TaskControl>,
    ) -> Result<IdentityLeft, LifecycleError> {
        control.report_doing(format!("looking for the identity of {} on its disk", record.name));
        let given = Given {
            host_name: record.identity.host_name.clone(),
            machine_id: record.identity.machine_id.clone(),
            ssh_host_key_private: record.ssh_host_key_private.clone(),
        };
        let left = disk.identity_left(given, Arc::clone(control)).await;
        left.map_err(LifecycleError::backend("seal", &record.name))
    }
}
