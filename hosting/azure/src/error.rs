//! Errors of Azure. Two errors differ only if a caller acts differently on them.

/// The action that an error calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AzureErrorKind {
    /// The request is wrong, and is wrong again when it is repeated.
    Invalid,
    /// The signature, secret or right is missing, wrong or expired.
    Denied,
    /// There is no such thing.
    NotFound,
    /// A thing of this name is there already.
    Exists,
    /// Somebody else changes the thing at the moment.
    Busy,
    /// Azure asked to wait, or failed, as often as was tried.
    Unavailable,
    /// The answer was lost. The request may have been carried out.
    Unknown,
    /// Azure has begun it and could not finish it.
    Failed,
    /// The subscription has used up what it may have of something.
    Quota,
    /// Azure has no room for it there at the moment.
    Capacity,
    /// The data that was read back differs from the data that was sent.
    Damaged,
    /// The disk that is uploaded could not be read.
    Source,
}

/// A failed action: what was tried, on what, why it failed, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct AzureError {
    kind: AzureErrorKind,
    message: String,
    advice: Option<&'static str>,
}

impl AzureError {
    /// An error of this kind.
    pub fn new(kind: AzureErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), advice: None }
    }

    /// With what to do.
    #[must_use]
    pub fn advise(mut self, advice: &'static str) -> Self {
        self.advice = Some(advice);
        self
    }

    /// With the action before the reason.
    #[must_use]
    pub fn during(mut self, action: &str) -> Self {
        self.message = format!("{action}: {}", self.message);
        self
    }

    /// The action that it calls for.
    pub const fn kind(&self) -> AzureErrorKind {
        self.kind
    }

    /// Advice for people.
    pub const fn advice(&self) -> Option<&'static str> {
        self.advice
    }
}
