//! Statistics of repeated measurements, and HTML pages with tables and plots, without scripts.
//!
//! The crate does not depend on a study or device. A page is self-contained: it includes its style and plots. It is
//! also well-formed XML, so that HTML and XML parsers can check it.

pub mod number;
pub mod page;
pub mod statistics;
pub mod svg;
