//! What can go wrong on the way to a block device.

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The kernel has nothing to attach with.
    #[error("cannot attach a disk here: {0}")]
    Missing(String),
    /// The number is taken.
    #[error("cannot attach as {device}: there is such a device already; detach it or choose another")]
    Taken {
        /// Its path.
        device: String,
    },
    /// The kernel refused.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// Says what was tried.
pub(crate) trait System<T> {
    fn system(self, what: &str) -> Result<T, AttachError>;
}

impl<T, E: Into<std::io::Error>> System<T> for Result<T, E> {
    fn system(self, what: &str) -> Result<T, AttachError> {
        self.map_err(|error| AttachError::System { what: what.into(), source: error.into() })
    }
}
