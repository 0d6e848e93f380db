//! NTFS, read by a crate made for that.
//!
//! What a file has beside its unnamed stream (alternate streams, reparse data) is not compared, and what NTFS keeps in files
//! of its own (`$MFT`, `$LogFile` ..) is not shown: it changes with everything else. A compressed file is compared as it is
//! stored.

use std::io::{self, Read, Seek, SeekFrom};

use ntfs::structured_values::NtfsFileNamespace;
use ntfs::{Ntfs as Volume, NtfsAttribute, NtfsFile, NtfsReadSeek};

use crate::diff::tree::{Bytes, Entries, Fault, Kind, Node, Tree, Visits, fault};
use crate::units::{u64_of, usize_of};

/// Records below this one are of NTFS itself, but for the root directory.
const FIRST_USER_RECORD: u64 = 16;
const ROOT_RECORD: u64 = 5;
/// An attribute of files that are something else to Windows: links, mount points, files in the cloud.
const REPARSE_POINT: u32 = 0x400;
/// What reading a directory, or the structures around a piece of a file, may take: damaged ones can lead in circles.
const STRUCTURE_BYTES_MAX: u64 = 128 << 20;
/// What entries of one directory that cannot be read may take together: about 16,000 records, more than are listed as damaged.
const UNREADABLE_BYTES_MAX: u64 = 32 << 20;
/// The header of an attribute whose value lies outside of its record, and where in it the initialized size is.
const LONG_HEADER_BYTES: u32 = 64;
const INITIALIZED_AT: u64 = 56;

/// Whether a boot sector is one of NTFS.
pub(super) fn is_one(boot: &[u8; 512]) -> bool {
    boot.get(3..11) == Some(b"NTFS    ") && boot.get(510..) == Some(&[0x55, 0xaa])
}

/// The bytes of a partition with a position, for as many reads as an operation may need.
struct Cursor {
    bytes: Bytes,
    at: u64,
    left: u64,
}

impl Read for Cursor {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = u64_of(into.len()).min(self.bytes.len().saturating_sub(self.at));
        self.left =
            self.left.checked_sub(len).ok_or_else(|| io::Error::other("its structures lead in circles"))?;
        let into = into.get_mut(..usize_of(len)).unwrap_or_default();
        self.bytes.read(self.at, into).map_err(|fault| io::Error::other(fault.0))?;
        self.at += len;
        Ok(into.len())
    }
}

impl Seek for Cursor {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.bytes.len().checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::other("it leads to before its start"))?;
        Ok(self.at)
    }
}

/// An NTFS file system.
pub(super) struct Ntfs {
    volume: Volume,
    cursor: Cursor,
}

impl Ntfs {
    pub(super) fn open(bytes: Bytes) -> Result<Self, Fault> {
        let mut cursor = Cursor { bytes, at: 0, left: STRUCTURE_BYTES_MAX };
        let volume = Volume::new(&mut cursor).map_err(fault)?;
        Ok(Self { volume, cursor })
    }
}

/// A file's record as an entry.
fn node(file: &NtfsFile<'_>, cursor: &mut Cursor, path: Vec<u8>) -> Result<Node, Fault> {
    let info = file.info().map_err(fault)?;
    let attributes = info.file_attributes().bits();
    let size_bytes = match file.data(cursor, "") {
        Some(data) => data.and_then(|data| Ok(data.to_attribute()?.value_length())).map_err(fault)?,
        None => 0,
    };
    let kind = match () {
        () if attributes & REPARSE_POINT != 0 => Kind::Other,
        () if file.is_directory() => Kind::Directory,
        () => Kind::File,
    };
    let owner = u128::from(info.security_id().unwrap_or(0));
    Ok(Node {
        path,
        kind,
        size_bytes,
        modified: info.modification_time().nt_timestamp().into(),
        attributes: owner << 32 | u128::from(attributes),
        place: file.file_record_number(),
        fault: None,
    })
}

/// How much of a value was ever written. What is behind it reads as zeroes, whatever its clusters hold; the crate does not look.
fn initialized_bytes(attribute: &NtfsAttribute<'_, '_>, bytes: &mut Bytes) -> Result<u64, Fault> {
    let is_long = !attribute.is_resident() && attribute.attribute_length() >= LONG_HEADER_BYTES;
    let Some(header) = attribute.position().value().filter(|_| is_long) else { return Ok(u64::MAX) };
    let at = header.get().saturating_add(INITIALIZED_AT);
    let mut field = [0; 8];
    bytes.read(at, &mut field)?;
    let value = u64::from_le_bytes(field);
    // The last two bytes of a sector of a record are a mark, and kept elsewhere. Here they are zero: it is no 256 TiB.
    let is_marked = at.saturating_add(8).is_multiple_of(512);
    Ok(if is_marked { value & (u64::MAX >> 16) } else { value })
}

/// The entry that a record is.
fn entry_of(volume: &Volume, cursor: &mut Cursor, number: u64, path: Vec<u8>) -> Result<Node, Fault> {
    cursor.left = STRUCTURE_BYTES_MAX;
    let file = volume.file(cursor, number).map_err(fault)?;
    node(&file, cursor, path)
}

impl Tree for Ntfs {
    fn root(&self) -> Node {
        Node::root(ROOT_RECORD)
    }

    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault> {
        let Self { volume, cursor } = self;
        cursor.left = STRUCTURE_BYTES_MAX;
        let mut found = Vec::new();
        {
            let record = volume.file(cursor, directory.place).map_err(fault)?;
            let index = record.directory_index(cursor).map_err(fault)?;
            let mut entries = index.entries();
            while let Some(entry) = entries.next(cursor) {
                let entry = entry.map_err(fault)?;
                visits.add()?;
                let number = entry.file_reference().file_record_number();
                let name = entry.key().ok_or_else(|| fault("a directory has an entry without a name"))?;
                let name = name.map_err(fault)?;
                // The short name of a file that has a long one too; and the root's entry for itself.
                if name.namespace() == NtfsFileNamespace::Dos || number < FIRST_USER_RECORD {
                    continue;
                }
                let name = name.name().to_string_lossy().into_bytes();
                if visits.hold(directory, &name)? {
                    found.push((number, name));
                }
            }
        }
        let mut out = Entries::new();
        let mut unreadable_bytes = 0;
        for (number, name) in found {
            visits.check()?;
            let entry = match entry_of(volume, cursor, number, directory.child(&name)) {
                Ok(entry) => entry,
                Err(why) => {
                    unreadable_bytes += STRUCTURE_BYTES_MAX.saturating_sub(cursor.left);
                    if unreadable_bytes > UNREADABLE_BYTES_MAX {
                        return Err(why);
                    }
                    Node::unreadable(directory.child(&name), why)
                }
            };
            out.insert(name, entry);
        }
        Ok(out)
    }

    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let len = u64_of(into.len()).min(file.size_bytes.saturating_sub(at));
        if len == 0 {
            return Ok(0);
        }
        let Self { volume, cursor } = self;
        cursor.left = STRUCTURE_BYTES_MAX.saturating_add(len);
        let record = volume.file(cursor, file.place).map_err(fault)?;
        let data = record.data(cursor, "").ok_or_else(|| fault("a file has no content"))?.map_err(fault)?;
        let attribute = data.to_attribute().map_err(fault)?;
        let into = into.get_mut(..usize_of(len)).unwrap_or_default();
        let written_bytes = initialized_bytes(&attribute, &mut cursor.bytes)?.saturating_sub(at);
        let (written, rest) = into.split_at_mut(usize_of(written_bytes.min(len)));
        if !written.is_empty() {
            let mut value = attribute.value(cursor).map_err(fault)?;
            value.seek(cursor, SeekFrom::Start(at)).map_err(fault)?;
            value.read_exact(cursor, written).map_err(fault)?;
        }
        rest.fill(0);
        Ok(into.len())
    }
}
