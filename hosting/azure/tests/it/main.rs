//! Tests the Azure client with fake servers of page blobs, tokens and resources.

mod arm_server;
mod blob_server;
mod login_server;
mod resources;
mod tokens;
mod uploads;
