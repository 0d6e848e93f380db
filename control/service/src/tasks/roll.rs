//! `roll`: moves the machines of a catalog to a version, canaries first, and takes them back if they are not healthy.
//!
//! While a roll goes on, the catalog is pinned to the version from before, and each machine that was moved is pinned to the new one. So a
//! machine that restarts meanwhile boots the version that the roll knows of. At the end the catalog's pin changes, and those of its
//! machines are taken away, in one transaction.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use futures_util::future::join_all;
use headwater_api::name::ImageRef;
use headwater_api::{BootFrom, ImageVersion, JobResult, Problem, ProblemKind, RollRequest, Wanted};
use headwater_db::{DbError, MachineRecord};

use super::roll_plan::{Member, Next, Plan, Stage};
use super::{Outcome, Work, answer};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::JobControl;
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;
use crate::retention::{ReferenceKind, Referrer};

/// Its kind.
pub(super) const KIND: &str = "roll";

/// How often it looks whether somebody cancelled it while it waits.
const LOOK: Duration = Duration::from_secs(1);

/// How much of what a health command printed is shown.
const OUTPUT_CHARS: usize = 200;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot roll catalog '{catalog}': task {task} changes it")]
    Busy { catalog: String, task: i64 },
    #[error("cannot roll catalog '{catalog}' to '{to}': it boots image '{image}'")]
    OtherImage { catalog: String, to: String, image: String },
    #[error("cannot roll catalog '{catalog}' to '{to}': that version is retired")]
    Retired { catalog: String, to: String },
    #[error(
        "cannot roll catalog '{catalog}' to '{to}': its machines run that version, and so do those that are started"
    )]
    Runs { catalog: String, to: String },
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Busy { .. } | Self::Runs { .. } => ProblemKind::Conflict,
            Self::OtherImage { .. } | Self::Retired { .. } => ProblemKind::Invalid,
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Busy { task, .. } => Some(format!("'headwater task wait {task}', or cancel it")),
            Self::OtherImage { image, .. } => Some(format!(
                "'headwater image versions {image}' shows its versions; 'headwater catalog set' changes the image"
            )),
            Self::Retired { to, .. } => Some(format!("'headwater image retire --undo {to}' brings it back")),
            Self::Runs { .. } => None,
            Self::Db(e) => e.advice(),
        }
    }
}

/// Checks a request, and begins the task.
pub(crate) async fn begin(
    service: &Service,
    caller: Caller,
    catalog: String,
    request: RollRequest,
) -> Result<Response, Failure> {
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
    let members = service.members(&catalog).await?;
    let means = match &record.pin {
        Some(pin) => pin.clone(),
        None => match service.images().resolve(&its).await {
            Ok(version) => number_of(&version),
            // Nothing boots from it any more: the roll gives it something to boot.
            Err(_) => to.clone(),
        },
    };
    let stages: Vec<_> = members.iter().map(|machine| service.stage_of(machine, &to)).collect();
    if means == to && !stages.contains(&Stage::Pending) {
        return Err(Error::Runs { catalog, to }.into());
    }
    // If the catalog means the new version already, machines go back to what most of them run.
    let from = if means == to { most_common(&members, &to).unwrap_or(means) } else { means };
    let named = members.into_iter().zip(stages);
    let plan = Plan {
        catalog: catalog.clone(),
        request,
        from,
        to,
        pin_before: record.pin,
        members: named.map(|(machine, stage)| Member { machine: machine.name, stage }).collect(),
        pause_until_ms: 0,
        back: None,
    };
    service.retain_for_roll(&plan).await.map_err(|e| Failure(e.during(tried)))?;
    let what = Work { kind: KIND, subject: format!("catalog {catalog}"), caller: caller.clone() };
    let id = service.begin_roll(&what, &plan).await?;
    let control = Arc::new(JobControl::new(service.stopping_flag()));
    control.begin();
    let work = go_on(service.clone(), caller, id, plan, control.clone());
    let live = service.spawn_task(Some(id), control, work);
    Ok(answer(Some(id), live).await)
}

fn number_of(version: &ImageVersion) -> String {
    format!("{}@{}", version.image, version.number)
}

fn most_common(machines: &[MachineRecord], but: &str) -> Option<String> {
    let versions: Vec<_> =
        machines.iter().filter_map(|it| it.version.as_deref()).filter(|it| *it != but).collect();
    let count = |version: &str| versions.iter().filter(|it| **it == version).count();
    versions.iter().max_by_key(|version| count(version)).map(|version| (*version).to_owned())
}

/// Does what is left.
pub(super) async fn go_on(
    service: Service,
    caller: Caller,
    id: i64,
    mut plan: Plan,
    control: Arc<JobControl>,
) -> Outcome {
    service.task_began(id).await;
    // Somebody who cancels it once more than it can be taken back changes nothing.
    loop {
        control.report_doing(plan.in_words());
        service.save_plan(id, &plan, &control).await.map_err(|e| problem(&e))?;
        if service.is_stopping() {
            return Err(Problem::new(
                ProblemKind::Cancelled,
                "the daemon is stopping; the roll goes on at its next start",
            ));
        }
        match plan.next(service.now_ms(), control.is_cancelled()) {
            Next::Move(machines) => {
                machines.iter().for_each(|machine| plan.set(machine, Stage::Moving));
                control.report_doing(plan.in_words());
                service.save_plan(id, &plan, &control).await.map_err(|e| problem(&e))?;
                let moves =
                    machines.iter().map(|machine| service.move_machine(machine, &plan, &caller, &control));
                let stages = join_all(moves).await;
                if service.is_stopping() {
                    // Their VMs were ended with the daemon, which says nothing about their health.
                    continue;
                }
                for (machine, stage) in machines.iter().zip(stages) {
                    plan.set(machine, stage);
                }
                plan.pause_until_ms =
                    service.now_ms().saturating_add(plan.request.pause_s.saturating_mul(1000));
            }
            Next::Wait(until_ms) => {
                let left = Duration::from_millis(until_ms.saturating_sub(service.now_ms()));
                tokio::time::sleep(left.min(LOOK)).await;
            }
            Next::TakeBack(why) => {
                let detail = format!("from {} back to {}: {why}", plan.to, plan.from);
                let event =
                    service.event(&caller, format!("catalog {}", plan.catalog), "roll taken back", detail);
                service.note(event).await;
                plan.back = Some(why);
            }
            Next::Return(machines) => {
                machines.iter().for_each(|machine| plan.set(machine, Stage::Returning));
                service.save_plan(id, &plan, &control).await.map_err(|e| problem(&e))?;
                let returns = machines.iter().map(|machine| service.return_machine(machine, &caller));
                for (machine, returned) in machines.iter().zip(join_all(returns).await) {
                    if let Err(error) = returned {
                        // Its pin is gone: it boots the version from before when somebody starts it.
                        tracing::error!(
                            machine,
                            "cannot start a machine again that a roll takes back: {}",
                            problem(&error)
                        );
                    }
                    plan.set(machine, Stage::Returned);
                }
            }
            Next::Finish => return service.finish_roll(&plan, &caller).await,
            Next::Back(why) => return service.end_returned_roll(&plan, &caller, why).await,
        }
    }
}

impl Service {
    /// Whether a machine is moved, and else why not.
    fn stage_of(&self, machine: &MachineRecord, to: &str) -> Stage {
        let left = |why: &str| Stage::Left { why: why.to_owned() };
        if machine.boot == BootFrom::Network {
            left("boots from the network: it takes the version when it is switched on again")
        } else if machine.pin.is_some() {
            left("is pinned to a version")
        } else if machine.cache.persistent {
            left("keeps its disk: it takes the version when it is reset")
        } else if self.active(machine.uuid).is_none() {
            left("is off: it takes the version when it is started")
        } else if machine.version.as_deref() == Some(to) {
            left("runs that version")
        } else {
            Stage::Pending
        }
    }

    /// Both versions stay in the store while the roll goes on.
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

    /// Notes the task, and holds the catalog at the version from before, in one transaction.
    async fn begin_roll(&self, what: &Work, plan: &Plan) -> Result<i64, DbError> {
        let _using = self.using_versions().await;
        let mut repo = self.db().write().await?;
        repo.catalogs().set_pin(&plan.catalog, Some(&plan.from)).await?;
        let task = headwater_db::NewTask {
            kind: what.kind,
            subject: what.subject.clone(),
            caller: what.caller.principal.clone(),
            plan: super::text_of(plan),
            created_at_ms: self.now_ms(),
        };
        let id = repo.tasks().add(&task).await?;
        let detail = format!("task {id}, from {} to {}", plan.from, plan.to);
        repo.events().append(self.event(&what.caller, what.subject.clone(), "roll", detail)).await?;
        repo.save().await?;
        Ok(id)
    }

    async fn pin_for_roll(&self, machine: &str, pin: Option<&str>) -> Result<MachineRecord, LifecycleError> {
        let mut repo = self.db().write().await?;
        let found = repo.machines().by_name(machine).await?;
        let mut record = found.ok_or_else(|| LifecycleError::Unknown(machine.to_owned()))?;
        repo.machines().set_pin(record.uuid, pin).await?;
        repo.save().await?;
        record.pin = pin.map(str::to_owned);
        Ok(record)
    }

    /// Moves a machine to the version, and waits until it is healthy or not.
    async fn move_machine(&self, machine: &str, plan: &Plan, caller: &Caller, control: &JobControl) -> Stage {
        let moved = async {
            let record = self.pin_for_roll(machine, Some(&plan.to)).await?;
            if self.active(record.uuid).is_some() {
                return self.reset(machine, caller).await;
            }
            // It was on when the daemon ended, or somebody has stopped it.
            if record.wanted == Wanted::Running { self.start(machine, caller).await } else { Ok(record) }
        };
        let record = match moved.await {
            Ok(record) => record,
            Err(LifecycleError::Unknown(_)) => return Stage::Left { why: "was removed".to_owned() },
            Err(error) => return Stage::Failed { why: format!("did not start: {}", problem(&error)) },
        };
        let Some(active) = self.active(record.uuid) else {
            return match self.pin_for_roll(machine, None).await {
                Ok(_) => Stage::Left { why: "is off: it takes the version when it is started".to_owned() },
                Err(error) => Stage::Failed { why: format!("is off: {}", problem(&error)) },
            };
        };
        let boot = Duration::from_secs(plan.request.boot_s);
        let up = tokio::select! {
            () = active.vm.booted() => Ok(()),
            _ = active.vm.exited() => Err("ended before it was up".to_owned()),
            said = active.vm.found_nothing_to_boot() => Err(format!("finds nothing to boot: '{said}'")),
            () = tokio::time::sleep(boot) => Err(format!("was not up within {} s", boot.as_secs())),
            () = cancelled(control) => Err("was not waited for".to_owned()),
        };
        let Some(command) = plan.request.health.as_ref().filter(|_| up.is_ok()) else {
            return up.map_or_else(|why| Stage::Failed { why }, |()| Stage::Healthy);
        };
        let limit = Duration::from_secs(plan.request.health_s);
        let argv = ["/bin/sh", "-c", command].map(str::to_owned);
        let checked = tokio::select! {
            // The agent ends a command that takes longer. This one is for an agent that does not answer.
            checked = tokio::time::timeout(limit + LOOK * 30, active.vm.exec(&argv, Vec::new(), limit)) => checked,
            () = cancelled(control) => return Stage::Failed { why: "was not waited for".to_owned() },
        };
        match checked {
            Ok(Ok(output)) if output.exit_code == 0 => Stage::Healthy,
            Ok(Ok(output)) => {
                let said = if output.stderr.is_empty() { output.stdout } else { output.stderr };
                let said: String = String::from_utf8_lossy(&said).trim().chars().take(OUTPUT_CHARS).collect();
                let said = if said.is_empty() { said } else { format!(": {said}") };
                Stage::Failed {
                    why: format!("is not healthy: the command ended with {}{said}", output.exit_code),
                }
            }
            Ok(Err(error)) => Stage::Failed { why: format!("cannot be checked: {}", problem(&error)) },
            Err(_) => Stage::Failed { why: format!("did not answer its check within {} s", limit.as_secs()) },
        }
    }

    /// Takes a machine back to the version that its catalog means.
    async fn return_machine(&self, machine: &str, caller: &Caller) -> Result<(), LifecycleError> {
        let record = match self.pin_for_roll(machine, None).await {
            Err(LifecycleError::Unknown(_)) => return Ok(()),
            record => record?,
        };
        if self.active(record.uuid).is_some() {
            self.reset(machine, caller).await?;
        } else if record.wanted == Wanted::Running {
            self.start(machine, caller).await?;
        }
        Ok(())
    }

    /// Has the catalog follow its machines. The pin stays only if the catalog's image means another version.
    async fn finish_roll(&self, plan: &Plan, caller: &Caller) -> Outcome {
        let pin = self.pin_after(plan, &plan.to).await;
        self.set_pins_after(plan, pin.as_deref(), caller, "rolled").await.map_err(|e| problem(&e))?;
        Ok(JobResult::Rolled(Box::new(plan.report(pin.is_some()))))
    }

    /// All machines are back, and the catalog is as it was, unless its image means the version that failed.
    async fn end_returned_roll(&self, plan: &Plan, caller: &Caller, why: String) -> Outcome {
        let pin = match &plan.pin_before {
            Some(pin) => Some(pin.clone()),
            None => self.pin_after(plan, &plan.from).await,
        };
        self.set_pins_after(plan, pin.as_deref(), caller, "rolled back").await.map_err(|e| problem(&e))?;
        let is_cancelled = why == "it was cancelled";
        let kind = if is_cancelled { ProblemKind::Cancelled } else { ProblemKind::Failed };
        let message = format!(
            "the roll of catalog '{}' to {} was taken back to {}: {why}",
            plan.catalog, plan.to, plan.from
        );
        let mut problem = Problem::new(kind, message);
        if pin.is_some() && plan.pin_before.is_none() {
            let (catalog, from) = (&plan.catalog, &plan.from);
            problem.advice = Some(format!(
                "the catalog stays pinned to {from}, because its image means {}: 'headwater image unpin {catalog}' ends that",
                plan.to
            ));
        }
        Err(problem)
    }

    /// The pin with which a catalog means a version: none if its image means that version by itself.
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
    ) -> Result<(), DbError> {
        let _using = self.using_versions().await;
        let mut repo = self.db().write().await?;
        repo.catalogs().set_pin(&plan.catalog, pin).await?;
        for member in plan.members.iter().filter(|it| !matches!(it.stage, Stage::Left { .. })) {
            let found = repo.machines().by_name(&member.machine).await?;
            if let Some(record) = found.filter(|record| record.pin.as_deref() == Some(&*plan.to)) {
                repo.machines().set_pin(record.uuid, None).await?;
            }
        }
        let detail = format!("from {} to {}", plan.from, plan.to);
        repo.events().append(self.event(caller, format!("catalog {}", plan.catalog), action, detail)).await?;
        repo.save().await?;
        self.roots_changed();
        Ok(())
    }
}

/// Waits until somebody cancels the roll, or the daemon stops.
async fn cancelled(control: &JobControl) {
    while !control.is_cancelled() {
        tokio::time::sleep(LOOK).await;
    }
}
