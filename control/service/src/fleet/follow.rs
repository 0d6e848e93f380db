//! A controller follows a connected node: it gives the node its machines, and copies their states and events.

use std::collections::HashMap;
use std::time::Duration;

use axum::http::Method;
use headwater_api::{EventList, Machine, Problem};
use headwater_db::{MachineRecord, NewEvent};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::fleet::link::Link;
use crate::fleet::node::{ASSIGNED, MACHINES};
use crate::fleet::protocol::AssignedMachine;

/// The number of the newest event that was seen, before the first connection of a node.
pub(super) const BEFORE_FIRST: i64 = -1;

/// How many events of a node are taken at a time.
const EVENTS_AT_A_TIME: u32 = 500;

/// How long a node waits for an event before it answers that there is none.
const EVENTS_WAIT_S: u64 = 20;

/// The pause after something failed.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

impl Service {
    /// Follows a node. Never ends unless the host is gone.
    pub(super) async fn follow_node(&self, link: &Link) {
        loop {
            match self.bring_up_to_date(link).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(problem) => {
                    tracing::warn!(host = link.name, "cannot follow a node, and tries again: {problem}");
                    tokio::time::sleep(RETRY_PAUSE).await;
                    continue;
                }
            }
            tokio::select! {
                () = link.changed.notified() => {}
                waited = self.wait_for_event(link) => if waited.is_err() {
                    tokio::time::sleep(RETRY_PAUSE).await;
                },
            }
        }
    }

    /// Tells the node of its machines, and takes its events and its list. Returns whether the host is there.
    async fn bring_up_to_date(&self, link: &Link) -> Result<bool, Problem> {
        self.tell_node(link).await?;
        loop {
            let record = self.db().read().await.map_err(|e| problem(&e))?.hosts().by_id(link.host).await;
            let Some(record) = record.map_err(|e| problem(&e))? else { return Ok(false) };
            let first_time = record.seen_event == BEFORE_FIRST;
            let path = match first_time {
                // The history of the node from before it joined is not the fleet's.
                true => "/api/v1/events?limit=1".to_owned(),
                false => format!("/api/v1/events?after={}&limit={EVENTS_AT_A_TIME}", record.seen_event),
            };
            let events: EventList = link.ask(&Caller::daemon(), Method::GET, &path, None).await?;
            let newest = events.events.iter().map(|event| event.id).max();
            let events = if first_time { EventList { events: Vec::new() } } else { events };
            // An answer may have fewer events than were asked for, and more may follow.
            let is_last = events.events.is_empty();
            // After the events: what it says is at least as new.
            let list = if is_last { link.list().await? } else { Vec::new() };
            self.take_over(link, &list, events, newest).await.map_err(|e| problem(&e))?;
            if is_last {
                return Ok(true);
            }
        }
    }

    async fn wait_for_event(&self, link: &Link) -> Result<(), Problem> {
        let record = self.db().read().await.map_err(|e| problem(&e))?.hosts().by_id(link.host).await;
        let after = record.map_err(|e| problem(&e))?.map_or(0, |record| record.seen_event);
        let path = format!("/api/v1/events?after={after}&limit=1&wait_s={EVENTS_WAIT_S}");
        let events: EventList = link.ask(&Caller::daemon(), Method::GET, &path, None).await?;
        if events.events.is_empty() {
            // Nothing has happened, which says that it is there.
            self.node_seen(link.host).await.map_err(|e| problem(&e))?;
        }
        Ok(())
    }

    /// Has the node know all its machines, and what they boot.
    async fn tell_node(&self, link: &Link) -> Result<(), Problem> {
        let mut machines = self
            .db()
            .read()
            .await
            .map_err(|e| problem(&e))?
            .machines()
            .list()
            .await
            .map_err(|e| problem(&e))?;
        machines.retain(|record| record.host == link.host);
        let known: HashMap<Uuid, Machine> =
            link.list().await?.into_iter().map(|machine| (machine.uuid, machine)).collect();
        for record in &machines {
            let is_known = known.get(&record.uuid).is_some_and(|machine| {
                machine.image == record.image && machine.pin.as_deref() == record.pin()
            });
            if is_known {
                continue;
            }
            if let Err(problem) = self.assign(link, record).await {
                tracing::warn!(
                    host = link.name,
                    machine = record.name,
                    "a node does not take a machine: {problem}"
                );
            }
        }
        for (uuid, machine) in known {
            if !machines.iter().any(|record| record.uuid == uuid) {
                let name = machine.name;
                tracing::warn!(
                    host = link.name,
                    machine = name,
                    "a node has a machine that is not known here"
                );
            }
        }
        Ok(())
    }

    /// Has the node know one machine.
    pub(super) async fn assign(&self, link: &Link, record: &MachineRecord) -> Result<(), Problem> {
        // With its user data, which lists do not have.
        let whole = self.record_of(record.uuid, &record.name).await.map_err(|e| problem(&e))?;
        let body = serde_json::to_vec(&AssignedMachine::of(&whole)).map_err(|error| {
            Problem::new(headwater_api::ProblemKind::Failed, format!("cannot describe a machine: {error}"))
        })?;
        link.ask(&Caller::daemon(), Method::PUT, MACHINES, Some(body)).await
    }

    /// Writes what a node says to the database: its events, and the state of its machines.
    async fn take_over(
        &self,
        link: &Link,
        list: &[Machine],
        events: EventList,
        newest: Option<i64>,
    ) -> Result<(), headwater_db::DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut host) = repo.hosts().by_id(link.host).await? else { return Ok(()) };
        let records = repo.machines().list().await?;
        for machine in list {
            let found = records.iter().find(|it| it.uuid == machine.uuid && it.host == link.host);
            let Some(record) = found else { continue };
            let now = as_said(record.clone(), machine);
            if now != *record {
                repo.machines().update_state(&now).await?;
                repo.machines().set_limits(&now).await?;
            }
        }
        for event in events.events.into_iter().filter(|event| event.id > host.seen_event) {
            let of_machine = event.subject.strip_prefix("machine ");
            let is_ours = of_machine
                .is_some_and(|name| records.iter().any(|it| it.name == name && it.host == link.host));
            if !is_ours || event.action == ASSIGNED {
                continue;
            }
            let (at_ms, caller, subject) = (event.at_ms, event.caller, event.subject);
            let detail = format!("{} (host {})", event.detail, link.name);
            let action = event.action.into();
            repo.events().append(NewEvent { at_ms, caller, subject, action, detail }).await?;
        }
        host.seen_event = newest.unwrap_or(0).max(host.seen_event);
        host.seen_at_ms = Some(self.now_ms());
        repo.hosts().update(&host).await?;
        repo.save().await
    }
}

/// A record with what its node says of it.
pub(super) fn as_said(mut record: MachineRecord, machine: &Machine) -> MachineRecord {
    record.wanted = machine.wanted;
    record.state = machine.state;
    record.reason.clone_from(&machine.reason);
    record.version.clone_from(&machine.version);
    record.boot_ms = machine.boot_ms;
    record.started_at_ms = machine.started_at_ms;
    record.cache = machine.cache;
    record.memory_bytes = machine.memory_bytes;
    record.cpus = machine.cpus;
    record
}
