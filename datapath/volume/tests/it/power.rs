//! A disk that loses power: writes that were not synced are kept or lost at random, sector by sector.
//!
//! The files have all written data ("live"). For each sector that was written since the last sync, the engine
//! keeps the earlier contents ("durable"). A crash restores a random part of the latter.
//!
//! A sync can be made to fail. As with a kernel, its data is then lost in a crash, whatever later syncs
//! report.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use headwater_testkit::Rng;
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};

const SECTOR: u64 = 512;

/// The state of a file before it was written without a sync.
struct Undo {
    /// The same file, through the page cache.
    file: File,
    durable_len: u64,
    sectors: BTreeMap<u64, Vec<u8>>,
    /// Whether a sync of it failed.
    lost: bool,
}

impl Undo {
    fn of(file: &File) -> Self {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(path).expect("the file is there");
        let durable_len = file.metadata().expect("it is open").len();
        Self { file, durable_len, sectors: BTreeMap::new(), lost: false }
    }

    fn remember(&mut self, offset: u64, len: u64) {
        let missing: Vec<u64> = (offset / SECTOR..(offset + len).div_ceil(SECTOR))
            .filter(|sector| !self.sectors.contains_key(sector))
            .collect();
        for sector in missing {
            let mut old = vec![0; SECTOR as usize];
            let mut read = 0;
            while read < old.len() {
                match self.file.read_at(&mut old[read..], sector * SECTOR + read as u64).expect("it reads") {
                    0 => break,
                    n => read += n,
                }
            }
            self.sectors.insert(sector, old);
        }
    }

    fn crash(self, rng: &mut Rng) {
        let live_len = self.file.metadata().expect("it is open").len();
        // Nothing, everything, or a part gets lost.
        let keep_of_4 = if self.lost { 0 } else { rng.below(5) };
        for (sector, old) in &self.sectors {
            if !rng.chance(keep_of_4, 4) {
                self.file.write_all_at(old, sector * SECTOR).expect("it writes");
            }
        }
        let len = match live_len.checked_sub(self.durable_len) {
            // The end may not have moved yet, or not as far.
            Some(_) if self.lost => self.durable_len,
            Some(grown) if rng.chance(1, 2) => self.durable_len + rng.between(0, grown),
            Some(_) => live_len,
            None => self.durable_len,
        };
        self.file.set_len(len).expect("it can be cut");
    }
}

/// The operation that fails, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fails {
    /// The sync of the file with this name.
    SyncOf(&'static str),
    /// A rename over an existing file.
    Rename,
    /// The sync of a directory.
    SyncDir,
}

fn input_output_error() -> io::Error {
    io::Error::from_raw_os_error(5)
}

#[derive(Default)]
struct State {
    fails: Option<Fails>,
    undo: HashMap<u64, Undo>,
    /// A name whose change was not synced, and the file that it named before.
    renamed: Option<(PathBuf, Option<Vec<u8>>)>,
    /// Syncs do nothing, and report success.
    lies: bool,
    /// Operations until the power fails; 0: it has failed; `None`: it does not fail.
    left: Option<u64>,
}

/// The engine of such a disk; see the module's documentation.
pub struct CrashEngine {
    real: Arc<dyn IoEngine>,
    state: Mutex<State>,
}

fn gone() -> io::Error {
    io::Error::other("the power is gone")
}

impl State {
    /// Counts an operation. Returns whether there is power for it, and whether the power fails during it.
    fn step(&mut self) -> io::Result<bool> {
        match &mut self.left {
            None => Ok(false),
            Some(0) => Err(gone()),
            Some(left) => {
                *left -= 1;
                Ok(*left == 0)
            }
        }
    }

    /// Whether this operation is to fail; the next time it does not.
    fn fails(&mut self, what: Fails) -> bool {
        self.fails.take_if(|fails| *fails == what).is_some()
    }

    fn undo(&mut self, file: &File) -> &mut Undo {
        let number = file.metadata().expect("it is open").ino();
        self.undo.entry(number).or_insert_with(|| Undo::of(file))
    }
}

impl CrashEngine {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { real: open_engine().expect("an engine"), state: Mutex::default() })
    }

    /// The power fails during the operation with this number from now on, counted from 1.
    pub fn crash_after(&self, operations: u64) {
        self.state.lock().unwrap().left = Some(operations);
    }

    /// From now on syncs do nothing, and report success.
    pub fn lie(&self) {
        self.state.lock().unwrap().lies = true;
    }

    /// The next operation of this kind fails with an input/output error.
    pub fn fail(&self, what: Fails) {
        self.state.lock().unwrap().fails = Some(what);
    }

    /// Whether the operation that was to fail has failed.
    pub fn has_failed(&self) -> bool {
        self.state.lock().unwrap().fails.is_none()
    }

    /// Whether the power has failed.
    pub fn is_gone(&self) -> bool {
        self.state.lock().unwrap().left == Some(0)
    }

    /// Writes to disk what a crash leaves.
    pub fn crash(&self, rng: &mut Rng) {
        let mut state = self.state.lock().unwrap();
        state.left = Some(0);
        if let Some((path, old)) = state.renamed.take()
            && rng.chance(1, 2)
        {
            match old {
                Some(bytes) => std::fs::write(&path, bytes).expect("it writes"),
                None => std::fs::remove_file(&path).expect("it is there"),
            }
        }
        let mut files: Vec<(u64, Undo)> = state.undo.drain().collect();
        files.sort_by_key(|(number, _)| *number);
        files.into_iter().for_each(|(_, undo)| undo.crash(rng));
    }
}

impl IoEngine for CrashEngine {
    fn submit(&self, op: IoOp) {
        {
            let mut state = self.state.lock().unwrap();
            let power = match op.direction {
                Direction::Read if state.left == Some(0) => Err(gone()),
                Direction::Read => Ok(false),
                Direction::Write => state.step(),
            };
            if power.is_ok() && op.direction == Direction::Write {
                state.undo(&op.file).remember(op.offset, op.len as u64);
            }
            match power {
                Ok(false) => {}
                Ok(true) => {
                    // Written, as far as the crash leaves it, and not answered with success.
                    op.file.write_all_at(&op.buffer[..op.len], op.offset).expect("it writes");
                    std::thread::spawn(move || (op.done)(Err(gone()), op.buffer));
                    return;
                }
                Err(error) => {
                    std::thread::spawn(move || (op.done)(Err(error), op.buffer));
                    return;
                }
            }
        }
        self.real.submit(op);
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.step()? {
            return Err(gone());
        }
        let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let name = name.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(Fails::SyncOf(fails)) = state.fails
            && fails == name
        {
            state.fails = None;
            state.undo(file).lost = true;
            return Err(input_output_error());
        }
        if !state.lies && !state.undo(file).lost {
            state.undo.remove(&file.metadata()?.ino());
        }
        Ok(())
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let last = state.step()?;
        state.undo(file).remember(offset, bytes.len() as u64);
        file.write_all_at(bytes, offset)?;
        if last { Err(gone()) } else { Ok(()) }
    }

    fn set_len(&self, file: &File, len: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let last = state.step()?;
        let now = file.metadata()?.len();
        state.undo(file).remember(len, now.saturating_sub(len));
        file.set_len(len)?;
        if last { Err(gone()) } else { Ok(()) }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        let last = state.step()?;
        if state.fails(Fails::Rename) {
            return Err(input_output_error());
        }
        state.renamed = Some((to.to_path_buf(), std::fs::read(to).ok()));
        std::fs::rename(from, to)?;
        if last { Err(gone()) } else { Ok(()) }
    }

    fn sync_dir(&self, _: &File) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.step()? {
            return Err(gone());
        }
        if state.fails(Fails::SyncDir) {
            return Err(input_output_error());
        }
        state.renamed = None;
        Ok(())
    }
}
