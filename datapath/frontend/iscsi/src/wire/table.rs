//! The macro `pdu!`: makes a struct with `decode` and `encode` from a table with the type and the position of
//! each field.
//!
//! Bits without a field are ignored and sent as zero. Each table begins with two arguments: whether the PDU
//! is always for immediate delivery, and which bits of byte 1 are always set.

use super::header::{Bhs, get_bytes, put};

/// The position of a field of this type in the header.
pub(super) trait Place<T> {
    /// Reads the field.
    fn get(self, header: &Bhs) -> T;

    /// Writes the field into a header whose bytes are zero there.
    fn put(self, value: T, header: &mut Bhs);
}

/// From this byte on; numbers are big-endian.
#[derive(Clone, Copy)]
pub(super) struct At(pub(super) usize);

/// One bit of a byte: the byte, and a mask with this bit.
#[derive(Clone, Copy)]
pub(super) struct Bit(pub(super) usize, pub(super) u8);

/// Some bits of a byte: the byte, the shift, and the mask after shifting.
#[derive(Clone, Copy)]
pub(super) struct Bits(pub(super) usize, pub(super) u32, pub(super) u8);

/// The bit that asks for immediate delivery.
pub(super) const IMMEDIATE: Bit = Bit(0, 0x40);

impl<const N: usize> Place<[u8; N]> for At {
    #[inline]
    fn get(self, header: &Bhs) -> [u8; N] {
        get_bytes(header, self.0)
    }

    #[inline]
    fn put(self, value: [u8; N], header: &mut Bhs) {
        put(header, self.0, &value);
    }
}

macro_rules! number {
    ($($kind:ty)*) => {
        $(impl Place<$kind> for At {
            #[inline]
            fn get(self, header: &Bhs) -> $kind {
                <$kind>::from_be_bytes(get_bytes(header, self.0))
            }

            #[inline]
            fn put(self, value: $kind, header: &mut Bhs) {
                put(header, self.0, &value.to_be_bytes());
            }
        })*
    };
}

number!(u8 u16 u32);

impl Place<bool> for Bit {
    #[inline]
    fn get(self, header: &Bhs) -> bool {
        header.get(self.0).is_some_and(|byte| byte & self.1 != 0)
    }

    #[inline]
    fn put(self, value: bool, header: &mut Bhs) {
        if let Some(byte) = header.get_mut(self.0) {
            *byte |= if value { self.1 } else { 0 };
        }
    }
}

impl Place<u8> for Bits {
    #[inline]
    fn get(self, header: &Bhs) -> u8 {
        header.get(self.0).map_or(0, |byte| byte >> self.1 & self.2)
    }

    #[inline]
    fn put(self, value: u8, header: &mut Bhs) {
        if let Some(byte) = header.get_mut(self.0) {
            *byte |= (value & self.2) << self.1;
        }
    }
}

/// `pdu! { /// .. NAME(always immediate, byte 1) { /// .. FIELD: TYPE = PLACE; .. } }`. `NAME` must be a variant of `Opcode`.
macro_rules! pdu {
    ($(#[$doc:meta])* $name:ident($immediate:expr, $flags:expr) {
        $($(#[$field_doc:meta])* $field:ident: $kind:ty = $place:expr;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl $name {
            /// Decodes a header.
            #[inline]
            pub fn decode(header: &$crate::wire::Bhs) -> Result<Self, $crate::wire::WireError> {
                use $crate::wire::table::Place as _;
                $crate::wire::header::expect(header, $crate::wire::Opcode::$name)?;
                Ok(Self { $($field: $place.get(header),)* })
            }

            /// Encodes a header without data.
            #[inline]
            pub fn encode(&self) -> $crate::wire::Bhs {
                use $crate::wire::table::Place as _;
                let mut header = $crate::wire::header::start($crate::wire::Opcode::$name, $immediate, $flags);
                $($place.put(self.$field, &mut header);)*
                header
            }
        }
    };
}

pub(super) use pdu;
