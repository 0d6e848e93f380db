//! `GET /api/v1/machines/{machine}/screenshot`: a screenshot of a machine's display.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use headwater_api::platform::Display;
use headwater_api::{Problem, ProblemKind};
use headwater_db::MachineRecord;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::extract::Name;
use crate::lifecycle::LifecycleError;

#[derive(Debug, thiserror::Error)]
#[error("cannot {what} of machine '{machine}': it has no display")]
struct NoDisplay {
    what: &'static str,
    machine: String,
}

impl Explain for NoDisplay {
    fn kind(&self) -> ProblemKind {
        ProblemKind::Conflict
    }

    fn advice(&self) -> Option<String> {
        Some("create machines that need a display with 'headwater machine create --display vnc'".to_owned())
    }
}

/// A screenshot of the machine's display, as a PNG.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}/screenshot",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "The picture", content_type = "image/png", body = Vec<u8>),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "It has no display, or is off", body = Problem),
    ),
)]
pub(super) async fn screenshot_machine(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Response, Failure> {
    let record = service.record(&name).await?;
    must_have_display("take a screenshot", &record)?;
    let Some(active) = service.active(record.uuid) else {
        let state = record.state.name();
        return Err(LifecycleError::NotOn { what: "take a screenshot of", machine: name, state }.into());
    };
    let png = active.vm.screenshot().await;
    let png = png.map_err(LifecycleError::backend("take a screenshot of", &name))?;
    Ok(([(header::CONTENT_TYPE, "image/png")], png).into_response())
}

/// Fails for a machine without a display. `what` is the operation, for the error.
pub(super) fn must_have_display(what: &'static str, record: &MachineRecord) -> Result<(), Failure> {
    if record.platform.display == Display::None {
        return Err(NoDisplay { what, machine: record.name.clone() }.into());
    }
    Ok(())
}
