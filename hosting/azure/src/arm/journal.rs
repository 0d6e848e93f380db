//! The journal of requests to Azure. An entry is written before the request, so that a new client can find resources
//! that a killed client may have created.

use async_trait::async_trait;

use crate::error::AzureError;

/// The operation on a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// The resource is created.
    Make,
    /// The resource is deleted.
    Delete,
    /// An action of the resource is called, such as `reimage`. The path ends with the action.
    Act,
}

impl Verb {
    /// The word for the operation in a database.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Make => "make",
            Self::Delete => "delete",
            Self::Act => "act",
        }
    }

    /// The operation with this word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Make, Self::Delete, Self::Act].into_iter().find(|verb| verb.word() == word)
    }
}

/// An operation that was begun on one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The operation.
    pub verb: Verb,
    /// The path of the resource. It is the key of the entry.
    pub path: String,
    /// The API version.
    pub api_version: String,
    /// The hash of the body of a new resource; empty for other operations.
    pub body_hash: String,
    /// The URL for polling the operation, after Azure has accepted the request. At most about 4 KiB long.
    pub operation: Option<String>,
}

impl Entry {
    pub(super) fn new(verb: Verb, path: &str, api_version: &str, body_hash: String) -> Self {
        Self { verb, path: path.to_owned(), api_version: api_version.to_owned(), body_hash, operation: None }
    }
}

/// Stores journal entries. Each call is durable when it returns. Calls for different paths are made at the same time.
#[async_trait]
pub trait Journal: std::fmt::Debug + Send + Sync {
    /// Adds an entry. Replaces the entry of the same path.
    async fn begin(&self, entry: &Entry) -> Result<(), AzureError>;

    /// Stores the URL for polling the operation in the entry.
    async fn accepted(&self, path: &str, operation: &str) -> Result<(), AzureError>;

    /// Removes the entry of the path, if it exists.
    async fn end(&self, path: &str) -> Result<(), AzureError>;

    /// All entries, in the order of `begin`.
    async fn open(&self) -> Result<Vec<Entry>, AzureError>;
}
