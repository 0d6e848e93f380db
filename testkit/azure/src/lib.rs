//! Fake services of Azure for tests: login, resource manager, and page blobs. They are written from Microsoft's
//! documentation and from reports of users, not from our client.
//!
//! ```text
//!   client --> ArmServer: /TENANT/oauth2/v2.0/token   grants a token
//!                         /subscriptions/..           Management: resources, operations, rules, rates
//!                         /blobs/N                    one page blob for each disk that waits for an upload
//!                         /fake/..                    faults and the log of requests, for clients in other languages
//!   client --> LoginServer, BlobServer                the same services alone, with stricter checks and more faults
//! ```
//!
//! Guarantees
//! - Time is a clock of the test. An operation ends after a number of polls, or after a minute of this clock.
//! - Each fault is chosen by the test: by the number of the request, or by a text of its path.
//! - All requests are logged with their bodies.
//!
//! Limits: everything is in memory and ends with the server.
//!
//! Not here: machines that run, and rights. Not tried: whether Azure itself agrees.
//!
//! Start reading at `arm.rs`.

pub mod arm;
pub mod blob;
pub mod login;
