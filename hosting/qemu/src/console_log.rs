//! Follows the log of a serial console to find a login prompt, and limits the length of that log and of QEMU's own log.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The text that a console prints when the system is up.
const PROMPT: &[u8] = b"login:";

/// Texts of firmware and boot sectors that find nothing to boot and stop.
const NO_BOOT: [&[u8]; 5] = [
    b"No bootable device",
    b"This is not a bootable disk",
    b"Missing operating system",
    b"Operating system not found",
    b"No bootable option or device was found",
];

/// Both parts occur in the line that OVMF prints if Secure Boot refuses a loader.
const REFUSED: [&str; 2] = ["BdsDxe: failed to load ", ": Access Denied"];

/// The message for that case.
const REFUSED_SAID: &str = "Access Denied: Secure Boot does not trust the loader";

/// Bytes at the end of each read that are searched again with the next read. No searched text and no line of OVMF is
/// longer.
const TAIL_BYTES: usize = 512;

/// When a log is longer than this, in bytes, it is moved to `NAME.log.old`. A guest that prints without end, or that
/// makes QEMU log without end, must not fill the host's disk.
pub(crate) const MAX_LOG_BYTES: u64 = 16 << 20;

/// The most that is read at once, in bytes.
const MAX_LOOK_BYTES: u64 = 1 << 20;

/// Reads the new part of a console log.
#[derive(Debug)]
pub(crate) struct ConsoleLog {
    path: PathBuf,
    offset: u64,
    /// The end of the last read, because the prompt may be cut in two.
    tail: Vec<u8>,
    no_boot: Option<String>,
}

impl ConsoleLog {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), offset: 0, tail: Vec::new(), no_boot: None }
    }

    /// Forgets the text printed so far.
    pub(crate) fn skip_to_end(&mut self) {
        self.offset = self.path.metadata().map_or(self.offset, |meta| meta.len());
        self.tail.clear();
        self.no_boot = None;
    }

    /// The firmware's message that it found nothing to boot, if it printed one.
    pub(crate) fn no_boot(&self) -> Option<&str> {
        self.no_boot.as_deref()
    }

    /// Whether a login prompt was printed since the last call.
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
            self.no_boot = no_boot(&seen);
        }
        if !found {
            self.tail = seen.split_off(seen.len().saturating_sub(TAIL_BYTES));
        }
        Ok(found)
    }

    /// Whether the part already read is long enough to cut the log.
    pub(crate) fn is_long(&self) -> bool {
        self.offset > MAX_LOG_BYTES
    }
}

/// The first message of firmware that found nothing to boot.
fn no_boot(seen: &[u8]) -> Option<String> {
    // First, because OVMF also says afterwards that there is nothing to boot.
    let is_refused = String::from_utf8_lossy(seen)
        .lines()
        .any(|line| line.split_once(REFUSED[0]).is_some_and(|(_, rest)| rest.contains(REFUSED[1])));
    if is_refused {
        return Some(REFUSED_SAID.to_owned());
    }
    let mark = NO_BOOT.iter().find(|mark| seen.windows(mark.len()).any(|window| window == **mark))?;
    Some(String::from_utf8_lossy(mark).into_owned())
}

/// The length of a log in bytes; 0 if it cannot be read.
pub(crate) fn len(log: &Path) -> u64 {
    log.metadata().map_or(0, |metadata| metadata.len())
}

/// The path to which a long log is moved.
pub(crate) fn old(log: &Path) -> PathBuf {
    log.with_extension("log.old")
}

/// Cuts a log, which takes as long as copying it. QEMU keeps the file open for appending, so the log is copied and
/// truncated, not renamed. Text printed between the two steps is lost. If there is no space for a copy, the whole text
/// is lost.
///
/// A log that is not too long is left alone: it may have been cut since the caller looked, and a short copy must not
/// replace a long one.
pub(crate) fn cut(log: &Path) {
    if len(log) <= MAX_LOG_BYTES {
        return;
    }
    let old = old(log);
    if let Err(error) = std::fs::copy(log, &old) {
        tracing::warn!(log = %log.display(), %error, "cut a long log without keeping a copy");
        // A partial copy would take the remaining space. If it cannot be removed, the next copy replaces it.
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
    fn a_firmware_that_finds_nothing_to_boot_is_reported() {
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

    #[test]
    fn a_loader_that_secure_boot_refuses_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = File::create(&path).unwrap();
        let mut console = ConsoleLog::new(&path);
        let line = "BdsDxe: failed to load Boot0001 \"UEFI Misc Device\" from PciRoot(0x0)/Pci(0x1,0x0): Access Denied\r\n";
        // A program that prints the same words is not the firmware.
        log.write_all(b"mount: Access Denied\r\n").unwrap();
        let (first, second) = line.split_at(30);
        log.write_all(first.as_bytes()).unwrap();
        assert!(!console.look().unwrap());
        assert_eq!(console.no_boot(), None);
        log.write_all(second.as_bytes()).unwrap();
        log.write_all(b"BdsDxe: No bootable option or device was found.\r\n").unwrap();
        assert!(!console.look().unwrap());
        assert_eq!(console.no_boot(), Some("Access Denied: Secure Boot does not trust the loader"));
    }

    /// Cuts the log as the supervisor does.
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
    fn a_log_is_cut_if_there_is_no_space_for_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = File::options().create(true).append(true).open(&path).unwrap();
        let mut console = ConsoleLog::new(&path);
        let noise = vec![b'x'; 1 << 20];
        for _ in 0..16 {
            log.write_all(&noise).unwrap();
            assert!(!look(&mut console));
        }
        // Every write there fails with "no space".
        std::os::unix::fs::symlink("/dev/full", old(&path)).unwrap();
        log.write_all(b"login: ").unwrap();
        assert!(look(&mut console));
        assert_eq!(path.metadata().unwrap().len(), 0);
        assert!(old(&path).symlink_metadata().is_err(), "the partial copy is left");
        // Following the log continues from there.
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
        // By a caller that read the length before the cut.
        let kept_bytes = len(&old(&path));
        cut(&path);
        assert!(kept_bytes > MAX_LOG_BYTES);
        assert_eq!(len(&old(&path)), kept_bytes);
        assert_eq!(old(&path), dir.path().join("qemu.log.old"));
        assert!(old(&path).exists());
    }
}
