//! Tests the Azure client with fake servers of page blobs, tokens and resources.

mod resources;
mod tokens;
mod uploads;
