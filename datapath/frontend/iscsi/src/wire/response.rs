//! PDUs that targets send.

use super::WireError;
use super::header::{Bhs, CONTINUE, FINAL, Opcode, expect, get_u16, get_u32, put_u16, put_u32, start};
use super::table::{At, Bit, Bits, Place, pdu};

/// Position of the numbers in these PDUs.
const NUMBERS: At = At(24);

/// The numbers that nearly all of a target's PDUs carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Status number.
    pub stat_sn: u32,
    /// The next command number that the target expects.
    pub exp_cmd_sn: u32,
    /// The highest command number that the target accepts.
    pub max_cmd_sn: u32,
}

impl Place<Numbers> for At {
    #[inline]
    fn get(self, header: &Bhs) -> Numbers {
        let number = |index: usize| At(self.0.saturating_add(4 * index)).get(header);
        Numbers { stat_sn: number(0), exp_cmd_sn: number(1), max_cmd_sn: number(2) }
    }

    #[inline]
    fn put(self, value: Numbers, header: &mut Bhs) {
        for (index, number) in [value.stat_sn, value.exp_cmd_sn, value.max_cmd_sn].into_iter().enumerate() {
            At(self.0.saturating_add(4 * index)).put(number, header);
        }
    }
}

/// The difference between the announced data and the data of the command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residual {
    /// Exactly what was announced.
    #[default]
    None,
    /// This much less.
    Underflow(u32),
    /// The command has this much more.
    Overflow(u32),
}

impl Residual {
    /// The residual if `expected` bytes were announced and the command has `actual`.
    pub fn of(expected: u32, actual: u64) -> Self {
        let expected = u64::from(expected);
        if actual == expected {
            Self::None
        } else if actual < expected {
            Self::Underflow(u32::try_from(expected.saturating_sub(actual)).unwrap_or(u32::MAX))
        } else {
            Self::Overflow(u32::try_from(actual.saturating_sub(expected)).unwrap_or(u32::MAX))
        }
    }

    fn flags(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Underflow(_) => 2,
            Self::Overflow(_) => 4,
        }
    }

    fn count(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Underflow(count) | Self::Overflow(count) => count,
        }
    }

    fn get(flags: u8, count: u32) -> Result<Self, WireError> {
        match flags & 6 {
            0 => Ok(Self::None),
            2 => Ok(Self::Underflow(count)),
            4 => Ok(Self::Overflow(count)),
            _ => Err(WireError("underflow and overflow exclude each other")),
        }
    }
}

pdu! {
    /// NOP-In: a ping, the answer to one, or only an update of the numbers.
    NopIn(false, FINAL) {
        /// Logical unit of a ping.
        lun: [u8; 8] = At(8);
        /// Tag of the NOP-Out that is answered, or [`super::RESERVED_TAG`].
        task_tag: u32 = At(16);
        /// Tag to answer a ping with, or [`super::RESERVED_TAG`].
        transfer_tag: u32 = At(20);
        /// Numbers.
        numbers: Numbers = At(24);
    }
}

/// SCSI Response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiResponse {
    /// 0 completed at target, 1 target failure.
    pub response: u8,
    /// SCSI status.
    pub status: u8,
    /// Tag of the task.
    pub task_tag: u32,
    /// Numbers.
    pub numbers: Numbers,
    /// How many Data-In and R2T PDUs were sent.
    pub exp_data_sn: u32,
    /// Residual of the command; for a bidirectional command, of its data-out.
    pub residual: Residual,
    /// Residual of the data-in of a bidirectional command.
    pub read_residual: Residual,
}

impl ScsiResponse {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::ScsiResponse)?;
        Ok(Self {
            response: header[2],
            status: header[3],
            task_tag: get_u32(header, 16),
            numbers: NUMBERS.get(header),
            exp_data_sn: get_u32(header, 36),
            residual: Residual::get(header[1], get_u32(header, 44))?,
            read_residual: Residual::get(header[1] >> 2, get_u32(header, 40))?,
        })
    }

    /// Encodes a header without data.
    #[inline]
    pub fn encode(&self) -> Bhs {
        let flags = FINAL | self.residual.flags() | self.read_residual.flags() << 2;
        let mut header = start(Opcode::ScsiResponse, false, flags);
        header[2] = self.response;
        header[3] = self.status;
        put_u32(&mut header, 16, self.task_tag);
        NUMBERS.put(self.numbers, &mut header);
        put_u32(&mut header, 36, self.exp_data_sn);
        put_u32(&mut header, 40, self.read_residual.count());
        put_u32(&mut header, 44, self.residual.count());
        header
    }
}

pdu! {
    /// Task Management Function Response.
    TaskManagementResponse(false, FINAL) {
        /// 0 complete, 1 no such task, 2 no such LUN, 4 reassignment not supported, 5 function not supported,
        /// 6 authorization failed, 255 rejected.
        response: u8 = At(2);
        /// Tag of the request.
        task_tag: u32 = At(16);
        /// Numbers.
        numbers: Numbers = At(24);
    }
}

pdu! {
    /// Login Response.
    LoginResponse(false, 0) {
        /// The next stage begins.
        transit: bool = Bit(1, FINAL);
        /// The text continues in the next response.
        go_on: bool = Bit(1, CONTINUE);
        /// Current stage.
        current_stage: u8 = Bits(1, 2, 3);
        /// Next stage.
        next_stage: u8 = Bits(1, 0, 3);
        /// Highest version.
        version_max: u8 = At(2);
        /// Version in use.
        version_active: u8 = At(3);
        /// The initiator's part of the session's name.
        isid: [u8; 6] = At(8);
        /// The target's part, in the last response of a login.
        tsih: u16 = At(14);
        /// Tag of the login.
        task_tag: u32 = At(16);
        /// Numbers.
        numbers: Numbers = At(24);
        /// Status class and detail.
        status: u16 = At(36);
    }
}

pdu! {
    /// Text Response.
    TextResponse(false, 0) {
        /// The exchange is over.
        is_final: bool = Bit(1, FINAL);
        /// The text continues in the next response.
        go_on: bool = Bit(1, CONTINUE);
        /// Logical unit; 0.
        lun: [u8; 8] = At(8);
        /// Tag of the exchange.
        task_tag: u32 = At(16);
        /// Tag to continue with, or [`super::RESERVED_TAG`].
        transfer_tag: u32 = At(20);
        /// Numbers.
        numbers: Numbers = At(24);
    }
}

/// SCSI Data-In.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataIn {
    /// The last of its sequence.
    pub is_final: bool,
    /// Status and residual, if this PDU ends the command.
    pub status: Option<(u8, Residual)>,
    /// Tag of the task.
    pub task_tag: u32,
    /// Numbers; the status number is valid only with a status.
    pub numbers: Numbers,
    /// Number in the command.
    pub data_sn: u32,
    /// Offset in the command's data.
    pub offset: u32,
}

impl DataIn {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::DataIn)?;
        let status = match header[1] & 1 {
            0 => None,
            _ => Some((header[3], Residual::get(header[1], get_u32(header, 44))?)),
        };
        Ok(Self {
            is_final: header[1] & FINAL != 0,
            status,
            task_tag: get_u32(header, 16),
            numbers: NUMBERS.get(header),
            data_sn: get_u32(header, 36),
            offset: get_u32(header, 40),
        })
    }

    /// Encodes a header without data.
    #[inline]
    pub fn encode(&self) -> Bhs {
        let mut flags = if self.is_final { FINAL } else { 0 };
        if let Some((_, residual)) = self.status {
            flags |= 1 | residual.flags();
        }
        let mut header = start(Opcode::DataIn, false, flags);
        // Without a tag: the initiator need not send it back.
        put_u32(&mut header, 20, super::RESERVED_TAG);
        put_u32(&mut header, 16, self.task_tag);
        NUMBERS.put(self.numbers, &mut header);
        put_u32(&mut header, 36, self.data_sn);
        put_u32(&mut header, 40, self.offset);
        if let Some((status, residual)) = self.status {
            header[3] = status;
            put_u32(&mut header, 44, residual.count());
        }
        header
    }
}

pdu! {
    /// Logout Response.
    LogoutResponse(false, FINAL) {
        /// 0 closed, 1 no such connection, 2 recovery not supported, 3 cleanup failed.
        response: u8 = At(2);
        /// Tag of the request.
        task_tag: u32 = At(16);
        /// Numbers.
        numbers: Numbers = At(24);
        /// Seconds to wait before a new login.
        time_to_wait_s: u16 = At(40);
        /// Seconds that tasks are kept.
        time_to_retain_s: u16 = At(42);
    }
}

pdu! {
    /// Ready To Transfer: the target requests data.
    ReadyToTransfer(false, FINAL) {
        /// Logical unit.
        lun: [u8; 8] = At(8);
        /// Tag of the task.
        task_tag: u32 = At(16);
        /// Tag that the Data-Out PDUs carry.
        transfer_tag: u32 = At(20);
        /// Numbers; the status number is the next one and is not used up.
        numbers: Numbers = At(24);
        /// Number in the command.
        r2t_sn: u32 = At(36);
        /// Offset of the data in the command's data.
        offset: u32 = At(40);
        /// Length of the data in bytes.
        desired_bytes: u32 = At(44);
    }
}

/// Asynchronous Message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncMessage {
    /// 0 SCSI event, 1 the target asks for logout, 2 it drops the connection, 3 it drops all connections.
    pub event: u8,
    /// Numbers.
    pub numbers: Numbers,
    /// Of event 1: reserved.
    pub parameter1: u16,
    /// Seconds.
    pub parameter2: u16,
    /// Of event 1: seconds for the logout.
    pub parameter3: u16,
}

impl AsyncMessage {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::AsyncMessage)?;
        Ok(Self {
            event: header[36],
            numbers: NUMBERS.get(header),
            parameter1: get_u16(header, 38),
            parameter2: get_u16(header, 40),
            parameter3: get_u16(header, 42),
        })
    }

    /// Encodes the header.
    pub fn encode(&self) -> Bhs {
        let mut header = start(Opcode::AsyncMessage, false, FINAL);
        put_u32(&mut header, 16, super::RESERVED_TAG);
        NUMBERS.put(self.numbers, &mut header);
        header[36] = self.event;
        put_u16(&mut header, 38, self.parameter1);
        put_u16(&mut header, 40, self.parameter2);
        put_u16(&mut header, 42, self.parameter3);
        header
    }
}

/// Why a PDU was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of RFC 7143")]
#[repr(u8)]
pub enum RejectReason {
    DataDigestError = 0x02,
    SnackReject = 0x03,
    ProtocolError = 0x04,
    CommandNotSupported = 0x05,
    ImmediateCommandReject = 0x06,
    TaskInProgress = 0x07,
    InvalidPduField = 0x09,
    LongOperationReject = 0x0a,
}

/// Reject. Its data segment is the header of the PDU that is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Why, as a number.
    pub reason: u8,
    /// Numbers.
    pub numbers: Numbers,
}

impl Reject {
    /// Decodes a header.
    pub fn decode(header: &Bhs) -> Result<Self, WireError> {
        expect(header, Opcode::Reject)?;
        Ok(Self { reason: header[2], numbers: NUMBERS.get(header) })
    }

    /// Encodes a header without data.
    pub fn encode(&self) -> Bhs {
        let mut header = start(Opcode::Reject, false, FINAL);
        header[2] = self.reason;
        put_u32(&mut header, 16, super::RESERVED_TAG);
        NUMBERS.put(self.numbers, &mut header);
        header
    }
}
