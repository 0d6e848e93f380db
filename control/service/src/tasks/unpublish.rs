//! `unpublish`: removes a published version from the gallery of a connection. It is a task (`mod.rs`), and continues after a
//! restart of the daemon.

use std::sync::Arc;

use axum::response::Response;
use headwater_api::name::ImageRef;
use headwater_api::{Problem, ProblemKind, PublishState, PublishedImage, TaskResult};
use headwater_db::{DbError, MachineRecord};
use serde::{Deserialize, Serialize};

use super::publish::{busy, forget, unpublish_order, until_cancelled};
use super::{Outcome, Work, answer};
use crate::Service;
use crate::answer::{Explain, Failure, problem};
use crate::backend::TaskControl;
use crate::caller::Caller;

/// The kind of the task.
pub(super) const KIND: &str = "unpublish";

/// The data that the task needs to continue after a restart: the row of the version.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) published: PublishedImage,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{version} is not published to '{connection}'")]
    NotPublished { version: String, connection: String },
    #[error("cannot unpublish '{0}': it does not name a version by its number")]
    NoNumber(String),
    #[error(
        "cannot unpublish {version} from '{connection}': task {task} is already publishing or removing it"
    )]
    Busy { version: String, connection: String, task: i64 },
    #[error("cannot unpublish {version} from '{connection}': machines there run it: {}", .machines.join(", "))]
    Runs { version: String, connection: String, machines: Vec<String> },
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NotPublished { .. } => ProblemKind::NotFound,
            Self::NoNumber(_) => ProblemKind::Invalid,
            Self::Busy { .. } | Self::Runs { .. } => ProblemKind::Conflict,
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::NotPublished { .. } => Some("'headwater image published' shows all".to_owned()),
            Self::NoNumber(_) => Some("write IMAGE@NUMBER".to_owned()),
            Self::Busy { task, .. } => {
                Some(format!("run 'headwater task wait {task}', or cancel the task; then unpublish again"))
            }
            Self::Runs { .. } => {
                Some("a reset needs it; stop these machines, or have them boot another version".to_owned())
            }
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
    connection: String,
) -> Result<Response, Failure> {
    let (image, number) = number_of(name)?;
    service.connection(&connection).await?;
    service.cloud().map_err(Failure)?;
    let (handle, asking) = (service.clone(), caller.clone());
    // To the end: a client that hangs up must not leave a row without its task.
    let begun = service.to_the_end(async move {
        let (id, plan) = add(&handle, &caller, (image, number), connection).await?;
        let control = Arc::new(TaskControl::new(handle.stopping_flag()));
        control.begin();
        let work = go_on(handle.clone(), caller, id, plan, control.clone());
        Ok::<_, Error>((id, handle.spawn_task(Some(id), control, work)))
    });
    let (id, live) = begun.await?;
    Ok(answer(Some(id), live, asking).await)
}

/// The image and the number of a reference. The version here may be gone, so its hash cannot be looked up.
fn number_of(name: &str) -> Result<(String, u64), Failure> {
    let reference = ImageRef::parse(name).map_err(Failure)?;
    let number = reference.version.as_ref().and_then(|version| version.parse().ok());
    let number = number.ok_or_else(|| Error::NoNumber(name.to_owned()))?;
    Ok((reference.image, number))
}

/// Adds the task, in one unit with the check that no other one changes the version: of two requests at once, one is refused.
async fn add(
    service: &Service,
    caller: &Caller,
    (image, number): (String, u64),
    connection: String,
) -> Result<(i64, Plan), Error> {
    let version = format!("{image}@{number}");
    let mut repo = service.db().write().await?;
    if let Some(task) = busy(&mut *repo, &version, &connection).await? {
        return Err(Error::Busy { version, connection, task });
    }
    let runs_it = |machine: &MachineRecord| {
        machine.connection.as_ref() == Some(&connection)
            && machine.version.as_ref() == Some(&version)
            && machine.state.is_active()
    };
    let machines = repo.machines().of_clouds().await?.into_iter().filter(runs_it);
    let machines: Vec<_> = machines.map(|machine| machine.name).collect();
    if !machines.is_empty() {
        return Err(Error::Runs { version, connection, machines });
    }
    let all = repo.clouds().published().await?;
    let is_it =
        |row: &PublishedImage| row.connection == connection && row.image == image && row.version == number;
    let Some(mut published) = all.into_iter().find(is_it) else {
        return Err(Error::NotPublished { version, connection });
    };
    // From now on no machine is started with it.
    published.state = PublishState::Removing;
    repo.clouds().set_published(&published).await?;
    let plan = Plan { published };
    let what = Work { kind: KIND, subject: format!("image {version}"), caller: caller.clone() };
    let id = repo.tasks().add(&service.new_task(&what, super::text_of(&plan))).await?;
    repo.save().await?;
    Ok((id, plan))
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
    let Plan { published } = plan;
    let PublishedImage { image, version, connection, .. } = &published;
    let tried = format!("cannot unpublish {image}@{version} from '{connection}'");
    run(&service, &caller, published, &control).await.map_err(|problem| problem.during(tried))
}

async fn run(
    service: &Service,
    caller: &Caller,
    published: PublishedImage,
    control: &Arc<TaskControl>,
) -> Outcome {
    let cloud = service.cloud()?;
    let connection = service.connection(&published.connection).await.map_err(|e| problem(&e))?;
    let order = unpublish_order(service, connection, published.clone()).await.map_err(|e| problem(&e))?;
    let removing = cloud.unpublish(&order, Arc::clone(control));
    let Some(removed) = until_cancelled(control, removing).await else {
        if !control.is_asked_to_stop() {
            return Err(super::stopped());
        }
        let why = Problem::new(ProblemKind::Cancelled, "the removal was stopped");
        return Err(why.advise("the same command continues"));
    };
    removed.map_err(|e| problem(&e))?;
    forget(service, &published).await?;
    let detail = format!("version {} from connection {}", published.version, published.connection);
    service.image_changed(caller, &published.image, "unpublished", detail).await;
    Ok(TaskResult::Unpublished(Box::new(published)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::tests::Fixture;
    use crate::tasks::publish::task_using;

    fn row(number: u64, connection: &str, state: PublishState) -> PublishedImage {
        PublishedImage {
            image: "debian".to_owned(),
            version: number,
            hash: "9f2c".repeat(16),
            connection: connection.to_owned(),
            state,
            generation: 2,
            replicas: 1,
            resource: String::new(),
            created_by: "uid 0".to_owned(),
            created_at_ms: 0,
        }
    }

    fn connection(name: &str) -> headwater_db::ConnectionRecord {
        headwater_db::ConnectionRecord {
            connection: headwater_api::Connection {
                name: name.to_owned(),
                subscription: String::new(),
                tenant: String::new(),
                group: String::new(),
                region: String::new(),
                auth: headwater_api::ConnectionAuth::Identity,
                client_id: None,
                authority: String::new(),
                management: String::new(),
                created_by: String::new(),
                created_at_ms: 0,
            },
            owner: String::new(),
            secret: None,
        }
    }

    /// A service with these published versions, whose connections exist.
    async fn with(rows: &[PublishedImage]) -> Fixture {
        let fixture = Fixture::new().await;
        let mut repo = fixture.service.db().write().await.unwrap();
        for name in ["a", "b"] {
            repo.clouds().add(&connection(name)).await.unwrap();
        }
        for row in rows {
            repo.clouds().set_published(row).await.unwrap();
        }
        repo.save().await.unwrap();
        fixture
    }

    #[tokio::test]
    async fn of_two_removals_at_once_one_is_refused() {
        let fixture =
            with(&[row(1, "a", PublishState::Published), row(1, "b", PublishState::Published)]).await;
        let add = async |connection: &str| {
            let version = ("debian".to_owned(), 1);
            add(&fixture.service, &Caller::daemon(), version, connection.to_owned()).await
        };
        let (one, other) = tokio::join!(add("a"), add("a"));
        assert_ne!(one.is_ok(), other.is_ok(), "{one:?} {other:?}");
        let refused = one.and(other).unwrap_err().to_string();
        assert!(refused.contains("cannot unpublish debian@1 from 'a': task"), "{refused}");
        // That of another connection has nothing to do with it.
        assert!(add("b").await.is_ok());
    }

    #[tokio::test]
    async fn a_removal_keeps_only_its_own_connection_from_being_removed() {
        let fixture = with(&[row(1, "a", PublishState::Published)]).await;
        let version = ("debian".to_owned(), 1);
        let (id, _) = add(&fixture.service, &Caller::daemon(), version, "a".to_owned()).await.unwrap();
        let mut repo = fixture.service.db().read().await.unwrap();
        assert_eq!(task_using(&mut *repo, "a").await.unwrap().map(|task| task.id), Some(id));
        assert_eq!(task_using(&mut *repo, "b").await.unwrap(), None);
    }

    #[tokio::test]
    async fn the_last_of_two_removals_at_once_takes_definition_and_gallery_along() {
        let removing = PublishState::Removing;
        let fixture = with(&[row(1, "a", removing), row(2, "a", removing), row(3, "b", removing)]).await;
        for number in [1, 2] {
            let order = unpublish_order(&fixture.service, connection("a"), row(number, "a", removing)).await;
            let order = order.unwrap();
            assert!(order.is_last && order.is_last_of_image);
        }
        let fixture = with(&[row(1, "a", removing), row(2, "a", PublishState::Published)]).await;
        let order = unpublish_order(&fixture.service, connection("a"), row(1, "a", removing)).await.unwrap();
        assert!(!order.is_last && !order.is_last_of_image);
    }
}
