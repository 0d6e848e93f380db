//! The orders of lists of machines.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::Machine;
use crate::name::natural;

/// An order of machines: the largest first, but names and states from a to z. Machines that are equal are in the order of names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MachineSort {
    /// As people count: `pc-2` before `pc-10`.
    #[default]
    Name,
    /// By what they do.
    State,
    /// By the memory that their write caches take.
    Ram,
    /// By the overflow disk that their write caches take.
    Disk,
    /// By both together.
    Cache,
    /// By reads and writes a second.
    Iops,
    /// By the time of the last boot.
    Boot,
}

impl MachineSort {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Name, Self::State, Self::Ram, Self::Disk, Self::Cache, Self::Iops, Self::Boot];

    /// As written in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::State => "state",
            Self::Ram => "ram",
            Self::Disk => "disk",
            Self::Cache => "cache",
            Self::Iops => "iops",
            Self::Boot => "boot",
        }
    }

    /// Reads what [`MachineSort::name`] gave.
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|sort| sort.name() == text);
        found.ok_or_else(|| {
            format!("there is no order '{text}': name, state, ram, disk, cache, iops and boot are")
        })
    }

    /// Brings machines into this order.
    pub fn sort(self, machines: &mut [Machine]) {
        machines.sort_by(|a, b| natural(&a.name, &b.name));
        let disk = |machine: &Machine| machine.disk.unwrap_or_default();
        match self {
            Self::Name => {}
            Self::State => machines.sort_by_key(|machine| machine.state.name()),
            Self::Ram => machines.sort_by_key(|machine| std::cmp::Reverse(disk(machine).ram_used_bytes)),
            Self::Disk => machines.sort_by_key(|machine| std::cmp::Reverse(disk(machine).disk_used_bytes)),
            Self::Cache => machines.sort_by_key(|machine| {
                let disk = disk(machine);
                std::cmp::Reverse(disk.ram_used_bytes.saturating_add(disk.disk_used_bytes))
            }),
            Self::Iops => machines.sort_by_key(|machine| std::cmp::Reverse(disk(machine).iops)),
            Self::Boot => machines.sort_by_key(|machine| std::cmp::Reverse(machine.boot_ms.unwrap_or(0))),
        }
    }
}

impl std::fmt::Display for MachineSort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
