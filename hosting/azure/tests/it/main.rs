//! The client beside servers of page blobs, of tokens and of resources that the tests own.

mod blob_server;
mod login_server;
mod tokens;
mod uploads;
