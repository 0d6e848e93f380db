//! Pools: catalogs with some machines that are kept on, freshly booted and unclaimed, so that a claim gets one at once.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwater_api::{MachineState, Problem};
use headwater_db::{DbError, MachineRecord, PoolRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::claims::lendable;
use crate::claims::plan::{Action, Member, MemberState, Pool, Step, plan};
use crate::clock_hours;
use crate::tasks::is_changing;

/// When a failed start is retried.
const RETRY_AFTER_MS: u64 = 30_000;

/// The machines that are being started or switched off, and the claims that wait.
#[derive(Debug, Default)]
pub(super) struct PoolState(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of claims that wait, by catalog.
    demand: HashMap<String, u32>,
    /// Machines that are being started.
    starting: HashSet<Uuid>,
    /// Machines that are being switched off, so that no claim gets them.
    stopping: HashSet<Uuid>,
    /// Machines that failed to start, and when they are retried.
    failed: HashMap<Uuid, u64>,
    /// By catalog: surplus machines, and since when they are.
    excess: HashMap<String, HashMap<Uuid, u64>>,
}

impl PoolState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of surplus machines of a catalog.
    #[cfg(test)]
    pub(super) fn excess(&self, catalog: &str) -> usize {
        self.lock().excess.get(catalog).map_or(0, HashMap::len)
    }

    /// Whether a machine is about to be switched off, so that no claim may get it.
    pub(super) fn is_stopping(&self, machine: Uuid) -> bool {
        self.lock().stopping.contains(&machine)
    }
}

/// A claim that waits. Dropped when it no longer waits.
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

/// How many machines should be ready, and why.
#[derive(Debug)]
struct WantedReady {
    count: usize,
    why: String,
    stop_idle_ms: Option<u64>,
}

/// The number of machines that should be ready at an instant, from a catalog's settings and the number of claims that wait.
fn wanted_of(pool: Option<&PoolRecord>, demand: u32, now_ms: u64) -> Result<WantedReady, Problem> {
    let mut reasons = Vec::new();
    let mut count = 0;
    if let Some(pool) = pool {
        let is_time = match &pool.ready_hours {
            Some(hours) => clock_hours::is_within(hours, now_ms)?,
            None => true,
        };
        if is_time {
            count = pool.keep_ready;
        }
        reasons.push(match (&pool.ready_hours, is_time) {
            (None, _) => format!("{} are kept ready", pool.keep_ready),
            (Some(hours), true) => format!("{} are kept ready {hours}", pool.keep_ready),
            (Some(hours), false) => format!("none is kept ready outside of {hours}"),
        });
    }
    if demand > 0 {
        reasons.push(format!("{demand} claims wait"));
    }
    let idle_s = pool.map_or(0, |pool| pool.stop_idle_s);
    Ok(WantedReady {
        count: usize::try_from(count.saturating_add(demand)).unwrap_or(usize::MAX),
        why: reasons.join(", "),
        stop_idle_ms: (idle_s > 0).then(|| idle_s.saturating_mul(1000)),
    })
}

impl Service {
    /// Raises the number of machines to keep ready in a catalog by one, until the result is dropped.
    pub(super) fn demand(&self, catalog: &str) -> Demand {
        *self.claims_state().pool.lock().demand.entry(catalog.to_owned()).or_default() += 1;
        Demand(self.clone(), catalog.to_owned())
    }

    /// Starts machines of catalogs with too few ready machines, and switches off machines that are surplus for too long.
    pub(crate) async fn keep_pools(&self) -> Result<(), DbError> {
        if self.is_stopping() {
            return Ok(());
        }
        let pools = self.wanted_ready().await?;
        self.claims_state().pool.lock().excess.retain(|catalog, _| pools.contains_key(catalog));
        for (catalog, wanted) in pools {
            // A roll or a scaling starts and stops the machines itself.
            let mut repo = self.db().read().await?;
            if is_changing(&mut *repo, &catalog).await? {
                continue;
            }
            let claimed: HashSet<Uuid> =
                repo.claims().list().await?.into_iter().map(|claim| claim.machine).collect();
            let members = lendable(self, &mut *repo, &catalog).await?;
            drop(repo);
            for machine in &members {
                // Ask for the addresses now, so that a claim need not wait for the guest.
                if let Some(active) = self.active(machine.uuid).filter(|active| active.boot_time().is_some())
                {
                    drop(self.learn_addresses(&active));
                }
            }
            for step in self.pool_steps(&catalog, wanted, &members, &claimed) {
                self.take_step(step);
            }
        }
        Ok(())
    }

    /// How many machines should be ready now, by catalog.
    async fn wanted_ready(&self) -> Result<HashMap<String, WantedReady>, DbError> {
        let pools = self.db().read().await?.catalogs().pools().await?;
        let mut demand = self.claims_state().pool.lock().demand.clone();
        let now_ms = self.now_ms();
        let pools = pools.into_iter().map(|pool| {
            let waiting = demand.remove(&pool.catalog).unwrap_or(0);
            (pool.catalog.clone(), wanted_of(Some(&pool), waiting, now_ms))
        });
        let mut wanted: Vec<(String, Result<WantedReady, Problem>)> = pools.collect();
        wanted.extend(demand.into_iter().map(|(catalog, count)| (catalog, wanted_of(None, count, now_ms))));
        let known = wanted.into_iter().filter_map(|(catalog, wanted)| match wanted {
            Ok(wanted) => Some((catalog, wanted)),
            Err(why) => {
                // The time zone was valid when it was set.
                tracing::error!(catalog, "cannot determine how many machines should be ready now, so none is started or switched off: {why}");
                None
            }
        });
        Ok(known.collect())
    }

    fn state_of(&self, machine: &MachineRecord, state: &State) -> MemberState {
        if state.starting.contains(&machine.uuid) {
            return MemberState::Starting;
        }
        if state.stopping.contains(&machine.uuid) {
            return MemberState::Stopping;
        }
        match self.active(machine.uuid) {
            Some(active) if !active.is_used() => MemberState::Free,
            Some(_) => MemberState::Other,
            None if machine.state.is_active()
                || state.failed.contains_key(&machine.uuid)
                || self.is_restarting(machine.uuid) =>
            {
                MemberState::Other
            }
            None => MemberState::Off { has_crashed: machine.state == MachineState::Crashed },
        }
    }

    fn pool_of(
        &self,
        wanted: WantedReady,
        members: &[MachineRecord],
        claimed: &HashSet<Uuid>,
        state: &State,
    ) -> Pool {
        let WantedReady { count, why, stop_idle_ms } = wanted;
        let member = |machine: &MachineRecord| Member {
            uuid: machine.uuid,
            name: machine.name.clone(),
            state: match claimed.contains(&machine.uuid) {
                true => MemberState::Other,
                false => self.state_of(machine, state),
            },
        };
        Pool { wanted: count, why, stop_idle_ms, machines: members.iter().map(member).collect() }
    }

    /// The steps for the machines of a catalog. They are marked as being started or switched off at once.
    fn pool_steps(
        &self,
        catalog: &str,
        wanted: WantedReady,
        members: &[MachineRecord],
        claimed: &HashSet<Uuid>,
    ) -> Vec<Step> {
        let now_ms = self.now_ms();
        let mut state = self.claims_state().pool.lock();
        state.failed.retain(|_, again_ms| *again_ms > now_ms);
        let pool = self.pool_of(wanted, members, claimed, &state);
        let steps = plan(&pool, now_ms, state.excess.entry(catalog.to_owned()).or_default());
        for step in &steps {
            match step.action {
                Action::Start => state.starting.insert(step.machine),
                Action::Stop => state.stopping.insert(step.machine),
            };
        }
        steps
    }

    fn take_step(&self, step: Step) {
        let (service, under_way) = (self.clone(), self.begin_operation());
        tokio::spawn(async move {
            let _under_way = under_way;
            let Step { action, machine, name, why } = step;
            match action {
                Action::Start => {
                    tracing::info!(machine = %name, "starting a machine to keep it ready for claims: {why}");
                    let started = service.start(&name, &Caller::daemon()).await;
                    let mut state = service.claims_state().pool.lock();
                    state.starting.remove(&machine);
                    if let Err(error) = started {
                        let why = problem(&error);
                        tracing::warn!(machine = %name, "cannot start a machine to keep it ready for claims; it is tried again: {why}");
                        state.failed.insert(machine, service.now_ms().saturating_add(RETRY_AFTER_MS));
                    }
                }
                Action::Stop => {
                    if let Err(error) = service.stop_idle(machine, &name, &why).await {
                        tracing::warn!(machine = %name, "cannot switch off an idle machine that is not needed; it is tried again: {error}");
                    }
                    service.claims_state().pool.lock().stopping.remove(&machine);
                }
            }
        });
    }

    /// Switches off an unclaimed machine. It is marked as being switched off, so that no claim gets it.
    async fn stop_idle(&self, machine: Uuid, name: &str, why: &str) -> Result<(), Problem> {
        let claims = async {
            // Begin a writer's transaction: claims that read the machine's state before it was marked have been saved by
            // now.
            let mut repo = self.db().write().await?;
            repo.claims().list().await
        };
        let claims = claims.await.map_err(|e| problem(&e))?;
        let is_used = self.active(machine).is_none_or(|active| active.is_used());
        if is_used || claims.iter().any(|claim| claim.machine == machine) {
            return Ok(());
        }
        tracing::info!(machine = %name, "switching off an idle machine that is not needed: {why}");
        // Its disk is pristine, so nothing is lost.
        self.stop(name, true, &Caller::daemon()).await.map(drop).map_err(|e| problem(&e))
    }

    /// Whether a catalog would have too few ready machines if this machine was switched off.
    pub(super) async fn is_short(&self, machine: &MachineRecord) -> Result<bool, DbError> {
        let Some(catalog) = &machine.catalog else { return Ok(false) };
        let Some(wanted) = self.wanted_ready().await?.remove(catalog) else { return Ok(false) };
        let mut repo = self.db().read().await?;
        let claimed: HashSet<Uuid> =
            repo.claims().list().await?.into_iter().map(|claim| claim.machine).collect();
        let members = lendable(self, &mut *repo, catalog).await?;
        drop(repo);
        let count = wanted.count;
        let state = self.claims_state().pool.lock();
        let pool = self.pool_of(wanted, &members, &claimed, &state);
        let is_ready = |member: &&Member| matches!(member.state, MemberState::Free | MemberState::Starting);
        Ok(pool.machines.iter().filter(is_ready).count() < count)
    }
}
