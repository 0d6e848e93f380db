//! The tests of this crate as one program, since each costs its linking; those that need a process for themselves lie beside it.

mod codec;
mod device;
#[expect(dead_code, reason = "it is for the programs beside this one, too")]
mod fixture;
mod libiscsi;
mod protocol;
mod real_clients;
