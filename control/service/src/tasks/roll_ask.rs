//! Asks the guests of a roll who is logged in, and shows their users its message, on this host and on others. `roll_idle.rs` decides what
//! follows from the answers.

use std::time::Duration;

use axum::http::Method;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use headwater_api::{ExecRequest, GuestUsers, Problem, ProblemKind};
use headwater_db::{DbError, MachineRecord};

use super::roll::{gate, is_claimed};
use super::roll_plan::{Gate, Member, Plan};
use crate::Service;
use crate::answer::problem;
use crate::backend::TaskControl;
use crate::caller::Caller;

/// How many guests are asked at once.
const ASKED_AT_ONCE: usize = 16;

/// Timeout of a guest that is asked who is logged in.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a guest that shows a message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Shows its standard input to all who are logged in: with the guest's own program if it has one, or on all terminals.
const SHOW: &str = "[ ! -x /etc/headwater/message ] || exec /etc/headwater/message; exec wall";

impl Service {
    /// Asks guests who is logged in, applies the answers to the plan, and tells users that their machines will restart.
    /// Ends early when a whole batch is about to be moved, the window is over, or the roll is cancelled: the others are asked later.
    pub(super) async fn ask_users(
        &self,
        members: &[Member],
        plan: &mut Plan,
        caller: &Caller,
        control: &TaskControl,
    ) {
        if let Some(deadline_s) = plan.request.deadline_s {
            let deadline_ms = self.now_ms().saturating_add(deadline_s.saturating_mul(1000));
            plan.deadline_ms.get_or_insert(deadline_ms);
        }
        let mut to_tell = Vec::new();
        for some in members.chunks(ASKED_AT_ONCE) {
            let is_over = gate(&plan.request, self.now_ms()).is_ok_and(|gate| gate != Gate::Open);
            if is_over || control.is_asked_to_stop() || plan.places() == 0 {
                break;
            }
            let counts = join_all(some.iter().map(|member| self.users_in(member, caller))).await;
            let answers: Vec<_> = some.iter().cloned().zip(counts).collect();
            to_tell.extend(plan.heard(&answers, self.now_ms()));
        }
        let Some(message) = &plan.request.message else { return };
        for some in to_tell.chunks(ASKED_AT_ONCE) {
            join_all(some.iter().map(|member| self.tell(member, message, caller))).await;
        }
    }

    /// The number of users who are logged in to a machine. `None`: nobody says. A machine that is gone, off, claimed or pinned has none,
    /// because a roll does not restart it.
    async fn users_in(&self, member: &Member, caller: &Caller) -> Option<usize> {
        let found = async {
            let mut repo = self.db().read().await?;
            let record = repo.machines().by_uuid(member.uuid).await?;
            let is_claimed = is_claimed(&mut *repo, member.uuid).await?;
            Ok::<_, DbError>(record.filter(|record| record.pin.is_none() && !is_claimed))
        };
        let record = match found.await {
            Ok(Some(record)) => self.as_its_node_says(record).await,
            Ok(None) => return Some(0),
            Err(_) => return None,
        };
        if !self.is_on(&record) {
            return Some(0);
        }
        let asked = async {
            if self.is_own(&record) {
                let Some(active) = self.active(record.uuid) else { return Some(0) };
                return active.vm.users().await.ok();
            }
            let link = self.link_to(&record, "ask").await.ok()?;
            let path = format!("/api/v1/machines/{}/users", record.name);
            let answer = link.ask::<GuestUsers>(caller, Method::GET, &path, None).await;
            answer.ok().map(|answer| usize::try_from(answer.users).unwrap_or(usize::MAX))
        };
        tokio::time::timeout(ANSWER_TIMEOUT, asked).await.ok().flatten()
    }

    /// Shows the users of a machine a message. If that fails, the log says so, and the machine waits as if they had seen the message.
    async fn tell(&self, member: &Member, message: &str, caller: &Caller) {
        let machine = &member.machine;
        match self.show(member, message, caller).await {
            Ok(()) => {
                let subject = format!("machine {machine}");
                let detail = "its users were told that it will restart".to_owned();
                self.note(self.event(caller, subject, "message", detail)).await;
            }
            Err(why) => {
                tracing::warn!(machine, "a roll cannot tell users that their machine will restart: {why}");
            }
        }
    }

    async fn show(&self, member: &Member, message: &str, caller: &Caller) -> Result<(), Problem> {
        let text = format!("{message}\n");
        let unix = ["/bin/sh", "-c", SHOW].map(str::to_owned).to_vec();
        let windows = ["msg", "*", message].map(str::to_owned).to_vec();
        let shown = self.exec_in(member, unix, text.clone(), caller).await;
        if matches!(shown, Ok(0)) || matches!(self.exec_in(member, windows, text, caller).await, Ok(0)) {
            return Ok(());
        }
        let code = shown?;
        Err(Problem::new(ProblemKind::Failed, format!("'wall' failed with exit code {code}")))
    }

    /// Runs a command in a machine's guest, wherever it runs, and returns the exit code.
    async fn exec_in(
        &self,
        member: &Member,
        argv: Vec<String>,
        input: String,
        caller: &Caller,
    ) -> Result<i32, Problem> {
        let gone = || Problem::new(ProblemKind::Conflict, "the machine was removed, or is off");
        let found: Result<Option<MachineRecord>, DbError> =
            async { self.db().read().await?.machines().by_uuid(member.uuid).await }.await;
        let record = found.map_err(|e| problem(&e))?.ok_or_else(gone)?;
        if !self.is_own(&record) {
            let timeout_ms = u64::try_from(MESSAGE_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
            let stdin_base64 = Some(STANDARD.encode(input));
            let request = ExecRequest { argv, timeout_ms, stdin_base64 };
            let asked = self.exec_there(&record, &request, caller);
            let late = |_| Problem::new(ProblemKind::Unavailable, "the guest does not answer");
            return tokio::time::timeout(MESSAGE_TIMEOUT * 2, asked).await.map_err(late)?;
        }
        let active = self.active(record.uuid).ok_or_else(gone)?;
        let done = active.vm.exec(&argv, input.into_bytes(), MESSAGE_TIMEOUT).await;
        done.map(|output| output.exit_code).map_err(|e| problem(&e))
    }
}
