//! Changed files of an ext2, ext3 or ext4 file system.
//!
//! Two entries of one path are the same if type, size, owner, mode and time of change agree (and the target of a
//! link). Where only the time differs, the contents are read and compared.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ext4_view::{Ext4, Ext4Error, Ext4Read, Metadata, PathBuf};
use headwater_block::blocking;

use crate::diff::partitions::Partition;
use crate::error::ImageError;
use crate::progress::Cancel;
use crate::reader::VersionReader;

/// The most changed files that are listed of a partition.
pub const CHANGED_FILES_MAX: usize = 100_000;
/// The deepest directory that is looked into.
pub(super) const DEPTH_MAX: usize = 256;
/// The unit in which devices are read.
const SECTOR_BYTES: u64 = 512;
/// How much of a file is compared at a time.
pub(super) const COMPARE_BYTES: usize = 1 << 20;

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// It is new. Of a new directory, so is everything in it, which is listed too.
    Added,
    /// It is gone.
    Removed,
    /// Its content, type or link target is another.
    Changed,
    /// Owner, mode or time is another; the content is the same.
    Attributes,
}

/// A file that changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedFile {
    /// Its path in the file system.
    pub path: String,
    /// What happened to it.
    pub change: FileChange,
    /// Its size now, or before it was removed.
    pub size_bytes: u64,
}

type Found = (Option<Vec<ChangedFile>>, Option<String>);

/// Compares the file systems in a partition of two versions. A file system that cannot be read is a remark.
pub(super) fn compare(
    from: &Arc<VersionReader>,
    to: &Arc<VersionReader>,
    partition: &Partition,
    cancel: &Cancel,
) -> Result<Found, ImageError> {
    let mut walk = Walk { cancel, changed: Vec::new(), cut: false };
    // Hostile bytes must not end the caller, whatever the crate makes of them.
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), Ext4Error> {
        let old = load(from, partition)?;
        let new = load(to, partition)?;
        walk.directory(&old, &new, &PathBuf::new("/"), 0)
    }));
    cancel.check("the comparison")?;
    let failed = match outcome {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(e.to_string()),
        Err(_) => Some("it is damaged".to_owned()),
    };
    if let Some(why) = failed {
        let remark = format!("no ext2, ext3 or ext4 that can be read in both versions: {why}");
        return Ok((None, Some(remark)));
    }
    let remark =
        walk.cut.then(|| format!("more than {CHANGED_FILES_MAX} files changed; the others are not listed"));
    walk.changed.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((Some(walk.changed), remark))
}

pub(super) fn load(version: &Arc<VersionReader>, partition: &Partition) -> Result<Ext4, Ext4Error> {
    Ext4::load(Box::new(PartitionReader { version: Arc::clone(version), partition: *partition }))
}

struct PartitionReader {
    version: Arc<VersionReader>,
    partition: Partition,
}

impl Ext4Read for PartitionReader {
    fn read(
        &mut self,
        start_byte: u64,
        into: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync + 'static>> {
        let len = u64::try_from(into.len())?;
        let end = start_byte.checked_add(len).filter(|end| *end <= self.partition.len_bytes);
        end.ok_or("it reaches past the end of its partition")?;
        // Devices are read in whole sectors.
        let start = (self.partition.offset_bytes + start_byte) / SECTOR_BYTES * SECTOR_BYTES;
        let skip = usize::try_from(self.partition.offset_bytes + start_byte - start)?;
        let mut sectors = vec![0; (skip + into.len()).next_multiple_of(512)];
        blocking::read(self.version.as_ref(), start, &mut sectors)?;
        let wanted = sectors.get(skip..).and_then(|tail| tail.get(..into.len())).ok_or("it is too long")?;
        into.copy_from_slice(wanted);
        Ok(())
    }
}

struct Walk<'a> {
    cancel: &'a Cancel,
    changed: Vec<ChangedFile>,
    cut: bool,
}

pub(super) type Entries = BTreeMap<Vec<u8>, (PathBuf, Metadata)>;

pub(super) fn entries(fs: &Ext4, path: &PathBuf) -> Result<Entries, Ext4Error> {
    let mut out = Entries::new();
    for entry in fs.read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name().as_ref().to_vec();
        if name != b"." && name != b".." {
            let path = entry.path();
            let metadata = fs.symlink_metadata(&path)?;
            out.insert(name, (path, metadata));
        }
    }
    Ok(out)
}

impl Walk<'_> {
    fn note(&mut self, path: &PathBuf, change: FileChange, metadata: &Metadata) {
        if self.changed.len() >= CHANGED_FILES_MAX {
            self.cut = true;
            return;
        }
        let path = String::from_utf8_lossy(path.as_ref()).into_owned();
        self.changed.push(ChangedFile { path, change, size_bytes: metadata.len() });
    }

    fn directory(&mut self, old: &Ext4, new: &Ext4, path: &PathBuf, depth: usize) -> Result<(), Ext4Error> {
        let mut before = entries(old, path)?;
        for (name, (path, now)) in entries(new, path)? {
            if self.cancel.is_cancelled() || depth >= DEPTH_MAX {
                return Ok(());
            }
            match before.remove(&name) {
                None => self.all(new, &path, &now, FileChange::Added, depth)?,
                Some((_, was)) if was.file_type() != now.file_type() => {
                    self.all(old, &path, &was, FileChange::Removed, depth)?;
                    self.all(new, &path, &now, FileChange::Added, depth)?;
                }
                Some((_, was)) => {
                    if let Some(change) = self.file(old, new, &path, &was, &now)? {
                        self.note(&path, change, &now);
                    }
                    if now.is_dir() {
                        self.directory(old, new, &path, depth + 1)?;
                    }
                }
            }
        }
        for (path, was) in before.into_values() {
            self.all(old, &path, &was, FileChange::Removed, depth)?;
        }
        Ok(())
    }

    /// Notes an entry, and what is in it, as added or removed.
    fn all(
        &mut self,
        fs: &Ext4,
        path: &PathBuf,
        metadata: &Metadata,
        change: FileChange,
        depth: usize,
    ) -> Result<(), Ext4Error> {
        self.note(path, change, metadata);
        if metadata.is_dir() && depth < DEPTH_MAX && !self.cancel.is_cancelled() {
            for (path, metadata) in entries(fs, path)?.into_values() {
                self.all(fs, &path, &metadata, change, depth + 1)?;
            }
        }
        Ok(())
    }

    fn file(
        &self,
        old: &Ext4,
        new: &Ext4,
        path: &PathBuf,
        was: &Metadata,
        now: &Metadata,
    ) -> Result<Option<FileChange>, Ext4Error> {
        let same_owner = (was.uid(), was.gid(), was.mode()) == (now.uid(), now.gid(), now.mode());
        let same_time = was.modified() == now.modified();
        let attributes = (!same_owner || (!same_time && !now.is_dir())).then_some(FileChange::Attributes);
        if now.is_symlink() {
            let differs = old.read_link(path)? != new.read_link(path)?;
            return Ok(if differs { Some(FileChange::Changed) } else { attributes });
        }
        if !now.file_type().is_regular_file() || (same_time && was.len() == now.len()) {
            return Ok(attributes);
        }
        let differs = was.len() != now.len() || self.contents_differ(old, new, path)?;
        Ok(if differs { Some(FileChange::Changed) } else { attributes })
    }

    fn contents_differ(&self, old: &Ext4, new: &Ext4, path: &PathBuf) -> Result<bool, Ext4Error> {
        let (mut old, mut new) = (old.open(path)?, new.open(path)?);
        let (mut before, mut after) = (vec![0; COMPARE_BYTES], vec![0; COMPARE_BYTES]);
        while !self.cancel.is_cancelled() {
            let (was, now) = (fill(&mut old, &mut before)?, fill(&mut new, &mut after)?);
            if before.get(..was) != after.get(..now) {
                return Ok(true);
            }
            if now == 0 {
                break;
            }
        }
        Ok(false)
    }
}

/// Reads until the buffer is full or the file ends.
pub(super) fn fill(file: &mut ext4_view::File, into: &mut [u8]) -> Result<usize, Ext4Error> {
    let mut have = 0;
    while let Some(rest) = into.get_mut(have..).filter(|rest| !rest.is_empty()) {
        match file.read_bytes(rest)? {
            0 => break,
            len => have += len,
        }
    }
    Ok(have)
}
