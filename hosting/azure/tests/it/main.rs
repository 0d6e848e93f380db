//! The client beside servers of page blobs, of tokens and of resources that the tests own.

mod arm_server;
mod blob_server;
mod login_server;
mod resources;
mod tokens;
mod uploads;
