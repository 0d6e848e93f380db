//! Generates configuration for a site's DHCP server, with the file names of this server's loaders.

pub use headwater_dhcp::Server;
pub use headwater_dhcp::site::{Product, configuration};
