//! Makes scheduled promotions when they are due, and records changes of images in the history.

use headwater_api::words::time;
use headwater_api::{Change, Channel, ChannelPointer, ImageVersion, Problem, ProblemKind};
use serde_json::{Map, Value, json};

use crate::Service;
use crate::answer::problem;
use crate::backend::{BackendError, Promoted, Promotion};
use crate::caller::Caller;

impl Service {
    /// Makes the promotions that are due by the present clock. A promotion whose time passed while
    /// no daemon ran is made now; if the clock is set back, nothing is undone.
    pub(crate) async fn promote_due(&self) {
        let Promoted { done, failed } = match self.images().promote_due(self.now_ms()).await {
            Ok(promoted) => promoted,
            Err(e) => {
                tracing::error!("cannot make the scheduled promotions that are due: {}", problem(&e));
                return;
            }
        };
        let daemon = Caller::daemon();
        for (image, e) in failed {
            tracing::error!(image, "cannot make the scheduled promotions that are due: {}", problem(&e));
            if e.is_unknown() {
                self.image_change_tried(&daemon, &image, ("promotion tried", "what was due"), &e).await;
            }
        }
        for (promotion, before) in done {
            let detail = format!("{}, as {} asked", moved(&promotion, before), promotion.author);
            let change = Change::of(promotion.channel.name(), before, promotion.version);
            self.image_settings_changed(&daemon, &promotion.image, "promoted", detail, change).await;
        }
    }
}

impl Service {
    /// Frees the data of removed versions that was in use when they were removed, and is not any more.
    pub(crate) async fn reclaim_due(&self) {
        match self.images().reclaim_due(self.now_ms()).await {
            Ok(0) => {}
            Ok(bytes) => {
                tracing::info!(bytes, "freed the space of removed versions, which are not in use any more")
            }
            Err(e) => tracing::warn!("cannot free the space of removed versions now: {}", problem(&e)),
        }
    }

    /// Writes an event about a change that was made in the store. If the history cannot be written now, the event waits.
    pub(crate) async fn image_changed(
        &self,
        caller: &Caller,
        image: &str,
        action: &'static str,
        detail: String,
    ) {
        self.image_settings_changed(caller, image, action, detail, None).await;
    }

    /// The same for a change of settings.
    pub(crate) async fn image_settings_changed(
        &self,
        caller: &Caller,
        image: &str,
        action: &'static str,
        detail: String,
        change: Option<Change>,
    ) {
        tracing::info!(image, caller = %caller.principal, action, "{detail}");
        self.store_changed();
        let event = self.event(caller, format!("image {image}"), action, detail);
        self.note(event.changing(change)).await;
    }

    /// The result of a change of an image in the store. If the answer was lost, an event says that the change was tried.
    pub(crate) async fn or_tried<T>(
        &self,
        caller: &Caller,
        image: &str,
        tried: (&'static str, &str),
        outcome: Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        if let Err(e) = &outcome
            && e.is_unknown()
        {
            self.image_change_tried(caller, image, tried, e).await;
        }
        outcome
    }

    /// Writes an event about a change of an image that failed, and may have been made anyway.
    pub(crate) async fn image_change_tried(
        &self,
        caller: &Caller,
        image: &str,
        (action, what): (&'static str, &str),
        error: &BackendError,
    ) {
        let detail = format!("{what}; it may or may not have been done: {}", problem(error));
        self.image_changed(caller, image, action, detail).await;
    }
}

/// The effect of a promotion, in words.
pub(crate) fn moved(promotion: &Promotion, before: Option<u64>) -> String {
    let Promotion { channel, version, .. } = promotion;
    match before {
        Some(before) if before == *version => format!("{channel} stays at version {version}"),
        Some(before) => format!("{channel} from version {before} to {version}"),
        None => format!("{channel} to version {version}"),
    }
}

/// A promotion, as clients see it.
pub(crate) fn pointer(promotion: Promotion) -> ChannelPointer {
    let Promotion { channel, version, at_ms, author, image: _ } = promotion;
    ChannelPointer { channel, version, at_ms, author }
}

/// The fields of a channel in the change of an event: the version to which the channel points, and its scheduled promotion.
pub(crate) fn channel_fields(channel: Channel, version: Option<u64>, scheduled: Option<&Promotion>) -> Value {
    let mut fields = Map::new();
    if let Some(version) = version {
        fields.insert(channel.name().to_owned(), version.into());
    }
    if let Some(Promotion { version, at_ms, .. }) = scheduled {
        fields.insert(format!("scheduled_{channel}"), json!({ "version": version, "at_ms": at_ms }));
    }
    Value::Object(fields)
}

/// The scheduled promotion that a promotion replaced, in words.
pub(crate) fn cancelled_promotion(forgets: Option<&Promotion>) -> String {
    let told = |Promotion { version, at_ms, .. }: &Promotion| {
        format!("; cancels the promotion to version {version} at {}", time(*at_ms))
    };
    forgets.map(told).unwrap_or_default()
}

/// The version that a reference names by number or hash. Channels are refused, because what they point to may change
/// meanwhile.
pub(crate) async fn named_version(service: &Service, text: &str) -> Result<ImageVersion, Problem> {
    let reference = headwater_api::name::ImageRef::parse(text)?;
    if reference.version.is_none() {
        let message = format!("'{text}' does not say which version");
        return Err(Problem::new(ProblemKind::Invalid, message).advise("write IMAGE@NUMBER or IMAGE@HASH"));
    }
    service.images().resolve(&reference).await.map_err(|e| problem(&e))
}

/// The version to promote, named by number or hash. If several numbers have the same hash, the newest one that is not
/// retired is meant.
pub(crate) async fn version_to_promote(service: &Service, text: &str) -> Result<ImageVersion, Problem> {
    let version = named_version(service, text).await?;
    let is_number = |name: &str| name.parse() == Ok(version.number);
    if !version.retired || text.split_once('@').is_some_and(|(_, name)| is_number(name)) {
        return Ok(version);
    }
    let image = service.images().image(&version.image).await.map_err(|e| problem(&e))?;
    let versions = image.map(|image| image.versions).unwrap_or_default();
    let in_use = versions.into_iter().rev().find(|it| it.hash == version.hash && !it.retired);
    Ok(in_use.unwrap_or(version))
}

/// The image that a reference names, which must not name a version.
pub(crate) fn named_image(text: &str) -> Result<String, Problem> {
    let reference = headwater_api::name::ImageRef::parse(text)?;
    if reference.version.is_some() || reference.channel.is_some() {
        let message = format!("'{text}' names a version, but this operation applies to the whole image");
        return Err(Problem::new(ProblemKind::Invalid, message).advise("write IMAGE"));
    }
    Ok(reference.image)
}

/// Fails for the channel that cannot be set.
pub(crate) fn can_be_set(channel: Channel) -> Result<(), Problem> {
    if channel != Channel::Maintenance {
        return Ok(());
    }
    let message = "channel maintenance is always the newest version and cannot be set";
    Err(Problem::new(ProblemKind::Invalid, message).advise("promote to test or production"))
}
