//! FAT12, FAT16 and FAT32 with long names.
//!
//! ```text
//!   boot sector -> geometry -> FAT (chains of clusters) -> directories (32-byte entries) -> files
//! ```
//! Every chain is followed for no more clusters than there can be, so one that leads back into itself ends with a fault.

use std::collections::HashSet;

use crate::fields::{u16_at, u32_at};
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Entries, Fault, FileSystem, Kind, Node, NodeKind, Owner, Scanned, Visits, fault};

/// The longest directory: 65,536 entries.
const DIRECTORY_BYTES_MAX: u64 = 2 << 20;
const ENTRY_BYTES: usize = 32;
/// Fewer clusters than these make a FAT12, and a FAT16, where the length of the table is a number of 16 bits.
const FAT12_CLUSTERS: u64 = 4085;
const FAT16_CLUSTERS: u64 = 65_525;

const READ_ONLY_HIDDEN_SYSTEM: u8 = 0x07;
const VOLUME_LABEL: u8 = 0x08;
const DIRECTORY: u8 = 0x10;
const LONG_NAME: u8 = 0x0f;

/// The place of the root directory of a FAT12 or FAT16, which is no cluster.
const FIXED_ROOT: u64 = 0;

/// Whether a boot sector is that of a FAT.
pub(crate) fn is_fat(boot: &[u8; 512]) -> bool {
    let marked = boot.get(510..) == Some(&[0x55, 0xaa]);
    let named = boot.get(54..57) == Some(b"FAT") || boot.get(82..85) == Some(b"FAT");
    marked && named && matches!(u16_at(boot, 11), 512 | 1024 | 2048 | 4096)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Twelve,
    Sixteen,
    ThirtyTwo,
}

/// A FAT file system.
pub struct Fat {
    bytes: Bytes,
    width: Width,
    /// Where the first FAT, a fixed root directory and the first cluster (number 2) start.
    fat_at: u64,
    root_at: u64,
    root_bytes: u64,
    data_at: u64,
    cluster_bytes: u64,
    /// One past the last cluster's number.
    end: u64,
    root_cluster: u64,
    /// Where reading a file stood: its first cluster, how many clusters were passed, and the one it stands at.
    walked: (u64, u64, u64),
}

impl Fat {
    /// Opens a file system that has the boot sector of a FAT.
    pub fn open(mut bytes: Bytes) -> Result<Self, Fault> {
        let mut boot = [0; 512];
        bytes.read(0, &mut boot)?;
        Self::of(bytes, &boot)
    }

    fn of(bytes: Bytes, boot: &[u8; 512]) -> Result<Self, Fault> {
        let byte = |at: usize| u64::from(boot.get(at).copied().unwrap_or(0));
        let word = |at: usize| u64::from(u16_at(boot, at));
        let double = |at: usize| u64::from(u32_at(boot, at));
        let either = |short: u64, long: u64| if short == 0 { long } else { short };
        let (sector_bytes, cluster_sectors, reserved, fats) = (word(11), byte(13), word(14), byte(16));
        let fat_sectors = either(word(22), double(36));
        let root_sectors = (word(17) * 32).div_ceil(sector_bytes);
        let data_sector = reserved + fats * fat_sectors + root_sectors;
        let sectors = either(word(19), double(32));
        let is_possible = cluster_sectors.is_power_of_two() && reserved > 0 && (1..=8).contains(&fats);
        if !is_possible || fat_sectors == 0 || sectors <= data_sector || sectors * sector_bytes > bytes.len()
        {
            return Err(fault("its boot sector is invalid"));
        }
        let clusters = (sectors - data_sector) / cluster_sectors;
        let width = match clusters {
            // As Linux sees it: `mkfs.vfat -F 32` makes one with few clusters, too, and only warns.
            _ if word(22) == 0 => Width::ThirtyTwo,
            ..FAT12_CLUSTERS => Width::Twelve,
            FAT12_CLUSTERS..FAT16_CLUSTERS => Width::Sixteen,
            _ => {
                return Err(fault(format!(
                    "its boot sector is invalid: {clusters} clusters need FAT32, but this is FAT12 or FAT16"
                )));
            }
        };
        if width != Width::ThirtyTwo && root_sectors == 0 {
            return Err(fault("its boot sector is invalid: the root directory has no entries"));
        }
        let bits = match width {
            Width::Twelve => 12,
            Width::Sixteen => 16,
            Width::ThirtyTwo => 32,
        };
        if (clusters + 2) * bits / 8 > fat_sectors * sector_bytes {
            return Err(fault("its file allocation table (FAT) is too short for its clusters"));
        }
        Ok(Self {
            bytes,
            width,
            fat_at: reserved * sector_bytes,
            root_at: (data_sector - root_sectors) * sector_bytes,
            root_bytes: root_sectors * sector_bytes,
            data_at: data_sector * sector_bytes,
            cluster_bytes: cluster_sectors * sector_bytes,
            end: clusters + 2,
            root_cluster: if width == Width::ThirtyTwo { double(44) } else { FIXED_ROOT },
            walked: (0, 0, 0),
        })
    }

    /// The cluster after this one; `None` at the end of the chain.
    fn next(&mut self, cluster: u64) -> Result<Option<u64>, Fault> {
        let mut two = [0; 2];
        let mut four = [0; 4];
        let (value, last) = match self.width {
            Width::Twelve => {
                self.bytes.read(self.fat_at + cluster + cluster / 2, &mut two)?;
                let both = u64::from(u16::from_le_bytes(two));
                (if cluster.is_multiple_of(2) { both & 0xfff } else { both >> 4 }, 0xff8)
            }
            Width::Sixteen => {
                self.bytes.read(self.fat_at + cluster * 2, &mut two)?;
                (u64::from(u16::from_le_bytes(two)), 0xfff8)
            }
            Width::ThirtyTwo => {
                self.bytes.read(self.fat_at + cluster * 4, &mut four)?;
                (u64::from(u32::from_le_bytes(four)) & 0x0fff_ffff, 0x0fff_fff8)
            }
        };
        if value >= last { Ok(None) } else { self.checked(value).map(Some) }
    }

    fn checked(&self, cluster: u64) -> Result<u64, Fault> {
        if (2..self.end).contains(&cluster) {
            Ok(cluster)
        } else {
            Err(fault(format!(
                "a cluster chain leads to cluster {cluster}, but clusters are 2 to {}",
                self.end - 1
            )))
        }
    }

    fn read_cluster(&mut self, cluster: u64, from: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.bytes.read(self.data_at + (cluster - 2) * self.cluster_bytes + from, into)
    }

    /// All bytes of a directory.
    fn directory(&mut self, place: u64) -> Result<Vec<u8>, Fault> {
        if place == FIXED_ROOT && self.width != Width::ThirtyTwo {
            let mut out = vec![0; usize_of(self.root_bytes.min(DIRECTORY_BYTES_MAX))];
            self.bytes.read(self.root_at, &mut out)?;
            return Ok(out);
        }
        let mut out = Vec::new();
        let mut seen = HashSet::new();
        let mut at = Some(self.checked(place)?);
        while let Some(cluster) = at {
            if !seen.insert(cluster) || u64_of(out.len()) >= DIRECTORY_BYTES_MAX {
                return Err(fault("the cluster chain of a directory is a loop, or too long"));
            }
            let start = out.len();
            out.resize(start + usize_of(self.cluster_bytes), 0);
            self.read_cluster(cluster, 0, out.get_mut(start..).unwrap_or_default())?;
            at = self.next(cluster)?;
        }
        Ok(out)
    }
}

/// A long name while its pieces are collected, last one first.
#[derive(Default)]
struct LongName {
    units: Vec<u16>,
    /// The piece that comes next, and the checksum that the short name must have.
    expected: u8,
    sum: u8,
}

impl LongName {
    fn add(&mut self, entry: &[u8]) {
        let byte = |at: usize| entry.get(at).copied().unwrap_or(0);
        let (order, sum) = (byte(0), byte(13));
        let number = order & 0x3f;
        if order & 0x40 != 0 {
            *self = Self { units: Vec::new(), expected: number, sum };
        }
        if number == 0 || number != self.expected || sum != self.sum {
            *self = Self::default();
            return;
        }
        let places = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
        let piece = places.iter().map(|at| u16_at(entry, *at));
        self.units.splice(0..0, piece);
        self.expected = number - 1;
    }

    /// The name, if it is whole and belongs to this short name.
    fn take(&mut self, short: &[u8]) -> Option<Vec<u8>> {
        let Self { units, expected, sum } = std::mem::take(self);
        let found = short.iter().fold(0u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
        if units.is_empty() || expected != 0 || found != sum {
            return None;
        }
        let end = units.iter().position(|unit| *unit == 0).unwrap_or(units.len());
        Some(String::from_utf16_lossy(units.get(..end)?).into_bytes())
    }
}

/// `NAME.EXT` with the lower case that Windows notes.
fn short_name(entry: &[u8]) -> Vec<u8> {
    let cases = entry.get(12).copied().unwrap_or(0);
    let part = |from: usize, to: usize, lower: bool| -> String {
        let bytes = entry.get(from..to).unwrap_or_default();
        let end = bytes.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1);
        let text = bytes.iter().take(end).enumerate().map(|(at, byte)| match byte {
            // The first byte E5 means a removed entry, so that letter is written as 05.
            0x05 if from + at == 0 => '\u{e5}',
            byte => char::from(*byte),
        });
        if lower { text.map(|c| c.to_ascii_lowercase()).collect() } else { text.collect() }
    };
    let (name, extension) = (part(0, 8, cases & 8 != 0), part(8, 11, cases & 16 != 0));
    if extension.is_empty() { name.into_bytes() } else { format!("{name}.{extension}").into_bytes() }
}

/// An entry of a directory.
struct Entry {
    name: Vec<u8>,
    kind: NodeKind,
    size_bytes: u64,
    modified: u128,
    attributes: u128,
    cluster: u64,
}

/// Calls `found` with the entries of a directory, without `.`, `..` and the name of the volume.
fn each_entry(
    directory: &[u8],
    width: Width,
    mut found: impl FnMut(Entry) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut long = LongName::default();
    for entry in directory.chunks_exact(ENTRY_BYTES) {
        let byte = |at: usize| entry.get(at).copied().unwrap_or(0);
        let flags = byte(11);
        match byte(0) {
            0 => break,
            0xe5 => {
                long = LongName::default();
                continue;
            }
            _ if flags & 0x3f == LONG_NAME => {
                long.add(entry);
                continue;
            }
            _ => {}
        }
        let short = entry.get(..11).unwrap_or_default();
        let name = long.take(short).unwrap_or_else(|| short_name(entry));
        if flags & VOLUME_LABEL != 0 || byte(0) == b'.' {
            continue;
        }
        let high = if width == Width::ThirtyTwo { u64::from(u16_at(entry, 20)) } else { 0 };
        found(Entry {
            name,
            kind: if flags & DIRECTORY != 0 { NodeKind::Directory } else { NodeKind::File },
            size_bytes: u32_at(entry, 28).into(),
            modified: u128::from(u16_at(entry, 24)) << 16 | u128::from(u16_at(entry, 22)),
            attributes: (flags & READ_ONLY_HIDDEN_SYSTEM).into(),
            cluster: high << 16 | u64::from(u16_at(entry, 26)),
        })?;
    }
    Ok(())
}

impl Fat {
    /// Calls `found` with the clusters of a chain. No cluster is counted twice: `left` is how many all chains may have.
    fn chain(
        &mut self,
        first: u64,
        left: &mut u64,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut at = Some(self.checked(first)?);
        while let Some(cluster) = at {
            let too_long = || fault("its cluster chains are longer than the file system");
            *left = left.checked_sub(1).ok_or_else(too_long)?;
            let start = self.data_at + (cluster - 2) * self.cluster_bytes;
            let bytes = start..start + self.cluster_bytes;
            found(Scanned::Run { bytes, owner: Owner::File(first) })?;
            at = self.next(cluster)?;
        }
        Ok(())
    }
}

impl FileSystem for Fat {
    fn kind(&self) -> Kind {
        Kind::Fat
    }

    fn root(&self) -> Node {
        Node::root(self.root_cluster)
    }

    fn list(&mut self, directory: &Node, visits: &mut Visits) -> Result<Entries, Fault> {
        if directory.id == FIXED_ROOT && directory.path != b"/" {
            return Err(fault("a directory has no first cluster"));
        }
        let bytes = self.directory(directory.id)?;
        let mut out = Entries::new();
        each_entry(&bytes, self.width, |entry| {
            visits.add()?;
            if visits.hold(directory, &entry.name)? {
                let Entry { name, kind, size_bytes, modified, attributes, cluster } = entry;
                let path = directory.child(&name);
                let node = Node { path, kind, size_bytes, modified, attributes, id: cluster, fault: None };
                out.insert(name, node);
            }
            Ok(())
        })?;
        Ok(out)
    }

    fn read(&mut self, file: &Node, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let len = u64_of(into.len()).min(file.size_bytes.saturating_sub(at));
        if len == 0 {
            return Ok(0);
        }
        // No file has holes here. Without this, a chain that leads back into itself is followed for as long as the size
        // that a file claims.
        if file.size_bytes > (self.end - 2) * self.cluster_bytes {
            return Err(fault("a file is larger than its file system"));
        }
        let mut index = at / self.cluster_bytes;
        let (first, passed, stands) = self.walked;
        let (mut number, mut cluster) = if first == file.id && passed <= index && stands >= 2 {
            (passed, stands)
        } else {
            (0, self.checked(file.id)?)
        };
        let mut done = 0u64;
        while done < len {
            // No file has more clusters than it needs for its size, so this ends whatever the chain does.
            while number < index {
                let short = || fault("the cluster chain of a file is shorter than the file");
                cluster = self.next(cluster)?.ok_or_else(short)?;
                number += 1;
            }
            self.walked = (file.id, number, cluster);
            let within = (at + done) % self.cluster_bytes;
            let piece = (self.cluster_bytes - within).min(len - done);
            let place = into.get_mut(usize_of(done)..usize_of(done + piece)).unwrap_or_default();
            self.read_cluster(cluster, within, place)?;
            done += piece;
            index += 1;
        }
        Ok(usize_of(done))
    }

    fn scan(
        &mut self,
        visits: &mut Visits,
        found: &mut dyn FnMut(Scanned) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        found(Scanned::Run { bytes: 0..self.data_at, owner: Owner::Metadata })?;
        let mut left = self.end - 2;
        let mut seen = HashSet::new();
        let mut directories = vec![self.root_cluster];
        if self.root_cluster != FIXED_ROOT {
            self.chain(self.root_cluster, &mut left, found)?;
        }
        while let Some(directory) = directories.pop() {
            if !seen.insert(directory) {
                continue;
            }
            let bytes = match self.directory(directory) {
                Ok(bytes) => bytes,
                Err(why) => {
                    found(Scanned::Unreadable { id: directory, why })?;
                    continue;
                }
            };
            each_entry(&bytes, self.width, |Entry { name, kind, cluster, .. }| {
                visits.add()?;
                // An empty file has no cluster, and so nothing that it owns.
                if cluster == 0 {
                    return Ok(());
                }
                found(Scanned::Name { id: cluster, parent: directory, name })?;
                if kind == NodeKind::Directory {
                    directories.push(cluster);
                }
                if let Err(why) = self.chain(cluster, &mut left, found) {
                    if left == 0 {
                        return Err(why);
                    }
                    found(Scanned::Unreadable { id: cluster, why })?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}
