//! Tests the Azure client with fake servers of page blobs, tokens and resources.

mod kills;
mod lab;
mod machines;
mod resources;
mod sizes;
mod tokens;
mod uploads;
