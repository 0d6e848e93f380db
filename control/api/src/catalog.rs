//! Catalogs: groups of machines that boot the same image with the same settings. Types of the requests that create
//! and change a catalog, and of the answers. The settings and their versions are in [`crate::scheme`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::cloud::CloudScheme;
use crate::hours::Hours;
use crate::machine::{CacheSettings, CreateMachine, DiskTransport};
use crate::platform::{Display, Firmware, Network};
use crate::problem::{Problem, ProblemKind};
use crate::scheme::SetScheme;

/// The policy for machines of a catalog whose host is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnHostLoss {
    /// The machines stay with their host. While the controller cannot be reached, they keep running.
    #[default]
    Wait,
    /// The machines are started on other hosts. Their own host ends them when it has not heard the controller for the time
    /// of its lease.
    Restart,
}

impl OnHostLoss {
    /// The policy's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Restart => "restart",
        }
    }

    /// Parses the output of [`OnHostLoss::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        [Self::Wait, Self::Restart]
            .into_iter()
            .find(|one| one.name() == text)
            .ok_or_else(|| format!("'{text}' is neither wait nor restart"))
    }
}

/// A catalog to create: what its machines boot, and how they are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateCatalog {
    /// 1 to 63 of a-z, 0-9 and '-'. It must not be the name of a machine.
    pub name: String,
    /// `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`.
    pub image: String,
    /// The write cache of each machine.
    #[serde(default)]
    pub cache: CacheSettings,
    /// The memory of each machine's guest, in bytes.
    #[serde(default = "CreateMachine::default_memory_bytes")]
    pub memory_bytes: u64,
    /// The processors of each machine's guest.
    #[serde(default = "CreateMachine::default_cpus")]
    pub cpus: u32,
    /// How each machine reaches its disk.
    #[serde(default)]
    pub transport: DiskTransport,
    /// The firmware of each machine.
    #[serde(default)]
    pub firmware: Firmware,
    /// Whether the firmware of each machine runs only loaders that are signed with Microsoft's keys.
    #[serde(default)]
    pub secure_boot: bool,
    /// Whether each machine has a TPM 2.0.
    #[serde(default)]
    pub tpm: bool,
    /// The display of each machine.
    #[serde(default)]
    pub display: Display,
    /// How the network card of each machine is connected: `user` or `bridge:NAME`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub network: Network,
    /// Size of the scratch disk of each machine in bytes, whole MiB from 64 MiB to 4 TiB; 0: no scratch disk.
    #[serde(default)]
    pub scratch_bytes: u64,
    /// The cloud-init user data of each machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// The pattern for names of machines that `scale` creates: `#` signs stand for the digits of a number. Default:
    /// `NAME-##`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_rule: Option<String>,
    /// The number of the first machine that `scale` creates.
    #[serde(default = "CreateCatalog::default_first_number")]
    pub first_number: u32,
    /// How many machines are kept on, freshly booted and unclaimed. Default: 0.
    #[serde(default)]
    pub keep_ready: u32,
    /// The hours in which `keep_ready` counts, as `mon-fri 07:00-19:00 Europe/Berlin`. Default: always. Without a time zone, that of the
    /// daemon's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_hours: Option<Hours>,
    /// Seconds until an unclaimed machine beyond `keep_ready` is switched off, at most 604800 (7 days); 0: never. Default: 900 with `ready_hours`, 0 without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_idle_s: Option<u64>,
    /// Additional files that a seal removes in the guests of its machines: absolute paths, which may have wildcards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub seal_removes: Vec<String>,
    /// The policy for its machines whose host is lost.
    #[serde(default)]
    pub on_host_loss: OnHostLoss,
    /// How its machines are created in a cloud. Absent: they run on hosts. Otherwise the settings of machines on hosts
    /// must be absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud: Option<CloudScheme>,
}

impl CreateCatalog {
    /// Numbers start at 1.
    pub const fn default_first_number() -> u32 {
        1
    }
}

/// The change of a catalog. Absent fields do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetCatalog {
    /// What its machines boot from their next boot on: `IMAGE`, `IMAGE:CHANNEL`, `IMAGE@NUMBER` or `IMAGE@HASH`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// New settings for its machines, which take them when the controller next starts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<SetScheme>,
    /// How many of its machines are kept on, fresh and unclaimed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_ready: Option<u32>,
    /// The hours in which `keep_ready` counts, as `mon-fri 07:00-19:00 Europe/Berlin`. Without a time zone, that of the daemon's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_hours: Option<Hours>,
    /// Makes `keep_ready` count at all hours again.
    #[serde(default)]
    pub ready_always: bool,
    /// Seconds until an unclaimed machine beyond `keep_ready` is switched off; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_idle_s: Option<u64>,
    /// The complete list of additional files that a seal removes in the guests of its machines: absolute paths, which may
    /// have wildcards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal_removes: Option<Vec<String>>,
    /// The policy for its machines whose host is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_host_loss: Option<OnHostLoss>,
    /// Seconds after which an SSH host key is replaced when its machine boots, from 3600 (an hour) to 315360000 (ten years); 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotate_after_s: Option<u64>,
}

/// The allowed `rotate_after_s`, besides 0 (never).
pub const ROTATE_AFTER_S: std::ops::RangeInclusive<u64> = 3600..=3650 * 86_400;

/// The largest `stop_idle_s`.
pub const MAX_STOP_IDLE_S: u64 = 7 * 86_400;

/// The default `stop_idle_s` of a catalog with hours.
pub const DEFAULT_STOP_IDLE_S: u64 = 900;

/// The most paths of one catalog that a seal removes.
pub const SEAL_REMOVES_MAX: usize = 100;

/// Checks paths that a seal removes in a guest.
pub fn check_seal_removes(paths: &[String]) -> Result<(), Problem> {
    if paths.len() > SEAL_REMOVES_MAX {
        let len = paths.len();
        return Err(invalid(format!(
            "a seal removes at most {SEAL_REMOVES_MAX} paths for a catalog, and {len} are given"
        )));
    }
    paths.iter().try_for_each(|path| check_guest_path(path))
}

/// Checks the path of a file in a guest.
pub fn check_guest_path(path: &str) -> Result<(), Problem> {
    let is_root = path.trim_matches('/').is_empty();
    if path.starts_with('/') && !is_root && !path.contains(['\n', '\r', '\0']) {
        return Ok(());
    }
    let shown = path.escape_debug();
    Err(invalid(format!("'{shown}' is not the absolute path of a file in a guest, such as /etc/licence.key")))
}

fn invalid(message: String) -> Problem {
    Problem::new(ProblemKind::Invalid, message)
}

/// A catalog: machines that boot the same image with the same settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Catalog {
    /// Its name.
    pub name: String,
    /// What its machines boot, as given.
    pub image: String,
    /// The version that its machines boot instead of `image`, as `IMAGE@NUMBER`. The pin of a machine has priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<String>,
    /// The version to which `pin` or `image` resolves now. Absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_version: Option<String>,
    /// The number of the newest version of its scheme, whose settings follow.
    pub scheme: u32,
    /// The names of machines that have settings of an older version of it. They take the newest ones when the controller next
    /// starts them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scheme_old: Vec<String>,
    /// The write cache of each machine.
    pub cache: CacheSettings,
    /// The memory of each machine's guest, in bytes.
    pub memory_bytes: u64,
    /// The processors of each machine's guest.
    pub cpus: u32,
    /// How each machine reaches its disk.
    pub transport: DiskTransport,
    /// The firmware of each machine.
    pub firmware: Firmware,
    /// Whether the firmware of each machine, which is then `uefi`, runs only loaders that are signed with Microsoft's keys.
    #[serde(default)]
    pub secure_boot: bool,
    /// Whether each machine has a TPM 2.0.
    #[serde(default)]
    pub tpm: bool,
    /// The display of each machine.
    pub display: Display,
    /// The connection of each machine's network card: `user` or `bridge:NAME`.
    #[schema(value_type = String)]
    pub network: Network,
    /// Size of the scratch disk of each machine in bytes, whole MiB from 64 MiB to 4 TiB; 0: no scratch disk.
    #[serde(default)]
    pub scratch_bytes: u64,
    /// The cloud-init user data of each machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
    /// The pattern for names of machines that `scale` creates.
    pub name_rule: String,
    /// The number of the first machine that `scale` creates.
    pub first_number: u32,
    /// How many machines are kept on, freshly booted and unclaimed.
    #[serde(default)]
    pub keep_ready: u32,
    /// The hours in which `keep_ready` counts. Absent: always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_hours: Option<Hours>,
    /// Seconds until an unclaimed machine beyond `keep_ready` is switched off; 0: never.
    #[serde(default)]
    pub stop_idle_s: u64,
    /// Additional files that a seal removes in the guests of its machines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub seal_removes: Vec<String>,
    /// The policy for its machines whose host is lost.
    #[serde(default)]
    pub on_host_loss: OnHostLoss,
    /// Seconds after which an SSH host key is replaced when its machine boots; 0: never.
    #[serde(default)]
    pub rotate_after_s: u64,
    /// How its machines are created in a cloud. Absent: they run on hosts. Otherwise the settings of machines on hosts have
    /// no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud: Option<CloudScheme>,
    /// When it was created.
    pub created_at_ms: u64,
    /// The names of its machines.
    pub machines: Vec<String>,
    /// The names of its machines whose running version, or last version if they are off, is not `next_version`.
    pub old: Vec<String>,
}

/// All catalogs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CatalogList {
    /// Ordered by name.
    pub catalogs: Vec<Catalog>,
}
