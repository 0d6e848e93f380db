//! Errors of Azure. Two kinds differ only if a caller acts differently on them.

/// What kind of failure it was, and so what the caller can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AzureErrorKind {
    /// The request is wrong; a retry fails too.
    Invalid,
    /// The signature, secret or right is missing, wrong or expired.
    Denied,
    /// The object does not exist.
    NotFound,
    /// An object of this name exists already.
    Exists,
    /// Another client is changing the object now.
    Busy,
    /// Azure was unavailable or throttled the request in every attempt.
    Unavailable,
    /// The answer was lost. Azure may have executed the request.
    Unknown,
    /// Azure began the operation and could not finish it.
    Failed,
    /// The subscription's quota is used up.
    Quota,
    /// Azure has no free capacity there now.
    Capacity,
    /// The region or the zone does not have the size, or not for this subscription.
    NotOffered,
    /// Data that was read back differs from the data that was sent.
    Damaged,
    /// The disk that is being uploaded could not be read.
    Source,
}

/// A failed action: what was tried, on what, why it failed, and what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct AzureError {
    kind: AzureErrorKind,
    code: Option<String>,
    message: String,
    advice: Option<&'static str>,
}

impl AzureError {
    /// An error of this kind.
    pub fn new(kind: AzureErrorKind, message: impl Into<String>) -> Self {
        Self { kind, code: None, message: message.into(), advice: None }
    }

    /// Adds advice.
    #[must_use]
    pub fn advise(mut self, advice: &'static str) -> Self {
        self.advice = Some(advice);
        self
    }

    /// Puts the failed action in front of the message.
    #[must_use]
    pub fn during(mut self, action: &str) -> Self {
        self.message = format!("{action}: {}", self.message);
        self
    }

    /// Adds Azure's error code.
    #[must_use]
    pub(crate) fn coded(mut self, code: &str) -> Self {
        self.code = Some(code.to_owned());
        self
    }

    /// Azure's error code, such as `AllocationFailed`.
    pub fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }

    /// The kind of the failure.
    pub const fn kind(&self) -> AzureErrorKind {
        self.kind
    }

    /// Advice for people.
    pub const fn advice(&self) -> Option<&'static str> {
        self.advice
    }
}
