//! Talks to Azure: uploads disks as page blobs, gets the tokens of its management, and makes resources by name.
//!
//! ```text
//!   PageSource (a version) --> upload --> blob (one request each) --> pacer (waits, retries) --> http --> Azure
//!   TokenSource ---------------------------------------------^
//! ```
//!
//! Guarantees
//! - Only pages that differ from what the blob holds are sent. A page blob reads as zeroes where nothing was sent.
//! - An upload that was cut off at any request is continued by the same call. Pages that the blob has are read back and compared.
//! - The service checks each write by its MD5. A disk is complete when its footer is there, which is written last.
//! - A URL's query, which holds the signature, a secret and a token are never in an error, a log or a debug output. Secrets are
//!   sent over TLS only, except to this host and to the metadata service of the machine.
//!
//! Limits
//! - 4 MiB a write and a read ([`blob::WRITE_MAX_BYTES`]): Azure's limit.
//! - [`upload::UploadOptions::in_flight`] requests at a time; each has 8 MiB of memory at most.
//! - An answer has at most 8 MiB ([`http::ANSWER_MAX_BYTES`]) and 60 s; a connection, 15 s.
//! - [`pacer::PacerOptions`]: how often a request is repeated, and for how long.
//!
//! Errors: [`error::AzureErrorKind`] has a kind for each way in which a caller acts.
//!
//! Not done here: HTTP proxies, HTTP/2, redirects.
//!
//! Start reading at `upload.rs`.

pub mod arm;
pub mod blob;
pub mod clock;
pub mod error;
mod escape;
pub mod http;
pub mod pacer;
pub mod token;
pub mod upload;

pub use arm::journal::{Entry, Journal, Verb};
pub use arm::{Arm, Resource};
pub use blob::PageBlob;
pub use clock::{Clock, HostClock};
pub use error::{AzureError, AzureErrorKind};
pub use http::HttpClient;
pub use pacer::{Pacer, PacerOptions};
pub use token::{Credential, Endpoints, TokenSource};
pub use upload::{PageSource, UploadOptions, UploadReport, upload};
