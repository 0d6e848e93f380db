//! Sizes of virtual machines in a cloud, and the placement of a machine's OS disk on each size.
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
//! - The place of the OS disk is decided here, from published numbers of bytes. It is never left to the cloud.
//! - A place whose space is not published is never chosen, even if the cloud lists it: unknown does not count as zero
//!   or as enough.
//! - A place that the question does not name is never chosen. If no place can hold the disk, the answer has the
//!   reason for each place.
//! - An invalid table is an error with line and character. No line is skipped.
//!
//! # Limits
//! - [`table::MAX_SIZES`] sizes in a table of at most [`table::MAX_TABLE_BYTES`];
//!   [`scheme::MAX_SCHEME_BYTES`] in the file of a scheme, [`scheme::MAX_BACKUP_SIZES`] backup sizes.
//! - Azure's own limits: [`place::EPHEMERAL_MAX_BYTES`] for an ephemeral OS disk, [`place::MANAGED_MAX_BYTES`] for a
//!   managed one, [`place::FULL_COPY_MIN_VCPUS`] for a full copy.
//!
//! # Errors
//! [`TableError`], [`QuestionError`] and [`SchemeError`] say what is wrong with the input. A disk that fits nowhere
//! is not an error but an answer: [`NotPlaced`].
//!
//! # Not here
//! No I/O and no clock: the caller reads the files and passes the date. Prices only if the table has them. Quota,
//! capacity, zones and access rights are not checked, because that needs a connection to the cloud.
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
