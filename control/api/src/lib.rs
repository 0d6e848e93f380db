//! The types of the API: requests, answers and errors, with their schemas, shared by the daemon and its clients.
//!
//! ```text
//!   CLI, console, scripts --JSON over HTTP--> control/service
//!            \___________ both sides use these types ___________/
//! ```
//!
//! # Guarantees
//! - Every request and answer is (de)serialisable. All have an OpenAPI schema except those of a login with an identity
//!   provider (`access`). Unknown fields of a request are errors, so that a misspelt option is never silently ignored.
//! - Every failed request is answered with a [`Problem`]: its [`ProblemKind`] tells programs what to do, its
//!   message, causes and advice tell people what was tried, on what, why it failed and what to do.
//! - Units are in the names: `_bytes`, `_ms`, `_s`; times are milliseconds since 1970 UTC.
//!
//! # Limits
//! - Names of machines and images have at most [`name::MAX_NAME_BYTES`] bytes. Other limits are documented at their types.
//!
//! # Not here
//! No I/O and no HTTP: paths and handlers are in `control/service`.
//!
//! Start reading at [`machine`].

pub mod access;
pub mod advice;
pub mod audit;
pub mod catalog;
mod claim;
pub mod cloud;
pub mod connection;
pub mod contents;
pub mod event;
pub mod filter;
pub mod fixed_address;
pub mod host;
pub mod hours;
pub mod image;
pub mod machine;
pub mod machine_list;
pub mod maintenance;
pub mod metrics;
pub mod name;
pub mod personality;
pub mod platform;
pub mod problem;
pub mod roll;
pub mod scheme;
pub mod scopes;
pub mod sort;
pub mod status;
pub mod task;
pub mod task_event;
pub mod trace;
pub mod words;

pub use access::{
    BeginLogin, BegunLogin, CallerInfo, ConsoleLink, ConsoleTicket, CreateConsoleTicket, CreateToken,
    FinishLogin, LoginOffer, NewToken, Role, TokenInfo, TokenList,
};
pub use advice::{AdvisedSizes, CatalogAdvice, HostAdvice};
pub use catalog::{
    Catalog, CatalogList, CreateCatalog, DEFAULT_STOP_IDLE_S, MAX_STOP_IDLE_S, OnHostLoss, ROTATE_AFTER_S,
    SEAL_REMOVES_MAX, SetCatalog, check_guest_path, check_seal_removes,
};
pub use claim::{
    Claim, ClaimList, ClaimRequest, MAX_CLAIM_WAIT_S, MAX_HOLDER_CHARS, MAX_KEY_CHARS, OneTimeSecret, ResetOn,
};
pub use cloud::{CloudMachine, CloudScheme, MAX_CLOUD_USER_DATA_BYTES};
pub use connection::{
    Connection, ConnectionAuth, ConnectionCheck, ConnectionList, CreateConnection, MAX_CLIENT_SECRET_BYTES,
    MAX_REPLICAS, OrphanResource, PublishReport, PublishRequest, PublishState, PublishedImage, PublishedList,
    SetConnection, SweepReport, SweepRequest, UnpublishRequest,
};
pub use contents::{
    CacheContents, CacheHint, ContentsKind, HeldBytes, KindContents, PartitionContents, PathContents,
};
pub use event::{Change, Event, EventList, MAX_EVENTS};
pub use filter::Filter;
pub use fixed_address::FixedAddress;
pub use host::{CreateJoinToken, DrainReport, Host, HostList, HostState, JoinToken, MovedMachine, SetHost};
pub use hours::Hours;
pub use image::{
    ChangedFile, Channel, ChannelMove, ChannelPointer, ChannelRequest, DiffReport, DiffRequest, ExportFormat,
    ExportRequest, FileChange, FileId, Image, ImageList, ImageVersion, ImportRequest, NoteRequest,
    PartitionDifference, PromoteRequest, Promoted, PullReport, PullRequest, PulledImage, Removed,
    RetireRequest, Reverted, SourceFormat, VerifyReport, VerifyRequest,
};
pub use machine::{
    Alarm, BootFrom, CacheMode, CacheSettings, CreateMachine, DiskCounters, DiskTransport, ExecRequest,
    ExecResult, GuestUsers, Identity, MAX_STDIN_BYTES, Machine, MachineList, MachineState, PinRequest,
    SetMachine, Wanted,
};
pub use machine_list::ListedMachine;
pub use maintenance::{MaintenanceRequest, MaintenanceSession, Pause, SealRequest, Sealed};
pub use metrics::{Sample, Stats};
pub use personality::{
    PERSONALITY_MAX, PERSONALITY_NAME_CHARS, PERSONALITY_VALUE_CHARS, Personality, SetPersonality,
};
pub use problem::{Problem, ProblemDetails, ProblemKind};
pub use roll::{Batch, LeftMachine, RollReport, RollRequest, ScaleReport, ScaleRequest};
pub use scheme::{RevertScheme, SchemeDifference, SchemeList, SchemeSettings, SchemeVersion, SetScheme};
pub use scopes::Scopes;
pub use sort::{MachineSort, Position};
pub use status::{HostRam, Status};
pub use task::{MAX_TASKS, Task, TaskList, TaskState};
pub use task_event::{Progress, TaskEvent, TaskResult};
pub use trace::{BootTrace, MergeTraceRequest, SaveTraceRequest, TracePlace};
