//! Implements the service's trait [`CloudMachines`] with `headwater_azure::Machines`: chooses the place of the OS disk on each
//! size of a scheme, and creates, resets and deletes machines.
//!
//! ```text
//!   CloudScheme --> headwater_sizes::Scheme --check with the sizes that the region offers--> SizeChoice ..
//!   CloudOrder ---------------------------------------------------> MachineSpec ----------------^--> Machines
//! ```
//!
//! - The machines of a connection share one [`Machines`], so that they share its memory of refused sizes and its limit of
//!   creations at a time.
//! - Before each call for a machine, the requests that an earlier call has left open are completed: those in the journal
//!   whose paths have the machine's UUID.
//! - The sizes that a region offers are read once an hour, because the list has some megabytes.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use headwater_api::{CloudMachine, CloudScheme, ProblemKind};
use headwater_azure::machines::description::{DiskTier, MachineSpec, Place, SizeChoice};
use headwater_azure::machines::{Created, MachineState, Power, WhenOff};
use headwater_azure::sizes::{self, Offers};
use headwater_azure::{Arm, AzureErrorKind, MachineId, Machines};
use headwater_db::ConnectionRecord;
use headwater_service::backend::{BackendError, CloudMachines, CloudOrder, CloudStarted, CloudState};
use headwater_sizes::scheme::{Scheme, SchemeRefusal};
use headwater_sizes::{Architecture, Date, Generation, ImageFacts, OsDiskPlace, SizeTable};
use tokio::sync::Mutex;
use uuid::Uuid;

use super::journal::DbJournal;
use super::{AzureClouds, azure_failed, scope_of};

/// The journal of all machines of a connection.
const MACHINES: &str = "machines";

/// How long the sizes of a region are kept.
const OFFERS_MAX_AGE: Duration = Duration::from_secs(3600);

/// The machines of a connection, and the sizes that its region offers.
pub struct MachinesOfConnection {
    record: ConnectionRecord,
    arm: Arc<Arm>,
    machines: Machines,
    offered: Mutex<Option<Arc<Offered>>>,
}

/// The sizes that a region offers.
struct Offered {
    offers: Offers,
    /// The sizes that the subscription can use.
    table: SizeTable,
    /// All sizes, with those that the subscription cannot use now.
    listed: SizeTable,
    read_at: Duration,
}

impl AzureClouds {
    /// The machines of a connection.
    fn machines(&self, record: &ConnectionRecord) -> Result<Arc<MachinesOfConnection>, BackendError> {
        let arm = self.arm(record, MACHINES)?;
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let name = &record.connection.name;
        if let Some(known) = shared.machines.get(name).filter(|known| known.record == *record) {
            return Ok(known.clone());
        }
        let machines = Machines::new(arm.clone(), scope_of(&record.connection), self.clock.clone());
        let record = record.clone();
        let of = Arc::new(MachinesOfConnection { record, arm, machines, offered: Mutex::default() });
        shared.machines.insert(name.clone(), of.clone());
        Ok(of)
    }

    /// The paths of all resources of machines.
    pub(super) fn paths_of(
        &self,
        record: &ConnectionRecord,
        machines: &[Uuid],
    ) -> Result<Vec<String>, BackendError> {
        let scope = scope_of(&record.connection);
        let mut paths = Vec::new();
        for machine in machines {
            let id = MachineId::parse(&machine.to_string()).map_err(azure_failed)?;
            paths.extend([id.machine_path(&scope), id.network_path(&scope)]);
        }
        Ok(paths)
    }

    /// The paths of virtual machines and network interfaces with the tag of this controller.
    pub(super) async fn owned_machines(
        &self,
        record: &ConnectionRecord,
    ) -> Result<Vec<String>, BackendError> {
        self.machines(record)?.machines.owned().await.map_err(azure_failed)
    }

    /// Removes such a resource.
    pub(super) async fn remove_owned_machine(
        &self,
        record: &ConnectionRecord,
        resource: &str,
    ) -> Result<(), BackendError> {
        self.machines(record)?.machines.remove_owned(resource).await.map_err(azure_failed)
    }

    /// The machines of a connection, after the open requests of this machine are completed.
    async fn machines_for(
        &self,
        record: &ConnectionRecord,
        machine: Uuid,
    ) -> Result<(Arc<MachinesOfConnection>, MachineId), BackendError> {
        let (arm, id) = self.arm_of(record, machine)?;
        arm.recover().await.map_err(azure_failed)?;
        Ok((self.machines(record)?, id))
    }

    /// The same, before the machine is deleted: a creation of the machine is ended.
    async fn machines_to_delete(
        &self,
        record: &ConnectionRecord,
        machine: Uuid,
    ) -> Result<(Arc<MachinesOfConnection>, MachineId), BackendError> {
        let (arm, id) = self.arm_of(record, machine)?;
        arm.recover_to_delete().await.map_err(azure_failed)?;
        Ok((self.machines(record)?, id))
    }

    /// A client for the open requests of a machine.
    fn arm_of(
        &self,
        record: &ConnectionRecord,
        machine: Uuid,
    ) -> Result<(Arc<Arm>, MachineId), BackendError> {
        let id = MachineId::parse(&machine.to_string()).map_err(azure_failed)?;
        let journal = DbJournal::new(self.db.clone(), record.connection.name.clone(), MACHINES.to_owned());
        Ok((self.arm_with(record, journal.only(id.as_str().to_owned()))?, id))
    }

    /// The sizes that the region of a connection offers, at most an hour old.
    async fn offered(&self, of: &MachinesOfConnection) -> Result<Arc<Offered>, BackendError> {
        // Held while Azure is asked, so that it is asked once.
        let mut kept = of.offered.lock().await;
        let now = self.clock.now();
        if let Some(offered) = kept.as_ref().filter(|it| now.saturating_sub(it.read_at) < OFFERS_MAX_AGE) {
            return Ok(offered.clone());
        }
        let scope = scope_of(&of.record.connection);
        let offers = sizes::offers(&of.arm, &scope).await.map_err(azure_failed)?;
        let date = today()?.to_string();
        let text = sizes::table(&offers, &scope.region, &date);
        let table = SizeTable::parse(&text).map_err(|why| {
            let what = format!("cannot read the sizes that Azure offers in {}: {why}", scope.region);
            BackendError::new(ProblemKind::Failed, what)
        })?;
        let mut all = offers.clone();
        all.sizes.iter_mut().for_each(|size| size.refusal = None);
        // A size that nobody can use must not hide the others.
        let listed = SizeTable::parse(&sizes::table(&all, &scope.region, &date));
        let listed = listed.unwrap_or_else(|_| table.clone());
        let offered = Arc::new(Offered { offers, table, listed, read_at: now });
        *kept = Some(offered.clone());
        Ok(offered)
    }

    /// The description of a machine, with the place of its OS disk on each size, and the sizes that Azure does not list any
    /// more, with the reason. `needs_all`: fails if the subscription cannot use one of the sizes now. Otherwise Azure refuses
    /// that size when its turn comes, and the next size is tried.
    async fn spec(
        &self,
        of: &MachinesOfConnection,
        order: &CloudOrder,
        needs_all: bool,
    ) -> Result<(MachineSpec, Vec<String>), BackendError> {
        let offered = self.offered(of).await?;
        let (choices, unlisted) = offered.choices(order, needs_all)?;
        let CloudScheme { zones, subnet, security_group, admin_user, ssh_key, .. } = order.scheme.clone();
        let gib = order.os_disk_bytes / headwater_sizes::size::GIB;
        let spec = MachineSpec {
            computer_name: order.host_name.clone(),
            scheme: order.mark.clone(),
            image: order.published.resource.clone(),
            os_disk_gib: u32::try_from(gib).unwrap_or(u32::MAX),
            disk_tier: DiskTier::StandardSsd,
            choices,
            zones: zones.iter().map(ToString::to_string).collect(),
            subnet,
            security_group,
            admin_user,
            ssh_key,
            custom_data: order.user_data.as_ref().map(|text| text.reveal().as_bytes().to_vec()),
            user_data: None,
            trusted_launch: false,
            spot: false,
            host_group: None,
            tags: Default::default(),
        };
        Ok((spec, unlisted))
    }
}

/// Today's date, because sizes are retired on a date.
fn today() -> Result<Date, BackendError> {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_err(|_| BackendError::new(ProblemKind::Failed, "the clock of this host is before 1970"))?;
    Ok(Date::of_seconds(since.as_secs()))
}

impl Offered {
    /// The sizes of a scheme in their order, each with the place of the OS disk. Then the sizes that Azure does not list, with
    /// the reason.
    fn choices(
        &self,
        order: &CloudOrder,
        needs_all: bool,
    ) -> Result<(Vec<SizeChoice>, Vec<String>), BackendError> {
        let table = if needs_all { &self.table } else { &self.listed };
        let region = &order.connection.connection.region;
        let mut scheme = scheme_of(&order.scheme)?;
        let all = std::iter::once(scheme.size.clone()).chain(scheme.backup_size.clone());
        let (listed, missing): (Vec<String>, Vec<String>) = all.partition(|size| table.size(size).is_some());
        let mut listed = listed.into_iter();
        let (first, missing_first) = (listed.next(), missing.first().filter(|_| needs_all));
        let (Some(first), None) = (first, missing_first) else {
            return Err(not_offered(region, missing.first().unwrap_or(&scheme.size), &self.table));
        };
        (scheme.size, scheme.backup_size) = (first, listed.collect());
        let image = ImageFacts {
            os_disk_bytes: order.os_disk_bytes,
            generation: Some(if order.published.generation == 1 { Generation::One } else { Generation::Two }),
            architecture: Architecture::X64,
        };
        let report = scheme.check(image, table, today()?);
        if !report.refusals.is_empty() {
            return Err(refused(&report.refusals));
        }
        let mut choices = Vec::new();
        for landing in report.landings {
            let offer = self.offers.sizes.iter().find(|offer| offer.name == landing.size);
            let (Some(offer), Some(placement)) = (offer, landing.placement) else { continue };
            let wanted = &order.scheme.zones;
            let has = |zone: &u8| offer.zones.contains(&zone.to_string());
            if needs_all && !wanted.is_empty() && !wanted.iter().any(has) {
                let zones: Vec<String> = wanted.iter().map(ToString::to_string).collect();
                let what = format!("{region} does not offer {} in zone {}", offer.name, zones.join(" or "));
                return Err(BackendError::new(ProblemKind::Invalid, what)
                    .advise("choose other zones (--zones), or another size"));
            }
            choices.push(SizeChoice {
                size: offer.name.clone(),
                family: offer.family.clone(),
                place: place_of(placement.place),
                full_copy: scheme.full_copy,
                accelerated_networking: offer.has_accelerated_networking,
            });
        }
        let unlisted =
            missing.iter().map(|size| format!("{size}: {region} does not list this size any more"));
        Ok((choices, unlisted.collect()))
    }
}

/// The scheme whose sizes are checked. Machines always come from a gallery, with managed disks.
fn scheme_of(scheme: &CloudScheme) -> Result<Scheme, BackendError> {
    let places = scheme.places.iter().map(|place| OsDiskPlace::parse(place));
    let places: Result<Vec<_>, String> = places.collect();
    Ok(Scheme {
        size: scheme.size.clone(),
        backup_size: scheme.backup_sizes.clone(),
        managed_disks: true,
        gallery: true,
        ephemeral: scheme.ephemeral,
        places: places.map_err(|why| BackendError::new(ProblemKind::Invalid, why))?,
        full_copy: scheme.full_copy,
        zones: scheme.zones.clone(),
        ..Scheme::default()
    })
}

fn not_offered(region: &str, size: &str, table: &SizeTable) -> BackendError {
    let what = format!("{region} does not offer the size '{size}' to the subscription");
    let similar = table.similar(size);
    let advice = match similar.is_empty() {
        true => "'headwater size advise --os-disk 127G' lists sizes".to_owned(),
        false => format!("similar sizes there: {}", similar.join(", ")),
    };
    BackendError::new(ProblemKind::NotFound, what).advise(advice)
}

/// All reasons in one error.
fn refused(refusals: &[SchemeRefusal]) -> BackendError {
    let joined = |part: fn(&SchemeRefusal) -> &str| {
        let mut parts: Vec<&str> = Vec::new();
        for text in refusals.iter().map(part) {
            if !parts.contains(&text) {
                parts.push(text);
            }
        }
        parts.join("; ")
    };
    BackendError::new(ProblemKind::Invalid, joined(|refusal| &refusal.what))
        .advise(joined(|refusal| &refusal.advice))
}

const fn place_of(place: OsDiskPlace) -> Place {
    match place {
        OsDiskPlace::Cache => Place::Cache,
        OsDiskPlace::Temp => Place::Temp,
        OsDiskPlace::Nvme => Place::Nvme,
        OsDiskPlace::Managed => Place::Managed,
    }
}

fn machine_of(state: MachineState) -> CloudMachine {
    let place = match state.place {
        Place::Cache => OsDiskPlace::Cache,
        Place::Temp => OsDiskPlace::Temp,
        Place::Nvme => OsDiskPlace::Nvme,
        Place::Managed => OsDiskPlace::Managed,
    };
    let MachineState { size, zone, vm_id, .. } = state;
    CloudMachine { size, zone, place: place.word().to_owned(), vm_id }
}

fn started(created: Created, mut refused: Vec<String>) -> CloudStarted {
    refused.extend(created.refused);
    CloudStarted { machine: machine_of(created.state), refused }
}

#[async_trait]
impl CloudMachines for AzureClouds {
    async fn check_machines(&self, order: &CloudOrder) -> Result<(), BackendError> {
        let of = self.machines(&order.connection)?;
        let (spec, _) = self.spec(&of, order, true).await?;
        spec.check().map_err(azure_failed)
    }

    async fn check_reset(&self, order: &CloudOrder) -> Result<(), BackendError> {
        let of = self.machines(&order.connection)?;
        let (spec, _) = self.spec(&of, order, false).await?;
        spec.check().map_err(azure_failed)?;
        let offered = self.offered(&of).await?;
        let CloudScheme { size, backup_sizes, .. } = &order.scheme;
        if std::iter::once(size).chain(backup_sizes).any(|size| offered.table.size(size).is_some()) {
            return Ok(());
        }
        Err(not_offered(&order.connection.connection.region, size, &offered.table))
    }

    async fn start_machine(&self, order: &CloudOrder) -> Result<CloudStarted, BackendError> {
        let (of, id) = self.machines_for(&order.connection, order.uuid).await?;
        let (spec, unlisted) = self.spec(&of, order, false).await?;
        let created = match of.machines.start(&id, &spec).await {
            // The machine was off, so the disk of what exists there is not wanted.
            Err(error) if error.kind() == AzureErrorKind::Exists => of.machines.reset(&id, &spec).await,
            created => created,
        };
        created.map(|created| started(created, unlisted)).map_err(azure_failed)
    }

    async fn reset_machine(&self, order: &CloudOrder) -> Result<CloudStarted, BackendError> {
        let (of, id) = self.machines_for(&order.connection, order.uuid).await?;
        let (spec, unlisted) = self.spec(&of, order, false).await?;
        let created = of.machines.reset(&id, &spec).await;
        created.map(|created| started(created, unlisted)).map_err(azure_failed)
    }

    async fn stop_machine(&self, connection: &ConnectionRecord, machine: Uuid) -> Result<(), BackendError> {
        let (of, id) = self.machines_to_delete(connection, machine).await?;
        of.machines.stop(&id, WhenOff::Delete).await.map_err(azure_failed)
    }

    async fn remove_machine(&self, connection: &ConnectionRecord, machine: Uuid) -> Result<(), BackendError> {
        let (of, id) = self.machines_to_delete(connection, machine).await?;
        of.machines.remove(&id).await.map_err(azure_failed)
    }

    async fn machine_state(
        &self,
        connection: &ConnectionRecord,
        machine: Uuid,
    ) -> Result<Option<CloudState>, BackendError> {
        let (of, id) = self.machines_for(connection, machine).await?;
        let state = of.machines.state(&id).await.map_err(azure_failed)?;
        Ok(state.map(|state| {
            let is_off = matches!(state.power, Power::Off | Power::Deallocated);
            CloudState { machine: machine_of(state), is_off }
        }))
    }
}
