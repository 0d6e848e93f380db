//! `POST /api/v1/connections/{connection}/sweep`: find resources in a cloud that nothing here needs, and remove them.

use axum::extract::State;
use axum::response::Response;
use headwater_api::{OrphanResource, Problem, ProblemKind, SweepReport, SweepRequest, TaskEvent, TaskResult};
use headwater_db::DbError;

use crate::Service;
use crate::answer::{Failure, problem};
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::tasks::publish::{SWEEP, until_cancelled};
use crate::tasks::{self, Work};

/// A resource may be removed if a sweep found it this long ago and it is still there. What is made now belongs to a row
/// by then.
const ORPHAN_AGE_MS: u64 = 30 * 60_000;

/// Finds the resources that carry the tag of this controller and that no published version and no machine needs. With `remove`, those that an
/// earlier sweep found at least 30 minutes ago are removed. Resources without the tag are never changed.
#[utoipa::path(
    post,
    path = "/api/v1/connections/{connection}/sweep",
    security(("token" = ["admin", "everything"])),
    tag = "clouds",
    params(("connection" = String, Path, description = "Its name")),
    request_body = SweepRequest,
    responses(
        (status = 200, description = "Progress, then the resources", body = TaskEvent, content_type = "application/x-ndjson"),
        (status = 404, description = "No such connection", body = Problem),
        (status = 503, description = "The cloud refuses the identity, or does not answer", body = Problem),
    ),
)]
pub(super) async fn sweep_connection(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<SweepRequest>,
) -> Result<Response, Failure> {
    service.connection(&name).await?;
    let what = Work { kind: SWEEP, subject: format!("connection {name}"), caller: caller.clone() };
    let handle = service.clone();
    let work = async move |control: std::sync::Arc<crate::backend::TaskControl>| {
        let sweeping = sweep(&handle, &caller, &name, request.remove);
        let swept = until_cancelled(&control, sweeping).await.unwrap_or_else(|| {
            let why = "the sweep was cancelled; resources that it had removed stay removed";
            Err(Problem::new(ProblemKind::Cancelled, why))
        });
        let failed = |problem: Problem| problem.during(format!("cannot sweep connection '{name}'"));
        swept.map(|report| TaskResult::Swept(Box::new(report))).map_err(failed)
    };
    Ok(tasks::run(&service, what, work).await)
}

async fn sweep(service: &Service, caller: &Caller, name: &str, remove: bool) -> Result<SweepReport, Problem> {
    let cloud = service.cloud()?;
    let connection = service.connection(name).await.map_err(|e| problem(&e))?;
    let failed = |error: DbError| problem(&error);
    // Read before the cloud is asked: what is made meanwhile is not in the list, or found the first time now.
    let seen = service.db().read().await.map_err(failed)?.clouds().orphans(name).await.map_err(failed)?;
    let published = service.db().read().await.map_err(failed)?.clouds().published().await.map_err(failed)?;
    let published: Vec<_> = published.into_iter().filter(|row| row.connection == name).collect();
    let machines = service.db().read().await.map_err(failed)?.machines().of_clouds().await.map_err(failed)?;
    let machines = machines.into_iter().filter(|machine| machine.connection.as_deref() == Some(name));
    let machines: Vec<_> = machines.map(|machine| machine.uuid).collect();
    let found = cloud.orphans(&connection, &published, &machines).await.map_err(|e| problem(&e))?;
    let mut orphans = compared(found, &seen, service.now_ms());
    if remove {
        for orphan in orphans.iter_mut().filter(|orphan| orphan.removable) {
            match cloud.remove_orphan(&connection, &orphan.resource).await {
                Ok(()) => {
                    orphan.removed = true;
                    let subject = format!("connection {name}");
                    service.note(service.event(caller, subject, "removed orphan", &*orphan.resource)).await;
                }
                Err(error) => orphan.why = Some(problem(&error).to_string()),
            }
        }
    }
    let left = orphans.iter().filter(|orphan| !orphan.removed);
    let left: Vec<_> = left.map(|orphan| (orphan.resource.clone(), orphan.seen_at_ms)).collect();
    let mut repo = service.db().write().await.map_err(failed)?;
    repo.clouds().set_orphans(name, &left).await.map_err(failed)?;
    repo.save().await.map_err(failed)?;
    orphans.sort_by(|one, other| one.resource.cmp(&other.resource));
    Ok(SweepReport { connection: name.to_owned(), orphans })
}

/// The resources that were found now, compared with those that earlier sweeps found.
fn compared(found: Vec<String>, seen: &[(String, u64)], now_ms: u64) -> Vec<OrphanResource> {
    let orphan = |resource: String| {
        let first = seen.iter().find(|(path, _)| *path == resource).map(|(_, seen_at_ms)| *seen_at_ms);
        let seen_at_ms = first.unwrap_or(now_ms);
        let removable = first.is_some_and(|first| now_ms.saturating_sub(first) >= ORPHAN_AGE_MS);
        OrphanResource { resource, seen_at_ms, removable, removed: false, why: None }
    };
    found.into_iter().map(orphan).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_is_removable_half_an_hour_after_its_first_sweep() {
        let seen = [("/old".to_owned(), 1_000), ("/gone".to_owned(), 0)];
        let at = |now_ms: u64| {
            let found = vec!["/old".to_owned(), "/new".to_owned()];
            let compared = compared(found, &seen, now_ms);
            compared.into_iter().map(|it| (it.seen_at_ms, it.removable)).collect::<Vec<_>>()
        };
        assert_eq!(at(1_000 + ORPHAN_AGE_MS - 1), [(1_000, false), (1_000 + ORPHAN_AGE_MS - 1, false)]);
        assert_eq!(at(1_000 + ORPHAN_AGE_MS), [(1_000, true), (1_000 + ORPHAN_AGE_MS, false)]);
        // A clock that was set back makes nothing older.
        assert_eq!(at(0), [(1_000, false), (0, false)]);
    }
}
