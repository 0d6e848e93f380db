//! The journal of what is asked of Azure. It is written before the request, so that a new client finds what one that was killed
//! may have made.

use async_trait::async_trait;

use crate::error::AzureError;

/// What is to be done with a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// It is made.
    Make,
    /// It is deleted.
    Delete,
}

/// What was begun, of one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What is to be done.
    pub verb: Verb,
    /// The resource, and the key of the entry.
    pub path: String,
    /// The version of the interface.
    pub api_version: String,
    /// The hash of the body; empty of a deletion.
    pub body_hash: String,
    /// Where Azure says how the operation goes, once it has accepted it. It may be 4 KiB long.
    pub operation: Option<String>,
}

impl Entry {
    pub(super) fn new(verb: Verb, path: &str, api_version: &str, body_hash: String) -> Self {
        Self { verb, path: path.to_owned(), api_version: api_version.to_owned(), body_hash, operation: None }
    }
}

/// Keeps entries durably. Each call is durable when it returns.
#[async_trait]
pub trait Journal: std::fmt::Debug + Send + Sync {
    /// Adds an entry, or replaces that of the same path.
    async fn begin(&self, entry: &Entry) -> Result<(), AzureError>;

    /// Notes the URL of the operation.
    async fn accepted(&self, path: &str, operation: &str) -> Result<(), AzureError>;

    /// Removes an entry, if there is one.
    async fn end(&self, path: &str) -> Result<(), AzureError>;

    /// All entries, in the order in which they were begun.
    async fn open(&self) -> Result<Vec<Entry>, AzureError>;
}
