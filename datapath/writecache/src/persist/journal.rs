//! The directory of a persistent cache: its lock, its `data` file, and the `map` to which commits are added.
//!
//! ```text
//!  CACHE-DIR/NAME/lock       locked (flock) by the process that has the cache open
//!                 data       encrypted slots; see [`crate::overflow`]
//!                 map        header, then records up to the last commit, then zeroes; see [`super::format`]
//!                 map.new    the next map while it is written; renamed over `map`
//!                 id         identity of this cache; see [`super::directory::identity`]
//! ```
//! A *commit* is the records of one epoch. A *checkpoint* is a new map: one commit with the whole state. A small
//! commit also contains its slots, encrypted, in the map; a later commit or spill writes these slots to `data`,
//! and a checkpoint leaves them out. A *generation* is the part of a nonce that no two segments share: commits
//! reserve generations in advance. Epochs and segments are explained in [`super`].
//!
//! This module does not write `data`, and does not decide when to commit or what a commit contains: see
//! [`super::commit`] and `epoch.rs`.
//!
//! Legal outcomes of a crash while a commit is added: {without it, with it}. Of a crash while a checkpoint
//! replaces the map: {the old map, the new one}, so without the checkpoint's commit or with it.
//!
//! The zeroes are written in advance for later commits. So a sync after a commit changes neither the file's
//! length nor the state of its extents, and needs no entry in the file system's own journal, which would take
//! longer than the commit.

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

/// Number of generations that a commit reserves: as many segments may be begun before the next commit.
pub const GENERATION_STEP: u64 = 1 << 20;

/// Each opening skips at most this fraction (1 / `JUMP_DIVISOR`) of the generations that are left.
const JUMP_DIVISOR: u64 = 1 << 14;

/// A shorter map is not replaced by a checkpoint.
const MIN_CHECKPOINT_BYTES: u64 = if UNDER_MODEL_CHECKER { 1 << 10 } else { 64 << 10 };

/// A map that is longer than this many checkpoints is replaced by one.
const CHECKPOINT_RATIO: u64 = 4;

/// A map with this many bytes of encrypted slots is replaced by a checkpoint. If the checkpoint is expected to be
/// longer than this, the expected length is the threshold instead.
const MAX_ENCRYPTED_BYTES: u64 = if UNDER_MODEL_CHECKER { 16 << 10 } else { 8 << 20 };

/// Number of zeroes that are written after a commit that exceeds earlier zeroes, within the claimed space.
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
    /// Offset of the next commit.
    tail: u64,
    /// Offset of the end of the zeroes after it.
    zeroes_end: u64,
    /// Length of the map after the last checkpoint; 0 if there was none in this session.
    checkpoint_bytes: u64,
    /// Bytes of encrypted slots that this session added to the map. The slots of earlier sessions are in the data file
    /// too, since this cache was opened.
    encrypted_bytes: u64,
    /// After a failed checkpoint: the next one is tried when the map has this length.
    retry_bytes: u64,
    sequence: u64,
    epoch: u64,
    /// Generations below this are reserved by a durable commit.
    generation_limit: u64,
    /// After a failure that leaves the contents of the disk unknown.
    broken: bool,
}

/// The result of opening a journal.
pub struct Opened {
    /// The journal.
    pub journal: Journal,
    /// Held while the cache is open.
    pub lock: Lock,
    /// Path of the data file.
    pub data: PathBuf,
    /// The map and the end of its last commit; `None`: the cache is new.
    pub recovered: Option<(Window<File>, Scan)>,
    /// The first generation that may be used.
    pub first_generation: u64,
    /// The identity of this cache.
    pub id: [u8; ID_BYTES],
}

fn invalid(why: String) -> IoError {
    IoError::new(IoErrorKind::Invalid, why)
}

/// The first generation of a new cache: random, so that no nonce repeats if a cache is removed and made again
/// with the same key. Never 0, and far from the end.
fn random_generation() -> Result<u64, IoError> {
    Ok((random()? >> 2) | 1)
}

/// The first generation of a session.
///
/// A session that crashed has begun at most one commit after the last complete one, and that commit may have
/// reserved one more step. Also, the cache may be an older copy: the cache that continued from there used the
/// next generations, with the same key. So a random number of generations is skipped, about 2^49 for a new
/// cache. They suffice for tens of thousands of openings before the skipped range is half as wide.
fn next_session(generation_limit: u64) -> Result<u64, IoError> {
    let first = generation_limit.saturating_add(GENERATION_STEP);
    let widest = (u64::MAX - first) / JUMP_DIVISOR;
    Ok(first.saturating_add(random()? % widest.max(1)))
}

fn random() -> Result<u64, IoError> {
    let mut bytes = [0u8; 8];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|e| IoError::new(IoErrorKind::Device, format!("the system gave no random bytes: {e}")))?;
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
            "'{name}' is not a valid name for a persistent cache: use 1 to {MAX_NAME_BYTES} letters, digits, '-', '_' and '.', not beginning with '.'"
        )));
    }
    Ok(())
}

impl Journal {
    /// Opens the cache; makes it if it does not exist.
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
                "a persistent cache needs a directory, but {} is not one",
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
        // Durable with the directory: before the first map is written, or before an old map is continued.
        let id = identity(&dir, recovered.is_none()).map_err(failed)?;
        if let Some((records, scan)) = &mut recovered {
            first_generation = next_session(scan.generation_limit)?;
            journal.resume(records, scan).map_err(failed)?;
        }
        Ok(Opened { journal, lock, data: dir.join(DATA_FILE), recovered, first_generation, id })
    }

    /// Continues after the last valid commit, once all that was read is durable.
    ///
    /// The bytes that were read may be only in the page cache: the last session ended between a write and its
    /// sync, or the sync failed, after which the pages count as clean although the disk never took them.
    /// Later commits, and positions that are freed because of them, would then depend on a map that a power
    /// cut takes back. Writing the same bytes again in the same place is harmless if they were durable, and
    /// takes no space.
    fn resume(&mut self, records: &mut Window<File>, scan: &Scan) -> io::Result<()> {
        self.tail = scan.end;
        self.zeroes_end = records.len();
        self.room.moved(&self.file, self.tail);
        self.sequence = scan.next_sequence;
        self.epoch = scan.epoch;
        if !records.is_zero_from(scan.end)? {
            tracing::info!(
                bytes = records.len() - scan.end,
                "dropping a commit that a crash interrupted; earlier flushes are kept"
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
        // This makes the rename of the last checkpoint durable, too.
        self.engine.sync_dir(&self.dir_file)?;
        // A half-written map that a crash left is useless and takes space. If it cannot be removed, the next
        // checkpoint overwrites it.
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

    /// Whether the map should be replaced by a checkpoint with the next commit: it is long, or has many encrypted
    /// slots. `least_bytes`: a lower bound of the checkpoint's length, without its zero blocks. If the last checkpoint
    /// was longer, its length is used instead.
    pub fn wants_checkpoint(&self, least_bytes: u64) -> bool {
        let checkpoint_bytes = least_bytes.max(self.checkpoint_bytes);
        let most = (checkpoint_bytes * CHECKPOINT_RATIO).max(MIN_CHECKPOINT_BYTES);
        // Not so often that writing the map again costs more than it saves.
        let most_encrypted = checkpoint_bytes.max(MAX_ENCRYPTED_BYTES);
        let is_due =
            self.tail.saturating_sub(self.encrypted_bytes) > most || self.encrypted_bytes >= most_encrypted;
        is_due && self.tail > self.retry_bytes
    }

    /// Whether a commit may contain encrypted slots in the map: not after a failed checkpoint until another one
    /// succeeds, because only a checkpoint removes them from the map.
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

    /// Called when a sync of the data failed, or one here: the contents of the disk are unknown.
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

    /// Adds a commit of these records, and makes it durable. `reserve`: also reserves new generations.
    pub fn append(&mut self, mut records: Encoder, reserve: bool) -> io::Result<()> {
        let limit = if reserve { self.next_limit() } else { self.generation_limit };
        records.commit(self.epoch + 1, limit);
        let encrypted_bytes = records.encrypted_bytes();
        let (mut bytes, sequence) = records.finish();
        let tail = self.tail + bytes.len() as u64;
        let zeroes_end = self.zeroes_behind(tail);
        bytes.resize(bytes.len() + usize::try_from(zeroes_end.saturating_sub(tail)).unwrap_or(0), 0);
        if let Err(error) = self.engine.write_at(&self.file, &bytes, self.tail) {
            // Half-written records must not be taken for the end of a later commit.
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

    /// Offset of the end of the zeroes to write after a commit that ends at `tail`; `tail` itself, if earlier
    /// zeroes extend beyond it.
    fn zeroes_behind(&self, tail: u64) -> u64 {
        if tail <= self.zeroes_end {
            return tail;
        }
        // Only within the claimed space, so that they do not fill a file system on which the commit alone
        // would fit.
        self.room.claimed_end().min(tail + ZEROES_BYTES).max(tail)
    }

    /// Replaces the map by one commit of these records, which contain the whole state.
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
                // The old map may need the space to grow until this is tried again, when it is twice as long.
                let _ = std::fs::remove_file(&new);
                self.retry_bytes = self.tail * 2;
                return Err(error);
            }
        };
        // If a step fails from here on, either of the two maps may be on the disk, so the journal is broken.
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

    /// The error of a failed commit.
    pub fn error(&self, error: io::Error) -> IoError {
        let place = self.dir.display();
        if self.broken {
            return IoError::with_source(
                IoErrorKind::Device,
                format!(
                    "the persistent cache {place} cannot be made durable any more: close the volume, check the disk that contains this directory, and open the volume again"
                ),
                error,
            );
        }
        IoError::from_os(
            format!("cannot write the persistent cache {place}; earlier flushes are safe"),
            error,
        )
    }
}

/// Refuses a cache that lost its map, or that was copied partly. A new cache has its map before `data` gets
/// space.
fn check_has_no_data(dir: &Path, map_is: &str) -> Result<(), IoError> {
    let data = dir.join("data");
    match std::fs::symlink_metadata(&data) {
        Ok(found) if found.is_file() && found.len() > 0 => Err(IoError::new(
            IoErrorKind::Corrupt,
            format!(
                "{} {map_is}, and without the map the blocks in {} cannot be found: restore the map, or remove {} to start with an empty cache",
                dir.join("map").display(),
                data.display(),
                dir.display()
            ),
        )),
        // If it is of another kind, opening it reports that.
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
                "{place} is not the map of a persistent cache; remove {} to start with an empty cache",
                dir.display()
            )));
        }
        Err(HeaderFault::Version(version)) => {
            return Err(unreadable(format!(
                "{place} has format version {version}, but this program reads only version {VERSION}: to keep the cache's contents, copy them out with the release that wrote it ('headwater export' and nbdcopy); to lose them and start with an empty cache, remove {}",
                dir.display()
            )));
        }
        Err(HeaderFault::Damaged) => return Err(damaged(dir, 0)),
    };
    if found.base_id != expected.base_id {
        return Err(invalid(format!(
            "the persistent cache {} belongs to base {}, but this volume has base {}: give the right base, or another name",
            dir.display(),
            hex(&found.base_id),
            hex(&expected.base_id)
        )));
    }
    if found.size_bytes != expected.size_bytes {
        return Err(invalid(format!(
            "the persistent cache {} belongs to a base of {} bytes, but this base ({}) has {} bytes: give the right base, or another name",
            dir.display(),
            found.size_bytes,
            hex(&expected.base_id),
            expected.size_bytes
        )));
    }
    if found.key_check != expected.key_check {
        return Err(invalid(format!(
            "the given key is not that of the persistent cache {}: give the key file with which it was made",
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

/// The error for a map that another program damaged.
pub fn damaged(dir: &Path, at: u64) -> IoError {
    IoError::new(
        IoErrorKind::Corrupt,
        format!(
            "the map of the persistent cache {} is damaged near byte {at}: check the disk that contains this directory; later writes cannot be recovered, so remove the directory to start with an empty cache",
            dir.display()
        ),
    )
}
