//! The controller's side of leases: renews the leases of nodes, and starts machines of lost hosts on other hosts. Only fenced machines
//! are started elsewhere (`fence.rs`); all others wait for their host. The service calls it at its tick.
//!
//! ```text
//!   the lease and a margin are over by the controller's clock
//!     -> in one transaction: the host is recorded as lost, and its fenced machines are assigned to other hosts
//!     -> each is started there, with retries until it is on or not wanted any more
//!   the node reconnects
//!     -> the machines that were assigned to other hosts are removed on it -> it gets a lease
//! ```

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::http::Method;
use headwater_api::{HostState, MachineState, Problem, Wanted};
use headwater_db::{DbError, HostRecord, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::fleet::RETRY_PAUSE;
use crate::fleet::fence::LEASE;
use crate::fleet::lease::{Renewals, interval_ms, movable_from_ms};
use crate::fleet::link::Link;
use crate::fleet::placement::{Candidate, need_of, place};
use crate::lifecycle::LifecycleError;

/// The default duration of a lease.
const LEASE_MS: u64 = 30_000;

/// If a check comes later than this (or half a lease, if that is longer) after the previous one, the daemon stood still.
const STOOD_STILL_MS: u64 = 5_000;

/// The reserve for a late answer of a node, in addition to two intervals.
const HEARD_LATE_MS: u64 = 1_000;

/// The most machines of lost hosts that are being started at the same time.
const STARTS_AT_A_TIME: usize = 8;

/// The pause before a failed start of a moved machine is retried, in milliseconds.
const START_PAUSE_MS: u64 = 5_000;

/// The controller's state of the leases of its nodes. Times are milliseconds since the boot of this host.
#[derive(Default)]
pub(crate) struct Leases {
    lease_ms: OnceLock<u64>,
    /// When the last answer of each node was heard.
    heard: Mutex<HashMap<Uuid, u64>>,
    /// When this daemon got the database, or could reach it again. Answers from before do not count.
    counts_from: Mutex<Option<u64>>,
    /// When it was last checked whether hosts are lost.
    checked: Mutex<Option<u64>>,
    starting: Mutex<HashSet<Uuid>>,
    /// When the start of each machine may be retried.
    start_from: Mutex<HashMap<Uuid, u64>>,
    /// The last logged error that no host has room.
    no_room: Mutex<Option<String>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Leases {
    fn lease_ms(&self) -> u64 {
        self.lease_ms.get().copied().unwrap_or(LEASE_MS)
    }

    /// From when on the machines of a host may be given to other hosts.
    fn movable_from_ms(&self, host: &HostRecord) -> u64 {
        let heard = locked(&self.heard).get(&host.id).copied();
        // Before the first check, no host counts as lost.
        let from = locked(&self.counts_from).unwrap_or(u64::MAX);
        movable_from_ms(heard.unwrap_or(0).max(from), host.lease_ms)
    }
}

/// Whether this daemon stood still since its last check. It then heard no node, and must first give nodes time to be heard.
fn stood_still(last_ms: u64, now_ms: u64, lease_ms: u64) -> bool {
    now_ms.saturating_sub(last_ms) > (lease_ms / 2).max(STOOD_STILL_MS)
}

/// Whether another host may start a machine when its host is lost. Its node has confirmed that it then ends the machine.
fn is_movable(record: &MachineRecord) -> bool {
    record.may_restart_elsewhere() && record.fenced
}

impl Service {
    /// Sets the duration of the leases of nodes.
    pub fn leases_last(&self, lease_ms: u64) {
        // Called once, at the start.
        let _ = self.fleet().leases.lease_ms.set(lease_ms);
    }

    /// Records a new connection of a node: from now on its lease may be as long as the longest that any of its controllers
    /// gives.
    pub(super) fn begins_lease(&self, host: &mut HostRecord) {
        host.lease_ms = host.lease_ms.max(self.fleet().leases.lease_ms());
        self.note_heard(host.id);
    }

    fn note_heard(&self, host: Uuid) {
        locked(&self.fleet().leases.heard).insert(host, self.since_boot_ms());
    }

    /// Renews the lease of a node while it belongs to the host. Ends if the host was lost meanwhile.
    pub(super) async fn keep_lease(&self, link: &Link) {
        while let Err(problem) = self.remove_moved(link).await {
            tracing::warn!(
                host = link.name,
                "a node still has machines that were assigned to other hosts, so it gets no lease: {problem}"
            );
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        let connected_at_ms = self.since_boot_ms();
        let lease_ms = self.fleet().leases.lease_ms();
        let interval = Duration::from_millis(interval_ms(lease_ms));
        let mut renewals = Renewals::default();
        loop {
            let renewal = renewals.next(lease_ms);
            let body = serde_json::to_vec(&renewal).unwrap_or_default();
            let daemon = Caller::daemon();
            let asked = link.ask::<()>(&daemon, Method::PUT, LEASE, Some(body));
            // A later answer is useless.
            if let Ok(Ok(())) = tokio::time::timeout(interval * 4, asked).await {
                // Before the database is checked, because the task that moves machines reads this within a transaction.
                self.note_heard(link.host);
                match self.has_lease(link, connected_at_ms).await {
                    Ok(true) => renewals.heard(renewal.number),
                    Ok(false) => return,
                    Err(error) => {
                        tracing::debug!(host = link.name, "the lease of a node is not renewed: {error}");
                    }
                }
            }
            if renewal.number > 1 {
                tokio::time::sleep(interval).await;
            }
        }
    }

    /// Whether a host has not been lost since its node connected, and the database belongs to this controller.
    async fn has_lease(&self, link: &Link, connected_at_ms: u64) -> Result<bool, DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut host) = repo.hosts().by_id(link.host).await? else { return Ok(false) };
        if host.generation != link.generation || host.state == HostState::Lost {
            return Ok(false);
        }
        let lease_ms = self.fleet().leases.lease_ms();
        // By then a longer lease of an earlier connection is over.
        let is_over = self.since_boot_ms().saturating_sub(connected_at_ms) > host.lease_ms;
        if host.lease_ms > lease_ms && is_over {
            host.lease_ms = lease_ms;
            repo.hosts().update(&host).await?;
            repo.save().await?;
        }
        Ok(true)
    }

    /// Removes machines on a node that were assigned to other hosts. Also removes fenced machines that no longer exist:
    /// they were moved and then removed, and the node would otherwise restart them.
    pub(crate) async fn remove_moved(&self, link: &Link) -> Result<(), Problem> {
        let list = link.list().await?;
        let known = async { self.db().read().await?.machines().list().await };
        let known = known.await.map_err(|e| problem(&e))?;
        let host_of: HashMap<Uuid, Uuid> = known.into_iter().map(|it| (it.uuid, it.host)).collect();
        for machine in list {
            let goes = |host: Option<Uuid>| host.map_or(machine.fenced, |host| host != link.host);
            if !goes(host_of.get(&machine.uuid).copied()) {
                continue;
            }
            let _turn = self.lock(machine.uuid).await;
            // Check again: the machine may have been assigned to this host meanwhile.
            let now = async { self.db().read().await?.machines().by_uuid(machine.uuid).await };
            if !goes(now.await.map_err(|e| problem(&e))?.map(|record| record.host)) {
                continue;
            }
            let path = format!("/api/v1/machines/{}?force=true", machine.name);
            link.ask::<()>(&Caller::daemon(), Method::DELETE, &path, None).await?;
            tracing::info!(
                host = link.name,
                machine = machine.name,
                "removed a machine that does not belong to this host any more"
            );
        }
        link.is_cleared.store(true, Ordering::Release);
        Ok(())
    }

    /// Assigns machines of lost hosts to other hosts, and starts those that were assigned.
    pub(crate) async fn look_after_lost_hosts(&self) -> Result<(), DbError> {
        // A node has no nodes.
        if self.authority().is_none() || self.is_stopping() {
            return Ok(());
        }
        let leases = &self.fleet().leases;
        let now_ms = self.since_boot_ms();
        let last_ms = locked(&leases.checked).replace(now_ms);
        if last_ms.is_none_or(|last_ms| stood_still(last_ms, now_ms, leases.lease_ms())) {
            *locked(&leases.counts_from) = Some(now_ms);
        }
        let checked = self.move_all_lost().await;
        if checked.is_err() {
            // Without the database no lease was renewed, so nodes must first be heard again.
            *locked(&leases.counts_from) = Some(self.since_boot_ms());
        }
        checked?;
        self.start_moved().await
    }

    async fn move_all_lost(&self) -> Result<(), DbError> {
        let hosts = self.db().read().await?.hosts().list().await?;
        let own = self.own_host();
        for host in hosts.iter().filter(|host| host.fingerprint.is_some() && host.id != own) {
            if self.since_boot_ms() < self.fleet().leases.movable_from_ms(host) {
                continue;
            }
            let machines = self.db().read().await?.machines().of_host(host.id).await?;
            let movable: Vec<_> = machines.into_iter().filter(is_movable).collect();
            if !movable.is_empty() {
                self.move_lost(host, &hosts, movable).await?;
            }
        }
        Ok(())
    }

    /// Assigns the machines of a lost host to other hosts, in one transaction.
    async fn move_lost(
        &self,
        host: &HostRecord,
        hosts: &[HostRecord],
        mut movable: Vec<MachineRecord>,
    ) -> Result<(), DbError> {
        // If there is not room for all, machines that ran are assigned first.
        movable.sort_by_key(|record| !record.is_to_be_on());
        let turns: Vec<_> =
            movable.iter().filter_map(|it| Some((self.try_lock(it.uuid)?, it.uuid))).collect();
        let mut candidates = self.candidates(hosts).await?;
        candidates.retain(|candidate| candidate.id != host.id);
        self.only_cleared(&mut candidates);
        self.only_heard(&mut candidates);
        let mut repo = self.db().write().await?;
        let Some(mut host) = repo.hosts().by_id(host.id).await? else { return Ok(()) };
        // Check again: its node may have answered meanwhile.
        if self.since_boot_ms() < self.fleet().leases.movable_from_ms(&host) {
            return Ok(());
        }
        let (mut moved, mut refused) = (0_usize, None);
        for (_, uuid) in &turns {
            let found = repo.machines().by_uuid(*uuid).await?;
            let Some(mut record) = found.filter(|it| it.host == host.id && is_movable(it)) else { continue };
            let to = match place(&mut candidates, need_of(&record)) {
                Ok(to) => to,
                Err(no_room) => {
                    refused = Some(no_room.to_string());
                    continue;
                }
            };
            let to_name = hosts.iter().find(|it| it.id == to).map_or("", |it| it.name.as_str());
            record.host = to;
            // Until the new node has the machine, it runs nowhere. So a third host may get it if this one is lost too.
            record.fenced = to != self.own_host();
            record.to_start = record.is_to_be_on();
            record.state = MachineState::Stopped;
            record.reason = Some(format!("host '{}' is lost; host '{to_name}' has it now", host.name));
            repo.machines().set_host(&record).await?;
            let detail = format!("from host '{}', which is lost, to host '{to_name}'", host.name);
            let subject = format!("machine {}", record.name);
            repo.events().append(self.event(&Caller::daemon(), subject, "moved", detail)).await?;
            moved += 1;
        }
        self.log_no_room(&host, refused);
        if moved == 0 {
            return Ok(());
        }
        if host.state != HostState::Lost {
            host.state = HostState::Lost;
            let why = "its node was not heard for the time of its lease";
            let subject = format!("host {}", host.name);
            repo.events().append(self.event(&Caller::daemon(), subject, "lost", why)).await?;
        }
        repo.hosts().update(&host).await?;
        repo.save().await?;
        tracing::warn!(
            host = host.name,
            machines = moved,
            "a host is lost, and others have its machines now"
        );
        if let Some(link) = self.link(host.id) {
            link.ending.notify_one();
        }
        self.boots_changed();
        Ok(())
    }

    /// Removes candidates whose nodes were not heard for a while, because they may be lost too.
    fn only_heard(&self, candidates: &mut [Candidate]) {
        let leases = &self.fleet().leases;
        let least_ms =
            self.since_boot_ms().saturating_sub(2 * interval_ms(leases.lease_ms()) + HEARD_LATE_MS);
        let heard = locked(&leases.heard).clone();
        let own = self.own_host();
        let is_heard = |host: Uuid| host == own || heard.get(&host).is_some_and(|at_ms| *at_ms >= least_ms);
        for candidate in candidates.iter_mut().filter(|it| !is_heard(it.id)) {
            candidate.exclude();
        }
    }

    /// Removes candidates whose nodes may still have machines that were assigned to other hosts.
    pub(crate) fn only_cleared(&self, candidates: &mut [Candidate]) {
        let own = self.own_host();
        let is_cleared =
            |host: Uuid| self.link(host).is_some_and(|link| link.is_cleared.load(Ordering::Acquire));
        for candidate in candidates.iter_mut().filter(|it| it.id != own && !is_cleared(it.id)) {
            candidate.exclude();
        }
    }

    /// Logs once that no host has room.
    fn log_no_room(&self, host: &HostRecord, refused: Option<String>) {
        let mut told = locked(&self.fleet().leases.no_room);
        if let Some(why) = refused.as_ref().filter(|why| told.as_ref() != Some(*why)) {
            tracing::error!(host = host.name, "machines of a lost host stay off: {why}");
        }
        if refused.is_some() {
            *told = refused;
        }
    }

    /// Starts machines that were assigned to other hosts, each with retries until it is on or not wanted any more.
    async fn start_moved(&self) -> Result<(), DbError> {
        let mut due = self.db().read().await?.machines().to_start().await?;
        let now_ms = self.since_boot_ms();
        {
            let mut from = locked(&self.fleet().leases.start_from);
            from.retain(|uuid, _| due.iter().any(|record| record.uuid == *uuid));
            let from = |record: &MachineRecord| from.get(&record.uuid).copied().unwrap_or(0);
            due.retain(|record| from(record) <= now_ms);
            // Machines that fail to start must not delay the others.
            due.sort_by_key(from);
        }
        for record in due {
            let is_there = self.is_own(&record) || self.link(record.host).is_some();
            let mut starting = locked(&self.fleet().leases.starting);
            if starting.len() >= STARTS_AT_A_TIME {
                break;
            }
            if !is_there || !starting.insert(record.uuid) {
                continue;
            }
            let service = self.clone();
            tokio::spawn(async move {
                service.start_one_moved(&record).await;
                locked(&service.fleet().leases.starting).remove(&record.uuid);
            });
        }
        Ok(())
    }

    async fn start_one_moved(&self, record: &MachineRecord) {
        let machine = &record.name;
        match self.start_if_due(record.uuid, machine, &Caller::daemon()).await {
            Ok(()) | Err(LifecycleError::Unknown(_)) => {}
            Err(error) => {
                let why = problem(&error);
                tracing::error!(machine, "cannot start a machine that was moved; trying again later: {why}");
                let from_ms = self.since_boot_ms().saturating_add(START_PAUSE_MS);
                locked(&self.fleet().leases.start_from).insert(record.uuid, from_ms);
            }
        }
    }

    /// Notes that a machine that was moved is to stay off, also if its node has not said so yet.
    pub(crate) async fn stays_off(&self, uuid: Uuid) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut record) = repo.machines().by_uuid(uuid).await? else { return Ok(()) };
        record.wanted = Wanted::Stopped;
        repo.machines().update_state(&record).await?;
        repo.machines().is_started(uuid).await?;
        repo.save().await
    }

    /// Notes that a machine that was moved is on.
    pub(crate) async fn needs_no_start(&self, uuid: Uuid) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        repo.machines().is_started(uuid).await?;
        repo.save().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_that_stood_still_counts_from_now() {
        assert!(!stood_still(1_000, 3_000, 30_000));
        assert!(!stood_still(1_000, 3_000, 1_000));
        assert!(stood_still(1_000, 41_000, 30_000));
        // As long as a lease and its margin, after which machines would be moved at once.
        assert!(stood_still(1_000, 1_000 + movable_from_ms(0, 30_000), 30_000));
        assert!(stood_still(1_000, 9_000, 5_000));
    }
}
