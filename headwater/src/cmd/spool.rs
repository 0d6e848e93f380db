//! Standard input as a file: disks are not read from front to back, so it is kept in a file without a name.
//!
//! The file lies in the data directory, where images go, and is gone with this process however that ends. The
//! daemon opens it through `/proc`, which it may because its socket is only for its own user.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::Context;
use rustix::fs::{Mode, OFlags};

/// How much is read at a time; what is all zero takes no space.
const PIECE_BYTES: usize = 64 << 10;

/// A file that holds what standard input gave.
pub struct Spooled {
    file: File,
}

impl Spooled {
    /// Reads standard input to its end into a file in `dir`.
    pub fn standard_input(dir: &Path) -> anyhow::Result<Self> {
        let failed = || format!("cannot keep the standard input in {}", dir.display());
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)
            .map_err(std::io::Error::from)
            .with_context(failed)?;
        let mut spooled = Self { file: File::from(file) };
        spooled.fill(&mut std::io::stdin().lock()).with_context(failed)?;
        Ok(spooled)
    }

    fn fill(&mut self, from: &mut impl Read) -> std::io::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        let mut len_bytes = 0u64;
        loop {
            let len = match from.read(&mut piece) {
                Ok(0) => break,
                Ok(len) => len,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            let data = piece.get(..len).unwrap_or_default();
            if data.iter().all(|byte| *byte == 0) {
                self.file.seek(SeekFrom::Current(i64::try_from(len).unwrap_or(0)))?;
            } else {
                self.file.write_all(data)?;
            }
            len_bytes += u64::try_from(len).unwrap_or(0);
        }
        self.file.set_len(len_bytes)
    }

    /// How the daemon opens it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }
}
