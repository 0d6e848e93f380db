//! The error type of stores: a kind by which callers decide, and a message for people.

use std::sync::Arc;

/// The kind of an error, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// No such store, image, version, manifest or object.
    NotFound,
    /// A name, number, note or setting that is not allowed, or a location that has something other than a
    /// store.
    Invalid,
    /// The version is pinned by a running machine or an export.
    InUse,
    /// Another process is writing to the store.
    Locked,
    /// The store was opened for reading only.
    ReadOnly,
    /// Bytes differ from those that were written.
    Damaged,
    /// Written by a later release.
    UnknownFormat,
    /// The file system is full, a quota is used up, or the file would be too large.
    NoSpace,
    /// A server does not answer or has a problem of its own. The request may succeed later.
    Unreachable,
    /// The answer to a change was lost. The change may have been made, or may still be made.
    Unknown,
    /// The disk or file system failed, or a server refused the request.
    Io,
}

/// The number of "input/output error" on Linux.
const EIO: i32 = 5;

/// A failed operation: the kind and the operating-system error for programs, a message for people.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<Arc<std::io::Error>>,
    /// While a store (the target) was filled from another store (the source): the target's own copy of an object is damaged, and the
    /// source cannot replace it; see
    /// [`StoreError::of_own_object`].
    is_of_own_object: bool,
}

impl StoreError {
    /// An error with a message that says what was tried, on what, and why it failed.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None, is_of_own_object: false }
    }

    /// An error for a damaged object of a copy's target, if the source lacks a part of that object. The kind
    /// is not [`StoreErrorKind::Damaged`], because no source is to blame and asking other sources does not
    /// help. Other objects can still be copied.
    pub(crate) fn of_own_object(message: impl Into<String>) -> Self {
        Self { is_of_own_object: true, ..Self::new(StoreErrorKind::Io, message) }
    }

    /// Whether it was created by [`StoreError::of_own_object`].
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

    /// An operating-system error while reading data that was written before. Data that the disk cannot read
    /// counts as damaged, like wrong bytes, and is repaired in the same way: by writing it again.
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
    /// The operating-system error that caused it, if there is one.
    pub fn os_error(&self) -> Option<&std::io::Error> {
        self.source.as_deref()
    }
}
