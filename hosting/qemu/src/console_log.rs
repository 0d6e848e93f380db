//! Following the log of a serial console: is there a login prompt? And keeping it and QEMU's own log small.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// What a text console prints when the system is up.
const PROMPT: &[u8] = b"login:";

/// What SeaBIOS and the boot code in a first sector print when they find nothing to boot and stop.
const NO_BOOT: [&[u8]; 4] = [
    b"No bootable device",
    b"This is not a bootable disk",
    b"Missing operating system",
    b"Operating system not found",
];

/// The end of a look that is kept for the next look: no text that is looked for is longer.
const TAIL_BYTES: usize = 32;

/// When a log is longer than this it is moved to `NAME.log.old`, in bytes. A guest that prints without end, or
/// that has QEMU complain about it without end, must not fill the host's disk.
pub(crate) const MAX_LOG_BYTES: u64 = 16 << 20;

/// The most that is read at one look, in bytes.
const MAX_LOOK_BYTES: u64 = 1 << 20;

/// Reads what was added to a console log since the last look.
#[derive(Debug)]
pub(crate) struct ConsoleLog {
    path: PathBuf,
    offset: u64,
    /// The end of the last look: the prompt may be cut in two.
    tail: Vec<u8>,
    no_boot: Option<String>,
}

impl ConsoleLog {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), offset: 0, tail: Vec::new(), no_boot: None }
    }

    /// Forgets what was printed so far.
    pub(crate) fn skip_to_end(&mut self) {
        self.offset = self.path.metadata().map_or(self.offset, |meta| meta.len());
        self.tail.clear();
        self.no_boot = None;
    }

    /// What the firmware said when it found nothing to boot.
    pub(crate) fn no_boot(&self) -> Option<&str> {
        self.no_boot.as_deref()
    }

    /// Whether a login prompt was printed since the last look.
    pub(crate) fn look(&mut self) -> std::io::Result<bool> {
        let mut file = File::open(&self.path)?;
        let len = file.metadata()?.len();
        if len < self.offset {
            self.offset = 0;
        }
        if len == self.offset {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut seen = std::mem::take(&mut self.tail);
        let read = (&mut file).take(MAX_LOOK_BYTES).read_to_end(&mut seen)?;
        self.offset += u64::try_from(read).unwrap_or(0);
        let found = seen.windows(PROMPT.len()).any(|window| window == PROMPT);
        if self.no_boot.is_none() {
            self.no_boot = NO_BOOT
                .iter()
                .find(|mark| seen.windows(mark.len()).any(|window| window == **mark))
                .map(|mark| String::from_utf8_lossy(mark).into_owned());
        }
        if !found {
            self.tail = seen.split_off(seen.len().saturating_sub(TAIL_BYTES));
        }
        Ok(found)
    }

    /// Whether so much of it was looked at that it is to be cut.
    pub(crate) fn is_long(&self) -> bool {
        self.offset > MAX_LOG_BYTES
    }
}

/// How long a log is now, in bytes; 0 where that cannot be told.
pub(crate) fn len(log: &Path) -> u64 {
    log.metadata().map_or(0, |metadata| metadata.len())
}

/// Where a log goes that became too long.
pub(crate) fn old(log: &Path) -> PathBuf {
    log.with_extension("log.old")
}

/// Cuts a log, which takes as long as copying it. QEMU keeps the file open for appending, so it is copied and cut, not renamed.
/// What is printed between the two is lost, and all of it where there is no room for a copy. One that is not too long is left alone: it
/// may have been cut since somebody looked, and what was kept of it then is not to be replaced by less.
pub(crate) fn cut(log: &Path) {
    if len(log) <= MAX_LOG_BYTES {
        return;
    }
    let old = old(log);
    if let Err(error) = std::fs::copy(log, &old) {
        tracing::warn!(log = %log.display(), %error, "cut a long log without keeping a copy");
        // A part of one would take the room that is left. Where it cannot be removed, the next copy replaces it.
        let _ = std::fs::remove_file(&old);
    }
    let emptied = File::options().write(true).open(log).and_then(|log| log.set_len(0));
    if let Err(error) = emptied {
        tracing::warn!(log = %log.display(), %error, "cannot cut a long log");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_prompt_is_found_once_even_in_two_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = File::create(&path).unwrap();
        let mut console = ConsoleLog::new(&path);
        assert!(!console.look().unwrap());
        log.write_all(b"Debian 12\nlab1 log").unwrap();
        assert!(!console.look().unwrap());
        log.write_all(b"in: ").unwrap();
        assert!(console.look().unwrap());
        assert!(!console.look().unwrap());
    }

    #[test]
    fn a_firmware_that_finds_nothing_to_boot_is_heard() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = File::create(&path).unwrap();
        let mut console = ConsoleLog::new(&path);
        log.write_all(b"Booting from Hard Disk...\r\nNo boota").unwrap();
        assert!(!console.look().unwrap());
        assert_eq!(console.no_boot(), None);
        log.write_all(b"ble device.\r\n").unwrap();
        assert!(!console.look().unwrap());
        assert_eq!(console.no_boot(), Some("No bootable device"));
        console.skip_to_end();
        assert_eq!(console.no_boot(), None);
    }

    /// As the supervisor does.
    fn look(console: &mut ConsoleLog) -> bool {
        let found = console.look().unwrap();
        if console.is_long() {
            cut(&console.path);
        }
        found
    }

    #[test]
    fn a_log_without_end_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = File::options().create(true).append(true).open(&path).unwrap();
        let mut console = ConsoleLog::new(&path);
        let noise = vec![b'x'; 1 << 20];
        for _ in 0..40 {
            log.write_all(&noise).unwrap();
            assert!(!look(&mut console));
            assert!(path.metadata().unwrap().len() <= MAX_LOG_BYTES + MAX_LOOK_BYTES);
        }
        assert!(dir.path().join("console.log.old").exists());
        log.write_all(b"login: ").unwrap();
        assert!(look(&mut console));
    }

    #[test]
    fn a_log_is_cut_where_there_is_no_room_for_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = File::options().create(true).append(true).open(&path).unwrap();
        let mut console = ConsoleLog::new(&path);
        let noise = vec![b'x'; 1 << 20];
        for _ in 0..16 {
            log.write_all(&noise).unwrap();
            assert!(!look(&mut console));
        }
        // Whatever is written there finds no space.
        std::os::unix::fs::symlink("/dev/full", old(&path)).unwrap();
        log.write_all(b"login: ").unwrap();
        assert!(look(&mut console));
        assert_eq!(path.metadata().unwrap().len(), 0);
        assert!(old(&path).symlink_metadata().is_err(), "what was begun of the copy is left");
        // And it is followed from there.
        log.write_all(b"login: ").unwrap();
        assert!(look(&mut console));
    }

    #[test]
    fn a_log_that_nobody_follows_is_cut_off_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qemu.log");
        let mut log = File::options().create(true).append(true).open(&path).unwrap();
        let noise = vec![b'x'; 1 << 20];
        for _ in 0..40 {
            log.write_all(&noise).unwrap();
            if len(&path) > MAX_LOG_BYTES {
                cut(&path);
            }
            assert!(len(&path) <= MAX_LOG_BYTES);
        }
        // By somebody who saw how long it was before that.
        let kept_bytes = len(&old(&path));
        cut(&path);
        assert!(kept_bytes > MAX_LOG_BYTES);
        assert_eq!(len(&old(&path)), kept_bytes);
        assert_eq!(old(&path), dir.path().join("qemu.log.old"));
        assert!(old(&path).exists());
    }
}
