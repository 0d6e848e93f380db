//! The process that has the disks of machines: it goes on when the daemon ends, and the next daemon takes its disks over.
//! If it crashes, its keeper starts the next one, which takes the disks over too ([`keeper`]).
//!
//! ```text
//!   headwater serve --------- DIR/disks.sock: calls (protocol) --------> headwater disks
//!   API, database, machines                                              write caches, images, chunk cache
//!        |                                                                     |
//!        +-- starts, watches --> QEMU --- DIR/run/NAME/disk.sock: requests ----+
//! ```
//! The daemon tells it the settings with the first call, so it has no configuration of its own and no database. From then on it can
//! open what the settings need and nothing else ([`sandbox`]). It ends when no daemon is connected and no disk is open.

mod client;
mod first_call;
mod keeper;
mod kept;
mod notifier;
mod protocol;
mod reader;
mod sandbox;
mod server;
mod settings;
mod start;
mod system_calls;
mod upgrade;

pub use client::DiskClient;
pub use keeper::{is_kept, keep};
pub use kept::{Keeper, LeftCaches, LeftDisk};
pub use protocol::problem_of;
pub use sandbox::landlock_lacks;
pub use server::{Options, lock, prepare};
pub use settings::Settings;
pub use start::connect;
pub use upgrade::{HANDED_OVER, Versions, upgrade};
