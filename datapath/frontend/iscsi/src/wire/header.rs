//! The basic header segment: fields that all PDUs share.
//!
//! ```text
//! byte 0      1       2       3       4            5..7                8..15  16..19
//!  .I opcode | flags | kind  | kind  | AHS words  | data segment bytes | LUN  | initiator task tag | 20..47: by kind
//! ```

use super::WireError;

/// Length of the basic header segment.
pub const BHS_BYTES: usize = 48;

/// A basic header segment as it is on the wire.
pub type Bhs = [u8; BHS_BYTES];

/// The tag that stands for "none".
pub const RESERVED_TAG: u32 = 0xffff_ffff;

/// The longest data segment that the header can express.
pub const SEGMENT_BYTES_MAX: u32 = 0x00ff_ffff;

const IMMEDIATE: u8 = 0x40;
const OPCODE: u8 = 0x3f;

/// The final bit of byte 1.
pub const FINAL: u8 = 0x80;

/// The bit of byte 1 that says that a text continues in the next PDU.
pub(crate) const CONTINUE: u8 = 0x40;

/// The kind of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of RFC 7143")]
#[repr(u8)]
pub enum Opcode {
    NopOut = 0x00,
    ScsiCommand = 0x01,
    TaskManagementRequest = 0x02,
    LoginRequest = 0x03,
    TextRequest = 0x04,
    DataOut = 0x05,
    LogoutRequest = 0x06,
    SnackRequest = 0x10,
    NopIn = 0x20,
    ScsiResponse = 0x21,
    TaskManagementResponse = 0x22,
    LoginResponse = 0x23,
    TextResponse = 0x24,
    DataIn = 0x25,
    LogoutResponse = 0x26,
    ReadyToTransfer = 0x31,
    AsyncMessage = 0x32,
    Reject = 0x3f,
}

impl Opcode {
    /// The opcode of a header, if it is one of the protocol's.
    pub fn of(header: &Bhs) -> Option<Self> {
        Some(match header[0] & OPCODE {
            0x00 => Self::NopOut,
            0x01 => Self::ScsiCommand,
            0x02 => Self::TaskManagementRequest,
            0x03 => Self::LoginRequest,
            0x04 => Self::TextRequest,
            0x05 => Self::DataOut,
            0x06 => Self::LogoutRequest,
            0x10 => Self::SnackRequest,
            0x20 => Self::NopIn,
            0x21 => Self::ScsiResponse,
            0x22 => Self::TaskManagementResponse,
            0x23 => Self::LoginResponse,
            0x24 => Self::TextResponse,
            0x25 => Self::DataIn,
            0x26 => Self::LogoutResponse,
            0x31 => Self::ReadyToTransfer,
            0x32 => Self::AsyncMessage,
            0x3f => Self::Reject,
            _ => return None,
        })
    }
}

/// The opcode number of a header, known or not.
pub fn opcode_number(header: &Bhs) -> u8 {
    header[0] & OPCODE
}

/// Whether the PDU is for immediate delivery.
pub fn is_immediate(header: &Bhs) -> bool {
    header[0] & IMMEDIATE != 0
}

/// Length of all additional header segments in bytes.
pub fn ahs_bytes(header: &Bhs) -> usize {
    usize::from(header[4]) * 4
}

/// Length of the data segment in bytes, without padding.
#[inline]
pub fn segment_bytes(header: &Bhs) -> u32 {
    u32::from_be_bytes([0, header[5], header[6], header[7]])
}

/// The initiator task tag.
pub fn task_tag(header: &Bhs) -> u32 {
    get_u32(header, 16)
}

/// How many bytes of padding follow a data segment of this length.
#[inline]
pub const fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

/// The length of a data segment with its padding.
#[inline]
pub const fn padded(len: usize) -> usize {
    len.saturating_add(padding(len))
}

/// A header with opcode, immediate bit and byte 1.
pub(crate) fn start(opcode: Opcode, immediate: bool, flags: u8) -> Bhs {
    let mut header = [0; BHS_BYTES];
    header[0] = opcode as u8 | if immediate { IMMEDIATE } else { 0 };
    header[1] = flags;
    header
}

/// Sets the length of the data segment. A length that does not fit the field is cut to its maximum; no caller
/// reaches that, because the negotiated length is at most the maximum.
#[inline]
pub fn set_segment_bytes(header: &mut Bhs, len: usize) {
    let len = u32::try_from(len).unwrap_or(SEGMENT_BYTES_MAX).min(SEGMENT_BYTES_MAX);
    let [_, a, b, c] = len.to_be_bytes();
    header[5] = a;
    header[6] = b;
    header[7] = c;
}

/// Fails unless the header has this opcode.
pub(crate) fn expect(header: &Bhs, opcode: Opcode) -> Result<(), WireError> {
    if Opcode::of(header) == Some(opcode) { Ok(()) } else { Err(WireError("the opcode is another one")) }
}

#[inline]
pub(crate) fn get_u16(header: &Bhs, at: usize) -> u16 {
    header.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u16::from_be_bytes(*bytes))
}

#[inline]
pub(crate) fn get_u32(header: &Bhs, at: usize) -> u32 {
    header.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

#[inline]
pub(crate) fn get_bytes<const N: usize>(header: &Bhs, at: usize) -> [u8; N] {
    header.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

#[inline]
pub(crate) fn put(header: &mut Bhs, at: usize, bytes: &[u8]) {
    if let Some(room) = header.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len())) {
        room.copy_from_slice(bytes);
    }
}

#[inline]
pub(crate) fn put_u16(header: &mut Bhs, at: usize, value: u16) {
    put(header, at, &value.to_be_bytes());
}

#[inline]
pub(crate) fn put_u32(header: &mut Bhs, at: usize, value: u32) {
    put(header, at, &value.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_fills_up_to_four() {
        for (len, pad) in [(0, 0), (1, 3), (2, 2), (3, 1), (4, 0), (4097, 3)] {
            assert_eq!(padding(len), pad);
            assert_eq!(padded(len), len + pad);
        }
    }

    #[test]
    fn lengths_take_three_bytes() {
        let mut header = start(Opcode::DataIn, false, 0);
        set_segment_bytes(&mut header, 0x12_3456);
        assert_eq!(header[4..8], [0, 0x12, 0x34, 0x56]);
        assert_eq!(segment_bytes(&header), 0x12_3456);
        set_segment_bytes(&mut header, usize::MAX);
        assert_eq!(segment_bytes(&header), SEGMENT_BYTES_MAX);
        header[4] = 255;
        assert_eq!(ahs_bytes(&header), 1020);
    }
}
