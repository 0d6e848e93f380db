//! Repeats the experiments of published studies of write caches, as commands that anybody can run.
//!
//! ```text
//!   study (cases, variants, printed figures) --> run: open all, fill, rounds in rotated order --> samples
//!                                                 |  load: requests of a seed                      |
//!                                                 |  disks: raw disk, volume in process            |
//!   bundle: results.json, index.html, series, the table on the terminal  <--------------------------------+
//! ```
//!
//! # Guarantees
//! - Before the first byte is written, a study prints how much RAM and disk it needs.
//! - Equal seeds send equal requests. Ratios are computed within one round. IOPS are never compared across machines.
//! - An interrupted study writes a report with the measurements up to then.
//! - When a study ends, the programs that it started have ended, and its named files are deleted.
//!
//! # Limits
//! All systems of a study are open at the same time, so their RAM and disk needs add up: [`needs::Needs`] has the sum
//! in bytes.
//!
//! # Errors
//! A failed request ends the study. The report contains the measurements up to then, and the reason.
//!
//! # Not here
//! Peers other than the qcow2 overlays of study 002: `make compare` measures them.
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
