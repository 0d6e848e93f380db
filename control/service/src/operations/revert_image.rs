//! `POST /api/v1/images/{image}/revert`: revert the last promotion of a channel.

use axum::Json;
use axum::extract::State;
use headwater_api::{Change, ChannelRequest, Problem, Reverted};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::{can_be_set, named_image};

/// Points a channel to the version before its last promotion; repeated calls go further back. Versions that were removed or
/// retired since are skipped. If there was no earlier promotion, the channel is unset.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/revert",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`")),
    request_body = ChannelRequest,
    responses(
        (status = 200, description = "The new position of the channel", body = Reverted),
        (status = 400, description = "There is no earlier position", body = Problem),
        (status = 404, description = "No such image, or the channel is not set", body = Problem),
    ),
)]
pub(super) async fn revert_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<ChannelRequest>,
) -> Result<Json<Reverted>, Failure> {
    let image = named_image(&name).map_err(Failure)?;
    let channel = request.channel;
    can_be_set(channel).map_err(Failure)?;
    let handle = service.clone();
    let work = async move {
        let reverted = handle.images().revert(&image, channel).await;
        let (from, to) = handle.or_tried(&caller, &image, ("revert tried", channel.name()), reverted).await?;
        let back = to.map_or_else(|| "not being set".to_owned(), |to| to.to_string());
        let detail = format!("{channel} from version {from} back to {back}");
        let change = Change::of(channel.name(), from, to);
        handle.image_settings_changed(&caller, &image, "reverted", detail, change).await;
        Ok(Json(Reverted { channel, version: to, at_ms: handle.now_ms(), author: caller.principal }))
    };
    service.to_the_end(work).await
}
