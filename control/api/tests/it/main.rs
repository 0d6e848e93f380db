//! What is shipped for other programs, compared with this crate's types.

mod expressions;
mod grafana;
mod prometheus;
