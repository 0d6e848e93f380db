//! A qcow2 image and its backing files as a read-only disk: finds the clusters of a range with the tables,
//! and reads and decompresses them.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_block::{ByteRange, Extent, ExtentKind, IoError, IoErrorKind};
use parking_lot::Mutex;

use crate::file_disk::{FileDisk, push_extent};
use crate::qcow2::header::{Compression, Header};
use crate::qcow2::tables::{CompressedCluster, Place, Tables};
use crate::units::{u64_of, usize_of};

/// Memory for decompressed clusters of one image, so that small reads do not decompress each cluster many
/// times.
const UNPACKED_CACHE_BYTES: u64 = 4 << 20;

/// An open qcow2 image with its backing files.
pub(crate) struct Qcow2Disk {
    path: PathBuf,
    file: File,
    file_bytes: u64,
    tables: Tables,
    backing: Option<Arc<dyn FileDisk>>,
    /// Decompressed clusters of which a part was needed, oldest first, by their offset in the file.
    unpacked: Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>,
}

impl Qcow2Disk {
    /// Opens the image; `backing` is the opened backing file that the header specifies.
    pub(crate) fn open(
        path: &Path,
        file: File,
        file_bytes: u64,
        header: Header,
        backing: Option<Arc<dyn FileDisk>>,
    ) -> Result<Self, IoError> {
        let tables = Tables::open(header, file_bytes, &|offset, into| read_file(&file, path, offset, into))?;
        Ok(Self { path: path.to_owned(), file, file_bytes, tables, backing, unpacked: Mutex::default() })
    }

    fn find(&self, at: u64) -> Result<(Place, u64), IoError> {
        self.tables.find(at, &|offset, into| read_file(&self.file, &self.path, offset, into))
    }

    /// Reads from the backing file; zeroes after its end.
    fn read_backing(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        let Some(backing) = &self.backing else {
            into.fill(0);
            return Ok(());
        };
        let there = usize_of(backing.size_bytes().saturating_sub(at)).min(into.len());
        let (there, beyond) = into.split_at_mut(there);
        beyond.fill(0);
        if there.is_empty() { Ok(()) } else { backing.read(at, there) }
    }

    /// Reads from the file; zeroes after its end, because the last cluster may be incomplete.
    fn read_cluster(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        let there = usize_of(self.file_bytes.saturating_sub(offset)).min(into.len());
        let (there, beyond) = into.split_at_mut(there);
        beyond.fill(0);
        read_file(&self.file, &self.path, offset, there)
    }

    fn read_compressed(&self, at: CompressedCluster, within: u64, into: &mut [u8]) -> Result<(), IoError> {
        let cluster_bytes = self.tables.header().cluster_bytes();
        if u64_of(into.len()) == cluster_bytes {
            return self.unpack(at, into);
        }
        let cached = self.unpacked.lock().iter().find(|(offset, _)| *offset == at.offset).cloned();
        let cluster = match cached {
            Some((_, cluster)) => cluster,
            None => {
                let mut cluster = vec![0; usize_of(cluster_bytes)];
                self.unpack(at, &mut cluster)?;
                let cluster = Arc::new(cluster);
                let room = usize_of((UNPACKED_CACHE_BYTES / cluster_bytes).max(1));
                let mut unpacked = self.unpacked.lock();
                while unpacked.len() >= room {
                    unpacked.pop_front();
                }
                unpacked.push_back((at.offset, Arc::clone(&cluster)));
                cluster
            }
        };
        let part = cluster.get(usize_of(within)..).and_then(|tail| tail.get(..into.len()));
        into.copy_from_slice(part.ok_or_else(|| self.damaged(at, "it is too short"))?);
        Ok(())
    }

    fn unpack(&self, at: CompressedCluster, into: &mut [u8]) -> Result<(), IoError> {
        let len = at.max_bytes.min(self.file_bytes.saturating_sub(at.offset));
        let mut packed = vec![0; usize_of(len)];
        read_file(&self.file, &self.path, at.offset, &mut packed)?;
        let whole = match self.tables.header().compression {
            Compression::Deflate => inflate(&packed, into),
            Compression::Zstd => unpack_zstd(&packed, into),
        };
        if whole { Ok(()) } else { Err(self.damaged(at, "it cannot be decompressed")) }
    }

    fn damaged(&self, at: CompressedCluster, why: &str) -> IoError {
        IoError::new(
            IoErrorKind::Corrupt,
            format!("the compressed cluster at {} of {} is damaged: {why}", at.offset, self.path.display()),
        )
    }
}

/// Decompresses raw deflate. Bytes after the stream in its last sector are ignored.
pub(crate) fn inflate(packed: &[u8], into: &mut [u8]) -> bool {
    use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
    let mut state = Box::<DecompressorOxide>::default();
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (_, _, written) = decompress(&mut state, packed, into, 0, flags);
    written == into.len()
}

/// Decompresses as many zstd frames as fill `into`. As in QEMU, the last frame ends exactly there. Bytes
/// after it in the last sector are ignored.
pub(crate) fn unpack_zstd(packed: &[u8], into: &mut [u8]) -> bool {
    use zstd::stream::raw::{Decoder, InBuffer, Operation, OutBuffer};
    let Ok(mut decoder) = Decoder::new() else { return false };
    let len = into.len();
    let (mut input, mut output) = (InBuffer::around(packed), OutBuffer::around(into));
    loop {
        let before = (input.pos(), output.pos());
        // 0 if a frame ended; the following bytes begin the next frame.
        let Ok(left) = decoder.run(&mut input, &mut output) else { return false };
        if output.pos() == len {
            return left == 0;
        }
        if (input.pos(), output.pos()) == before {
            return false;
        }
    }
}

fn read_file(file: &File, path: &Path, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
    let len = into.len();
    file.read_exact_at(into, offset).map_err(|e| {
        IoError::from_os(format!("cannot read {len} bytes at {offset} of {}", path.display()), e)
    })
}

impl FileDisk for Qcow2Disk {
    fn size_bytes(&self) -> u64 {
        self.tables.header().size_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError> {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let (place, holds) = self.find(at)?;
            let (piece, tail) = rest.split_at_mut(usize_of(holds).min(rest.len()));
            let len = u64_of(piece.len());
            match place {
                Place::File(offset) => self.read_cluster(offset, piece)?,
                Place::Compressed(cluster) => {
                    let within = at % self.tables.header().cluster_bytes();
                    self.read_compressed(cluster, within, piece)?;
                }
                Place::Zero => piece.fill(0),
                Place::Backing => self.read_backing(at, piece)?,
            }
            at += len;
            rest = tail;
        }
        Ok(())
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let mut out: Vec<Extent> = Vec::new();
        let mut at = range.offset();
        while at < range.end() {
            let (place, holds) = self.find(at)?;
            let len = holds.min(range.end() - at);
            match (place, &self.backing) {
                (Place::File(_) | Place::Compressed(_), _) => push_extent(&mut out, len, ExtentKind::Data),
                (Place::Zero, _) | (Place::Backing, None) => push_extent(&mut out, len, ExtentKind::Hole),
                (Place::Backing, Some(backing)) => {
                    let there = len.min(backing.size_bytes().saturating_sub(at));
                    if there == 0 {
                        push_extent(&mut out, len, ExtentKind::Hole);
                    } else if let Some(below) = ByteRange::new(at, there) {
                        // The answer may cover only a part; then the loop asks again.
                        let mut answered = 0;
                        for extent in backing.extents(below, max_extents)? {
                            push_extent(&mut out, extent.len, extent.kind);
                            answered += extent.len;
                        }
                        at += answered;
                        if out.len() > max_extents {
                            break;
                        }
                        continue;
                    }
                }
            }
            at += len;
            if out.len() > max_extents {
                break;
            }
        }
        out.truncate(max_extents.max(1));
        Ok(out)
    }

    fn will_read(&self, range: ByteRange) {
        let mut at = range.offset();
        while at < range.end() {
            let Ok((place, holds)) = self.find(at) else {
                return;
            };
            let len = holds.min(range.end() - at);
            let (offset, bytes) = match (place, &self.backing) {
                (Place::File(offset), _) => (offset, len),
                (Place::Compressed(cluster), _) => (cluster.offset, cluster.max_bytes),
                (Place::Backing, Some(backing)) => {
                    let there = ByteRange::new(at, len).map(|r| r.clipped_to(backing.size_bytes()));
                    if let Some(below) = there.filter(|below| !below.is_empty()) {
                        backing.will_read(below);
                    }
                    (0, 0)
                }
                _ => (0, 0),
            };
            if let Some(bytes) = std::num::NonZeroU64::new(bytes) {
                // A hint: it does not matter whether the file system accepts it.
                let _ = rustix::fs::fadvise(&self.file, offset, Some(bytes), rustix::fs::Advice::WillNeed);
            }
            at += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_as_many_zstd_frames_as_fill_it() {
        let cluster: Vec<u8> = (0..65_536u32).map(|n| (n / 300) as u8).collect();
        let frame = |part: &[u8]| zstd::bulk::compress(part, 3).unwrap();
        let is_whole = |packed: &[u8]| {
            let mut into = vec![0xaa; cluster.len()];
            let is_whole = unpack_zstd(packed, &mut into);
            assert!(!is_whole || into == cluster);
            is_whole
        };
        let (one, two) = cluster.split_at(40_000);
        let frames = [frame(one), frame(two)].concat();
        for packed in [&frame(&cluster), &frames] {
            assert!(is_whole(packed));
            // The rest of the last sector.
            assert!(is_whole(&[&packed[..], &[0; 100]].concat()));
            assert!(is_whole(&[&packed[..], &[0xff; 100]].concat()));
            assert!(!is_whole(&packed[..packed.len() - 1]));
        }
        let longer = [two, &[1][..]].concat();
        for last in [&b""[..], &two[1..], &longer[..]] {
            assert!(!is_whole(&[frame(one), frame(last)].concat()), "{} bytes", last.len());
        }
        assert!(!is_whole(&frame(&[one, &longer[..]].concat())));
        assert!(!is_whole(&frame(one)) && !is_whole(&[frame(one), vec![0; 100]].concat()));
    }
}
