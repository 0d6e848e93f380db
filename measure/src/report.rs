//! Results for people: a table for the terminal and a page with plots.

pub mod html;
pub mod svg;
pub mod table;
