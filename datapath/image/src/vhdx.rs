//! Checks a VHDX before the crate `vhdx-core` reads it. It refuses a file with a log, because the crate
//! replays logs wrongly and with unbounded memory. It also refuses tables larger than 64 MiB, because the
//! crate reads them into memory as a whole.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vhdx::header::{REGION_TABLE1_OFFSET, REGION_TABLE2_OFFSET, parse_active_header};
use vhdx::region::{RegionEntry, parse_region_table};

use crate::foreign::TABLE_BYTES_MAX;
use crate::units::usize_of;

/// The size of the headers and region tables, and of everything after them that the crate examines: a region
/// table may claim more entries than fit.
const HEAD_BYTES: u64 = 0x25_0000;

/// Why a file is not given to the crate.
pub(crate) enum Refusal {
    /// It has a log that must be replayed.
    NotClosed,
    /// It is not supported. Contains what it is, and what to do.
    Unsupported(String),
    /// It exceeds a limit of this reader, and QEMU may be able to read it. Contains a short reason.
    ForQemu(String),
    /// It is damaged. Contains a short reason.
    Damaged(String),
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self::Damaged(why)
    }
}

/// Why required bytes could not be read.
pub(crate) fn unread(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "it ends before the data to which its tables refer".to_owned(),
        _ => error.to_string(),
    }
}

/// Checks the header and the region table that the crate will use. It finds them with the crate's own
/// functions, so it checks the same bytes.
pub(crate) fn check(file: &File, file_bytes: u64) -> Result<(), Refusal> {
    if file_bytes < HEAD_BYTES {
        return Err(Refusal::Damaged("it is too short".to_owned()));
    }
    let mut head = vec![0; usize_of(HEAD_BYTES)];
    file.read_exact_at(&mut head, 0).map_err(|e| unread(&e))?;
    let damaged = |e: vhdx::VhdxError| Refusal::Damaged(e.to_string());
    let header = parse_active_header(&head).map_err(damaged)?;
    if header.log_guid != [0; 16] {
        return Err(Refusal::NotClosed);
    }
    let table = |at| parse_region_table(&head, usize_of(at), file_bytes);
    let regions = table(REGION_TABLE1_OFFSET).or_else(|_| table(REGION_TABLE2_OFFSET)).map_err(damaged)?;
    let fits = |name: &str, region: &RegionEntry| {
        if u64::from(region.length) <= TABLE_BYTES_MAX {
            return Ok(());
        }
        let why = format!("its {name} has {} bytes, and the limit is {TABLE_BYTES_MAX}", region.length);
        Err(Refusal::ForQemu(why))
    };
    fits("table of blocks", &regions.bat)?;
    fits("metadata", &regions.metadata)
}
