//! Machines of other hosts, on the controller: changes to them (start, stop, reset, limits, removal), which it makes through the API of
//! their nodes, and how they are shown. The operations and `lifecycle` call this for a machine that is not of the own host.

use std::collections::HashMap;
use std::sync::Arc;

use axum::http::Method;
use futures_util::future::join_all;
use headwater_api::{HostState, Machine, MachineState, Problem, SetMachine, Stats, Wanted, words};
use headwater_db::{DbError, HostRecord, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::fleet::follow::as_said;
use crate::fleet::link::Link;
use crate::fleet::placement::Candidate;
use crate::lifecycle::LifecycleError;

impl Service {
    pub(crate) fn link(&self, host: Uuid) -> Option<Arc<Link>> {
        self.fleet().links().get(&host).cloned()
    }

    /// The node that runs a machine. `None`: this daemon runs it.
    pub(crate) async fn node_of(
        &self,
        machine: &str,
        what: &'static str,
    ) -> Result<Option<Arc<Link>>, LifecycleError> {
        // If the machine is on here, the database is not needed, which may be unavailable.
        if self.active_map().values().any(|active| active.name == machine) {
            return Ok(None);
        }
        let record = self.record(machine).await?;
        if self.is_own(&record) { Ok(None) } else { self.link_to(&record, what).await.map(Some) }
    }

    /// The connection to the node of another host's machine, or an error if the node is not connected.
    pub(crate) async fn link_to(
        &self,
        record: &MachineRecord,
        what: &'static str,
    ) -> Result<Arc<Link>, LifecycleError> {
        Self::not_in_cloud(what, record)?;
        if let Some(link) = self.link(record.host) {
            return Ok(link);
        }
        let host = self.db().read().await?.hosts().by_id(record.host).await?;
        let (host, since) = match host {
            Some(host) => {
                let since = host.seen_at_ms.map_or_else(
                    || "it was never connected".to_owned(),
                    |at_ms| format!("it was connected last at {}", words::time(at_ms)),
                );
                (host.name, since)
            }
            None => (record.host.to_string(), "the fleet has no such host".to_owned()),
        };
        Err(LifecycleError::Away { what, machine: record.name.clone(), host, since })
    }

    /// Fails for a machine in a cloud. All operations that need the host of a machine come here, because no host has the
    /// identity that such a machine has as its host.
    pub(crate) fn not_in_cloud(what: &'static str, record: &MachineRecord) -> Result<(), LifecycleError> {
        match &record.connection {
            None => Ok(()),
            Some(connection) => {
                let (machine, connection) = (record.name.clone(), connection.clone());
                Err(LifecycleError::InCloud { what, machine, connection })
            }
        }
    }

    /// Fails for a machine of another host, for operations that work only here.
    pub(crate) async fn must_be_own(
        &self,
        what: &'static str,
        record: &MachineRecord,
    ) -> Result<(), LifecycleError> {
        if self.is_own(record) {
            return Ok(());
        }
        Self::not_in_cloud(what, record)?;
        let host = self.db().read().await?.hosts().by_id(record.host).await?;
        let host = host.map_or_else(|| record.host.to_string(), |host| host.name);
        Err(LifecycleError::Elsewhere { what, machine: record.name.clone(), host })
    }

    /// Fails if another controller may have the database. Checked before a node changes something.
    pub(crate) async fn must_have_database(&self) -> Result<(), DbError> {
        // A writer's transaction begins only while this daemon has the database.
        self.db().write().await.map(drop)
    }

    /// Starts, stops or resets a machine through its node: `how` is the end of the path. The caller holds the machine's
    /// lock, so that the machine is not moved meanwhile. A forced stop works without the lock.
    pub(crate) async fn change_remote(
        &self,
        record: MachineRecord,
        what: &'static str,
        how: &str,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let link = self.link_to(&record, what).await?;
        self.must_have_database().await?;
        if what == "stop" && record.to_start {
            self.stays_off(record.uuid).await?;
        }
        let is_on = record.state.is_active();
        let record = if what == "stop" || is_on { record } else { self.take_scheme(record, caller).await? };
        let boots = what == "reset" || (what == "start" && !is_on);
        let record = if boots { self.with_young_key(record).await } else { record };
        let failed = |source| refused(what, &record, &link, source);
        if what != "stop" {
            // The node may have an earlier pin of the machine or of its catalog.
            self.assign(&link, &record).await.map_err(failed)?;
        }
        let path = format!("/api/v1/machines/{}/{how}", record.name);
        let machine: Machine = link.ask(caller, Method::POST, &path, None).await.map_err(failed)?;
        if what == "reset" && record.to_start && machine.wanted == Wanted::Stopped {
            self.stays_off(record.uuid).await?;
        }
        self.take_answer(&link, record, &machine).await
    }

    /// Changes a machine's limits through its node. The caller holds the machine's lock.
    pub(crate) async fn set_remote(
        &self,
        record: MachineRecord,
        limits: SetMachine,
        caller: &Caller,
    ) -> Result<MachineRecord, LifecycleError> {
        let link = self.link_to(&record, "change").await?;
        self.must_have_database().await?;
        let failed = |source| refused("change", &record, &link, source);
        let path = format!("/api/v1/machines/{}", record.name);
        let body = serde_json::to_vec(&limits).map_err(|e| {
            failed(Problem::new(headwater_api::ProblemKind::Failed, format!("cannot write limits: {e}")))
        })?;
        let machine: Machine = link.ask(caller, Method::PATCH, &path, Some(body)).await.map_err(failed)?;
        self.take_answer(&link, record, &machine).await
    }

    /// A machine as its node says now, or as the database has it if the node does not answer. The state in the database may be older, for
    /// example after a start of the controller.
    pub(crate) async fn as_its_node_says(&self, record: MachineRecord) -> MachineRecord {
        if self.is_own(&record) {
            return record;
        }
        let Some(link) = self.link(record.host) else { return record };
        match link.machine(&record.name).await {
            Some(seen) if seen.uuid == record.uuid => as_said(record, &seen),
            _ => record,
        }
    }

    /// Writes what a node has answered about one machine. Its history has the event, and comes by itself.
    async fn take_answer(
        &self,
        link: &Link,
        record: MachineRecord,
        machine: &Machine,
    ) -> Result<MachineRecord, LifecycleError> {
        link.forget_list();
        let mut repo = self.db().write().await?;
        let found = repo.machines().by_uuid(record.uuid).await?;
        let now = as_said(record, machine);
        if found.is_none_or(|record| record.host != link.host) {
            // It was removed, or moved after this forced stop.
            return Ok(now);
        }
        repo.machines().update_state(&now).await?;
        repo.machines().set_limits(&now).await?;
        repo.save().await?;
        Ok(now)
    }

    /// Removes a machine from its node, and then from the database. The caller holds the machine's lock.
    pub(crate) async fn remove_remote(
        &self,
        record: MachineRecord,
        force: bool,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let link = self.link_to(&record, "remove").await?;
        self.must_have_database().await?;
        let path = format!("/api/v1/machines/{}?force={force}", record.name);
        let removed: Result<(), Problem> = link.ask(caller, Method::DELETE, &path, None).await;
        match removed {
            // The node never got the machine.
            Err(problem) if problem.kind == headwater_api::ProblemKind::NotFound => {}
            removed => removed.map_err(|source| refused("remove", &record, &link, source))?,
        }
        let (name, uuid) = (&record.name, record.uuid);
        let mut repo = self.db().write().await?;
        repo.machines().remove(uuid).await?;
        let detail = format!("{uuid} (host {})", link.name);
        let event = self.event(caller, format!("machine {name}"), "removed", detail);
        repo.events().append(event).await?;
        repo.save().await?;
        link.forget_list();
        self.roots_changed();
        self.forget_lock(uuid);
        Ok(())
    }

    /// Sends a new machine to its node. The caller holds the machine's lock.
    pub(crate) async fn give_to_node(&self, record: &MachineRecord) -> Result<(), Problem> {
        let record = self.record_of(record.uuid, &record.name).await.map_err(|e| problem(&e))?;
        if self.is_own(&record) {
            return Ok(());
        }
        let link = self.link_to(&record, "create").await.map_err(|e| problem(&e))?;
        self.assign(&link, &record).await
    }

    /// The hosts on which a machine may be placed.
    pub(crate) async fn candidates(&self, hosts: &[HostRecord]) -> Result<Vec<Candidate>, DbError> {
        let machines = self.db().read().await?.machines().list().await?;
        let is_there = |host: &HostRecord| host.id == self.own_host() || self.link(host.id).is_some();
        Ok(hosts.iter().map(|host| Candidate::new(host, is_there(host), &machines)).collect())
    }

    /// The metrics of a machine of another host.
    pub(crate) async fn stats_of_node(
        &self,
        record: &MachineRecord,
        caller: &Caller,
    ) -> Result<Stats, LifecycleError> {
        let link = self.link_to(record, "show the metrics of").await?;
        let path = format!("/api/v1/stats?machine={}", record.name);
        let stats = link.ask(caller, Method::GET, &path, None).await;
        stats.map_err(|source| refused("show the metrics of", record, &link, source))
    }

    /// Makes nodes check again which versions their machines boot.
    pub(crate) fn boots_changed(&self) {
        for link in self.fleet().links().values() {
            link.changed.notify_one();
        }
    }

    /// The nodes' views of machines of other hosts, by UUID; and all hosts if there are several.
    pub(crate) async fn seen_on_nodes(&self, records: &[MachineRecord]) -> Result<SeenOnNodes, DbError> {
        let hosts = self.db().read().await?.hosts().list().await?;
        if hosts.len() < 2 {
            return Ok(SeenOnNodes::default());
        }
        let links: Vec<Arc<Link>> = {
            let all = self.fleet().links();
            all.values().filter(|link| records.iter().any(|it| it.host == link.host)).cloned().collect()
        };
        let mut machines = HashMap::new();
        if let ([record], [link]) = (records, &links[..]) {
            machines.extend(link.machine(&record.name).await.map(|it| ((link.host, it.uuid), it)));
        } else {
            let asked = links.iter().map(|link| {
                let of_link = records.iter().filter(|record| record.host == link.host);
                let names: Vec<&str> = of_link.map(|record| record.name.as_str()).collect();
                async move { link.machines_named(&names).await }
            });
            let lists = join_all(asked).await;
            for (link, list) in links.iter().zip(lists) {
                for machine in list.iter().flat_map(|list| list.iter()) {
                    machines.insert((link.host, machine.uuid), machine.clone());
                }
            }
        }
        let hosts = hosts.into_iter().map(|host| (host.id, host)).collect();
        Ok(SeenOnNodes { hosts, machines })
    }
}

/// The error of a change that a node has refused.
pub(super) fn refused(
    what: &'static str,
    record: &MachineRecord,
    link: &Link,
    source: Problem,
) -> LifecycleError {
    LifecycleError::Remote {
        what,
        machine: record.name.clone(),
        host: link.name.clone(),
        source: Box::new(source),
    }
}

/// What the nodes say about machines of other hosts ([`Service::seen_on_nodes`]); empty if there is one host.
#[derive(Default)]
pub(crate) struct SeenOnNodes {
    hosts: HashMap<Uuid, HostRecord>,
    machines: HashMap<(Uuid, Uuid), Machine>,
}

impl SeenOnNodes {
    /// Completes the view of a machine.
    pub(crate) fn complete(&mut self, host: Uuid, view: &mut Machine) {
        let Some(its) = self.hosts.get(&host) else { return };
        view.host = Some(its.name.clone());
        if its.state == HostState::Lost {
            let since =
                its.seen_at_ms.map_or_else(String::new, |at_ms| format!(" since {}", words::time(at_ms)));
            let was = view.state;
            view.state = MachineState::Unknown;
            view.reason = Some(format!("host '{}' is lost{since}; it was {was} then", its.name));
            return;
        }
        // It contains only machines of other hosts.
        let Some(seen) = self.machines.remove(&(host, view.uuid)) else { return };
        view.wanted = seen.wanted;
        view.state = seen.state;
        view.reason = seen.reason;
        view.version = seen.version;
        view.boot_ms = seen.boot_ms;
        view.started_at_ms = seen.started_at_ms;
        view.alarm = seen.alarm;
        view.disk = seen.disk;
        view.pid = seen.pid;
        view.accelerator = seen.accelerator;
        view.kept = seen.kept;
        if view.scheme != seen.scheme {
            (view.scheme, view.scheme_old) = (seen.scheme, true);
        }
        view.old = seen.old;
    }
}
