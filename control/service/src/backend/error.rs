//! The error of a backend: a kind for control flow; a message, a source and advice for people.

use headwater_api::ProblemKind;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// A failed call of a backend.
#[derive(Debug)]
pub struct BackendError {
    kind: ProblemKind,
    message: String,
    advice: Option<String>,
    source: Option<Source>,
    is_unknown: bool,
}

impl BackendError {
    /// An error with a message that says what was tried, on what.
    pub fn new(kind: ProblemKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), advice: None, source: None, is_unknown: false }
    }

    /// Adds the error that caused it.
    #[must_use]
    pub fn because(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Adds the advice.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Marks the error of a change to the store as unknown: the change may have been made, or may be made later.
    #[must_use]
    pub fn unknown(mut self) -> Self {
        self.is_unknown = true;
        self
    }

    /// An operating-system error. A full disk becomes [`ProblemKind::NoSpace`], a missing file [`ProblemKind::NotFound`], an
    /// existing file [`ProblemKind::Conflict`], and any other error [`ProblemKind::Failed`].
    pub fn from_io(message: impl Into<String>, error: std::io::Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                ProblemKind::NoSpace
            }
            ErrorKind::NotFound => ProblemKind::NotFound,
            ErrorKind::AlreadyExists => ProblemKind::Conflict,
            _ => ProblemKind::Failed,
        };
        Self::new(kind, message).because(error)
    }

    /// The kind, for control flow.
    pub fn kind(&self) -> ProblemKind {
        self.kind
    }

    /// Whether the change may have been made, or may be made later. The history then says that it was tried.
    pub fn is_unknown(&self) -> bool {
        self.is_unknown
    }

    /// What the user can do.
    pub fn advice(&self) -> Option<&str> {
        self.advice.as_deref()
    }
}

impl std::fmt::Display for BackendError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for BackendError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|s| &**s as &(dyn std::error::Error + 'static))
    }
}
