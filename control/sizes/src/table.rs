//! Parses tables of sizes: comma-separated text, one size on each line, with the column names on the first line that
//! is not a comment.

use crate::date::Date;
use crate::size::{Architecture, GIB, Generation, MachineSize, NvmeDisks, OsDiskPlace, Rate};

mod fields;

use self::fields::{Row, header};

/// The most sizes in a table.
pub const MAX_SIZES: usize = 10_000;

/// The longest table, in bytes.
pub const MAX_TABLE_BYTES: u64 = 4 << 20;

/// The table that is compiled into the program.
const BUILT_IN: &str = include_str!("azure-sizes.csv");

/// The required columns, in any order.
const COLUMNS: [&str; 26] = [
    "size",
    "series",
    "vcpus",
    "vcpus_available",
    "memory_gib",
    "architecture",
    "cache_gib",
    "temp_gib",
    "nvme_disks",
    "nvme_gib_each",
    "nvme_gib_total",
    "cached_temp_iops",
    "cached_temp_mbps",
    "nvme_read_iops",
    "nvme_read_mbps",
    "nvme_write_iops",
    "nvme_write_mbps",
    "uncached_iops",
    "uncached_mbps",
    "ephemeral",
    "placements",
    "full_caching",
    "hyperv_generations",
    "retired",
    "source",
    "note",
];

/// An optional column.
const PRICE: &str = "usd_per_hour";

/// A table of sizes, with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeTable {
    /// In the order of the text; names are unique.
    pub sizes: Vec<MachineSize>,
    /// The text of the comment `# source: ...`.
    pub source: Option<String>,
    /// The date of the comment `# date: YYYY-MM-DD`.
    pub date: Option<Date>,
}

/// Why a table is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// One line is wrong.
    #[error("line {line}: {why}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// The mistake, and advice.
        why: String,
    },
    /// One field is wrong.
    #[error("line {line}, character {character} ({column}): {why}")]
    Field {
        /// The line, from 1.
        line: usize,
        /// The first character of the field, from 1.
        character: usize,
        /// The name of the column.
        column: String,
        /// The mistake, and advice.
        why: String,
    },
    /// The table has no sizes.
    #[error(
        "the table has no sizes: below the line with the names of the columns, write one line for each size (docs/azure.md \
         describes the columns)"
    )]
    Empty,
    /// The table has more than [`MAX_SIZES`] sizes.
    #[error("the table has more than {MAX_SIZES} sizes: remove the sizes that you do not use")]
    TooMany,
}

impl SizeTable {
    /// The table that is compiled into the program. It has a source and a date.
    pub fn built_in() -> Self {
        match Self::parse(BUILT_IN) {
            Ok(table) => table,
            // A test parses the built-in table.
            Err(why) => unreachable!("the built-in table of sizes: {why}"),
        }
    }

    /// Parses a table.
    ///
    /// # Errors
    /// [`TableError`]: the first mistake, with its line.
    pub fn parse(text: &str) -> Result<Self, TableError> {
        let mut table = Self { sizes: Vec::new(), source: None, date: None };
        let mut columns = None;
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        for (number, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            if let Some(comment) = line.strip_prefix('#') {
                table.read_comment(number, comment.trim())?;
                continue;
            }
            let Some(columns) = &columns else {
                columns = Some(header(number, line, &COLUMNS, &[PRICE])?);
                continue;
            };
            if table.sizes.len() == MAX_SIZES {
                return Err(TableError::TooMany);
            }
            let row = Row::parse(number, line, columns)?;
            let size = size_of(&row)?;
            if table.size(&size.name).is_some() {
                let why =
                    format!("the size '{}' is already in the table: remove one of the two lines", size.name);
                return Err(row.wrong("size", why));
            }
            table.sizes.push(size);
        }
        if table.sizes.is_empty() { Err(TableError::Empty) } else { Ok(table) }
    }

    fn read_comment(&mut self, line: usize, comment: &str) -> Result<(), TableError> {
        if let Some(source) = comment.strip_prefix("source:") {
            self.source = Some(source.trim().to_owned());
        } else if let Some(date) = comment.strip_prefix("date:").map(str::trim) {
            let why = format!("'{date}' is not a date: write it like 2026-11-28");
            self.date = Some(Date::parse(date).ok_or(TableError::Line { line, why })?);
        }
        Ok(())
    }

    /// The size with this name, in upper or lower case, with or without `Standard_`.
    pub fn size(&self, name: &str) -> Option<&MachineSize> {
        let short = |name: &str| {
            let lower = name.to_ascii_lowercase();
            lower.strip_prefix("standard_").map(str::to_owned).unwrap_or(lower)
        };
        let wanted = short(name);
        self.sizes.iter().find(|size| short(&size.name) == wanted)
    }

    /// Up to four names that begin with the part of this name before its first `_`; for the message about an unknown size.
    pub fn similar(&self, name: &str) -> Vec<&str> {
        let word = |name: &str| name.to_ascii_lowercase().replace("standard_", "");
        let wanted = word(name);
        let start = wanted.find('_').map_or(wanted.as_str(), |end| wanted.get(..end).unwrap_or(&wanted));
        let begins = |size: &&MachineSize| !start.is_empty() && word(&size.name).starts_with(start);
        self.sizes.iter().filter(begins).take(4).map(|size| size.name.as_str()).collect()
    }
}

fn size_of(row: &Row<'_>) -> Result<MachineSize, TableError> {
    let vcpus = row.required("vcpus", count)?;
    let vcpus_available = row.required("vcpus_available", count)?;
    if vcpus_available > vcpus {
        return Err(
            row.wrong("vcpus_available", format!("the size has only {vcpus} vCPUs, not {vcpus_available}"))
        );
    }
    let rate = |iops, mbps| {
        Ok::<_, TableError>(Rate {
            iops: row.optional(iops, whole)?,
            bytes_per_second: row.optional(mbps, |text| decimal(text, 1_000_000))?,
        })
    };
    let space = |column| row.optional(column, |text| decimal(text, GIB));
    let (ephemeral, places) = (row.required("ephemeral", yes_or_no)?, places_of(row)?);
    if !ephemeral && !places.is_empty() {
        let why = "a size without ephemeral OS disks has no placements: leave it empty".to_owned();
        return Err(row.wrong("placements", why));
    }
    Ok(MachineSize {
        name: row.required("size", word)?,
        series: row.required("series", word)?,
        vcpus,
        vcpus_available,
        memory_bytes: row.required("memory_gib", |text| decimal(text, GIB))?,
        architecture: row.required("architecture", architecture)?,
        cache_bytes: space("cache_gib")?,
        temp_bytes: space("temp_gib")?,
        nvme: nvme_of(row)?,
        cached_temp: rate("cached_temp_iops", "cached_temp_mbps")?,
        nvme_read: rate("nvme_read_iops", "nvme_read_mbps")?,
        nvme_write: rate("nvme_write_iops", "nvme_write_mbps")?,
        uncached: rate("uncached_iops", "uncached_mbps")?,
        ephemeral,
        places,
        full_copy: row.required("full_caching", yes_or_no)?,
        generations: row.list("hyperv_generations", Generation::parse)?,
        retired: row.optional("retired", day)?,
        micro_usd_per_hour: row.optional(PRICE, |text| decimal(text, 1_000_000))?,
        source: row.text("source").to_owned(),
        note: row.text("note").to_owned(),
    })
}

fn places_of(row: &Row<'_>) -> Result<Vec<OsDiskPlace>, TableError> {
    if row.text("placements").is_empty() {
        return Ok(Vec::new());
    }
    row.list("placements", |text| match text {
        "CacheDisk" => Ok(OsDiskPlace::Cache),
        "ResourceDisk" => Ok(OsDiskPlace::Temp),
        "NvmeDisk" => Ok(OsDiskPlace::Nvme),
        _ => Err(format!(
            "there is no placement '{text}': write CacheDisk, ResourceDisk or NvmeDisk, with | between them"
        )),
    })
}

fn nvme_of(row: &Row<'_>) -> Result<Option<NvmeDisks>, TableError> {
    let count = row.optional("nvme_disks", whole)?;
    let each = row.optional("nvme_gib_each", |text| decimal(text, GIB))?;
    let total = row.optional("nvme_gib_total", |text| decimal(text, GIB))?;
    let (count, each_bytes, total) = match (count, each, total) {
        (None, None, None) | (Some(0), None | Some(0), None | Some(0)) => return Ok(None),
        (Some(count), Some(each), Some(total)) => (count, each, total),
        _ => {
            let why =
                "nvme_disks, nvme_gib_each and nvme_gib_total are given together or left empty".to_owned();
            return Err(row.wrong("nvme_disks", why));
        }
    };
    if each_bytes == 0 {
        return Err(row.wrong("nvme_gib_each", "it must be more than 0".to_owned()));
    }
    if count.checked_mul(each_bytes) != Some(total) {
        let why = "the value is not nvme_disks times nvme_gib_each".to_owned();
        return Err(row.wrong("nvme_gib_total", why));
    }
    Ok(Some(NvmeDisks { count, each_bytes }))
}

fn word(text: &str) -> Result<String, String> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.chars().all(is_word) && text.len() <= 64 {
        return Ok(text.to_owned());
    }
    Err(format!("'{text}' is not a name: write at most 64 characters of A-Z, a-z, 0-9, '_', '-' and '.'"))
}

fn whole(text: &str) -> Result<u64, String> {
    let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| is_digits && *number <= 1_000_000_000);
    number.ok_or_else(|| format!("'{text}' is not a whole number up to 1,000,000,000"))
}

fn count(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=65_536).contains(number));
    number.ok_or_else(|| format!("'{text}' is not a number from 1 to 65,536"))
}

/// A number with at most six decimal places, in units of `unit`.
fn decimal(text: &str, unit: u64) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a number up to 1,000,000,000, such as 300 or 218.75");
    let (whole_part, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole_part) || !is_digits(fraction) || fraction.len() > 6 {
        return Err(wrong());
    }
    let number = whole(whole_part).map_err(|_| wrong())?;
    let millionths: u64 = format!("{fraction:0<6}").parse().map_err(|_| wrong())?;
    let part = u128::from(millionths) * u128::from(unit) / 1_000_000;
    let all = u128::from(number) * u128::from(unit) + part;
    u64::try_from(all).map_err(|_| wrong())
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("'{text}' is neither yes nor no")),
    }
}

fn architecture(text: &str) -> Result<Architecture, String> {
    match text {
        "x64" => Ok(Architecture::X64),
        "arm64" => Ok(Architecture::Arm64),
        _ => Err(format!("'{text}' is neither x64 nor arm64")),
    }
}

fn day(text: &str) -> Result<Date, String> {
    Date::parse(text).ok_or_else(|| format!("'{text}' is not a date: write it like 2026-09-30"))
}
