//! Status codes and sense data, in fixed and descriptor format.

use headwater_block::{IoError, IoErrorKind};

use crate::wire::put;

/// Status codes (SAM-5, 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Good = 0x00,
    /// Sense data gives the reason.
    CheckCondition = 0x02,
    /// The unit is busy with another nexus for a short time.
    Busy = 0x08,
    /// A reservation of another initiator forbids the command.
    ReservationConflict = 0x18,
    /// Too many tasks.
    TaskSetFull = 0x28,
    /// The task was aborted by another nexus.
    TaskAborted = 0x40,
}

impl Status {
    /// The byte on the wire.
    pub fn byte(self) -> u8 {
        self as u8
    }
}

/// Sense keys (SPC-4, 4.5.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SenseKey {
    /// Nothing to report.
    NoSense = 0x0,
    /// The logical unit cannot be used now.
    NotReady = 0x2,
    /// The medium failed.
    MediumError = 0x3,
    /// The device failed.
    HardwareError = 0x4,
    /// The command is invalid here.
    IllegalRequest = 0x5,
    /// Reports an event to the initiator.
    UnitAttention = 0x6,
    /// Writing is not possible.
    DataProtect = 0x7,
    /// Third-party copying ended before all was copied.
    CopyAborted = 0xa,
    /// The target ended the command; the initiator may try again.
    AbortedCommand = 0xb,
    /// The compared data was not equal.
    Miscompare = 0xe,
}

/// Additional sense code and its qualifier, `(asc << 8) | ascq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u16);

#[expect(missing_docs, reason = "the names are the standard's texts")]
impl Code {
    pub const NONE: Code = Code(0x0000);
    pub const NOT_READY: Code = Code(0x0400);
    pub const UNREACHABLE_COPY_TARGET: Code = Code(0x0804);
    pub const WRITE_ERROR: Code = Code(0x0c00);
    pub const COPY_TARGET_NOT_REACHABLE: Code = Code(0x0d02);
    pub const INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT: Code = Code(0x0e03);
    pub const UNRECOVERED_READ_ERROR: Code = Code(0x1100);
    pub const PARAMETER_LIST_LENGTH_ERROR: Code = Code(0x1a00);
    pub const MISCOMPARE_DURING_VERIFY: Code = Code(0x1d00);
    pub const INVALID_COMMAND_OPERATION_CODE: Code = Code(0x2000);
    pub const LBA_OUT_OF_RANGE: Code = Code(0x2100);
    pub const INVALID_FIELD_IN_CDB: Code = Code(0x2400);
    pub const LOGICAL_UNIT_NOT_SUPPORTED: Code = Code(0x2500);
    pub const INVALID_FIELD_IN_PARAMETER_LIST: Code = Code(0x2600);
    pub const INVALID_RELEASE_OF_PERSISTENT_RESERVATION: Code = Code(0x2604);
    pub const TOO_MANY_TARGET_DESCRIPTORS: Code = Code(0x2606);
    pub const UNSUPPORTED_TARGET_DESCRIPTOR: Code = Code(0x2607);
    pub const TOO_MANY_SEGMENT_DESCRIPTORS: Code = Code(0x2608);
    pub const UNSUPPORTED_SEGMENT_DESCRIPTOR: Code = Code(0x2609);
    pub const WRITE_PROTECTED: Code = Code(0x2700);
    pub const SOFTWARE_WRITE_PROTECTED: Code = Code(0x2702);
    pub const SPACE_ALLOCATION_FAILED: Code = Code(0x2707);
    pub const POWER_ON_OR_RESET: Code = Code(0x2900);
    pub const RESET_FUNCTION_OCCURRED: Code = Code(0x2903);
    pub const MODE_PARAMETERS_CHANGED: Code = Code(0x2a01);
    pub const RESERVATIONS_PREEMPTED: Code = Code(0x2a03);
    pub const RESERVATIONS_RELEASED: Code = Code(0x2a04);
    pub const REGISTRATIONS_PREEMPTED: Code = Code(0x2a05);
    pub const COMMANDS_CLEARED_BY_ANOTHER_INITIATOR: Code = Code(0x2f00);
    pub const SAVING_PARAMETERS_NOT_SUPPORTED: Code = Code(0x3900);
    pub const INTERNAL_TARGET_FAILURE: Code = Code(0x4400);
    pub const INSUFFICIENT_REGISTRATION_RESOURCES: Code = Code(0x5504);
}

/// Longest sense data of this crate: a header of 8 bytes, an information and a key specific descriptor.
const SENSE_BYTES: usize = 32;

/// Sense data, encoded as it goes to the initiator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    bytes: [u8; SENSE_BYTES],
    len: u8,
}

impl Sense {
    /// The encoded bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// The sense key's number.
    pub fn key(&self) -> u8 {
        let [code, one, two, ..] = self.bytes;
        if code & 0x7f >= 0x72 { one & 0x0f } else { two & 0x0f }
    }

    /// The additional sense code and its qualifier.
    pub fn code(&self) -> Code {
        let bytes = self.bytes;
        let at = if crate::wire::u8_at(&bytes, 0) & 0x7f >= 0x72 { 2 } else { 12 };
        Code(crate::wire::u16_at(&bytes, at))
    }
}

impl std::fmt::Debug for Sense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sense(key {:x}h, code {:04x}h)", self.key(), self.code().0)
    }
}

/// The position of a refused field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Cdb(u16),
    Parameters(u16),
}

/// Why a command ends with CHECK CONDITION, before the format of the sense data is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    key: SenseKey,
    code: Code,
    information: Option<u64>,
    place: Option<Place>,
}

impl Fault {
    pub(crate) const fn new(key: SenseKey, code: Code) -> Self {
        Self { key, code, information: None, place: None }
    }

    /// ILLEGAL REQUEST with a code that needs no further details.
    pub(crate) const fn illegal(code: Code) -> Self {
        Self::new(SenseKey::IllegalRequest, code)
    }

    /// A field of the CDB, by the byte where it starts.
    pub(crate) const fn field(byte: u16) -> Self {
        let mut fault = Self::illegal(Code::INVALID_FIELD_IN_CDB);
        fault.place = Some(Place::Cdb(byte));
        fault
    }

    /// A field of the parameter list, by the byte where it starts.
    pub(crate) const fn parameter(byte: u16) -> Self {
        let mut fault = Self::illegal(Code::INVALID_FIELD_IN_PARAMETER_LIST);
        fault.place = Some(Place::Parameters(byte));
        fault
    }

    pub(crate) const fn unit_attention(code: Code) -> Self {
        Self::new(SenseKey::UnitAttention, code)
    }

    pub(crate) const fn with_information(mut self, information: u64) -> Self {
        self.information = Some(information);
        self
    }

    /// The fault for an error of the device.
    pub(crate) fn from_device(error: &IoError, changes: bool) -> Self {
        let medium = if changes { Code::WRITE_ERROR } else { Code::UNRECOVERED_READ_ERROR };
        match error.kind() {
            IoErrorKind::ReadOnly => Self::new(SenseKey::DataProtect, Code::WRITE_PROTECTED),
            IoErrorKind::NoSpace => Self::new(SenseKey::DataProtect, Code::SPACE_ALLOCATION_FAILED),
            IoErrorKind::Corrupt | IoErrorKind::Device => Self::new(SenseKey::MediumError, medium),
            IoErrorKind::Closed => Self::new(SenseKey::NotReady, Code::NOT_READY),
            IoErrorKind::Unsupported => Self::illegal(Code::INVALID_COMMAND_OPERATION_CODE),
            IoErrorKind::Invalid => Self::new(SenseKey::HardwareError, Code::INTERNAL_TARGET_FAILURE),
        }
    }

    /// The sense data, in the format that the control mode page (D_SENSE) or the DESC bit selects.
    pub(crate) fn sense(&self, descriptors: bool) -> Sense {
        if descriptors { self.descriptor_sense() } else { self.fixed_sense() }
    }

    fn fixed_sense(&self) -> Sense {
        let [asc, ascq] = self.code.0.to_be_bytes();
        let mut bytes = [0; SENSE_BYTES];
        put(&mut bytes, 0, &[0x70, 0, self.key as u8, 0, 0, 0, 0, 10]);
        put(&mut bytes, 12, &[asc, ascq]);
        if let Some(information) = self.information.and_then(|i| u32::try_from(i).ok()) {
            put(&mut bytes, 0, &[0xf0]);
            put(&mut bytes, 3, &information.to_be_bytes());
        }
        if let Some(pointer) = self.field_pointer() {
            put(&mut bytes, 15, &pointer);
        }
        Sense { bytes, len: 18 }
    }

    fn descriptor_sense(&self) -> Sense {
        let [asc, ascq] = self.code.0.to_be_bytes();
        let mut bytes = [0; SENSE_BYTES];
        put(&mut bytes, 0, &[0x72, self.key as u8, asc, ascq]);
        let mut len: u8 = 8;
        if let Some(information) = self.information {
            put(&mut bytes, usize::from(len), &[0x00, 0x0a, 0x80, 0]);
            put(&mut bytes, usize::from(len.saturating_add(4)), &information.to_be_bytes());
            len = len.saturating_add(12);
        }
        if let Some([flags, high, low]) = self.field_pointer() {
            put(&mut bytes, usize::from(len), &[0x02, 0x06, 0, 0, flags, high, low, 0]);
            len = len.saturating_add(8);
        }
        put(&mut bytes, 7, &[len.saturating_sub(8)]);
        Sense { bytes, len }
    }

    /// The three sense key specific bytes: SKSV, C/D, and the byte's number.
    fn field_pointer(&self) -> Option<[u8; 3]> {
        let (flags, byte) = match self.place? {
            Place::Cdb(byte) => (0xc0, byte),
            Place::Parameters(byte) => (0x80, byte),
        };
        let [high, low] = byte.to_be_bytes();
        Some([flags, high, low])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_format_follows_the_standard() {
        let sense = Fault::field(2).sense(false);
        assert_eq!(sense.bytes(), [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xc0, 0, 2]);
        let sense = Fault::new(SenseKey::Miscompare, Code::MISCOMPARE_DURING_VERIFY)
            .with_information(0x0102)
            .sense(false);
        assert_eq!(sense.bytes(), [0xf0, 0, 0xe, 0, 0, 1, 2, 10, 0, 0, 0, 0, 0x1d, 0, 0, 0, 0, 0]);
        assert_eq!((sense.key(), sense.code()), (0xe, Code::MISCOMPARE_DURING_VERIFY));
    }

    #[test]
    fn descriptor_format_follows_the_standard() {
        let sense = Fault::parameter(0x10).with_information(7).sense(true);
        let expected = [
            0x72, 5, 0x26, 0, 0, 0, 0, 20, // header
            0, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 7, // information
            2, 6, 0, 0, 0x80, 0, 0x10, 0, // sense key specific
        ];
        assert_eq!(sense.bytes(), expected);
        assert_eq!((sense.key(), sense.code()), (5, Code::INVALID_FIELD_IN_PARAMETER_LIST));
    }

    #[test]
    fn information_past_32_bits_is_left_out_of_the_fixed_format() {
        let fault = Fault::new(SenseKey::MediumError, Code::UNRECOVERED_READ_ERROR);
        let sense = fault.with_information(1 << 32).sense(false);
        assert_eq!(sense.bytes()[0], 0x70);
    }
}
