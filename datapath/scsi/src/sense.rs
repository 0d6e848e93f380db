//! Status codes and sense data, in fixed and descriptor format.

/// Status codes (SAM-5, 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Good = 0x00,
    /// Sense data says what is the matter.
    CheckCondition = 0x02,
    /// Another nexus is in the way, shortly.
    Busy = 0x08,
    /// A reservation of another initiator forbids it.
    ReservationConflict = 0x18,
    /// Too many tasks.
    TaskSetFull = 0x28,
    /// Ended by another nexus.
    TaskAborted = 0x40,
}

/// Sense keys (SPC-4, 4.5.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SenseKey {
    /// Nothing to tell.
    NoSense = 0x0,
    /// The logical unit cannot be used now.
    NotReady = 0x2,
    /// The medium failed.
    MediumError = 0x3,
    /// The device failed.
    HardwareError = 0x4,
    /// The command makes no sense here.
    IllegalRequest = 0x5,
    /// Something happened that the initiator should know.
    UnitAttention = 0x6,
    /// Writing is not possible.
    DataProtect = 0x7,
    /// Ended by the target; the initiator may try again.
    AbortedCommand = 0xb,
    /// Data compared was not equal.
    Miscompare = 0xe,
}

/// Additional sense code and its qualifier, `(asc << 8) | ascq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u16);

/// Longest sense data of this crate.
const SENSE_BYTES: usize = 32;

/// Sense data, encoded as it goes to the initiator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    bytes: [u8; SENSE_BYTES],
    len: usize,
}

impl Sense {
    /// Fixed format, with nothing but key and code.
    pub fn fixed(key: SenseKey, code: Code) -> Self {
        let [asc, ascq] = code.0.to_be_bytes();
        let mut bytes = [0; SENSE_BYTES];
        let head = [0x70, 0, key as u8, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq];
        for (to, from) in bytes.iter_mut().zip(head) {
            *to = from;
        }
        Self { bytes, len: 18 }
    }

    /// The encoded bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl std::fmt::Debug for Sense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sense({:02x?})", self.bytes())
    }
}
