//! `POST /api/v1/machines/{machine}/display/ticket`: a ticket with which a page can use a machine's display once.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{ConsoleTicket, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Name;
use crate::web::MachineSocket;

/// Makes a ticket for the display of a machine. The page of the web console opens the WebSocket `/display` with it, once, within 60
/// seconds: with the protocols `headwater-display` and the ticket. The WebSocket carries the bytes of VNC (RFB), both ways.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/display/ticket",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 201, body = ConsoleTicket),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "It has no display, the daemon serves no web console, or the machine is on another host", body = Problem),
        (status = 503, description = "Too many tickets wait to be used", body = Problem),
    ),
)]
pub(super) async fn create_display_ticket(
    State(service): State<Service>,
    Name(name): Name,
    caller: Caller,
) -> Result<(StatusCode, Json<ConsoleTicket>), Failure> {
    let record = service.record(&name).await?;
    service.must_be_own("show in the web console the display of", &record).await?;
    super::screenshot_machine::must_have_display("open the display", &record)?;
    let ticket = service.make_machine_ticket(&caller, &record, MachineSocket::Display)?;
    Ok((StatusCode::CREATED, Json(ticket)))
}
