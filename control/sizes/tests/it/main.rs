//! Tests of this crate, in one program.

mod advice;
mod oracle;
mod placement;
mod scheme;
mod table;

use headwater_sizes::{Date, MachineSize, Question, SizeTable, size::GIB};

/// The day of the built-in table.
fn today() -> Date {
    Date::parse("2026-11-28").expect("a day")
}

/// A question about a disk of this many GiB.
fn question(os_disk_gib: u64) -> Question {
    Question::about(os_disk_gib * GIB, today())
}

/// A size of the built-in table.
fn size(name: &str) -> MachineSize {
    SizeTable::built_in().size(name).unwrap_or_else(|| panic!("no size {name}")).clone()
}
