//! Virtual machines: the rules of their creation, their actions and their power state.

use serde_json::{Value, json};

use super::management::{DISKS, MACHINES, Management, last_name, missing};
use super::operations::{Effect, Operation};
use super::{Call, Refusal, Reply, refuse, reply};

/// Microsoft recommends one replica for this many machines that are created at the same time.
const CREATIONS_PER_REPLICA: usize = 20;

/// The history of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineFacts {
    /// Azure's identifier, which is new for each created machine.
    pub vm_id: String,
    /// The power state: `running`, `stopped` or `deallocated`.
    pub power: &'static str,
    /// How many times it was started.
    pub boots: usize,
    /// How many times its OS disk was set back to the image.
    pub reimages: usize,
}

fn text<'a>(vm: &'a Value, pointer: &str) -> Option<&'a str> {
    vm.pointer(pointer).and_then(Value::as_str)
}

fn is_ephemeral(vm: &Value) -> bool {
    vm.pointer("/properties/storageProfile/osDisk/diffDiskSettings").is_some()
}

/// The paths of the NICs of a machine, and what happens to each when the machine is deleted.
fn nics(vm: &Value) -> Vec<(String, bool)> {
    let nics = vm.pointer("/properties/networkProfile/networkInterfaces").and_then(Value::as_array);
    let path = |nic: &Value| text(nic, "/id").map(str::to_owned);
    nics.into_iter()
        .flatten()
        .filter_map(|nic| Some((path(nic)?, text(nic, "/properties/deleteOption") == Some("Delete"))))
        .collect()
}

impl Management {
    /// Checks the description of a new machine.
    pub(super) fn check_machine(&mut self, path: &str, vm: &Value) -> Result<(), Refusal> {
        let known = ["location", "zones", "tags", "properties", "identity", "plan", "sku"];
        let odd = vm.as_object().into_iter().flatten().find(|field| !known.contains(&field.0.as_str()));
        if let Some((name, _)) = odd {
            return refuse(400, "InvalidRequestContent", format!("Could not find member '{name}'"));
        }
        for needed in [
            "/properties/hardwareProfile/vmSize",
            "/properties/storageProfile/osDisk/createOption",
            "/location",
        ] {
            if text(vm, needed).is_none() {
                return refuse(
                    400,
                    "InvalidRequestContent",
                    format!("Required parameter '{needed}' is missing"),
                );
            }
        }
        let disk = vm.pointer("/properties/storageProfile/osDisk").unwrap_or(&Value::Null);
        if is_ephemeral(vm) && text(disk, "/caching") != Some("ReadOnly") {
            return refuse(400, "InvalidParameter", "OS disk caching must be ReadOnly for diffDiskSettings");
        }
        if text(disk, "/diffDiskSettings/option").is_some_and(|option| option != "Local") {
            return refuse(400, "InvalidParameter", "diffDiskSettings.option must be Local");
        }
        self.check_nics(path, vm)?;
        self.check_image(vm)?;
        self.check_offer(vm)
    }

    fn check_nics(&self, path: &str, vm: &Value) -> Result<(), Refusal> {
        let nics = nics(vm);
        if nics.is_empty() {
            return refuse(400, "InvalidRequestContent", "a machine needs a network interface");
        }
        for (nic, _) in nics {
            let Some(there) = self.resources.get(&nic) else {
                return refuse(400, "InvalidResourceReference", format!("{nic} was not found"));
            };
            if text(there, "/properties/virtualMachine/id").is_some_and(|user| user != path) {
                return refuse(400, "NicInUse", format!("{nic} is used by another virtual machine"));
            }
            if self.reserved_for(&nic).is_some_and(|user| user != path) {
                return refuse(
                    400,
                    "NicReservedForAnotherVm",
                    "Nic(s) in request is reserved for another Virtual Machine for 180 seconds.",
                );
            }
        }
        Ok(())
    }

    /// The machine for which a NIC is reserved.
    pub(super) fn reserved_for(&self, nic: &str) -> Option<&str> {
        let (user, until) = self.reserved.get(nic)?;
        ((self.clock)() < *until).then_some(user.as_str())
    }

    fn check_image(&mut self, vm: &Value) -> Result<(), Refusal> {
        let Some(id) = text(vm, "/properties/storageProfile/imageReference/id") else {
            let is_market = text(vm, "/properties/storageProfile/imageReference/publisher").is_some();
            return if is_market {
                Ok(())
            } else {
                refuse(400, "InvalidParameter", "imageReference is required")
            };
        };
        let version = self.resources.get(id);
        if version.and_then(|it| text(it, "/properties/provisioningState")) != Some("Succeeded") {
            let what = format!("The gallery image {id} is not available in {} region.", self.region);
            return refuse(404, "GalleryImageNotFound", what);
        }
        let definition = id.split("/versions/").next().and_then(|it| self.resources.get(it));
        let is_generalized =
            definition.is_none_or(|it| text(it, "/properties/osState") == Some("Generalized"));
        if is_ephemeral(vm) && !is_generalized {
            return refuse(400, "InvalidParameter", "ephemeral OS disks need a generalized image");
        }
        let generation = definition.and_then(|it| text(it, "/properties/hyperVGeneration"));
        if text(vm, "/properties/securityProfile/securityType") == Some("TrustedLaunch")
            && generation == Some("V1")
        {
            return refuse(
                400,
                "BadRequest",
                "The selected VM size and image are of different Hypervisor Generations",
            );
        }
        let most = CREATIONS_PER_REPLICA * self.ready_replicas(id);
        if self.creations(Some(id)) >= most {
            self.over_replicas += 1;
            return refuse(429, "TooManyRequests", "more than 20 creations for each ready replica");
        }
        Ok(())
    }

    /// How many creations of machines have not ended, of this image or of all.
    fn creations(&self, image: Option<&str>) -> usize {
        let active = self.operations.iter().filter(|it| !it.has_ended && it.effect == Effect::Create);
        let is_of_image = |path: &str| {
            let id = self
                .resources
                .get(path)
                .and_then(|it| text(it, "/properties/storageProfile/imageReference/id"));
            image.is_none() || id == image
        };
        active.filter(|it| it.path.contains(MACHINES) && is_of_image(&it.path)).count()
    }

    pub(super) fn note_creations(&mut self) {
        self.creations_max = self.creations_max.max(self.creations(None));
    }

    /// Takes the capacity and the NICs of a new machine. Returns the error of the creation.
    pub(super) fn begin_machine(&mut self, path: &str, vm: &Value) -> Option<Value> {
        for (nic, _) in nics(vm) {
            if let Some(there) = self.resources.get_mut(&nic) {
                there["properties"]["virtualMachine"] = json!({"id": path});
            }
        }
        self.allocate(vm)
    }

    pub(super) fn nics_of(&self, path: &str) -> Vec<String> {
        self.resources.get(path).map(|vm| nics(vm).into_iter().map(|it| it.0).collect()).unwrap_or_default()
    }

    /// Changes a machine at the end of an operation.
    pub(super) fn change_machine(&mut self, path: &str, effect: &Effect) {
        if !path.contains(MACHINES) {
            return;
        }
        if *effect == Effect::Create {
            self.machines_made += 1;
            let vm_id = format!("00000000-0000-4000-8000-{:012}", self.machines_made);
            let facts = MachineFacts { vm_id, power: "running", boots: 1, reimages: 0 };
            self.machines.insert(path.to_owned(), facts);
            self.make_os_disk(path);
        }
        let Some(machine) = self.machines.get_mut(path) else { return };
        match effect {
            Effect::Power(power) => {
                machine.boots += usize::from(*power == "running" && machine.power != "running");
                machine.power = power;
            }
            Effect::Restart => machine.boots += 1,
            Effect::Reimage => {
                machine.boots += 1;
                machine.reimages += 1;
            }
            _ => {}
        }
    }

    /// A managed OS disk is a resource of its own, with the tags of the machine.
    fn make_os_disk(&mut self, path: &str) {
        let Some(vm) = self.resources.get(path).filter(|vm| !is_ephemeral(vm)) else { return };
        let (group, name) = path.split_once(MACHINES).unwrap_or_default();
        let disk = format!("{group}{DISKS}/{}_OsDisk_1", name.trim_start_matches('/'));
        let body = json!({"id": disk, "location": vm["location"], "tags": vm["tags"], "managedBy": path, "properties": {"provisioningState": "Succeeded"}});
        self.resources.insert(disk, body);
    }

    /// Removes the disks and interfaces that are deleted together with a machine.
    pub(super) fn end_machine(&mut self, path: &str) {
        let Some(vm) = self.resources.get(path).filter(|_| path.contains(MACHINES)).cloned() else { return };
        for (nic, is_deleted) in nics(&vm) {
            if is_deleted {
                self.remove(&nic);
            } else if let Some(there) =
                self.resources.get_mut(&nic).and_then(|it| it["properties"].as_object_mut())
            {
                there.remove("virtualMachine");
            }
        }
        if text(&vm, "/properties/storageProfile/osDisk/deleteOption") == Some("Delete") {
            let of_machine = |it: &(&String, &Value)| it.1["managedBy"].as_str() == Some(path);
            let disks: Vec<String> =
                self.resources.iter().filter(of_machine).map(|it| it.0.clone()).collect();
            disks.iter().for_each(|disk| self.remove(disk));
        }
        self.machines.remove(path);
    }

    /// Adds what Azure knows of a machine, and removes what it never shows.
    pub(super) fn show_machine(&self, path: &str, shown: &mut Value, has_view: bool) {
        if let Some(profile) = shown.pointer_mut("/properties/osProfile").and_then(Value::as_object_mut) {
            profile.remove("customData");
            profile.remove("adminPassword");
        }
        if let Some(properties) = shown["properties"].as_object_mut() {
            properties.remove("userData");
        }
        let state = text(shown, "/properties/provisioningState").unwrap_or_default().to_ascii_lowercase();
        let mut statuses = vec![json!({"code": format!("ProvisioningState/{state}"), "level": "Info"})];
        if let Some(machine) = self.machines.get(path) {
            shown["properties"]["vmId"] = machine.vm_id.clone().into();
            statuses.push(json!({"code": format!("PowerState/{}", machine.power), "level": "Info"}));
        }
        if has_view {
            shown["properties"]["instanceView"] = json!({"statuses": statuses});
        }
    }

    /// An action of a resource.
    pub(super) fn act(&mut self, call: &Call<'_>, path: &str, verb: &str) -> Result<Reply, Refusal> {
        let Some(there) = self.resources.get(path) else { return missing(path) };
        if verb == "beginGetAccess" || verb == "endGetAccess" {
            return self.access(call, path, verb);
        }
        let (is_ephemeral, power) = (is_ephemeral(there), self.machines.get(path).map(|it| it.power));
        let effect = match verb {
            "reimage" if !is_ephemeral => {
                return refuse(
                    409,
                    "OperationNotAllowed",
                    "The Reimage operation is only supported for ephemeral OS disks.",
                );
            }
            "reimage" => {
                let given = call.json();
                let custom = text(&given, "/osProfile/customData");
                if custom.is_some() && custom != text(there, "/properties/osProfile/customData") {
                    return refuse(
                        409,
                        "PropertyChangeNotAllowed",
                        "Changing property 'osProfile.customData' is not allowed.",
                    );
                }
                Effect::Reimage
            }
            "deallocate" if is_ephemeral => {
                let name = last_name(path);
                return refuse(
                    409,
                    "OperationNotAllowed",
                    format!("Deallocate is not supported for VM {name} with an ephemeral OS disk."),
                );
            }
            "restart" if power != Some("running") => {
                return refuse(409, "OperationNotAllowed", "Cannot restart a VM that is not running.");
            }
            "restart" => Effect::Restart,
            "start" => Effect::Power("running"),
            "powerOff" => Effect::Power("stopped"),
            "deallocate" => Effect::Power("deallocated"),
            _ => return refuse(404, "NotFound", format!("there is no action {verb}")),
        };
        if self.active(path).is_some() {
            return refuse(
                409,
                "Conflict",
                format!("Another operation is in progress on {}.", last_name(path)),
            );
        }
        if power.is_none() {
            return refuse(409, "OperationNotAllowed", "The VM was not created successfully.");
        }
        if effect == Effect::Power("stopped") && power == Some("stopped") {
            return Ok(reply(200, &Value::Null));
        }
        Ok(self.accepted(202, call, Operation::new(path, effect), &Value::Null))
    }
}
