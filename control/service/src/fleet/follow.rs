//! The controller follows a connected node: it sends the node the machines that are assigned to it, and copies their states and events to
//! its own database. `controller.rs` begins this for each connection. A change that a user requests goes
//! through `remote.rs` instead.

use std::collections::{HashMap, HashSet};

use axum::http::Method;
use headwater_api::{EventList, Machine, Problem, ProblemKind};
use headwater_db::{DbError, HostRecord, MachineRecord, NewEvent};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::fleet::RETRY_PAUSE;
use crate::fleet::link::Link;
use crate::fleet::node::{ASSIGNED, MACHINES};
use crate::fleet::protocol::AssignedMachine;
use crate::lifecycle::LifecycleError;

/// The `seen_event` of a node that never connected.
pub(super) const BEFORE_FIRST: i64 = -1;

/// The most events of a node that are copied at a time.
const EVENTS_AT_A_TIME: u32 = 500;

/// How long a node waits for an event before it answers with none.
const EVENTS_WAIT_S: u64 = 20;

impl Service {
    /// Follows a node. Ends only if the host was removed.
    pub(super) async fn follow_node(&self, link: &Link) {
        let mut has_start = false;
        // The host's machines and what they boot may have changed while the node was not connected.
        let mut is_synced = false;
        loop {
            match self.bring_up_to_date(link, &mut has_start, &mut is_synced).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(problem) => {
                    tracing::warn!(host = link.name, "cannot follow a node; trying again later: {problem}");
                    tokio::time::sleep(RETRY_PAUSE).await;
                    continue;
                }
            }
            tokio::select! {
                () = link.changed.notified() => is_synced = false,
                waited = self.wait_for_event(link) => if waited.is_err() {
                    tokio::time::sleep(RETRY_PAUSE).await;
                },
            }
        }
    }

    /// Copies the node's events and states, and sends it its machines unless `is_synced`. Returns whether the host exists.
    async fn bring_up_to_date(
        &self,
        link: &Link,
        has_start: &mut bool,
        is_synced: &mut bool,
    ) -> Result<bool, Problem> {
        loop {
            let Some(host) = self.host_of(link).await? else { return Ok(false) };
            if !*has_start {
                self.find_start(link).await?;
                *has_start = true;
                continue;
            }
            let path = format!("/api/v1/events?after={}&limit={EVENTS_AT_A_TIME}", host.seen_event);
            let events: EventList = link.ask(&Caller::daemon(), Method::GET, &path, None).await?;
            // An answer may have fewer events than requested although more follow.
            if events.events.is_empty() {
                break;
            }
            self.take_events(link, events).await.map_err(|e| problem(&e))?;
        }
        // Read after the events, so that it is at least as new.
        let list = link.list().await?;
        self.take_states(link, &list).await.map_err(|e| problem(&e))?;
        if !*is_synced {
            *is_synced = self.sync_machines(link, list).await?;
        }
        Ok(true)
    }

    async fn host_of(&self, link: &Link) -> Result<Option<HostRecord>, Problem> {
        let host = self.db().read().await.map_err(|e| problem(&e))?.hosts().by_id(link.host).await;
        host.map_err(|e| problem(&e))
    }

    /// Finds the event from which on the node's history is copied: events from before it joined are not. A node whose
    /// database was restored counts from an earlier number.
    async fn find_start(&self, link: &Link) -> Result<(), Problem> {
        let path = "/api/v1/events?limit=1";
        let events: EventList = link.ask(&Caller::daemon(), Method::GET, path, None).await?;
        let newest = events.events.iter().map(|event| event.id).max().unwrap_or(0);
        let mut repo = self.db().write().await.map_err(|e| problem(&e))?;
        let host = repo.hosts().by_id(link.host).await.map_err(|e| problem(&e))?;
        let needs_start = |host: &HostRecord| host.seen_event == BEFORE_FIRST || host.seen_event > newest;
        let Some(host) = host.filter(needs_start) else { return Ok(()) };
        repo.hosts().update(&HostRecord { seen_event: newest, ..host }).await.map_err(|e| problem(&e))?;
        repo.save().await.map_err(|e| problem(&e))
    }

    async fn wait_for_event(&self, link: &Link) -> Result<(), Problem> {
        let after = self.host_of(link).await?.map_or(0, |host| host.seen_event);
        let path = format!("/api/v1/events?after={after}&limit=1&wait_s={EVENTS_WAIT_S}");
        let events: EventList = link.ask(&Caller::daemon(), Method::GET, &path, None).await?;
        if events.events.is_empty() {
            // No event within the timeout, but the node has answered.
            self.node_seen(link.host).await.map_err(|e| problem(&e))?;
        }
        Ok(())
    }

    /// Sends the node all its machines, and what they boot. `list` is its present list. Returns whether nothing is left
    /// to try again. A machine that the node refuses for good counts as done.
    async fn sync_machines(&self, link: &Link, list: Vec<Machine>) -> Result<bool, Problem> {
        let mut is_done = true;
        let machines = self.db().read().await.map_err(|e| problem(&e))?.machines().of_host(link.host).await;
        let machines = machines.map_err(|e| problem(&e))?;
        let known: HashMap<Uuid, Machine> = list.into_iter().map(|machine| (machine.uuid, machine)).collect();
        for record in &machines {
            let fenced = record.may_restart_elsewhere();
            let is_known = known.get(&record.uuid).is_some_and(|machine| {
                let boots_the_same = machine.image == record.image && machine.pin.as_deref() == record.pin();
                // A new key or scheme was perhaps not sent before the connection broke.
                let is_the_same = machine.identity.ssh_host_key_public == record.identity.ssh_host_key_public
                    && (machine.scheme == record.scheme || machine.state.is_active());
                boots_the_same && is_the_same && machine.fenced == fenced && record.fenced == fenced
            });
            if is_known {
                continue;
            }
            let name = &record.name;
            // Another task may be creating, starting or removing it, which can take minutes.
            let Some(_turn) = self.try_lock(record.uuid) else {
                is_done = false;
                continue;
            };
            match self.record_of(record.uuid, name).await {
                // It was moved to another host meanwhile.
                Ok(record) if record.host != link.host => continue,
                Err(LifecycleError::Unknown(_)) => continue,
                _ => {}
            }
            if let Err(problem) = self.assign(link, record).await {
                is_done &= problem.kind != ProblemKind::Unavailable;
                tracing::warn!(
                    host = link.name,
                    machine = name,
                    "a node does not accept a machine: {problem}"
                );
            }
        }
        for (uuid, machine) in known {
            if !machines.iter().any(|record| record.uuid == uuid) {
                let name = machine.name;
                tracing::warn!(
                    host = link.name,
                    machine = name,
                    "a node has a machine that the controller does not know; remove it on that host: 'headwater machine remove {name} --force'"
                );
            }
        }
        Ok(is_done)
    }

    /// Sends the node one machine. The caller holds the machine's lock.
    pub(crate) async fn assign(&self, link: &Link, record: &MachineRecord) -> Result<(), Problem> {
        // Including its user data, which lists do not contain.
        let mut whole = self.record_of(record.uuid, &record.name).await.map_err(|e| problem(&e))?;
        whole.identity.personality = self.personality_of_guest(&whole).await.map_err(|e| problem(&e))?;
        if whole.host != link.host {
            let message = format!("machine '{}' was moved from host '{}'", whole.name, link.name);
            return Err(Problem::new(ProblemKind::Conflict, message));
        }
        let body = serde_json::to_vec(&AssignedMachine::of(&whole)).map_err(|error| {
            Problem::new(ProblemKind::Failed, format!("cannot describe a machine: {error}"))
        })?;
        let fenced = whole.may_restart_elsewhere();
        // Fenced: another host may start it if its node is lost. It is recorded as fenced only while its node is certain to
        // end it in time.
        if !fenced {
            self.note_whether_fenced(&whole, false).await.map_err(|e| problem(&e))?;
        }
        link.ask::<()>(&Caller::daemon(), Method::PUT, MACHINES, Some(body)).await?;
        self.note_whether_fenced(&whole, fenced).await.map_err(|e| problem(&e))
    }

    async fn note_whether_fenced(&self, record: &MachineRecord, fenced: bool) -> Result<(), DbError> {
        if record.fenced == fenced {
            return Ok(());
        }
        let mut repo = self.db().write().await?;
        repo.machines().set_fenced(record.uuid, fenced).await?;
        repo.save().await
    }

    /// Writes the states of machines, as their node reports them, to the database.
    async fn take_states(&self, link: &Link, list: &[Machine]) -> Result<(), DbError> {
        let records = self.db().read().await?.machines().of_host(link.host).await?;
        if differing(list, &records).is_empty() {
            return Ok(());
        }
        let mut repo = self.db().write().await?;
        let records = repo.machines().of_host(link.host).await?;
        for now in differing(list, &records) {
            repo.machines().update_state(&now).await?;
            repo.machines().set_limits(&now).await?;
            if records.iter().any(|record| record.uuid == now.uuid && record.fenced != now.fenced) {
                repo.machines().set_fenced(now.uuid, now.fenced).await?;
                // The machine must be sent again.
                link.changed.notify_one();
            }
        }
        repo.save().await
    }

    /// Copies events of a node to the history of the controller.
    async fn take_events(&self, link: &Link, events: EventList) -> Result<(), DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut host) = repo.hosts().by_id(link.host).await? else { return Ok(()) };
        let records = repo.machines().of_host(link.host).await?;
        let ours: HashSet<&str> = records.iter().map(|record| &*record.name).collect();
        for event in events.events {
            if event.id <= host.seen_event {
                continue;
            }
            host.seen_event = event.id;
            let is_ours = event.subject.strip_prefix("machine ").is_some_and(|name| ours.contains(name));
            if !is_ours || event.action == ASSIGNED {
                continue;
            }
            let (at_ms, caller, subject) = (event.at_ms, event.caller, event.subject);
            let detail = format!("{} (host {})", event.detail, link.name);
            let (action, change) = (event.action.into(), event.change);
            repo.events().append(NewEvent { at_ms, caller, subject, action, detail, change }).await?;
        }
        host.seen_at_ms = Some(self.now_ms());
        repo.hosts().update(&host).await?;
        repo.save().await
    }
}

/// The records that differ from their node's view, corrected.
fn differing(list: &[Machine], records: &[MachineRecord]) -> Vec<MachineRecord> {
    let corrected = |machine: &Machine| {
        let record = records.iter().find(|record| record.uuid == machine.uuid)?;
        let now = as_said(record.clone(), machine);
        (now != *record).then_some(now)
    };
    list.iter().filter_map(corrected).collect()
}

/// A record with what its node says of it.
pub(crate) fn as_said(mut record: MachineRecord, machine: &Machine) -> MachineRecord {
    record.wanted = machine.wanted;
    record.state = machine.state;
    record.reason.clone_from(&machine.reason);
    record.version.clone_from(&machine.version);
    record.kept.clone_from(&machine.kept);
    record.boot_ms = machine.boot_ms;
    record.started_at_ms = machine.started_at_ms;
    // A node that has the settings of an older scheme version has not yet heard of the newer ones.
    if record.scheme == machine.scheme {
        record.cache = machine.cache;
        record.memory_bytes = machine.memory_bytes;
        record.cpus = machine.cpus;
    }
    // A node whose database is an old copy may not know it any more.
    record.fenced &= machine.fenced;
    record
}
