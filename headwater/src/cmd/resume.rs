//! Stores the positions of the vhost-user rings when `headwater export --vhost-user --persistent` ends in order, so
//! that a running machine can continue with the next export.
//!
//! ```text
//!   start: the file is read and removed        a machine whose rings are at these positions may continue
//!   end in order: all requests answered, flushed, closed, then the file is written
//!   kill -9, power cut: there is no file       the machine must be restarted: answered writes may be lost
//! ```

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use headwater_vhost_user::Positions;

use crate::replace::replace;

/// The file's name in the directory of the persistent cache.
const NAME: &str = "vhost-user";

/// More than the size of the positions of all queues.
const MAX_BYTES: u64 = 64 << 10;

/// Opens the file without following a link.
fn open(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0);
    options.custom_flags(no_follow).open(path)
}

/// The file with the positions of the vhost-user rings, beside one persistent cache.
pub struct Resume {
    dir: PathBuf,
}

impl Resume {
    /// The file for the cache in `dir`.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Reads and removes the file, which can be used once.
    pub fn take(&self) -> anyhow::Result<Option<Positions>> {
        let path = self.dir.join(NAME);
        let failed = || format!("cannot read the ring positions of a machine from {}", path.display());
        let mut text = String::new();
        match open(OpenOptions::new().read(true), &path) {
            Ok(file) => file.take(MAX_BYTES).read_to_string(&mut text).with_context(failed)?,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(failed),
        };
        let positions = Positions::parse(&text).map_err(anyhow::Error::msg).with_context(failed)?;
        std::fs::remove_file(&path).and_then(|()| self.sync()).with_context(failed)?;
        Ok(Some(positions))
    }

    /// Writes the file for the next export. The contents of the cache must be durable already.
    pub fn leave(&self, positions: &Positions) -> anyhow::Result<()> {
        let path = self.dir.join(NAME);
        // Atomically, because a partial file would be an error at the next export.
        replace(&path, format!("{positions}\n").as_bytes(), 0o600)
            .with_context(|| format!("cannot write the ring positions of the machine to {}", path.display()))
    }

    fn sync(&self) -> std::io::Result<()> {
        File::open(&self.dir)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_is_taken_once_and_nonsense_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("lab")).unwrap();
        let resume = Resume::new(&dir.path().join("lab"));
        assert_eq!(resume.take().unwrap(), None);
        let positions = Positions::parse("7 -").unwrap();
        resume.leave(&positions).unwrap();
        assert_eq!(resume.take().unwrap(), Some(positions));
        assert_eq!(resume.take().unwrap(), None);
        std::fs::write(dir.path().join("lab").join(NAME), "seven").unwrap();
        let error = format!("{:#}", resume.take().unwrap_err());
        assert!(error.contains("lab/vhost-user") && error.contains("'seven'"), "{error}");
    }

    #[test]
    fn half_of_what_was_to_be_left_is_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let resume = Resume::new(dir.path());
        let positions = Positions::parse("7 -").unwrap();
        resume.leave(&positions).unwrap();
        let mut before = File::open(dir.path().join(NAME)).unwrap();
        resume.leave(&Positions::parse("9 -").unwrap()).unwrap();
        // The old file stays until the new one is complete.
        let mut text = String::new();
        before.read_to_string(&mut text).unwrap();
        assert_eq!(Positions::parse(&text).unwrap(), positions);
        resume.take().unwrap().unwrap();
        // A power cut during the write left this temporary file.
        std::fs::write(dir.path().join(".headwater-0.new"), "1").unwrap();
        assert_eq!(resume.take().unwrap(), None);
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, target) = (dir.path().join("lab"), dir.path().join("target"));
        std::fs::create_dir(&cache).unwrap();
        std::fs::write(&target, "7 -").unwrap();
        std::os::unix::fs::symlink(&target, cache.join(NAME)).unwrap();
        let resume = Resume::new(&cache);
        assert!(resume.take().is_err());
        resume.leave(&Positions::parse("9 -").unwrap()).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"7 -");
        assert_eq!(std::fs::read(cache.join(NAME)).unwrap(), b"9 -\n");
    }
}
