//! Pools: catalogs of which some machines are kept on, fresh and unclaimed.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwater_api::MachineState;
use headwater_db::{DbError, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::claims::lendable;
use crate::tasks::is_changing;

/// How many machines of one catalog are started at a time.
const STARTS_AT_A_TIME: usize = 4;

/// After how long a machine that did not start is tried again.
const TRY_AGAIN_MS: u64 = 30_000;

/// What is under way.
#[derive(Debug, Default)]
pub(super) struct PoolState(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Claims that wait, by catalog.
    demand: HashMap<String, u32>,
    /// Machines that are being started.
    starting: HashSet<Uuid>,
    /// Machines that did not start, and when they are tried again.
    failed: HashMap<Uuid, u64>,
}

impl PoolState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claim that waits; dropped when it does not any more.
pub(super) struct Demand(Service, String);

impl Drop for Demand {
    fn drop(&mut self) {
        let mut state = self.0.claims_state().pool.lock();
        if let Some(count) = state.demand.get_mut(&self.1) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                state.demand.remove(&self.1);
            }
        }
    }
}

impl Service {
    /// Has one machine more be kept ready in a catalog.
    pub(super) fn demand(&self, catalog: &str) -> Demand {
        *self.claims_state().pool.lock().demand.entry(catalog.to_owned()).or_default() += 1;
        Demand(self.clone(), catalog.to_owned())
    }

    /// Starts machines of catalogs that have too few ready.
    pub(crate) async fn keep_pools(&self) -> Result<(), DbError> {
        if self.is_stopping() {
            return Ok(());
        }
        for (catalog, wanted) in self.wanted_ready().await? {
            // A roll or a change of the number of machines starts and stops them itself.
            let mut repo = self.db().read().await?;
            if is_changing(&mut *repo, &catalog).await? {
                continue;
            }
            let claimed: HashSet<Uuid> =
                repo.claims().list().await?.into_iter().map(|claim| claim.machine).collect();
            let mut members = lendable(self, &mut *repo, &catalog).await?;
            members.retain(|machine| !claimed.contains(&machine.uuid));
            drop(repo);
            self.start_missing(&members, wanted);
        }
        Ok(())
    }

    /// How many machines are to be ready, by catalog.
    async fn wanted_ready(&self) -> Result<HashMap<String, usize>, DbError> {
        let pools = self.db().read().await?.catalogs().pools().await?;
        let demand = self.claims_state().pool.lock().demand.clone();
        let mut wanted = HashMap::<String, usize>::new();
        for (catalog, count) in pools.into_iter().chain(demand) {
            *wanted.entry(catalog).or_default() += usize::try_from(count).unwrap_or(usize::MAX);
        }
        Ok(wanted)
    }

    /// Whether a machine is ready to be claimed, or will be soon.
    fn is_coming(&self, machine: &MachineRecord, state: &State) -> bool {
        state.starting.contains(&machine.uuid)
            || self.active(machine.uuid).is_some_and(|active| !active.is_used())
    }

    fn start_missing(&self, free: &[MachineRecord], wanted: usize) {
        let now_ms = self.now_ms();
        let mut state = self.claims_state().pool.lock();
        let coming = free.iter().filter(|machine| self.is_coming(machine, &state)).count();
        let under_way = free.iter().filter(|machine| state.starting.contains(&machine.uuid)).count();
        let missing = wanted.saturating_sub(coming).min(STARTS_AT_A_TIME.saturating_sub(under_way));
        state.failed.retain(|_, again_ms| *again_ms > now_ms);
        let is_off = |machine: &&MachineRecord| {
            self.active(machine.uuid).is_none()
                && !machine.state.is_active()
                && !state.starting.contains(&machine.uuid)
                && !state.failed.contains_key(&machine.uuid)
                && !self.is_restarting(machine.uuid)
        };
        let mut off: Vec<_> = free.iter().filter(is_off).cloned().collect();
        // A machine that crashed last may do so again.
        off.sort_by_key(|machine| machine.state == MachineState::Crashed);
        for machine in off.into_iter().take(missing) {
            state.starting.insert(machine.uuid);
            let (service, under_way) = (self.clone(), self.begin_operation());
            tokio::spawn(async move {
                let _under_way = under_way;
                let started = service.start(&machine.name, &Caller::daemon()).await;
                let mut state = service.claims_state().pool.lock();
                state.starting.remove(&machine.uuid);
                if let Err(error) = started {
                    let why = problem(&error);
                    tracing::warn!(machine = %machine.name, "it was to be ready to be claimed, and does not start: {why}");
                    state.failed.insert(machine.uuid, service.now_ms().saturating_add(TRY_AGAIN_MS));
                }
            });
        }
    }

    /// Whether a catalog would have too few machines ready if this one were switched off.
    pub(super) async fn is_short(&self, machine: &MachineRecord) -> Result<bool, DbError> {
        let Some(catalog) = &machine.catalog else { return Ok(false) };
        let wanted = self.wanted_ready().await?.get(catalog).copied().unwrap_or(0);
        let mut repo = self.db().read().await?;
        let claimed: HashSet<Uuid> =
            repo.claims().list().await?.into_iter().map(|claim| claim.machine).collect();
        let members = lendable(self, &mut *repo, catalog).await?;
        drop(repo);
        let state = self.claims_state().pool.lock();
        let free = members.iter().filter(|it| !claimed.contains(&it.uuid));
        Ok(free.filter(|it| self.is_coming(it, &state)).count() < wanted)
    }
}
