//! Commands, functions and outcomes: the types that pass between a transport and a unit.

use crate::sense::{Sense, Status};

/// A command descriptor block, padded with zeroes to 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cdb([u8; 16]);

impl Cdb {
    /// Makes a CDB from a transport's bytes. Bytes beyond 16 are ignored (no supported command has them).
    pub fn new(bytes: &[u8]) -> Self {
        let mut cdb = [0; 16];
        for (to, from) in cdb.iter_mut().zip(bytes) {
            *to = *from;
        }
        Self(cdb)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The operation code.
    pub fn opcode(&self) -> u8 {
        let [opcode, ..] = self.0;
        opcode
    }
}

impl From<[u8; 16]> for Cdb {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl std::fmt::Debug for Cdb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cdb(")?;
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        f.write_str(")")
    }
}

/// The 8-byte LUN of SAM, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lun(pub [u8; 8]);

impl Lun {
    /// A single-level LUN: peripheral device addressing below 256, flat space above (at most 16383).
    pub fn single(number: u16) -> Self {
        let [high, low] = number.to_be_bytes();
        let high = if number < 256 { 0 } else { 0x40 | (high & 0x3f) };
        Self([high, low, 0, 0, 0, 0, 0, 0])
    }

    /// The number of a single-level LUN; `None` for all others.
    pub fn number(self) -> Option<u16> {
        let [high, low, rest @ ..] = self.0;
        if rest != [0; 6] {
            return None;
        }
        match high >> 6 {
            0 if high == 0 => Some(u16::from(low)),
            1 => Some(u16::from_be_bytes([high & 0x3f, low])),
            _ => None,
        }
    }
}

/// Task attribute (SAM-5, 8.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attribute {
    /// May run concurrently with others.
    #[default]
    Simple,
    /// Runs after all earlier tasks and before all later ones.
    Ordered,
    /// Runs as soon as it can.
    HeadOfQueue,
    /// Requests an auto-contingent allegiance, which no logical unit here establishes.
    Aca,
}

/// A command with borrowed buffers, for [`crate::Nexus::try_now`].
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    /// Addressed logical unit.
    pub lun: Lun,
    /// Its order among other tasks.
    pub attribute: Attribute,
    /// The command.
    pub cdb: &'a Cdb,
    /// The data-out: [`Expected::data_out_bytes`], or everything that the initiator announced if that is
    /// less. Additional bytes are ignored.
    pub data_out: &'a [u8],
    /// How much data-out the initiator announced (iSCSI: the expected data transfer length of a write, else
    /// 0). Some commands are refused if it differs from the CDB.
    pub announced_bytes: u64,
}

/// When a command arrived, relative to functions that end all tasks of a logical unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrival {
    pub(crate) resets: u64,
    pub(crate) clears: u64,
}

/// A command that owns its buffers, for [`crate::Nexus::execute`].
#[derive(Debug)]
pub struct Task {
    /// Addressed logical unit.
    pub lun: Lun,
    /// Its order among other tasks.
    pub attribute: Attribute,
    /// The transport's number for the task, unique in the nexus while it runs ([`Function::AbortTask`]).
    pub tag: u64,
    /// [`crate::Nexus::arrival`] when the command arrived, which may be long before its data did. The command
    /// is aborted if all tasks were aborted meanwhile.
    pub arrival: Arrival,
    /// The command.
    pub cdb: Cdb,
    /// Like [`Command::data_out`]; returned in [`Outcome::data_out`].
    pub data_out: Vec<u8>,
    /// Like [`Command::announced_bytes`].
    pub announced_bytes: u64,
    /// Memory for data-in, used if its capacity is sufficient; its contents do not matter.
    pub data_in: Vec<u8>,
}

/// How much data a command moves, the memory that it needs, and whether it needs disk space, according to its
/// CDB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Bytes of data-out that the command takes.
    pub data_out_bytes: u64,
    /// The most bytes of data-in that the command returns.
    pub data_in_bytes: u64,
    /// Additional memory that it needs while it waits for the device, for data that is compared or written
    /// many times.
    pub buffer_bytes: u64,
    /// Whether it stores data, so that it may wait for disk space. A command that unmaps or clears blocks
    /// does not.
    pub needs_room: bool,
}

/// The result of [`crate::Nexus::try_now`].
#[derive(Debug)]
pub enum Now {
    /// The command is finished; the first `data_in_bytes` of the buffer are its data-in.
    Done {
        /// Status and sense.
        reply: Reply,
        /// Length of the data-in.
        data_in_bytes: usize,
    },
    /// It needs I/O, has to wait, or its data-in does not fit into the buffer: give the same command to
    /// [`crate::Nexus::execute`].
    MustWait,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Status.
    pub status: Status,
    /// Sense data; with CHECK CONDITION only.
    pub sense: Option<Sense>,
}

impl Reply {
    /// GOOD.
    pub const GOOD: Reply = Reply { status: Status::Good, sense: None };
}

/// The answer to a [`Task`].
#[derive(Debug)]
pub struct Outcome {
    /// Status and sense; `None`: the task was aborted, and the initiator gets no answer.
    pub reply: Option<Reply>,
    /// All data-in, whatever the initiator announced: the transport cuts it and reports the residual.
    pub data_in: Vec<u8>,
    /// The task's buffer (empty if it was lost).
    pub data_out: Vec<u8>,
}

/// Task management functions (SAM-5, 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Aborts one task of this nexus.
    AbortTask {
        /// Its logical unit.
        lun: Lun,
        /// Its [`Task::tag`].
        tag: u64,
    },
    /// Aborts all tasks of this nexus on a logical unit.
    AbortTaskSet {
        /// The logical unit.
        lun: Lun,
    },
    /// Aborts all tasks of all nexuses on a logical unit.
    ClearTaskSet {
        /// The logical unit.
        lun: Lun,
    },
    /// Aborts all tasks of a logical unit, and restores its initial state.
    LogicalUnitReset {
        /// The logical unit.
        lun: Lun,
    },
    /// [`Function::LogicalUnitReset`] of all logical units.
    TargetWarmReset,
    /// Like [`Function::TargetWarmReset`]; the transport ends all sessions of the target as well.
    TargetColdReset,
}

/// The answer to a [`Function`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionResult {
    /// Done. Also returned for a task that has ended already, if the transport knows the tag.
    Complete,
    /// No task of this nexus has the tag.
    TaskDoesNotExist,
    /// There is no such logical unit.
    LunDoesNotExist,
}
