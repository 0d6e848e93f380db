//! `PATCH /api/v1/catalogs/{catalog}`: what a catalog's machines boot, their settings, how many are ready, and what a seal removes in their
//! guests.

use axum::Json;
use axum::extract::State;
use headwater_api::name::ImageRef;
use headwater_api::{
    Catalog, Change, DEFAULT_STOP_IDLE_S, Hours, OnHostLoss, Problem, ProblemKind, ROTATE_AFTER_S,
    SchemeSettings, SetCatalog, SetScheme, check_seal_removes,
};
use headwater_db::{CatalogRecord, PoolRecord};
use serde_json::json;

use crate::Service;
use crate::answer::{Failure, problem};
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::catalogs::{CatalogError, check_on_host_loss};
use crate::claims::check_pool;
use crate::clock_hours;
use crate::cloud_catalogs::{OTHER_SETTINGS, check_image, not_in_cloud};
use crate::extract::{Body, Name};
use crate::operations::catalog_scheme;
use crate::retention::{ReferenceKind, Referrer};

/// Changes what the machines of a catalog boot from their next boot on: another channel, version or image. Changes their settings (a new version
/// of its scheme) from their next start by the controller on. Changes also how many machines are kept ready to be claimed, and what a seal removes in their guests.
#[utoipa::path(
    patch,
    path = "/api/v1/catalogs/{catalog}",
    security(("token" = ["admin"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = SetCatalog,
    responses(
        (status = 200, body = Catalog),
        (status = 400, description = "The request is invalid: `image` is not an image reference, `seal_removes` has an invalid path, a time is out of range, `ready_hours` and `ready_always` are both given, the scheme is invalid, machines with persistent disks cannot be kept ready or be restarted on another host, or the request changes nothing", body = Problem),
        (status = 404, description = "No such catalog, image or version", body = Problem),
        (status = 409, description = "It is pinned to a version of another image", body = Problem),
    ),
)]
pub(super) async fn set_catalog(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<SetCatalog>,
) -> Result<Json<Catalog>, Failure> {
    let SetCatalog {
        image,
        scheme,
        keep_ready,
        ready_hours,
        ready_always,
        stop_idle_s,
        seal_removes,
        on_host_loss,
        rotate_after_s,
    } = request;
    if let Some(image) = &image {
        caller.must_have_image(image).map_err(Failure)?;
    }
    if ready_always && ready_hours.is_some() {
        let both = "'ready_hours' and 'ready_always' contradict each other: give one of them";
        return Err(Failure(Problem::new(ProblemKind::Invalid, both)));
    }
    let ready_hours = ready_hours.map(clock_hours::with_zone).transpose().map_err(Failure)?;
    let pool = SetPool { keep_ready, ready_hours, ready_always, stop_idle_s };
    let scheme = scheme.filter(|scheme| *scheme != SetScheme::default());
    let is_other_set =
        scheme.is_some() || seal_removes.is_some() || on_host_loss.is_some() || rotate_after_s.is_some();
    if image.is_none() && pool == SetPool::default() && !is_other_set {
        let nothing = "no change of the catalog was given: give 'image', 'scheme', 'keep_ready', 'ready_hours', 'ready_always', \
                       'stop_idle_s', 'seal_removes', 'on_host_loss' or 'rotate_after_s'";
        return Err(Failure(Problem::new(ProblemKind::Invalid, nothing.to_owned())));
    }
    let reference = image.as_deref().map(ImageRef::parse).transpose().map_err(Failure)?;
    check_seal_removes(seal_removes.as_deref().unwrap_or_default()).map_err(Failure)?;
    check_rotation(rotate_after_s).map_err(Failure)?;
    let mut record = service.catalog(&name).await?;
    if is_other_set || pool != SetPool::default() {
        not_in_cloud(&record, "change", OTHER_SETTINGS)?;
    }
    check_pool(&pool.of(&record), &record.cache)?;
    check_on_host_loss(&name, on_host_loss.unwrap_or_default(), &record.cache)?;
    if let Some(scheme) = &scheme {
        catalog_scheme::check(&service, &caller, &record, &scheme.of(&record.settings())).await?;
    }
    if let (Some(reference), Some(image)) = (reference, image) {
        service.is_not_busy(&name).await?;
        check_image(&service, &record, &reference).await?;
        let (handle, caller, name) = (service.clone(), caller.clone(), name.clone());
        let work = async move { set_image(&handle, &caller, name, reference, image).await };
        record = service.to_the_end(work).await?;
    }
    if let Some(scheme) = scheme {
        let (handle, caller, name) = (service.clone(), caller.clone(), name.clone());
        let change = move |before: &SchemeSettings| scheme.of(before);
        let work = async move { catalog_scheme::set_scheme(&handle, &caller, name, change, "").await };
        record = service.to_the_end(work).await?;
    }
    if pool != SetPool::default() {
        let (handle, caller, name) = (service.clone(), caller.clone(), name.clone());
        let work = async move { set_pool(&handle, &caller, name, pool).await };
        record = service.to_the_end(work).await?;
    }
    if let Some(paths) = seal_removes {
        let (handle, caller, name) = (service.clone(), caller.clone(), name.clone());
        let work = async move { set_seal_removes(&handle, &caller, &name, &paths).await };
        record = service.to_the_end(work).await?;
    }
    if let Some(after_s) = rotate_after_s {
        let (handle, caller, name) = (service.clone(), caller.clone(), name.clone());
        let work = async move { set_rotation(&handle, &caller, &name, after_s).await };
        record = service.to_the_end(work).await?;
    }
    if let Some(on_host_loss) = on_host_loss {
        let handle = service.clone();
        let work = async move { set_on_host_loss(&handle, &caller, &name, on_host_loss).await };
        record = service.to_the_end(work).await?;
    }
    Ok(Json(service.changed_catalog_view(record).await))
}

/// How many machines of a catalog are kept ready now, and when.
pub(super) fn pool_as_it_is(record: &CatalogRecord) -> PoolRecord {
    SetPool::default().of(record)
}

/// A change of how many machines are kept ready, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SetPool {
    keep_ready: Option<u32>,
    ready_hours: Option<Hours>,
    ready_always: bool,
    stop_idle_s: Option<u64>,
}

impl SetPool {
    /// The record after this change.
    fn of(&self, record: &CatalogRecord) -> PoolRecord {
        let ready_hours = match self.ready_always {
            true => None,
            false => self.ready_hours.clone().or_else(|| record.ready_hours.clone()),
        };
        // Without a time after which machines are switched off, hours would only ever switch machines on.
        let is_first = record.ready_hours.is_none() && record.stop_idle_s == 0 && ready_hours.is_some();
        let usual = if is_first { DEFAULT_STOP_IDLE_S } else { record.stop_idle_s };
        PoolRecord {
            catalog: record.name.clone(),
            keep_ready: self.keep_ready.unwrap_or(record.keep_ready),
            ready_hours,
            stop_idle_s: self.stop_idle_s.unwrap_or(usual),
        }
    }
}

async fn set_pool(
    service: &Service,
    caller: &Caller,
    name: String,
    change: SetPool,
) -> Result<CatalogRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(&name).await?;
    let mut record = found.ok_or_else(|| CatalogError::Unknown(name.clone()))?;
    let before = SetPool::default().of(&record);
    let pool = change.of(&record);
    repo.catalogs().set_pool(&pool).await?;
    let words = |pool: &PoolRecord| {
        let hours = pool.ready_hours.as_ref().map_or_else(|| "always".to_owned(), ToString::to_string);
        format!("{} kept ready {hours}, stop idle {} s", pool.keep_ready, pool.stop_idle_s)
    };
    let detail = format!("{} -> {}", words(&before), words(&pool));
    let fields = |PoolRecord { catalog: _, keep_ready, ready_hours, stop_idle_s }: &PoolRecord| json!({ "keep_ready": keep_ready, "ready_hours": ready_hours, "stop_idle_s": stop_idle_s });
    let event = service.event(caller, format!("catalog {name}"), "set", detail);
    repo.events().append(event.changing(Change::between(&fields(&before), &fields(&pool)))).await?;
    repo.save().await?;
    record.keep_ready = pool.keep_ready;
    record.ready_hours = pool.ready_hours;
    record.stop_idle_s = pool.stop_idle_s;
    Ok(record)
}

/// Refuses an age of keys that cannot be meant.
fn check_rotation(after_s: Option<u64>) -> Result<(), Problem> {
    let Some(after_s) = after_s.filter(|after_s| *after_s != 0 && !ROTATE_AFTER_S.contains(after_s)) else {
        return Ok(());
    };
    let why = format!("SSH host keys cannot be replaced after {after_s} s");
    Err(Problem::new(ProblemKind::Invalid, why).advise("give an hour to ten years, or 0 for never"))
}

async fn set_rotation(
    service: &Service,
    caller: &Caller,
    name: &str,
    after_s: u64,
) -> Result<CatalogRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(name).await?;
    let record = found.ok_or_else(|| CatalogError::Unknown(name.to_owned()))?;
    let all = repo.keys().rotate_after().await?;
    let before = all.into_iter().find(|(catalog, _)| catalog == name).map_or(0, |(_, after_s)| after_s);
    repo.keys().set_rotate_after(name, after_s).await?;
    let detail = match after_s {
        0 => "its machines keep their SSH host keys".to_owned(),
        after_s => format!("its machines get other SSH host keys after {after_s} s"),
    };
    let event = service.event(caller, format!("catalog {name}"), "set", detail);
    repo.events().append(event.changing(Change::of("rotate_after_s", before, after_s))).await?;
    repo.save().await?;
    Ok(record)
}

async fn set_on_host_loss(
    service: &Service,
    caller: &Caller,
    name: &str,
    on_host_loss: OnHostLoss,
) -> Result<CatalogRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(name).await?;
    let mut record = found.ok_or_else(|| CatalogError::Unknown(name.to_owned()))?;
    repo.catalogs().set_on_host_loss(name, on_host_loss).await?;
    let detail = format!("when their host is lost, its machines {}", on_host_loss.name());
    let event = service.event(caller, format!("catalog {name}"), "set", detail);
    let change = Change::of("on_host_loss", record.on_host_loss.name(), on_host_loss.name());
    repo.events().append(event.changing(change)).await?;
    repo.save().await?;
    record.on_host_loss = on_host_loss;
    // Nodes must know which machines they end.
    service.boots_changed();
    Ok(record)
}

async fn set_seal_removes(
    service: &Service,
    caller: &Caller,
    name: &str,
    paths: &[String],
) -> Result<CatalogRecord, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(name).await?;
    let mut record = found.ok_or_else(|| CatalogError::Unknown(name.to_owned()))?;
    repo.catalogs().set_seal_removes(name, paths).await?;
    let what = if paths.is_empty() { "nothing else".to_owned() } else { paths.join(", ") };
    let detail = format!("a seal also removes {what}");
    let event = service.event(caller, format!("catalog {name}"), "set", detail);
    let change = Change::of("seal_removes", record.seal_removes, paths);
    repo.events().append(event.changing(change)).await?;
    repo.save().await?;
    record.seal_removes = paths.to_vec();
    Ok(record)
}

async fn set_image(
    service: &Service,
    caller: &Caller,
    name: String,
    reference: ImageRef,
    image: String,
) -> Result<CatalogRecord, Failure> {
    let _using = service.using_versions().await;
    let lacking = |e: BackendError| {
        Failure(problem(&e).during(format!("cannot set image '{image}' as the image of catalog '{name}'")))
    };
    let version = service.images().resolve(&reference).await.map_err(lacking)?;
    let held =
        service.retain_named(Referrer::Catalog(&name), ReferenceKind::Image, &reference, &version).await;
    held.map_err(lacking)?;
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(&name).await?;
    let mut record = found.ok_or_else(|| CatalogError::Unknown(name.clone()))?;
    if let Some(pin) = &record.pin
        && ImageRef::parse(pin).is_ok_and(|pin| pin.image != reference.image)
    {
        let (catalog, pin) = (name, pin.clone());
        return Err(CatalogError::Pinned { catalog, pin, image: reference.image }.into());
    }
    repo.catalogs().set_image(&name, &image).await?;
    let detail = format!("{} -> {image}", record.image);
    let event = service.event(caller, format!("catalog {name}"), "set", detail);
    repo.events().append(event.changing(Change::of("image", record.image, &*image))).await?;
    repo.save().await?;
    service.roots_changed();
    record.image = image;
    Ok(record)
}
