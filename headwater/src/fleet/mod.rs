//! Sockets, TLS and certificates between a controller and its nodes. The protocol on top of them is in `control/service/src/fleet`.
//!
//! The controller has its own certificate authority, in its database. It signs the certificate of the port for nodes,
//! and one for each node that joins. A join token contains the fingerprint of the authority, so that a node can
//! verify its controller at the first connection.

pub mod authority;
pub mod connect;
pub mod join;
pub mod listener;
pub mod membership;

use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The name in the certificate of each controller. Nodes verify the authority, not the name by which they reach the
/// controller.
pub const CONTROLLER_NAME: &str = "controller.headwater.internal";

/// The ALPN name of the protocol.
pub const ALPN: &[u8] = b"headwater-node/1";

/// The port if a URL names none.
pub const DEFAULT_PORT: u16 = 9472;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}
