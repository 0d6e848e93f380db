//! `POST /api/v1/images/{image}/promotion`: point a channel to a version, now or later.

use axum::Json;
use axum::extract::State;
use headwater_api::words::time;
use headwater_api::{Change, Channel, Problem, ProblemKind, PromoteRequest, Promoted};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::Promotion;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::{
    can_be_set, cancelled_promotion, channel_fields, moved, pointer, version_to_promote,
};

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot promote '{name}' at {}: that time was {ago_s} s ago", time(*at_ms))]
    Past { name: String, at_ms: u64, ago_s: u64 },
    #[error(
        "cannot promote '{0}' to production: it is not generalised, so it may contain the private SSH host key of the machine from which it was made"
    )]
    KeepsIdentity(String),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Past { .. } => ProblemKind::Invalid,
            Self::KeepsIdentity(_) => ProblemKind::Conflict,
        }
    }

    fn advice(&self) -> Option<String> {
        let advice = match self {
            Self::Past { .. } => "leave the time out to promote it now",
            Self::KeepsIdentity(_) => {
                "'headwater image edit' and 'headwater image seal' make a generalised version; or use --force if everybody who reads the store may \
                 have that key"
            }
        };
        Some(advice.to_owned())
    }
}

/// Points a channel to a version, now or at a later time. Running machines do not change: they boot the version at their
/// next boot.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/promotion",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = PromoteRequest,
    responses(
        (status = 200, description = "The new position of the channel, and since or from when", body = Promoted),
        (status = 400, description = "Not a version, a channel that cannot be set, or a time in the past", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
        (status = 409, description = "The version is not generalised, and was to become production without `force`", body = Problem),
    ),
)]
pub(super) async fn promote_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<PromoteRequest>,
) -> Result<Json<Promoted>, Failure> {
    let handle = service.clone();
    service.to_the_end(async move { promote(&handle, caller, name, request).await }).await.map(Json)
}

async fn promote(
    service: &Service,
    caller: Caller,
    name: String,
    request: PromoteRequest,
) -> Result<Promoted, Failure> {
    can_be_set(request.channel).map_err(Failure)?;
    let version = version_to_promote(service, &name).await.map_err(Failure)?;
    if version.keeps_identity && request.channel == Channel::Production && !request.force {
        return Err(Error::KeepsIdentity(name).into());
    }
    let now_ms = service.now_ms();
    let at_ms = request.at_ms.unwrap_or(now_ms);
    if at_ms < now_ms {
        return Err(Error::Past { name, at_ms, ago_s: (now_ms - at_ms).div_ceil(1000) }.into());
    }
    // Rounded up to whole seconds, which the store keeps, so that it is never earlier than requested.
    let at_ms = at_ms.div_ceil(1000).saturating_mul(1000);
    let promotion = Promotion {
        image: version.image,
        version: version.number,
        channel: request.channel,
        at_ms,
        author: caller.principal.clone(),
    };
    let mut what = format!("{} to version {}", promotion.channel, promotion.version);
    let channel = promotion.channel;
    let (action, forgets, change) = if request.at_ms.is_some() {
        what.push_str(&format!(" at {}", time(at_ms)));
        let scheduled = service.images().schedule(&promotion).await;
        let forgets =
            service.or_tried(&caller, &promotion.image, ("promotion tried", &what), scheduled).await?;
        let before = channel_fields(channel, None, forgets.as_ref());
        let change = Change::between(&before, &channel_fields(channel, None, Some(&promotion)));
        ("promotion scheduled", forgets, change)
    } else {
        let promoted = service.images().promote(&promotion).await;
        let (before, forgets) =
            service.or_tried(&caller, &promotion.image, ("promotion tried", &what), promoted).await?;
        what = moved(&promotion, before);
        let before = channel_fields(channel, before, forgets.as_ref());
        let change = Change::between(&before, &channel_fields(channel, Some(promotion.version), None));
        ("promoted", forgets, change)
    };
    let detail = what + &cancelled_promotion(forgets.as_ref());
    service.image_settings_changed(&caller, &promotion.image, action, detail, change).await;
    let Promotion { channel, version, at_ms, author, .. } = promotion;
    Ok(Promoted { channel, version, at_ms, author, forgets: forgets.map(pointer) })
}
