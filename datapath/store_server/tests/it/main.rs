//! The tests of this crate as one program, because linking each costs time.

mod far_store;
mod http;
mod renewal;
mod slow_clients;
