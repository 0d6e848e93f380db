//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod codec;
mod device;
#[expect(dead_code, reason = "it is for the programs beside this one, too")]
mod fixture;
mod libiscsi;
mod protocol;
mod real_clients;
