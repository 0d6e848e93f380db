//! Reads the table of VM sizes for `headwater size` and `headwater scheme`, and prints a placement: the place of an
//! OS disk on a size.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use headwater_block::small_file;
use headwater_sizes::size::gib;
use headwater_sizes::table::MAX_TABLE_BYTES;
use headwater_sizes::{Architecture, Date, ImageFacts, Placement, SizeTable};
use serde::Serialize;

use crate::cli::{ImageArgs, TableArgs};
use crate::failure::invalid;

/// The source of the table's figures.
#[derive(Debug, Serialize)]
pub struct Origin {
    source: String,
    date: Option<Date>,
    size_count: usize,
}

/// Loads the table from the command line's file, or the built-in table.
pub fn load(args: &TableArgs) -> anyhow::Result<(SizeTable, Origin)> {
    let (table, default_source) = match &args.sizes {
        None => (SizeTable::built_in(), "built into the program".to_owned()),
        Some(path) => {
            let text = read_text("the sizes", path, MAX_TABLE_BYTES)?;
            let wrong = |why| invalid(format!("cannot read the sizes {}: {why}", path.display()));
            (SizeTable::parse(&text).map_err(wrong)?, path.display().to_string())
        }
    };
    let source = table.source.clone().unwrap_or(default_source);
    let origin = Origin { source, date: table.date, size_count: table.sizes.len() };
    Ok((table, origin))
}

/// Reads a file that was given on the command line.
pub fn read_text(what: &str, path: &Path, max_bytes: u64) -> anyhow::Result<String> {
    let failed = || format!("cannot read {what} {}", path.display());
    match small_file::read(path, max_bytes).and_then(small_file::text) {
        Err(e) if e.kind() == ErrorKind::InvalidData => Err(invalid(format!("{}: {e}", failed()))),
        read => read.with_context(failed),
    }
}

/// Today's date, because sizes have a date of retirement.
pub fn today() -> anyhow::Result<Date> {
    Ok(Date::of_seconds(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()))
}

/// The facts of an image from the command line. Headwater's images are for x86-64.
pub fn image_facts(args: ImageArgs) -> ImageFacts {
    ImageFacts { os_disk_bytes: args.os_disk, generation: args.generation, architecture: Architecture::X64 }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} sizes, ", self.size_count)?;
        match self.date {
            Some(date) => write!(f, "as of {date}: {}", self.source),
            None => write!(f, "without a date: {}", self.source),
        }
    }
}

/// The headings of [`cells`].
pub const HEADINGS: [&str; 6] = ["PLACE", "SPACE", "TEMP LEFT", "NVME LEFT", "IOPS", "MB/S"];

/// A placement as cells of a table.
pub fn cells(placement: &Placement) -> [String; 6] {
    let known = |bytes: Option<u64>| bytes.map_or_else(unknown, gib);
    let left = placement.left;
    [
        placement.place.to_string(),
        known(placement.capacity_bytes),
        known(left.temp_bytes),
        gib(left.nvme_bytes),
        placement.read.iops.map_or_else(unknown, |iops| iops.to_string()),
        placement.read.bytes_per_second.map_or_else(unknown, |bytes| decimal(bytes, 1)),
    ]
}

/// A number of millionths with at most this many decimals.
pub fn decimal(millionths: u64, decimals: usize) -> String {
    let fraction = format!("{:06}", millionths % 1_000_000);
    let fraction = fraction.get(..decimals).unwrap_or(&fraction).trim_end_matches('0');
    let whole = millionths / 1_000_000;
    if fraction.is_empty() { whole.to_string() } else { format!("{whole}.{fraction}") }
}

/// The text for a figure that is not published.
pub fn unknown() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn millionths_are_shown_without_zeroes_at_the_end() {
        assert_eq!(decimal(22_500_000, 1), "22.5");
        assert_eq!(decimal(500_000_000, 1), "500");
        assert_eq!(decimal(452_000, 4), "0.452");
        assert_eq!(decimal(0, 4), "0");
    }
}
