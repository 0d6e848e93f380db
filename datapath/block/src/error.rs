//! The error type of the whole data path, with few kinds.
//!
//! A kind exists only where a caller acts differently; people read the message and the source chain.
//! Each front-end maps the kind once to its protocol's code (errno, NBD error, SCSI sense).

use std::sync::Arc;

/// What went wrong, as far as a program needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoErrorKind {
    /// The request does not fit the device: past the end, unaligned, too long. (`EINVAL`)
    Invalid,
    /// A write to a read-only device. (`EPERM`)
    ReadOnly,
    /// There is no space for the write now; the machine may try again later. (`ENOSPC`)
    NoSpace,
    /// The data was read, but differs from what was written: a checksum or an authentication tag does not
    /// match. Only the blocks of this request are affected. (`EIO`)
    Corrupt,
    /// A disk, file or server below failed. (`EIO`)
    Device,
    /// The volume is closing or closed. (`ESHUTDOWN`)
    Closed,
    /// The device does not do this. (`EOPNOTSUPP`)
    Unsupported,
}

/// A failed request: the kind for programs, a message and a source for people.
///
/// Cloning is cheap, because many machines may wait for the same fetch.
#[derive(Clone, Debug)]
pub struct IoError {
    kind: IoErrorKind,
    message: Arc<str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl IoError {
    /// An error with a message that says what was tried, on what, and why it failed.
    pub fn new(kind: IoErrorKind, message: impl Into<Arc<str>>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An error with a message, and the error that caused it.
    pub fn with_source(
        kind: IoErrorKind,
        message: impl Into<Arc<str>>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { kind, message: message.into(), source: Some(Arc::new(source)) }
    }

    /// An operating-system error: `ENOSPC`, `EDQUOT` and `EFBIG` become [`IoErrorKind::NoSpace`],
    /// everything else [`IoErrorKind::Device`].
    pub fn from_os(message: impl Into<Arc<str>>, error: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                IoErrorKind::NoSpace
            }
            _ => IoErrorKind::Device,
        };
        Self::with_source(kind, message, error)
    }

    /// The kind, for control flow.
    pub fn kind(&self) -> IoErrorKind {
        self.kind
    }
}

impl std::fmt::Display for IoError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for IoError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|s| s as &(dyn std::error::Error + 'static))
    }
}
