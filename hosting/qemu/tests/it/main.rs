//! Tests of this crate in one program, because linking each program takes time. A test that needs a process of its
//! own is a separate program.

mod machine;
mod seed_disk;
mod tpm;
