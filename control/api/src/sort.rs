//! The orders in which lists of machines are returned, and the position in an order at which the next page of a list
//! begins.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::{Machine, MachineState};
use crate::name::natural;
use crate::problem::{Problem, ProblemKind};

/// An order of machines. Names and states ascend, numbers descend. Equal machines are ordered by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MachineSort {
    /// By name in natural order: `pc-2` before `pc-10`.
    #[default]
    Name,
    /// By state.
    State,
    /// By the memory that their write caches take.
    Ram,
    /// By the overflow disk that their write caches take.
    Disk,
    /// By the sum of both.
    Cache,
    /// By reads and writes a second.
    Iops,
    /// By the time of the last boot.
    Boot,
}

impl MachineSort {
    /// All orders.
    pub const ALL: [Self; 7] =
        [Self::Name, Self::State, Self::Ram, Self::Disk, Self::Cache, Self::Iops, Self::Boot];

    /// The order's name in requests.
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

    /// Parses the output of [`MachineSort::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|sort| sort.name() == text);
        found.ok_or_else(|| {
            format!("'{text}' is not an order; write name, state, ram, disk, cache, iops or boot")
        })
    }

    /// Whether the order depends on present use, which no database knows.
    pub const fn is_live(self) -> bool {
        matches!(self, Self::Ram | Self::Disk | Self::Cache | Self::Iops)
    }

    /// The position of a machine in this order, from which the next page begins. `None`: an order by present use has no
    /// pages.
    pub fn position(self, machine: &Machine) -> Option<Position> {
        let name = machine.name.clone();
        match self {
            Self::Name => Some(Position::Name(name)),
            Self::State => Some(Position::State(machine.state, name)),
            Self::Boot => Some(Position::Boot(machine.boot_ms.unwrap_or(0), name)),
            Self::Ram | Self::Disk | Self::Cache | Self::Iops => None,
        }
    }

    /// Parses a position that an answer returned as `next`.
    pub fn read_position(self, text: &str) -> Result<Position, Problem> {
        let parts = text.rsplit_once('/');
        let position = match self {
            Self::Name => Some(Position::Name(text.to_owned())),
            Self::State => parts.and_then(|(state, name)| {
                Some(Position::State(MachineState::parse(state)?, name.to_owned()))
            }),
            Self::Boot => {
                parts.and_then(|(boot, name)| Some(Position::Boot(boot.parse().ok()?, name.to_owned())))
            }
            Self::Ram | Self::Disk | Self::Cache | Self::Iops => {
                let message = format!("the order '{self}' has no pages, because it changes all the time");
                return Err(Problem::new(ProblemKind::Invalid, message)
                    .advise("send the request with 'limit' and without 'after'"));
            }
        };
        position.ok_or_else(|| {
            let shown: String = text.chars().take(100).collect();
            let message = format!("'{}' is not a position in the order '{self}'", shown.escape_debug());
            Problem::new(ProblemKind::Invalid, message)
                .advise("send the 'next' of the previous answer as 'after'")
        })
    }

    /// Sorts machines in this order.
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

/// A position in an order of machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Position {
    /// After this name.
    Name(String),
    /// After all machines of earlier states, and those of this state up to this name.
    State(MachineState, String),
    /// After all machines whose boot took longer than this time in milliseconds, and those with this time up to this name.
    Boot(u64, String),
}

impl Position {
    /// Whether this position is after another one of the same order.
    pub fn is_after(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(one), Self::Name(other)) => natural(one, other).is_gt(),
            (Self::State(state, one), Self::State(other_state, other)) => {
                state.name().cmp(other_state.name()).then_with(|| natural(one, other)).is_gt()
            }
            (Self::Boot(boot_ms, one), Self::Boot(other_ms, other)) => {
                other_ms.cmp(boot_ms).then_with(|| natural(one, other)).is_gt()
            }
            _ => false,
        }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::State(state, name) => write!(f, "{}/{name}", state.name()),
            Self::Boot(boot_ms, name) => write!(f, "{boot_ms}/{name}"),
        }
    }
}

impl std::fmt::Display for MachineSort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
