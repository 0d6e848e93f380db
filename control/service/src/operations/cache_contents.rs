//! `GET /api/v1/machines/{machine}/cache/contents`: the report of what occupies a machine's write cache.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use headwater_api::{BootFrom, CacheContents, Problem};

use crate::Service;
use crate::answer::Failure;
use crate::backend::TaskControl;
use crate::caller::Caller;
use crate::extract::Name;
use crate::hints::hints;
use crate::lifecycle::{LifecycleError, OfflineDisk, ReadableDisk};

/// Cancels a scan whose client has disconnected.
struct CancelOnDrop(Arc<TaskControl>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Reports what occupies a machine's write cache: scans the file systems on a snapshot of its disk while the machine runs.
/// File names
/// are private, so each scan is recorded in the history. If the machine is off, only a persistent disk can be scanned.
/// Sealing or
/// reading the disk ends the scan.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}/cache/contents",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = CacheContents),
        (status = 404, description = "No such machine", body = Problem),
        (
            status = 409,
            description = "The machine is off and has no persistent disk; or its disk is being sealed, or read by an NBD client; or another scan runs on this host; or the scan was ended by a seal, an NBD client, a stop of the machine, or lack of space",
            body = Problem,
        ),
    ),
)]
pub(super) async fn cache_contents(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<Json<CacheContents>, Failure> {
    const WHAT: &str = "scan the write cache of";
    let record = service.record(&name).await?;
    let not_on = || {
        let (machine, state) = (name.clone(), record.state.name());
        LifecycleError::NotOn { what: WHAT, machine, state }
    };
    if record.boot == BootFrom::Network {
        return Err(LifecycleError::Target { what: WHAT, machine: name }.into());
    }
    let control = CancelOnDrop(Arc::new(TaskControl::new(service.stopping_flag())));
    let at_ms = service.now_ms();
    let note = || service.note(service.event(&caller, format!("machine {name}"), "cache scanned", ""));
    let scanned = match service.active(record.uuid) {
        Some(active) => {
            note().await;
            active.disk.contents(Arc::clone(&control.0)).await
        }
        None => match service.readable_disk(&name).await? {
            Some(ReadableDisk { disk: OfflineDisk::PersistentDiskRef(request), .. }) => {
                note().await;
                service.disks().persistent_contents(*request, Arc::clone(&control.0)).await
            }
            _ => return Err(not_on().into()),
        },
    };
    let mut contents = scanned.map_err(LifecycleError::backend(WHAT, &name))?;
    contents.hints = hints(&contents, &name, service.active(record.uuid).is_some());
    (contents.machine, contents.at_ms) = (name, at_ms);
    Ok(Json(contents))
}
