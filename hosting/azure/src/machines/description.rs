//! Describes machines: their names, and the bodies of the requests that create them. Only functions without I/O.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::arm::Resource;
use crate::arm::resources::Scope;
use crate::error::{AzureError, AzureErrorKind};

/// The API version of machines. It is the first with `enableFullCaching`.
pub(super) const MACHINE_API: &str = "2025-04-01";

/// The API version of network interfaces.
pub(super) const NETWORK_API: &str = "2024-05-01";

/// The tag with the identifier of the machine.
pub const MACHINE_TAG: &str = "headwater-machine";

/// The tag with the scheme that the machine was created from.
pub const SCHEME_TAG: &str = "headwater-scheme";

/// The largest ephemeral and the largest managed OS disk, in GiB.
const EPHEMERAL_MAX_GIB: u32 = 2040;
const MANAGED_MAX_GIB: u32 = 4095;

/// The most sizes that are tried for a machine.
const CHOICES_MAX: usize = 16;

/// The longest custom data and user data: 64 KiB of Base64.
const DATA_MAX_BYTES: usize = 48 << 10;

/// The identifier of a machine: a UUID in lower case. Its resources are named after it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MachineId(String);

impl MachineId {
    /// The identifier with this text, such as `6f1e0c0a-5d3b-4f52-9d41-2b8a3f1c7e90`.
    pub fn parse(text: &str) -> Result<Self, AzureError> {
        let is_right = |(at, byte): (usize, u8)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte),
        };
        if text.len() == 36 && text.bytes().enumerate().all(is_right) {
            return Ok(Self(text.to_owned()));
        }
        let what = format!("'{text}' is not the identifier of a machine: it must be a UUID in lower case");
        Err(AzureError::new(AzureErrorKind::Invalid, what))
    }

    /// The text of the identifier.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of the machine.
    pub fn machine_path(&self, scope: &Scope) -> String {
        scope.path("Microsoft.Compute", "virtualMachines", &format!("hw-{}", self.0))
    }

    /// The path of its network interface.
    pub fn network_path(&self, scope: &Scope) -> String {
        scope.path("Microsoft.Network", "networkInterfaces", &format!("hw-{}", self.0))
    }

    /// A number that spreads machines over zones.
    fn spread(&self) -> usize {
        self.0.bytes().filter_map(|byte| char::from(byte).to_digit(16)).map(|it| it as usize).sum()
    }
}

/// The place of an OS disk. It is always sent, because Azure's own choice prefers a cache that may be too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The cache on the host's SSD.
    Cache,
    /// The temp disk.
    Temp,
    /// Local NVMe disks.
    Nvme,
    /// A managed disk.
    Managed,
}

impl Place {
    /// Azure's name of a local place.
    const fn placement(self) -> Option<&'static str> {
        match self {
            Self::Cache => Some("CacheDisk"),
            Self::Temp => Some("ResourceDisk"),
            Self::Nvme => Some("NvmeDisk"),
            Self::Managed => None,
        }
    }

    /// Whether the disk is on the host, and lost with it.
    pub const fn is_local(self) -> bool {
        self.placement().is_some()
    }

    /// The place with Azure's name; without a name the disk is managed.
    pub(super) fn of(placement: Option<&str>) -> Self {
        let local = [Self::Cache, Self::Temp, Self::Nvme];
        local.into_iter().find(|place| place.placement() == placement).unwrap_or(Self::Managed)
    }
}

/// The performance of a managed disk. An ephemeral OS disk has such a disk as its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskTier {
    /// HDD.
    Standard,
    /// SSD.
    StandardSsd,
    /// Premium SSD.
    Premium,
}

impl DiskTier {
    const fn name(self) -> &'static str {
        match self {
            Self::Standard => "Standard_LRS",
            Self::StandardSsd => "StandardSSD_LRS",
            Self::Premium => "Premium_LRS",
        }
    }
}

/// A size, and the place of the OS disk on it. Which place a size can have is decided by the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeChoice {
    /// The size, such as `Standard_D8ds_v5`.
    pub size: String,
    /// The family of the size; sizes of one family share a quota.
    pub family: String,
    /// The place of the OS disk.
    pub place: Place,
    /// Whether the whole image is copied to the host.
    pub full_copy: bool,
    /// Whether the size has accelerated networking.
    pub accelerated_networking: bool,
}

/// A machine that should exist.
#[derive(Clone, PartialEq, Eq)]
pub struct MachineSpec {
    /// The name in the guest.
    pub computer_name: String,
    /// The scheme and its version, such as `pool-a@3`; shown as a tag.
    pub scheme: String,
    /// The path of a version in a gallery.
    pub image: String,
    /// The size of the OS disk in GiB.
    pub os_disk_gib: u32,
    /// The performance of the managed disk or of the base of an ephemeral disk.
    pub disk_tier: DiskTier,
    /// The sizes in the order in which they are tried.
    pub choices: Vec<SizeChoice>,
    /// The zones that may be used; empty: the region chooses.
    pub zones: Vec<String>,
    /// The path of the subnet.
    pub subnet: String,
    /// The path of the network security group.
    pub security_group: Option<String>,
    /// The user with administrator rights.
    pub admin_user: String,
    /// The public SSH key of that user.
    pub ssh_key: String,
    /// Data for the provisioning agent. It must be equal for all machines of a scheme version, because Azure refuses to
    /// change it in a reset.
    pub custom_data: Option<Vec<u8>>,
    /// Data of this machine, which the guest reads from the metadata service.
    pub user_data: Option<Vec<u8>>,
    /// Secure boot and a virtual TPM.
    pub trusted_launch: bool,
    /// Whether Azure may take the machine away for a lower price.
    pub spot: bool,
    /// The path of a group of dedicated hosts.
    pub host_group: Option<String>,
    /// Further tags.
    pub tags: BTreeMap<String, String>,
}

impl std::fmt::Debug for MachineSpec {
    /// Omits the data for the guest, which may contain secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MachineSpec")
            .field("computer_name", &self.computer_name)
            .field("scheme", &self.scheme)
            .field("image", &self.image)
            .field("choices", &self.choices)
            .finish_non_exhaustive()
    }
}

impl MachineSpec {
    /// Checks the description. The error has all mistakes.
    pub fn check(&self) -> Result<(), AzureError> {
        let mut wrong: Vec<String> = Vec::new();
        let mut need = |is_right: bool, what: &str| {
            if !is_right {
                wrong.push(what.to_owned());
            }
        };
        let name = &self.computer_name;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let is_inside = !name.starts_with('-') && !name.ends_with('-');
        need(
            (1..=64).contains(&name.len()) && name.chars().all(is_name) && is_inside,
            "the computer name must have 1 to 64 letters, digits and '-'",
        );
        need(
            self.image.starts_with("/subscriptions/") && self.image.contains("/versions/"),
            "the image must be the path of one version in a gallery, not of its newest version",
        );
        need(self.subnet.starts_with("/subscriptions/"), "the subnet must be a path");
        need(
            self.ssh_key.starts_with("ssh-rsa ") || self.ssh_key.starts_with("ssh-ed25519 "),
            "the SSH key is not a public key of the kind ssh-rsa or ssh-ed25519",
        );
        need(
            !self.admin_user.is_empty() && self.admin_user != "root",
            "the administrator must have a name other than root",
        );
        need((1..=CHOICES_MAX).contains(&self.choices.len()), "1 to 16 sizes are needed");
        let is_zone = |zone: &String| matches!(zone.as_str(), "1" | "2" | "3");
        need(self.zones.iter().all(is_zone), "a zone is 1, 2 or 3");
        need(self.os_disk_gib > 0, "the OS disk needs a size");
        let data = [&self.custom_data, &self.user_data];
        need(
            data.into_iter().flatten().all(|data| data.len() <= DATA_MAX_BYTES),
            "custom data and user data have at most 48 KiB each",
        );
        need(
            !self.tags.keys().any(|tag| tag.starts_with("headwater-")),
            "tags with 'headwater-' are reserved",
        );
        need(self.tags.len() <= 40, "at most 40 tags are possible");
        for choice in &self.choices {
            let most_gib = if choice.place.is_local() { EPHEMERAL_MAX_GIB } else { MANAGED_MAX_GIB };
            if self.os_disk_gib > most_gib {
                wrong.push(format!("the OS disk on {} has at most {most_gib} GiB", choice.size));
            }
            if choice.full_copy && !choice.place.is_local() {
                wrong.push(format!("a managed OS disk, as on {}, has no full copy", choice.size));
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let what = format!("cannot describe machine {name} to Azure: {}", wrong.join("; "));
        Err(AzureError::new(AzureErrorKind::Invalid, what))
    }

    /// The zones in the order in which this machine tries them. The first zones of many machines are spread evenly.
    /// `None`: the region chooses.
    pub(super) fn zones_for(&self, id: &MachineId) -> Vec<Option<&str>> {
        if self.zones.is_empty() {
            return vec![None];
        }
        let first = id.spread() % self.zones.len();
        let (before, after) = self.zones.split_at(first);
        after.iter().chain(before).map(|zone| Some(zone.as_str())).collect()
    }

    /// Whether every size keeps the OS disk on the host.
    pub fn is_ephemeral(&self) -> bool {
        self.choices.iter().all(|choice| choice.place.is_local())
    }

    fn tags_of(&self, id: &MachineId) -> Map<String, Value> {
        let own = [(MACHINE_TAG, id.as_str()), (SCHEME_TAG, self.scheme.as_str())];
        let own = own.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value)));
        let others = self.tags.iter().map(|(name, value)| (name.clone(), Value::from(value.as_str())));
        own.chain(others).collect()
    }
}

/// The network interface of a machine. It stays while the machine is off, so that its address stays.
pub fn network_interface(scope: &Scope, id: &MachineId, spec: &MachineSpec) -> Resource {
    let mut properties = json!({
        // A backup size may lack it, and the interface is the same for all sizes.
        "enableAcceleratedNetworking": spec.choices.iter().all(|choice| choice.accelerated_networking),
        "ipConfigurations": [{
            "name": "primary",
            "properties": {"primary": true, "privateIPAllocationMethod": "Dynamic", "subnet": {"id": spec.subnet}},
        }],
    });
    if let Some(group) = &spec.security_group {
        properties["networkSecurityGroup"] = json!({"id": group});
    }
    // The scheme is not a tag of the interface, because the interface outlives a change of the scheme.
    Resource {
        path: id.network_path(scope),
        api_version: NETWORK_API,
        body: json!({"location": scope.region, "tags": {MACHINE_TAG: id.as_str()}, "properties": properties}),
        is_conditional: false,
    }
}

/// A machine of this size in this zone.
pub fn machine(
    scope: &Scope,
    id: &MachineId,
    spec: &MachineSpec,
    choice: &SizeChoice,
    zone: Option<&str>,
) -> Resource {
    let mut os_profile = json!({
        "computerName": spec.computer_name,
        "adminUsername": spec.admin_user,
        "linuxConfiguration": {
            "disablePasswordAuthentication": true,
            "ssh": {"publicKeys": [{
                "path": format!("/home/{}/.ssh/authorized_keys", spec.admin_user),
                "keyData": spec.ssh_key,
            }]},
        },
    });
    if let Some(data) = &spec.custom_data {
        os_profile["customData"] = STANDARD.encode(data).into();
    }
    let mut properties = json!({
        "hardwareProfile": {"vmSize": choice.size},
        "storageProfile": {"imageReference": {"id": spec.image}, "osDisk": os_disk(spec, choice)},
        "osProfile": os_profile,
        "networkProfile": {"networkInterfaces": [{
            "id": id.network_path(scope),
            "properties": {"primary": true, "deleteOption": "Detach"},
        }]},
        "diagnosticsProfile": {"bootDiagnostics": {"enabled": true}},
    });
    if let Some(data) = &spec.user_data {
        properties["userData"] = STANDARD.encode(data).into();
    }
    if spec.trusted_launch {
        properties["securityProfile"] = json!({
            "securityType": "TrustedLaunch", "uefiSettings": {"secureBootEnabled": true, "vTpmEnabled": true},
        });
    }
    if spec.spot {
        properties["priority"] = "Spot".into();
        properties["evictionPolicy"] = "Delete".into();
    }
    if let Some(group) = &spec.host_group {
        properties["hostGroup"] = json!({"id": group});
    }
    let mut body = json!({"location": scope.region, "tags": spec.tags_of(id), "properties": properties});
    if let Some(zone) = zone {
        body["zones"] = json!([zone]);
    }
    Resource { path: id.machine_path(scope), api_version: MACHINE_API, body, is_conditional: true }
}

fn os_disk(spec: &MachineSpec, choice: &SizeChoice) -> Value {
    let mut disk = json!({
        "createOption": "FromImage",
        "caching": if choice.place.is_local() { "ReadOnly" } else { "ReadWrite" },
        "deleteOption": "Delete",
        "diskSizeGB": spec.os_disk_gib,
        "managedDisk": {"storageAccountType": spec.disk_tier.name()},
    });
    if let Some(placement) = choice.place.placement() {
        disk["diffDiskSettings"] = json!({"option": "Local", "placement": placement});
        if choice.full_copy {
            disk["diffDiskSettings"]["enableFullCaching"] = true.into();
        }
    }
    disk
}
