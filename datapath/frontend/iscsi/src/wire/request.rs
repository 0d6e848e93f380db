//! PDUs that initiators send.

use super::WireError;
use super::header::{
    Bhs, FINAL, Opcode, expect, get_bytes, get_u16, get_u32, get_u64, is_immediate, put, put_u16, put_u32,
    put_u64, start,
};

/// NOP-Out: a ping, or the answer to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NopOut {
    /// For immediate delivery.
    pub immediate: bool,
    /// Logical unit that a target's ping named.
    pub lun: [u8; 8],
    /// Tag; [`super::RESERVED_TAG`] where no answer is wanted.
    pub task_tag: u32,
    /// The target's tag that is answered, or [`super::RESERVED_TAG`].
    pub transfer_tag: u32,
    /// Command number.
    pub cmd_sn: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
}

impl NopOut {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::NopOut)?;
        Ok(Self {
            immediate: is_immediate(header),
            lun: get_bytes(header, 8),
            task_tag: get_u32(header, 16),
            transfer_tag: get_u32(header, 20),
            cmd_sn: get_u32(header, 24),
            exp_stat_sn: get_u32(header, 28),
        })
    }

    /// Encodes a header without data.
    pub fn encode(&self) -> Bhs {
        let mut header = start(Opcode::NopOut, self.immediate, FINAL);
        put(&mut header, 8, &self.lun);
        put_u32(&mut header, 16, self.task_tag);
        put_u32(&mut header, 20, self.transfer_tag);
        put_u32(&mut header, 24, self.cmd_sn);
        put_u32(&mut header, 28, self.exp_stat_sn);
        header
    }
}

/// SCSI Command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiCommand {
    /// For immediate delivery.
    pub immediate: bool,
    /// No unsolicited Data-Out follows.
    pub is_final: bool,
    /// Data is expected from the target.
    pub read: bool,
    /// Data goes to the target.
    pub write: bool,
    /// Task attribute: 0 untagged, 1 simple, 2 ordered, 3 head of queue, 4 ACA.
    pub attribute: u8,
    /// Logical unit.
    pub lun: [u8; 8],
    /// Tag of the task.
    pub task_tag: u32,
    /// Bytes that the initiator wants to move.
    pub expected_bytes: u32,
    /// Command number.
    pub cmd_sn: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
    /// The first 16 bytes of the command; longer ones go on in an additional header segment.
    pub cdb: [u8; 16],
}

impl ScsiCommand {
    /// Decodes a header.
    #[inline]
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::ScsiCommand)?;
        Ok(Self {
            immediate: is_immediate(header),
            is_final: header[1] & FINAL != 0,
            read: header[1] & 0x40 != 0,
            write: header[1] & 0x20 != 0,
            attribute: header[1] & 7,
            lun: get_bytes(header, 8),
            task_tag: get_u32(header, 16),
            expected_bytes: get_u32(header, 20),
            cmd_sn: get_u32(header, 24),
            exp_stat_sn: get_u32(header, 28),
            cdb: get_bytes(header, 32),
        })
    }

    /// Encodes a header without data.
    pub fn encode(&self) -> Bhs {
        let mut flags = self.attribute & 7;
        for (set, bit) in [(self.is_final, FINAL), (self.read, 0x40), (self.write, 0x20)] {
            flags |= if set { bit } else { 0 };
        }
        let mut header = start(Opcode::ScsiCommand, self.immediate, flags);
        put(&mut header, 8, &self.lun);
        put_u32(&mut header, 16, self.task_tag);
        put_u32(&mut header, 20, self.expected_bytes);
        put_u32(&mut header, 24, self.cmd_sn);
        put_u32(&mut header, 28, self.exp_stat_sn);
        put(&mut header, 32, &self.cdb);
        header
    }
}

/// Task Management Function Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskManagementRequest {
    /// For immediate delivery.
    pub immediate: bool,
    /// What to do: 1 abort task, 2 abort task set, 3 clear ACA, 4 clear task set, 5 logical unit reset,
    /// 6 target warm reset, 7 target cold reset, 8 task reassign.
    pub function: u8,
    /// Logical unit.
    pub lun: [u8; 8],
    /// Tag of the request.
    pub task_tag: u32,
    /// Tag of the task to abort.
    pub referenced_tag: u32,
    /// Command number.
    pub cmd_sn: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
    /// Command number of the task to abort.
    pub referenced_cmd_sn: u32,
    /// For task reassign.
    pub exp_data_sn: u32,
}

impl TaskManagementRequest {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::TaskManagementRequest)?;
        Ok(Self {
            immediate: is_immediate(header),
            function: header[1] & 0x7f,
            lun: get_bytes(header, 8),
            task_tag: get_u32(header, 16),
            referenced_tag: get_u32(header, 20),
            cmd_sn: get_u32(header, 24),
            exp_stat_sn: get_u32(header, 28),
            referenced_cmd_sn: get_u32(header, 32),
            exp_data_sn: get_u32(header, 36),
        })
    }

    /// Encodes the header.
    pub fn encode(&self) -> Bhs {
        let flags = FINAL | (self.function & 0x7f);
        let mut header = start(Opcode::TaskManagementRequest, self.immediate, flags);
        put(&mut header, 8, &self.lun);
        put_u32(&mut header, 16, self.task_tag);
        put_u32(&mut header, 20, self.referenced_tag);
        put_u32(&mut header, 24, self.cmd_sn);
        put_u32(&mut header, 28, self.exp_stat_sn);
        put_u32(&mut header, 32, self.referenced_cmd_sn);
        put_u32(&mut header, 36, self.exp_data_sn);
        header
    }
}

/// Login Request. Always for immediate delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoginRequest {
    /// The initiator is ready to go to the next stage.
    pub transit: bool,
    /// The text goes on in the next request.
    pub go_on: bool,
    /// Current stage: 0 security, 1 operational, 3 full feature.
    pub current_stage: u8,
    /// Next stage.
    pub next_stage: u8,
    /// Highest version.
    pub version_max: u8,
    /// Lowest version.
    pub version_min: u8,
    /// The initiator's part of the session's name.
    pub isid: [u8; 6],
    /// The target's part; 0 for a new session.
    pub tsih: u16,
    /// Tag, the same in the whole login.
    pub task_tag: u32,
    /// Connection number.
    pub cid: u16,
    /// First command number.
    pub cmd_sn: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
}

impl LoginRequest {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::LoginRequest)?;
        Ok(Self {
            transit: header[1] & FINAL != 0,
            go_on: header[1] & 0x40 != 0,
            current_stage: (header[1] >> 2) & 3,
            next_stage: header[1] & 3,
            version_max: header[2],
            version_min: header[3],
            isid: get_bytes(header, 8),
            tsih: get_u16(header, 14),
            task_tag: get_u32(header, 16),
            cid: get_u16(header, 20),
            cmd_sn: get_u32(header, 24),
            exp_stat_sn: get_u32(header, 28),
        })
    }

    /// Encodes a header without data.
    pub fn encode(&self) -> Bhs {
        let mut flags = (self.current_stage & 3) << 2 | (self.next_stage & 3);
        for (set, bit) in [(self.transit, FINAL), (self.go_on, 0x40)] {
            flags |= if set { bit } else { 0 };
        }
        let mut header = start(Opcode::LoginRequest, true, flags);
        header[2] = self.version_max;
        header[3] = self.version_min;
        put(&mut header, 8, &self.isid);
        put_u16(&mut header, 14, self.tsih);
        put_u32(&mut header, 16, self.task_tag);
        put_u16(&mut header, 20, self.cid);
        put_u32(&mut header, 24, self.cmd_sn);
        put_u32(&mut header, 28, self.exp_stat_sn);
        header
    }
}

/// Text Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextRequest {
    /// For immediate delivery.
    pub immediate: bool,
    /// The initiator has no more to say.
    pub is_final: bool,
    /// The text goes on in the next request.
    pub go_on: bool,
    /// Logical unit; 0.
    pub lun: [u8; 8],
    /// Tag of the exchange.
    pub task_tag: u32,
    /// The target's tag for an exchange that goes on, or [`super::RESERVED_TAG`].
    pub transfer_tag: u32,
    /// Command number.
    pub cmd_sn: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
}

impl TextRequest {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::TextRequest)?;
        Ok(Self {
            immediate: is_immediate(header),
            is_final: header[1] & FINAL != 0,
            go_on: header[1] & 0x40 != 0,
            lun: get_bytes(header, 8),
            task_tag: get_u32(header, 16),
            transfer_tag: get_u32(header, 20),
            cmd_sn: get_u32(header, 24),
            exp_stat_sn: get_u32(header, 28),
        })
    }

    /// Encodes a header without data.
    pub fn encode(&self) -> Bhs {
        let mut flags = 0;
        for (set, bit) in [(self.is_final, FINAL), (self.go_on, 0x40)] {
            flags |= if set { bit } else { 0 };
        }
        let mut header = start(Opcode::TextRequest, self.immediate, flags);
        put(&mut header, 8, &self.lun);
        put_u32(&mut header, 16, self.task_tag);
        put_u32(&mut header, 20, self.transfer_tag);
        put_u32(&mut header, 24, self.cmd_sn);
        put_u32(&mut header, 28, self.exp_stat_sn);
        header
    }
}

/// SCSI Data-Out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOut {
    /// The last of its sequence.
    pub is_final: bool,
    /// Logical unit, where a transfer tag is given.
    pub lun: [u8; 8],
    /// Tag of the task.
    pub task_tag: u32,
    /// Tag of the R2T that asked for it, or [`super::RESERVED_TAG`] where none did.
    pub transfer_tag: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
    /// Number in its sequence.
    pub data_sn: u32,
    /// Where it belongs in the command's data.
    pub offset: u32,
}

impl DataOut {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::DataOut)?;
        Ok(Self {
            is_final: header[1] & FINAL != 0,
            lun: get_bytes(header, 8),
            task_tag: get_u32(header, 16),
            transfer_tag: get_u32(header, 20),
            exp_stat_sn: get_u32(header, 28),
            data_sn: get_u32(header, 36),
            offset: get_u32(header, 40),
        })
    }

    /// Encodes a header without data.
    pub fn encode(&self) -> Bhs {
        let mut header = start(Opcode::DataOut, false, if self.is_final { FINAL } else { 0 });
        put(&mut header, 8, &self.lun);
        put_u32(&mut header, 16, self.task_tag);
        put_u32(&mut header, 20, self.transfer_tag);
        put_u32(&mut header, 28, self.exp_stat_sn);
        put_u32(&mut header, 36, self.data_sn);
        put_u32(&mut header, 40, self.offset);
        header
    }
}

/// Logout Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogoutRequest {
    /// For immediate delivery.
    pub immediate: bool,
    /// 0 close the session, 1 close a connection, 2 remove a connection for recovery.
    pub reason: u8,
    /// Tag of the request.
    pub task_tag: u32,
    /// Connection to close.
    pub cid: u16,
    /// Command number.
    pub cmd_sn: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
}

impl LogoutRequest {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::LogoutRequest)?;
        Ok(Self {
            immediate: is_immediate(header),
            reason: header[1] & 0x7f,
            task_tag: get_u32(header, 16),
            cid: get_u16(header, 20),
            cmd_sn: get_u32(header, 24),
            exp_stat_sn: get_u32(header, 28),
        })
    }

    /// Encodes the header.
    pub fn encode(&self) -> Bhs {
        let mut header = start(Opcode::LogoutRequest, self.immediate, FINAL | (self.reason & 0x7f));
        put_u32(&mut header, 16, self.task_tag);
        put_u16(&mut header, 20, self.cid);
        put_u32(&mut header, 24, self.cmd_sn);
        put_u32(&mut header, 28, self.exp_stat_sn);
        header
    }
}

/// SNACK Request: asks for something again. Refused at error recovery level 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnackRequest {
    /// 0 data or R2T, 1 status, 2 data acknowledged, 3 R-data.
    pub kind: u8,
    /// Logical unit.
    pub lun: [u8; 8],
    /// Tag of the task.
    pub task_tag: u32,
    /// Target transfer tag or SNACK tag.
    pub transfer_tag: u32,
    /// The next status number that the initiator expects.
    pub exp_stat_sn: u32,
    /// First number wanted.
    pub begin: u32,
    /// How many; 0 for all.
    pub run: u32,
}

impl SnackRequest {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::SnackRequest)?;
        Ok(Self {
            kind: header[1] & 0x0f,
            lun: get_bytes(header, 8),
            task_tag: get_u32(header, 16),
            transfer_tag: get_u32(header, 20),
            exp_stat_sn: get_u32(header, 28),
            begin: get_u32(header, 40),
            run: get_u32(header, 44),
        })
    }

    /// Encodes the header.
    pub fn encode(&self) -> Bhs {
        let mut header = start(Opcode::SnackRequest, false, FINAL | (self.kind & 0x0f));
        put(&mut header, 8, &self.lun);
        put_u32(&mut header, 16, self.task_tag);
        put_u32(&mut header, 20, self.transfer_tag);
        put_u32(&mut header, 28, self.exp_stat_sn);
        put_u32(&mut header, 40, self.begin);
        put_u32(&mut header, 44, self.run);
        header
    }
}

/// The logical unit number of a LUN field as an integer, as it is on the wire.
pub fn lun_number(lun: [u8; 8]) -> u64 {
    u64::from_be_bytes(lun)
}

/// A LUN field of a header.
pub fn lun_of(header: &Bhs) -> u64 {
    get_u64(header, 8)
}

/// Sets a LUN field.
pub fn set_lun(header: &mut Bhs, lun: u64) {
    put_u64(header, 8, lun);
}
