//! Machines: what they are, what they should do and what they do.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::platform::{Display, Firmware, Network};

/// Where a machine's writes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum CacheMode {
    /// Memory only; when it is full, writes pause and then fail with "no space".
    #[serde(rename = "ram")]
    Ram,
    /// Memory first, overflowing to disk.
    #[serde(rename = "ram+disk")]
    RamDisk,
    /// Disk, with a little memory as buffer.
    #[serde(rename = "disk")]
    Disk,
}

impl CacheMode {
    /// All modes, as written.
    pub const NAMES: [&str; 3] = ["ram", "ram+disk", "disk"];

    /// The mode as written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::RamDisk => "ram+disk",
            Self::Disk => "disk",
        }
    }

    /// Reads a mode.
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
            _ => Err(format!("'{text}' is not a cache mode; write one of {}", Self::NAMES.join(", "))),
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
    /// Through memory that it shares with the daemon (vhost-user-blk): the fastest.
    #[default]
    #[serde(rename = "vhost-user")]
    VhostUser,
    /// NBD on a socket, for hypervisors and policies under which a machine's memory is not to be shared.
    #[serde(rename = "nbd")]
    Nbd,
}

impl DiskTransport {
    /// All transports, as written.
    pub const NAMES: [&str; 2] = ["vhost-user", "nbd"];

    /// The transport as written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
        }
    }

    /// Reads a transport.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "vhost-user" => Ok(Self::VhostUser),
            "nbd" => Ok(Self::Nbd),
            _ => Err(format!("'{text}' is not a transport; write one of {}", Self::NAMES.join(", "))),
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
    /// The daemon runs it as a virtual machine.
    #[default]
    #[serde(rename = "vm")]
    Vm,
    /// Somebody switches it on, and its firmware boots from the network: a target.
    #[serde(rename = "network")]
    Network,
}

impl BootFrom {
    /// Both, as written.
    pub const NAMES: [&str; 2] = ["vm", "network"];

    /// As written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Network => "network",
        }
    }

    /// Reads what [`BootFrom::name`] gave.
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = [Self::Vm, Self::Network].into_iter().find(|boot| boot.name() == text);
        found.ok_or_else(|| format!("'{text}' starts no machine; write one of {}", Self::NAMES.join(", ")))
    }
}

impl std::fmt::Display for BootFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A machine's write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheSettings {
    /// Where writes go.
    #[serde(default = "CacheSettings::default_mode")]
    pub mode: CacheMode,
    /// The most memory it may take; at least 16 MiB.
    #[serde(default = "CacheSettings::default_ram_bytes")]
    pub ram_bytes: u64,
    /// The most disk space it may take; at least 16 MiB, and not used by `ram`.
    #[serde(default = "CacheSettings::default_disk_bytes")]
    pub disk_bytes: u64,
    /// Its weight, 1 to 10,000, among the write caches of the host while memory is short for all.
    #[serde(default = "CacheSettings::default_weight")]
    pub weight: u32,
    /// Whether it is kept when the machine stops, restarts, or its host fails. It then belongs to the image's
    /// version that the machine began with, until a reset. Not for `ram`.
    #[serde(default)]
    pub persistent: bool,
}

impl CacheSettings {
    /// The least memory that it may have: 16 MiB.
    pub const MIN_RAM_BYTES: u64 = 16 << 20;

    /// The default of a machine that boots from the network: 512 MiB of its own memory.
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

/// What a machine should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// Run.
    Running,
    /// Be off.
    Stopped,
}

impl Wanted {
    /// As stored and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
        }
    }

    /// Reads what [`Wanted::name`] gave.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Running, Self::Stopped].into_iter().find(|wanted| wanted.name() == text)
    }
}

/// What a machine does.
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
    /// Never started.
    Created,
    /// Its disk is being opened and QEMU launched.
    Starting,
    /// QEMU runs; the guest has not said yet that it is up.
    Booting,
    /// The guest is up.
    Running,
    /// It was asked to shut down.
    Stopping,
    /// Off; what it wrote is forgotten, unless its disk is kept.
    Stopped,
    /// QEMU ended by itself with an error; what the machine wrote is forgotten, unless its disk is kept.
    Crashed,
    /// The daemon died while it ran; what it wrote is gone, unless its disk is kept. Start it to boot it again.
    Lost,
    /// The node of its host is not connected. It may run.
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

    /// As stored and shown.
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

    /// Reads what [`MachineState::name`] gave.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == text)
    }

    /// Whether a QEMU and a volume belong to the state.
    pub const fn is_active(self) -> bool {
        matches!(self, Self::Starting | Self::Booting | Self::Running | Self::Stopping)
    }
}

impl std::fmt::Display for MachineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What makes a guest a machine of its own. Given to it on the seed disk at every start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Identity {
    /// Its host name.
    pub host_name: String,
    /// Its machine-id: 32 hexadecimal digits.
    pub machine_id: String,
    /// The public half of its SSH host key, as in `known_hosts`.
    pub ssh_host_key_public: String,
    /// Cloud-init user data (`#cloud-config ...`) that was given when it was created. The list of all machines is without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
}

/// What a machine's disk did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskCounters {
    /// Reads answered.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// Bytes read by the machine.
    pub read_bytes: u64,
    /// Bytes written by the machine.
    pub written_bytes: u64,
    /// Bytes that were read from the image, as opposed to the write cache.
    pub image_read_bytes: u64,
    /// Bytes that live in the write cache: in memory, packed and on the overflow disk. A packed block counts with its unpacked size.
    #[serde(default)]
    pub live_bytes: u64,
    /// Memory that the write cache takes now.
    pub ram_used_bytes: u64,
    /// Overflow disk space that the write cache takes now.
    pub disk_used_bytes: u64,
    /// Bytes that moved from memory to the overflow disk, in all.
    pub spilled_bytes: u64,
    /// How often a write had to wait for room.
    pub pauses: u64,
    /// Reads and writes a second, over the last second or so.
    pub iops: u64,
    /// Bytes of the image, as they are stored, that `--hydrate` copies to this host; 0 without it.
    pub to_copy_bytes: u64,
    /// Of which are here.
    pub copied_bytes: u64,
}

/// Something that stands in a machine's way, or will, and that a person can do something about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Alarm {
    /// On what: `machine web-1`, `image debian@3`, `store`.
    pub subject: String,
    /// Since when.
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
    /// Its identity for good.
    pub uuid: Uuid,
    /// The host that runs it. Absent if there is only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The address of its network card.
    pub mac: String,
    /// What starts it.
    #[serde(default)]
    pub boot: BootFrom,
    /// The image it boots, as given (`IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER`), or that of its catalog: resolved to
    /// a version at every start.
    pub image: String,
    /// The catalog that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalog: Option<String>,
    /// The version that it, or its catalog, is pinned to whatever the channels of its image say, as `IMAGE@NUMBER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
    /// The version it runs, or ran last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The version that it would boot now. Absent where there is none, and in answers to changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_version: Option<String>,
    /// Whether it runs, or ran last, another version than its image or pin means now: it changes at its next boot, or where its
    /// disk is kept, when it is reset. In answers to changes only where the image or pin names a version: what a
    /// channel points to is the store's to say, which they do not wait for.
    #[serde(default)]
    pub old: bool,
    /// The version that its persistent disk belongs to, where there is one: it boots that until it is reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Whether its node ends it when the node has not heard the controller for the time of its lease, so that another host can start it.
    #[serde(default)]
    pub fenced: bool,
    /// The version that it edits: it boots that, on a private disk, until the edit is sealed or discarded.
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
    /// What it boots with, if the daemon runs it.
    #[serde(default)]
    pub firmware: Firmware,
    /// Whether its firmware runs only loaders that are signed with Microsoft's keys.
    #[serde(default)]
    pub secure_boot: bool,
    /// Whether it has a TPM 2.0.
    #[serde(default)]
    pub tpm: bool,
    /// What shows its screen.
    #[serde(default)]
    pub display: Display,
    /// The unix socket of its display, while it is active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_socket: Option<String>,
    /// How its network card is connected: `user` or `bridge:NAME`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub network: Network,
    /// Size of its scratch disk, which is empty at each start; 0: it has none.
    #[serde(default)]
    pub scratch_bytes: u64,
    /// Who has claimed it. The claim may have ended, and the machine be about to be reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_for: Option<String>,
    /// The version of its catalog's scheme whose settings it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<u32>,
    /// Whether the scheme has a newer version, which it takes at its next boot.
    #[serde(default)]
    pub scheme_old: bool,
    /// What it should do.
    pub wanted: Wanted,
    /// What it does.
    pub state: MachineState,
    /// Why it is in that state, where that needs saying.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How long the last boot took, until the guest said that it is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
    /// When it was started last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at_ms: Option<u64>,
    /// When it was created.
    pub created_at_ms: u64,
    /// What it tells its guest.
    pub identity: Identity,
    /// Why it could not be started now for want of disk space, in answers to `POST` of a new machine and `PATCH`, where it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// What stands in its way, while it is active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<Alarm>,
    /// Its disk's counters, while it is active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskCounters>,
    /// The process that runs it, while it is active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How it is run (`kvm`, `tcg`), while it is active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
}

/// Machines that match a filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineList {
    /// How many there are in all.
    pub total: u64,
    /// How many match.
    pub matching: u64,
    /// The machines that match, in order, at most as many as were asked for, and 200 KB of them.
    pub machines: Vec<Machine>,
    /// If more follow: `after` of the next page.
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
    /// The catalog that it belongs to: it boots what that says. What is absent below is then the catalog's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub catalog: Option<String>,
    /// The host that is to run it. Absent: that of the controller, or for a machine of a catalog the one with the most free memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its write cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheSettings>,
    /// How it reaches its disk; `vhost-user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<DiskTransport>,
    /// The guest's memory; 512 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The guest's processors; 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// What it boots with; `uefi` if the image boots with nothing else, or else `bios`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
    /// Whether its firmware runs only loaders that are signed with Microsoft's keys; `false`. If `true`, its firmware is `uefi` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
    /// Whether it has a TPM 2.0; `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<bool>,
    /// What shows its screen; `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<Display>,
    /// How its network card is connected, `user` or `bridge:NAME`; `user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub network: Option<Network>,
    /// Size of its scratch disk in bytes, whole MiB from 64 MiB to 4 TiB; 0: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_bytes: Option<u64>,
    /// The guest's host name; the machine's name where absent.
    #[serde(default)]
    pub host_name: Option<String>,
    /// What starts it; the daemon, as a virtual machine, where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootFrom>,
    /// The address of its network card, needed for a machine that boots from the network, and for no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
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

/// New limits of a machine's write cache, and its weight; memory and processors of its guest. What is absent stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetMachine {
    /// The most memory it may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_bytes: Option<u64>,
    /// The most disk space it may take.
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
    /// The program (an absolute path, or found by the guest agent's search path) and its arguments.
    pub argv: Vec<String>,
    /// How long to wait for it.
    #[serde(default = "ExecRequest::default_timeout_ms")]
    pub timeout_ms: u64,
    /// What it reads from its standard input, in base64; at most 1 MiB. Absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
}

/// The most that a command reads from its standard input: it crosses the guest agent's port in one message.
pub const MAX_STDIN_BYTES: usize = 1 << 20;

impl ExecRequest {
    /// Ten minutes.
    pub const fn default_timeout_ms() -> u64 {
        600_000
    }
}

/// What a command in a guest gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// Its exit code, or 128 + the signal that ended it.
    pub exit_code: i32,
    /// Its standard output, in base64.
    pub stdout_base64: String,
    /// Its standard error, in base64.
    pub stderr_base64: String,
    /// Whether the guest agent cut the output off.
    pub truncated: bool,
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
