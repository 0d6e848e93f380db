//! Machines of other hosts in a roll: their nodes report whether they have booted, and run the health command. `roll.rs` calls this
//! instead of watching the machine itself.

use std::time::Duration;

use axum::body::Body;
use axum::http::Method;
use headwater_api::{ExecRequest, ExecResult, HostState, MachineState, Problem, ProblemKind, Wanted};
use headwater_db::{DbError, MachineRecord};
use tokio::time::Instant;
use uuid::Uuid;

use super::roll::{LOOK, ended};
use super::roll_plan::{Member, Plan, Stage};
use crate::Service;
use crate::backend::TaskControl;
use crate::caller::Caller;

/// The most bytes of the answer of a health command that are read; its output is not used.
const ANSWER_MAX_BYTES: usize = 64 << 20;

impl Service {
    /// Whether a machine is on, as far as is known here.
    pub(crate) fn is_on(&self, record: &MachineRecord) -> bool {
        match self.is_own(record) {
            true => self.active(record.uuid).is_some(),
            false => {
                matches!(record.state, MachineState::Starting | MachineState::Booting | MachineState::Running)
            }
        }
    }

    /// Whether a host's node has not been heard for longer than its restart takes.
    pub(super) async fn is_lost(&self, host: Uuid) -> Result<bool, DbError> {
        let found = self.db().read().await?.hosts().by_id(host).await?;
        Ok(found.is_none_or(|host| host.state == HostState::Lost))
    }

    /// Waits until a machine of another host has booted, even if its guest reboots, and runs the health command.
    pub(super) async fn wait_until_healthy_there(
        &self,
        record: &MachineRecord,
        (member, plan): (&Member, &Plan),
        caller: &Caller,
        control: &TaskControl,
    ) -> Stage {
        let failed = |why: String| Stage::Failed { why };
        let end = Instant::now() + Duration::from_secs(plan.request.boot_s);
        loop {
            if control.is_cancelled() {
                return failed("was not checked, because the roll ended".to_owned());
            }
            let found = async { self.db().read().await?.machines().by_uuid(record.uuid).await };
            let host = match found.await {
                Ok(None) => return Stage::Left { why: "was removed".to_owned() },
                // It may have been assigned to another host, because its own was lost.
                Ok(Some(now)) => now.host,
                Err(_) => record.host,
            };
            // A node that is not connected may reconnect in time.
            let seen = match self.link(host) {
                Some(link) => link.machine(&record.name).await,
                None => None,
            };
            match seen {
                Some(seen) if seen.state == MachineState::Running => break,
                Some(seen) if seen.wanted == Wanted::Stopped && is_off(seen.state) => {
                    return match seen.reason {
                        Some(reason) => failed(format!("is off: {reason}")),
                        None => self.leave_off(member, plan).await,
                    };
                }
                _ => {}
            }
            if Instant::now() >= end {
                return failed(format!("has not booted within {} s", plan.request.boot_s));
            }
            tokio::time::sleep(LOOK).await;
        }
        let Some(command) = &plan.request.health else { return Stage::Healthy };
        let limit = Duration::from_secs(plan.request.health_s);
        let checking =
            tokio::time::timeout(limit + LOOK * 30, self.check_there(record, command, limit, caller));
        let checked = tokio::select! {
            checked = checking => checked,
            () = ended(control) => return failed("was not checked, because the roll ended".to_owned()),
        };
        match checked {
            Ok(Ok(0)) => Stage::Healthy,
            Ok(Ok(code)) => {
                failed(format!("is not healthy: the health command failed with exit code {code}"))
            }
            Ok(Err(problem)) => failed(format!("cannot be checked: {problem}")),
            Err(_) => failed(format!("did not answer its check within {} s", limit.as_secs())),
        }
    }

    /// Runs the health command through the node, and returns its exit code.
    async fn check_there(
        &self,
        record: &MachineRecord,
        command: &str,
        limit: Duration,
        caller: &Caller,
    ) -> Result<i32, Problem> {
        let argv = ["/bin/sh", "-c", command].map(str::to_owned).to_vec();
        let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let request = ExecRequest { argv, timeout_ms, stdin_base64: None };
        self.exec_there(record, &request, caller).await
    }

    /// Runs a command in the guest of a machine of another host, and returns its exit code.
    pub(super) async fn exec_there(
        &self,
        record: &MachineRecord,
        request: &ExecRequest,
        caller: &Caller,
    ) -> Result<i32, Problem> {
        let odd = |why: String| Problem::new(ProblemKind::Failed, why);
        let failed = |e| crate::answer::problem(&e);
        let record = self.record_of(record.uuid, &record.name).await.map_err(failed)?;
        let link = self.link_to(&record, "use").await.map_err(failed)?;
        let body = serde_json::to_vec(request).map_err(|e| odd(e.to_string()))?;
        let path = format!("/api/v1/machines/{}/exec", record.name);
        let answer = link.send(caller, Method::POST, &path, Body::from(body)).await?;
        let status = answer.status();
        let body = axum::body::to_bytes(Body::new(answer.into_body()), ANSWER_MAX_BYTES).await;
        let body = body.map_err(|e| odd(format!("cannot read the answer of host '{}': {e}", link.name)))?;
        if status.is_success() {
            let result: ExecResult = serde_json::from_slice(&body).map_err(|e| odd(e.to_string()))?;
            return Ok(result.exit_code);
        }
        Err(serde_json::from_slice(&body).unwrap_or_else(|e| odd(e.to_string())))
    }
}

fn is_off(state: MachineState) -> bool {
    matches!(
        state,
        MachineState::Created | MachineState::Stopped | MachineState::Crashed | MachineState::Lost
    )
}
