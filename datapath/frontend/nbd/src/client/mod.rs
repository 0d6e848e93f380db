//! Placeholder.
pub mod uri;
pub use uri::NbdUri;
/// Placeholder.
pub struct Client;
