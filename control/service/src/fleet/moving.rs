//! A machine is moved from one host to another: what it wrote is forgotten, and it keeps its name and its identity.
//!
//! It is stopped and removed on its host first. Only then the database says that it is the other host's, so two hosts never have it.

use axum::http::Method;
use headwater_api::{Machine, MachineState, Problem, ProblemKind, Wanted};
use headwater_db::{HostRecord, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::caller::Caller;
use crate::fleet::remote::refused;
use crate::lifecycle::LifecycleError;

impl Service {
    /// Moves a machine that keeps nothing, and leaves it off. A machine that is not on the host `from` any more stays as it is.
    pub(crate) async fn move_to_host(
        &self,
        (uuid, name): (Uuid, &str),
        (from, to): (&HostRecord, &HostRecord),
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let _turn = self.lock(uuid).await;
        let record = self.record_of(uuid, name).await?;
        if record.host != from.id {
            return Ok(());
        }
        if self.is_own(&record) {
            self.empty_own(&record, caller).await?;
        } else {
            self.empty_there(&record, caller).await?;
        }
        let mut repo = self.db().write().await?;
        let found = repo.machines().by_uuid(uuid).await?;
        let mut record = found.ok_or_else(|| LifecycleError::Unknown(name.to_owned()))?;
        record.host = to.id;
        record.wanted = Wanted::Stopped;
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
            return Ok(());
        }
        let link = self.link_to(&record, "move").await?;
        match self.assign(&link, &record).await {
            // The node may have the machine. The controller sends it again when the node is back.
            Err(problem) if problem.kind != ProblemKind::Unavailable => {
                Err(refused("move", &record, &link, problem))
            }
            _ => Ok(()),
        }
    }

    /// Stops a machine of this host, and removes its files. The caller has its turn.
    async fn empty_own(&self, record: &MachineRecord, caller: &Caller) -> Result<(), LifecycleError> {
        if self.active(record.uuid).is_some() {
            self.stop_locked(record.clone(), false, caller).await?;
        }
        match tokio::fs::remove_dir_all(self.run_dir(&record.name)).await {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(machine = record.name, "cannot remove its directory: {e}");
            }
            _ => {}
        }
        Ok(())
    }

    /// Has the node of a machine stop it and remove it.
    async fn empty_there(&self, record: &MachineRecord, caller: &Caller) -> Result<(), LifecycleError> {
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
