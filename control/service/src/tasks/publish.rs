//! `publish`: puts a version of an image into the Azure compute gallery of a connection. It is a task (`mod.rs`). A version
//! that is published and still there is not published again.
//!
//! ```text
//!   look into the image --> ask the cloud --> row "publishing" --> cloud: disk, upload, version --> row "published"
//!        refused here: nothing was made             |                                                   ^
//!                                                   +-- cancelled: all is removed, the row last         |
//!                                                   +-- failed, or the daemon ended: a later attempt ---+
//! ```

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{
    ImageVersion, MAX_REPLICAS, Problem, ProblemKind, PublishReport, PublishRequest, PublishState,
    PublishedImage, TaskResult,
};
use headwater_db::{ConnectionRecord, DbError, Repository, TaskRecord};
use serde::{Deserialize, Serialize};

use super::{Outcome, Work, answer, unpublish};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::{BackendError, Cloud, ProvisioningAgent, PublishOrder, TaskControl, UnpublishOrder};
use crate::caller::Caller;
use crate::connections::NoConnection;

/// The kind of the task.
pub(super) const KIND: &str = "publish";

/// How often a task looks whether it is cancelled.
const CANCEL_INTERVAL: Duration = Duration::from_millis(200);

/// The data that the task needs to continue after a restart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    request: PublishRequest,
    version: ImageVersion,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot publish {0}: it is retired")]
    Retired(String),
    #[error("cannot publish {0}: it is not generalised, so it contains the identity of a machine")]
    KeepsIdentity(String),
    #[error("cannot publish {0}: {1} replicas are not possible")]
    Replicas(String, u32),
    #[error(
        "cannot publish {version} to '{connection}' with {wanted} replica(s): it is published there with {there}"
    )]
    OtherReplicas { version: String, connection: String, wanted: u32, there: u32 },
    #[error("cannot publish {0}: version numbers in the cloud are at most {most}", most = u32::MAX)]
    Number(String),
    #[error("cannot publish {version} to '{connection}': task {task} is already publishing or removing it")]
    Busy { version: String, connection: String, task: i64 },
    #[error("cannot publish {version} to '{connection}': another version of this number is there ({hash})")]
    Other { version: String, connection: String, hash: String },
    #[error("{0}")]
    NoAgent(String),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Replicas(..) | Self::NoAgent(_) | Self::Number(_) => ProblemKind::Invalid,
            Self::Retired(_)
            | Self::KeepsIdentity(_)
            | Self::OtherReplicas { .. }
            | Self::Busy { .. }
            | Self::Other { .. } => ProblemKind::Conflict,
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Retired(version) => {
                Some(format!("'headwater image retire {version} --undo' brings it back into use"))
            }
            Self::KeepsIdentity(_) => {
                Some("seal a version without --keep-identity, and publish that".to_owned())
            }
            Self::Replicas(..) => Some(format!("use 1 to {MAX_REPLICAS} replicas")),
            Self::OtherReplicas { version, connection, .. } => Some(format!(
                "leave out --replicas; or change the number: 'headwater image unpublish {version} --connection {connection}', \
                 and publish it again"
            )),
            Self::Busy { task, .. } => {
                Some(format!("run 'headwater task wait {task}', or cancel the task; then publish again"))
            }
            Self::Other { version, connection, .. } => Some(format!(
                "'headwater image unpublish {version} --connection {connection}' removes it; or publish a newer version"
            )),
            Self::NoAgent(_) => Some(
                "install cloud-init with its Azure source, or waagent, and seal the image; with --no-agent-check it is published \
                 without that, for images that report to Azure in another way"
                    .to_owned(),
            ),
            Self::Number(_) => None,
            Self::Db(source) => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(source) => source.retry_after_s(),
            _ => None,
        }
    }
}

/// Checks a request, and begins the task.
pub(crate) async fn begin(
    service: &Service,
    caller: Caller,
    name: &str,
    request: PublishRequest,
) -> Result<Response, Failure> {
    let reference = ImageRef::parse(name).map_err(Failure)?;
    if let Some(replicas) = request.replicas.filter(|replicas| !(1..=MAX_REPLICAS).contains(replicas)) {
        return Err(Error::Replicas(name.to_owned(), replicas).into());
    }
    service.connection(&request.connection).await?;
    service.cloud().map_err(Failure)?;
    let (handle, asking) = (service.clone(), caller.clone());
    // To the end: a client that hangs up must not leave a row without its task.
    let begun = service.to_the_end(async move {
        let (id, plan) = add(&handle, &caller, &reference, request).await?;
        let control = Arc::new(TaskControl::new(handle.stopping_flag()));
        control.begin();
        let work = go_on(handle.clone(), caller, id, plan, control.clone());
        Ok::<_, Failure>((id, handle.spawn_task(Some(id), control, work)))
    });
    let (id, live) = begun.await?;
    Ok(answer(Some(id), live, asking).await)
}

/// Adds the task. From then on, neither the connection nor the version can be removed.
async fn add(
    service: &Service,
    caller: &Caller,
    reference: &ImageRef,
    request: PublishRequest,
) -> Result<(i64, Plan), Failure> {
    let _using = service.using_versions().await;
    let version = service.images().resolve(reference).await?;
    let place = place_of(&version);
    if version.retired {
        return Err(Error::Retired(place).into());
    }
    if version.keeps_identity {
        return Err(Error::KeepsIdentity(place).into());
    }
    if u32::try_from(version.number).is_err() {
        return Err(Error::Number(place).into());
    }
    let what = Work { kind: KIND, subject: format!("image {place}"), caller: caller.clone() };
    let mut repo = service.db().write().await?;
    // Again, in the transaction that adds the task.
    if repo.clouds().by_name(&request.connection).await?.is_none() {
        return Err(NoConnection::Unknown(request.connection).into());
    }
    not_busy(&mut *repo, &place, &request.connection).await?;
    if let Some(there) = row(&mut *repo, &version, &request.connection).await? {
        fits(&there, &version, &request)?;
    }
    let plan = Plan { request, version };
    let id = repo.tasks().add(&service.new_task(&what, super::text_of(&plan))).await?;
    repo.save().await?;
    Ok((id, plan))
}

/// Fails if the row of a version shows another content, or a complete publication with another number of replicas.
fn fits(there: &PublishedImage, version: &ImageVersion, request: &PublishRequest) -> Result<(), Error> {
    let (place, connection) = (place_of(version), request.connection.clone());
    if there.hash != version.hash {
        let hash = there.hash.chars().take(12).collect();
        return Err(Error::Other { version: place, connection, hash });
    }
    match request.replicas {
        Some(wanted) if there.state == PublishState::Published && wanted != there.replicas => {
            Err(Error::OtherReplicas { version: place, connection, wanted, there: there.replicas })
        }
        _ => Ok(()),
    }
}

/// `IMAGE@NUMBER`.
fn place_of(version: &ImageVersion) -> String {
    format!("{}@{}", version.image, version.number)
}

/// Fails if a task publishes or removes the version at this connection.
async fn not_busy(repo: &mut dyn Repository, version: &str, connection: &str) -> Result<(), Error> {
    match busy(repo, version, connection).await? {
        Some(task) => {
            Err(Error::Busy { version: version.to_owned(), connection: connection.to_owned(), task })
        }
        None => Ok(()),
    }
}

/// The task that publishes or removes a version at a connection.
pub(super) async fn busy(
    repo: &mut dyn Repository,
    version: &str,
    connection: &str,
) -> Result<Option<i64>, DbError> {
    let subject = format!("image {version}");
    let is_it = |task: &TaskRecord| {
        let is_kind = task.kind == KIND || task.kind == unpublish::KIND;
        is_kind && task.subject == subject && uses(task, connection)
    };
    Ok(repo.tasks().unended().await?.into_iter().find(is_it).map(|task| task.id))
}

/// The kind of the task that sweeps a connection.
pub(crate) const SWEEP: &str = "sweep";

/// A task that uses a connection and has not ended.
pub(crate) async fn task_using(
    repo: &mut dyn Repository,
    connection: &str,
) -> Result<Option<TaskRecord>, DbError> {
    Ok(repo.tasks().unended().await?.into_iter().find(|task| uses(task, connection)))
}

/// Whether a task uses a connection. One whose plan cannot be read may use it.
fn uses(task: &TaskRecord, connection: &str) -> bool {
    let plan = task.plan.as_deref();
    match task.kind.as_str() {
        KIND => super::stored::<Plan>(plan).is_none_or(|plan| plan.request.connection == connection),
        unpublish::KIND => {
            super::stored::<unpublish::Plan>(plan).is_none_or(|plan| plan.published.connection == connection)
        }
        SWEEP => task.subject.strip_prefix("connection ") == Some(connection),
        _ => false,
    }
}

/// The tasks that publish a version of an image, or any of its versions, and have not ended.
pub(crate) async fn publishing(
    repo: &mut dyn Repository,
    image: &str,
    version: Option<&ImageVersion>,
) -> Result<Vec<i64>, DbError> {
    let is_it = |task: &TaskRecord| {
        let plan = super::stored::<Plan>(task.plan.as_deref()).filter(|_| task.kind == KIND);
        plan.is_some_and(|plan| {
            plan.version.image == image && version.is_none_or(|it| it.number == plan.version.number)
        })
    };
    Ok(repo.tasks().unended().await?.into_iter().filter(is_it).map(|task| task.id).collect())
}

/// The row of a version at a connection.
async fn row(
    repo: &mut dyn Repository,
    version: &ImageVersion,
    connection: &str,
) -> Result<Option<PublishedImage>, DbError> {
    let all = repo.clouds().published().await?;
    Ok(all.into_iter().find(|row| {
        row.connection == connection && row.image == version.image && row.version == version.number
    }))
}

/// Runs the rest of a plan.
pub(super) async fn go_on(
    service: Service,
    caller: Caller,
    id: i64,
    plan: Plan,
    control: Arc<TaskControl>,
) -> Outcome {
    service.task_began(id).await;
    let Plan { version, request } = &plan;
    let outcome = run(&service, &caller, &plan, &control).await;
    outcome.map_err(|problem| {
        problem.during(format!("cannot publish {} to '{}'", place_of(version), request.connection))
    })
}

async fn run(service: &Service, caller: &Caller, plan: &Plan, control: &Arc<TaskControl>) -> Outcome {
    let Plan { version, request } = plan;
    let cloud = service.cloud()?;
    let connection = service.connection(&request.connection).await.map_err(|e| problem(&e))?;
    let mut repo = service.db().read().await.map_err(|e| problem(&e))?;
    let there = row(&mut *repo, version, &request.connection).await.map_err(|e| problem(&e))?;
    drop(repo);
    if control.is_asked_to_stop() {
        // Cancelled before it began to work. A published version stays, because machines may use it.
        return Err(give_up(service, &*cloud, (connection, there), control).await);
    }
    let mut remarks = Vec::new();
    if let Some(published) = there.clone().filter(|row| row.state == PublishState::Published) {
        control.report_doing("looking for the version".to_owned());
        let order = PublishOrder {
            connection: connection.clone(),
            version: version.clone(),
            published: published.clone(),
            nvme: request.nvme,
        };
        let Some(is_there) = until_cancelled(control, cloud.is_published(&order)).await else {
            return Err(give_up(service, &*cloud, (connection, there), control).await);
        };
        if is_there.map_err(|e| problem(&e))? {
            let report = PublishReport { published, created: false, sent_bytes: 0, remarks };
            return Ok(TaskResult::Published(Box::new(report)));
        }
        remarks.push(
            "it was published before, and was removed there meanwhile: it is published again".to_owned(),
        );
    }
    control.report_doing("looking into the image".to_owned());
    let facts = cloud.inspect(version).await.map_err(|e| problem(&e))?;
    match facts.agent {
        ProvisioningAgent::Found(_) => {}
        ProvisioningAgent::Missing(why) | ProvisioningAgent::Unreadable(why) if !request.no_agent_check => {
            return Err(problem(&Error::NoAgent(why)));
        }
        ProvisioningAgent::Missing(why) | ProvisioningAgent::Unreadable(why) => remarks.push(why),
    }
    let published = PublishedImage {
        image: version.image.clone(),
        version: version.number,
        hash: version.hash.clone(),
        connection: request.connection.clone(),
        state: PublishState::Publishing,
        generation: facts.generation,
        replicas: request.replicas.or(there.as_ref().map(|row| row.replicas)).unwrap_or(1),
        resource: String::new(),
        created_by: caller.principal.clone(),
        created_at_ms: there.as_ref().map_or_else(|| service.now_ms(), |row| row.created_at_ms),
    };
    let mut order = PublishOrder { connection, version: version.clone(), published, nvme: request.nvme };
    control.report_doing("checking the connection".to_owned());
    let Some(checked) = until_cancelled(control, cloud.check_publish(&order)).await else {
        return Err(give_up(service, &*cloud, (order.connection, there), control).await);
    };
    let checked = checked.map_err(|e| problem(&e))?;
    order.published.resource = checked.resource;
    remarks.extend(checked.remarks);
    store(service, order.published.clone()).await?;
    let work = cloud.publish(&order, Arc::clone(control));
    match until_cancelled(control, work).await {
        Some(Ok(sent_bytes)) => {
            order.published.state = PublishState::Published;
            let published = order.published;
            store(service, published.clone()).await?;
            let detail = format!("version {} to connection {}", version.number, request.connection);
            service.image_changed(caller, &version.image, "published", detail).await;
            let report = PublishReport { published, created: true, sent_bytes, remarks };
            Ok(TaskResult::Published(Box::new(report)))
        }
        Some(Err(error)) => Err(kept(&error)),
        None => {
            let made = Some(order.published);
            Err(give_up(service, &*cloud, (order.connection, made), control).await)
        }
    }
}

/// The problem of an attempt that leaves resources for the next one.
fn kept(error: &BackendError) -> Problem {
    let mut problem = problem(error);
    let again = "the same command continues; 'headwater image unpublish' removes what was made";
    problem.advice = Some(match problem.advice {
        Some(advice) => format!("{advice}; {again}"),
        None => again.to_owned(),
    });
    problem
}

/// Runs work until the task is cancelled or the daemon stops: then `None`.
pub(crate) async fn until_cancelled<T>(control: &TaskControl, work: impl Future<Output = T>) -> Option<T> {
    let cancelled = async {
        while !control.is_cancelled() {
            tokio::time::sleep(CANCEL_INTERVAL).await;
        }
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = cancelled => None,
    }
}

/// Removes what a cancelled task has made, if there is a row of it. A published version stays. If the daemon stops, all
/// stays for the next one.
async fn give_up(
    service: &Service,
    cloud: &dyn Cloud,
    (connection, made): (ConnectionRecord, Option<PublishedImage>),
    control: &Arc<TaskControl>,
) -> Problem {
    let is_cancelled_by_user = control.is_asked_to_stop();
    if !is_cancelled_by_user {
        return super::stopped();
    }
    let cancelled = || Problem::new(ProblemKind::Cancelled, "the task was cancelled");
    let unpublished = made.filter(|row| row.state != PublishState::Published);
    let Some(mut published) = unpublished else { return cancelled() };
    published.state = PublishState::Removing;
    let removed = async {
        store(service, published.clone()).await?;
        let unpublish = unpublish_order(service, connection, published.clone()).await;
        let unpublish = unpublish.map_err(|e| problem(&e))?;
        cloud.unpublish(&unpublish, Arc::clone(control)).await.map_err(|e| problem(&e))?;
        forget(service, &published).await
    };
    match removed.await {
        Ok(()) => cancelled(),
        Err(failed) => {
            let mut failed =
                failed.during("the task was cancelled, but what it has made could not be removed");
            let PublishedImage { image, version, connection, .. } = &published;
            let again =
                format!("'headwater image unpublish {image}@{version} --connection {connection}' removes it");
            (failed.advice, failed.kind) = (Some(again), ProblemKind::Cancelled);
            failed
        }
    }
}

/// The order that removes a published version, and what no other version needs.
pub(crate) async fn unpublish_order(
    service: &Service,
    connection: ConnectionRecord,
    published: PublishedImage,
) -> Result<UnpublishOrder, DbError> {
    let all = service.db().read().await?.clouds().published().await?;
    let is_other = |row: &&PublishedImage| {
        row.connection == published.connection
            // Of two removals at the same time, the one that ends last removes the rest: Azure refuses it to the other.
            && row.state != PublishState::Removing
            && (&row.image, row.version) != (&published.image, published.version)
    };
    let others = || all.iter().filter(is_other);
    let is_last = others().next().is_none();
    let is_last_of_image = !others().any(|row| row.image == published.image);
    Ok(UnpublishOrder { connection, published, is_last_of_image, is_last })
}

/// Stores the row of a published version. Retries while the database fails.
pub(crate) async fn store(service: &Service, published: PublishedImage) -> Result<(), Problem> {
    let save = || async {
        let mut repo = service.db().write().await?;
        repo.clouds().set_published(&published).await?;
        repo.save().await
    };
    service.until_saved("a published version", save).await
}

/// Removes the row of a published version. Retries while the database fails.
pub(crate) async fn forget(service: &Service, published: &PublishedImage) -> Result<(), Problem> {
    let save = || async {
        let mut repo = service.db().write().await?;
        repo.clouds().remove_published(published).await?;
        repo.save().await
    };
    service.until_saved("that a version is not published any more", save).await
}
