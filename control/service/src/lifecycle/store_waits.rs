//! How long whoever has a machine's turn waits for the store. One that hangs answers nobody, and who stops the machine waits for its
//! turn: it is given up some time after the daemon began to stop, and at once where somebody ends the machine by force.
//!
//! What is given up only looks something up, or waits for others, and so leaves nothing half done.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use headwater_api::ProblemKind;
use tokio::sync::{OwnedMutexGuard, RwLockReadGuard, watch};
use uuid::Uuid;

use crate::Service;
use crate::backend::BackendError;

/// How long after the daemon began to stop the store may still answer.
const STORE_GRACE: Duration = Duration::from_secs(10);

/// How many wait for a machine's turn to end it by force.
#[derive(Default)]
pub(crate) struct ForcedStops(watch::Sender<HashMap<Uuid, usize>>);

impl Service {
    /// Waits for the machine's turn to end it by force: whoever has it gives the store up.
    pub(super) async fn lock_by_force(&self, machine: Uuid) -> OwnedMutexGuard<()> {
        self.forced().0.send_modify(|forced| *forced.entry(machine).or_default() += 1);
        let _waiting = Waiting { service: self, machine };
        self.lock(machine).await
    }

    /// See [`Service::using_versions`]: who is alone with the versions asks the store.
    pub(super) async fn using_versions_for(
        &self,
        machine: Uuid,
    ) -> Result<RwLockReadGuard<'_, ()>, BackendError> {
        self.unless_given_up(machine, async { Ok(self.using_versions().await) }).await
    }

    /// What a look at the store finds for a machine, unless that is given up.
    pub(super) async fn unless_given_up<T>(
        &self,
        machine: Uuid,
        look: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let by_force = async {
            let mut forced = self.forced().0.subscribe();
            // Its sender is there for as long as the service is.
            let _ = forced.wait_for(|forced| forced.contains_key(&machine)).await;
        };
        let why = tokio::select! {
            biased;
            found = look => return found,
            () = by_force => "the machine is ended by force",
            () = self.stopping_for(STORE_GRACE) => "the daemon is stopping",
        };
        Err(BackendError::new(ProblemKind::Unavailable, format!("the store has not answered, and {why}")))
    }
}

/// One who waits.
struct Waiting<'a> {
    service: &'a Service,
    machine: Uuid,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.service.forced().0.send_modify(|forced| {
            let left = forced.remove(&self.machine).unwrap_or(0).saturating_sub(1);
            if left > 0 {
                forced.insert(self.machine, left);
            }
        });
    }
}
