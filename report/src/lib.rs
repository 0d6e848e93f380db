//! Figures of repeated measurements, and how they are shown: statistics, and pages of tables and plots without script.
//!
//! The crate knows no study and no device. A page stands alone: its style and its plots are in it, and it is
//! well-formed XML too, so that any parser of either can check it.

pub mod number;
pub mod page;
pub mod statistics;
pub mod svg;
