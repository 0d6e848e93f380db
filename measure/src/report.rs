//! Reports results as a table for the terminal and as a page with plots.

pub mod html;
pub mod svg;
pub mod table;
