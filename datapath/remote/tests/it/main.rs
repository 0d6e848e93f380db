//! The tests of this crate as one program, since each costs its linking; those that need a process for themselves lie beside it.

mod busy;
mod health;
mod holes;
mod holes_of_several;
mod servers;
mod support;
