//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod copies;
mod fence;
mod garbage;
mod identify;
mod medium;
mod reservations;
mod session;
mod tasks;
