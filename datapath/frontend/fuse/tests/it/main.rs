//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod conformance;
mod file;
mod fixture;
mod tools;
