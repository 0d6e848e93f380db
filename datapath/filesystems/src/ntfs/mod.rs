//! NTFS, read in one pass over its table of files.
//!
//! ```text
//!   boot sector -> first record of $MFT -> all of $MFT -> table: names, directories, sizes, streams
//!                                              \--------> scan: the places of all that files consist of
//!   contents of a file: its record -> list of attributes -> parts in other records -> runs -> clusters
//! ```
//! Volumes of Windows 2000 and later are read, with clusters of 512 bytes to 2 MiB. Files may be in any number of records
//! and pieces, sparse, or compressed (LZNT1). A stream with a name is an entry beside its file: `file:stream`.
//!
//! Encrypted files read as they are stored. Files that a filter of Windows unpacks (system compression, deduplication,
//! files in the cloud) are [`NodeKind::Other`]; with system compression, the packed contents are the stream
//! `WofCompressedData`. What NTFS keeps in files of its own is not listed. The log is not replayed: what is read is the
//! volume as of the last lazy write, and a remark says so if it was not unmounted.
//!
//! Start reading at [`Ntfs`]. `boot` has the layout, `record` and `runs` what records consist of, `volume` reads by them,
//! `table` is what is kept.

mod boot;
mod fields;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod index;
mod links;
mod log;
mod lznt1;
mod record;
mod runs;
mod table;
mod volume;

use self::boot::Layout;
use self::record::{push_name, types};
use self::table::{FIRST_USER, File, Piece, ROOT, Table};
use self::volume::{Contents, Volume, unnamed};
use crate::visits::Visits;
use crate::{Bytes, Entries, Fault, FileSystem, Kind, Node, NodeKind, Owner, Scanned, fault};

/// The record of the log.
const LOG: u32 = 2;
/// The record of the directory of NTFS's own files.
const EXTEND: u32 = 11;

/// Whether a boot sector is that of an NTFS.
pub fn is_one(boot: &[u8; 512]) -> bool {
    boot::is_ntfs(boot)
}

/// An NTFS file system.
pub struct Ntfs {
    volume: Volume,
    is_dirty: bool,
    /// All files, once somebody asked for some.
    table: Option<Result<Table, Fault>>,
    /// The contents that were read last, by the id of their node.
    last: Option<(u64, Contents)>,
}

/// What the id of a node means: a record, and for a stream its id after 1.
fn id_of(file: u32, stream: Option<u32>) -> u64 {
    u64::from(file) | stream.map_or(0, |stream| (u64::from(stream) + 1) << 32)
}

fn parts_of(id: u64) -> (u32, Option<u32>) {
    let low = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    (low(id), low(id >> 32).checked_sub(1))
}

impl Ntfs {
    /// Opens the file system in a partition.
    pub fn open(mut bytes: Bytes) -> Result<Self, Fault> {
        let mut boot = [0; 512];
        bytes.read(0, &mut boot)?;
        if !boot::is_ntfs(&boot) {
            return Err(fault("it has no boot sector of NTFS"));
        }
        let mut volume = Volume::open(bytes, Layout::of(&boot)?)?;
        let is_dirty = log::is_dirty(&mut volume);
        Ok(Self { volume, is_dirty, table: None, last: None })
    }

    fn fill_table(&mut self, visits: &mut Visits) -> Result<(), Fault> {
        if self.table.is_none() {
            let table = Table::of(&mut self.volume, visits, None);
            visits.check()?;
            self.table = Some(table);
        }
        self.table.as_ref().map_or(Ok(()), |table| table.as_ref().map(drop).map_err(Fault::clone))
    }

    fn table(&self) -> Result<&Table, Fault> {
        let table = self.table.as_ref().ok_or_else(|| fault("its files were not listed before"))?;
        table.as_ref().map_err(Fault::clone)
    }

    /// Why a file is damaged.
    fn why(&mut self, file: u32) -> Fault {
        let read = self.volume.record(file.into()).and_then(|record| {
            let record = record.ok_or_else(|| fault("its MFT record is not in use"))?;
            record.attributes().try_for_each(|attribute| attribute.map(drop))
        });
        read.err().unwrap_or_else(|| fault("one of its further MFT records, or its index, cannot be read"))
    }

    /// The contents of a node.
    fn contents(&mut self, id: u64) -> Result<Contents, Fault> {
        let (file, stream) = parts_of(id);
        let name =
            stream.map(|stream| self.table()?.stream_name(stream).map(<[u8]>::to_vec).ok_or_else(gone));
        let name = name.transpose()?;
        let contents = match &name {
            None => self.volume.contents(file.into(), types::DATA, &unnamed)?,
            Some(name) => {
                let is_its = |utf16: &[u8]| {
                    let mut its = Vec::new();
                    push_name(utf16, &mut its);
                    its == *name
                };
                self.volume.contents(file.into(), types::DATA, &is_its)?
            }
        };
        contents.ok_or_else(gone)
    }
}

fn gone() -> Fault {
    fault("a file has no contents")
}

fn node(file: &File, path: Vec<u8>) -> Node {
    let kind = match () {
        () if links::is_link(file.reparse_tag) => NodeKind::Link,
        () if file.is_reparse_point() => NodeKind::Other,
        () if file.is_directory => NodeKind::Directory,
        () => NodeKind::File,
    };
    let tag = u128::from(file.reparse_tag);
    Node {
        path,
        kind,
        size_bytes: file.size_bytes,
        modified: file.modified.into(),
        attributes: tag << 64 | u128::from(file.security) << 32 | u128::from(file.attributes),
        id: id_of(file.number, None),
        fault: None,
    }
}

/// The streams of a file as nodes. A stream has what its file has, except for the contents.
fn streams(table: &Table, file: &File, name: &[u8], directory: &Node) -> Vec<(Vec<u8>, Node)> {
    let its = table.streams(file.number).map(|(id, stream, size_bytes)| {
        let name = [name, b":", stream].concat();
        let path = directory.child(&name);
        let id = id_of(file.number, Some(id));
        (name, Node { kind: NodeKind::File, size_bytes, id, ..node(file, path) })
    });
    its.collect()
}

impl FileSystem for Ntfs {
    fn kind(&self) -> Kind {
        Kind::Ntfs
    }

    fn root(&self) -> Node {
        Node::root(ROOT.into())
    }

    fn remark(&self) -> Option<String> {
        let dirty = "it was not unmounted: the last changes may be only in its log, which was not read";
        self.is_dirty.then(|| dirty.to_owned())
    }

    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault> {
        self.fill_table(visits)?;
        let (number, stream) = parts_of(directory.id);
        let table = self.table()?;
        let is_directory = |file: &&File| file.is_directory && !file.is_damaged && stream.is_none();
        let Some(its) = table.file(number).filter(is_directory) else { return Err(self.why(number)) };
        let mut out = Entries::new();
        let mut damaged = Vec::new();
        let mut found = |name: Vec<u8>, node: Node| -> Result<(), Fault> {
            visits.add()?;
            if visits.hold(directory, &name)? {
                out.insert(name, node);
            }
            Ok(())
        };
        if number == ROOT {
            streams(table, its, &[], directory).into_iter().try_for_each(|(name, node)| found(name, node))?;
        }
        for (name, file) in table.children(number).filter(|(_, file)| file.number >= FIRST_USER) {
            if file.is_damaged {
                damaged.push((file.number, name.to_vec()));
            }
            found(name.to_vec(), node(file, directory.child(name)))?;
            let streams = streams(table, file, name, directory);
            streams.into_iter().try_for_each(|(name, node)| found(name, node))?;
        }
        for (file, name) in damaged {
            let why = self.why(file);
            if let Some(entry) = out.get_mut(&name) {
                *entry = Node::unreadable(directory.child(&name), why);
            }
        }
        Ok(out)
    }

    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        if at >= file.size_bytes {
            return Ok(0);
        }
        let contents = match self.last.take().filter(|(id, _)| *id == file.id) {
            Some((_, contents)) => contents,
            None => self.contents(file.id)?,
        };
        if contents.size_bytes() != file.size_bytes {
            return Err(fault("the records of a file do not agree about its size"));
        }
        let len = self.volume.read(&contents, at, into);
        self.last = Some((file.id, contents));
        len
    }

    fn link(&mut self, link: &Node) -> Result<Vec<u8>, Fault> {
        let (file, _) = parts_of(link.id);
        let value = self.volume.contents(file.into(), types::REPARSE_POINT, &unnamed)?;
        let value = value.filter(|value| value.size_bytes() <= links::REPARSE_BYTES_MAX);
        let value = value.ok_or_else(|| fault("the target of a link is missing or too long"))?;
        let value = self.volume.whole(&value)?;
        links::target(&value).ok_or_else(|| fault("the target of a link is invalid"))
    }

    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let len_bytes = self.volume.bytes.len();
        let mut piece = |Piece { bytes, file, stream }: Piece| {
            // A volume may be longer than the disk that is left of it.
            let bytes = bytes.start..bytes.end.min(len_bytes);
            let owner = match file {
                LOG => Owner::Journal,
                ROOT | FIRST_USER.. => Owner::File(id_of(file, stream)),
                _ => Owner::Metadata,
            };
            if bytes.is_empty() { Ok(()) } else { found(Scanned::Run { bytes, owner }) }
        };
        let table = Table::of(&mut self.volume, visits, Some(&mut piece))?;
        // Behind the last cluster is the copy of the boot sector.
        let end = self.volume.layout.clusters.saturating_mul(self.volume.layout.cluster_bytes);
        if end < len_bytes {
            found(Scanned::Run { bytes: end..len_bytes, owner: Owner::Metadata })?;
        }
        for (file, parent, name) in table.names() {
            if file.number < FIRST_USER && file.number != EXTEND {
                continue;
            }
            visits.add()?;
            found(Scanned::Name { id: file.number.into(), parent: parent.into(), name: name.to_vec() })?;
            for (id, stream, _) in table.streams(file.number) {
                let (id, name) = (id_of(file.number, Some(id)), [name, b":", stream].concat());
                found(Scanned::Name { id, parent: parent.into(), name })?;
            }
        }
        for (id, stream, _) in table.streams(ROOT) {
            let (id, name) = (id_of(ROOT, Some(id)), [b":", stream].concat());
            found(Scanned::Name { id, parent: ROOT.into(), name })?;
        }
        let damaged: Vec<u32> =
            table.files().iter().filter(|file| file.is_damaged).map(|file| file.number).collect();
        self.table = Some(Ok(table));
        for number in damaged {
            let why = self.why(number);
            found(Scanned::Unreadable { id: number.into(), why })?;
        }
        Ok(())
    }
}
