//! Reads traces of disk requests in several formats.
//!
//! | file | recognised by |
//! |---|---|
//! | our own recording (`headwater export --record`) | the first bytes |
//! | SYSTOR '17: `Timestamp,Response,IOType,LUN,Offset,Size` | this first line |
//! | MSR Cambridge: file time, host, disk, `Read` or `Write`, offset, size, response time | seven fields |
//!
//! Text files may be compressed with gzip, as they are published.

pub mod blocks;
mod csv;

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use headwater_recorder::format::ZSTD_MAGIC;
use headwater_recorder::{Content, Kind as Recorded, Reader, Record};

/// The most requests, which are all held in memory: about 2 GiB.
pub const MOST_REQUESTS: usize = 50_000_000;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A write of zeroes without data.
    WriteZeroes,
    /// A discard.
    Discard,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Microseconds since the trace began.
    pub time_us: u64,
    /// The offset of its first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The operation.
    pub kind: Kind,
    /// The class of a write's data.
    pub content: Content,
}

/// The requests of one disk, sorted by time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Its name in the trace.
    pub name: String,
    /// Its requests.
    pub requests: Vec<Request>,
}

/// A trace of one or several disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The disks that have requests.
    pub volumes: Vec<Volume>,
    /// Remarks for the reader about missing data.
    pub notes: Vec<String>,
    /// Whether the classes of the written data are known.
    pub has_contents: bool,
}

impl Trace {
    /// Reads the files of a trace. Each recording is a separate disk; all recordings begin at the same time. The
    /// lines of one disk may be spread over several text files.
    pub fn load(files: &[PathBuf]) -> Result<Self> {
        let mut trace = Self::default();
        let mut texts = csv::Texts::default();
        let mut left = MOST_REQUESTS;
        for path in files {
            let failed = || format!("cannot use the trace {}", path.display());
            let file = File::open(path).with_context(failed)?;
            let (magic, rest) = first_bytes(file).with_context(failed)?;
            if magic.starts_with(&ZSTD_MAGIC) {
                trace.add_recording(path, &mut left).with_context(failed)?;
            } else if magic.starts_with(&GZIP_MAGIC) {
                texts.read(flate2::read::MultiGzDecoder::new(rest), &mut left).with_context(failed)?;
            } else {
                texts.read(rest, &mut left).with_context(failed)?;
            }
        }
        texts.finish(&mut trace);
        for volume in &mut trace.volumes {
            volume.requests.sort_by_key(|request| request.time_us);
        }
        trace.volumes.retain(|volume| !volume.requests.is_empty());
        if trace.volumes.is_empty() {
            bail!("the trace has no requests: {}", names(files));
        }
        Ok(trace)
    }

    fn add_recording(&mut self, path: &Path, left: &mut usize) -> Result<()> {
        let mut reader = Reader::open(path)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let count = reader.volumes_bytes().len();
        let name = |number: usize| if count == 1 { stem.clone() } else { format!("{stem} {}", number + 1) };
        let mut volumes: Vec<Volume> =
            (0..count).map(|number| Volume { name: name(number), requests: Vec::new() }).collect();
        let (mut dropped, mut is_whole) = (0, false);
        while let Some(record) = reader.next_record()? {
            match record {
                Record::Dropped { count, .. } => dropped += count,
                Record::End { .. } => is_whole = true,
                Record::Request(entry) => {
                    let kind = match entry.kind {
                        Recorded::Read => Kind::Read,
                        Recorded::Write => Kind::Write,
                        Recorded::WriteZeroes => Kind::WriteZeroes,
                        Recorded::Discard => Kind::Discard,
                        Recorded::Flush => continue,
                    };
                    one_less(left)?;
                    let (time_us, offset, bytes) = (entry.time_us, entry.offset, entry.bytes);
                    if let Some(volume) = volumes.get_mut(usize::from(entry.volume)) {
                        let content = entry.content;
                        volume.requests.push(Request { time_us, offset, bytes, kind, content });
                    }
                }
            }
        }
        if dropped > 0 {
            self.notes.push(format!(
                "{stem} lacks {dropped} requests, which arrived faster than they could be recorded."
            ));
        }
        if !is_whole {
            self.notes
                .push(format!("the recording {stem} was not ended properly: it may lack its last second."));
        }
        self.has_contents = true;
        self.volumes.append(&mut volumes);
        Ok(())
    }

    /// Microseconds from the first to the last request.
    pub fn duration_us(&self) -> u64 {
        let last = |volume: &Volume| volume.requests.last().map(|request| request.time_us);
        self.volumes.iter().filter_map(last).max().unwrap_or(0)
    }

    /// The number of requests.
    pub fn requests(&self) -> usize {
        self.volumes.iter().map(|volume| volume.requests.len()).sum()
    }
}

fn names(files: &[PathBuf]) -> String {
    files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn one_less(left: &mut usize) -> Result<()> {
    let Some(less) = left.checked_sub(1) else {
        bail!(
            "the files of the trace have more than {MOST_REQUESTS} requests in all, which would not fit in memory; use fewer \
             files, or a shorter trace"
        );
    };
    *left = less;
    Ok(())
}

/// The first bytes of a file, and a reader that begins at its start.
fn first_bytes(file: File) -> std::io::Result<(Vec<u8>, impl Read)> {
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut first = Vec::new();
    reader.by_ref().take(4).read_to_end(&mut first)?;
    let all = std::io::Cursor::new(first.clone()).chain(reader);
    Ok((first, all))
}

/// Disks by name.
#[derive(Default)]
struct Named {
    numbers: HashMap<String, usize>,
    volumes: Vec<Volume>,
}

impl Named {
    fn volume(&mut self, name: &str) -> &mut Volume {
        let number = match self.numbers.get(name) {
            Some(number) => *number,
            None => {
                self.numbers.insert(name.to_owned(), self.volumes.len());
                self.volumes.push(Volume { name: name.to_owned(), requests: Vec::new() });
                self.volumes.len() - 1
            }
        };
        &mut self.volumes[number]
    }
}
