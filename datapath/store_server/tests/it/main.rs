//! The tests of this crate as one program, since each costs its linking; those that need a process for themselves lie beside it.

mod far_store;
mod http;
mod renewal;
mod slow_clients;
