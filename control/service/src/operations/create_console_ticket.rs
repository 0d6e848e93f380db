//! `POST /api/v1/console/tickets`: a one-time link to the web console.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{ConsoleLink, CreateConsoleTicket, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Body;
use crate::web::TicketError;

/// Creates a link to the web console. It opens one session with the role, and is valid for 60 seconds.
#[utoipa::path(
    post,
    path = "/api/v1/console/tickets",
    security(("token" = ["admin", "everything"])),
    tag = "access",
    request_body = CreateConsoleTicket,
    responses(
        (status = 201, body = ConsoleLink),
        (status = 400, description = "The role may not see machines", body = Problem),
        (status = 409, description = "The daemon serves no console", body = Problem),
        (status = 503, description = "Too many links wait to be opened", body = Problem),
    ),
)]
pub(super) async fn create_console_ticket(
    State(service): State<Service>,
    caller: Caller,
    Body(request): Body<CreateConsoleTicket>,
) -> Result<(StatusCode, Json<ConsoleLink>), Failure> {
    let Some(console) = service.web().reachable().console else {
        return Err(TicketError::NoConsole.into());
    };
    let (secret, expires_at_ms) = service.make_ticket(&caller, request.role)?;
    let link = ConsoleLink { url: format!("{console}#ticket={secret}"), expires_at_ms };
    Ok((StatusCode::CREATED, Json(link)))
}
