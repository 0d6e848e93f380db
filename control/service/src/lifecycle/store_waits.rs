//! Limits how long the holder of a machine's lock waits for the store. A stop of a machine needs the machine's lock. If the
//! lock's holder waited for a store that hangs, the stop would hang too. So the holder gives up: at once if the machine is
//! stopped by force, and 10 s after the daemon began to stop.
//!
//! Only look-ups and waits are cancelled in this way, so nothing is left half done.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use headwater_api::ProblemKind;
use tokio::sync::{OwnedMutexGuard, RwLockReadGuard, watch};
use uuid::Uuid;

use crate::Service;
use crate::backend::BackendError;

/// How long the store may take after the daemon began to stop.
const STORE_GRACE: Duration = Duration::from_secs(10);

/// By machine: the number of forced stops that wait for its lock.
#[derive(Default)]
pub(crate) struct ForcedStops(watch::Sender<HashMap<Uuid, usize>>);

impl Service {
    /// Waits for the machine's lock for a forced stop: the present holder stops waiting for the store.
    pub(crate) async fn lock_by_force(&self, machine: Uuid) -> OwnedMutexGuard<()> {
        self.forced().0.send_modify(|forced| *forced.entry(machine).or_default() += 1);
        let _waiting = Waiting { service: self, machine };
        self.lock(machine).await
    }

    /// As [`Service::using_versions`], but gives up as described above: another holder of that lock may be waiting for the
    /// store.
    pub(super) async fn using_versions_for(
        &self,
        machine: Uuid,
    ) -> Result<RwLockReadGuard<'_, ()>, BackendError> {
        self.unless_given_up(machine, async { Ok(self.using_versions().await) }).await
    }

    /// The result of work in a cloud for a machine, or why the wait was given up: the machine is being stopped by force, or
    /// the daemon stops. The next work for the machine completes what was left.
    pub(super) async fn unless_interrupted<T>(
        &self,
        machine: Uuid,
        work: impl Future<Output = T>,
    ) -> Result<T, &'static str> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.forced_to_stop(machine) => Err("it is being stopped by force"),
            () = self.stopping_for(Duration::ZERO) => Err("the daemon is stopping"),
        }
    }

    /// Waits until somebody stops the machine by force.
    async fn forced_to_stop(&self, machine: Uuid) {
        let mut forced = self.forced().0.subscribe();
        // The sender exists as long as the service.
        let _ = forced.wait_for(|forced| forced.contains_key(&machine)).await;
    }

    /// The result of a look-up in the store for a machine, or an error if the wait is given up as described above.
    pub(super) async fn unless_given_up<T>(
        &self,
        machine: Uuid,
        look: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let why = tokio::select! {
            biased;
            found = look => return found,
            () = self.forced_to_stop(machine) => "the machine is being stopped by force",
            () = self.stopping_for(STORE_GRACE) => "the daemon is stopping",
        };
        let message = format!("the wait for the store was given up, because {why}");
        Err(BackendError::new(ProblemKind::Unavailable, message))
    }
}

/// A forced stop that waits.
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
