//! The disk process (`headwater disks`): a process that serves the disks of machines. It continues when the daemon ends, so machines do
//! too, and the next daemon takes its disks over.
//!
//! ```text
//!   headwater serve --------- DIR/disks.sock: calls (protocol) --------> headwater disks
//!   API, database, machines                                              write caches, images, chunk cache
//!        |                                                                     |
//!        +-- starts, watches --> QEMU --- DIR/run/NAME/disk.sock: requests ----+
//! ```
//! | who | what |
//! |---|---|
//! | daemon | [`start`] finds or starts the disk process, and [`client`] calls it |
//! | keeper, the parent of the disk process | [`keeper`]: holds the memory of write caches, and restarts a crashed disk process |
//! | disk process | [`server`]: opens disks with [`crate::adapters::disks`], in a [`sandbox`]; [`kept`] is its side of the keeper |
//! | `headwater upgrade` | [`upgrade`]: replaces the disk process by that of another program |
//!
//! The disk process has no configuration of its own and no database: the daemon sends the settings with its first call. From then on it
//! can open what the settings need and nothing else. It ends when no daemon is connected and no disk is open. `headwater run` and
//! `headwater export` have no disk process.
//!
//! In this module, to *take over* a disk is to serve a disk that an earlier disk process served; to *hand over* is to end so that the
//! next one can; *held* is what the keeper has, and a connection whose daemon uses the disks ([`protocol::Call::Hold`]).

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

pub use client::{DiskClient, WAITS_FOR_DISKS};
pub use keeper::{is_kept, keep};
pub use kept::{Keeper, LeftCaches, LeftDisk};
pub use protocol::problem_of;
pub use sandbox::landlock_lacks;
pub use server::{Options, lock, prepare};
pub use settings::Settings;
pub use start::connect;
pub use upgrade::{HANDED_OVER, Versions, upgrade};
