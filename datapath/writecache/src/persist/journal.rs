//! The directory of a persistent cache: its lock, its `data` file, and the `map` to which commits are added.
//!
//! ```text
//!  CACHE-DIR/NAME/lock       locked (flock) by the process that has the cache open
//!                 data       slots, sealed; see [`crate::overflow`]
//!                 map        header, then records up to the last commit, then zeroes; see [`super::format`]
//!                 map.new    the next map while it is written; renamed over `map`
//!                 id         what tells this cache from any other; see [`super::directory::identity`]
//! ```
//! Legal outcomes of a crash while a commit is added: {without it, with it}. Of one while a checkpoint
//! replaces the map: {the old map, the new one}, and both are true.
//!
//! The zeroes are there for the commits to come: a sync after them then has neither a new length nor a first write of
//! claimed blocks to put into the file system's own journal, which takes longer than the commit.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use headwater_block::{IoError, IoErrorKind};

use super::directory::{ID_BYTES, Lock, identity, lock, open_dir, open_found, open_rw};
use super::format::{Encoder, HEADER_BYTES, Header, HeaderFault, VERSION};
use super::map_space::MapSpace;
use super::scan::{Scan, ScanFault, Window, scan};
use super::{DATA_FILE, PersistentOptions};
use crate::overflow::encrypt::SlotKey;
use crate::overflow::io::IoEngine;
use crate::sync::UNDER_MODEL_CHECKER;

/// Generations that a commit reserves ahead: so many segments may be begun before the next one.
pub const GENERATION_STEP: u64 = 1 << 20;

/// Each opening leaves out up to this part of the generations that are left.
const JUMP_DIVISOR: u64 = 1 << 14;

/// A map is not replaced by a checkpoint while it is shorter than this.
const MIN_CHECKPOINT_BYTES: u64 = if UNDER_MODEL_CHECKER { 1 << 10 } else { 64 << 10 };

/// A map longer than this many checkpoints is replaced by one.
const CHECKPOINT_RATIO: u64 = 4;

/// Bytes of sealed slots in a map after which it is replaced by a checkpoint, where that is shorter than they are.
const MAX_SEALED_BYTES: u64 = if UNDER_MODEL_CHECKER { 16 << 10 } else { 8 << 20 };

/// Zeroes written behind a commit that goes beyond those of an earlier one, within what is claimed.
const ZEROES_BYTES: u64 = if UNDER_MODEL_CHECKER { 256 } else { 256 << 10 };

/// Longest name of a cache.
const MAX_NAME_BYTES: usize = 64;

/// The open map of a cache.
pub struct Journal {
    engine: Arc<dyn IoEngine>,
    dir: PathBuf,
    dir_file: File,
    file: Arc<File>,
    room: Arc<MapSpace>,
    header: Header,
    /// Where the next commit goes.
    tail: u64,
    /// Where the zeroes behind it end.
    zeroes_end: u64,
    /// How long the map was after the last checkpoint; 0: it was made before this session.
    checkpoint_bytes: u64,
    /// Of the map's length, what sealed slots take that were added in this session. Those of before are in the data file.
    encrypted_bytes: u64,
    /// Where a checkpoint failed: it is not tried again before the map is this long.
    retry_bytes: u64,
    sequence: u64,
    epoch: u64,
    /// Generations below this are reserved by what is durable.
    generation_limit: u64,
    /// Something failed after which nobody knows what is on disk.
    broken: bool,
}

/// What opening a journal gave.
pub struct Opened {
    /// The journal.
    pub journal: Journal,
    /// Held while the cache is open.
    pub lock: Lock,
    /// Where the slots are.
    pub data: PathBuf,
    /// The map and where the commits in it end; `None`: the cache is new.
    pub recovered: Option<(Window<File>, Scan)>,
    /// The first generation that may be used.
    pub first_generation: u64,
    /// What tells this cache from any other.
    pub id: [u8; ID_BYTES],
}

fn invalid(why: String) -> IoError {
    IoError::new(IoErrorKind::Invalid, why)
}

/// Where the generations of a new cache begin: at random, so that a cache that is removed and made anew under
/// the same key repeats no nonce. Never 0, and far from the end.
fn random_generation() -> Result<u64, IoError> {
    Ok((random()? >> 2) | 1)
}

/// Where the generations of an opening begin.
///
/// A session that crashed has begun at most one commit beyond the last whole one, and that may have reserved one more
/// step. And the cache may be an older copy: the one that went on from there had the next generations, under the same
/// key. So a random number of them is left out, about 2^49 of a new cache's; there are enough for tens of thousands of
/// openings before a jump is half as wide.
fn next_session(generation_limit: u64) -> Result<u64, IoError> {
    let first = generation_limit.saturating_add(GENERATION_STEP);
    let widest = (u64::MAX - first) / JUMP_DIVISOR;
    Ok(first.saturating_add(random()? % widest.max(1)))
}

fn random() -> Result<u64, IoError> {
    let mut bytes = [0u8; 8];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|e| IoError::new(IoErrorKind::Device, format!("no random bytes for a cache: {e}")))?;
    Ok(u64::from_le_bytes(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Refuses names that are not plain file names.
pub fn check_name(name: &str) -> Result<(), IoError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.starts_with('.') || !name.chars().all(plain) {
        return Err(invalid(format!(
            "'{name}' is no name for a persistent cache: use up to {MAX_NAME_BYTES} letters, digits, '-', '_' and '.', not beginning with '.'"
        )));
    }
    Ok(())
}

impl Journal {
    /// Opens the cache, or makes it where there is none.
    pub fn open(
        parent: &Path,
        options: &PersistentOptions,
        size_bytes: u64,
        key: &SlotKey,
        engine: &Arc<dyn IoEngine>,
    ) -> Result<Opened, IoError> {
        check_name(&options.name)?;
        if !parent.is_dir() {
            return Err(invalid(format!(
                "a persistent cache needs a directory, and {} is none",
                parent.display()
            )));
        }
        let dir = parent.join(&options.name);
        let dir_file = open_dir(parent, &dir)?;
        let lock = lock(&dir)?;
        let failed = |e| IoError::from_os(format!("cannot open the persistent cache {}", dir.display()), e);
        let key_check = key
            .check(VERSION, &Header::checked_part(size_bytes, &options.base_id))
            .ok_or_else(|| IoError::new(IoErrorKind::Device, "the key check could not be made"))?;
        let header = Header { size_bytes, base_id: options.base_id, key_check, first_sequence: 1 };
        let map = dir.join("map");
        let mut recovered = match open_found(&map) {
            Ok(file) => {
                let mut records = Window::new(file).map_err(failed)?;
                let found = check_header(&dir, records.from(0).map_err(failed)?, &header)?;
                let scan = scan(&mut records, found.first_sequence).map_err(failed)?;
                Some((records, scan.map_err(|fault| refused(&dir, fault))?))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                check_has_no_data(&dir, "is missing")?;
                None
            }
            Err(error) => return Err(failed(error)),
        };
        let file = match &recovered {
            Some(_) => open_rw(&map, false).map_err(failed)?,
            None => lock.try_clone().map_err(failed)?,
        };
        let file = Arc::new(file);
        let mut journal = Self {
            room: Arc::new(MapSpace::new(Arc::clone(&file), 0)),
            engine: Arc::clone(engine),
            dir: dir.clone(),
            dir_file,
            file,
            header,
            tail: 0,
            zeroes_end: 0,
            checkpoint_bytes: 0,
            encrypted_bytes: 0,
            retry_bytes: 0,
            sequence: 1,
            epoch: 0,
            generation_limit: 1,
            broken: false,
        };
        let mut first_generation = random_generation()?;
        // Durable with the directory: before the first map is, or an old one is gone on with.
        let id = identity(&dir, recovered.is_none()).map_err(failed)?;
        if let Some((records, scan)) = &mut recovered {
            first_generation = next_session(scan.generation_limit)?;
            journal.resume(records, scan).map_err(failed)?;
        }
        Ok(Opened { journal, lock, data: dir.join(DATA_FILE), recovered, first_generation, id })
    }

    /// Goes on behind the last commit that counts, once all that was read is durable.
    ///
    /// What was read may be in the page cache alone: the last session ended between a write and its sync, or the sync
    /// failed, after which the pages count as clean although the disk never took them. Commits that follow, and positions
    /// that are given back because of it, would then lie over a map that a power cut takes back. The same bytes in the same
    /// place do no harm where they were durable, and take no space.
    fn resume(&mut self, records: &mut Window<File>, scan: &Scan) -> io::Result<()> {
        self.tail = scan.end;
        self.zeroes_end = records.len();
        self.room.moved(&self.file, self.tail);
        self.sequence = scan.next_sequence;
        self.epoch = scan.epoch;
        if !records.is_zero_from(scan.end)? {
            tracing::info!(
                bytes = records.len() - scan.end,
                "dropping what a crash left of an unfinished commit"
            );
            self.engine.set_len(&self.file, self.tail)?;
            self.zeroes_end = self.tail;
        }
        let mut at = 0;
        while at < scan.end {
            let bytes = records.from(at)?;
            let count = usize::try_from(scan.end - at).unwrap_or(usize::MAX).min(bytes.len());
            let bytes = bytes.get(..count).filter(|bytes| !bytes.is_empty());
            let bytes = bytes.ok_or(io::ErrorKind::UnexpectedEof)?;
            self.engine.write_at(&self.file, bytes, at)?;
            at += bytes.len() as u64;
        }
        self.engine.sync(&self.file)?;
        // The rename of the last checkpoint, too.
        self.engine.sync_dir(&self.dir_file)?;
        // A map that a crash left half written means nothing and takes space. Where it stays, the next checkpoint takes it away.
        let _ = std::fs::remove_file(self.dir.join("map.new"));
        Ok(())
    }

    /// Writes the first commit of a session, which reserves its generations.
    pub fn begin(&mut self, is_new: bool, first_generation: u64) -> Result<(), IoError> {
        self.generation_limit = first_generation;
        let records = Encoder::new(self.sequence);
        let done = if is_new { self.checkpoint(records) } else { self.append(records, true) };
        done.map_err(|e| self.error(e))
    }

    /// Generations below this may be used.
    pub fn generation_limit(&self) -> u64 {
        self.generation_limit
    }

    /// Whether the next commit should be a checkpoint, of at least so many bytes (what else it takes, for blocks that are zero,
    /// tells the last one): the map is long, or holds many sealed slots.
    pub fn wants_checkpoint(&self, least_bytes: u64) -> bool {
        let checkpoint_bytes = least_bytes.max(self.checkpoint_bytes);
        let most = (checkpoint_bytes * CHECKPOINT_RATIO).max(MIN_CHECKPOINT_BYTES);
        // Not more often than what is written anew is worth.
        let most_sealed = checkpoint_bytes.max(MAX_SEALED_BYTES);
        let is_due =
            self.tail.saturating_sub(self.encrypted_bytes) > most || self.encrypted_bytes >= most_sealed;
        is_due && self.tail > self.retry_bytes
    }

    /// Whether a commit may have sealed slots in it: not while they cannot be taken out again by a checkpoint.
    pub fn takes_encrypted(&self) -> bool {
        self.retry_bytes == 0
    }

    /// The space of the map.
    pub fn room(&self) -> Arc<MapSpace> {
        Arc::clone(&self.room)
    }

    /// Number of the last commit.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether only opening the cache again helps.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// A sync of the data failed, or one here: what is on disk is not known any more.
    pub fn set_broken(&mut self) {
        self.broken = true;
    }

    fn next_limit(&self) -> u64 {
        self.generation_limit.saturating_add(GENERATION_STEP)
    }

    /// Sequence number of the first record of the next commit.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Adds a commit of these records, and makes it durable. `reserve`: with new generations.
    pub fn append(&mut self, mut records: Encoder, reserve: bool) -> io::Result<()> {
        let limit = if reserve { self.next_limit() } else { self.generation_limit };
        records.commit(self.epoch + 1, limit);
        let encrypted_bytes = records.encrypted_bytes();
        let (mut bytes, sequence) = records.finish();
        let tail = self.tail + bytes.len() as u64;
        let zeroes_end = self.zeroes_behind(tail);
        bytes.resize(bytes.len() + usize::try_from(zeroes_end.saturating_sub(tail)).unwrap_or(0), 0);
        if let Err(error) = self.engine.write_at(&self.file, &bytes, self.tail) {
            // Records that were half written must not be taken for the end of a later commit.
            self.broken |= self.engine.set_len(&self.file, self.tail).is_err();
            self.zeroes_end = self.tail;
            self.room.cut();
            return Err(error);
        }
        if let Err(error) = self.engine.sync(&self.file) {
            self.broken = true;
            return Err(error);
        }
        self.tail = tail;
        self.encrypted_bytes += encrypted_bytes;
        self.zeroes_end = self.zeroes_end.max(zeroes_end);
        self.room.moved(&self.file, self.tail);
        (self.sequence, self.epoch, self.generation_limit) = (sequence, self.epoch + 1, limit);
        Ok(())
    }

    /// Where zeroes are to end that are written behind a commit which ends at `tail`: there, if it ends within earlier ones.
    fn zeroes_behind(&self, tail: u64) -> u64 {
        if tail <= self.zeroes_end {
            return tail;
        }
        // Not beyond what is claimed: they must not find the file system full where the commit alone would fit.
        self.room.claimed_end().min(tail + ZEROES_BYTES).max(tail)
    }

    /// Replaces the map by one commit of these records, which are all there are.
    pub fn checkpoint(&mut self, mut records: Encoder) -> io::Result<()> {
        let header = Header { first_sequence: self.sequence, ..self.header.clone() };
        let limit = self.next_limit();
        records.commit(self.epoch + 1, limit);
        let (records, sequence) = records.finish();
        let (new, map) = (self.dir.join("map.new"), self.dir.join("map"));
        let _ = std::fs::remove_file(&new);
        let write = || -> io::Result<Arc<File>> {
            let file = open_rw(&new, false)?;
            self.engine.write_at(&file, &header.encode(), 0)?;
            self.engine.write_at(&file, &records, HEADER_BYTES as u64)?;
            self.engine.sync(&file)?;
            Ok(Arc::new(file))
        };
        let file = match write() {
            Ok(file) => file,
            Err(error) => {
                // The space may be needed to go on with the old one, which is twice as long when this is tried again.
                let _ = std::fs::remove_file(&new);
                self.retry_bytes = self.tail * 2;
                return Err(error);
            }
        };
        // From here on nobody knows which of the two a crash leaves, so nothing may fail.
        let renamed = self.engine.rename(&new, &map).and_then(|()| self.engine.sync_dir(&self.dir_file));
        if let Err(error) = renamed {
            self.broken = true;
            return Err(error);
        }
        self.file = file;
        self.tail = (HEADER_BYTES + records.len()) as u64;
        self.zeroes_end = self.tail;
        self.checkpoint_bytes = self.tail;
        (self.encrypted_bytes, self.retry_bytes) = (0, 0);
        self.room.moved(&self.file, self.tail);
        (self.sequence, self.epoch, self.generation_limit) = (sequence, self.epoch + 1, limit);
        Ok(())
    }

    /// The error for a commit that failed.
    pub fn error(&self, error: io::Error) -> IoError {
        let place = self.dir.display();
        if self.broken {
            return IoError::with_source(
                IoErrorKind::Device,
                format!(
                    "the persistent cache {place} cannot be made durable any more: close the volume, check that disk, and open it again"
                ),
                error,
            );
        }
        IoError::from_os(
            format!("cannot write the persistent cache {place}; what was flushed before is safe"),
            error,
        )
    }
}

/// Refuses a cache that lost its map, or that was copied in part. A new one has its map before `data` gets space.
fn check_has_no_data(dir: &Path, map_is: &str) -> Result<(), IoError> {
    let data = dir.join("data");
    match std::fs::symlink_metadata(&data) {
        Ok(found) if found.is_file() && found.len() > 0 => Err(IoError::new(
            IoErrorKind::Corrupt,
            format!(
                "{} {map_is}, and only it says which blocks are in {}: bring it back, or remove {} to begin with an empty cache",
                dir.join("map").display(),
                data.display(),
                dir.display()
            ),
        )),
        // Whatever it is, it is opened next.
        _ => Ok(()),
    }
}

/// `expected`: the header of this cache's map.
fn check_header(dir: &Path, bytes: &[u8], expected: &Header) -> Result<Header, IoError> {
    let place = dir.join("map");
    let place = place.display();
    let unreadable = |why: String| IoError::new(IoErrorKind::Corrupt, why);
    let found = match Header::decode(bytes) {
        Ok(found) => found,
        Err(HeaderFault::NotAMap) => {
            check_has_no_data(dir, "is not the map of a persistent cache")?;
            return Err(unreadable(format!(
                "{place} is not the map of a persistent cache; remove {} to begin with an empty cache",
                dir.display()
            )));
        }
        Err(HeaderFault::Version(version)) => {
            return Err(unreadable(format!(
                "{place} has format version {version}, and this program reads version {VERSION} only: copy what is in the cache with the release that wrote it, or remove {} to begin with an empty cache",
                dir.display()
            )));
        }
        Err(HeaderFault::Damaged) => return Err(damaged(dir, 0)),
    };
    if found.base_id != expected.base_id {
        return Err(invalid(format!(
            "the persistent cache {} belongs to base {}, and this volume lies over base {}: give the right base, or another name",
            dir.display(),
            hex(&found.base_id),
            hex(&expected.base_id)
        )));
    }
    if found.size_bytes != expected.size_bytes {
        return Err(invalid(format!(
            "the persistent cache {} belongs to a base of {} bytes, and this one ({}) has {} bytes",
            dir.display(),
            found.size_bytes,
            hex(&expected.base_id),
            expected.size_bytes
        )));
    }
    if found.key_check != expected.key_check {
        return Err(invalid(format!(
            "the key given is not the one of the persistent cache {}: give the key file it was made with",
            dir.display()
        )));
    }
    Ok(found)
}

fn refused(dir: &Path, fault: ScanFault) -> IoError {
    match fault {
        ScanFault::NoCommit => damaged(dir, HEADER_BYTES as u64),
        ScanFault::Damaged(at) => damaged(dir, at),
    }
}

/// The error for a map that was changed behind our back.
pub fn damaged(dir: &Path, at: u64) -> IoError {
    IoError::new(
        IoErrorKind::Corrupt,
        format!(
            "the map of the persistent cache {} is damaged near byte {at}: check that disk; what was written since cannot be read back, remove the directory to begin with an empty cache",
            dir.display()
        ),
    )
}
