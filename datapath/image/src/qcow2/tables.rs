//! L1 and L2 tables of a qcow2 image: find the offset in the file for an offset of the disk.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use headwater_block::{IoError, IoErrorKind};
use parking_lot::Mutex;

use crate::qcow2::header::Header;
use crate::units::{u64_of, usize_of};

/// Memory for L2 tables of one image. 16 MiB cover 128 GiB of disk with clusters of 64 KiB.
const L2_CACHE_BYTES: u64 = 16 << 20;

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Subclusters of a cluster with extended L2 entries.
const SUBCLUSTERS: u64 = 32;

/// The place of a piece of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the file, from this offset.
    File(u64),
    /// In a compressed cluster.
    Compressed(CompressedCluster),
    /// Zeroes.
    Zero,
    /// In the backing file; zeroes if there is none.
    Backing,
}

/// A compressed cluster: its offset, and the most bytes that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompressedCluster {
    pub(super) offset: u64,
    pub(super) max_bytes: u64,
}

/// An L2 table: one entry has one or two words.
type L2 = Arc<Vec<u64>>;

/// Reads `into` from an offset of the file.
pub(super) type ReadAt<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<(), IoError>;

pub(super) struct Tables {
    header: Header,
    l1: Vec<u64>,
    cached: Mutex<Cached>,
}

/// Tables that were read, by their offsets. With small clusters there are tens of thousands, and each access
/// to a cluster looks one up.
#[derive(Default)]
struct Cached {
    tables: HashMap<u64, L2>,
    /// Their offsets, oldest first.
    order: VecDeque<u64>,
}

fn damaged(why: impl std::fmt::Display) -> IoError {
    IoError::new(IoErrorKind::Corrupt, format!("it is damaged or truncated: {why}"))
}

impl Tables {
    /// Reads the L1 table and checks every entry of every table against the length of the file.
    pub(super) fn open(header: Header, file_bytes: u64, read: ReadAt<'_>) -> Result<Self, IoError> {
        let l1_bytes = header.l1_entries * 8;
        if header.l1_offset.checked_add(l1_bytes).is_none_or(|end| end > file_bytes) {
            return Err(damaged(format!(
                "its L1 table ends past the end of the file, which has {file_bytes} bytes"
            )));
        }
        let l1 = read_words(header.l1_offset, l1_bytes, read)?;
        let tables = Self { header, l1, cached: Mutex::default() };
        tables.check(file_bytes, read)?;
        Ok(tables)
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    fn check(&self, file_bytes: u64, read: ReadAt<'_>) -> Result<(), IoError> {
        let cluster_bytes = self.header.cluster_bytes();
        let clusters = self.header.size_bytes.div_ceil(cluster_bytes);
        let tables = clusters.div_ceil(self.header.l2_entries());
        self.refuse_shared_tables(tables)?;
        for (number, entry) in (0..tables).zip(&self.l1) {
            let offset = entry & OFFSET_MASK;
            if offset == 0 {
                continue;
            }
            if !offset.is_multiple_of(cluster_bytes) || offset.saturating_add(cluster_bytes) > file_bytes {
                return Err(damaged(format!(
                    "L2 table {number} should be at {offset}, but the file has only {file_bytes} bytes"
                )));
            }
            // Each table is needed once here, and the more there are, the longer a lookup in the cache would
            // take.
            let table = read_words(offset, cluster_bytes, read)?;
            let first = number * self.header.l2_entries();
            for (cluster, index) in (first..clusters).zip(0..self.header.l2_entries()) {
                let Some(end) = self.needed_end(&table, index, cluster)? else {
                    continue;
                };
                if end > file_bytes {
                    return Err(damaged(format!(
                        "the data of cluster {cluster} should end at {end}, but the file has only {file_bytes} bytes"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Refuses a table that is used for two ranges of the disk, as QEMU's check does. Otherwise a short file
    /// with a long L1 table could require any number of clusters to be checked.
    fn refuse_shared_tables(&self, tables: u64) -> Result<(), IoError> {
        let used = self.l1.iter().take(usize_of(tables)).map(|entry| entry & OFFSET_MASK);
        let mut offsets: Vec<u64> = used.filter(|offset| *offset != 0).collect();
        offsets.sort_unstable();
        match offsets.array_windows().find(|[one, next]| one == next) {
            Some([offset, _]) => {
                Err(damaged(format!("its L1 table refers to the L2 table at {offset} twice")))
            }
            None => Ok(()),
        }
    }

    /// The length that the file must have for the contents of this cluster; `None` if it has none.
    fn needed_end(&self, table: &[u64], index: u64, cluster: u64) -> Result<Option<u64>, IoError> {
        let words = usize_of(self.header.l2_entry_bytes() / 8);
        let entry = table.chunks_exact(words).nth(usize_of(index));
        if entry.is_some_and(|entry| entry.iter().all(|word| *word == 0)) {
            return Ok(None);
        }
        let cluster_bytes = self.header.cluster_bytes();
        // The part after the end of the disk may be missing.
        let used = cluster_bytes.min(self.header.size_bytes - cluster * cluster_bytes);
        let pieces = if self.header.extended_l2 { SUBCLUSTERS } else { 1 };
        let piece_bytes = cluster_bytes / pieces;
        let mut needed = None;
        for within in (0..pieces).map(|piece| piece * piece_bytes).take_while(|within| *within < used) {
            match self.place_in(table, index, within)?.0 {
                Place::File(offset) => {
                    needed = Some(offset.saturating_add(piece_bytes.min(used - within)));
                }
                // Its end is known only after decompression.
                Place::Compressed(at) => return Ok(Some(at.offset.saturating_add(1))),
                Place::Zero | Place::Backing => {}
            }
        }
        Ok(needed)
    }

    /// The place of the disk's byte `at`, and for how many bytes the disk continues there.
    pub(super) fn find(&self, at: u64, read: ReadAt<'_>) -> Result<(Place, u64), IoError> {
        let cluster_bytes = self.header.cluster_bytes();
        let (cluster, within) = (at / cluster_bytes, at % cluster_bytes);
        let number = cluster / self.header.l2_entries();
        let entry = self.l1.get(usize_of(number)).ok_or_else(|| damaged("its L1 table is too short"))?;
        let offset = entry & OFFSET_MASK;
        if offset == 0 {
            // The whole table is missing, so the answer holds to the end of the range that it would cover.
            let covered = self.header.l2_entries() * cluster_bytes;
            return Ok((Place::Backing, covered - at % covered));
        }
        let table = self.l2(offset, read)?;
        self.place_in(&table, cluster % self.header.l2_entries(), within)
    }

    fn place_in(&self, table: &[u64], index: u64, within: u64) -> Result<(Place, u64), IoError> {
        let missing = || damaged("an L2 table is too short");
        let cluster_bytes = self.header.cluster_bytes();
        let words = self.header.l2_entry_bytes() / 8;
        let at = usize_of(index * words);
        let entry = *table.get(at).ok_or_else(missing)?;
        let left = cluster_bytes - within;
        if entry & COMPRESSED != 0 {
            return Ok((Place::Compressed(self.compressed(entry)), left));
        }
        let offset = entry & OFFSET_MASK;
        if !offset.is_multiple_of(cluster_bytes) {
            return Err(damaged("the offset of a cluster is not aligned"));
        }
        if self.header.extended_l2 {
            let bitmap = *table.get(at + 1).ok_or_else(missing)?;
            let subcluster_bytes = cluster_bytes / SUBCLUSTERS;
            let subcluster = within / subcluster_bytes;
            let left = subcluster_bytes - within % subcluster_bytes;
            let place = if bitmap >> (subcluster + SUBCLUSTERS) & 1 != 0 {
                Place::Zero
            } else if bitmap >> subcluster & 1 != 0 {
                Place::File(offset + within)
            } else {
                Place::Backing
            };
            return Ok((place, left));
        }
        let place = if self.header.version >= 3 && entry & ZERO != 0 {
            Place::Zero
        } else if offset == 0 {
            Place::Backing
        } else {
            Place::File(offset + within)
        };
        Ok((place, left))
    }

    fn compressed(&self, entry: u64) -> CompressedCluster {
        let offset_bits = 62 - (self.header.cluster_bits - 8);
        let offset = entry & ((1 << offset_bits) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> offset_bits;
        // The last sector counts from the start of the sector in which the data starts.
        CompressedCluster { offset, max_bytes: (sectors + 1) * 512 - offset % 512 }
    }

    fn l2(&self, offset: u64, read: ReadAt<'_>) -> Result<L2, IoError> {
        if let Some(table) = self.cached.lock().tables.get(&offset) {
            return Ok(Arc::clone(table));
        }
        let table = Arc::new(read_words(offset, self.header.cluster_bytes(), read)?);
        let room = usize_of((L2_CACHE_BYTES / self.header.cluster_bytes()).max(1));
        let mut cached = self.cached.lock();
        // Two callers may read the same table at the same time.
        if cached.tables.insert(offset, Arc::clone(&table)).is_none() {
            cached.order.push_back(offset);
        }
        while cached.order.len() > room
            && let Some(oldest) = cached.order.pop_front()
        {
            cached.tables.remove(&oldest);
        }
        Ok(table)
    }
}

fn read_words(offset: u64, len_bytes: u64, read: ReadAt<'_>) -> Result<Vec<u64>, IoError> {
    let mut bytes = vec![0; usize_of(len_bytes)];
    read(offset, &mut bytes)?;
    debug_assert_eq!(u64_of(bytes.len()), len_bytes);
    Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::header::Compression;
    use std::cell::Cell;

    #[test]
    fn each_table_is_cached_once_and_the_oldest_is_dropped() {
        let header = Header {
            version: 3,
            size_bytes: 1 << 20,
            cluster_bits: 21,
            l1_entries: 1,
            l1_offset: 0,
            compression: Compression::Deflate,
            extended_l2: false,
            backing: None,
            backing_format: None,
        };
        let tables = Tables { header, l1: Vec::new(), cached: Mutex::default() };
        let kept = || {
            let cached = tables.cached.lock();
            (cached.tables.len(), cached.order.len())
        };
        let reads = Cell::new(0u64);
        let read = |_: u64, _: &mut [u8]| {
            reads.set(reads.get() + 1);
            Ok::<(), IoError>(())
        };
        // While it is read, another caller reads it too.
        let both = |at: u64, into: &mut [u8]| {
            tables.l2(at, &read)?;
            read(at, into)
        };
        tables.l2(0, &both).unwrap();
        assert_eq!((reads.get(), kept()), (2, (1, 1)));
        let room = L2_CACHE_BYTES >> 21;
        for number in (0..=room).chain(1..=room) {
            tables.l2(number << 21, &read).unwrap();
        }
        assert_eq!(reads.get(), 2 + room);
        assert_eq!(kept(), (usize_of(room), usize_of(room)));
        tables.l2(0, &read).unwrap();
        assert_eq!(reads.get(), 2 + room + 1);
    }
}
