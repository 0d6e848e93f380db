//! The tests of this crate as one program, since each costs its linking; those that need a process for themselves lie beside it.

mod machine;
mod seed_disk;
mod tpm;
