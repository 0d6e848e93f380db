//! Which file each block belongs to: an index that one pass over the metadata makes.
//!
//! ```text
//!   FileSystem::scan --Run--> runs, sorted by place     owner of a range: binary search
//!                    --Name-> names, sorted by id       path of a file: name by name up to the root
//! ```
//! What no run covers is free. Where two runs overlap, as in a damaged file system, the one that starts first counts.

use std::ops::Range;

use crate::{Fault, FileSystem, Names, Owner, Scan, Scanned, Visits, fault};

/// The most bytes in use in an index: about ten million files.
pub const OWNERS_BYTES_MAX: usize = 512 << 20;

/// Bytes of a partition that belong to one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedRun {
    /// Which bytes.
    pub bytes: Range<u64>,
    /// Whose.
    pub owner: Owner,
}

/// The owners of all blocks of a file system.
#[derive(Debug, Default)]
pub struct Owners {
    /// Ascending, and none overlaps another one.
    runs: Vec<OwnedRun>,
    names: Names,
    unreadable: u64,
    first_unreadable: Option<(u64, Fault)>,
    overlapping_bytes: u64,
}

impl Owners {
    /// Scans a file system.
    pub fn of(file_system: &mut dyn FileSystem, visits: &mut Visits) -> Result<Self, Fault> {
        Self::by(file_system.root().id, |found| file_system.scan(visits, found))
    }

    /// Like [`Owners::of`], for a file system that can only be scanned.
    pub fn of_scan(file_system: &mut dyn Scan, visits: &mut Visits) -> Result<Self, Fault> {
        Self::by(file_system.root_id(), |found| file_system.scan(visits, found))
    }

    fn by(
        root: u64,
        scan: impl FnOnce(&mut dyn FnMut(Scanned) -> Result<(), Fault>) -> Result<(), Fault>,
    ) -> Result<Self, Fault> {
        let mut owners = Self { names: Names::new(root), ..Self::default() };
        scan(&mut |scanned| owners.add(scanned))?;
        owners.names.sort();
        owners.runs.sort_by_key(|run| (run.bytes.start, run.bytes.end));
        owners.cut_overlaps();
        Ok(owners)
    }

    fn add(&mut self, scanned: Scanned) -> Result<(), Fault> {
        match scanned {
            Scanned::Run { bytes, owner } => match self.runs.last_mut() {
                Some(last) if last.owner == owner && last.bytes.end == bytes.start => {
                    last.bytes.end = bytes.end;
                }
                _ if bytes.is_empty() => {}
                _ => self.runs.push(OwnedRun { bytes, owner }),
            },
            Scanned::Name { id, parent, name } => self.names.add(id, parent, &name)?,
            Scanned::Unreadable { id, why } => {
                self.unreadable += 1;
                self.first_unreadable.get_or_insert((id, why));
            }
        }
        if self.memory_bytes() > OWNERS_BYTES_MAX {
            let mib = OWNERS_BYTES_MAX >> 20;
            return Err(fault(format!("an index of the owners of its blocks takes more than {mib} MiB")));
        }
        Ok(())
    }

    fn cut_overlaps(&mut self) {
        let (mut end, mut overlapping_bytes) = (0, 0u64);
        for run in &mut self.runs {
            let start = run.bytes.start.max(end).min(run.bytes.end);
            overlapping_bytes = overlapping_bytes.saturating_add(start - run.bytes.start);
            run.bytes.start = start;
            end = end.max(run.bytes.end);
        }
        self.runs.retain(|run| !run.bytes.is_empty());
        self.overlapping_bytes = overlapping_bytes;
    }

    /// Bytes in use in the index. Its vectors may have allocated twice as much.
    pub fn memory_bytes(&self) -> usize {
        let runs = self.runs.len().saturating_mul(size_of::<OwnedRun>());
        runs.saturating_add(self.names.memory_bytes())
    }

    /// All runs, ascending. What lies between them is free.
    pub fn runs(&self) -> &[OwnedRun] {
        &self.runs
    }

    /// The runs of a range, cut to it.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = OwnedRun> {
        let first = self.runs.partition_point(|run| run.bytes.end <= range.start);
        let rest = self.runs.get(first..).unwrap_or_default();
        rest.iter().take_while(move |run| run.bytes.start < range.end).map(move |run| {
            let bytes = run.bytes.start.max(range.start)..run.bytes.end.min(range.end);
            OwnedRun { bytes, owner: run.owner }
        })
    }

    /// A path of a file: see [`Names::path`].
    pub fn path(&self, id: u64) -> Option<Vec<u8>> {
        self.names.path(id)
    }

    /// How many files could not be read to the end, and the first of them.
    pub fn unreadable(&self) -> (u64, Option<&(u64, Fault)>) {
        (self.unreadable, self.first_unreadable.as_ref())
    }

    /// Bytes of runs that overlap, of two owners or of one. None in a sound file system.
    pub fn overlapping_bytes(&self) -> u64 {
        self.overlapping_bytes
    }

    /// Bytes that belong to somebody.
    pub fn owned_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes.end - run.bytes.start).sum()
    }

    /// How many names there are.
    pub fn names(&self) -> u64 {
        self.names.count()
    }
}
