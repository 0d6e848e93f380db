//! Moves a machine from one host to another, for the task `drain`. Its disk is discarded; it keeps its name and its identity. Machines of
//! lost hosts are not moved here, but in `loss.rs`.
//!
//! Whether it may move is decided under its lock, in the transaction after which nobody can claim it. It is then stopped and removed on
//! its old host. Only after that the database assigns it to the other host, so two hosts never have it.

use axum::http::Method;
use headwater_api::{Machine, MachineState, Problem, ProblemKind, Wanted};
use headwater_db::{DbError, HostRecord, MachineRecord, Purpose, Repository};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::fleet::node::CHECK;
use crate::fleet::protocol::AssignedMachine;
use crate::fleet::remote::refused;
use crate::lifecycle::LifecycleError;
use crate::operations::create_machine;

impl Service {
    /// Moves a machine that keeps nothing. If it is on or wanted, it is to be started after that. `Some`: why it stays. A machine that is
    /// not on the host `from` any more stays as it is.
    pub(crate) async fn move_to_host(
        &self,
        (uuid, name): (Uuid, &str),
        (from, to): (&HostRecord, &HostRecord),
        caller: &Caller,
    ) -> Result<Option<String>, LifecycleError> {
        let _turn = self.lock(uuid).await;
        let record = self.record_of(uuid, name).await?;
        if record.host != from.id {
            return Ok(None);
        }
        let there = MachineRecord { host: to.id, ..record.clone() };
        if !self.is_own(&there) {
            // Check the new host first, so that the machine keeps running until that host can take it.
            self.link_to(&there, "move").await?;
        }
        match self.can_run(&there).await {
            // It is asked again when it answers.
            Err(source) if source.kind == ProblemKind::Unavailable => {
                let (what, machine, host) = ("move", name.to_owned(), to.name.clone());
                return Err(LifecycleError::Remote { what, machine, host, source: Box::new(source) });
            }
            Err(why) => return Ok(Some(format!("stays: host '{}' cannot run it: {why}", to.name))),
            Ok(()) => {}
        }
        if let Some(why) = self.begin_move(uuid).await? {
            return Ok(Some(why));
        }
        if self.is_own(&record) {
            self.remove_own(&record, caller).await?;
        } else {
            self.remove_there(&record, caller).await?;
        }
        let mut repo = self.db().write().await?;
        let found = repo.machines().by_uuid(uuid).await?;
        let mut record = found.ok_or_else(|| LifecycleError::Unknown(name.to_owned()))?;
        record.host = to.id;
        record.wanted = Wanted::Stopped;
        // Until the node has the machine, nothing of it runs there. So a third host may have it if this one is lost.
        record.fenced = to.id != self.own_host() && record.may_restart_elsewhere();
        (record.state, record.reason) = (MachineState::Stopped, None);
        repo.machines().set_host(&record).await?;
        let detail = format!("from host '{}' to host '{}'", from.name, to.name);
        repo.events().append(self.event(caller, format!("machine {name}"), "moved", detail)).await?;
        repo.save().await?;
        tracing::info!(machine = name, from = from.name, to = to.name, "moved a machine to another host");
        if let Some(link) = self.link(from.id) {
            link.forget_list();
        }
        if self.is_own(&record) {
            return Ok(None);
        }
        // If the node is not connected now, the controller sends it the machine when it reconnects.
        let Some(link) = self.link(to.id) else { return Ok(None) };
        match self.assign(&link, &record).await {
            // The node may have got the machine. The controller sends it again when the node reconnects.
            Err(problem) if problem.kind != ProblemKind::Unavailable => {
                Err(refused("move", &record, &link, problem))
            }
            _ => Ok(None),
        }
    }

    /// Decides that a machine moves, or says why it stays. From then on nobody can claim it. The caller has its turn.
    ///
    /// A machine that is on gets the note that it is to be started before it is stopped. A stop by somebody takes that note away, also
    /// between two attempts to move the machine.
    async fn begin_move(&self, uuid: Uuid) -> Result<Option<String>, LifecycleError> {
        let mut repo = self.db().write().await?;
        let Some(mut record) = repo.machines().by_uuid(uuid).await? else {
            return Err(LifecycleError::Unknown(uuid.to_string()));
        };
        if let Some(why) = why_left(&mut *repo, &record).await? {
            return Ok(Some(why));
        }
        let (before, is_stopping) = (record.clone(), record.state == MachineState::Stopping);
        record.to_start = record.is_to_be_on() || (self.is_on(&record) && !is_stopping);
        if self.active(uuid).is_some() {
            record.state = MachineState::Stopping;
        }
        if record != before {
            repo.machines().set_host(&record).await?;
            repo.save().await?;
        }
        Ok(None)
    }

    /// Whether the host of a machine can run it, as the host itself says: it may lack firmware, a TPM or memory.
    async fn can_run(&self, there: &MachineRecord) -> Result<(), Problem> {
        let machine = AssignedMachine::of(there);
        if self.is_own(there) {
            return create_machine::check_assigned(self, &machine).await.map_err(|failure| failure.0);
        }
        let link = self.link_to(there, "move").await.map_err(|e| problem(&e))?;
        let body = serde_json::to_vec(&machine).map_err(|error| {
            Problem::new(ProblemKind::Failed, format!("cannot describe a machine: {error}"))
        })?;
        link.ask(&Caller::daemon(), Method::PUT, CHECK, Some(body)).await
    }

    /// Notes that a machine is to be started where it is.
    #[cfg(test)]
    pub(crate) async fn is_to_start(&self, uuid: Uuid) -> Result<(), DbError> {
        let _turn = self.lock(uuid).await;
        let mut repo = self.db().write().await?;
        let Some(mut record) = repo.machines().by_uuid(uuid).await? else { return Ok(()) };
        record.to_start = true;
        repo.machines().set_host(&record).await?;
        repo.save().await
    }

    /// Stops a machine of this host, and removes its files. The caller holds its lock.
    async fn remove_own(&self, record: &MachineRecord, caller: &Caller) -> Result<(), LifecycleError> {
        if self.active(record.uuid).is_some() {
            self.stop_locked(record.clone(), false, caller).await?;
        }
        match tokio::fs::remove_dir_all(self.run_dir(&record.name)).await {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(
                    machine = record.name,
                    "cannot remove the directory of a machine that was moved: {e}"
                );
            }
            _ => {}
        }
        Ok(())
    }

    /// Stops and removes a machine through its node.
    async fn remove_there(&self, record: &MachineRecord, caller: &Caller) -> Result<(), LifecycleError> {
        let link = self.link_to(record, "move").await?;
        self.must_have_database().await?;
        let failed = |source| refused("move", record, &link, source);
        let path = format!("/api/v1/machines/{}", record.name);
        let stopped: Result<Machine, Problem> =
            link.ask(caller, Method::POST, &format!("{path}/stop"), None).await;
        let is_unknown = |problem: &Problem| problem.kind == ProblemKind::NotFound;
        match stopped {
            // An earlier attempt has removed it there.
            Err(problem) if is_unknown(&problem) => return Ok(()),
            stopped => stopped.map_err(failed)?,
        };
        let removed: Result<(), Problem> = link.ask(caller, Method::DELETE, &path, None).await;
        match removed {
            Err(problem) if is_unknown(&problem) => Ok(()),
            removed => removed.map_err(failed),
        }
    }
}

/// Why a machine is not moved.
pub(crate) async fn why_left(
    repo: &mut dyn Repository,
    record: &MachineRecord,
) -> Result<Option<String>, DbError> {
    let Some(catalog) = &record.catalog else {
        return Ok(Some("has no catalog, so it belongs to this host".to_owned()));
    };
    if record.cache.persistent {
        return Ok(Some("has a persistent write cache, whose disk is on this host".to_owned()));
    }
    let claims = repo.claims().list().await?;
    if let Some(claim) = claims.into_iter().find(|claim| claim.machine == record.uuid) {
        return Ok(Some(format!("is claimed for {}", claim.holder)));
    }
    let disks = repo.persistent_disks().of_machine(record.uuid).await?;
    Ok(match disks.first().map(|disk| disk.purpose) {
        Some(Purpose::MaintenanceSession) => Some("has a maintenance session".to_owned()),
        Some(Purpose::Persistent) => Some("has a persistent disk on this host".to_owned()),
        None => match repo.catalogs().by_name(catalog).await? {
            Some(catalog) if catalog.keep_ready > 0 => {
                Some(format!("is of catalog '{}', which keeps machines ready on this host", catalog.name))
            }
            _ => None,
        },
    })
}
