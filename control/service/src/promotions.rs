//! Carrying out promotions whose time has come.

use headwater_api::{Channel, ImageVersion, Problem, ProblemKind};

use crate::Service;
use crate::answer::problem;
use crate::backend::{Promoted, Promotion};
use crate::extract::Actor;

impl Service {
    /// Carries out the promotions whose time has come, by the clock as it is now: one whose time passed while
    /// no daemon ran is made up for, and a clock that is set back undoes nothing.
    pub(crate) async fn promote_due(&self) {
        let Promoted { done, failed } = match self.images().promote_due(self.now_ms()).await {
            Ok(promoted) => promoted,
            Err(e) => Promoted { done: Vec::new(), failed: vec![e] },
        };
        for e in failed {
            tracing::error!("cannot carry out the promotions that are due: {}", problem(&e));
        }
        for (promotion, before) in done {
            let detail = format!("{}, as {} asked", moved(&promotion, before), promotion.author);
            self.image_changed(&Actor::daemon(), &promotion.image, "promoted", detail).await;
        }
    }
}

impl Service {
    /// Frees what removals had to leave, once nobody uses it.
    pub(crate) async fn reclaim_due(&self) {
        match self.images().reclaim_due(self.now_ms()).await {
            Ok(0) => {}
            Ok(bytes) => {
                tracing::info!(bytes, "removed versions are not in use any more, and their space is free")
            }
            Err(e) => tracing::warn!("cannot free the space of removed versions now: {}", problem(&e)),
        }
    }

    /// Notes a change of an image that was made in the store, which a history that cannot be written does not undo.
    pub(crate) async fn image_changed(
        &self,
        actor: &Actor,
        image: &str,
        action: &'static str,
        detail: String,
    ) {
        tracing::info!(image, actor = %actor.0, action, "{detail}");
        self.store_changed();
        self.note(self.event(actor, format!("image {image}"), action, detail)).await;
    }
}

/// What a promotion did, in words.
pub(crate) fn moved(promotion: &Promotion, before: Option<u64>) -> String {
    let Promotion { channel, version, .. } = promotion;
    match before {
        Some(before) if before == *version => format!("{channel} stays at version {version}"),
        Some(before) => format!("{channel} from version {before} to {version}"),
        None => format!("{channel} to version {version}"),
    }
}

/// The version that a reference must name by number or hash: what a channel means may change meanwhile.
pub(crate) async fn named_version(service: &Service, text: &str) -> Result<ImageVersion, Problem> {
    let reference = headwater_api::name::ImageRef::parse(text)?;
    if reference.version.is_none() {
        let message = format!("'{text}' does not say which version");
        return Err(Problem::new(ProblemKind::Invalid, message).advise("write IMAGE@NUMBER or IMAGE@HASH"));
    }
    service.images().resolve(&reference).await.map_err(|e| problem(&e))
}

/// The image that a reference names, which must not name a version.
pub(crate) fn named_image(text: &str) -> Result<String, Problem> {
    let reference = headwater_api::name::ImageRef::parse(text)?;
    if reference.version.is_some() || reference.channel.is_some() {
        let message = format!("'{text}' names a version, and the whole image is meant");
        return Err(Problem::new(ProblemKind::Invalid, message).advise("write IMAGE"));
    }
    Ok(reference.image)
}

/// Refuses the channel that nobody sets.
pub(crate) fn can_be_set(channel: Channel) -> Result<(), Problem> {
    if channel != Channel::Maintenance {
        return Ok(());
    }
    let message = "channel maintenance is always the newest version and cannot be set";
    Err(Problem::new(ProblemKind::Invalid, message).advise("promote to test or production"))
}
