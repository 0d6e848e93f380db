//! `GET /api/v1/status`: the daemon and its host.

use axum::Json;
use axum::extract::State;
use headwater_api::{DiskCounters, Filter, Problem, Status};

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::BackendError;

/// What the daemon, its store and its machines do, in one object.
#[utoipa::path(
    get,
    path = "/api/v1/status",
    security(("token" = ["viewer"])),
    tag = "daemon",
    responses((status = 200, body = Status), (status = 500, description = "Database or store failed", body = Problem)),
)]
pub(super) async fn get_status(State(service): State<Service>) -> Result<Json<Status>, Failure> {
    let mut repo = service.db().read().await?;
    let machines = repo.machines().count(&Filter::default()).await?;
    let machines_active = repo.machines().count(&Filter::parse("is:on").map_err(Failure)?).await?;
    let of_machines = service.alarms_of_machines(&mut *repo).await?;
    drop(repo);
    let counters: Vec<DiskCounters> = service.active_map().values().map(|active| active.counters()).collect();
    let store = service.store_figures().await;
    let of_images = service.damage().alarms();
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
        images: store.images,
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

pub(super) fn free_bytes(path: &std::path::Path) -> Result<u64, BackendError> {
    let told = rustix::fs::statvfs(path).map_err(|e| {
        BackendError::from_io(format!("cannot ask for the free space of {}", path.display()), e.into())
    })?;
    Ok(told.f_bavail.saturating_mul(told.f_frsize))
}
