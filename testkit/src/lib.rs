//! Shared test support of all crates: a reference disk, a conformance suite for devices, seeded randomness.
//!
//! ```text
//!   Rng(seed) --> conformance::check(device)      every Device passes it: volume, image reader, NBD client
//!                       |  random reads, writes, discards, zero writes, flushes, extents
//!                       v
//!                 model: Vec<u8> beside the device, compared byte by byte
//!
//!   ReferenceDisk         the simplest correct Device; delays, reorders and fails requests on demand
//!   HttpRelay             between client and server: lost, late, cut and changed answers on demand
//!   FileServer            a web server over a directory, with TLS and faults on demand (feature `http`)
//!   DelayRelay            a long line: TCP with a fixed delay (one that is cut is `examples/cut_relay.rs`, for scripts)
//!   pki                   authorities and certificates, good and bad (feature `pki`)
//!   S3Server              a real S3 server in a process of its own (feature `s3`)
//!   Postgres              a real PostgreSQL server on a socket of its own
//!   VhostDisk             a vhost-user-blk disk as a Device, through a guest's driver (feature `vhost`)
//!   FileDevice            a file or a block device of the kernel as a Device (feature `file`)
//!   Log                   the log lines of a test program (feature `log`)
//!   run                   runs a program that must succeed, and says what to install if it is missing
//!   resident_bytes, alone memory of this process, and a lock for tests that measure it
//!   on_small_file_system  runs a part of a test in a small file system that it can fill
//!   test_name             the name of a test in its program, to run it in a process of its own
//!   rounds                the length of a test of random operations: fewer in `make test` than in `make long`
//!   send_to_slow_reader   sends to a peer that reads slowly
//!   wait_until            waits for another thread or process, and names the missing event if it fails
//! ```
//!
//! # Guarantees
//! - The same seed gives the same operations on each thread. Two runs differ only in the interleaving of
//!   threads.
//! - A failed check panics with the seed, the operation's number, the operation and the first byte that
//!   differs.
//!
//! # Limits
//! - [`ReferenceDisk`] holds its size in memory, twice at most while it is created.
//! - [`conformance::Options::span_bytes`] bounds what the suite touches, so that it can run on large devices,
//!   too.
//!
//! # Not here
//! No benchmarks, and nothing that production code links: crates use it as a dev-dependency, and `measure/`
//! for its line and its certificates.
//!
//! Start reading at [`conformance`].

pub mod conformance;
pub mod delay_relay;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "http")]
pub mod file_server;
pub mod http_relay;
#[cfg(feature = "log")]
pub mod log;
pub mod memory;
pub mod mutate;
#[cfg(feature = "pki")]
pub mod pki;
pub mod postgres;
pub mod program;
pub mod random;
pub mod reference;
pub mod rounds;
#[cfg(feature = "s3")]
pub mod s3;
pub mod slow_reader;
pub mod small_file_system;
pub mod test_name;
#[cfg(feature = "vhost")]
pub mod vhost;
pub mod wait;

pub use delay_relay::DelayRelay;
#[cfg(feature = "file")]
pub use file::FileDevice;
#[cfg(feature = "http")]
pub use file_server::{FileServer, HttpFault, TestTls};
pub use http_relay::{Fault, HttpRelay};
#[cfg(feature = "log")]
pub use log::Log;
pub use memory::{alone, resident_bytes};
pub use postgres::Postgres;
pub use program::{output, run, succeed};
pub use random::Rng;
pub use reference::{Counts, ReferenceDisk, ReferenceOptions, Waits};
pub use rounds::rounds;
pub use slow_reader::send_to_slow_reader;
pub use small_file_system::on_small_file_system;
pub use test_name::test_name;
#[cfg(feature = "vhost")]
pub use vhost::VhostDisk;
pub use wait::wait_until;
