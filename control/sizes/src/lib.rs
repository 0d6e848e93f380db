//! Sizes of virtual machines in a cloud, and where the OS disk of a machine goes on each of them.
//!
//! ```text
//!   azure-sizes.csv, or --sizes FILE --> SizeTable      (table)
//!                                           | MachineSize (size)
//!   Question ------------------------> place(size, question)    pure: Placement with what is left, or every reason why not
//!                                           |            |
//!                            advise (advice)     check a scheme (scheme): its size and each backup size
//! ```
//!
//! # Guarantees
//! - The place is decided here, from bytes. It is never left to the cloud.
//! - A place without published space is never chosen, even if the cloud lists it. Unknown is not zero.
//! - A place that was not asked for is never chosen. If no place holds the disk, every place says why.
//! - A broken table is an error with its line and character. No line is skipped.
//!
//! # Limits
//! - [`table::MAX_SIZES`] sizes in a table of at most [`table::MAX_TABLE_BYTES`];
//!   [`scheme::MAX_SCHEME_BYTES`] in the file of a scheme, [`scheme::MAX_BACKUP_SIZES`] backup sizes.
//! - Azure's: [`place::EPHEMERAL_MAX_BYTES`] for an ephemeral OS disk, [`place::MANAGED_MAX_BYTES`] for a managed one,
//!   [`place::FULL_COPY_MIN_VCPUS`] for a full copy.
//!
//! # Errors
//! [`TableError`], [`QuestionError`] and [`SchemeError`] say what is wrong with the input. That a disk has no place is no error
//! but an answer: [`NotPlaced`].
//!
//! # Not here
//! No I/O and no clock: the caller reads the files and says which day it is. No prices, except those of a table that has them. No
//! quota, no capacity, no zones, no rights: they need a connection to the cloud, which does not exist yet.
//!
//! Start reading at [`place`].

pub mod advice;
pub mod date;
pub mod place;
pub mod question;
pub mod scheme;
pub mod size;
pub mod table;

pub use advice::{Advice, advise};
pub use date::Date;
pub use place::{Left, NotPlaced, Placement, place};
pub use question::{ImageFacts, Question, QuestionError};
pub use scheme::{Scheme, SchemeError, SchemeReport};
pub use size::{Architecture, Generation, MachineSize, NvmeDisks, OsDiskPlace, Rate};
pub use table::{SizeTable, TableError};
