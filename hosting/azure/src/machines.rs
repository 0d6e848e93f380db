//! Virtual machines: creates, starts, stops, resets and removes them. Each call may be repeated after any failure.
//!
//! ```text
//!   off  --create/start-->  NIC by name --> gate (20 creations a replica) --> size 1 zone a, b, c; size 2 ..  --> on
//!   on   --reset-->         reimage if ephemeral and of the same description, else delete and create          --> on
//!   on   --stop-->          delete if ephemeral, else power off or deallocate; the NIC stays                  --> off
//!   any  --remove-->        machine by name, then NIC by name                                                 --> gone
//! ```
//!
//! - The names of a machine's resources are derived from its identifier, and `arm.rs` writes a journal entry before each
//!   change. So a new client finds everything that a killed client has made.
//! - A machine that exists is adopted if it has our tags and the body of one of the sizes and zones of its description.
//! - Sizes are tried in order, each in all zones. Refusals are remembered (`machines/memory.rs`).
//! - A failed machine is deleted before the next size is tried. Its NIC stays, because it has the machine's address;
//!   Azure reserves it for 180 s, which is waited for.
//! - An ephemeral machine is never deallocated: its disk would be lost, and Azure refuses it.
//! - The state of one machine is read by its name, never from a list.
//!
//! Limits: one call for a machine at a time; a second call is refused.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::arm::resources::{GALLERY_API, Scope};
use crate::arm::{Arm, Resource, body_tag, foreign, is_deleting, state_of};
use crate::clock::Clock;
use crate::error::{AzureError, AzureErrorKind};

pub mod description;
mod memory;
pub mod replicas;

pub use description::{DiskTier, MachineId, MachineSpec, Place, SizeChoice};

use description::{MACHINE_API, NETWORK_API};
use memory::Memory;
use replicas::{Gate, ready_replicas};

/// How long Azure reserves the NIC of a machine that it could not create.
const RESERVED: Duration = Duration::from_secs(180);

/// The wait and the number of attempts while another operation changes a resource.
const BUSY_WAIT: Duration = Duration::from_secs(15);
const BUSY_ATTEMPTS: u32 = 8;

/// The wait and the number of attempts while a replicated image is not visible everywhere.
const IMAGE_WAIT: Duration = Duration::from_secs(30);
const IMAGE_ATTEMPTS: u32 = 10;

/// How old the number of ready replicas may be.
const REPLICAS_MAX_AGE: Duration = Duration::from_secs(60);

/// What a stop leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenOff {
    /// Only the NIC. Costs nothing.
    Delete,
    /// The managed disk, which costs.
    KeepDisk,
    /// The whole machine, which costs as much as a running machine.
    KeepMachine,
}

/// The power state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// It runs.
    On,
    /// It is off, and its host is still reserved.
    Off,
    /// It is off, and only its managed disk exists.
    Deallocated,
    /// It changes, or Azure does not know.
    Unknown,
}

/// A machine that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineState {
    /// Its power state.
    pub power: Power,
    /// Azure's state of its last operation, such as `Succeeded` or `Updating`.
    pub provisioning: String,
    /// Its size.
    pub size: String,
    /// Its zone.
    pub zone: Option<String>,
    /// The place of its OS disk.
    pub place: Place,
    /// The version of the gallery from which it was created.
    pub image: String,
    /// Azure's identifier. Another identifier means another machine, with a new OS disk.
    pub vm_id: String,
}

/// How a machine came into being.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Created {
    /// The machine.
    pub state: MachineState,
    /// Whether it existed already.
    pub is_adopted: bool,
    /// The sizes and zones that were refused before, with the reason.
    pub refused: Vec<String>,
}

/// The machines of one owner in one resource group.
#[derive(Debug)]
pub struct Machines {
    arm: Arc<Arm>,
    scope: Scope,
    clock: Arc<dyn Clock>,
    gate: Arc<Gate>,
    memory: Memory,
    busy: Mutex<HashSet<MachineId>>,
}

/// Marks a machine as in use by a call.
struct Busy<'a>(&'a Machines, MachineId);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

impl Machines {
    /// Sends no request yet. After a restart of the program, call [`Arm::recover`] first.
    pub fn new(arm: Arc<Arm>, scope: Scope, clock: Arc<dyn Clock>) -> Self {
        Self { arm, scope, clock, gate: Arc::default(), memory: Memory::default(), busy: Mutex::default() }
    }

    /// The state of a machine; `None` if it does not exist. One request.
    pub async fn state(&self, id: &MachineId) -> Result<Option<MachineState>, AzureError> {
        Ok(self.look(id).await?.as_ref().map(state_of_machine))
    }

    /// Creates a machine, or finds the machine that an earlier call has created.
    pub async fn create(&self, id: &MachineId, spec: &MachineSpec) -> Result<Created, AzureError> {
        spec.check()?;
        let _busy = self.begin(id)?;
        self.create_unless_there(id, spec).await
    }

    /// Switches a machine on: creates it unless it exists.
    pub async fn start(&self, id: &MachineId, spec: &MachineSpec) -> Result<Created, AzureError> {
        spec.check()?;
        let _busy = self.begin(id)?;
        let created = self.create_unless_there(id, spec).await?;
        if matches!(created.state.power, Power::On) {
            return Ok(created);
        }
        self.act(id, "start", "", &Value::Null).await?;
        let state = self.state(id).await?.ok_or_else(|| self.vanished(id))?;
        Ok(Created { state, ..created })
    }

    /// Switches a machine off. A machine that does not exist is off.
    pub async fn stop(&self, id: &MachineId, when_off: WhenOff) -> Result<(), AzureError> {
        let _busy = self.begin(id)?;
        let Some(there) = self.look(id).await? else { return Ok(()) };
        match when_off {
            WhenOff::Delete => self.delete(&id.machine_path(&self.scope), MACHINE_API).await,
            WhenOff::KeepMachine => self.act(id, "powerOff", "skipShutdown=true", &Value::Null).await,
            WhenOff::KeepDisk if state_of_machine(&there).place.is_local() => {
                let what = format!(
                    "cannot stop machine {} and keep its disk: a stop loses the disk, which is on the host",
                    id.as_str()
                );
                let advice = "let a stop delete the machine, or use a managed disk";
                Err(AzureError::new(AzureErrorKind::Invalid, what).advise(advice))
            }
            WhenOff::KeepDisk => self.act(id, "deallocate", "", &Value::Null).await,
        }
    }

    /// Restarts the guest. The OS disk keeps its contents.
    pub async fn restart(&self, id: &MachineId) -> Result<(), AzureError> {
        let _busy = self.begin(id)?;
        self.act(id, "restart", "", &Value::Null).await
    }

    /// Gives a machine a pristine OS disk of the version in its description, and switches it on. The contents of its
    /// disk are lost.
    pub async fn reset(&self, id: &MachineId, spec: &MachineSpec) -> Result<Created, AzureError> {
        spec.check()?;
        let _busy = self.begin(id)?;
        let Some(there) = self.look(id).await? else { return self.create_new(id, spec).await };
        let state = state_of_machine(&there);
        let can_reimage = state.place.is_local()
            && state.power == Power::On
            && state_of(&there) == Some("Succeeded")
            && self.fits(id, spec, &there);
        if can_reimage {
            match self.act(id, "reimage", "", &json!({"tempDisk": false})).await {
                Ok(()) => {
                    let state = self.state(id).await?.ok_or_else(|| self.vanished(id))?;
                    return Ok(Created { state, is_adopted: true, refused: Vec::new() });
                }
                // Azure does not permit it for this machine, so the machine is made again.
                Err(error) if is_refused_action(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.delete(&id.machine_path(&self.scope), MACHINE_API).await?;
        self.create_new(id, spec).await
    }

    /// Removes a machine and everything that belongs to it.
    pub async fn remove(&self, id: &MachineId) -> Result<(), AzureError> {
        let _busy = self.begin(id)?;
        self.delete(&id.machine_path(&self.scope), MACHINE_API).await?;
        self.delete(&id.network_path(&self.scope), NETWORK_API).await
    }

    /// The paths of the virtual machines and network interfaces in the resource group that have our tag, in the order in
    /// which they can be removed. Azure updates lists late.
    pub async fn owned(&self) -> Result<Vec<String>, AzureError> {
        let mut found = Vec::new();
        for (kind, api_version) in [
            ("Microsoft.Compute/virtualMachines", MACHINE_API),
            ("Microsoft.Network/networkInterfaces", NETWORK_API),
        ] {
            let path = format!("{}/providers/{kind}", self.scope.group_path());
            let listed = self.arm.list(&path, api_version, "").await?;
            let ours = listed.iter().filter(|there| self.arm.is_ours(there));
            found.extend(ours.filter_map(|there| there.get("id")?.as_str().map(str::to_owned)));
        }
        Ok(found)
    }

    /// Removes a resource that [`Machines::owned`] has found. It may be gone already.
    pub async fn remove_owned(&self, path: &str) -> Result<(), AzureError> {
        let api_version = if is_machine(path) { MACHINE_API } else { NETWORK_API };
        self.delete(path, api_version).await
    }

    /// The replicas of a version that are ready in the region. One request.
    pub async fn ready_replicas(&self, image: &str) -> Result<u32, AzureError> {
        let version = self.arm.find_with(image, GALLERY_API, "$expand=ReplicationStatus").await?;
        let Some(version) = version else {
            let what = format!("cannot create machines from {image}: the gallery does not have this version");
            let error = AzureError::new(AzureErrorKind::NotFound, what);
            return Err(error.advise("publish the version again"));
        };
        let ready = ready_replicas(&version, &self.scope.region);
        self.gate.set(image, self.clock.now(), ready);
        Ok(ready)
    }

    /// The machine with its instance view, if it is ours. A machine of another owner is an error.
    async fn look(&self, id: &MachineId) -> Result<Option<Value>, AzureError> {
        let path = id.machine_path(&self.scope);
        let there = self.arm.find_with(&path, MACHINE_API, "$expand=instanceView").await?;
        match there {
            Some(there) if is_deleting(&there) => Ok(None),
            Some(there) if !self.arm.is_ours(&there) => Err(foreign(&format!("cannot use {path}"))),
            there => Ok(there),
        }
    }

    /// Whether a machine was created from this description, with any of its sizes and zones.
    fn fits(&self, id: &MachineId, spec: &MachineSpec, there: &Value) -> bool {
        let zones = spec.zones_for(id);
        let bodies = spec.choices.iter().flat_map(|choice| zones.iter().map(move |zone| (choice, *zone)));
        let tag = body_tag(there);
        bodies
            .map(|(choice, zone)| description::machine(&self.scope, id, spec, choice, zone))
            .any(|resource| self.arm.body_tag_of(&resource) == tag)
    }

    async fn create_unless_there(&self, id: &MachineId, spec: &MachineSpec) -> Result<Created, AzureError> {
        let Some(there) = self.look(id).await? else { return self.create_new(id, spec).await };
        if !self.fits(id, spec, &there) {
            let what = format!("machine {} exists, but was created from another description", id.as_str());
            let error = AzureError::new(AzureErrorKind::Exists, what);
            return Err(error.advise("reset the machine, so that it is created from its new description"));
        }
        // Also waits for a creation that is in progress, and ends its journal entry.
        let zone = there.pointer("/zones/0").and_then(Value::as_str);
        let size = there.pointer("/properties/hardwareProfile/vmSize").and_then(Value::as_str);
        let choices = spec.choices.iter().filter(|choice| Some(choice.size.as_str()) == size);
        let tag = body_tag(&there);
        let mut resources = choices.map(|choice| description::machine(&self.scope, id, spec, choice, zone));
        let resource = resources.find(|resource| self.arm.body_tag_of(resource) == tag);
        let there = match resource {
            Some(resource) if state_of(&there) != Some("Succeeded") => {
                match self.make_machine(&resource).await {
                    Ok(()) => self.look(id).await?.ok_or_else(|| self.vanished(id))?,
                    // Azure could not finish it, and it was deleted: another size may be had.
                    Err(error) if memory::is_about_size(error.kind()) || lost_reason(&error).is_some() => {
                        return self.create_new(id, spec).await;
                    }
                    Err(error) => return Err(error),
                }
            }
            _ => there,
        };
        Ok(Created { state: state_of_machine(&there), is_adopted: true, refused: Vec::new() })
    }

    /// Creates the NIC and the machine.
    async fn create_new(&self, id: &MachineId, spec: &MachineSpec) -> Result<Created, AzureError> {
        self.check_replicas(&spec.image).await?;
        let nic = description::network_interface(&self.scope, id, spec);
        self.insist(|| self.arm.make(&nic)).await?;
        let _permit = self.gate.enter(&spec.image).await;
        let mut refused = Vec::new();
        for choice in &spec.choices {
            if let Some(why) = self.memory.of_family(self.clock.now(), &choice.family) {
                refused.push(format!("{}: {why}", choice.size));
                continue;
            }
            for zone in spec.zones_for(id) {
                let shown = match zone {
                    Some(zone) => format!("{} in zone {zone}", choice.size),
                    None => choice.size.clone(),
                };
                if let Some(why) = self.memory.of_size(self.clock.now(), &choice.size, zone) {
                    refused.push(format!("{shown}: {why}"));
                    continue;
                }
                let resource = description::machine(&self.scope, id, spec, choice, zone);
                let error = match self.make_machine(&resource).await {
                    Ok(()) => {
                        let there = self.look(id).await?.ok_or_else(|| self.vanished(id))?;
                        return Ok(Created { state: state_of_machine(&there), is_adopted: false, refused });
                    }
                    Err(error) => error,
                };
                let noted = self.memory.note(self.clock.now(), &choice.size, &choice.family, zone, &error);
                let Some(why) = noted.or_else(|| lost_reason(&error)) else { return Err(error) };
                refused.push(format!("{shown}: {why}"));
                if error.kind() == AzureErrorKind::Quota {
                    // It is the same in the other zones.
                    break;
                }
            }
        }
        let what =
            format!("cannot create machine {}: no size can be had: {}", id.as_str(), refused.join("; "));
        let error = AzureError::new(AzureErrorKind::Capacity, what);
        Err(error.advise(
            "add backup sizes of other families to the scheme, ask Azure for quota, or try again later",
        ))
    }

    /// Makes a machine, and waits while Azure reserves its NIC or does not find its image yet.
    async fn make_machine(&self, resource: &Resource) -> Result<(), AzureError> {
        let mut images = 0;
        loop {
            match self.insist(|| self.arm.make(resource)).await {
                Ok(_) => return Ok(()),
                Err(error) if error.code() == Some("GalleryImageNotFound") && images < IMAGE_ATTEMPTS => {
                    images += 1;
                    self.clock.sleep(IMAGE_WAIT).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks that the image has a ready replica, unless that was checked a short time ago.
    async fn check_replicas(&self, image: &str) -> Result<(), AzureError> {
        if self.gate.is_known(image, self.clock.now(), REPLICAS_MAX_AGE)
            || self.ready_replicas(image).await? > 0
        {
            return Ok(());
        }
        let region = &self.scope.region;
        let what = format!("cannot create machines from {image}: it has no complete replica in {region}");
        let error = AzureError::new(AzureErrorKind::Busy, what);
        Err(error.advise("wait until the image is published in the region"))
    }

    async fn act(&self, id: &MachineId, verb: &str, query: &str, body: &Value) -> Result<(), AzureError> {
        let path = id.machine_path(&self.scope);
        self.insist(|| self.arm.act_with(&path, verb, MACHINE_API, query, body)).await?;
        Ok(())
    }

    async fn delete(&self, path: &str, api_version: &str) -> Result<(), AzureError> {
        self.insist(|| self.arm.delete(path, api_version)).await
    }

    /// Repeats an attempt while another operation changes the resource.
    async fn insist<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, AzureError>
    where
        F: Future<Output = Result<T, AzureError>>,
    {
        let mut attempts = 1;
        loop {
            match attempt().await {
                Err(error) if error.kind() == AzureErrorKind::Busy && attempts < BUSY_ATTEMPTS => {
                    let is_reserved = error.code() == Some("NicReservedForAnotherVm");
                    self.clock.sleep(if is_reserved { RESERVED } else { BUSY_WAIT }).await;
                    attempts += 1;
                }
                ended => return ended,
            }
        }
    }

    fn begin(&self, id: &MachineId) -> Result<Busy<'_>, AzureError> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if busy.insert(id.clone()) {
            return Ok(Busy(self, id.clone()));
        }
        let what = format!("another operation on machine {} is in progress", id.as_str());
        Err(AzureError::new(AzureErrorKind::Busy, what).advise("wait until it has ended"))
    }

    fn vanished(&self, id: &MachineId) -> AzureError {
        let what = format!("machine {} was deleted by another client", id.machine_path(&self.scope));
        AzureError::new(AzureErrorKind::NotFound, what).advise("start the machine again")
    }
}

fn is_machine(path: &str) -> bool {
    path.to_ascii_lowercase().contains("/virtualmachines/")
}

/// Whether a path is that of a virtual machine or a network interface.
pub fn is_of_machine(path: &str) -> bool {
    is_machine(path) || path.to_ascii_lowercase().contains("/networkinterfaces/")
}

/// The description of a failed creation whose reason was in a lost answer. It may have been the size.
fn lost_reason(error: &AzureError) -> Option<String> {
    let is_lost = error.kind() == AzureErrorKind::Failed && error.code().is_none();
    is_lost.then(|| "Azure could not create it, and the answer with the reason was lost".to_owned())
}

/// Whether Azure does not permit an action, so that repeating it is useless.
fn is_refused_action(error: &AzureError) -> bool {
    matches!(error.code(), Some("OperationNotAllowed" | "PropertyChangeNotAllowed" | "InvalidParameter"))
}

fn state_of_machine(there: &Value) -> MachineState {
    let text = |pointer: &str| there.pointer(pointer).and_then(Value::as_str);
    let statuses = there.pointer("/properties/instanceView/statuses").and_then(Value::as_array);
    let codes = statuses.into_iter().flatten().filter_map(|status| status.get("code")?.as_str());
    let power = codes.filter_map(|code| code.strip_prefix("PowerState/")).next_back();
    MachineState {
        power: match power {
            Some("running") => Power::On,
            Some("stopped") => Power::Off,
            Some("deallocated") => Power::Deallocated,
            _ => Power::Unknown,
        },
        provisioning: state_of(there).unwrap_or_default().to_owned(),
        size: text("/properties/hardwareProfile/vmSize").unwrap_or_default().to_owned(),
        zone: text("/zones/0").map(str::to_owned),
        place: Place::of(text("/properties/storageProfile/osDisk/diffDiskSettings/placement")),
        image: text("/properties/storageProfile/imageReference/id").unwrap_or_default().to_owned(),
        vm_id: text("/properties/vmId").unwrap_or_default().to_owned(),
    }
}
