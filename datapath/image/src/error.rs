//! The error type of this crate: a kind by which callers decide, and a message for people.

use headwater_block::{IoError, IoErrorKind};
use headwater_store::{StoreError, StoreErrorKind};

/// The kind of an error, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageErrorKind {
    /// No such file, image or version.
    NotFound,
    /// A file, name or size that can never be used.
    Invalid,
    /// The new version would have the same bytes as the version that it is made from.
    Unchanged,
    /// A format or feature that this program does not read; most messages say what to do.
    Unsupported,
    /// Bytes differ from those that were written.
    Damaged,
    /// The version is in use, or the store is in use by another process.
    Busy,
    /// The disk is full, or a quota or a limit on the size of files is reached.
    NoSpace,
    /// The caller cancelled the operation.
    Cancelled,
    /// The store's answer was lost, so a version may have been made, or may still be made.
    Unknown,
    /// A disk, file or server failed.
    Io,
}

impl ImageErrorKind {
    /// Whether the store, or the local file, could be read, and the data is damaged or missing. After any other read error
    /// the state of the data is unknown.
    pub(crate) fn is_damage(self) -> bool {
        matches!(self, Self::Damaged | Self::NotFound)
    }
}

/// A failed operation: the kind for programs, a message for people that says what was tried, on what, and
/// why it failed.
#[derive(Clone, Debug)]
pub struct ImageError {
    kind: ImageErrorKind,
    message: String,
}

impl ImageError {
    /// An error of this kind.
    pub fn new(kind: ImageErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Creates an error from an operating-system error. The reason is appended to `tried`.
    pub fn from_os(tried: impl std::fmt::Display, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                ImageErrorKind::NoSpace
            }
            ErrorKind::NotFound => ImageErrorKind::NotFound,
            _ => ImageErrorKind::Io,
        };
        Self { kind, message: format!("{tried}: {error}") }
    }

    /// The kind, for control flow.
    pub fn kind(&self) -> ImageErrorKind {
        self.kind
    }

    /// The same error, preceded by the action that failed.
    pub fn context(self, doing: impl std::fmt::Display) -> Self {
        Self { kind: self.kind, message: format!("{doing}: {}", self.message) }
    }
}

impl std::fmt::Display for ImageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ImageError {}

impl From<StoreError> for ImageError {
    fn from(error: StoreError) -> Self {
        let kind = match error.kind() {
            StoreErrorKind::NotFound => ImageErrorKind::NotFound,
            StoreErrorKind::Invalid | StoreErrorKind::ReadOnly => ImageErrorKind::Invalid,
            StoreErrorKind::InUse | StoreErrorKind::Locked => ImageErrorKind::Busy,
            StoreErrorKind::Damaged => ImageErrorKind::Damaged,
            StoreErrorKind::UnknownFormat => ImageErrorKind::Unsupported,
            StoreErrorKind::NoSpace => ImageErrorKind::NoSpace,
            StoreErrorKind::Unknown => ImageErrorKind::Unknown,
            StoreErrorKind::Unreachable | StoreErrorKind::Io => ImageErrorKind::Io,
        };
        Self { kind, message: error.to_string() }
    }
}

impl From<IoError> for ImageError {
    fn from(error: IoError) -> Self {
        let kind = match error.kind() {
            IoErrorKind::Invalid => ImageErrorKind::Invalid,
            IoErrorKind::NoSpace => ImageErrorKind::NoSpace,
            IoErrorKind::Corrupt => ImageErrorKind::Damaged,
            IoErrorKind::Unsupported => ImageErrorKind::Unsupported,
            IoErrorKind::ReadOnly | IoErrorKind::Device | IoErrorKind::Closed => ImageErrorKind::Io,
        };
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Self { kind, message }
    }
}

/// Converts the error to an answer to a disk request.
impl From<ImageError> for IoError {
    fn from(error: ImageError) -> Self {
        let kind = match error.kind {
            ImageErrorKind::Damaged => IoErrorKind::Corrupt,
            ImageErrorKind::NoSpace => IoErrorKind::NoSpace,
            ImageErrorKind::Unsupported => IoErrorKind::Unsupported,
            ImageErrorKind::Invalid | ImageErrorKind::Unchanged => IoErrorKind::Invalid,
            _ => IoErrorKind::Device,
        };
        Self::new(kind, error.message)
    }
}
