//! `GET /api/v1/status`: the daemon and its host.

use std::collections::HashSet;

use axum::Json;
use axum::extract::State;
use headwater_api::{Alarm, DiskCounters, Filter, MachineSort, Problem, Status};
use headwater_db::{DbError, Repository};
use uuid::Uuid;

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::BackendError;
use crate::caller::Caller;

/// The state of the daemon, its store and its machines. A caller with scopes sees only the sums and alarms of machines and
/// images within them, and
/// no number of images.
#[utoipa::path(
    get,
    path = "/api/v1/status",
    security(("token" = ["viewer", "scoped"])),
    tag = "daemon",
    responses((status = 200, body = Status), (status = 500, description = "Database or store failed", body = Problem)),
)]
pub(super) async fn get_status(
    State(service): State<Service>,
    caller: Caller,
) -> Result<Json<Status>, Failure> {
    let mut repo = service.db().read().await?;
    let scopes = caller.scopes.as_ref();
    let machines = repo.machines().count(&Filter::default().within(scopes)).await?;
    let are_on = Filter::parse("is:on").map_err(Failure)?.within(scopes);
    let machines_active = repo.machines().count(&are_on).await?;
    let mut of_machines = service.alarms_of_machines(&mut *repo).await?;
    let own = own_machines(&caller, &mut *repo).await?;
    drop(repo);
    let is_own = |uuid: &Uuid| own.as_ref().is_none_or(|own| own.ids.contains(uuid));
    of_machines.retain(|alarm| own.as_ref().is_none_or(|own| own.subjects.contains(&alarm.subject)));
    let counters: Vec<DiskCounters> = {
        let active = service.active_map();
        active.iter().filter(|(uuid, _)| is_own(uuid)).map(|(_, active)| active.counters()).collect()
    };
    let store = service.store_figures().await;
    let of_images = match scopes {
        Some(_) => service.damage().alarms_to_scoped(),
        None => service.damage().alarms(),
    };
    let of_images = of_images.into_iter().filter(|alarm| is_of_own_image(&caller, alarm));
    let of_store = service.store_alarm(&store).or_else(|| service.servers_alarm());
    let alarms = of_store.into_iter().chain(of_images).chain(of_machines).collect();
    let hypervisor = match service.hypervisor().describe().await {
        Ok(text) => text,
        Err(e) => problem(&e).to_string(),
    };
    let (tasks_running, tasks_waiting) = service.task_counts();
    let reachable = service.web().reachable();
    Ok(Json(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        data_dir: service.data_dir().display().to_string(),
        started_at_ms: service.started_at_ms(),
        api_url: reachable.api,
        console_url: reachable.console,
        fingerprint: reachable.fingerprint,
        images: store.images.filter(|_| caller.scopes.is_none()),
        store_bytes: store.bytes,
        store_age_ms: store.age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        store_read_only: service.images().is_read_only(),
        boots_unrecorded: service.images().boots_unrecorded(),
        store_outdated: store.outdated,
        machines,
        machines_active,
        tasks_running,
        tasks_waiting,
        alarms,
        ram_used_bytes: counters.iter().map(|disk| disk.ram_used_bytes).sum(),
        host_ram: service.disks().host_ram(),
        disk_used_bytes: counters.iter().map(|disk| disk.disk_used_bytes).sum(),
        free_bytes: free_bytes(service.data_dir())?,
        hypervisor,
    }))
}

/// The machines within a caller's scopes.
struct OwnMachines {
    ids: HashSet<Uuid>,
    /// The machines as subjects of alarms.
    subjects: HashSet<String>,
}

/// The machines that a caller sees. `None`: all.
async fn own_machines(caller: &Caller, repo: &mut dyn Repository) -> Result<Option<OwnMachines>, DbError> {
    if caller.scopes.is_none() {
        return Ok(None);
    }
    let own = Filter::default().within(caller.scopes.as_ref());
    let machines = repo.machines().page(&own, MachineSort::Name, None, u32::MAX).await?;
    let subjects = machines.iter().map(|machine| format!("machine {}", machine.name)).collect();
    Ok(Some(OwnMachines { ids: machines.iter().map(|machine| machine.uuid).collect(), subjects }))
}

/// Whether a caller sees the alarm of an image. The alarm that stands for all further images is for callers without scopes.
fn is_of_own_image(caller: &Caller, alarm: &Alarm) -> bool {
    match alarm.subject.strip_prefix("image ") {
        Some(image) => caller.must_have_image(image).is_ok(),
        None => caller.scopes.is_none(),
    }
}

pub(crate) fn free_bytes(path: &std::path::Path) -> Result<u64, BackendError> {
    let told = rustix::fs::statvfs(path).map_err(|e| {
        BackendError::from_io(format!("cannot read the free space of {}", path.display()), e.into())
    })?;
    Ok(told.f_bavail.saturating_mul(told.f_frsize))
}
