//! Parses configurations of Iometer (`.icf`), as far as they drive disks.
//!
//! A line that begins with `'` is a comment and a key: the lines up to the next such line are its values. Keys are
//! compared by their beginning and without case, because versions of Iometer differ in the rest of the line.
//! Unknown keys are skipped, as Iometer does.

use std::fmt;

use crate::load::Line;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::TWO_WORKERS;

/// The longest request, in bytes: the limit of a device.
const MAX_REQUEST_BYTES: u64 = 64 << 20;
/// The longest delay before a burst, in milliseconds: an hour.
const MAX_DELAY_MS: u64 = 3_600_000;
const SECTOR_BYTES: u64 = 512;

/// A fault in a configuration, with its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IcfError {
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1.
    pub column: usize,
    /// The fault.
    pub message: String,
}

impl fmt::Display for IcfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.message)
    }
}

impl std::error::Error for IcfError {}

/// An access specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specification {
    /// Its name.
    pub name: String,
    /// Its lines; their shares add up to 100.
    pub lines: Vec<Line>,
    /// Whether workers without assigned specifications run it.
    is_default: bool,
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlan {
    /// Its name.
    pub name: String,
    /// Requests in flight.
    pub outstanding: usize,
    /// Offset of the first byte.
    pub start_bytes: u64,
    /// Length of the used range, in bytes; 0: the whole disk.
    pub size_bytes: u64,
    /// Names of its specifications, in the order of execution.
    pub specifications: Vec<String>,
}

/// A configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// Length of a run in seconds; 0: until it is stopped.
    pub run_s: u64,
    /// Time before a run, in seconds, whose requests do not count.
    pub ramp_up_s: u64,
    /// Access specifications.
    pub specifications: Vec<Specification>,
    /// The workers of all managers.
    pub workers: Vec<WorkerPlan>,
}

impl Configuration {
    /// Parses a configuration.
    pub fn parse(text: &str) -> Result<Self, IcfError> {
        let lines: Vec<SourceLine<'_>> = text
            .lines()
            .enumerate()
            .map(|(index, whole)| SourceLine { number: index + 1, whole, text: whole.trim() })
            .filter(|line| !line.text.is_empty())
            .collect();
        let end = SourceLine { number: text.lines().count().max(1), whole: "", text: "" };
        match lines.first() {
            Some(first) if first.starts_with("Version") => {}
            first => {
                let what = "this is not a configuration of Iometer: its first line must begin with Version";
                return Err(first.unwrap_or(&end).error(what));
            }
        }
        let mut parser = Parser { configuration: Self::default(), specification_ends: Vec::new() };
        for (key, values) in keys(&lines) {
            parser.key(key, values)?;
        }
        parser.finish(lines.last().unwrap_or(&end))
    }

    /// The specification with this name.
    pub fn specification(&self, name: &str) -> Option<&Specification> {
        self.specifications.iter().find(|specification| specification.name == name)
    }

    /// The end of the last range of all workers; `None`: a worker uses the whole disk.
    pub fn end_bytes(&self) -> Option<u64> {
        let end = |worker: &WorkerPlan| {
            (worker.size_bytes > 0).then(|| worker.start_bytes.saturating_add(worker.size_bytes))
        };
        self.workers.iter().map(end).try_fold(0, |most, end| Some(most.max(end?)))
    }
}

/// A line of the file.
#[derive(Clone, Copy)]
struct SourceLine<'a> {
    number: usize,
    whole: &'a str,
    text: &'a str,
}

impl SourceLine<'_> {
    fn is_key(&self) -> bool {
        self.text.starts_with('\'')
    }

    fn starts_with(&self, prefix: &str) -> bool {
        self.text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    }

    fn error(&self, message: &str) -> IcfError {
        let column = 1 + self.whole.len() - self.whole.trim_start().len();
        IcfError { line: self.number, column, message: message.to_owned() }
    }

    /// The comma-separated fields, with their columns.
    fn fields(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut column = 1;
        self.whole.split(',').map(move |field| {
            let at = column + field.len() - field.trim_start().len();
            column += field.len() + 1;
            (at, field.trim())
        })
    }

    /// Parses a field as a number.
    fn number(&self, index: usize, what: &str, most: u64) -> Result<u64, IcfError> {
        let Some((column, field)) = self.fields().nth(index) else {
            let column = self.whole.len() + 1;
            return Err(IcfError { line: self.number, column, message: format!("the {what} is missing") });
        };
        field.parse().ok().filter(|number| *number <= most).ok_or_else(|| IcfError {
            line: self.number,
            column,
            message: format!("the {what} is {field:?}; it must be a number from 0 to {most}"),
        })
    }
}

/// All keys with their values.
fn keys<'a, 'b>(
    lines: &'b [SourceLine<'a>],
) -> impl Iterator<Item = (&'b SourceLine<'a>, &'b [SourceLine<'a>])> {
    let begins = lines.iter().enumerate().filter(|(_, line)| line.is_key());
    begins.filter_map(|(index, key)| {
        let after = lines.get(index + 1..)?;
        let count = after.iter().take_while(|line| !line.is_key()).count();
        Some((key, after.get(..count)?))
    })
}

struct Parser {
    configuration: Configuration,
    /// Line and column after the last line of each specification, for messages about a wrong sum.
    specification_ends: Vec<(usize, usize)>,
}

impl Parser {
    fn key(&mut self, key: &SourceLine<'_>, values: &[SourceLine<'_>]) -> Result<(), IcfError> {
        let value = || values.first().copied().ok_or_else(|| key.error("a value must follow this line"));
        let name = key.text.trim_start_matches('\'').trim_start();
        let starts =
            |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        if starts("hours") {
            return self.run_time(&value()?);
        } else if starts("Ramp Up Time") {
            self.configuration.ramp_up_s = value()?.number(0, "ramp up time", 86_400)?;
        } else if starts("Test Type") {
            let value = value()?;
            if !value.starts_with("NORMAL") {
                return Err(value.error(
                    "only tests of type NORMAL are supported: cycling tests change workers or depth between runs",
                ));
            }
        } else if starts("Access specification name") {
            self.specification(&value()?);
        } else if starts("size,% of size") {
            for value in values {
                self.access_line(value)?;
            }
        } else if starts("Worker type") {
            let value = value()?;
            if !value.starts_with("DISK") {
                return Err(value.error("only DISK workers are supported; remove the others in Iometer"));
            }
        } else if starts("Worker") && !starts("Worker Cycling") {
            let name = value()?.text.to_owned();
            // Iometer's default is one request in flight.
            let worker = WorkerPlan {
                name,
                outstanding: 1,
                start_bytes: 0,
                size_bytes: 0,
                specifications: Vec::new(),
            };
            self.configuration.workers.push(worker);
        } else if starts("Number of outstanding IOs") {
            let (outstanding, value) = (value()?.number(0, "number of outstanding IOs", 4096)?, value()?);
            if outstanding == 0 {
                return Err(value.error("a worker needs at least one outstanding IO"));
            }
            self.worker(key)?.outstanding = outstanding as usize;
        } else if starts("Disk maximum size") {
            let most = u64::MAX / SECTOR_BYTES / 2;
            let size = value()?.number(0, "maximum size in sectors", most)?;
            let start = value()?.number(1, "starting sector", most)?;
            let worker = self.worker(key)?;
            (worker.size_bytes, worker.start_bytes) = (size * SECTOR_BYTES, start * SECTOR_BYTES);
        } else if starts("Assigned access specs") {
            for value in values {
                if self.configuration.specification(value.text).is_none() {
                    return Err(value.error(&format!("there is no access specification {:?}", value.text)));
                }
                self.worker(key)?.specifications.push(value.text.to_owned());
            }
        }
        Ok(())
    }

    fn worker(&mut self, key: &SourceLine<'_>) -> Result<&mut WorkerPlan, IcfError> {
        self.configuration
            .workers
            .last_mut()
            .ok_or_else(|| key.error("this line belongs to a worker, but no worker was named before it"))
    }

    fn run_time(&mut self, value: &SourceLine<'_>) -> Result<(), IcfError> {
        let parts: Vec<u64> = value.text.split_whitespace().map_while(|part| part.parse().ok()).collect();
        let [hours @ 0..=8784, minutes @ 0..=59, seconds @ 0..=59] = parts[..] else {
            return Err(value.error("the run time must be hours (0-8784), minutes (0-59) and seconds (0-59)"));
        };
        self.configuration.run_s = hours * 3600 + minutes * 60 + seconds;
        Ok(())
    }

    fn specification(&mut self, value: &SourceLine<'_>) {
        let (name, assignment) = value.text.rsplit_once(',').unwrap_or((value.text, "NONE"));
        let is_default = ["ALL", "DISK"].contains(&assignment.trim());
        let name = name.trim().to_owned();
        self.configuration.specifications.push(Specification { name, lines: Vec::new(), is_default });
        self.specification_ends.push((value.number, 1));
    }

    fn access_line(&mut self, value: &SourceLine<'_>) -> Result<(), IcfError> {
        let (Some(specification), Some(end)) =
            (self.configuration.specifications.last_mut(), self.specification_ends.last_mut())
        else {
            return Err(
                value.error("this line belongs to an access specification, but none was named before it")
            );
        };
        *end = (value.number, 1);
        let fault = |index: usize, message: &str| {
            let column = value.fields().nth(index).map_or(1, |(column, _)| column);
            Err(IcfError { line: value.number, column, message: message.to_owned() })
        };
        let bytes = value.number(0, "size", MAX_REQUEST_BYTES)?;
        if bytes == 0 || bytes % SECTOR_BYTES != 0 {
            return fault(0, "the size must be a multiple of 512 bytes");
        }
        let percent = |index, what| value.number(index, what, 100).map(|percent| percent as u8);
        let (share_percent, read_percent) = (percent(1, "share of the size")?, percent(2, "share of reads")?);
        let random_percent = percent(3, "share of random requests")?;
        let delay_ms = value.number(4, "delay", MAX_DELAY_MS)? as u32;
        let burst = value.number(5, "burst", 1 << 20)?.max(1) as u32;
        // An alignment of 0 means one sector.
        let alignment = value.number(6, "alignment", MAX_REQUEST_BYTES)?.max(SECTOR_BYTES);
        if alignment % SECTOR_BYTES != 0 {
            return fault(6, "the alignment must be a multiple of 512 bytes");
        }
        if value.number(7, "reply", u64::MAX)? != 0 {
            return fault(7, "replies are for network workers; the reply must be 0");
        }
        let (request_bytes, alignment_bytes) = (bytes as u32, alignment as u32);
        specification.lines.push(Line {
            request_bytes,
            share_percent,
            alignment_bytes,
            read_percent,
            random_percent,
            burst,
            delay_ms,
        });
        Ok(())
    }

    fn finish(mut self, last: &SourceLine<'_>) -> Result<Configuration, IcfError> {
        let configuration = &mut self.configuration;
        for (specification, (line, column)) in
            configuration.specifications.iter().zip(self.specification_ends)
        {
            let sum: u32 = specification.lines.iter().map(|line| u32::from(line.share_percent)).sum();
            if sum != 100 {
                let message =
                    format!("the shares of the sizes of {:?} sum to {sum}, not to 100", specification.name);
                return Err(IcfError { line, column, message });
            }
        }
        let defaults: Vec<String> = configuration
            .specifications
            .iter()
            .filter(|specification| specification.is_default)
            .map(|specification| specification.name.clone())
            .collect();
        for worker in &mut configuration.workers {
            if worker.specifications.is_empty() {
                worker.specifications.clone_from(&defaults);
            }
            if worker.specifications.is_empty() {
                return Err(last.error(&format!("worker {:?} has no access specification", worker.name)));
            }
        }
        if configuration.workers.is_empty() {
            return Err(last.error("the configuration has no worker"));
        }
        Ok(self.configuration)
    }
}
