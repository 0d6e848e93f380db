//! Machines: types of the requests that create, change and use them, and of the answers, which have their settings,
//! whether they should be on, and their present state.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::cloud::CloudMachine;
use crate::fixed_address::FixedAddress;
use crate::platform::{Display, Firmware, Network};

/// Where a machine's writes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum CacheMode {
    /// In memory only. When that is full, writes pause and then fail with "no space".
    #[serde(rename = "ram")]
    Ram,
    /// In memory first, overflowing to disk.
    #[serde(rename = "ram+disk")]
    RamDisk,
    /// On disk, with a small memory buffer.
    #[serde(rename = "disk")]
    Disk,
}

impl CacheMode {
    /// All modes, as written in requests.
    pub const NAMES: [&str; 3] = ["ram", "ram+disk", "disk"];

    /// The mode's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::RamDisk => "ram+disk",
            Self::Disk => "disk",
        }
    }

    /// Parses the output of [`CacheMode::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "ram" => Ok(Self::Ram),
            "ram+disk" => Ok(Self::RamDisk),
            "disk" => Ok(Self::Disk),
            "server" => Err("there is no cache mode 'server': a write cache is on the host that serves the machine's \
                             disk. To have it on a server, run 'headwater export IMAGE --nbd tcp:HOST' there with ram+disk, ram \
                             or disk (and --nbd-export NAME for each of several machines), and let them reach their disks over the \
                             network"
                .into()),
            _ => Err(format!("'{text}' is not a cache mode; use one of {}", Self::NAMES.join(", "))),
        }
    }
}

impl std::fmt::Display for CacheMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// How a machine reaches its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum DiskTransport {
    /// Through vhost-user-blk, for which the machine shares its memory with the daemon: the fastest.
    #[default]
    #[serde(rename = "vhost-user")]
    VhostUser,
    /// NBD on a socket, for hypervisors and policies that do not permit shared memory.
    #[serde(rename = "nbd")]
    Nbd,
}

impl DiskTransport {
    /// All transports, as written in requests.
    pub const NAMES: [&str; 2] = ["vhost-user", "nbd"];

    /// The transport's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
        }
    }

    /// Parses the output of [`DiskTransport::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "vhost-user" => Ok(Self::VhostUser),
            "nbd" => Ok(Self::Nbd),
            _ => Err(format!("'{text}' is not a transport; use one of {}", Self::NAMES.join(", "))),
        }
    }
}

impl std::fmt::Display for DiskTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What starts a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum BootFrom {
    /// The daemon, as a virtual machine.
    #[default]
    #[serde(rename = "vm")]
    Vm,
    /// A person or a remote power switch; the computer (a target) then boots from the network.
    #[serde(rename = "network")]
    Network,
}

impl BootFrom {
    /// All values, as written in requests.
    pub const NAMES: [&str; 2] = ["vm", "network"];

    /// The value's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Network => "network",
        }
    }

    /// Parses the output of [`BootFrom::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = [Self::Vm, Self::Network].into_iter().find(|boot| boot.name() == text);
        found.ok_or_else(|| {
            format!("'{text}' is not a way to start a machine; use one of {}", Self::NAMES.join(", "))
        })
    }
}

impl std::fmt::Display for BootFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The settings of a machine's write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheSettings {
    /// Where writes go.
    #[serde(default = "CacheSettings::default_mode")]
    pub mode: CacheMode,
    /// The memory limit; at least 16 MiB.
    #[serde(default = "CacheSettings::default_ram_bytes")]
    pub ram_bytes: u64,
    /// The limit of overflow disk space; at least 16 MiB, and not used in mode `ram`.
    #[serde(default = "CacheSettings::default_disk_bytes")]
    pub disk_bytes: u64,
    /// Its weight, 1 to 10,000, among the write caches of the host while memory is short for all.
    #[serde(default = "CacheSettings::default_weight")]
    pub weight: u32,
    /// Whether its contents stay when the machine stops, restarts, or its host fails. It then belongs to the
    /// version that the machine booted first, until a reset. Not possible in mode `ram`.
    #[serde(default)]
    pub persistent: bool,
}

impl CacheSettings {
    /// The lowest memory limit: 16 MiB.
    pub const MIN_RAM_BYTES: u64 = 16 << 20;

    /// The default for a machine that boots from the network: 512 MiB of its own memory.
    pub const fn of_target() -> Self {
        Self {
            mode: CacheMode::Ram,
            ram_bytes: 512 << 20,
            disk_bytes: Self::default_disk_bytes(),
            weight: Self::default_weight(),
            persistent: false,
        }
    }

    /// `ram+disk`.
    pub const fn default_mode() -> CacheMode {
        CacheMode::RamDisk
    }

    /// 64 MiB.
    pub const fn default_ram_bytes() -> u64 {
        64 << 20
    }

    /// 10 GiB.
    pub const fn default_disk_bytes() -> u64 {
        10 << 30
    }

    /// 100.
    pub const fn default_weight() -> u32 {
        100
    }
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self {
            mode: Self::default_mode(),
            ram_bytes: Self::default_ram_bytes(),
            disk_bytes: Self::default_disk_bytes(),
            weight: Self::default_weight(),
            persistent: false,
        }
    }
}

/// The wanted state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// Run.
    Running,
    /// Be off.
    Stopped,
}

impl Wanted {
    /// The name in the database and in answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
        }
    }

    /// Parses the output of [`Wanted::name`].
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Running, Self::Stopped].into_iter().find(|wanted| wanted.name() == text)
    }
}

/// The state of a machine.
///
/// ```text
///   created --start--> starting --> booting --> running --stop--> stopping --> stopped
///                         |            |           |                              |
///                         +------------+-----------+--> crashed                   +--start--> ...
///   any of starting..stopping, when the daemon died: lost      crashed, lost --start--> starting
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// It was never started.
    Created,
    /// Its disk is being opened and QEMU is being started.
    Starting,
    /// QEMU runs; the guest has not reported that it has booted.
    Booting,
    /// The guest has booted.
    Running,
    /// The guest was asked to shut down.
    Stopping,
    /// It is off; its disk was discarded unless it is persistent.
    Stopped,
    /// QEMU ended with an error; its disk was discarded unless it is persistent.
    Crashed,
    /// The daemon died while it ran; its disk is lost unless it is persistent. Start it to boot it again.
    Lost,
    /// The node of its host is not connected. The machine may run.
    Unknown,
}

impl MachineState {
    /// All states.
    pub const ALL: [Self; 9] = [
        Self::Created,
        Self::Starting,
        Self::Booting,
        Self::Running,
        Self::Stopping,
        Self::Stopped,
        Self::Crashed,
        Self::Lost,
        Self::Unknown,
    ];

    /// The name in the database and in answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Booting => "booting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Crashed => "crashed",
            Self::Lost => "lost",
            Self::Unknown => "unknown",
        }
    }

    /// Parses the output of [`MachineState::name`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == text)
    }

    /// Whether the machine has a QEMU and a volume in this state.
    pub const fn is_active(self) -> bool {
        matches!(self, Self::Starting | Self::Booting | Self::Running | Self::Stopping)
    }
}

impl std::fmt::Display for MachineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The identity of a guest, which it gets on the seed disk at every start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Its host name.
    pub host_name: String,
    /// Its machine-id: 32 hexadecimal digits.
    pub machine_id: String,
    /// The public half of its SSH host key, as in `known_hosts`.
    pub ssh_host_key_public: String,
    /// The fixed IP address of its network card. Absent: the guest asks a DHCP server, as it does without a bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<FixedAddress>,
    /// Cloud-init user data (`#cloud-config ...`) from the machine's creation. Not in lists of machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// The personality strings that the guest reads from its next boot on: those of its catalog, and its own. Not in lists of machines.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub personality: BTreeMap<String, String>,
}

/// Counters of a machine's disk since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskCounters {
    /// Read requests answered.
    pub reads: u64,
    /// Write requests answered.
    pub writes: u64,
    /// Bytes read by the machine.
    pub read_bytes: u64,
    /// Bytes written by the machine.
    pub written_bytes: u64,
    /// Bytes read from the image, not from the write cache.
    pub image_read_bytes: u64,
    /// Bytes that live in the write cache: in memory, packed and on the overflow disk. A packed block counts with its unpacked size.
    #[serde(default)]
    pub live_bytes: u64,
    /// Memory that the write cache takes now.
    pub ram_used_bytes: u64,
    /// Overflow disk space that the write cache uses now.
    pub disk_used_bytes: u64,
    /// Bytes that were spilled from memory to the overflow disk.
    pub spilled_bytes: u64,
    /// How often a write waited for space.
    pub pauses: u64,
    /// Read and write requests per second, over about the last second.
    pub iops: u64,
    /// Compressed bytes of the image that `--hydrate` copies to this host; 0 without `--hydrate`.
    pub to_copy_bytes: u64,
    /// Bytes of these that are copied.
    pub copied_bytes: u64,
}

/// A problem of a machine, an image or the store that a person can solve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Alarm {
    /// The subject: `machine web-1`, `image debian@3`, `store`.
    pub subject: String,
    /// When it began.
    pub since_ms: u64,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub advice: String,
}

impl std::fmt::Display for Alarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.message, self.advice)
    }
}

/// A machine, its settings and its present state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Its permanent identity.
    pub uuid: Uuid,
    /// The host that runs it. Absent if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The connection of the cloud that it is in. Absent: it runs on a host. Otherwise the settings of machines on hosts
    /// have no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection: Option<String>,
    /// The machine in the cloud, while it exists there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud: Option<CloudMachine>,
    /// The MAC address of its network card.
    pub mac: String,
    /// What starts it.
    #[serde(default)]
    pub boot: BootFrom,
    /// The image it boots, as given (`IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER`), or that of its catalog. It is resolved to
    /// a version at every start.
    pub image: String,
    /// The catalog that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalog: Option<String>,
    /// The version to which it, or its catalog, is pinned, whatever the channels of its image say, as `IMAGE@NUMBER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
    /// The version it runs, or ran last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The version that it would boot now. Absent if there is none, and in answers to changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_version: Option<String>,
    /// Whether the version that it runs, or ran last, is not the one to which its image or pin resolves now. It then
    /// changes at its next boot, or if its
    /// disk is persistent, when it is reset. In answers to changes it is set only if the image or pin names a version,
    /// because these
    /// answers do not wait for the store, which knows the channels.
    #[serde(default)]
    pub old: bool,
    /// The version below its persistent disk, if it has one. It boots that version until it is reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Whether its node ends it when the node's lease is over, so that another host can start it.
    #[serde(default)]
    pub fenced: bool,
    /// The version below the private disk of its maintenance session. It boots that disk until it is sealed or discarded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edits: Option<String>,
    /// Its write cache.
    pub cache: CacheSettings,
    /// How it reaches its disk.
    #[serde(default)]
    pub transport: DiskTransport,
    /// The guest's memory.
    pub memory_bytes: u64,
    /// The guest's processors.
    pub cpus: u32,
    /// Its firmware, if the daemon runs it.
    #[serde(default)]
    pub firmware: Firmware,
    /// Whether its firmware runs only loaders that are signed with Microsoft's keys.
    #[serde(default)]
    pub secure_boot: bool,
    /// Whether it has a TPM 2.0.
    #[serde(default)]
    pub tpm: bool,
    /// Its display.
    #[serde(default)]
    pub display: Display,
    /// The unix socket of its display, while it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_socket: Option<String>,
    /// The connection of its network card: `user` or `bridge:NAME`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub network: Network,
    /// Size of its scratch disk, which is empty at each start; 0: no scratch disk.
    #[serde(default)]
    pub scratch_bytes: u64,
    /// The holder of its claim. The claim may have ended, and the machine be about to be reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_for: Option<String>,
    /// The version of its catalog's scheme whose settings it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<u32>,
    /// Whether the scheme has a newer version, which it takes when the controller next starts it.
    #[serde(default)]
    pub scheme_old: bool,
    /// What it should do.
    pub wanted: Wanted,
    /// The present state.
    pub state: MachineState,
    /// Why it is in this state, if there is something to explain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long the last boot took, until the guest reported that it has booted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
    /// When it was last started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at_ms: Option<u64>,
    /// When it was created.
    pub created_at_ms: u64,
    /// The identity that its guest gets.
    pub identity: Identity,
    /// Why it could not be started now for lack of disk space. Only in answers to `POST` and `PATCH`, and if it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Its alarm, while it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<Alarm>,
    /// Its disk's counters, while it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskCounters>,
    /// The process that runs it, while it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The accelerator (`kvm`, `tcg`), while it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
}

/// Machines that match a filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineList {
    /// The number of all machines.
    pub total: u64,
    /// The number of machines that match.
    pub matching: u64,
    /// The machines of this page, in order: at most as many as requested, and 200 KB.
    pub machines: Vec<Machine>,
    /// The `after` of the next page, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// The version to pin a machine to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PinRequest {
    /// `IMAGE@NUMBER` or `IMAGE@HASH`, of the machine's image.
    pub version: String,
}

/// A machine to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateMachine {
    /// 1 to 63 of a-z, 0-9 and '-'.
    pub name: String,
    /// `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`; absent for a machine of a catalog.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The catalog that it belongs to: the catalog decides what it boots, and is the default of the fields below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalog: Option<String>,
    /// The host that will run it. Absent: the controller's own, or for a machine of a catalog
    /// that keeps none ready, the one with the most free memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its write cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheSettings>,
    /// How it reaches its disk. Default: `vhost-user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<DiskTransport>,
    /// The guest's memory. Default: 512 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The guest's processors. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// Its firmware. Default: `uefi` if the image boots with nothing else, or else `bios`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
    /// Whether its firmware runs only loaders that are signed with Microsoft's keys. Default: `false`. If `true`, the
    /// default of `firmware` is `uefi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
    /// Whether it has a TPM 2.0. Default: `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<bool>,
    /// Its display. Default: `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<Display>,
    /// The connection of its network card, `user` or `bridge:NAME`. Default: `user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub network: Option<Network>,
    /// Size of its scratch disk in bytes, whole MiB from 64 MiB to 4 TiB; 0: no scratch disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_bytes: Option<u64>,
    /// The guest's host name. Default: the machine's name.
    #[serde(default)]
    pub host_name: Option<String>,
    /// What starts it. Default: the daemon, as a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootFrom>,
    /// The MAC address of its network card. Required for a machine that boots from the network. Default of others: it is generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The fixed IP address of its network card, which must be on a bridge and have no other machine's address. Default: its guest asks a
    /// DHCP server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<FixedAddress>,
    /// Cloud-init user data.
    #[serde(default)]
    pub user_data: Option<String>,
}

impl CreateMachine {
    /// 512 MiB.
    pub const fn default_memory_bytes() -> u64 {
        512 << 20
    }

    /// 1.
    pub const fn default_cpus() -> u32 {
        1
    }
}

/// New limits of a machine's write cache, and its weight; memory and processors of its guest. Absent fields do not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetMachine {
    /// The memory limit of the write cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_bytes: Option<u64>,
    /// The limit of overflow disk space of the write cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Its weight among the write caches of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The guest's memory; only while the machine is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The guest's processors; only while the machine is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
}

/// A command to run in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The program (an absolute path, or found in the guest agent's search path) and its arguments.
    pub argv: Vec<String>,
    /// Timeout of the command, and before that of the wait until the guest has booted.
    #[serde(default = "ExecRequest::default_timeout_ms")]
    pub timeout_ms: u64,
    /// Its standard input, in base64; at most 1 MiB. Absent: empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
}

/// The longest standard input of a command: it is sent to the guest agent in one message.
pub const MAX_STDIN_BYTES: usize = 1 << 20;

impl ExecRequest {
    /// Ten minutes.
    pub const fn default_timeout_ms() -> u64 {
        600_000
    }
}

/// The result of a command in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// Its exit code, or 128 + the signal that ended it.
    pub exit_code: i32,
    /// Its standard output, in base64.
    pub stdout_base64: String,
    /// Its standard error, in base64.
    pub stderr_base64: String,
    /// Whether the guest agent cut the output.
    pub truncated: bool,
}

/// The users of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestUsers {
    /// How many are logged in. A user with several sessions counts several times.
    pub users: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_that_is_a_place_is_explained() {
        let why = CacheMode::parse("server").unwrap_err();
        assert!(why.contains("headwater export") && why.contains("ram+disk"), "{why}");
    }

    #[test]
    fn states_and_modes_survive_their_names() {
        for state in MachineState::ALL {
            assert_eq!(MachineState::parse(state.name()), Some(state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
        for name in CacheMode::NAMES {
            assert_eq!(CacheMode::parse(name).unwrap().name(), name);
            assert_eq!(serde_json::to_value(CacheMode::parse(name).unwrap()).unwrap(), name);
        }
        for name in DiskTransport::NAMES {
            assert_eq!(DiskTransport::parse(name).unwrap().name(), name);
            assert_eq!(serde_json::to_value(DiskTransport::parse(name).unwrap()).unwrap(), name);
        }
        for name in BootFrom::NAMES {
            assert_eq!(BootFrom::parse(name).unwrap().name(), name);
            assert_eq!(serde_json::to_value(BootFrom::parse(name).unwrap()).unwrap(), name);
        }
        assert!(DiskTransport::parse("scsi").unwrap_err().contains("vhost-user, nbd"));
    }

    #[test]
    fn a_machine_needs_only_name_and_image() {
        let create: CreateMachine = serde_json::from_str(r#"{"name":"a","image":"b"}"#).unwrap();
        assert_eq!((create.cache, create.memory_bytes, create.cpus), (None, None, None));

        assert_eq!(create.transport, None);
        let misspelt = r#"{"name":"a","image":"b","memroy_bytes":1}"#;
        assert!(serde_json::from_str::<CreateMachine>(misspelt).unwrap_err().to_string().contains("memroy"));
    }
}
