//! `drain`: moves the machines of a host to other hosts, so that the host can be maintained.
//!
//! A machine that is off is moved first. A machine that is on is stopped, moved, and started on its new host. Each step is decided by what
//! the database says at that moment, and the plan remembers which machines were on, so a task that goes on after a restart forgets none.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::response::Response;
use futures_util::future::join_all;
use headwater_api::{BootFrom, DrainReport, LeftMachine, MovedMachine, Problem, ProblemKind, TaskResult};
use headwater_db::{DbError, HostRecord, MachineRecord, Purpose, Repository};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::scale::changing;
use super::{Outcome, Work, answer};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;
use crate::fleet::placement::{need_of, place};
use crate::lifecycle::LifecycleError;

/// Its kind.
pub(super) const KIND: &str = "drain";

/// How many machines are moved at a time.
const AT_A_TIME: usize = 4;

/// How far one machine is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
enum Stage {
    /// It is as it was.
    Pending,
    /// It is on its way.
    Moving {
        /// Its new host.
        to: Uuid,
        /// Whether it is started there.
        was_on: bool,
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

/// What it needs to go on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    host: Uuid,
    /// The catalogs whose machines it moves: nobody else changes these meanwhile.
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
    #[error("cannot drain host '{host}': task {task} changes catalog '{catalog}', which has machines there")]
    CatalogBusy { host: String, catalog: String, task: i64 },
    #[error("cannot drain host '{host}': task {task} drains it")]
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
            Self::Unknown(_) | Self::Away(_) => Some("'headwater node list' shows all".to_owned()),
            Self::CatalogBusy { task, .. } | Self::Busy { task, .. } => {
                Some(format!("'headwater task wait {task}', or cancel it"))
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
    let handle = service.clone();
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
            repo.events().append(handle.event(&caller, subject.clone(), "cordoned", "to drain it")).await?;
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
    Ok(answer(Some(id), live).await)
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

/// Why a machine stays where it is.
async fn why_left(repo: &mut dyn Repository, record: &MachineRecord) -> Result<Option<String>, DbError> {
    let Some(catalog) = &record.catalog else {
        return Ok(Some("is of no catalog, and was given to this host".to_owned()));
    };
    if record.cache.persistent {
        return Ok(Some("keeps its disk, which is on this host".to_owned()));
    }
    let claims = repo.claims().list().await?;
    if let Some(claim) = claims.into_iter().find(|claim| claim.machine == record.uuid) {
        return Ok(Some(format!("is claimed for {}", claim.holder)));
    }
    let disks = repo.persistent_disks().of_machine(record.uuid).await?;
    Ok(match disks.first().map(|disk| disk.purpose) {
        Some(Purpose::MaintenanceSession) => Some("edits an image".to_owned()),
        Some(Purpose::Persistent) => Some("has a disk that is kept on this host".to_owned()),
        None => match repo.catalogs().by_name(catalog).await? {
            Some(catalog) if catalog.keep_ready > 0 => {
                Some(format!("is of catalog '{}', which keeps machines ready on this host", catalog.name))
            }
            _ => None,
        },
    })
}

/// Does what is left.
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
        if control.is_asked_to_stop() {
            let why = format!(
                "draining host '{host}' was cancelled: {moved} machine(s) were moved, and it stays cordoned"
            );
            return Err(Problem::new(ProblemKind::Cancelled, why)
                .advise(format!("'headwater node uncordon {host}' lets it have new machines again")));
        }
        control.report_doing(format!("{moved} of {all} machines moved"));
        let chosen = choose(&service, &mut plan).await.map_err(|e| problem(&e))?;
        service.save_plan(id, &plan, &control).await?;
        if chosen.is_empty() {
            if plan.members.iter().all(|member| member.stage == Stage::Ended) {
                return Ok(TaskResult::Drained(Box::new(plan.report)));
            }
            continue;
        }
        let moves = chosen.iter().map(|(member, hosts)| move_one(&service, member, hosts, &caller));
        for ((member, (_, to)), outcome) in chosen.iter().zip(join_all(moves).await) {
            let machine = member.machine.clone();
            match outcome {
                Ok(()) => plan.report.moved.push(MovedMachine { machine, to: to.name.clone() }),
                // Somebody has removed it.
                Err(LifecycleError::Unknown(_)) => {}
                Err(error) => {
                    plan.report.left.push(LeftMachine { machine, why: problem(&error).to_string() });
                }
            }
            plan.end(member.uuid);
        }
        service.save_plan(id, &plan, &control).await?;
    }
}

impl Plan {
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

/// The next machines and their new hosts, which are in the plan then. Those without a place are left.
async fn choose(service: &Service, plan: &mut Plan) -> Result<Vec<Move>, DbError> {
    let hosts = service.db().read().await?.hosts().list().await?;
    let mut candidates = service.candidates(&hosts).await?;
    candidates.retain(|candidate| candidate.id != plan.host);
    let of = |id: Uuid| hosts.iter().find(|host| host.id == id).cloned();
    let next: Vec<Member> =
        plan.members.iter().filter(|member| member.stage != Stage::Ended).take(AT_A_TIME).cloned().collect();
    let mut chosen = Vec::new();
    for member in next {
        let mut repo = service.db().read().await?;
        let Some(record) = repo.machines().by_uuid(member.uuid).await? else {
            plan.end(member.uuid);
            continue;
        };
        let to = match member.stage {
            Stage::Moving { to, .. } => Ok(to),
            // Somebody may have claimed it meanwhile.
            _ => match why_left(&mut *repo, &record).await? {
                Some(why) => Err(why),
                None => {
                    place(&mut candidates, need_of(&record)).map_err(|no_room| format!("stays: {no_room}"))
                }
            },
        };
        let places = to.and_then(|to| {
            of(plan.host).zip(of(to)).ok_or_else(|| "was to go to a host that was removed".to_owned())
        });
        let (from, to) = match places {
            Ok(places) => places,
            Err(why) => {
                plan.report.left.push(LeftMachine { machine: member.machine, why });
                plan.end(member.uuid);
                continue;
            }
        };
        let stage = match member.stage {
            stage @ Stage::Moving { .. } => stage,
            _ => Stage::Moving { to: to.id, was_on: service.is_on(&record) },
        };
        plan.set(member.uuid, stage.clone());
        chosen.push((Member { stage, ..member }, (from, to)));
    }
    Ok(chosen)
}

async fn move_one(
    service: &Service,
    member: &Member,
    (from, to): &(HostRecord, HostRecord),
    caller: &Caller,
) -> Result<(), LifecycleError> {
    let name = &member.machine;
    service.move_to_host((member.uuid, name), (from, to), caller).await?;
    match member.stage {
        Stage::Moving { was_on: true, .. } => service.start(name, caller).await.map(drop),
        _ => Ok(()),
    }
}
