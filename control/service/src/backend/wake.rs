//! Switching on computers that are not virtual, as the service needs it.

use async_trait::async_trait;

use crate::backend::BackendError;

/// Switches computers on.
#[async_trait]
pub trait Wake: Send + Sync + 'static {
    /// Has the computer with this network card, in lower case with colons, switch itself on. Returns in words what was done. Whether the
    /// computer is on is known when it boots.
    async fn wake(&self, machine: &str, mac: &str) -> Result<String, BackendError>;
}
