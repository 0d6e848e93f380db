//! The database of the control plane: machines, catalogs, hosts, persistent disks, tasks, tokens and the history, behind
//! traits that SQLite and PostgreSQL implement.
//!
//! ```text
//!   control/service --> Database --read()/write()--> Repository --machines()--> MachineRepository
//!                           ^                            |    \---events()----> EventRepository
//!                           |                            +--save()   (or drop: nothing happened)
//!                        sqlite/
//! ```
//!
//! # How to add an entity
//! 1. A record in [`record`] and a trait in [`repository`].
//! 2. A migration in `migrations/sqlite/` and `migrations/postgres/`, and the statements in `sql/`.
//! 3. Its cases in `tests/it/suite.rs`, which both databases pass.
//!
//! # Guarantees
//! - All changes of one [`Repository`] become visible and durable together at [`Repository::save`], or not at
//!   all. So a change and its event are never separated.
//! - Absent is `Ok(None)`, never an error.
//! - Secrets are encrypted with a key that is kept elsewhere ([`secrets`]).
//! - Writers are serialised; readers see one state of the database and never wait for a writer.
//!
//! # Limits
//! - SQLite: one writer at a time, which waits at most [`sqlite::BUSY_TIMEOUT_MS`] for another process's lock.
//! - Sizes and times are stored as signed 64-bit numbers.
//!
//! # Errors
//! [`DbError`]: `Taken` for a name that exists, `NoSpace` on a full disk, `Away` if the server cannot be reached, and
//! others.
//!
//! # Not here
//! No rules (who may do what, which state follows which): they are in `control/service`. No clock and no
//! randomness except the nonces of encrypted secrets: callers pass times and keys in.
//!
//! Start reading at [`repository`].

pub mod error;
pub mod postgres;
pub mod record;
pub mod repository;
pub mod secrets;
mod sql;
pub mod sqlite;

pub use error::DbError;
pub use record::{
    AuthorityRecord, CatalogRecord, ClaimRecord, CloudOperation, ConnectionRecord, HostRecord, IN_A_CLOUD,
    JoinTokenRecord, MachineRecord, NewEvent, NewTask, PersistentDisk, PoolRecord, Purpose, RunRecord,
    SchemeRecord, Secret, SessionRecord, TaskRecord, TokenRecord,
};
pub use repository::{
    CatalogRepository, ClaimRepository, CloudRepository, Database, EventRepository, HostRepository,
    KeyRepository, MachineRepository, PersistentDiskRepository, PersonalityRepository, Repository,
    RunRepository, SessionRepository, TaskRepository, TokenRepository,
};
pub use secrets::{SECRETS_KEY_BYTES, Secrets, SecretsKey};
