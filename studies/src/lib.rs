//! The experiments of the field's public studies, as commands that anybody can repeat.
//!
//! ```text
//!   study (cases, variants, printed figures) --> run: open all, fill, rounds in rotated order --> samples
//!                                                 |  load: requests of a seed                      |
//!                                                 |  disks: raw disk, volume in process            |
//!   bundle: results.json, index.html, series, the table on the terminal  <--------------------------------+
//! ```
//!
//! # Guarantees
//! - What a study needs of RAM and disk is said before the first byte is written.
//! - The same seed sends the same requests. Ratios are compared within one round. IOPS of another machine are not compared with ours.
//! - An interrupted study leaves a report of what was done.
//! - Programs that a study starts, and files with names, are gone when it ends.
//!
//! # Limits
//! A study's systems are open at the same time, so their RAM and disk add up: [`needs::Needs`] has the sum in bytes.
//!
//! # Errors
//! A failed request ends the study. The report has what was measured before, and the reason.
//!
//! # Not here
//! All peers but the overlays of study 002: `make compare` has them.
//!
//! Start reading at [`study`].

pub mod bundle;
pub mod compare;
pub mod desktop;
pub mod disks;
pub mod files;
pub mod guest;
pub mod icf;
pub mod iometer_csv;
pub mod load;
pub mod machine;
pub mod model;
pub mod needs;
pub mod optional_fio;
pub mod over;
pub mod peers;
pub mod random;
pub mod run;
pub mod series;
pub mod sizing;
pub mod started;
pub mod studies;
pub mod study;
pub mod trace;
pub mod validate;
