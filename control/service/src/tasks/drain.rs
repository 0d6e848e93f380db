//! `drain`: moves the machines of a host to other hosts, so that the host can be maintained. It is a task (`mod.rs`); `fleet/moving.rs`
//! moves a single machine. Claimed machines and those with a persistent disk, among others, stay, and the report says why.
//!
//! A machine that is off is moved first. A machine that is on is stopped, moved, and started on its new host. Each step is decided by
//! what the database says at that moment. Before a machine is stopped, a note in the database says that it is to be started. So a task
//! that continues after a restart forgets no machine, and a machine that does not start at first is started later. A stop by a user
//! removes the note.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::response::Response;
use futures_util::future::join_all;
use headwater_api::{
    BootFrom, Change, DrainReport, LeftMachine, MovedMachine, Problem, ProblemKind, TaskResult,
};
use headwater_db::{DbError, HostRecord, Repository};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::scale::changing;
use super::{Outcome, RETRY, Work, answer};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;
use crate::fleet::moving::why_left;
use crate::fleet::placement::{need_of, place};
use crate::lifecycle::LifecycleError;

/// The kind of the task.
pub(super) const KIND: &str = "drain";

/// The most machines that are moved at the same time.
const AT_A_TIME: usize = 4;

/// The stage of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
enum Stage {
    /// Not moved yet.
    Pending,
    /// It is being moved.
    Moving {
        /// Its new host.
        to: Uuid,
    },
    /// It is in the report.
    Ended,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Member {
    uuid: Uuid,
    machine: String,
    stage: Stage,
}

/// The data that the task needs to continue after a restart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    host: Uuid,
    /// The catalogs whose machines it moves. No other task may change these meanwhile.
    catalogs: BTreeSet<String>,
    members: Vec<Member>,
    report: DrainReport,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("there is no host '{0}'")]
    Unknown(String),
    #[error("cannot drain host '{0}': its node is not connected")]
    Away(String),
    #[error(
        "cannot drain host '{host}': task {task} changes catalog '{catalog}', which has machines on the host"
    )]
    CatalogBusy { host: String, catalog: String, task: i64 },
    #[error("cannot drain host '{host}': task {task} drains it already")]
    Busy { host: String, task: i64 },
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Unknown(_) => ProblemKind::NotFound,
            Self::Away(_) => ProblemKind::Unavailable,
            Self::CatalogBusy { .. } | Self::Busy { .. } => ProblemKind::Conflict,
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Unknown(_) => Some("'headwater node list' shows all hosts".to_owned()),
            Self::Away(_) => Some("start the node on that host, and drain the host again".to_owned()),
            Self::CatalogBusy { task, .. } | Self::Busy { task, .. } => {
                Some(format!("run 'headwater task wait {task}', or cancel the task"))
            }
            Self::Db(e) => e.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(e) => e.retry_after_s(),
            _ => None,
        }
    }
}

/// The unended task that moves machines of a catalog from their host, if there is one.
pub(super) async fn moving(repo: &mut dyn Repository, catalog: &str) -> Result<Option<i64>, DbError> {
    let unended = repo.tasks().unended().await?;
    let moves =
        |plan: Option<&str>| super::stored::<Plan>(plan).is_some_and(|plan| plan.catalogs.contains(catalog));
    let found = unended.into_iter().find(|task| task.kind == KIND && moves(task.plan.as_deref()));
    Ok(found.map(|task| task.id))
}

/// Cordons a host, and begins the task.
pub(crate) async fn begin(service: &Service, caller: Caller, host: String) -> Result<Response, Failure> {
    let (handle, asking) = (service.clone(), caller.clone());
    // To the end: a client that hangs up must not leave a row without its task.
    let begun = service.to_the_end(async move {
        let mut repo = handle.db().write().await?;
        let found = repo.hosts().list().await?.into_iter().find(|it| it.name == host);
        let mut record = found.ok_or_else(|| Error::Unknown(host.clone()))?;
        if record.id != handle.own_host() && handle.link(record.id).is_none() {
            return Err(Error::Away(host));
        }
        let subject = format!("host {host}");
        let unended = repo.tasks().unended().await?;
        if let Some(task) = unended.iter().find(|task| task.kind == KIND && task.subject == subject) {
            return Err(Error::Busy { host, task: task.id });
        }
        let plan = plan(&handle, &mut *repo, &record).await?;
        for catalog in &plan.catalogs {
            if let Some(task) = changing(&mut *repo, catalog).await? {
                return Err(Error::CatalogBusy { host, catalog: catalog.clone(), task });
            }
        }
        if !record.cordoned {
            record.cordoned = true;
            repo.hosts().update(&record).await?;
            let event = handle.event(&caller, subject.clone(), "cordoned", "to drain it");
            repo.events().append(event.changing(Change::of("cordoned", false, true))).await?;
        }
        let what = Work { kind: KIND, subject, caller: caller.clone() };
        let id = repo.tasks().add(&handle.new_task(&what, super::text_of(&plan))).await?;
        repo.save().await?;
        let control = Arc::new(TaskControl::new(handle.stopping_flag()));
        control.begin();
        let work = go_on(handle.clone(), caller, id, plan, control.clone());
        Ok((id, handle.spawn_task(Some(id), control, work)))
    });
    let (id, live) = begun.await?;
    Ok(answer(Some(id), live, asking).await)
}

/// Which machines of a host are moved, in this order, and which stay.
async fn plan(service: &Service, repo: &mut dyn Repository, host: &HostRecord) -> Result<Plan, DbError> {
    let mut members = Vec::new();
    let mut catalogs = BTreeSet::new();
    let mut report = DrainReport { host: host.name.clone(), ..DrainReport::default() };
    let mut machines = repo.machines().of_host(host.id).await?;
    machines.retain(|machine| machine.boot == BootFrom::Vm);
    machines.sort_by_key(|machine| service.is_on(machine));
    for record in machines {
        let machine = record.name.clone();
        match why_left(repo, &record).await? {
            Some(why) => report.left.push(LeftMachine { machine, why }),
            None => {
                catalogs.extend(record.catalog.clone());
                members.push(Member { uuid: record.uuid, machine, stage: Stage::Pending });
            }
        }
    }
    Ok(Plan { host: host.id, catalogs, members, report })
}

/// Runs the rest of a plan.
pub(super) async fn go_on(
    service: Service,
    caller: Caller,
    id: i64,
    mut plan: Plan,
    control: Arc<TaskControl>,
) -> Outcome {
    service.task_began(id).await;
    let all = plan.members.len();
    loop {
        if service.is_stopping() {
            return Err(super::stopped());
        }
        let host = plan.report.host.clone();
        let moved = plan.report.moved.len();
        // A machine that is being moved must not stay off.
        let is_cancelled = control.is_asked_to_stop();
        if is_cancelled && !plan.members.iter().any(Member::is_moving) {
            let why = format!(
                "draining host '{host}' was cancelled: {moved} machine(s) were moved; the host stays cordoned"
            );
            return Err(Problem::new(ProblemKind::Cancelled, why)
                .advise(format!("'headwater node uncordon {host}' lets it get new machines again")));
        }
        control.report_doing(format!("{moved} of {all} machines moved"));
        let chosen = match choose(&service, &mut plan, is_cancelled).await {
            Ok(chosen) => chosen,
            Err(error) => {
                let why = problem(&error);
                tracing::warn!(host, "cannot choose the next machines to move; trying again: {why}");
                tokio::time::sleep(RETRY).await;
                continue;
            }
        };
        service.save_plan(id, &plan, &control).await?;
        if chosen.is_empty() {
            if plan.members.iter().all(|member| member.stage == Stage::Ended) {
                return Ok(TaskResult::Drained(Box::new(plan.report)));
            }
            continue;
        }
        let moves = chosen.iter().map(|(member, hosts)| move_one(&service, member, hosts, &caller));
        let mut is_waiting = false;
        for ((member, (_, to)), outcome) in chosen.iter().zip(join_all(moves).await) {
            let machine = member.machine.clone();
            match outcome {
                Ok(None) => plan.report.moved.push(MovedMachine { machine, to: to.name.clone() }),
                Ok(Some(why)) => plan.report.left.push(LeftMachine { machine, why }),
                // Somebody has removed it.
                Err(LifecycleError::Unknown(_)) => {}
                Err(error) => {
                    let why = problem(&error).to_string();
                    if is_tried_again(&service, &error, &control) {
                        tracing::warn!(machine, "cannot move a machine now; trying again: {why}");
                        is_waiting = true;
                        plan.postpone(member.uuid);
                        continue;
                    }
                    plan.report.left.push(LeftMachine { machine, why });
                }
            }
            plan.end(member.uuid);
        }
        service.save_plan(id, &plan, &control).await?;
        if is_waiting {
            tokio::time::sleep(RETRY).await;
        }
    }
}

impl Member {
    fn is_moving(&self) -> bool {
        matches!(self.stage, Stage::Moving { .. })
    }
}

impl Plan {
    /// Moves a machine to the end of the plan.
    fn postpone(&mut self, uuid: Uuid) {
        if let Some(at) = self.members.iter().position(|member| member.uuid == uuid) {
            let member = self.members.remove(at);
            self.members.push(member);
        }
    }

    fn end(&mut self, uuid: Uuid) {
        self.set(uuid, Stage::Ended);
    }

    fn set(&mut self, uuid: Uuid, stage: Stage) {
        if let Some(member) = self.members.iter_mut().find(|member| member.uuid == uuid) {
            member.stage = stage;
        }
    }
}

/// A machine, its host and its new host.
type Move = (Member, (HostRecord, HostRecord));

/// Chooses the next machines and their new hosts, and records both in the plan. Machines without a host with room are
/// left. With `only_moving`, no other machine begins to move.
async fn choose(service: &Service, plan: &mut Plan, only_moving: bool) -> Result<Vec<Move>, DbError> {
    let hosts = service.db().read().await?.hosts().list().await?;
    let mut candidates = service.candidates(&hosts).await?;
    candidates.retain(|candidate| candidate.id != plan.host);
    service.only_cleared(&mut candidates);
    let of = |id: Uuid| hosts.iter().find(|host| host.id == id).cloned();
    let is_next =
        |member: &&Member| if only_moving { member.is_moving() } else { member.stage != Stage::Ended };
    let next: Vec<Member> = plan.members.iter().filter(is_next).take(AT_A_TIME).cloned().collect();
    let mut chosen = Vec::new();
    for member in next {
        let mut repo = service.db().read().await?;
        let Some(record) = repo.machines().by_uuid(member.uuid).await? else {
            plan.end(member.uuid);
            continue;
        };
        let to = match member.stage {
            Stage::Moving { to } => Ok(to),
            // Its host is lost, and it was given to another one.
            _ if record.host != plan.host => {
                plan.end(member.uuid);
                continue;
            }
            // It may have been claimed meanwhile.
            _ => match why_left(&mut *repo, &record).await? {
                Some(why) => Err(why),
                None => {
                    place(&mut candidates, need_of(&record)).map_err(|no_room| format!("stays: {no_room}"))
                }
            },
        };
        let places = to.and_then(|to| {
            of(plan.host).zip(of(to)).ok_or_else(|| "stays: the host chosen for it was removed".to_owned())
        });
        let (from, to) = match places {
            Ok(places) => places,
            Err(why) => {
                plan.report.left.push(LeftMachine { machine: member.machine, why });
                plan.end(member.uuid);
                continue;
            }
        };
        let stage = Stage::Moving { to: to.id };
        plan.set(member.uuid, stage.clone());
        chosen.push((Member { stage, ..member }, (from, to)));
    }
    Ok(chosen)
}

/// Moves a machine, and starts it if it was on. `Some`: why it is not moved.
async fn move_one(
    service: &Service,
    member: &Member,
    (from, to): &(HostRecord, HostRecord),
    caller: &Caller,
) -> Result<Option<String>, LifecycleError> {
    let (uuid, name) = (member.uuid, &member.machine);
    let stays = service.move_to_host((uuid, name), (from, to), caller).await?;
    if stays.is_none()
        && let Err(error) = service.start_if_due(uuid, name, caller).await
    {
        let why = problem(&error);
        tracing::warn!(machine = name, "cannot start a machine that was moved; trying again later: {why}");
    }
    Ok(stays)
}

/// Whether a move that failed is tried again. If not, the machine stays, and is started again if it was on.
fn is_tried_again(service: &Service, error: &LifecycleError, control: &TaskControl) -> bool {
    let is_passing = problem(error).kind == ProblemKind::Unavailable || error.is_of_database();
    service.is_stopping() || (is_passing && !control.is_asked_to_stop())
}
