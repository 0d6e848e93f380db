//! `GET /api/v1/machines/{machine}/users`: how many users are logged in to a guest.

use axum::Json;
use axum::extract::State;
use headwater_api::{GuestUsers, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::extract::Name;
use crate::lifecycle::LifecycleError;

/// The number of users who are logged in, as the guest agent says. A roll that waits for users asks this.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}/users",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = GuestUsers),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "The machine is off", body = Problem),
        (status = 500, description = "The guest agent does not answer", body = Problem),
    ),
)]
pub(super) async fn count_users(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<GuestUsers>, Failure> {
    const WHAT: &str = "ask who is logged in to";

    let (_, active) = service.on(WHAT, &name).await?;
    let users = active.vm.users().await.map_err(LifecycleError::backend(WHAT, &name))?;
    Ok(Json(GuestUsers { users: u64::try_from(users).unwrap_or(u64::MAX) }))
}
