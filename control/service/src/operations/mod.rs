//! The operations of the API: one file each, with its errors, its OpenAPI text and a short handler.

pub(crate) mod attach_console;
mod cache_contents;
mod cancel_promotion;
mod cancel_task;
mod catalog_scheme;
mod claim_machine;
mod connections;
mod count_users;
mod create_catalog;
mod create_console_ticket;
mod create_display_ticket;
mod create_join_token;
pub(crate) mod create_machine;
mod create_terminal_ticket;
pub(crate) mod create_token;
mod diff_images;
mod discard_session;
mod drain_host;
mod edit_image;
mod exec_machine;
mod export_image;
mod get_openapi;
mod get_stats;
pub(crate) mod get_status;
pub(crate) mod hosts;
mod import_image;
mod list_audit;
mod list_catalogs;
mod list_claims;
mod list_events;
mod list_images;
mod list_machines;
mod list_tasks;
mod list_tokens;
mod merge_trace;
mod note_image;
mod page;
mod personality;
mod pin_catalog;
mod pin_machine;
mod promote_image;
mod publish_image;
mod pull_images;
mod read_console;
mod release_claim;
mod remove_catalog;
mod remove_image;
mod remove_machine;
mod reset_machine;
mod retire_image;
mod revert_image;
mod revoke_token;
mod roll_catalog;
mod rotate_machine;
mod scale_catalog;
mod screenshot_machine;
mod seal_image;
pub(crate) mod seal_machine;
mod set_catalog;
mod set_machine;
mod show_advice;
mod show_caller;
mod show_catalog;
mod show_image;
mod show_machine;
mod show_task;
mod show_trace;
mod start_machine;
mod stop_machine;
mod sweep_connection;
mod unpin_machine;
mod verify_image;

use std::future::Future;
use std::path::Path;

use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Json, Router};
use headwater_api::{
    Machine, MachineSort, MaintenanceSession, Problem, ProblemDetails, ProblemKind, TaskEvent,
};
use headwater_db::{DbError, MachineRecord, PersistentDisk, Purpose};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Content, Ref, RefOr, ResponseBuilder};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::Service;
use crate::answer::Failure;
use crate::caller::{self, Needs};
use crate::fleet::forward;
use crate::lifecycle::LifecycleError;

/// Text after an `@` with fewer digits is a number; otherwise it is the beginning of a hash.
const HASH_PREFIX_MIN: usize = 8;

/// The longest request body; user data is the largest part.
pub const MAX_BODY_BYTES: usize = 8 << 20;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Headwater",
        description = "Images, machines and their write caches, on one host or several. Every failed request is answered with \
                       a Problem. Long operations answer with one JSON object a line (application/x-ndjson). Over TCP, every \
                       request has the header 'Authorization: Bearer TOKEN', and the token's role must be at least the scope of the \
                       operation's security requirement. A token with scopes of catalogs and images needs the scope of what the path names; \
                       operations with the mark 'scoped' leave out what is not in its scopes, and those with 'everything' refuse it.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    tags(
        (name = "images", description = "Golden images and their versions"),
        (name = "catalogs", description = "Machines that are made alike and boot the same"),
        (name = "machines", description = "Machines that boot them"),
        (name = "claims", description = "Machines of a catalog that are lent to somebody"),
        (name = "clouds", description = "Connections to clouds, and the versions that are published there"),
        (name = "hosts", description = "Computers that run machines"),
        (name = "tasks", description = "Work that outlives the client that asked for it"),
        (name = "access", description = "Named tokens and their roles"),
        (name = "daemon", description = "The daemon and its history"),
    ),
    components(schemas(TaskEvent, MachineSort, Problem, ProblemDetails)),
    modifiers(&TokenScheme),
)]
struct Description;

/// The security scheme of the OpenAPI description.
struct TokenScheme;

impl Modify for TokenScheme {
    fn modify(&self, described: &mut utoipa::openapi::OpenApi) {
        let mut scheme = Http::new(HttpAuthScheme::Bearer);
        scheme.description = Some(
            "Over TCP. The scope of an operation is the least role that it needs: metrics, viewer, operator or admin. A mark may follow \
             it: scoped or everything. On the unix socket no token is needed."
                .to_owned(),
        );
        let components = described.components.get_or_insert_default();
        components.add_security_scheme(caller::SCHEME, SecurityScheme::Http(scheme));
    }
}

fn routes() -> OpenApiRouter<Service> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(get_status::get_status))
        .routes(routes!(get_openapi::get_openapi))
        .routes(routes!(get_stats::get_stats))
        .routes(routes!(get_stats::get_metrics))
        .routes(routes!(list_events::list_events))
        .routes(routes!(list_audit::list_audit))
        .routes(routes!(list_images::list_images, import_image::import_image))
        .routes(routes!(pull_images::pull_images))
        .routes(routes!(show_image::show_image, remove_image::remove_image))
        .routes(routes!(verify_image::verify_image))
        .routes(routes!(diff_images::diff_images))
        .routes(routes!(export_image::export_image))
        .routes(routes!(promote_image::promote_image, cancel_promotion::cancel_promotion))
        .routes(routes!(revert_image::revert_image))
        .routes(routes!(retire_image::retire_image))
        .routes(routes!(note_image::note_image))
        .routes(routes!(show_trace::show_trace, show_trace::remove_trace))
        .routes(routes!(merge_trace::merge_trace))
        .routes(routes!(merge_trace::save_trace))
        .routes(routes!(edit_image::edit_image, discard_session::discard_session))
        .routes(routes!(seal_image::seal_image))
        .routes(routes!(list_catalogs::list_catalogs, create_catalog::create_catalog))
        .routes(routes!(show_advice::show_advice))
        .routes(routes!(show_catalog::show_catalog, set_catalog::set_catalog, remove_catalog::remove_catalog))
        .routes(routes!(catalog_scheme::list_schemes))
        .routes(routes!(catalog_scheme::revert_scheme))
        .routes(routes!(pin_catalog::pin_catalog, pin_catalog::unpin_catalog))
        .routes(routes!(pin_machine::pin_machine, unpin_machine::unpin_machine))
        .routes(routes!(list_machines::list_machines, create_machine::create_machine))
        .routes(routes!(show_machine::show_machine, set_machine::set_machine, remove_machine::remove_machine))
        .routes(routes!(start_machine::start_machine))
        .routes(routes!(stop_machine::stop_machine))
        .routes(routes!(reset_machine::reset_machine))
        .routes(routes!(rotate_machine::rotate_machine))
        .routes(routes!(seal_machine::seal_machine))
        .routes(routes!(exec_machine::exec_machine))
        .routes(routes!(count_users::count_users))
        .routes(routes!(personality::machine_personality, personality::set_machine_personality))
        .routes(routes!(personality::catalog_personality, personality::set_catalog_personality))
        .routes(routes!(read_console::read_console))
        .routes(routes!(attach_console::attach_console))
        .routes(routes!(create_terminal_ticket::create_terminal_ticket))
        .routes(routes!(create_display_ticket::create_display_ticket))
        .routes(routes!(screenshot_machine::screenshot_machine))
        .routes(routes!(cache_contents::cache_contents))
        .routes(routes!(scale_catalog::scale_catalog))
        .routes(routes!(roll_catalog::roll_catalog))
        .routes(routes!(list_tasks::list_tasks))
        .routes(routes!(show_task::show_task))
        .routes(routes!(show_task::follow_task))
        .routes(routes!(cancel_task::cancel_task))
        .routes(routes!(claim_machine::claim_machine))
        .routes(routes!(list_claims::list_claims))
        .routes(routes!(release_claim::release_claim))
        .routes(routes!(show_caller::show_caller))
        .routes(routes!(list_tokens::list_tokens, create_token::create_token))
        .routes(routes!(revoke_token::revoke_token))
        .routes(routes!(create_console_ticket::create_console_ticket))
        .routes(routes!(hosts::list_hosts))
        .routes(routes!(hosts::show_host, hosts::set_host, hosts::remove_host))
        .routes(routes!(hosts::accept_host))
        .routes(routes!(drain_host::drain_host))
        .routes(routes!(create_join_token::create_join_token))
        .routes(routes!(connections::list_connections, connections::create_connection))
        .routes(routes!(
            connections::show_connection,
            connections::set_connection,
            connections::remove_connection
        ))
        .routes(routes!(connections::check_connection))
        .routes(routes!(sweep_connection::sweep_connection))
        .routes(routes!(publish_image::publish_image))
        .routes(routes!(publish_image::unpublish_image))
        .routes(routes!(publish_image::list_published))
}

/// Changes a machine, running to the end even if the client disconnects, and answers with its state from the database
/// and memory only, because a store may be slow.
async fn change_machine<W>(
    service: Service,
    change: impl FnOnce(Service) -> W,
) -> Result<Json<Machine>, Failure>
where
    W: Future<Output = Result<MachineRecord, LifecycleError>> + Send + 'static,
{
    let record = service.to_the_end(change(service.clone())).await?;
    if !service.is_own(&record) {
        return Ok(Json(service.changed_view(record).await));
    }
    let disks = match persistent_disks_of(&service, &record).await {
        Ok(disks) => disks,
        // Not an error, because the change was made and must not be repeated.
        Err(error) => {
            tracing::warn!(machine = record.name, %error, "cannot read the persistent disks of a machine");
            return Ok(Json(service.view(record)));
        }
    };
    let disk = |purpose| disks.iter().find(|disk| disk.purpose == purpose);
    let (edit, own) =
        (disk(Purpose::MaintenanceSession), disk(Purpose::Persistent).filter(|_| record.cache.persistent));
    let running = service.active(record.uuid).map(|active| active.version_hash.clone());
    let runs = match (&running, own) {
        (None, Some(own)) => Some(own.below()),
        // Or ran last.
        _ => record.version.clone(),
    };
    let hash = running.or_else(|| own.map(|disk| disk.hash.clone()));
    let old =
        edit.is_none() && runs.is_some_and(|runs| is_another(record.reference(), &runs, hash.as_deref()));
    let (kept, edits) = (own.map(PersistentDisk::below), edit.map(PersistentDisk::below));
    Ok(Json(Machine { old, kept, edits, ..service.view(record) }))
}

async fn persistent_disks_of(
    service: &Service,
    record: &MachineRecord,
) -> Result<Vec<PersistentDisk>, DbError> {
    service.db().read().await?.persistent_disks().of_machine(record.uuid).await
}

/// Whether a store's name means the same for the client and the daemon: relative paths do not.
fn is_store(name: &str) -> bool {
    name.contains("://") || Path::new(name).is_absolute()
}

/// Whether a reference certainly names another version than `name` (`IMAGE@NUMBER`) with this hash. Only the
/// store knows to what a channel points, and the hash of the last version of a machine that is off.
fn is_another(reference: &str, name: &str, hash: Option<&str>) -> bool {
    let (Some((image, version)), Some((its_image, its_number))) =
        (reference.split_once('@'), name.split_once('@'))
    else {
        return false;
    };
    let is_number = version.len() < HASH_PREFIX_MIN;
    let same = if is_number {
        number(version) == number(its_number)
    } else {
        hash.is_none_or(|hash| hash.starts_with(version))
    };
    image != its_image || !same
}

fn number(text: &str) -> Option<u64> {
    text.parse().ok()
}

/// A maintenance session as clients see it.
fn session_view(disk: PersistentDisk, machine: String) -> MaintenanceSession {
    let PersistentDisk { image, version, author, created_at_ms: since_ms, .. } = disk;
    MaintenanceSession { image, version, machine, since_ms, author, warning: None }
}

/// The OpenAPI description of all operations, with the answers that any operation may give.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut described = routes().into_openapi();
    let refusals = [
        ("400", "The request is not valid"),
        ("401", "Over TCP: no token, or one that is unknown, revoked or expired"),
        ("403", "The role or the scopes of the caller do not allow this"),
        ("500", "The database, the store or the host failed"),
    ];
    for item in described.paths.paths.values_mut() {
        let methods = [&mut item.get, &mut item.put, &mut item.post, &mut item.patch, &mut item.delete];
        for operation in methods.into_iter().flatten() {
            for (status, description) in refusals {
                let refusal = || ResponseBuilder::new().description(description).build().into();
                operation.responses.responses.entry(status.to_owned()).or_insert_with(refusal);
            }
            for (status, response) in &mut operation.responses.responses {
                if let (true, RefOr::T(response)) = (is_failure(status), response) {
                    let body = Content::new(Some(Ref::from_schema_name("ProblemDetails")));
                    let content = (ProblemDetails::CONTENT_TYPE.to_owned(), RefOr::T(body));
                    response.content = [content].into();
                }
            }
        }
    }
    described
}

fn is_failure(status: &str) -> bool {
    status.starts_with(['4', '5'])
}

/// The router with all operations of a service.
pub fn router(service: Service) -> Router {
    let (router, described) = routes().split_for_parts();
    let needs = Needs::of(&described);
    router
        .layer(middleware::from_fn_with_state(service.clone(), forward::forward))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(middleware::from_fn_with_state((service.clone(), needs), caller::authorize))
        .layer(middleware::from_fn(log))
        .with_state(service)
}

async fn no_such_path(uri: Uri) -> Failure {
    let message = format!("the daemon has no operation at {}", uri.path());
    let problem = Problem::new(ProblemKind::NotFound, message);
    Failure(problem.advise("/api/v1/openapi.json describes all paths and methods"))
}

async fn no_such_method(method: Method, uri: Uri) -> Response {
    let message = format!("the daemon has no operation with the method {method} at {}", uri.path());
    let problem = Problem::new(ProblemKind::Invalid, message);
    let failure = Failure(problem.advise("/api/v1/openapi.json describes all paths and methods"));
    // The router adds the header `Allow`.
    failure.with_status(StatusCode::METHOD_NOT_ALLOWED)
}

async fn log(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let started = std::time::Instant::now();
    let response = next.run(request).await;
    let took_ms = started.elapsed().as_millis();
    tracing::debug!(%method, path, status = response.status().as_u16(), took_ms, "request");
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_reference_says_itself_is_another_version() {
        let another = |reference| is_another(reference, "tiny@3", Some("0123456789abcdef"));
        for same in ["tiny", "tiny:test", "tiny@3", "tiny@003", "tiny@01234567", "tiny@0123456789abcdef"] {
            assert!(!another(same), "{same}");
        }
        for other in ["tiny@2", "tiny@30", "other@3", "tiny@12345678", "other@01234567"] {
            assert!(another(other), "{other}");
        }
    }
}
