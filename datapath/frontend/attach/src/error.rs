//! Errors of attaching a block device.

/// Why a device could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The kernel has neither ublk nor an NBD client that can be used.
    #[error("cannot attach a disk here: {0}")]
    Missing(String),
    /// The device number is in use.
    #[error("cannot attach as {device}: this device exists already; detach it or choose another number")]
    Taken {
        /// Its path.
        device: String,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// Adds to an error what was tried.
pub(crate) trait System<T> {
    fn system(self, what: &str) -> Result<T, AttachError>;
}

impl<T, E: Into<std::io::Error>> System<T> for Result<T, E> {
    fn system(self, what: &str) -> Result<T, AttachError> {
        self.map_err(|error| AttachError::System { what: what.into(), source: error.into() })
    }
}
