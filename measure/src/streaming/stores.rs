//! Makes stores to read from: generated raw disks that a daemon imports, as for a user.

use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_testkit::Rng;

use crate::Plan;
use crate::systems::{Process, own_dir};

/// A store in the work directory. Dropping it removes the store.
pub struct Made {
    dir: PathBuf,
}

impl Made {
    /// Creates an empty data directory of this name for a daemon.
    pub fn new(plan: &Plan, name: &str) -> Result<Self> {
        let dir = plan.work_dir.join(name);
        own_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self { dir: dir.canonicalize()? })
    }

    /// Creates a store that contains a raw disk as image `image`.
    pub fn import(plan: &Plan, name: &str, raw: &Path, image: &str) -> Result<Self> {
        let made = Self::new(plan, name)?;
        println!("  importing {} ({})", image, headwater_block::size::format(std::fs::metadata(raw)?.len()));
        made.daemon(plan)?.import(raw, image)?;
        Ok(made)
    }

    /// Starts a daemon on the data directory. Dropping the result ends the daemon.
    pub fn daemon(&self, plan: &Plan) -> Result<Importer> {
        let mut command = Command::new(&plan.headwater);
        command.arg("serve").arg("--data-dir").arg(&self.dir);
        let daemon = Process::start(&mut command, "headwater serve")?;
        let start = Instant::now();
        while UnixStream::connect(self.dir.join("api.sock")).is_err() {
            if start.elapsed() > Duration::from_secs(30) {
                bail!("headwater serve was not ready within 30 s: {}", daemon.last_line());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Importer { _daemon: daemon, dir: self.dir.clone(), headwater: plan.headwater.clone() })
    }

    /// The directory of the store.
    pub fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Total size of its data objects.
    pub fn objects_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for entry in walk(&self.store().join("objects"))? {
            bytes += std::fs::metadata(entry)?.len();
        }
        Ok(bytes)
    }

    /// The path of the largest data object, relative to the store's root.
    pub fn largest_object(&self) -> Result<PathBuf> {
        let objects = walk(&self.store().join("objects"))?;
        let largest = objects
            .into_iter()
            .max_by_key(|path| std::fs::metadata(path).map_or(0, |metadata| metadata.len()));
        let path = largest.context("the store has no data objects")?;
        Ok(path.strip_prefix(self.store())?.to_owned())
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("cannot remove {}: {error}", self.dir.display());
        }
    }
}

/// A running daemon that imports images.
pub struct Importer {
    _daemon: Process,
    dir: PathBuf,
    headwater: PathBuf,
}

impl Importer {
    /// Imports a raw disk as a new version.
    pub fn import(&self, raw: &Path, image: &str) -> Result<()> {
        let mut command = Command::new(&self.headwater);
        command.args(["image", "import"]).arg(raw.canonicalize()?).args(["--name", image]);
        let output = command.env("HEADWATER_DATA_DIR", &self.dir).output().context("cannot run headwater")?;
        if !output.status.success() {
            bail!(
                "the import of {} failed: {}",
                raw.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }
}

fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(walk(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

/// Generates distinct 4 KiB blocks, half of whose bytes are incompressible.
pub struct Blocks(Rng);

impl Blocks {
    /// Equal seeds give equal blocks.
    pub fn new(seed: u64) -> Self {
        Self(Rng::new(seed))
    }

    /// The next block.
    pub fn next_block(&mut self) -> [u8; 4096] {
        let mut block = [b'.'; 4096];
        self.0.fill(&mut block[..2048]);
        block
    }
}

/// Writes a raw disk of such blocks.
pub fn make_disk(path: &Path, bytes: u64, seed: u64) -> Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
    let mut blocks = Blocks::new(seed);
    for _ in 0..bytes / 4096 {
        file.write_all(&blocks.next_block()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    Ok(())
}

/// Copies the data of a raw disk, without its holes, to a new file.
pub fn without_holes(from: &Path, to: &Path) -> Result<u64> {
    use std::os::unix::fs::FileExt;
    let (source, mut target) = (std::fs::File::open(from)?, BufWriter::new(std::fs::File::create(to)?));
    let (mut at, mut copied, mut buffer) = (0, 0, vec![0; 1 << 20]);
    while let Ok(start) = rustix::fs::seek(&source, rustix::fs::SeekFrom::Data(at)) {
        let end = rustix::fs::seek(&source, rustix::fs::SeekFrom::Hole(start))?;
        at = start;
        while at < end {
            let len = usize::try_from((end - at).min(1 << 20))?;
            source.read_exact_at(&mut buffer[..len], at)?;
            target.write_all(&buffer[..len])?;
            at += u64::try_from(len)?;
            copied += u64::try_from(len)?;
        }
    }
    target.flush()?;
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_differ_and_are_repeatable_by_seed() {
        let (mut one, mut same, mut other) = (Blocks::new(1), Blocks::new(1), Blocks::new(2));
        let first = one.next_block();
        assert!(first == same.next_block() && first != other.next_block() && first != one.next_block());
    }

    #[test]
    fn holes_are_not_copied() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = std::fs::File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[7; 65536], 32 << 20).unwrap();
        drop(file);
        let copied = without_holes(&from, &to).unwrap();
        assert!((65536..1 << 20).contains(&copied), "{copied}");
        assert!(std::fs::read(&to).unwrap().contains(&7));
    }
}
