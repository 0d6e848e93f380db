//! Writes a version as a qcow2 image of version 3, from front to back. The manifest determines the whole
//! layout before any data is read. No I/O: computes tables and offsets from a manifest.
//!
//! ```text
//!   header | refcount table | refcount blocks | L1 table | L2 tables | data clusters, in the order of the disk
//! ```
//! Section names are those of QEMU's specification of the format. Clusters have 64 KiB, are not compressed,
//! and exist only where the version has data ("Cluster mapping"). Every cluster of the file is used once
//! ("Host cluster management").

use std::iter;

use crate::manifest::Manifest;
use crate::qcow2::header::MAGIC;
use crate::units::{u64_of, usize_of};

const CLUSTER_BITS: u32 = 16;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;
/// The number of 8-byte entries in a cluster of a refcount table, an L1 or an L2 table.
const TABLE_ENTRIES: u64 = CLUSTER_BYTES / 8;
/// Refcounts of 16 bits, which every reader supports.
const REFCOUNT_ORDER: u32 = 4;
const BLOCK_ENTRIES: u64 = CLUSTER_BYTES / 2;
/// "Header": the length of version 3 without fields that are not needed here.
const HEADER_BYTES: u32 = 104;
/// Bit 63 of an entry in an L1 or L2 table: the refcount is exactly one.
const COPIED: u64 = 1 << 63;

/// Consecutive clusters of the disk with data, which are also consecutive in the file.
#[derive(Clone, Copy, Debug)]
struct Run {
    start: u64,
    end: u64,
    /// The number of data clusters before it in the file.
    before: u64,
}

/// The layout of the file.
#[derive(Debug)]
pub(crate) struct Layout {
    size_bytes: u64,
    chunk_bytes: u64,
    runs: Vec<Run>,
    /// The existing L2 tables, by the number of their L1 entry.
    l2_numbers: Vec<u64>,
    l1_entries: u64,
    refcount_table_clusters: u64,
    refcount_blocks: u64,
    data_clusters: u64,
}

impl Layout {
    /// Computes the layout of the version with this manifest.
    pub(crate) fn new(manifest: &Manifest) -> Self {
        let (size_bytes, chunk_bytes) = (manifest.size_bytes(), u64::from(manifest.chunk_bytes()));
        let mut runs: Vec<Run> = Vec::new();
        let mut data_clusters = 0;
        let mut chunk = 0;
        while chunk < manifest.chunks() {
            let (is_data, len) = manifest.run_at(chunk);
            let next = chunk + len.max(1);
            if is_data {
                // Several chunks may share a cluster, even with the previous run.
                let shared = runs.last().map_or(0, |run| run.end);
                let start = (chunk * chunk_bytes / CLUSTER_BYTES).max(shared);
                let end = (next * chunk_bytes).min(size_bytes).div_ceil(CLUSTER_BYTES);
                if start < end {
                    runs.push(Run { start, end, before: data_clusters });
                    data_clusters += end - start;
                }
            }
            chunk = next;
        }
        let mut l2_numbers: Vec<u64> = Vec::new();
        for run in &runs {
            let first = l2_numbers.last().map_or(0, |last| last + 1).max(run.start / TABLE_ENTRIES);
            l2_numbers.extend(first..run.end.div_ceil(TABLE_ENTRIES));
        }
        let l1_entries = size_bytes.div_ceil(CLUSTER_BYTES * TABLE_ENTRIES);
        let mut layout = Self {
            size_bytes,
            chunk_bytes,
            runs,
            l2_numbers,
            l1_entries,
            refcount_table_clusters: 1,
            refcount_blocks: 1,
            data_clusters,
        };
        layout.count_refcounts();
        layout
    }

    /// Refcount blocks are clusters that have refcounts themselves, so their number is increased until it is
    /// sufficient.
    fn count_refcounts(&mut self) {
        loop {
            let blocks = self.clusters().div_ceil(BLOCK_ENTRIES);
            let table = blocks.div_ceil(TABLE_ENTRIES);
            if (blocks, table) == (self.refcount_blocks, self.refcount_table_clusters) {
                return;
            }
            (self.refcount_blocks, self.refcount_table_clusters) = (blocks, table);
        }
    }

    /// The length of the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.clusters() * CLUSTER_BYTES
    }

    /// The offset of a chunk with data, which is stored contiguously.
    pub(crate) fn offset_of(&self, chunk: u64) -> Option<u64> {
        let at = chunk.checked_mul(self.chunk_bytes)?;
        let cluster = at / CLUSTER_BYTES;
        let run = self.runs.get(self.runs.partition_point(|run| run.end <= cluster))?;
        let within = cluster.checked_sub(run.start)?;
        Some((self.first_data() + run.before + within) * CLUSTER_BYTES + at % CLUSTER_BYTES)
    }

    /// Everything before the data, one cluster at a time.
    pub(crate) fn metadata(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        iter::once(self.header())
            .chain((0..self.refcount_table_clusters).map(|number| self.refcount_table(number)))
            .chain((0..self.refcount_blocks).map(|number| self.refcount_block(number)))
            .chain((0..self.l1_clusters()).map(|number| self.l1(number)))
            .chain(self.l2_numbers.iter().map(|number| self.l2(*number)))
    }

    fn first_refcount_block(&self) -> u64 {
        1 + self.refcount_table_clusters
    }

    fn first_l1(&self) -> u64 {
        self.first_refcount_block() + self.refcount_blocks
    }

    fn l1_clusters(&self) -> u64 {
        self.l1_entries.div_ceil(TABLE_ENTRIES)
    }

    fn first_l2(&self) -> u64 {
        self.first_l1() + self.l1_clusters()
    }

    fn first_data(&self) -> u64 {
        self.first_l2() + u64_of(self.l2_numbers.len())
    }

    fn clusters(&self) -> u64 {
        self.first_data() + self.data_clusters
    }

    /// "Header". Needs nothing beyond version 3 of the format: no feature bits, no extensions (the zeroes
    /// that follow end them), no backing file, no encryption, no snapshots.
    fn header(&self) -> Vec<u8> {
        let l1_entries = u32::try_from(self.l1_entries).unwrap_or(u32::MAX);
        let table_clusters = u32::try_from(self.refcount_table_clusters).unwrap_or(u32::MAX);
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&3_u32.to_be_bytes());
        out.resize(20, 0);
        out.extend_from_slice(&CLUSTER_BITS.to_be_bytes());
        out.extend_from_slice(&self.size_bytes.to_be_bytes());
        out.resize(36, 0);
        out.extend_from_slice(&l1_entries.to_be_bytes());
        out.extend_from_slice(&(self.first_l1() * CLUSTER_BYTES).to_be_bytes());
        // The refcount table follows the header.
        out.extend_from_slice(&CLUSTER_BYTES.to_be_bytes());
        out.extend_from_slice(&table_clusters.to_be_bytes());
        out.resize(96, 0);
        out.extend_from_slice(&REFCOUNT_ORDER.to_be_bytes());
        out.extend_from_slice(&HEADER_BYTES.to_be_bytes());
        out.resize(usize_of(CLUSTER_BYTES), 0);
        out
    }

    /// "Refcount table entry".
    fn refcount_table(&self, number: u64) -> Vec<u8> {
        table(number, |block| {
            let is_there = block < self.refcount_blocks;
            if is_there { (self.first_refcount_block() + block) * CLUSTER_BYTES } else { 0 }
        })
    }

    /// "Refcount block entry".
    fn refcount_block(&self, number: u64) -> Vec<u8> {
        let first = number * BLOCK_ENTRIES;
        let used = self.clusters();
        (first..first + BLOCK_ENTRIES).flat_map(|cluster| u16::from(cluster < used).to_be_bytes()).collect()
    }

    /// "L1 table entry".
    fn l1(&self, number: u64) -> Vec<u8> {
        table(number, |entry| match self.l2_numbers.binary_search(&entry) {
            Ok(place) => COPIED | ((self.first_l2() + u64_of(place)) * CLUSTER_BYTES),
            Err(_) => 0,
        })
    }

    /// "L2 table entry", of a "Standard Cluster Descriptor".
    fn l2(&self, number: u64) -> Vec<u8> {
        let mut at = self.runs.partition_point(|run| run.end <= number * TABLE_ENTRIES);
        table(number, |cluster| {
            while self.runs.get(at).is_some_and(|run| run.end <= cluster) {
                at += 1;
            }
            match self.runs.get(at) {
                Some(run) if run.start <= cluster => {
                    COPIED | ((self.first_data() + run.before + (cluster - run.start)) * CLUSTER_BYTES)
                }
                _ => 0,
            }
        })
    }
}

/// Cluster `number` of a table.
fn table(number: u64, entry: impl FnMut(u64) -> u64) -> Vec<u8> {
    let first = number * TABLE_ENTRIES;
    (first..first + TABLE_ENTRIES).map(entry).flat_map(u64::to_be_bytes).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use headwater_block::{ByteRange, ExtentKind};
    use headwater_store::Hash;
    use proptest::prelude::*;

    use super::*;
    use crate::file_disk::FileDisk;
    use crate::manifest::{ChunkRef, ManifestBuilder, ObjectRef};
    use crate::qcow2::disk::Qcow2Disk;
    use crate::qcow2::header::Header;

    fn manifest(size_bytes: u64, chunk_bytes: u32, chunks: impl IntoIterator<Item = u64>) -> Manifest {
        let object = ObjectRef { id: Hash::of(b"o"), len_bytes: 1000 };
        let mut builder = ManifestBuilder::new(size_bytes, chunk_bytes, None);
        let mut used: Vec<ObjectRef> = Vec::new();
        for index in chunks {
            used = vec![object];
            builder.push(
                index,
                ChunkRef { hash: Hash::of(&index.to_le_bytes()), object: 0, stored_bytes: 9, offset: 0 },
            );
        }
        builder.finish(&used).unwrap()
    }

    /// The file without the data of its data clusters.
    fn write(layout: &Layout, path: &Path) -> File {
        let mut file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        let mut len = 0;
        for cluster in layout.metadata() {
            assert_eq!(u64_of(cluster.len()), CLUSTER_BYTES);
            file.write_all(&cluster).unwrap();
            len += 1;
        }
        assert_eq!(len, layout.first_data());
        file.set_len(layout.file_bytes()).unwrap();
        file
    }

    fn read_back(path: &Path, file: &File) -> Qcow2Disk {
        let mut start = vec![0; usize_of(CLUSTER_BYTES)];
        file.read_exact_at(&mut start, 0).unwrap();
        let header = Header::decode(&start).unwrap();
        let len = file.metadata().unwrap().len();
        Qcow2Disk::open(path, file.try_clone().unwrap(), len, header, None).unwrap()
    }

    /// Checks that every cluster of the file is used once and has a refcount of one, and that nothing else
    /// has a refcount. `qemu-img check` does the same in tests/it/export_qcow2.rs. Here no process is
    /// started, because its child would hold the locks of other tests for a moment.
    fn check(file: &File) {
        let words = |at: u64, count: u64| {
            let mut bytes = vec![0; usize_of(count * 8)];
            file.read_exact_at(&mut bytes, at).unwrap();
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect::<Vec<_>>()
        };
        let header = words(0, 13);
        // Bytes 36, 40, 48, 56; the upper half of a word comes first.
        let (l1_entries, l1_at, table_at, table_clusters) =
            (header[4] & 0xffff_ffff, header[5], header[6], header[7] >> 32);
        let mut used = vec![0];
        used.extend((0..table_clusters).map(|n| table_at / CLUSTER_BYTES + n));
        used.extend((0..(l1_entries * 8).div_ceil(CLUSTER_BYTES)).map(|n| l1_at / CLUSTER_BYTES + n));
        let mut refcounts = Vec::new();
        let table = words(table_at, table_clusters * TABLE_ENTRIES);
        let there = table.iter().position(|block| *block == 0).unwrap_or(table.len());
        assert!(table[there..].iter().all(|block| *block == 0));
        for block in &table[..there] {
            assert_eq!(block % CLUSTER_BYTES, 0);
            used.push(block / CLUSTER_BYTES);
            let block = words(*block, TABLE_ENTRIES);
            refcounts.extend(block.iter().flat_map(|word| [48, 32, 16, 0].map(|bit| (word >> bit) as u16)));
        }
        let entries = |at: u64, count: u64| {
            let entries = words(at, count).into_iter().filter(|entry| *entry != 0);
            entries
                .inspect(|entry| assert_eq!(entry & !(0x00ff_ffff_ffff_0000), COPIED))
                .map(|entry| entry & !COPIED)
        };
        for l2 in entries(l1_at, l1_entries) {
            used.push(l2 / CLUSTER_BYTES);
            used.extend(entries(l2, TABLE_ENTRIES).map(|entry| entry / CLUSTER_BYTES));
        }
        used.sort_unstable();
        let clusters = file.metadata().unwrap().len() / CLUSTER_BYTES;
        assert!(used.iter().copied().eq(0..clusters), "a cluster is used twice, or not at all");
        let expected = (0..u64_of(refcounts.len())).map(|cluster| u16::from(cluster < clusters));
        assert!(
            refcounts.iter().copied().eq(expected) && u64_of(refcounts.len()) >= clusters,
            "wrong refcounts"
        );
    }

    #[test]
    fn an_image_of_many_tables_has_a_refcount_for_each_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let chunk_bytes = 4 << 20;
        // More than 2 GiB, which one refcount block covers, and more than 512 MiB, which one L2 table covers;
        // with and without holes.
        let chunks = |chunks: u64| (0..chunks).filter(move |index| !(120..300).contains(index));
        for (name, size_bytes, chunks) in [
            ("dense", (3 << 30) + 512, 0..769),
            ("one", 2 << 30, 300..301),
            ("last", 1 << 44, (1 << 22) - 1..1 << 22),
        ] {
            let path = dir.path().join(name);
            let layout = Layout::new(&manifest(size_bytes, chunk_bytes, chunks));
            check(&write(&layout, &path));
        }
        let path = dir.path().join("holes");
        let layout = Layout::new(&manifest(3 << 30, chunk_bytes, chunks(768)));
        assert_eq!((layout.refcount_blocks, layout.l2_numbers.len()), (2, 5));
        check(&write(&layout, &path));
    }

    #[test]
    fn refcount_blocks_have_refcounts() {
        // Up to a file of 2 GiB, which one block covers, and then a file that needs another block.
        for data in 32_758..32_768u64 {
            let layout = Layout::new(&manifest(data * CLUSTER_BYTES, 65_536, 0..data));
            let needed = layout.clusters().div_ceil(BLOCK_ENTRIES);
            assert_eq!((layout.refcount_blocks, layout.refcount_table_clusters), (needed, 1), "{data}");
        }
        // The largest possible image, without a manifest as large.
        let mut layout = Layout::new(&manifest(512, 65_536, 0..1));
        layout.data_clusters = crate::manifest::IMAGE_MAX_BYTES / CLUSTER_BYTES;
        layout.count_refcounts();
        assert!(layout.refcount_table_clusters > 1);
        assert_eq!(layout.refcount_blocks, layout.clusters().div_ceil(BLOCK_ENTRIES));
        assert_eq!(layout.refcount_table_clusters, layout.refcount_blocks.div_ceil(TABLE_ENTRIES));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn our_own_reader_finds_every_chunk_and_every_hole(
            chunk_bits in 12u32..=22,
            sectors in 1u64..(3 << 21),
            wanted in proptest::collection::vec((any::<u64>(), 1u64..40), 0..12),
        ) {
            let (size_bytes, chunk_bytes) = (sectors * 512, 1u64 << chunk_bits);
            let count = size_bytes.div_ceil(chunk_bytes);
            let chunks: BTreeSet<u64> = wanted
                .iter()
                .flat_map(|(start, len)| (start % count..count).take(usize_of(*len)))
                .collect();
            let layout = Layout::new(&manifest(size_bytes, 1 << chunk_bits, chunks.iter().copied()));
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("disk.qcow2");
            let file = write(&layout, &path);
            // The first and the last bytes of each chunk.
            let ends = |index: u64| {
                let len = chunk_bytes.min(size_bytes - index * chunk_bytes);
                [(index * chunk_bytes, (index + 1).to_be_bytes()), (index * chunk_bytes + len - 8, (!index).to_be_bytes())]
            };
            for index in &chunks {
                for (at, mark) in ends(*index) {
                    file.write_all_at(&mark, layout.offset_of(*index).unwrap() + at % chunk_bytes).unwrap();
                }
            }
            check(&file);
            let disk = read_back(&path, &file);
            prop_assert_eq!(disk.size_bytes(), size_bytes);
            for index in &chunks {
                for (at, mark) in ends(*index) {
                    let mut found = [0; 8];
                    disk.read(at, &mut found).unwrap();
                    prop_assert_eq!(found, mark, "chunk {}, at {}", index, at);
                }
            }
            let used: BTreeSet<u64> = chunks
                .iter()
                .flat_map(|index| {
                    let (from, to) = (index * chunk_bytes, ((index + 1) * chunk_bytes).min(size_bytes));
                    from / CLUSTER_BYTES..to.div_ceil(CLUSTER_BYTES)
                })
                .collect();
            prop_assert_eq!(u64_of(used.len()), layout.data_clusters);
            let mut data = BTreeSet::new();
            let mut at = 0;
            for extent in disk.extents(ByteRange::new(0, size_bytes).unwrap(), usize::MAX - 1).unwrap() {
                if extent.kind == ExtentKind::Data {
                    data.extend(at / CLUSTER_BYTES..(at + extent.len).div_ceil(CLUSTER_BYTES));
                }
                at += extent.len;
            }
            prop_assert_eq!(data, used);
        }
    }
}
