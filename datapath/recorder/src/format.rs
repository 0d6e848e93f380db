//! The file format of a recording: one zstd stream. All numbers are little-endian.
//!
//! | decompressed bytes | contents |
//! |---|---|
//! | 8 | `HWREQS` and the version of the format, 2 bytes |
//! | 8 | when the recording began, in microseconds since 1970 |
//! | 4 | number of volumes |
//! | 8 each | the size of each volume in bytes |
//! | 24 each | records |
//!
//! A record has these fields: microseconds since the beginning (8 bytes), first sector of 512 bytes (8),
//! number of sectors (4), volume (2), kind (1), content class (1). The kinds are 0 read, 1 write, 2 zero
//! write, 3 discard, 4 flush, 5 dropped requests (their number is in the field of the first sector), 6 end of
//! the recording.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use crate::content::Content;

/// The most volumes in one file.
pub const MOST_VOLUMES: usize = 4096;

const MAGIC: [u8; 8] = *b"HWREQS\x01\x00";
const RECORD_BYTES: usize = 24;
const SECTOR: u64 = 512;

/// The first bytes of a zstd stream, and therefore of a recording.
pub const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A write of zeroes without data.
    WriteZeroes,
    /// A discard.
    Discard,
    /// A flush.
    Flush,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Microseconds since the recording began.
    pub time_us: u64,
    /// First byte, of a sector.
    pub offset: u64,
    /// Bytes, whole sectors.
    pub bytes: u64,
    /// Number of the volume, from 0.
    pub volume: u16,
    /// The kind of the request.
    pub kind: Kind,
    /// The content class of a write's data.
    pub content: Content,
}

/// A record of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// A request.
    Request(Entry),
    /// Requests before this record were dropped, because the queue was full.
    Dropped {
        /// Microseconds since the recording began.
        time_us: u64,
        /// How many were dropped.
        count: u64,
    },
    /// The recording ended normally.
    End {
        /// Microseconds since the recording began.
        time_us: u64,
    },
}

const DROPPED: u8 = 5;
const END: u8 = 6;

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::WriteZeroes => 2,
            Self::Discard => 3,
            Self::Flush => 4,
        }
    }
}

fn encode(time_us: u64, first: u64, sectors: u32, volume: u16, kind: u8, content: u8) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    let parts: [&[u8]; 6] = [
        &time_us.to_le_bytes(),
        &first.to_le_bytes(),
        &sectors.to_le_bytes(),
        &volume.to_le_bytes(),
        &[kind],
        &[content],
    ];
    let all = parts.into_iter().flatten();
    bytes.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
    bytes
}

/// Writes a file.
pub struct Writer<W: Write>(zstd::Encoder<'static, W>);

impl<W: Write> Writer<W> {
    /// Writes the header. All volumes must be known when the recording begins.
    pub fn new(to: W, began_unix_us: u64, volumes_bytes: &[u64]) -> io::Result<Self> {
        let count = u32::try_from(volumes_bytes.len()).ok().filter(|_| volumes_bytes.len() <= MOST_VOLUMES);
        let count = count
            .ok_or_else(|| io::Error::other(format!("a recording has at most {MOST_VOLUMES} volumes")))?;
        let mut encoder = zstd::Encoder::new(to, 3)?;
        encoder.write_all(&MAGIC)?;
        encoder.write_all(&began_unix_us.to_le_bytes())?;
        encoder.write_all(&count.to_le_bytes())?;
        for bytes in volumes_bytes {
            encoder.write_all(&bytes.to_le_bytes())?;
        }
        Ok(Self(encoder))
    }

    /// Adds a record. A request with more sectors than one record can express becomes several records.
    pub fn add(&mut self, record: Record) -> io::Result<()> {
        match record {
            Record::Dropped { time_us, count } => {
                self.0.write_all(&encode(time_us, count, 0, 0, DROPPED, Content::Unknown.code()))
            }
            Record::End { time_us } => {
                self.0.write_all(&encode(time_us, 0, 0, 0, END, Content::Unknown.code()))
            }
            Record::Request(entry) => {
                let (mut first, mut left) = (entry.offset / SECTOR, entry.bytes / SECTOR);
                loop {
                    let sectors = u32::try_from(left).unwrap_or(u32::MAX);
                    let (kind, content) = (entry.kind.code(), entry.content.code());
                    self.0.write_all(&encode(entry.time_us, first, sectors, entry.volume, kind, content))?;
                    first += u64::from(sectors);
                    left -= u64::from(sectors);
                    if left == 0 {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Flushes what was added to the file.
    pub fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    /// Ends the zstd stream.
    pub fn finish(self) -> io::Result<W> {
        let mut to = self.0.finish()?;
        to.flush()?;
        Ok(to)
    }
}

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The file is not a recording, or has another format version.
    #[error("it is not a recording of requests of this version: its first unpacked bytes are others")]
    NotARecording,
    /// A field has an impossible value.
    #[error("byte {at} of the unpacked recording: {why}")]
    Broken {
        /// Offset in the decompressed stream.
        at: u64,
        /// What is wrong.
        why: String,
    },
}

/// Reads a file.
pub struct Reader<R: Read> {
    from: R,
    at: u64,
    volumes_bytes: Vec<u64>,
    began_unix_us: u64,
    is_over: bool,
}

impl Reader<Box<dyn Read>> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let unpacked = zstd::Decoder::new(BufReader::new(File::open(path)?))?;
        Reader::new(Box::new(BufReader::with_capacity(1 << 16, unpacked)) as Box<dyn Read>)
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header of a stream.
    pub fn new(mut from: R) -> Result<Self, ReadError> {
        let mut magic = [0; 8];
        let is_whole = from.read_exact(&mut magic);
        if is_whole.is_err() || magic != MAGIC {
            return Err(ReadError::NotARecording);
        }
        let (mut began, mut count) = ([0; 8], [0; 4]);
        from.read_exact(&mut began)?;
        from.read_exact(&mut count)?;
        let count = u32::from_le_bytes(count);
        if usize::try_from(count).unwrap_or(usize::MAX) > MOST_VOLUMES {
            return Err(ReadError::Broken {
                at: 16,
                why: format!("it has {count} volumes, and at most {MOST_VOLUMES} can be"),
            });
        }
        let mut volumes_bytes = Vec::new();
        for _ in 0..count {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes)?;
            volumes_bytes.push(u64::from_le_bytes(bytes));
        }
        let at = 20 + 8 * u64::from(count);
        Ok(Self { from, at, volumes_bytes, began_unix_us: u64::from_le_bytes(began), is_over: false })
    }

    /// Size of each volume.
    pub fn volumes_bytes(&self) -> &[u64] {
        &self.volumes_bytes
    }

    /// When the recording began, in microseconds since 1970.
    pub fn began_unix_us(&self) -> u64 {
        self.began_unix_us
    }

    /// The next record. `None` after the end, or if the file ends without one, as after a crash.
    pub fn next_record(&mut self) -> Result<Option<Record>, ReadError> {
        if self.is_over {
            return Ok(None);
        }
        let mut bytes = [0; RECORD_BYTES];
        match self.from.read_exact(&mut bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.is_over = true;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        }
        let record = self.decode(&bytes);
        self.at += RECORD_BYTES as u64;
        self.is_over = matches!(record, Ok(Record::End { .. }));
        record.map(Some)
    }

    fn decode(&self, bytes: &[u8; RECORD_BYTES]) -> Result<Record, ReadError> {
        let number = |from: usize, len: usize| {
            let part = bytes.get(from..from + len).unwrap_or_default();
            part.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
        };
        let broken = |place: u64, why: String| ReadError::Broken { at: self.at + place, why };
        let (time_us, first, sectors) = (number(0, 8), number(8, 8), number(16, 4));
        let volume = u16::try_from(number(20, 2)).unwrap_or(u16::MAX);
        let kind = match number(22, 1) {
            0 => Kind::Read,
            1 => Kind::Write,
            2 => Kind::WriteZeroes,
            3 => Kind::Discard,
            4 => Kind::Flush,
            5 => return Ok(Record::Dropped { time_us, count: first }),
            6 => return Ok(Record::End { time_us }),
            other => return Err(broken(22, format!("{other} is not a kind of request"))),
        };
        let content = u8::try_from(number(23, 1)).ok().and_then(Content::from_code);
        let content = content.ok_or_else(|| broken(23, "this is not a class of contents".into()))?;
        let size_bytes = self.volumes_bytes.get(usize::from(volume));
        let size_bytes = size_bytes.ok_or_else(|| broken(20, format!("there is no volume {volume}")))?;
        let end = first.checked_add(sectors).and_then(|end| end.checked_mul(SECTOR));
        if end.is_none_or(|end| end > *size_bytes) {
            return Err(broken(8, format!("the request ends past its volume, which has {size_bytes} bytes")));
        }
        Ok(Record::Request(Entry {
            time_us,
            offset: first * SECTOR,
            bytes: sectors * SECTOR,
            volume,
            kind,
            content,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(records: &[Record]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new(), 77, &[1 << 20, 4 << 40]).unwrap();
        records.iter().for_each(|record| writer.add(*record).unwrap());
        zstd::decode_all(&writer.finish().unwrap()[..]).unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Vec<Record>, ReadError> {
        let mut reader = Reader::new(bytes)?;
        std::iter::from_fn(|| reader.next_record().transpose()).collect()
    }

    fn entry(kind: Kind, offset: u64, bytes: u64, volume: u16) -> Entry {
        Entry { time_us: 5, offset, bytes, volume, kind, content: Content::Packs(3) }
    }

    #[test]
    fn what_was_written_is_read_and_long_discards_are_split() {
        let long = 3 << 40;
        let records = [
            Record::Request(entry(Kind::Write, 512, 4096, 0)),
            Record::Dropped { time_us: 6, count: 12 },
            Record::Request(entry(Kind::Discard, 0, long, 1)),
            Record::Request(entry(Kind::Flush, 0, 0, 0)),
            Record::End { time_us: 9 },
        ];
        let found = read(&written(&records)).unwrap();
        let first = u64::from(u32::MAX) * 512;
        assert_eq!(found.len(), 6);
        assert_eq!(found[..2], records[..2]);
        assert_eq!(found[2], Record::Request(entry(Kind::Discard, 0, first, 1)));
        assert_eq!(found[3], Record::Request(entry(Kind::Discard, first, long - first, 1)));
        assert_eq!(found[4..], records[3..]);
    }

    #[test]
    fn a_record_is_laid_out_as_the_head_of_the_file_says() {
        let bytes = written(&[Record::Request(entry(Kind::Write, 1024, 1536, 1))]);
        assert_eq!(bytes[..8], *b"HWREQS\x01\x00");
        assert_eq!(bytes[8..20], [77, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        let record = [5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 1, 3];
        assert_eq!(bytes[36..], record);
    }

    #[test]
    fn broken_records_are_refused_with_their_place() {
        let good = written(&[Record::Request(entry(Kind::Write, 512, 4096, 0))]);
        let broken = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            read(&bytes).unwrap_err().to_string()
        };
        assert!(broken(58, 9).contains("byte 58 of the unpacked recording: 9 is not a kind"));
        assert!(broken(59, 99).contains("byte 59"));
        assert!(broken(56, 7).contains("there is no volume 7"));
        assert!(broken(47, 1).contains("ends past its volume"));
        assert!(matches!(read(&good[1..]), Err(ReadError::NotARecording)));
        // As a crash leaves it.
        assert_eq!(read(&good[..good.len() - 1]).unwrap(), []);
    }
}
