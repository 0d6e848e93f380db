//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod addresses;
mod any_bytes;
mod extended;
#[expect(dead_code, reason = "it is for the programs beside this one, too")]
mod fixture;
mod lying_server;
mod own_client;
mod real_clients;
mod shared_slices;
mod whole_writes;
