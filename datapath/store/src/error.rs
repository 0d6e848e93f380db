//! What can go wrong in a store.

use std::sync::Arc;

/// What went wrong, as far as a program needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// No such store, image, version, manifest or object.
    NotFound,
    /// A name, number, note or setting that is not allowed, or a place that holds something else than a store.
    Invalid,
    /// The version is pinned by a running machine or an export.
    InUse,
    /// Another process is writing to the store.
    Locked,
    /// The store was opened for reading only.
    ReadOnly,
    /// Bytes are not what was written.
    Damaged,
    /// Written by a later release.
    UnknownFormat,
    /// No room on the disk.
    NoSpace,
    /// A server does not answer, or has trouble of its own: what is asked for may be had later.
    Unreachable,
    /// The answer to a change was lost: whether it was made, or may yet be, is not known.
    Unknown,
    /// The disk or file system failed, or a server refuses what it is asked for.
    Io,
}

/// The number of "input/output error" on Linux.
const EIO: i32 = 5;

/// A failed operation: the kind for programs, a message and a source for people.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<Arc<std::io::Error>>,
    /// Of an object that was to make up for what another store lacks of it; see [`StoreError::of_own_object`].
    is_of_own_object: bool,
}

impl StoreError {
    /// An error with a message that says what was tried, on what, and why it failed.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None, is_of_own_object: false }
    }

    /// An object of the store that is copied to is damaged where the source lacks something of it. It is not
    /// [`StoreErrorKind::Damaged`]: no source is to blame, and asking others makes no difference. Other objects can be copied all the same.
    pub(crate) fn of_own_object(message: impl Into<String>) -> Self {
        Self { is_of_own_object: true, ..Self::new(StoreErrorKind::Io, message) }
    }

    /// Whether it is one of [`StoreError::of_own_object`].
    pub(crate) fn is_of_own_object(&self) -> bool {
        self.is_of_own_object
    }

    /// An operating-system error. The message says what was tried and on what; the reason is appended.
    pub fn from_os(tried: impl std::fmt::Display, error: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                StoreErrorKind::NoSpace
            }
            ErrorKind::NotFound => StoreErrorKind::NotFound,
            ErrorKind::UnexpectedEof => StoreErrorKind::Damaged,
            _ => StoreErrorKind::Io,
        };
        Self {
            kind,
            message: format!("{tried}: {error}"),
            source: Some(Arc::new(error)),
            is_of_own_object: false,
        }
    }

    /// An operating-system error of a read of what was written before. A place that the disk cannot read is damaged like one whose
    /// bytes are wrong, and helped in the same way: by writing it anew.
    pub(crate) fn from_read(tried: impl std::fmt::Display, error: std::io::Error) -> Self {
        let is_lost = error.raw_os_error() == Some(EIO);
        let told = Self::from_os(tried, error);
        if is_lost { Self { kind: StoreErrorKind::Damaged, ..told } } else { told }
    }

    /// The kind, for control flow.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

impl std::fmt::Display for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

// The reason is part of the message already, so there is no source to print a second time.
impl std::error::Error for StoreError {}

impl StoreError {
    /// The operating-system error below, if that was the cause.
    pub fn os_error(&self) -> Option<&std::io::Error> {
        self.source.as_deref()
    }
}
