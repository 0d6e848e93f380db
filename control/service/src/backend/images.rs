//! Golden images, as the service needs them.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_api::name::ImageRef;
use headwater_api::{Image, ImageVersion, Removed, VerifyReport};

use crate::backend::{BackendError, JobControl};

/// What an import came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportOutcome {
    /// The version that holds the source's bytes.
    pub version: ImageVersion,
    /// Whether the import made it; `false` where the newest version held the same bytes already.
    pub created: bool,
}

/// The store of images.
///
/// # Contract
/// - Names and references were checked by the caller.
/// - A failed or cancelled import or export leaves nothing behind.
/// - Whatever takes long runs on threads of its own and never on the caller's.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// All images, by name.
    async fn list(&self) -> Result<Vec<Image>, BackendError>;

    /// The version that a reference means now. An error of kind `NotFound` says which there are.
    async fn resolve(&self, reference: &ImageRef) -> Result<ImageVersion, BackendError>;

    /// Makes a version of what `source` holds: an absolute path, or an NBD URI.
    async fn import(
        &self,
        name: &str,
        source: &str,
        job: Arc<JobControl>,
    ) -> Result<ImportOutcome, BackendError>;

    /// Reads all of a version and compares it with its hashes.
    async fn verify(
        &self,
        version: &ImageVersion,
        job: Arc<JobControl>,
    ) -> Result<VerifyReport, BackendError>;

    /// Writes a version as a raw disk to a new file. Returns the file's size.
    async fn export(
        &self,
        version: &ImageVersion,
        target: &Path,
        job: Arc<JobControl>,
    ) -> Result<u64, BackendError>;

    /// Removes one version, or the whole image where the reference names none. The caller made sure that
    /// nothing uses it.
    async fn remove(&self, reference: &ImageRef) -> Result<Removed, BackendError>;

    /// Bytes that the store's files take.
    async fn stored_bytes(&self) -> Result<u64, BackendError>;
}
