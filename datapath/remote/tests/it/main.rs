//! The tests of this crate as one program, because linking each costs time.

mod busy;
mod health;
mod holes;
mod holes_of_several;
mod servers;
mod support;
