//! `GET /api/v1/stats` and `GET /metrics`: all metrics.

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use headwater_api::metrics::{Sample, Stats};
use headwater_api::{MachineState, Problem, ProblemKind};
use headwater_db::MachineRecord;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::extract::Parameters;
use crate::lifecycle::Active;

/// The media type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Only the metrics of this machine. Without it, those of the host and of all its machines.
    machine: Option<String>,
}

/// All metrics of this host and of its machines that are on, or of one machine on any host. docs/metrics.md explains them.
#[utoipa::path(
    get,
    path = "/api/v1/stats",
    security(("token" = ["viewer", "scoped"])),
    tag = "daemon",
    params(Query),
    responses(
        (status = 200, body = Stats),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "The machine is off", body = Problem),
    ),
)]
pub(super) async fn get_stats(
    State(service): State<Service>,
    caller: Caller,
    Parameters(wanted): Parameters<Query>,
) -> Result<Json<Stats>, Failure> {
    let samples = match wanted.machine {
        None => {
            caller.must_have_everything().map_err(Failure)?;
            all(&service).await?
        }
        Some(name) => {
            let record = service.record(&name).await?;
            caller.must_have_machine(&record).map_err(Failure)?;
            if !service.is_own(&record) {
                return Ok(Json(service.stats_of_node(&record, &caller).await?));
            }
            let Some(active) = service.active(record.uuid) else {
                let message = format!("machine '{name}' has no metrics: it is {}", record.state);
                let problem = Problem::new(ProblemKind::Conflict, message);
                return Err(Failure(problem.advise(format!("start it: 'headwater machine start {name}'"))));
            };
            let alarm = u64::from(service.alarm_of(&record).is_some());
            let mut samples = vec![alarm_sample(&record, alarm)];
            samples.extend(of_machine(&record, &active));
            samples
        }
    };
    Ok(Json(Stats::new(service.now_ms(), samples)))
}

/// All metrics as text for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    security(("token" = ["metrics", "everything"])),
    tag = "daemon",
    responses((status = 200, description = "Prometheus' text format", body = String, content_type = "text/plain")),
)]
pub(super) async fn get_metrics(State(service): State<Service>) -> Result<Response, Failure> {
    let stats = Stats::new(service.now_ms(), all(&service).await?);
    Ok(([(header::CONTENT_TYPE, PROMETHEUS)], stats.to_prometheus()).into_response())
}

async fn all(service: &Service) -> Result<Vec<Sample>, Failure> {
    let machines = service.own_machines().await?;
    let mut samples = service.disks().metrics();
    let mut of_machines = 0;
    for machine in &machines {
        let alarm = u64::from(service.alarm_of(machine).is_some());
        of_machines += alarm;
        let active = service.active(machine.uuid);
        if active.is_some() || alarm > 0 {
            samples.push(alarm_sample(machine, alarm));
        }
        if let Some(active) = active {
            samples.extend(of_machine(machine, &active));
        }
    }
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    for state in MachineState::ALL {
        let n = count(machines.iter().filter(|machine| machine.state == state).count());
        samples.push(Sample::new("headwater_machines", n).with("state", state.name()));
    }
    let store = service.store_figures().await;
    let damage = service.damage().figures();
    let of_store = store.silence.is_some() || service.images().servers_gone().is_some();
    let alarms = [("machine", of_machines), ("image", damage.alarms), ("store", u64::from(of_store))];
    samples.extend(alarms.map(|(kind, count)| Sample::new("headwater_alarms", count).with("kind", kind)));
    samples.extend([
        Sample::new("headwater_build_info", 1).with("version", env!("CARGO_PKG_VERSION")),
        Sample::real("headwater_start_time_seconds", service.started_at_ms() as f64 / 1e3),
        Sample::new("headwater_damaged_versions", damage.versions),
        Sample::new("headwater_damaged_chunks", damage.chunks),
        Sample::new("headwater_free_bytes", super::get_status::free_bytes(service.data_dir())?),
    ]);
    samples.push(Sample::new("headwater_store_answers", u64::from(store.silence.is_none())));
    samples.extend(store.images.map(|images| Sample::new("headwater_images", images)));
    samples.extend(store.bytes.map(|bytes| Sample::new("headwater_store_bytes", bytes)));
    samples.extend(store.age.map(|age| Sample::real("headwater_store_age_seconds", age.as_secs_f64())));
    Ok(samples)
}

fn alarm_sample(machine: &MachineRecord, alarm: u64) -> Sample {
    Sample::new("headwater_machine_alarm", alarm).with("machine", machine.name.clone())
}

fn of_machine(machine: &MachineRecord, active: &Active) -> Vec<Sample> {
    let mut samples = active.disk.metrics();
    if let Some(boot_ms) = machine.boot_ms {
        samples.push(Sample::real("headwater_boot_seconds", boot_ms as f64 / 1e3));
    }
    if let Some(boot_bytes) = active.boot_bytes() {
        samples.push(Sample::new("headwater_boot_bytes", boot_bytes));
    }
    samples.into_iter().map(|sample| sample.with("machine", machine.name.clone())).collect()
}
