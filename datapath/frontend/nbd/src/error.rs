//! Error codes of the protocol, and their conversion from and to device errors, which happens only here.

use headwater_block::{IoError, IoErrorKind};

/// An error code as it goes over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdError(pub u32);

impl NbdError {
    /// Not permitted: the export is read-only.
    pub const EPERM: Self = Self(1);
    /// The device failed, or its data is damaged.
    pub const EIO: Self = Self(5);
    /// No memory.
    pub const ENOMEM: Self = Self(12);
    /// The request does not fit the export or the protocol.
    pub const EINVAL: Self = Self(22);
    /// No space, or a write past the end.
    pub const ENOSPC: Self = Self(28);
    /// Too long.
    pub const EOVERFLOW: Self = Self(75);
    /// Not supported, or not fast.
    pub const ENOTSUP: Self = Self(95);
    /// The server or the volume is closing.
    pub const ESHUTDOWN: Self = Self(108);

    /// The code for an error of a device.
    pub fn from_kind(kind: IoErrorKind) -> Self {
        match kind {
            IoErrorKind::Invalid => Self::EINVAL,
            IoErrorKind::ReadOnly => Self::EPERM,
            IoErrorKind::NoSpace => Self::ENOSPC,
            IoErrorKind::Corrupt | IoErrorKind::Device => Self::EIO,
            IoErrorKind::Closed => Self::ESHUTDOWN,
            IoErrorKind::Unsupported => Self::ENOTSUP,
        }
    }

    /// The meaning of a server's code for the client's caller.
    pub fn to_kind(self) -> IoErrorKind {
        match self {
            Self::EPERM => IoErrorKind::ReadOnly,
            Self::EINVAL | Self::EOVERFLOW => IoErrorKind::Invalid,
            Self::ENOSPC => IoErrorKind::NoSpace,
            Self::ENOTSUP => IoErrorKind::Unsupported,
            Self::ESHUTDOWN => IoErrorKind::Closed,
            _ => IoErrorKind::Device,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::EPERM => "EPERM",
            Self::EIO => "EIO",
            Self::ENOMEM => "ENOMEM",
            Self::EINVAL => "EINVAL",
            Self::ENOSPC => "ENOSPC",
            Self::EOVERFLOW => "EOVERFLOW",
            Self::ENOTSUP => "ENOTSUP",
            Self::ESHUTDOWN => "ESHUTDOWN",
            _ => "unknown error",
        }
    }
}

impl From<&IoError> for NbdError {
    fn from(error: &IoError) -> Self {
        Self::from_kind(error.kind())
    }
}

impl std::fmt::Display for NbdError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kinds_survive_the_wire_except_damage() {
        for kind in [
            IoErrorKind::Invalid,
            IoErrorKind::ReadOnly,
            IoErrorKind::NoSpace,
            IoErrorKind::Device,
            IoErrorKind::Closed,
            IoErrorKind::Unsupported,
        ] {
            assert_eq!(NbdError::from_kind(kind).to_kind(), kind);
        }
        assert_eq!(NbdError::from_kind(IoErrorKind::Corrupt), NbdError::EIO);
    }
}
