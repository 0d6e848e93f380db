//! A client of Azure: uploads disks as page blobs, gets tokens for Azure Resource Manager, creates resources by name,
//! and runs virtual machines.
//!
//! ```text
//!   PageSource (a version) --> upload --> blob (one request each) --> pacer (waits, retries) --> http --> Azure
//!   Machines, sizes --> Arm, with a journal ---------------------^
//!   TokenSource -------------^
//! ```
//!
//! Guarantees
//! - Only pages that differ from the blob's contents are sent. Pages that were never written read as zeroes.
//! - An upload that was interrupted at any point is continued by the same call. Pages that the blob already has are
//!   read back and compared.
//! - A machine is created once, under every fault, and none of its resources is orphaned: `machines.rs` says how.
//! - Azure verifies each write with its MD5. The footer of the disk is written last, so a disk with a footer is
//!   complete.
//! - Secrets, tokens and the query of a URL, which contains a signature, never appear in errors, logs or debug
//!   output. Secrets are sent over TLS only, except to this host and to the metadata service of the machine.
//!
//! Limits
//! - 4 MiB a write and a read ([`blob::WRITE_MAX_BYTES`]): Azure's limit.
//! - [`upload::UploadOptions::in_flight`] requests at a time; each uses at most 8 MiB of memory.
//! - At most 8 MiB ([`http::ANSWER_MAX_BYTES`]) and 60 s for an answer, 15 s for a connection.
//! - [`pacer::PacerOptions`]: how many times a request is sent, and for how long it is retried.
//!
//! Errors: [`error::AzureErrorKind`] has one kind for each way in which a caller reacts.
//!
//! Not done here: which place a size can have (`control/sizes` decides), HTTP proxies, HTTP/2, redirects.
//!
//! Start reading at `upload.rs`, `arm.rs` and `machines.rs`.

pub mod arm;
pub mod blob;
pub mod clock;
pub mod error;
mod escape;
pub mod http;
pub mod machines;
pub mod pacer;
pub mod publish;
pub mod sizes;
pub mod token;
pub mod upload;

pub use arm::journal::{Entry, Journal, Verb};
pub use arm::{Arm, Resource};
pub use blob::PageBlob;
pub use clock::{Clock, HostClock};
pub use error::{AzureError, AzureErrorKind};
pub use http::HttpClient;
pub use machines::{MachineId, MachineSpec, Machines};
pub use pacer::{Pacer, PacerOptions};
pub use publish::{Publication, Step};
pub use token::{ClientSecret, Credential, Endpoints, TokenSource};
pub use upload::{PageSource, UploadOptions, UploadReport, upload};
