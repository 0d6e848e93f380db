//! The tests of this crate as one program, because linking each costs time. Tests that need a process of
//! their own are beside it.

mod budget;
mod buffering;
mod closing;
mod completion_queue;
mod conformance;
mod crash;
mod elision;
mod facts;
mod failed_sync;
mod filling;
mod freeze;
mod full_file_system;
mod image_reads;
mod ladder;
mod ladder_on_disk;
mod latency;
mod order;
mod overflow_file;
mod panics;
mod partial;
mod persistent;
mod power;
mod setup;
mod small_flushes;
mod small_persistent;
mod surviving;
