//! `POST /api/v1/machines/{machine}/console/ticket`: a ticket with which a page can attach to a console once.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{ConsoleTicket, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;
use crate::web::MachineSocket;

/// Makes a ticket for the serial console of a machine. The page of the web console opens the WebSocket `/console` with it, once, within
/// 60 seconds: with the protocols `headwater-console` and the ticket.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/console/ticket",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 201, body = ConsoleTicket),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "The daemon serves no web console (`serve --console`), or the machine is on another host", body = Problem),
        (status = 503, description = "Too many tickets wait to be used", body = Problem),
    ),
)]
pub(super) async fn create_terminal_ticket(
    State(service): State<Service>,
    Name(name): Name,
    caller: Caller,
) -> Result<(StatusCode, Json<ConsoleTicket>), Failure> {
    let record = service.record(&name).await?;
    service.must_be_own("open in the web console a terminal of", &record).await?;
    let ticket = service.make_machine_ticket(&caller, &record, MachineSocket::Console)?;
    Ok((StatusCode::CREATED, Json(ticket)))
}
