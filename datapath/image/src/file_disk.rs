//! Disks in local files: the trait [`FileDisk`], which each format of disk images implements with blocking
//! calls, and the device that serves all of them without blocking the caller.

use std::fs::File;
use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};

use crate::fetch_pool::{FetchPool, PREFETCH_MAX_BYTES, Place, read_only};
use crate::inspection::sector_bytes_of_file;
use crate::reader::read_only_geometry;

/// A read-only disk whose calls block. Ranges lie inside the disk.
pub(crate) trait FileDisk: Send + Sync + 'static {
    /// Size in bytes.
    fn size_bytes(&self) -> u64;

    /// Fills `into` from `offset`.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), IoError>;

    /// As [`FileDisk::read`], but only if the bytes are in memory. Returns whether it filled `into`; if not,
    /// `read` returns the bytes or the reason.
    fn read_now(&self, offset: u64, into: &mut [u8]) -> bool {
        let _ = (offset, into);
        false
    }

    /// As [`Device::extents`].
    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError>;

    /// Size of the sectors, if the file format or the kernel defines it.
    fn sector_bytes(&self) -> Option<u32> {
        None
    }

    /// Announces that the range will be read soon.
    fn will_read(&self, range: ByteRange);
}

/// A [`FileDisk`] as a device. Reads of bytes that may not be in memory go to the fetch pool.
pub(crate) struct PooledDisk {
    disk: Arc<dyn FileDisk>,
    sector_bytes: u32,
    pool: Arc<FetchPool>,
    /// Locks that keep other programs from writing to the files; see [`crate::qemu_locks`].
    _locks: Vec<File>,
}

impl PooledDisk {
    pub(crate) fn open(
        disk: Arc<dyn FileDisk>,
        place: Place,
        locks: Vec<File>,
    ) -> Result<Arc<dyn Device>, IoError> {
        let sector_bytes = sector_bytes_of_file(disk.as_ref());
        Ok(Arc::new(Self { disk, sector_bytes, pool: FetchPool::shared(place)?, _locks: locks }))
    }
}

impl Device for PooledDisk {
    fn geometry(&self) -> Geometry {
        Geometry { logical_block_bytes: self.sector_bytes, ..read_only_geometry(self.disk.size_bytes()) }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => {
                let is_read = self.disk.read_now(range.offset(), into);
                Ok(if is_read { Attempt::Done } else { Attempt::MustWait })
            }
            Op::Flush => Ok(Attempt::Done),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => Err(read_only()),
        }
    }

    /// Never copies anything: a system call is too expensive for a caller that does this at each write, and
    /// it would count as a use in the page cache.
    fn peek(&self, _: ByteRange, _: &mut [u8]) -> bool {
        false
    }

    fn submit(&self, request: Request, done: Completion) {
        match request {
            Request::Read { range, mut buffer } => {
                let disk = Arc::clone(&self.disk);
                self.pool.push(move || {
                    let result = disk.read(range.offset(), &mut buffer);
                    done.complete(result, buffer);
                });
            }
            Request::Prefetch { range } => {
                if self.pool.room_ahead() == 0 {
                    return done.complete(Ok(()), Vec::new());
                }
                let disk = Arc::clone(&self.disk);
                let range = range.clipped_to(range.offset().saturating_add(PREFETCH_MAX_BYTES));
                self.pool.push_ahead(Vec::new(), move || {
                    disk.will_read(range);
                    done.complete(Ok(()), Vec::new());
                });
            }
            Request::Flush => done.complete(Ok(()), Vec::new()),
            other => done.complete(Err(read_only()), other.into_buffer()),
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        self.disk.extents(range, max_extents)
    }
}

/// Appends an extent to a list, and merges it with the last one if both are of the same kind.
pub(crate) fn push_extent(extents: &mut Vec<Extent>, len: u64, kind: ExtentKind) {
    match extents.last_mut() {
        Some(last) if last.kind == kind => last.len = last.len.saturating_add(len),
        _ => extents.push(Extent { len, kind }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch_pool::FETCH_THREADS;
    use crate::{open_file, open_source};
    use parking_lot::{Mutex, MutexGuard};
    use std::sync::mpsc;
    use std::time::Duration;

    /// A file on a share that hangs while the lock is held.
    struct Hanging(&'static Mutex<()>);

    impl FileDisk for Hanging {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), IoError> {
            drop(self.0.lock());
            Ok(())
        }

        fn extents(&self, _: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
            Ok(Vec::new())
        }

        fn will_read(&self, _: ByteRange) {}
    }

    /// Reads a sector. The result is the name of the thread that did it.
    fn read(disk: &Arc<dyn Device>) -> mpsc::Receiver<String> {
        let (tell, told) = mpsc::channel();
        let range = ByteRange::new(0, 512).unwrap();
        let done = Completion::new(move |outcome| {
            outcome.result.unwrap();
            let _ = tell.send(std::thread::current().name().unwrap_or_default().to_owned());
        });
        disk.submit(Request::Read { range, buffer: vec![0; 512] }, done);
        told
    }

    #[test]
    fn a_hanging_source_delays_no_machine() {
        static HANGS: Mutex<()> = Mutex::new(());
        // The start of a file is read when it is opened.
        let source = PooledDisk::open(Arc::new(Hanging(&HANGS)), Place::Source, Vec::new()).unwrap();
        let hanging: MutexGuard<'_, ()> = HANGS.lock();
        let (range, into) = (ByteRange::new(0, 512).unwrap(), &mut [0; 512]);
        assert_eq!(source.try_now(Op::Read { range, into }).unwrap(), Attempt::MustWait);
        let reads: Vec<_> = (0..FETCH_THREADS * 2).map(|_| read(&source)).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let of_machine = read(&open_file(file.path()).unwrap()).recv_timeout(Duration::from_secs(60));
        drop(hanging);
        assert!(of_machine.unwrap().starts_with("fetch-"));
        assert!(reads.iter().all(|read| read.recv().unwrap().starts_with("source-")));
        // The file of an import is read by the pool for sources.
        let import = open_source(file.path(), None).unwrap();
        assert!(read(&import).recv().unwrap().starts_with("source-"));
    }

    #[test]
    fn submitting_a_read_does_not_block_on_a_hanging_share() {
        static HANGS: Mutex<()> = Mutex::new(());
        // The start of a file is read when it is opened.
        let source = PooledDisk::open(Arc::new(Hanging(&HANGS)), Place::Source, Vec::new()).unwrap();
        let hanging: MutexGuard<'_, ()> = HANGS.lock();
        let (tell, submitted) = mpsc::channel();
        let of_machine = std::thread::spawn(move || {
            let reads: Vec<_> = (0..10_000).map(|_| read(&source)).collect();
            tell.send(()).unwrap();
            reads
        });
        let all_in = submitted.recv_timeout(Duration::from_secs(60));
        drop(hanging);
        assert!(all_in.is_ok());
        assert!(of_machine.join().unwrap().iter().all(|read| read.recv().is_ok()));
    }
}
