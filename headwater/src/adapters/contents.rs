//! Reports what occupies a write cache: scans the file systems in a snapshot of a disk, for `headwater cache contents`. Called by the
//! disk of a machine ([`super::disks`]). It only reads.
//!
//! ```text
//!   snapshot --changed ranges--> Changed                   (RAM only)
//!   file systems --read_at--> changed? --yes--> the snapshot: RAM, packed, the overflow disk
//!                                      \--no---> the image below, which needs no snapshot
//! ```
//! A seal, an external reader, and a machine that needs the space end the snapshot and with it the scan. None of them waits longer than a
//! read from this host takes, because reads of the image, which may wait for a store, do not hold the snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use headwater_api::{
    CacheContents, ContentsKind, HeldBytes, KindContents, PartitionContents, PathContents, ProblemKind,
};
use headwater_attribution::{Changed, Class, Contents, Held, Item, Place, escaped};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Geometry, IoError, IoErrorKind, MAX_REQUEST_BYTES, Op, Request,
};
use headwater_filesystems::{Fault, ReadAt, fault};
use headwater_service::backend::{BackendError, TaskControl};
use headwater_volume::Residence;

use crate::adapters::snapshot_leases::Reader;

/// The most concurrent scans of this process. Each occupies a processor. On a disk with very many files, a scan needs
/// up to about 1 GiB of memory on NTFS, and some hundred MiB on ext4.
const SCANS_MAX: usize = 1;
/// Timeout of a scan. During the scan the write cache keeps the blocks that its machine overwrites.
const SCAN_LIMIT: Duration = Duration::from_secs(120);
/// How often a read that waits checks whether the scan must end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The number of runs of changed blocks after which the scan checks whether it must end.
const POLL_RUNS: u64 = 4096;

/// The number of running scans.
#[derive(Default)]
pub struct Scans(AtomicUsize);

/// The permit of a scan.
pub struct ScanPermit(Arc<Scans>);

impl ScanPermit {
    /// Takes a permit. Fails if all are in use.
    pub fn take(scans: &Arc<Scans>) -> Result<Self, BackendError> {
        let more = |running: usize| (running < SCANS_MAX).then_some(running + 1);
        match scans.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more) {
            Ok(_) => Ok(Self(Arc::clone(scans))),
            Err(_) => {
                let message = "another scan of a write cache is running on this host";
                Err(BackendError::new(ProblemKind::Conflict, message).advise("try again when that is done"))
            }
        }
    }
}

impl Drop for ScanPermit {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The snapshot of a disk while it is scanned.
struct ScanDisk {
    reader: Reader,
    /// The device below the write cache.
    base: Arc<dyn Device>,
    geometry: Geometry,
    control: Arc<TaskControl>,
    begun: Instant,
    limit: Duration,
}

impl ScanDisk {
    /// Why the scan must end, if it must.
    fn end(&self) -> Option<BackendError> {
        if self.control.is_cancelled() {
            return Some(BackendError::new(ProblemKind::Cancelled, "the scan was cancelled"));
        }
        if self.reader.has_ended() {
            let why = "the scan was ended, because the disk is being sealed or read, or the machine was stopped or had no space left";
            return Some(BackendError::new(ProblemKind::Conflict, why).advise("try again"));
        }
        (self.begun.elapsed() >= self.limit).then(|| {
            let message = format!("the scan was ended, because it took more than {} s", self.limit.as_secs());
            BackendError::new(ProblemKind::Failed, message)
                .advise("check whether the store and the overflow disk are slow")
        })
    }

    fn read(&self, device: &dyn Device, range: ByteRange, into: &mut [u8]) -> Result<(), IoError> {
        if device.try_now(Op::Read { range, into: &mut *into })? == Attempt::Done {
            return Ok(());
        }
        let (sender, ended) = mpsc::channel();
        let completion = Completion::new(move |outcome| {
            // If the scan has ended, nobody receives the result.
            let _ = sender.send(outcome);
        });
        device.submit(Request::Read { range, buffer: vec![0; into.len()] }, completion);
        let closed = |why: &str| IoError::new(IoErrorKind::Closed, why);
        loop {
            match ended.recv_timeout(POLL_INTERVAL) {
                Ok(outcome) => {
                    outcome.result?;
                    into.copy_from_slice(
                        outcome.buffer.get(..into.len()).ok_or_else(|| closed("a read was short"))?,
                    );
                    return Ok(());
                }
                Err(RecvTimeoutError::Disconnected) => return Err(closed("a read broke off")),
                Err(RecvTimeoutError::Timeout) if self.end().is_some() => {
                    return Err(closed("the scan ends"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl ReadAt for ScanDisk {
    fn len_bytes(&self) -> u64 {
        self.geometry.size_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.geometry.logical_block_bytes.into()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        // Ends the scan even if a damaged file system refers to its metadata in a circle and the disk answers at once.
        if self.end().is_some() {
            return Err(IoError::new(IoErrorKind::Closed, "the scan ends"));
        }
        let past_end = || IoError::new(IoErrorKind::Invalid, "a read past the end of the disk");
        let (mut at, mut rest) = (at, into);
        while !rest.is_empty() {
            let len = u64::try_from(rest.len()).unwrap_or(u64::MAX).min(MAX_REQUEST_BYTES.into());
            let range = ByteRange::new(at, len).ok_or_else(past_end)?;
            let view = self.reader.frozen()?;
            let run = view.changed(range, 1).into_iter().next().ok_or_else(past_end)?;
            let range = ByteRange::new(at, run.len).ok_or_else(past_end)?;
            let taken = std::mem::take(&mut rest);
            let (piece, after) = taken
                .split_at_mut_checked(usize::try_from(run.len).unwrap_or(usize::MAX))
                .ok_or_else(past_end)?;
            if run.changed {
                self.read(&*view, range, piece)?;
            } else {
                drop(view);
                self.read(&*self.base, range, piece)?;
            }
            (at, rest) = (at.saturating_add(run.len), after);
        }
        Ok(())
    }
}

/// Scans a disk. Blocks.
pub fn scan(
    reader: Reader,
    permit: ScanPermit,
    control: Arc<TaskControl>,
) -> Result<CacheContents, BackendError> {
    scan_for(SCAN_LIMIT, reader, permit, control)
}

/// Like [`scan`], with a timeout.
pub(super) fn scan_for(
    limit: Duration,
    reader: Reader,
    permit: ScanPermit,
    control: Arc<TaskControl>,
) -> Result<CacheContents, BackendError> {
    let begun = Instant::now();
    let view = reader.frozen().map_err(failed)?;
    let (geometry, base) = (view.geometry(), Arc::clone(view.below()));
    let disk = Arc::new(ScanDisk { reader, base, geometry, control, begun, limit });
    let (mut changed, mut runs) = (Changed::default(), 0_u64);
    let found = view.places(&mut |first, blocks, residence| {
        runs += 1;
        // A seal that ended the snapshot waits until this walk releases it.
        if runs.is_multiple_of(POLL_RUNS) && disk.end().is_some() {
            return Err(fault("the scan ends"));
        }
        let place = match residence {
            Residence::Ram => Place::Ram,
            Residence::Packed => Place::Packed,
            Residence::Disk => Place::Disk,
            Residence::Zero | Residence::Absent => return Ok(()),
        };
        changed.add(first, blocks, place)
    });
    drop(view);
    let looked_at = Arc::clone(&disk);
    let is_cancelled: headwater_attribution::scan::IsCancelled = Arc::new(move || looked_at.end().is_some());
    let as_disk: Arc<dyn ReadAt> = Arc::clone(&disk) as _;
    let sector_bytes = geometry.logical_block_bytes.into();
    let contents =
        found.and_then(|()| headwater_attribution::scan(&as_disk, sector_bytes, &changed, &is_cancelled));
    // Errors of reads after the snapshot ended are not damage.
    if let Some(end) = disk.end() {
        return Err(end);
    }
    drop(permit);
    let mut contents = answer(contents.map_err(unreadable)?);
    contents.took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(contents)
}

fn failed(error: IoError) -> BackendError {
    BackendError::new(ProblemKind::Conflict, "cannot scan the write cache").because(error)
}

fn unreadable(fault: Fault) -> BackendError {
    BackendError::new(ProblemKind::Failed, "cannot scan the write cache").because(fault)
}

fn held(held: Held) -> HeldBytes {
    let Held { ram_bytes, packed_bytes, disk_bytes } = held;
    HeldBytes { total_bytes: held.total_bytes(), ram_bytes, packed_bytes, disk_bytes }
}

fn kind(class: Class) -> ContentsKind {
    match class {
        Class::File => ContentsKind::File,
        Class::Free => ContentsKind::Free,
        Class::Journal => ContentsKind::Journal,
        Class::Swap => ContentsKind::Swap,
        Class::Metadata => ContentsKind::Metadata,
        Class::Unknown => ContentsKind::Unknown,
        Class::Outside => ContentsKind::Outside,
    }
}

fn path(item: Item) -> PathContents {
    let Item { partition, path, id, class, held: its } = item;
    let path = path.map_or_else(|| format!("(no name, {id})"), |path| escaped(&path));
    PathContents { partition, path, kind: kind(class), held: held(its) }
}

fn answer(contents: Contents) -> CacheContents {
    let Contents { held: all, classes, partitions, files, files_total, directories, free } = contents;
    let mut kinds: Vec<KindContents> =
        classes.into_iter().map(|(class, its)| KindContents { kind: kind(class), held: held(its) }).collect();
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.held.total_bytes));
    let partitions = partitions.into_iter().map(|partition| PartitionContents {
        number: partition.number,
        file_system: partition.kind.chars().flat_map(char::escape_debug).collect(),
        held: held(partition.held),
        free_bytes: free.get(&partition.number).map_or(0, Held::total_bytes),
        remarks: partition.remarks.iter().map(|remark| escaped(remark.as_bytes())).collect(),
    });
    CacheContents {
        held: held(all),
        kinds,
        partitions: partitions.collect(),
        directories: directories.into_iter().map(path).collect(),
        files: files.into_iter().map(path).collect(),
        files_total,
        ..CacheContents::default()
    }
}
