//! Pools: catalogs of which some machines are kept on, fresh and unclaimed.

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
    /// Machines that are being switched off, and are given to nobody.
    stopping: HashSet<Uuid>,
    /// Machines that did not start, and when they are tried again.
    failed: HashMap<Uuid, u64>,
    /// Machines that are too many, and since when, by catalog.
    excess: HashMap<String, HashMap<Uuid, u64>>,
}

impl PoolState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many machines of a catalog are too many.
    #[cfg(test)]
    pub(super) fn excess(&self, catalog: &str) -> usize {
        self.lock().excess.get(catalog).map_or(0, HashMap::len)
    }

    /// Whether a machine is about to be switched off, so that nobody can have it.
    pub(super) fn is_stopping(&self, machine: Uuid) -> bool {
        self.lock().stopping.contains(&machine)
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

/// How many machines are to be ready, and why.
#[derive(Debug)]
struct WantedReady {
    count: usize,
    why: String,
    stop_idle_ms: Option<u64>,
}

/// What a catalog asks for at an instant, and claims that wait for its machines.
fn wanted_of(pool: Option<&PoolRecord>, demand: u32, now_ms: u64) -> Result<WantedReady, Problem> {
    let mut reasons = Vec::new();
    let mut count = 0;
    if let Some(pool) = pool {
        let is_time = match &pool.ready_hours {
            Some(hours) => clock_hours::contain(hours, now_ms)?,
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
    /// Has one machine more be kept ready in a catalog.
    pub(super) fn demand(&self, catalog: &str) -> Demand {
        *self.claims_state().pool.lock().demand.entry(catalog.to_owned()).or_default() += 1;
        Demand(self.clone(), catalog.to_owned())
    }

    /// Starts machines of catalogs that have too few ready, and switches those off that are too many for long.
    pub(crate) async fn keep_pools(&self) -> Result<(), DbError> {
        if self.is_stopping() {
            return Ok(());
        }
        let pools = self.wanted_ready().await?;
        self.claims_state().pool.lock().excess.retain(|catalog, _| pools.contains_key(catalog));
        for (catalog, wanted) in pools {
            // A roll or a change of the number of machines starts and stops them itself.
            let mut repo = self.db().read().await?;
            if is_changing(&mut *repo, &catalog).await? {
                continue;
            }
            let claimed: HashSet<Uuid> =
                repo.claims().list().await?.into_iter().map(|claim| claim.machine).collect();
            let members = lendable(self, &mut *repo, &catalog).await?;
            drop(repo);
            for machine in &members {
                // A claim is not to wait for what the guest says.
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

    /// How many machines are to be ready now, by catalog.
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
                // The time zone was known when it was set.
                tracing::error!(catalog, "its machines are left as they are: {why}");
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

    /// What is to be done with the machines of a catalog. From now on, each machine of a step counts as being started or switched off.
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
                    tracing::info!(machine = %name, "starting it: {why}");
                    let started = service.start(&name, &Caller::daemon()).await;
                    let mut state = service.claims_state().pool.lock();
                    state.starting.remove(&machine);
                    if let Err(error) = started {
                        let why = problem(&error);
                        tracing::warn!(machine = %name, "it was to be ready to be claimed, and does not start: {why}");
                        state.failed.insert(machine, service.now_ms().saturating_add(TRY_AGAIN_MS));
                    }
                }
                Action::Stop => {
                    if let Err(error) = service.stop_idle(machine, &name, &why).await {
                        tracing::warn!(machine = %name, "it is not needed, and is not switched off: {error}");
                    }
                    service.claims_state().pool.lock().stopping.remove(&machine);
                }
            }
        });
    }

    /// Switches a machine off that nobody has. It is among those that are being switched off, which no claim takes.
    async fn stop_idle(&self, machine: Uuid, name: &str, why: &str) -> Result<(), Problem> {
        let claims = async {
            // A unit of changes: a claim that looked at the machine before it was among those has been saved by now.
            let mut repo = self.db().write().await?;
            repo.claims().list().await
        };
        let claims = claims.await.map_err(|e| problem(&e))?;
        let is_used = self.active(machine).is_none_or(|active| active.is_used());
        if is_used || claims.iter().any(|claim| claim.machine == machine) {
            return Ok(());
        }
        tracing::info!(machine = %name, "switching it off: {why}");
        // Its disk is pristine: nothing is lost.
        self.stop(name, true, &Caller::daemon()).await.map(drop).map_err(|e| problem(&e))
    }

    /// Whether a catalog would have too few machines ready if this one were switched off.
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
