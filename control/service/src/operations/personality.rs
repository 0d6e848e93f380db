//! `GET` and `PATCH /api/v1/machines/{machine}/personality`, and the same of a catalog: strings that guests read.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use headwater_api::{Change, Personality, Problem, SetPersonality};
use headwater_db::{DbError, MachineRecord};

use crate::Service;
use crate::answer::Failure;
use crate::caller::Caller;
use crate::catalogs::CatalogError;
use crate::cloud_catalogs::not_in_cloud;
use crate::extract::{Body, Name};
use crate::lifecycle::LifecycleError;

/// The name of the operation in messages.
const WHAT: &str = "give personality strings to";

/// The personality strings of a machine and of its catalog.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}/personality",
    security(("token" = ["viewer"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses((status = 200, body = Personality), (status = 404, description = "No such machine", body = Problem)),
)]
pub(super) async fn machine_personality(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<Personality>, Failure> {
    let record = service.record(&name).await?;
    Ok(Json(service.personality(&record).await?))
}

/// Changes the personality strings of a machine, which its guest reads from its next boot on.
#[utoipa::path(
    patch,
    path = "/api/v1/machines/{machine}/personality",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    request_body = SetPersonality,
    responses(
        (status = 200, body = Personality),
        (status = 400, description = "A name or value that is not possible, or too many strings", body = Problem),
        (status = 404, description = "No such machine, or no such string to remove", body = Problem),
        (status = 409, description = "The machine boots from the network", body = Problem),
    ),
)]
pub(super) async fn set_machine_personality(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<SetPersonality>,
) -> Result<Json<Personality>, Failure> {
    let handle = service.clone();
    let work = async move { set_of_machine(&handle, &caller, &name, &request).await };
    Ok(Json(service.to_the_end(work).await?))
}

/// The personality strings of a catalog, which the guests of all its machines read.
#[utoipa::path(
    get,
    path = "/api/v1/catalogs/{catalog}/personality",
    security(("token" = ["viewer"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    responses((status = 200, body = Personality), (status = 404, description = "No such catalog", body = Problem)),
)]
pub(super) async fn catalog_personality(
    State(service): State<Service>,
    Name(name): Name,
) -> Result<Json<Personality>, Failure> {
    service.catalog(&name).await?;
    let strings = service.db().read().await?.personality().of_catalog(&name).await?;
    Ok(Json(Personality { strings, of_catalog: BTreeMap::new() }))
}

/// Changes the personality strings of a catalog, which the guests of its machines read from their next boot on.
#[utoipa::path(
    patch,
    path = "/api/v1/catalogs/{catalog}/personality",
    security(("token" = ["admin"])),
    tag = "catalogs",
    params(("catalog" = String, Path, description = "Its name")),
    request_body = SetPersonality,
    responses(
        (status = 200, body = Personality),
        (status = 400, description = "A name or value that is not possible, or too many strings", body = Problem),
        (status = 404, description = "No such catalog, or no such string to remove", body = Problem),
    ),
)]
pub(super) async fn set_catalog_personality(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<SetPersonality>,
) -> Result<Json<Personality>, Failure> {
    let handle = service.clone();
    let work = async move { set_of_catalog(&handle, &caller, &name, &request).await };
    Ok(Json(service.to_the_end(work).await?))
}

async fn set_of_machine(
    service: &Service,
    caller: &Caller,
    name: &str,
    request: &SetPersonality,
) -> Result<Personality, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.machines().by_name(name).await?;
    let record = found.ok_or_else(|| LifecycleError::Unknown(name.to_owned()))?;
    Service::is_vm(WHAT, &record)?;
    Service::not_in_cloud(WHAT, &record)?;
    let before = repo.personality().of_machine(record.uuid).await?;
    let after = applied(request, &before, &format!("machine '{name}'"))?;
    repo.personality().set_of_machine(record.uuid, &after).await?;
    let of_catalog = match &record.catalog {
        Some(catalog) => repo.personality().of_catalog(catalog).await?,
        None => BTreeMap::new(),
    };
    let event = service.event(caller, format!("machine {name}"), "set", in_words(request));
    repo.events().append(event.changing(Change::between(&before, &after))).await?;
    repo.save().await?;
    Ok(Personality { strings: after, of_catalog })
}

async fn set_of_catalog(
    service: &Service,
    caller: &Caller,
    name: &str,
    request: &SetPersonality,
) -> Result<Personality, Failure> {
    let mut repo = service.db().write().await?;
    let found = repo.catalogs().by_name(name).await?;
    let record = found.ok_or_else(|| CatalogError::Unknown(name.to_owned()))?;
    not_in_cloud(&record, WHAT, "a personality string")?;
    let before = repo.personality().of_catalog(name).await?;
    let after = applied(request, &before, &format!("catalog '{name}'"))?;
    repo.personality().set_of_catalog(name, &after).await?;
    let event = service.event(caller, format!("catalog {name}"), "set", in_words(request));
    repo.events().append(event.changing(Change::between(&before, &after))).await?;
    repo.save().await?;
    Ok(Personality { strings: after, of_catalog: BTreeMap::new() })
}

fn applied(
    request: &SetPersonality,
    before: &BTreeMap<String, String>,
    whose: &str,
) -> Result<BTreeMap<String, String>, Failure> {
    let after = request.applied_to(before);
    after.map_err(|problem| Failure(problem.during(format!("cannot change the personality of {whose}"))))
}

/// The names that were changed. The event has their values.
fn in_words(request: &SetPersonality) -> String {
    let names: Vec<_> = request.set.keys().chain(&request.remove).map(String::as_str).collect();
    format!("personality: {}", names.join(", "))
}

impl Service {
    /// The personality strings of a machine and of its catalog.
    async fn personality(&self, record: &MachineRecord) -> Result<Personality, DbError> {
        let mut repo = self.db().read().await?;
        let of_catalog = match &record.catalog {
            Some(catalog) => repo.personality().of_catalog(catalog).await?,
            None => BTreeMap::new(),
        };
        Ok(Personality { strings: repo.personality().of_machine(record.uuid).await?, of_catalog })
    }

    /// The personality strings that the guest of a machine reads.
    pub(crate) async fn personality_of_guest(
        &self,
        record: &MachineRecord,
    ) -> Result<BTreeMap<String, String>, DbError> {
        let Personality { strings, of_catalog: mut all } = self.personality(record).await?;
        all.extend(strings);
        Ok(all)
    }
}
