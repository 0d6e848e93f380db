//! The tests of this crate as one program, since each costs its linking; those that need a process for themselves lie beside it.

mod copies;
mod fence;
mod garbage;
mod identify;
mod medium;
mod reservations;
mod session;
mod tasks;
