//! Reads of any offset and length in a partition.

use std::sync::Arc;

use headwater_block::{Device, IoError, IoErrorKind, blocking};

use crate::partitions::Partition;
use crate::units::{u64_of, usize_of};
use crate::{Fault, fault};

/// How much is read at a time if less is wanted.
const PAGE_BYTES: usize = 64 << 10;

/// A disk or a partition that a file system is read from.
pub trait ReadAt: Send + Sync {
    /// Its length in bytes.
    fn len_bytes(&self) -> u64;

    /// Reads must start and end on multiples of this, or end at the end of the disk.
    fn unit_bytes(&self) -> u64 {
        512
    }

    /// Reads the bytes from `at` on into `into`. The range must lie within the length.
    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError>;
}

impl ReadAt for dyn Device + '_ {
    fn len_bytes(&self) -> u64 {
        self.geometry().size_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.geometry().logical_block_bytes.into()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        blocking::read(self, at, into)
    }
}

impl<R: ReadAt + ?Sized> ReadAt for Arc<R> {
    fn len_bytes(&self) -> u64 {
        (**self).len_bytes()
    }

    fn unit_bytes(&self) -> u64 {
        (**self).unit_bytes()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        (**self).read_at(at, into)
    }
}

impl<R: ReadAt + ?Sized> ReadAt for &R {
    fn len_bytes(&self) -> u64 {
        (**self).len_bytes()
    }

    fn unit_bytes(&self) -> u64 {
        (**self).unit_bytes()
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        (**self).read_at(at, into)
    }
}

impl ReadAt for Vec<u8> {
    fn len_bytes(&self) -> u64 {
        u64_of(self.len())
    }

    fn unit_bytes(&self) -> u64 {
        1
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<(), IoError> {
        let found = self.get(usize_of(at)..).and_then(|rest| rest.get(..into.len()));
        let past_end = || IoError::new(IoErrorKind::Invalid, "a read past the end of bytes in memory");
        into.copy_from_slice(found.ok_or_else(past_end)?);
        Ok(())
    }
}

/// The bytes of a partition. A page of them is kept, so that small pieces that are close together cost one read.
pub struct Bytes {
    disk: Arc<dyn ReadAt>,
    offset_bytes: u64,
    len_bytes: u64,
    /// What was read last, and from where.
    page: Vec<u8>,
    page_at: u64,
}

impl Bytes {
    /// The bytes of a partition of a disk.
    pub fn new(disk: Arc<dyn ReadAt>, partition: &Partition) -> Self {
        let (offset_bytes, len_bytes) = (partition.offset_bytes, partition.len_bytes);
        Self { disk, offset_bytes, len_bytes, page: Vec::new(), page_at: 0 }
    }

    /// The length of the partition in bytes.
    pub fn len(&self) -> u64 {
        self.len_bytes
    }

    /// Whether the partition has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Fills `into` from `at`, which must all lie in the partition.
    pub fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Fault> {
        let end = at.checked_add(u64_of(into.len())).filter(|end| *end <= self.len());
        let end = end.ok_or_else(|| fault("it reaches past the end of its partition"))?;
        if into.len() >= PAGE_BYTES {
            let found = self.fetch(at, end)?;
            into.copy_from_slice(found.get(..into.len()).unwrap_or_default());
            return Ok(());
        }
        let mut done = 0;
        while done < into.len() {
            let from = at + u64_of(done);
            if !(self.page_at..self.page_at + u64_of(self.page.len())).contains(&from) {
                let start = from / u64_of(PAGE_BYTES) * u64_of(PAGE_BYTES);
                self.page = self.fetch(start, (start + u64_of(PAGE_BYTES)).min(self.len()))?;
                self.page_at = start;
            }
            let found = self.page.get(usize_of(from - self.page_at)..).unwrap_or_default();
            let rest = into.get_mut(done..).unwrap_or_default();
            let len = found.len().min(rest.len());
            if let (Some(to), Some(from)) = (rest.get_mut(..len), found.get(..len)) {
                to.copy_from_slice(from);
            }
            done += len;
        }
        Ok(())
    }

    fn fetch(&self, at: u64, end: u64) -> Result<Vec<u8>, Fault> {
        let mut found = vec![0; usize_of(end - at)];
        let start = self.offset_bytes.saturating_add(at);
        read_any(&*self.disk, start, &mut found).map_err(fault)?;
        Ok(found)
    }
}

/// Fills `into` from any place of a disk, which is read in its units.
pub(crate) fn read_any(disk: &dyn ReadAt, at: u64, into: &mut [u8]) -> Result<(), IoError> {
    let unit = disk.unit_bytes();
    let start = at / unit * unit;
    let skip = usize_of(at - start);
    let len = skip.saturating_add(into.len());
    // At the end of a disk whose length is no multiple of its unit, the last read is shorter than a unit.
    let most = usize_of(disk.len_bytes().saturating_sub(start));
    let whole = len.next_multiple_of(usize_of(unit)).min(most.max(len));
    if whole == into.len() {
        return disk.read_at(start, into);
    }
    let mut units = vec![0; whole];
    disk.read_at(start, &mut units)?;
    into.copy_from_slice(units.get(skip..len).unwrap_or_default());
    Ok(())
}
