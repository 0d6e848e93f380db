//! `scale`: changes the number of machines of a catalog, or adds those of a list. It is a task (`mod.rs`). It removes claimed and pinned machines, and machines
//! with a persistent disk, only with `force`, and never one in a maintenance session.
//!
//! Each step is decided from the state in the database at that moment, so a task that continues after a restart repeats nothing.

use std::collections::HashSet;
use std::sync::Arc;

use axum::response::Response;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use headwater_api::name::NameRule;
use headwater_api::platform::Network;
use headwater_api::{
    CreateMachine, FixedAddress, ListedMachine, Problem, ProblemKind, ScaleReport, ScaleRequest, TaskResult,
    machine_list,
};
use headwater_db::{DbError, MachineRecord, Purpose, Repository};
use serde::{Deserialize, Serialize};

use super::{Outcome, Work, answer};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;
use crate::cloud_catalogs::not_in_cloud;
use crate::fleet::placement::{NoRoom, place};
use crate::lifecycle::LifecycleError;
use crate::operations::create_machine;

/// The kind of the task.
pub(super) const KIND: &str = "scale";

/// The most machines of one catalog that `scale` makes, so that a mistyped number does not fill the database.
const COUNT_MAX: u32 = 10_000;

/// How many machines in a cloud are started at the same time. The replicas of their image may permit fewer.
const CLOUD_STARTS_AT_A_TIME: usize = 100;

/// How many machines in a cloud are removed at the same time. It is also how many failures a task names at most.
const CLOUD_REMOVALS_AT_A_TIME: usize = 50;

/// After how many machines of a list the plan is saved: it has the whole list.
const SAVED_EVERY: usize = 100;

/// How often the name of a new machine may be taken by somebody else before the task fails.
const CONFLICTS_MAX: u32 = 100;

/// The data that the task needs to continue after a restart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    request: ScaleRequest,
    /// The machines of its list that were there before.
    existing: Vec<String>,
    report: ScaleReport,
}

impl Plan {
    /// The machines of its list that are to be made.
    fn to_add(&self) -> Vec<ListedMachine> {
        let there: HashSet<_> = self.report.created.iter().chain(&self.existing).collect();
        self.request.machines.iter().filter(|listed| !there.contains(&listed.name)).cloned().collect()
    }

    /// The error of a task that failed to add this machine of its list.
    fn stopped_at(&self, listed: &ListedMachine) -> String {
        let ScaleReport { catalog, created, .. } = &self.report;
        let (line, count) = (listed.line, created.len());
        format!(
            "cannot add machines to catalog '{catalog}': line {line} failed; {count} machines were created"
        )
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot give catalog '{catalog}' {count} machines: the maximum is {COUNT_MAX}")]
    TooMany { catalog: String, count: u32 },
    #[error(
        "cannot reduce catalog '{catalog}' to {count} machines: it has {has}, and these are claimed, pinned, or have a persistent disk or a maintenance session: {}",
        .kept.join(", ")
    )]
    Kept { catalog: String, count: u32, has: usize, kept: Vec<String> },
    #[error("cannot change the number of machines of catalog '{catalog}': task {task} changes the catalog")]
    Busy { catalog: String, task: i64 },
    #[error("cannot give catalog '{catalog}' {count} machines: the hosts have memory for {more} more")]
    NoRoom {
        catalog: String,
        count: u32,
        more: usize,
        #[source]
        source: NoRoom,
    },
    #[error(
        "cannot change the number of machines of catalog '{0}': give either a number or a list of machines"
    )]
    CountOrList(String),
    #[error("cannot add machines to catalog '{catalog}': line {line}: {why}")]
    Listed { catalog: String, line: u32, why: String },
    #[error(
        "cannot add machines to catalog '{catalog}': line {line} has an IP address, but the machines of the catalog are not on a bridge"
    )]
    NoBridge { catalog: String, line: u32 },
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::TooMany { .. } | Self::CountOrList(_) | Self::NoBridge { .. } => ProblemKind::Invalid,
            Self::Kept { .. } | Self::Busy { .. } | Self::NoRoom { .. } | Self::Listed { .. } => {
                ProblemKind::Conflict
            }
            Self::Db(e) => e.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::TooMany { .. } | Self::CountOrList(_) => None,
            Self::Listed { .. } => Some("nothing was created: change the line".to_owned()),
            Self::NoBridge { .. } => Some(
                "use a catalog with --network bridge:NAME, or leave out the columns 'address', 'gateway' and 'dns'"
                    .to_owned(),
            ),
            Self::Kept { .. } => Some(
                "--force also removes claimed and pinned machines, and machines with a persistent disk together with the disk; machines with a maintenance session always stay"
                    .to_owned(),
            ),
            Self::NoRoom { .. } => Some("stop machines, or add a host ('headwater node token')".to_owned()),
            Self::Busy { task, .. } => Some(format!("run 'headwater task wait {task}', or cancel the task")),
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
    mut request: ScaleRequest,
) -> Result<Response, Failure> {
    let record = service.catalog(&catalog).await?;
    if request.count.is_some() != request.machines.is_empty() {
        return Err(Error::CountOrList(catalog).into());
    }
    if !request.machines.is_empty() {
        let tried = format!("cannot add machines to catalog '{catalog}'");
        let checked = machine_list::check(request.machines);
        request.machines = checked.map_err(|problem| Failure(problem.during(tried)))?;
    }
    if request.machines.iter().any(|listed| listed.mac.is_some()) {
        not_in_cloud(&record, "add machines to", "a MAC address")?;
    }
    if let Some(listed) = request.machines.iter().find(|listed| listed.address.is_some()) {
        not_in_cloud(&record, "add machines to", "a fixed IP address")?;
        if record.platform.network == Network::User {
            return Err(Error::NoBridge { catalog, line: listed.line }.into());
        }
    }
    if let Some(task) = service.task_that_changes(&catalog).await? {
        return Err(Error::Busy { catalog, task }.into());
    }
    let members = service.members(&catalog).await?;
    let existing = check_list(service, &catalog, &request.machines).await?;
    let with_list = members.len() + request.machines.len().saturating_sub(existing.len());
    let listed = u32::try_from(with_list).unwrap_or(u32::MAX);
    let count = request.count.unwrap_or(listed);
    if count > COUNT_MAX {
        return Err(Error::TooMany { catalog, count }.into());
    }
    removable(service, &catalog, &members, &request).await?;
    if request.start {
        have_room(service, &catalog, members.len(), count).await?;
    }
    let report = ScaleReport { catalog: catalog.clone(), ..ScaleReport::default() };
    let plan = Plan { request, existing, report };
    let (handle, asking) = (service.clone(), caller.clone());
    // To the end: a client that hangs up must not leave a row without its task.
    let begun = service.to_the_end(async move {
        let what = Work { kind: KIND, subject: format!("catalog {catalog}"), caller: caller.clone() };
        let mut repo = handle.db().write().await?;
        if let Some(task) = changing(&mut *repo, &catalog).await? {
            return Err(Error::Busy { catalog, task });
        }
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

/// Returns the names of those machines of a list that the catalog has already. Fails if another machine of the fleet has a name or an
/// address of the list.
async fn check_list(
    service: &Service,
    catalog: &str,
    machines: &[ListedMachine],
) -> Result<Vec<String>, Error> {
    let taken = |line: u32, why: String| Err(Error::Listed { catalog: catalog.to_owned(), line, why });
    let mut existing = Vec::new();
    let mut repo = service.db().read().await?;
    for listed in machines {
        let ListedMachine { line, name, mac, address } = listed;
        if let Some(machine) = repo.machines().by_name(name).await? {
            if !is_it(&machine, catalog, listed) {
                return taken(*line, format!("a machine '{name}' exists"));
            }
            existing.push(name.clone());
            continue;
        }
        if repo.catalogs().by_name(name).await?.is_some() {
            return taken(
                *line,
                format!("a catalog '{name}' exists, and 'image pin NAME' could mean either"),
            );
        }
        if let Some(mac) = mac
            && let Some(other) = repo.machines().by_mac(mac).await?
        {
            return taken(*line, format!("machine '{}' has the MAC address {mac}", other.name));
        }
        if let Some(FixedAddress { ip, .. }) = address
            && let Some(other) = repo.machines().by_ip(*ip).await?
        {
            return taken(*line, format!("machine '{}' has the address {ip}", other.name));
        }
    }
    Ok(existing)
}

/// Whether a machine is that of a list.
fn is_it(machine: &MachineRecord, catalog: &str, listed: &ListedMachine) -> bool {
    let address = machine.identity.address.as_ref();
    machine.catalog.as_deref() == Some(catalog)
        && listed.mac.as_ref().is_none_or(|mac| *mac == machine.mac)
        && (listed.address.is_none() || listed.address.as_ref() == address)
}

/// Fails if machines are to be started, and the hosts do not have room for all of them.
async fn have_room(service: &Service, catalog: &str, has: usize, count: u32) -> Result<(), Failure> {
    let record = service.catalog(catalog).await?;
    let hosts = service.db().read().await?.hosts().list().await?;
    // Machines of a pool are always on this host, a single host is not checked, and a cloud says at a start what it lacks.
    if record.keep_ready > 0 || hosts.len() < 2 || record.cloud.is_some() {
        return Ok(());
    }
    let need_bytes = record.memory_bytes.saturating_add(record.cache.ram_bytes);
    let mut candidates = service.candidates(&hosts).await?;
    for made in has..usize::try_from(count).unwrap_or(usize::MAX) {
        let more = made - has;
        place(&mut candidates, need_bytes).map_err(|source| Error::NoRoom {
            catalog: catalog.to_owned(),
            count,
            more,
            source,
        })?;
    }
    Ok(())
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
    let catalog = plan.report.catalog.clone();
    let (mut conflicts, mut from) = (0, 0);
    loop {
        if service.is_stopping() {
            return Err(super::stopped());
        }
        if control.is_asked_to_stop() {
            let why = format!("scaling catalog '{catalog}' was cancelled");
            return Err(Problem::new(ProblemKind::Cancelled, why));
        }
        let members = service.members(&catalog).await.map_err(|e| problem(&e))?;
        let listed = plan.to_add();
        let count = plan.request.count.and_then(|count| usize::try_from(count).ok());
        let target = count.unwrap_or(members.len() + listed.len());
        control.report_doing(format!("{} of {target} machines", members.len()));
        if let Some(next) = listed.first() {
            let added = add_listed(&service, &caller, &catalog, next).await;
            added.map_err(|problem| problem.during(plan.stopped_at(next)))?;
            plan.report.created.push(next.name.clone());
        } else if members.len() < target {
            let name = match add(&service, &caller, &catalog, &mut from).await {
                Ok(name) => name,
                // Somebody else has created a machine of that name meanwhile.
                Err(Added::NameTaken(_)) if conflicts < CONFLICTS_MAX => {
                    conflicts += 1;
                    continue;
                }
                Err(Added::NameTaken(problem) | Added::Failed(problem)) => return Err(problem),
            };
            plan.report.created.push(name);
        } else if members.len() > target {
            let free =
                removable(&service, &catalog, &members, &plan.request).await.map_err(|e| problem(&e))?;
            let is_in_cloud = members.iter().any(|member| member.connection.is_some());
            let at_a_time = if is_in_cloud { CLOUD_REMOVALS_AT_A_TIME } else { 1 };
            let next = free.into_iter().take(at_a_time).collect();
            let removed = remove_all(&service, &caller, next, &mut plan.report.removed).await;
            service.save_plan(id, &plan, &control).await?;
            removed?;
            continue;
        } else {
            if plan.request.start {
                let names = [plan.existing.clone(), plan.report.created.clone()].concat();
                start_all(&service, &caller, &catalog, &names).await?;
            }
            plan.report.count = u32::try_from(members.len()).unwrap_or(u32::MAX);
            return Ok(TaskResult::Scaled(Box::new(plan.report)));
        }
        // A machine of a list that was made since is found again by its name.
        if plan.request.count.is_some() || plan.report.created.len().is_multiple_of(SAVED_EVERY) {
            service.save_plan(id, &plan, &control).await?;
        }
    }
}

/// Removes machines at the same time, and adds them to `removed`. An error names each machine that it could not remove.
async fn remove_all(
    service: &Service,
    caller: &Caller,
    names: Vec<String>,
    removed: &mut Vec<String>,
) -> Result<(), Problem> {
    let removals = names.into_iter().map(|name| async move {
        let ended = service.remove(&name, true, caller).await;
        (name, ended)
    });
    let mut failed = Vec::new();
    for (name, ended) in join_all(removals).await {
        match ended {
            Ok(()) => removed.push(name),
            // Somebody else has removed it.
            Err(LifecycleError::Unknown(_)) => {}
            Err(error) => failed.push(problem(&error)),
        }
    }
    match failed.as_slice() {
        [] => Ok(()),
        [only] => Err(only.clone()),
        [first, ..] => {
            let all = failed.iter().map(|problem| [&[problem.message.clone()][..], &problem.causes].concat());
            let all: Vec<_> = all.map(|parts| parts.join(": ")).collect();
            let joined = Problem::new(first.kind, all.join("; "));
            Err(Problem { advice: first.advice.clone(), ..joined })
        }
    }
}

/// Starts machines: one after the other on hosts, and together in a cloud, where each takes minutes. Ends with the first
/// failure after all that were begun have ended.
async fn start_all(
    service: &Service,
    caller: &Caller,
    catalog: &str,
    names: &[String],
) -> Result<(), Problem> {
    let is_in_cloud = service.catalog(catalog).await.map_err(|e| problem(&e))?.cloud.is_some();
    let at_a_time = if is_in_cloud { CLOUD_STARTS_AT_A_TIME } else { 1 };
    let mut names = names.iter();
    let mut starts = FuturesUnordered::new();
    let mut failed = None;
    loop {
        while failed.is_none() && starts.len() < at_a_time {
            let Some(name) = names.next() else { break };
            starts.push(service.start(name, caller));
        }
        match starts.next().await {
            None => return failed.map_or(Ok(()), Err),
            Some(Ok(_) | Err(LifecycleError::Unknown(_))) => {}
            Some(Err(error)) => failed = failed.or_else(|| Some(problem(&error))),
        }
    }
}

/// Why no machine was added.
enum Added {
    /// Somebody else has created a machine of that name meanwhile.
    NameTaken(Problem),
    Failed(Problem),
}

/// Makes one machine more. It has the first free number, beginning with `from`.
async fn add(service: &Service, caller: &Caller, catalog: &str, from: &mut u32) -> Result<String, Added> {
    let record = service.catalog(catalog).await.map_err(|e| Added::Failed(problem(&e)))?;
    let rule = NameRule::parse(&record.name_rule).map_err(Added::Failed)?;
    let is_taken =
        async |name: &str| service.is_name_taken(name).await.map_err(|e| Added::Failed(problem(&e)));
    *from = record.first_number.max(*from);
    while is_taken(&rule.name(*from)).await? {
        *from = from.checked_add(1).ok_or_else(|| {
            let message = format!("cannot name another machine of catalog '{catalog}': no number is left");
            Added::Failed(Problem::new(ProblemKind::Conflict, message))
        })?;
    }
    let name = rule.name(*from);
    let request = creation(catalog, &name);
    let Err(failure) = create_machine::make(service, caller, request).await else { return Ok(name) };
    Err(if is_taken(&name).await? { Added::NameTaken(failure.0) } else { Added::Failed(failure.0) })
}

/// Makes a machine of a list.
async fn add_listed(
    service: &Service,
    caller: &Caller,
    catalog: &str,
    listed: &ListedMachine,
) -> Result<(), Problem> {
    let found = async { service.db().read().await?.machines().by_name(&listed.name).await };
    let found = found.await.map_err(|e| problem(&e))?;
    // An earlier daemon has made it, and that is not noted yet.
    if found.is_some_and(|machine| is_it(&machine, catalog, listed)) {
        return Ok(());
    }
    let ListedMachine { name, mac, address, .. } = listed.clone();
    let request = CreateMachine { mac, address, ..creation(catalog, &name) };
    match create_machine::make(service, caller, request).await {
        Ok(_) => Ok(()),
        Err(failure) => Err(failure.0),
    }
}

/// The request for a machine with all settings of its catalog.
fn creation(catalog: &str, name: &str) -> CreateMachine {
    CreateMachine {
        name: name.to_owned(),
        image: None,
        catalog: Some(catalog.to_owned()),
        host: None,
        cache: None,
        memory_bytes: None,
        cpus: None,
        firmware: None,
        secure_boot: None,
        tpm: None,
        display: None,
        network: None,
        scratch_bytes: None,
        transport: None,
        host_name: None,
        user_data: None,
        boot: None,
        mac: None,
        address: None,
    }
}

/// The machines that may be removed, in this order. Fails if these are too few.
async fn removable(
    service: &Service,
    catalog: &str,
    members: &[MachineRecord],
    request: &ScaleRequest,
) -> Result<Vec<String>, Error> {
    let Some(count) = request.count else { return Ok(Vec::new()) };
    let excess = members.len().saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
    if excess == 0 {
        return Ok(Vec::new());
    }
    let disks = service.db().read().await?.persistent_disks().list().await?;
    let of = |purpose| disks.iter().filter(move |disk| disk.purpose == purpose).map(|disk| disk.machine);
    let keeping: HashSet<_> = of(Purpose::Persistent).collect();
    let editing: HashSet<_> = of(Purpose::MaintenanceSession).collect();
    let claimed = service.holders().await?;
    let is_kept = |machine: &&MachineRecord| {
        // Whether a machine of another host already has its persistent disk is known only to its node.
        let is_kept_there = !service.is_own(machine) && machine.cache.persistent;
        keeping.contains(&machine.uuid)
            || is_kept_there
            || claimed.contains_key(&machine.uuid)
            || machine.pin.is_some()
    };
    let is_free =
        |machine: &&MachineRecord| !editing.contains(&machine.uuid) && (request.force || !is_kept(machine));
    let mut free: Vec<_> = members.iter().filter(is_free).collect();
    if free.len() < excess {
        let kept = members.iter().filter(|machine| !is_free(machine));
        let kept = kept.map(|machine| machine.name.clone()).collect();
        let (catalog, has) = (catalog.to_owned(), members.len());
        return Err(Error::Kept { catalog, count, has, kept });
    }
    let is_away = |machine: &MachineRecord| !service.is_own(machine) && service.link(machine.host).is_none();
    // Members are ordered by their numbers. Stable sort: machines without a disk first, then those whose node is connected,
    // then those that are off.
    free.reverse();
    free.sort_by_key(|machine| (is_kept(machine), is_away(machine), machine.state.is_active()));
    Ok(free.into_iter().take(excess).map(|machine| machine.name.clone()).collect())
}

impl Service {
    /// The machines of a catalog, in natural order of their names.
    pub(super) async fn members(&self, catalog: &str) -> Result<Vec<MachineRecord>, DbError> {
        self.db().read().await?.machines().of_catalog(catalog).await
    }

    /// Whether a new machine cannot have this name.
    async fn is_name_taken(&self, name: &str) -> Result<bool, DbError> {
        let mut repo = self.db().read().await?;
        Ok(repo.machines().by_name(name).await?.is_some() || repo.catalogs().by_name(name).await?.is_some())
    }

    /// The task that changes the machines of a catalog, if there is one.
    pub(crate) async fn task_that_changes(&self, catalog: &str) -> Result<Option<i64>, DbError> {
        changing(&mut *self.db().read().await?, catalog).await
    }
}

/// The task that changes the machines of a catalog, read in the given transaction.
pub(super) async fn changing(repo: &mut dyn Repository, catalog: &str) -> Result<Option<i64>, DbError> {
    let subject = format!("catalog {catalog}");
    let unended = repo.tasks().unended().await?;
    let is_one = |kind: &str| kind == KIND || kind == super::roll::KIND;
    match unended.into_iter().find(|task| is_one(&task.kind) && task.subject == subject) {
        Some(task) => Ok(Some(task.id)),
        None => super::drain::moving(repo, catalog).await,
    }
}
