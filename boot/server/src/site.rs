//! Configuration for DHCP servers of sites, with the names of the loaders here.

pub use headwater_dhcp::Server;
pub use headwater_dhcp::site::{Product, configuration};
