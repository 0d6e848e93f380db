//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod conformance;
mod guest;
mod hostile;
mod oracle;
mod queues;
mod starting;
