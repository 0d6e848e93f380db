//! `POST /api/v1/images/{image}/note`: change the note of a version.

use axum::Json;
use axum::extract::State;
use headwater_api::{Change, ImageVersion, NoteRequest, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::promotions::named_version;

/// Changes the note of a version, which may be retired. An empty note removes it. The version's data, its hash and the
/// machines that run it do not change.
#[utoipa::path(
    post,
    path = "/api/v1/images/{image}/note",
    security(("token" = ["admin"])),
    tag = "images",
    params(("image" = String, Path, description = "`IMAGE@NUMBER` or `IMAGE@HASH`")),
    request_body = NoteRequest,
    responses(
        (status = 200, body = ImageVersion),
        (status = 400, description = "The reference names no version, or the note is too long", body = Problem),
        (status = 404, description = "No such image or version", body = Problem),
    ),
)]
pub(super) async fn note_image(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<NoteRequest>,
) -> Result<Json<ImageVersion>, Failure> {
    let mut version = named_version(&service, &name).await.map_err(Failure)?;
    let handle = service.clone();
    let work = async move {
        let NoteRequest { note } = request;
        let changed = handle.images().set_note(&version, &note).await;
        let what = format!("version {}, {}, to {}", version.number, version.hash, quoted(&note));
        let before = handle.or_tried(&caller, &version.image, ("note change tried", &what), changed).await?;
        // If the note was the same, nothing was changed, and the store has written nothing.
        if before != note {
            let (told_before, told_after) = (quoted(&before), quoted(&note));
            let detail =
                format!("version {}, {}, from {told_before} to {told_after}", version.number, version.hash);
            // No note is no value.
            let value = |note: &str| (!note.is_empty()).then(|| note.to_owned());
            let change = Change::of("note", value(&before), value(&note));
            let (caller, image) = (&caller, &version.image);
            handle.image_settings_changed(caller, image, "note changed", detail, change).await;
        }
        version.note = note;
        Ok(Json(version))
    };
    service.to_the_end(work).await
}

/// Quotes a note for a line of the history or the log, so that a line break in it does not begin another line.
fn quoted(note: &str) -> String {
    if note.is_empty() {
        return "none".to_owned();
    }
    let line: String = note.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("'{line}'")
}
