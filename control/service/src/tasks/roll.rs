//! `roll`: moves the machines of a catalog to a version, canaries first, and moves them back if they are not healthy. This file carries
//! out the steps that `roll_plan.rs` decides; `roll_remote.rs` has what differs for machines of other hosts. "Moved" means: restarted
//! with the other version, on the same host.
//!
//! During a roll the catalog is pinned to the previous version, and each machine that was moved is pinned to the new one. So a machine
//! that restarts meanwhile boots the version that the roll expects. At the end the catalog's pin is changed and those of its machines are
//! removed, in one transaction.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use futures_util::future::join_all;
use headwater_api::name::ImageRef;
use headwater_api::{BootFrom, ImageVersion, Problem, ProblemKind, RollRequest, TaskResult, Wanted};
use headwater_db::{DbError, MachineRecord, Purpose, Repository};
use tokio::time::Instant;
use uuid::Uuid;

use super::roll_plan::{CANCELLED, Gate, Member, Next, Plan, Stage};
use super::scale::changing;
use super::{Outcome, Work, answer};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;
use crate::clock_hours;
use crate::lifecycle::LifecycleError;
use crate::retention::{ReferenceKind, Referrer};

/// The kind of the task.
pub(super) const KIND: &str = "roll";

/// How often a waiting roll checks whether it was cancelled.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// The most characters of a health command's output in the log.
const OUTPUT_CHARS: usize = 1000;

/// The longest wait until a roll begins, in seconds.
const WAIT_MAX_S: u64 = 366 * 86_400;
const PAUSE_MAX_S: u64 = 7 * 86_400;
const BOOT_MAX_S: u64 = 86_400;
const HEALTH_MAX_S: u64 = 3_600;

/// The longest wait of a machine for its users, and for all of them.
const IDLE_MAX_S: u64 = 7 * 86_400;
const DEADLINE_MAX_S: u64 = 30 * 86_400;

/// The most characters of the message for users.
const MESSAGE_MAX_CHARS: usize = 1_000;

/// How often a machine that boots another version than its pin is restarted.
const STARTS_MAX: u32 = 3;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot roll catalog '{catalog}': task {task} changes the catalog")]
    Busy { catalog: String, task: i64 },
    #[error("cannot roll catalog '{catalog}' to '{to}': the catalog boots image '{image}'")]
    OtherImage { catalog: String, to: String, image: String },
    #[error("cannot roll catalog '{catalog}' to '{to}': the version is retired")]
    Retired { catalog: String, to: String },
    #[error(
        "cannot roll catalog '{catalog}' to '{to}': its machines already run that version, and machines that are started boot it"
    )]
    Runs { catalog: String, to: String },
    #[error("cannot roll catalog '{catalog}': {what} is longer than {limit_s} s")]
    Long { catalog: String, what: &'static str, limit_s: u64 },
    #[error("cannot roll catalog '{catalog}' at {at}: that time is in the past")]
    Over { catalog: String, at: String },
    #[error(
        "cannot roll catalog '{0}': the wait for users is not shorter than the window, so it would never end"
    )]
    ShortWindow(String),
    #[error("cannot roll catalog '{catalog}': {what}, but machines do not wait for their users")]
    NoWait { catalog: String, what: &'static str },
    #[error(
        "cannot roll catalog '{0}': the message for users must have 1 to {MESSAGE_MAX_CHARS} characters, and no control characters except line breaks"
    )]
    Message(String),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Busy { .. } | Self::Runs { .. } => ProblemKind::Conflict,
            Self::OtherImage { .. }
            | Self::Retired { .. }
            | Self::Long { .. }
            | Self::Over { .. }
            | Self::NoWait { .. }
            | Self::ShortWindow(_)
            | Self::Message(_) => ProblemKind::Invalid,
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Busy { task, .. } => Some(format!("run 'headwater task wait {task}', or cancel the task")),
            Self::OtherImage { image, .. } => Some(format!(
                "'headwater image versions {image}' shows its versions; 'headwater catalog set' changes the image"
            )),
            Self::Retired { to, .. } => Some(format!("'headwater image retire --undo {to}' brings it back")),
            Self::Over { .. } => Some("leave the time out to begin now".to_owned()),
            Self::NoWait { .. } => {
                Some("give the time for which a machine waits, with --wait-idle".to_owned())
            }
            Self::ShortWindow(_) => Some("make --wait-idle or --deadline shorter than the window".to_owned()),
            Self::Runs { .. } | Self::Long { .. } | Self::Message(_) => None,
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

/// Checks a request, and begins the task.
pub(crate) async fn begin(
    service: &Service,
    caller: Caller,
    catalog: String,
    mut request: RollRequest,
) -> Result<Response, Failure> {
    let now_ms = service.now_ms();
    if let Some(at_ms) = request.at_ms.filter(|at_ms| *at_ms < now_ms) {
        return Err(Error::Over { catalog, at: headwater_api::words::time(at_ms) }.into());
    }
    let wait_s = request.at_ms.unwrap_or(now_ms).saturating_sub(now_ms) / 1000;
    request.window = request.window.map(clock_hours::with_zone).transpose().map_err(Failure)?;
    let limits = [
        ("the time until it begins", wait_s, WAIT_MAX_S),
        ("the pause", request.pause_s, PAUSE_MAX_S),
        ("the time for a boot", request.boot_s, BOOT_MAX_S),
        ("the time for the health command", request.health_s, HEALTH_MAX_S),
        ("the wait for users", request.wait_idle_s.unwrap_or(0), IDLE_MAX_S),
        ("the deadline", request.deadline_s.unwrap_or(0), DEADLINE_MAX_S),
    ];
    if let Some((what, _, limit_s)) = limits.into_iter().find(|(_, given, limit)| given > limit) {
        return Err(Error::Long { catalog, what, limit_s }.into());
    }
    check_wait(&catalog, &mut request)?;
    let (handle, asking) = (service.clone(), caller.clone());
    // To the end: a client that hangs up must not leave a row without its task.
    let begun = service.to_the_end(async move {
        // Until the database records the versions of the roll, nobody may remove them.
        let _using = handle.using_versions().await;
        let plan = plan(&handle, catalog, request).await?;
        let subject = format!("catalog {}", plan.catalog);
        let what = Work { kind: KIND, subject, caller: caller.clone() };
        let id = handle.begin_roll(&what, &plan).await?;
        let control = Arc::new(TaskControl::new(handle.stopping_flag()));
        control.begin();
        let work = go_on(handle.clone(), caller, id, plan, control.clone());
        Ok::<_, Failure>((id, handle.spawn_task(Some(id), control, work)))
    });
    let (id, live) = begun.await?;
    Ok(answer(Some(id), live, asking).await)
}

/// Fails for a message or a deadline of a roll that does not wait for users, and for a wait that no window is long enough for.
fn check_wait(catalog: &str, request: &mut RollRequest) -> Result<(), Error> {
    request.wait_idle_s = request.wait_idle_s.filter(|wait_s| *wait_s > 0);
    if let (Some(wait_s), Some(window)) = (request.wait_idle_s, &request.window) {
        let (length_s, end_s) = (window.length_s(), request.deadline_s.unwrap_or(u64::MAX).min(wait_s));
        // Whole days may follow one another without an end.
        if length_s <= end_s && length_s < 86_400 {
            return Err(Error::ShortWindow(catalog.to_owned()));
        }
    }
    let what = match (&request.message, request.deadline_s) {
        (Some(_), _) => "there is a message for users",
        (None, Some(_)) => "there is a deadline for users",
        (None, None) => return Ok(()),
    };
    if request.wait_idle_s.is_none() {
        return Err(Error::NoWait { catalog: catalog.to_owned(), what });
    }
    let is_odd = |text: &String| {
        let is_control = |c: char| c.is_control() && c != '\n';
        text.trim().is_empty() || text.chars().count() > MESSAGE_MAX_CHARS || text.chars().any(is_control)
    };
    match request.message.as_ref().is_some_and(is_odd) {
        true => Err(Error::Message(catalog.to_owned())),
        false => Ok(()),
    }
}

/// Makes the plan of a roll.
async fn plan(service: &Service, catalog: String, request: RollRequest) -> Result<Plan, Failure> {
    let record = service.catalog(&catalog).await?;
    if let Some(task) = service.task_that_changes(&catalog).await? {
        return Err(Error::Busy { catalog, task }.into());
    }
    let reference = ImageRef::parse(&request.to).map_err(Failure)?;
    let its = ImageRef::parse(&record.image).map_err(Failure)?;
    if reference.image != its.image {
        return Err(Error::OtherImage { catalog, to: request.to, image: its.image }.into());
    }
    let tried = format!("cannot roll catalog '{catalog}' to '{}'", request.to);
    let resolved = service.images().resolve(&reference).await;
    let version = resolved.map_err(|e| Failure(problem(&e).during(tried.clone())))?;
    let to = number_of(&version);
    if version.retired {
        return Err(Error::Retired { catalog, to }.into());
    }
    let machines = service.members(&catalog).await?;
    let means = match &record.pin {
        Some(pin) => pin.clone(),
        None => match service.images().resolve(&its).await {
            Ok(version) => number_of(&version),
            // The present version cannot be resolved any more, so machines cannot boot it.
            Err(_) => to.clone(),
        },
    };
    let stages = service.stages_of(&machines, &to).await?;
    if means == to && !stages.contains(&Stage::Pending) {
        return Err(Error::Runs { catalog, to }.into());
    }
    // If the catalog already resolves to the new version, the previous version is that of most machines.
    let pending = machines.iter().zip(&stages).filter(|(_, stage)| **stage == Stage::Pending);
    let run = pending.filter_map(|(machine, _)| machine.version.clone()).filter(|it| is_of(it, &its.image));
    let from = if means == to { most_common(run.collect()).unwrap_or(means) } else { means };
    let named = machines.into_iter().zip(stages);
    let member =
        |(machine, stage): (MachineRecord, _)| Member { uuid: machine.uuid, machine: machine.name, stage };
    let plan = Plan {
        catalog,
        request,
        from,
        // A pin to the new version cannot be restored.
        pin_before: record.pin.filter(|pin| *pin != to),
        to,
        members: named.map(member).collect(),
        pause_until_ms: 0,
        back: None,
        waits_until_ms: None,
        deadline_ms: None,
    };
    service.retain_for_roll(&plan).await.map_err(|e| Failure(e.during(tried)))?;
    Ok(plan)
}

fn number_of(version: &ImageVersion) -> String {
    format!("{}@{}", version.image, version.number)
}

fn is_of(version: &str, image: &str) -> bool {
    version.split_once('@').is_some_and(|(its, _)| its == image)
}

fn most_common(versions: Vec<String>) -> Option<String> {
    let count = |version: &String| versions.iter().filter(|it| *it == version).count();
    versions.iter().max_by_key(|version| count(version)).cloned()
}

/// Whether the roll may move machines now.
pub(super) fn gate(request: &RollRequest, now_ms: u64) -> Result<Gate, Problem> {
    if let Some(at_ms) = request.at_ms.filter(|at_ms| *at_ms > now_ms) {
        return Ok(Gate::Closed(at_ms));
    }
    match &request.window {
        Some(hours) if !clock_hours::is_within(hours, now_ms)? => {
            Ok(Gate::Closed(clock_hours::next_begin(hours, now_ms)?.unwrap_or(u64::MAX)))
        }
        _ => Ok(Gate::Open),
    }
}

/// Whether machines that an earlier daemon was about to move have to wait again: the window may be over, or users may have logged in.
fn must_ask_again(plan: &Plan, gate: Gate) -> bool {
    plan.back.is_none() && (gate != Gate::Open || plan.request.wait_idle_s.is_some())
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
    let mut saved = None;
    let mut is_resumed = plan.members.iter().any(|member| member.stage == Stage::Moving);
    loop {
        control.report_doing(plan.in_words());
        if saved.as_ref() != Some(&plan) {
            service.save_plan(id, &plan, &control).await?;
            saved = Some(plan.clone());
        }
        if service.is_stopping() {
            return Err(super::stopped());
        }
        let (is_cancelled, now_ms) = (control.is_asked_to_stop(), service.now_ms());
        let gate = gate(&plan.request, now_ms).unwrap_or_else(|error| {
            let catalog = &plan.catalog;
            tracing::error!(catalog, "the roll cannot tell if its window is open; trying again: {error}");
            Gate::Closed(plan.waits_until_ms.unwrap_or(now_ms))
        });
        let looked = if gate == Gate::Open && plan.waits_until_ms.is_some() {
            let looked = match plan.has_begun() || is_cancelled {
                true => Ok(()),
                // Days may have passed: machines were created, removed, stopped and started.
                false => service.look_again(&mut plan).await,
            };
            if looked.is_ok() {
                plan.waits_until_ms = None;
            }
            looked
        } else if is_resumed && must_ask_again(&plan, gate) && !is_cancelled {
            service.wait_with_unmoved(&mut plan).await
        } else {
            Ok(())
        };
        if let Err(error) = looked {
            let (catalog, why) = (&plan.catalog, problem(&error));
            tracing::error!(catalog, "the roll cannot read its machines' states; trying again: {why}");
            tokio::time::sleep(LOOK).await;
            continue;
        }
        is_resumed = false;
        match plan.next(now_ms, is_cancelled, gate) {
            Next::Move(members) => {
                members.iter().for_each(|member| plan.set(&member.machine, Stage::Moving));
                control.report_doing(plan.in_words());
                service.save_plan(id, &plan, &control).await?;
                let moves =
                    members.iter().map(|member| service.move_machine(member, &plan, &caller, &control));
                let stages = join_all(moves).await;
                if service.is_stopping() {
                    // The VMs ended together with the daemon, which says nothing about their health.
                    return Err(super::stopped());
                }
                for (member, stage) in members.iter().zip(stages) {
                    plan.set(&member.machine, stage);
                }
                plan.pause_until_ms =
                    service.now_ms().saturating_add(plan.request.pause_s.saturating_mul(1000));
            }
            Next::Ask(members) => service.ask_users(&members, &mut plan, &caller, &control).await,
            Next::Hold(until_ms) => {
                plan.waits_until_ms = Some(until_ms);
                plan.forget_users();
                tokio::time::sleep(LOOK).await;
            }
            Next::Wait(until_ms) => {
                let left = Duration::from_millis(until_ms.saturating_sub(service.now_ms()));
                tokio::time::sleep(left.min(LOOK)).await;
            }
            Next::DecideReturn(why) => {
                let detail = format!("from {} back to {}: {why}", plan.to, plan.from);
                let event =
                    service.event(&caller, format!("catalog {}", plan.catalog), "roll taken back", detail);
                service.note(event).await;
                plan.back = Some(why);
            }
            Next::Return(members) => {
                members.iter().for_each(|member| plan.set(&member.machine, Stage::Returning));
                service.save_plan(id, &plan, &control).await?;
                service.return_machines(&members, &mut plan, &caller).await;
            }
            Next::Finish => match service.take_in_started(&mut plan).await {
                Ok(true) => {}
                Ok(false) => return service.finish_roll(&plan, &caller).await,
                Err(error) => {
                    let (catalog, why) = (&plan.catalog, problem(&error));
                    tracing::error!(catalog, "the roll cannot list its machines; trying again: {why}");
                    tokio::time::sleep(LOOK).await;
                }
            },
            Next::Returned(why) => return service.end_returned_roll(&plan, &caller, why).await,
        }
    }
}

impl Service {
    /// Moves machines back. A machine that cannot be moved back now keeps its stage, and is retried.
    async fn return_machines(&self, members: &[Member], plan: &mut Plan, caller: &Caller) {
        let returns = members.iter().map(|member| self.return_machine(member, plan, caller));
        let mut has_failed = false;
        for (member, returned) in members.iter().zip(join_all(returns).await) {
            match returned {
                Ok(()) => plan.set(&member.machine, Stage::Returned),
                Err(error) => {
                    let machine = &member.machine;
                    tracing::error!(
                        machine,
                        "a roll cannot move a machine back; it is tried again: {}",
                        problem(&error)
                    );
                    has_failed = true;
                }
            }
        }
        if has_failed {
            tokio::time::sleep(LOOK * 5).await;
        }
    }

    /// Whether a roll moves a machine, or why not.
    fn stage_of(&self, machine: &MachineRecord, to: &str, editing: &HashSet<Uuid>) -> Stage {
        let left = |why: &str| Stage::Left { why: why.to_owned() };
        if machine.boot == BootFrom::Network {
            left("boots from the network: it boots the new version when it is switched on again")
        } else if !self.is_own(machine) && self.link(machine.host).is_none() {
            left(
                "is on a host that is not connected: it boots the new version after 'headwater machine reset'",
            )
        } else if editing.contains(&machine.uuid) {
            left("has a maintenance session")
        } else if machine.pin.is_some() {
            left("is pinned to a version")
        } else if machine.cache.persistent {
            left("has a persistent disk: it boots the new version after 'headwater machine reset'")
        } else if !self.is_on(machine) {
            left(IS_OFF)
        } else if machine.version.as_deref() == Some(to) {
            left("already runs that version")
        } else {
            Stage::Pending
        }
    }

    /// Decides again which machines a roll moves, if it has moved none yet.
    async fn look_again(&self, plan: &mut Plan) -> Result<(), DbError> {
        let machines = self.members(&plan.catalog).await?;
        let stages = self.stages_of(&machines, &plan.to).await?;
        let named = machines.into_iter().zip(stages);
        let member = |(machine, stage): (MachineRecord, _)| Member {
            uuid: machine.uuid,
            machine: machine.name,
            stage,
        };
        plan.members = named.map(member).collect();
        Ok(())
    }

    /// Takes machines in that were off or claimed, and run the version from before by now: a pool has started them between two windows, or
    /// somebody did. Returns whether there are such machines.
    async fn take_in_started(&self, plan: &mut Plan) -> Result<bool, DbError> {
        let machines = self.members(&plan.catalog).await?;
        let stages = self.stages_of(&machines, &plan.to).await?;
        let mut has_more = false;
        for (machine, stage) in machines.iter().zip(stages) {
            let found = plan.members.iter_mut().find(|member| member.uuid == machine.uuid);
            let was_not_there = |it: &&mut Member| matches!(&it.stage, Stage::Left { why } if why == IS_OFF || why == IS_CLAIMED);
            if let Some(member) = found.filter(was_not_there).filter(|_| stage == Stage::Pending) {
                member.stage = stage;
                has_more = true;
            }
        }
        Ok(has_more)
    }

    /// Has machines wait again that an earlier daemon was about to move: for the hours of the roll, and for their users. Machines that are off
    /// stay on their way: they boot anyway.
    async fn wait_with_unmoved(&self, plan: &mut Plan) -> Result<(), DbError> {
        let members: Vec<_> = plan.members.iter().filter(|it| it.stage == Stage::Moving).cloned().collect();
        for member in members {
            let found = self.db().read().await?.machines().by_uuid(member.uuid).await?;
            let Some(record) = found else { continue };
            let record = self.as_its_node_says(record).await;
            // Before its users are asked, a machine whose node is away may prove to be moved.
            let is_known = plan.request.wait_idle_s.is_none() || self.is_reached(&record);
            if is_known && self.is_on(&record) && record.version.as_deref() != Some(&*plan.to) {
                self.unpin_after_roll(&member, plan).await?;
                plan.set(&member.machine, Stage::Pending);
            }
        }
        Ok(())
    }

    /// For each of these machines, whether a roll to a version moves it.
    async fn stages_of(&self, machines: &[MachineRecord], to: &str) -> Result<Vec<Stage>, DbError> {
        let disks = self.db().read().await?.persistent_disks().list().await?;
        let editing = disks.iter().filter(|disk| disk.purpose == Purpose::MaintenanceSession);
        let editing: HashSet<Uuid> = editing.map(|disk| disk.machine).collect();
        let claimed = self.holders().await?;
        let stage = |machine: &MachineRecord| match self.stage_of(machine, to, &editing) {
            Stage::Pending if claimed.contains_key(&machine.uuid) => {
                Stage::Left { why: IS_CLAIMED.to_owned() }
            }
            stage => stage,
        };
        Ok(machines.iter().map(stage).collect())
    }

    /// Retains both versions in the store while the roll begins. From then on the database records who needs them.
    async fn retain_for_roll(&self, plan: &Plan) -> Result<(), Problem> {
        for reference in [&plan.to, &plan.from] {
            let parsed = ImageRef::parse(reference)?;
            let version = self.images().resolve(&parsed).await.map_err(|e| problem(&e))?;
            let referrer = Referrer::Catalog(&plan.catalog);
            let retained = self.retain_named(referrer, ReferenceKind::Pin, &parsed, &version).await;
            retained.map_err(|e| problem(&e))?;
        }
        Ok(())
    }

    /// Adds the task, and pins the catalog to the previous version, in one transaction.
    async fn begin_roll(&self, what: &Work, plan: &Plan) -> Result<i64, Error> {
        let mut repo = self.db().write().await?;
        if let Some(task) = changing(&mut *repo, &plan.catalog).await? {
            return Err(Error::Busy { catalog: plan.catalog.clone(), task });
        }
        repo.catalogs().set_pin(&plan.catalog, Some(&plan.from)).await?;
        let id = repo.tasks().add(&self.new_task(what, super::text_of(plan))).await?;
        let detail = format!("task {id}, from {} to {}", plan.from, plan.to);
        repo.events().append(self.event(&what.caller, what.subject.clone(), "roll", detail)).await?;
        repo.save().await?;
        self.roots_changed();
        Ok(id)
    }

    /// Pins a machine to the new version, unless somebody else has pinned it.
    async fn pin_for_roll(&self, member: &Member, plan: &Plan) -> Result<Pinned, DbError> {
        let mut repo = self.db().write().await?;
        let found = repo.machines().by_uuid(member.uuid).await?;
        let Some(mut record) = found else { return Ok(Pinned::Gone) };
        if record.pin.as_ref().is_some_and(|pin| *pin != plan.to) {
            return Ok(Pinned::ByOther);
        }
        if is_claimed(&mut *repo, record.uuid).await? {
            return Ok(Pinned::Claimed);
        }
        repo.machines().set_pin(record.uuid, Some(&plan.to)).await?;
        repo.save().await?;
        self.roots_changed();
        record.pin = Some(plan.to.clone());
        Ok(Pinned::Here(Box::new(record)))
    }

    /// Removes the roll's pin. `None`: the machine was removed.
    async fn unpin_after_roll(&self, member: &Member, plan: &Plan) -> Result<Option<MachineRecord>, DbError> {
        let mut repo = self.db().write().await?;
        let Some(mut record) = unpin(&mut *repo, member, plan).await? else { return Ok(None) };
        repo.save().await?;
        self.roots_changed();
        record.pin = record.pin.filter(|pin| *pin != plan.to);
        Ok(Some(record))
    }

    /// Moves a machine to the new version, and waits until it is healthy or has failed.
    async fn move_machine(
        &self,
        member: &Member,
        plan: &Plan,
        caller: &Caller,
        control: &TaskControl,
    ) -> Stage {
        let failed = |why: String| Stage::Failed { why };
        let end = Instant::now() + Duration::from_secs(plan.request.boot_s);
        let (mut starts, mut has_waited) = (0, false);
        while starts < STARTS_MAX {
            let record = match self.pin_for_roll(member, plan).await {
                Ok(Pinned::Here(record)) => record,
                Ok(Pinned::Gone) => return Stage::Left { why: "was removed".to_owned() },
                Ok(Pinned::ByOther) => return Stage::Left { why: "was pinned to a version".to_owned() },
                Ok(Pinned::Claimed) => return Stage::Left { why: IS_CLAIMED.to_owned() },
                Err(error @ DbError::Away { .. }) if may_wait(end, control) => {
                    tracing::warn!(
                        machine = member.machine,
                        "a roll waits until the database or a node can be reached: {}",
                        problem(&error)
                    );
                    has_waited = true;
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
                Err(error) => return failed(format!("cannot be pinned: {}", problem(&error))),
            };
            // An earlier controller may have moved the machine, and that is not noted yet.
            let record = self.as_its_node_says(*record).await;
            let name = &record.name;
            let moved = if self.is_on(&record) {
                if record.version.as_deref() == Some(&*plan.to) {
                    // An earlier daemon moved it, or its guest rebooted after it was pinned.
                    return self.wait_wherever(&record, (member, plan), caller, control).await;
                }
                if has_waited && plan.request.wait_idle_s.is_some() && self.is_reached(&record) {
                    // Users may have logged in meanwhile.
                    return self.ask_again(member, plan).await;
                }
                self.reset(name, caller).await
            } else if record.wanted == Wanted::Running {
                // It was on when the daemon ended.
                self.start(name, caller).await
            } else {
                return self.leave_off(member, plan).await;
            };
            match moved {
                Ok(record) if record.version.as_deref() == Some(&*plan.to) => {
                    return self.wait_wherever(&record, (member, plan), caller, control).await;
                }
                // Another caller started it at the same time, before it was pinned.
                Ok(_) => starts += 1,
                Err(error) if passes(&error) && may_wait(end, control) => {
                    tracing::warn!(
                        machine = member.machine,
                        "a roll waits until the database or a node can be reached: {}",
                        problem(&error)
                    );
                    has_waited = true;
                    tokio::time::sleep(LOOK).await;
                }
                Err(LifecycleError::Unknown(_)) => return Stage::Left { why: "was removed".to_owned() },
                Err(error) => return failed(format!("did not start: {}", problem(&error))),
            }
        }
        failed(format!("does not boot {}", plan.to))
    }

    /// Waits until a machine has booted, on any host, and runs the health command.
    async fn wait_wherever(
        &self,
        record: &MachineRecord,
        (member, plan): (&Member, &Plan),
        caller: &Caller,
        control: &TaskControl,
    ) -> Stage {
        if self.is_own(record) {
            self.wait_until_healthy(member, plan, control).await
        } else {
            self.wait_until_healthy_there(record, (member, plan), caller, control).await
        }
    }

    /// Has a machine that was not moved wait for its users again.
    async fn ask_again(&self, member: &Member, plan: &Plan) -> Stage {
        match self.unpin_after_roll(member, plan).await {
            Ok(_) => Stage::Pending,
            Err(error) => Stage::Failed { why: format!("was not moved: {}", problem(&error)) },
        }
    }

    /// Whether the state of a machine is known: this daemon runs it, or its node is connected.
    fn is_reached(&self, record: &MachineRecord) -> bool {
        self.is_own(record) || self.link(record.host).is_some()
    }

    /// Leaves a machine that somebody stopped: the roll must not start it.
    pub(super) async fn leave_off(&self, member: &Member, plan: &Plan) -> Stage {
        match self.unpin_after_roll(member, plan).await {
            Ok(_) => Stage::Left { why: IS_OFF.to_owned() },
            Err(error) => Stage::Failed { why: format!("is off: {}", problem(&error)) },
        }
    }

    /// Waits until a machine has booted, even if its guest reboots, and runs the health command.
    async fn wait_until_healthy(&self, member: &Member, plan: &Plan, control: &TaskControl) -> Stage {
        let failed = |why: String| Stage::Failed { why };
        let end = Instant::now() + Duration::from_secs(plan.request.boot_s);
        let active = loop {
            let found = self.db().read().await;
            let record = match found {
                Ok(mut repo) => repo.machines().by_uuid(member.uuid).await,
                Err(error) => Err(error),
            };
            match record {
                Ok(None) => return Stage::Left { why: "was removed".to_owned() },
                Ok(Some(record))
                    if record.wanted == Wanted::Stopped && self.active(member.uuid).is_none() =>
                {
                    if record.reason.is_some() {
                        return failed(format!("is off: {}", record.reason.unwrap_or_default()));
                    }
                    return self.leave_off(member, plan).await;
                }
                _ => {}
            }
            if Instant::now() >= end {
                return failed(format!("has not booted within {} s", plan.request.boot_s));
            }
            let Some(active) = self.active(member.uuid) else {
                tokio::time::sleep(LOOK / 2).await;
                continue;
            };
            tokio::select! {
                () = active.vm.booted() => break active,
                said = active.vm.found_nothing_to_boot() => {
                    return failed(format!("finds nothing to boot: '{said}'"));
                }
                _ = active.vm.exited() => tokio::time::sleep(LOOK / 2).await,
                () = tokio::time::sleep_until(end) => {}
                () = ended(control) => return failed("was not checked, because the roll ended".to_owned()),
            }
        };
        let Some(command) = &plan.request.health else { return Stage::Healthy };
        let limit = Duration::from_secs(plan.request.health_s);
        let argv = ["/bin/sh", "-c", command].map(str::to_owned);
        let checked = tokio::select! {
            // The agent kills a command that takes longer. This timeout is for an agent that does not answer.
            checked = tokio::time::timeout(limit + LOOK * 30, active.vm.exec(&argv, Vec::new(), limit)) => checked,
            () = ended(control) => return failed("was not checked, because the roll ended".to_owned()),
        };
        match checked {
            Ok(Ok(output)) if output.exit_code == 0 => Stage::Healthy,
            Ok(Ok(output)) => {
                // The output goes to the log only, because it may not be for everybody who may see tasks.
                let said = if output.stderr.is_empty() { output.stdout } else { output.stderr };
                let said: String = String::from_utf8_lossy(&said).trim().chars().take(OUTPUT_CHARS).collect();
                tracing::warn!(
                    machine = member.machine,
                    "the health command failed with exit code {}: {said}",
                    output.exit_code
                );
                failed(format!(
                    "is not healthy: the health command failed with exit code {}",
                    output.exit_code
                ))
            }
            Ok(Err(error)) => failed(format!("cannot be checked: {}", problem(&error))),
            Err(_) => failed(format!("did not answer its check within {} s", limit.as_secs())),
        }
    }

    /// Moves a machine back to the version of its catalog.
    async fn return_machine(
        &self,
        member: &Member,
        plan: &Plan,
        caller: &Caller,
    ) -> Result<(), LifecycleError> {
        let Some(record) = self.unpin_after_roll(member, plan).await? else { return Ok(()) };
        if is_claimed(&mut *self.db().read().await?, record.uuid).await? {
            // When its holder releases it, it is reset, and boots the previous version.
            return Ok(());
        }
        let record = self.as_its_node_says(record).await;
        if self.is_on(&record) && self.is_reached(&record) && record.version.as_deref() != Some(&*plan.to) {
            // It was not moved yet, or is back already.
            return Ok(());
        }
        let returned = if self.is_on(&record) {
            self.reset(&record.name, caller).await
        } else if record.wanted == Wanted::Running {
            self.start(&record.name, caller).await
        } else {
            return Ok(());
        };
        match returned {
            Err(LifecycleError::Unknown(_)) => Ok(()),
            Err(error @ LifecycleError::Away { .. }) if self.is_lost(record.host).await? => {
                tracing::error!(
                    "a roll cannot move a machine back, because its host is lost; use 'headwater machine reset' later: {}",
                    problem(&error)
                );
                Ok(())
            }
            returned => returned.map(drop),
        }
    }

    /// Points the catalog to the new version. Its pin stays only if the catalog's image resolves to another version.
    async fn finish_roll(&self, plan: &Plan, caller: &Caller) -> Outcome {
        let pin = self.pin_after(plan, &plan.to).await;
        self.set_pins_after(plan, pin.as_deref(), caller, "rolled").await?;
        Ok(TaskResult::Rolled(Box::new(plan.report(pin.is_some()))))
    }

    /// Ends a roll whose machines are all moved back. The catalog is as before, unless its image resolves to the version
    /// that failed.
    async fn end_returned_roll(&self, plan: &Plan, caller: &Caller, why: String) -> Outcome {
        let pin = match &plan.pin_before {
            Some(pin) => Some(pin.clone()),
            None => self.pin_after(plan, &plan.from).await,
        };
        self.set_pins_after(plan, pin.as_deref(), caller, "rolled back").await?;
        let kind = if why == CANCELLED { ProblemKind::Cancelled } else { ProblemKind::Failed };
        let Plan { catalog, from, to, .. } = plan;
        let message = format!("the roll of catalog '{catalog}' to {to} was taken back to {from}: {why}");
        let mut problem = Problem::new(kind, message);
        if pin.is_some() && plan.pin_before.is_none() {
            problem.advice = Some(format!(
                "the catalog stays pinned to {from}, because its image resolves to {to}: 'headwater image unpin {catalog}' removes the pin"
            ));
        }
        Err(problem)
    }

    /// The pin with which a catalog boots a version: none if its image resolves to that version anyway.
    async fn pin_after(&self, plan: &Plan, version: &str) -> Option<String> {
        let record = self.catalog(&plan.catalog).await.ok();
        let image = record.and_then(|record| ImageRef::parse(&record.image).ok());
        let means = match image {
            Some(image) => self.images().resolve(&image).await.ok(),
            None => None,
        };
        (means.map(|means| number_of(&means)).as_deref() != Some(version)).then(|| version.to_owned())
    }

    async fn set_pins_after(
        &self,
        plan: &Plan,
        pin: Option<&str>,
        caller: &Caller,
        action: &'static str,
    ) -> Result<(), Problem> {
        let save = || async {
            let mut repo = self.db().write().await?;
            repo.catalogs().set_pin(&plan.catalog, pin).await?;
            for member in plan.members.iter().filter(|it| !matches!(it.stage, Stage::Left { .. })) {
                unpin(&mut *repo, member, plan).await?;
            }
            let detail = format!("from {} to {}", plan.from, plan.to);
            let event = self.event(caller, format!("catalog {}", plan.catalog), action, detail);
            repo.events().append(event).await?;
            repo.save().await
        };
        self.until_saved("the end of a roll", save).await?;
        self.roots_changed();
        Ok(())
    }
}

/// The result of pinning a machine.
enum Pinned {
    Here(Box<MachineRecord>),
    Gone,
    ByOther,
    Claimed,
}

/// Why a claimed machine is left.
const IS_CLAIMED: &str = "is claimed: it boots the new version when it is reset after the claim";

/// Whether a machine is claimed, or was used and not reset yet.
pub(super) async fn is_claimed(repo: &mut dyn Repository, machine: Uuid) -> Result<bool, DbError> {
    Ok(repo.claims().list().await?.iter().any(|claim| claim.machine == machine))
}

/// Why a machine that is off is left.
const IS_OFF: &str = "is off: it boots the new version when it is started";

/// Removes the roll's pin from a machine, and returns its record from before.
async fn unpin(
    repo: &mut dyn Repository,
    member: &Member,
    plan: &Plan,
) -> Result<Option<MachineRecord>, DbError> {
    let found = repo.machines().by_uuid(member.uuid).await?;
    if found.as_ref().is_some_and(|record| record.pin.as_deref() == Some(&*plan.to)) {
        repo.machines().set_pin(member.uuid, None).await?;
    }
    Ok(found)
}

/// Whether an error may be temporary: the database or a node cannot be reached.
fn passes(error: &LifecycleError) -> bool {
    let is_unavailable = error.kind() == ProblemKind::Unavailable;
    match error {
        LifecycleError::Away { .. } | LifecycleError::Db(DbError::Away { .. }) => true,
        LifecycleError::Remote { .. } => is_unavailable,
        _ => false,
    }
}

/// Whether there is time left to wait for the database or a node.
fn may_wait(end: Instant, control: &TaskControl) -> bool {
    Instant::now() < end && !control.is_cancelled()
}

/// Waits until the roll is cancelled, or the daemon stops.
pub(super) async fn ended(control: &TaskControl) {
    while !control.is_cancelled() {
        tokio::time::sleep(LOOK).await;
    }
}
