//! What one pass over the table of files finds: all files, their names and sizes.
//!
//! ```text
//!   record --base?--> file: size, times, flags      names: (directory, name) -> file      streams: (file, name) -> size
//! ```
//! A file whose attributes are in several records is put together by the reference of each record to the first one. Paths
//! come from the names in the records of files, which say the directory. A name counts if its directory's record is in use
//! and was not used again since: so deleted files do not appear, and a damaged index hides nothing.

use std::ops::Range;

use super::boot::Layout;
use super::fields::{u32_at, u64_at};
use super::index::{self, is_set};
use super::record::{Attribute, FileName, NameKind, Record, Reference, Value, push_name, types};
use super::runs::each_run;
use super::volume::{RECORDS_MAX, Volume, unnamed};
use crate::units::{u64_of, usize_of};
use crate::visits::Visits;
use crate::{Fault, fault};

/// The most memory for the table of a volume's files: enough for about five million of them. While it grows, vectors may be half
/// empty.
pub(super) const TABLE_BYTES_MAX: usize = 512 << 20;
/// The most records that are in use and cannot be read.
const UNREADABLE_MAX: usize = 16_384;
/// The record of the root directory.
pub(super) const ROOT: u32 = 5;
/// Records below this one are of NTFS itself.
pub(super) const FIRST_USER: u32 = 16;
/// The bit of a file's attributes that says it means something else to Windows.
const REPARSE_ATTRIBUTE: u32 = 0x400;

/// A file or a directory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct File {
    pub(super) number: u32,
    sequence: u16,
    pub(super) is_directory: bool,
    /// Its record, or one that continues it, cannot be read.
    pub(super) is_damaged: bool,
    pub(super) size_bytes: u64,
    /// In units of 100 ns.
    pub(super) modified: u64,
    /// The flags that Windows shows.
    pub(super) attributes: u32,
    /// The number of its owner and access rights in `$Secure`.
    pub(super) security: u32,
    /// What it means to Windows instead of a file: a tag of Microsoft's list. 0: it is a file.
    pub(super) reparse_tag: u32,
    /// Whether its attributes are in several records.
    has_list: bool,
}

/// Bytes of the volume that belong to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) bytes: Range<u64>,
    pub(super) file: u32,
    /// Only if it is of a stream that has a name: its id.
    pub(super) stream: Option<u32>,
}

/// Is called with what a pass finds.
pub(super) type FoundPiece<'a> = &'a mut dyn FnMut(Piece) -> Result<(), Fault>;

/// A stretch of [`Table::text`].
#[derive(Clone, Copy, Debug)]
struct Text {
    at: u32,
    len: u16,
}

/// A name of a file.
#[derive(Clone, Copy, Debug)]
struct Name {
    text: Text,
    parent: u32,
    parent_sequence: u16,
    file: u32,
    file_sequence: u16,
    is_short: bool,
}

/// A stream of a file that has a name.
#[derive(Clone, Copy, Debug)]
struct Stream {
    text: Text,
    file: u32,
    file_sequence: u16,
    size_bytes: u64,
}

/// A fact about the file that a record continues.
struct Late {
    file: u32,
    file_sequence: u16,
    fact: Fact,
}

enum Fact {
    SizeBytes(u64),
    ReparseTag(u32),
    Standard { modified: u64, attributes: u32, security: u32 },
    HasList,
    Damaged,
}

/// All files of a volume.
#[derive(Default)]
pub(super) struct Table {
    /// By number.
    files: Vec<File>,
    /// By directory and name.
    names: Vec<Name>,
    /// By file and name.
    streams: Vec<Stream>,
    text: Vec<u8>,
}

impl Table {
    /// Reads the table of files. `found` is called with the places of all that files consist of.
    pub(super) fn of(
        volume: &mut Volume,
        visits: &mut Visits,
        found: Option<FoundPiece<'_>>,
    ) -> Result<Self, Fault> {
        let in_use = records_in_use(volume);
        let layout = volume.layout;
        let (table, late, later) = (Self::default(), Vec::new(), Vec::new());
        let mut pass = Pass { table, late, unreadable: 0, layout, found, later };
        volume.each_record(|number, record| {
            visits.check()?;
            let Ok(number) = u32::try_from(number) else { return Ok(()) };
            match record {
                Ok(Some(record)) => pass.record(number, &record),
                Ok(None) => Ok(()),
                Err(_) if in_use.as_ref().is_some_and(|map| !is_set(map, number.into())) => Ok(()),
                Err(_) => pass.unreadable(number),
            }
        })?;
        let Pass { mut table, late, unreadable, found, later, .. } = pass;
        table.files.shrink_to_fit();
        table.apply(late);
        if unreadable > 0 {
            table.mark_unreadable(volume);
            table.name_unreadable(volume)?;
        }
        table.sort();
        if let Some(found) = found {
            for (piece, name) in later {
                if let Some(stream) = table.stream_id(piece.file, table.text(name)) {
                    found(Piece { stream: Some(stream), ..piece })?;
                }
            }
        }
        Ok(table)
    }

    fn stream_id(&self, file: u32, name: &[u8]) -> Option<u32> {
        let key = (file, name);
        let at =
            self.streams.binary_search_by(|stream| (stream.file, self.text(stream.text)).cmp(&key)).ok()?;
        u32::try_from(at).ok()
    }

    /// The name of a stream.
    pub(super) fn stream_name(&self, id: u32) -> Option<&[u8]> {
        self.streams.get(usize_of(id.into())).map(|stream| self.text(stream.text))
    }

    /// All names: of what, in which directory.
    pub(super) fn names(&self) -> impl Iterator<Item = (&File, u32, &[u8])> {
        self.names.iter().filter_map(|name| Some((self.file(name.file)?, name.parent, self.text(name.text))))
    }

    pub(super) fn file(&self, number: u32) -> Option<&File> {
        let at = self.files.binary_search_by_key(&number, |file| file.number).ok()?;
        self.files.get(at)
    }

    pub(super) fn files(&self) -> &[File] {
        &self.files
    }

    fn text(&self, text: Text) -> &[u8] {
        let at = usize_of(text.at.into());
        self.text.get(at..at.saturating_add(text.len.into())).unwrap_or_default()
    }

    /// The files in a directory and their names, by name.
    pub(super) fn children(&self, directory: u32) -> impl Iterator<Item = (&[u8], &File)> {
        let begin = self.names.partition_point(|name| name.parent < directory);
        let its = self.names.get(begin..).unwrap_or_default();
        let its = its.iter().take_while(move |name| name.parent == directory);
        its.filter_map(|name| Some((self.text(name.text), self.file(name.file)?)))
    }

    /// The named streams of a file, by name: id, name and size.
    pub(super) fn streams(&self, file: u32) -> impl Iterator<Item = (u32, &[u8], u64)> {
        let begin = self.streams.partition_point(|stream| stream.file < file);
        let its = self.streams.get(begin..).unwrap_or_default();
        let its = (u32::try_from(begin).unwrap_or(u32::MAX)..).zip(its);
        let its = its.take_while(move |(_, stream)| stream.file == file);
        its.map(|(id, stream)| (id, self.text(stream.text), stream.size_bytes))
    }

    /// The memory that the table needs.
    fn held_bytes(&self) -> usize {
        let names = self.names.len().saturating_mul(size_of::<Name>());
        let files = self.files.len().saturating_mul(size_of::<File>());
        let streams = self.streams.len().saturating_mul(size_of::<Stream>());
        names.saturating_add(files).saturating_add(streams).saturating_add(self.text.len())
    }

    /// Fails if the table and `more_bytes` in addition need more memory than is allowed.
    fn check_size(&self, more_bytes: usize) -> Result<(), Fault> {
        if self.held_bytes().saturating_add(more_bytes) > TABLE_BYTES_MAX {
            let most = TABLE_BYTES_MAX >> 20;
            return Err(fault(format!(
                "the table of its files needs more than {most} MiB of memory, which is the limit"
            )));
        }
        Ok(())
    }

    fn push_text(&mut self, utf16: &[u8]) -> Text {
        // Both fit: a name has 255 letters of three bytes at most, and all of them have the size that is checked.
        let at = u32::try_from(self.text.len()).unwrap_or(u32::MAX);
        push_name(utf16, &mut self.text);
        let len = self.text.len().saturating_sub(usize_of(at.into()));
        Text { at, len: u16::try_from(len).unwrap_or(u16::MAX) }
    }

    fn push_name(&mut self, name: &FileName<'_>, file: u32, file_sequence: u16) {
        let Ok(parent) = u32::try_from(name.parent.number) else { return };
        let text = self.push_text(name.name);
        self.names.push(Name {
            text,
            parent,
            parent_sequence: name.parent.sequence,
            file,
            file_sequence,
            is_short: name.kind == NameKind::Short,
        });
    }

    /// Adds what other records said of a file to it.
    fn apply(&mut self, late: Vec<Late>) {
        for Late { file, file_sequence, fact } in late {
            let Ok(at) = self.files.binary_search_by_key(&file, |file| file.number) else { continue };
            self.files.get_mut(at).into_iter().for_each(|file| file.apply(file_sequence, &fact));
        }
    }

    /// Marks the files that a record continues which cannot be read.
    fn mark_unreadable(&mut self, volume: &mut Volume) {
        let listed = |file: &&File| file.has_list && !file.is_damaged;
        // All lists together are not longer than the volume either.
        let mut bytes_left = volume.bytes.len();
        let numbers: Vec<u32> = self.files.iter().filter(listed).map(|file| file.number).collect();
        for number in numbers {
            let parts = volume.records_of(number.into(), &mut bytes_left);
            let is_unread = |part: &u64| {
                u32::try_from(*part).ok().and_then(|part| self.file(part)).is_some_and(File::is_unread)
            };
            if parts.is_ok_and(|parts| !parts.iter().any(is_unread)) {
                continue;
            }
            self.mark_damaged(number);
        }
    }

    fn mark_damaged(&mut self, number: u32) {
        let at = self.files.binary_search_by_key(&number, |file| file.number).ok();
        at.and_then(|at| self.files.get_mut(at)).into_iter().for_each(|file| file.is_damaged = true);
    }

    /// Looks for the names of files whose records cannot be read in all directories.
    fn name_unreadable(&mut self, volume: &mut Volume) -> Result<(), Fault> {
        // All indexes together are not longer than the volume; a crafted one can say so.
        let mut bytes_left = volume.bytes.len();
        let readable = |file: &&File| file.is_directory && !file.is_damaged;
        let directories: Vec<Reference> = self.files.iter().filter(readable).map(File::reference).collect();
        for directory in directories {
            let mut found = Vec::new();
            let read = index::each_entry(volume, directory.number, &mut bytes_left, &mut |record, name| {
                let number = u32::try_from(record.number).unwrap_or(u32::MAX);
                let is_missing = self.file(number).is_some_and(|file| file.is_damaged);
                if is_missing && name.parent.number == directory.number {
                    found.push((record, name.name.to_vec()));
                }
                // A name has 510 bytes at most.
                self.check_size(found.len().saturating_mul(600))
            });
            if read.is_err() {
                self.check_size(0)?;
                self.mark_damaged(u32::try_from(directory.number).unwrap_or(u32::MAX));
            }
            for (record, name) in found {
                let name = FileName { parent: directory, kind: NameKind::Full, name: &name };
                self.push_name(&name, u32::try_from(record.number).unwrap_or(u32::MAX), 0);
                self.check_size(0)?;
            }
        }
        Ok(())
    }

    /// Drops what belongs to no file, and sorts the rest.
    fn sort(&mut self) {
        let mut names = std::mem::take(&mut self.names);
        names.retain(|name| {
            let file = self.file(name.file).is_some_and(|file| file.is_own(name.file_sequence));
            let parent = self.file(name.parent);
            let is_child = parent.is_some_and(|parent| {
                (parent.is_directory || parent.is_unread()) && parent.is_own(name.parent_sequence)
            });
            // The root's name of itself.
            file && is_child && name.file != ROOT && name.file != name.parent
        });
        names.sort_unstable_by(|a, b| {
            let by_file = (a.file, a.is_short).cmp(&(b.file, b.is_short));
            by_file.then_with(|| self.place(a).cmp(&self.place(b)))
        });
        let (mut last, mut has_full) = (None, false);
        names.retain(|name| {
            let is_first = last.replace(name.file) != Some(name.file);
            if is_first {
                has_full = !name.is_short;
            }
            // A directory has one place. If it had two, it could contain itself.
            let is_directory = self.file(name.file).is_some_and(|file| file.is_directory || file.is_unread());
            is_first || !(is_directory || name.is_short && has_full)
        });
        names.sort_unstable_by(|a, b| self.place(a).cmp(&self.place(b)).then(a.file.cmp(&b.file)));
        // A directory may have said the same name again.
        names.dedup_by(|a, b| a.file == b.file && self.place(a) == self.place(b));
        names.shrink_to_fit();
        self.names = names;

        let mut streams = std::mem::take(&mut self.streams);
        streams.retain(|stream| self.file(stream.file).is_some_and(|file| file.is_own(stream.file_sequence)));
        streams.sort_unstable_by(|a, b| {
            a.file.cmp(&b.file).then_with(|| self.text(a.text).cmp(self.text(b.text)))
        });
        self.streams = streams;
    }

    fn place(&self, name: &Name) -> (u32, &[u8]) {
        (name.parent, self.text(name.text))
    }
}

impl File {
    fn apply(&mut self, file_sequence: u16, fact: &Fact) {
        if !self.is_own(file_sequence) {
            return;
        }
        match *fact {
            Fact::SizeBytes(size_bytes) => self.size_bytes = size_bytes,
            Fact::ReparseTag(tag) => self.reparse_tag = tag,
            Fact::Standard { modified, attributes, security } => {
                (self.modified, self.attributes, self.security) = (modified, attributes, security);
            }
            Fact::HasList => self.has_list = true,
            Fact::Damaged => self.is_damaged = true,
        }
    }

    /// Whether Windows takes it for something else than a file or directory.
    pub(super) fn is_reparse_point(&self) -> bool {
        self.reparse_tag != 0 || self.attributes & REPARSE_ATTRIBUTE != 0
    }

    /// Whether something that names this number of uses means this file. Of a record that cannot be read, it is not known.
    fn is_own(&self, sequence: u16) -> bool {
        self.is_unread() || self.reference().fits_use(sequence)
    }

    fn reference(&self) -> Reference {
        Reference { number: self.number.into(), sequence: self.sequence }
    }

    /// Whether its record could not be read at all.
    fn is_unread(&self) -> bool {
        self.is_damaged && self.sequence == 0
    }
}

impl Reference {
    fn fits_use(self, named: u16) -> bool {
        Self { number: self.number, sequence: named }.fits(self.sequence)
    }
}

/// Which records are in use by the bitmap of the table of files. `None`: it cannot be read.
fn records_in_use(volume: &mut Volume) -> Option<Vec<u8>> {
    let bitmap = volume.contents(0, types::BITMAP, &unnamed).ok()??;
    if bitmap.size_bytes() > RECORDS_MAX.div_ceil(8).next_multiple_of(8 << 10) {
        return None;
    }
    volume.whole(&bitmap).ok()
}

struct Pass<'a> {
    table: Table,
    late: Vec<Late>,
    unreadable: usize,
    layout: Layout,
    found: Option<FoundPiece<'a>>,
    /// Pieces of streams, which have an id when all of them are known.
    later: Vec<(Piece, Text)>,
}

impl Pass<'_> {
    fn check_size(&self) -> Result<(), Fault> {
        let late_bytes = self.late.len().saturating_mul(size_of::<Late>());
        let later_bytes = self.later.len().saturating_mul(size_of::<(Piece, Text)>());
        self.table.check_size(late_bytes.saturating_add(later_bytes))
    }

    fn unreadable(&mut self, number: u32) -> Result<(), Fault> {
        self.unreadable += 1;
        if self.unreadable > UNREADABLE_MAX {
            return Err(fault(format!("more than {UNREADABLE_MAX} MFT records cannot be read")));
        }
        self.table.files.push(File { number, is_damaged: true, ..File::default() });
        self.check_size()
    }

    fn record(&mut self, number: u32, record: &Record) -> Result<(), Fault> {
        let (file, file_sequence) = match record.base {
            Some(base) => (u32::try_from(base.number).unwrap_or(u32::MAX), base.sequence),
            None => {
                self.table.files.push(File {
                    number,
                    // 0 is of a record that could not be read.
                    sequence: record.sequence.max(1),
                    is_directory: record.is_directory,
                    ..File::default()
                });
                (number, record.sequence)
            }
        };
        for attribute in record.attributes() {
            match attribute {
                Ok(attribute) => {
                    self.attribute(file, file_sequence, &attribute);
                    self.pieces(file, &attribute)?;
                }
                Err(_) => self.late(file, file_sequence, Fact::Damaged),
            }
        }
        self.check_size()
    }

    /// Notes something of a file: at once if it is of the record that was just read.
    fn late(&mut self, file: u32, file_sequence: u16, fact: Fact) {
        match self.table.files.last_mut().filter(|last| last.number == file) {
            Some(last) => last.apply(file_sequence, &fact),
            None => self.late.push(Late { file, file_sequence, fact }),
        }
    }

    /// Tells where the clusters of an attribute are.
    fn pieces(&mut self, file: u32, attribute: &Attribute<'_>) -> Result<(), Fault> {
        let (Some(found), Value::Clusters(part)) = (&mut self.found, attribute.value) else { return Ok(()) };
        let is_stream = attribute.kind == types::DATA && !attribute.name.is_empty();
        let name = is_stream.then(|| self.table.push_text(attribute.name));
        let mut pieces = Vec::new();
        let cluster_bytes = self.layout.cluster_bytes;
        let read = each_run(&part, &self.layout, |run| {
            if let Some(first) = run.on_disk {
                // Both are in the volume.
                let end = first.saturating_add(run.clusters).saturating_mul(cluster_bytes);
                let bytes = first.saturating_mul(cluster_bytes)..end;
                pieces.push(Piece { bytes, file, stream: None });
            }
            Ok(())
        });
        match name {
            _ if read.is_err() => self.late.push(Late { file, file_sequence: 0, fact: Fact::Damaged }),
            Some(name) => self.later.extend(pieces.into_iter().map(|piece| (piece, name))),
            None => pieces.into_iter().try_for_each(found)?,
        }
        Ok(())
    }

    fn attribute(&mut self, file: u32, file_sequence: u16, attribute: &Attribute<'_>) {
        match attribute.kind {
            types::STANDARD_INFORMATION => {
                let fact = attribute.resident().and_then(standard).unwrap_or(Fact::Damaged);
                self.late(file, file_sequence, fact);
            }
            types::ATTRIBUTE_LIST => self.late(file, file_sequence, Fact::HasList),
            types::FILE_NAME => match attribute.resident().and_then(FileName::of) {
                Some(name) => self.table.push_name(&name, file, file_sequence),
                None => self.late(file, file_sequence, Fact::Damaged),
            },
            types::REPARSE_POINT => {
                let tag = attribute.resident().and_then(|value| u32_at(value, 0)).filter(|tag| *tag > 0);
                // Long ones are not in the record. Which one it is does not matter then.
                self.late(file, file_sequence, Fact::ReparseTag(tag.unwrap_or(u32::MAX)));
            }
            types::DATA => {
                let size_bytes = match attribute.value {
                    Value::Resident(value) => u64_of(value.len()),
                    Value::Clusters(part) => match part.sizes {
                        Some(sizes) => sizes.size_bytes,
                        None => return,
                    },
                };
                if attribute.name.is_empty() {
                    self.late(file, file_sequence, Fact::SizeBytes(size_bytes));
                } else {
                    let text = self.table.push_text(attribute.name);
                    self.table.streams.push(Stream { text, file, file_sequence, size_bytes });
                }
            }
            _ => {}
        }
    }
}

fn standard(value: &[u8]) -> Option<Fact> {
    Some(Fact::Standard {
        modified: u64_at(value, 8)?,
        attributes: u32_at(value, 32)?,
        // Only since Windows 2000.
        security: u32_at(value, 52).unwrap_or(0),
    })
}
