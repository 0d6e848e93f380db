//! `DELETE /api/v1/images/{image}/promotion?channel=`: cancel a scheduled promotion.

use axum::Json;
use axum::extract::State;
use headwater_api::words::time;
use headwater_api::{Change, Channel, ChannelPointer, Problem};
use serde::Deserialize;
use serde_json::json;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::backend::Promotion;
use crate::caller::Caller;
use crate::extract::{Name, Parameters};
use crate::promotions::{channel_fields, named_image, pointer};

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// The channel of the promotion.
    channel: Channel,
}

/// Cancels the scheduled promotion of a channel.
#[utoipa::path(
    delete,
    path = "/api/v1/images/{image}/promotion",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE`"), Query),
    responses(
        (status = 200, description = "The cancelled promotion", body = ChannelPointer),
        (status = 404, description = "No such image, or no promotion of the channel is scheduled", body = Problem),
    ),
)]
pub(super) async fn cancel_promotion(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Parameters(which): Parameters<Query>,
) -> Result<Json<ChannelPointer>, Failure> {
    let image = named_image(&name).map_err(Failure)?;
    let handle = service.clone();
    let work = async move {
        let cancelled = handle.images().cancel_promotion(&image, which.channel).await;
        let tried = ("cancellation tried", which.channel.name());
        let promotion = handle.or_tried(&caller, &image, tried, cancelled).await?;
        let Promotion { channel, version, at_ms, .. } = &promotion;
        let detail = format!("{channel} to version {version} at {}", time(*at_ms));
        let change = Change::between(&channel_fields(*channel, None, Some(&promotion)), &json!({}));
        handle.image_settings_changed(&caller, &image, "promotion cancelled", detail, change).await;
        Ok(Json(pointer(promotion)))
    };
    service.to_the_end(work).await
}
