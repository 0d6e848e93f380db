//! Searches a machine's disk for the machine's identity, before other machines boot a version of it. It only reports what it
//! finds, and removes nothing.
//!
//! ```text
//!   file systems that can be read   SSH host keys, machine-id, host name, a Windows that sysprep has not generalised
//!   all blocks that were written    the private SSH host key: in file systems that cannot be read, and in blocks of removed files
//! ```
//! The blocks are searched only if no file has the key. Files are read only with [`small_files`], which uses the file system readers of
//! `image diff`.

use std::sync::Arc;

use headwater_api::ProblemKind;
use headwater_block::{ByteRange, Device, ExtentKind, IoError, blocking};
use headwater_image::{Cancel, SmallFile, small_files};
use headwater_service::backend::{BackendError, Given, IdentityLeft, TaskControl};
use headwater_volume::FrozenView;
use memchr::memmem::Finder;

use crate::adapters::images::{cancel_of, image_failed};

const HOST_KEYS: &str = "/etc/ssh/ssh_host_*_key";
const MACHINE_IDS: [&str; 2] = ["/etc/machine-id", "/var/lib/dbus/machine-id"];
const HOST_NAME: &str = "/etc/hostname";
/// A file that every Windows has.
const WINDOWS: &str = "/Windows/System32/ntoskrnl.exe";
/// The file with the last action of Windows setup and sysprep.
const WINDOWS_STATE: &str = "/Windows/Setup/State/State.ini";
/// Its content after sysprep has generalised Windows.
const WINDOWS_GENERALISED: &[u8] = b"IMAGE_STATE_GENERALIZE_RESEAL_TO_OOBE";

/// The host name of a system without a host name.
const NO_HOST_NAME: &str = "localhost";

/// The size of a piece that is searched.
const SEARCH_BYTES: usize = 1 << 20;
/// The overlap of two pieces, which is longer than a line of a key.
const OVERLAP_BYTES: usize = 128;
/// The number of runs of changed blocks that are looked up at once.
const RUNS: usize = 1024;

/// The number of lines of a private key file before the first line with secret data: the header line, and three lines
/// with bytes of the format and, twice, the public key.
const OPEN_LINES: usize = 4;
/// A shorter line could occur by chance in other data.
const LINE_CHARS_MIN: usize = 40;

/// The parts of a machine's identity that are on its disk.
pub fn left_on(
    disk: &Arc<FrozenView>,
    given: &Given,
    control: &Arc<TaskControl>,
) -> Result<IdentityLeft, BackendError> {
    let cancel = cancel_of(control);
    let device: Arc<dyn Device> = Arc::clone(disk) as _;
    let key = PrivateKey::new(given.ssh_host_key_private.reveal());
    let paths = [HOST_KEYS, MACHINE_IDS[0], MACHINE_IDS[1], HOST_NAME, WINDOWS_STATE];
    let mut left = IdentityLeft::default();
    let mut has_key = false;
    for in_one in small_files(&device, &paths, &[WINDOWS], &cancel).map_err(image_failed)? {
        for file in &in_one.files {
            has_key |= key.is_in(&file.contents);
            left.found.extend(what_is(file, &key, given));
        }
        if !in_one.present.is_empty() && !is_generalised_windows(&in_one.files) {
            left.found.push(format!("a Windows on {} (not generalised by sysprep)", in_one.place));
        }
        left.unread.extend(in_one.unread.map(|why| format!("{} ({why})", in_one.place)));
    }
    // If the key was found in a file, the file is more useful than an offset.
    if !has_key && let Some(offset) = search(disk, &key, &cancel)? {
        left.found.push(format!(
            "its private SSH host key at byte {offset} of the disk (of a removed file, or in a file system that is not looked into)"
        ));
    }
    Ok(left)
}

/// The part of the identity that a file contains, if it contains any.
fn what_is(file: &SmallFile, key: &PrivateKey, given: &Given) -> Option<String> {
    let SmallFile { path, contents } = file;
    let text = contents.trim_ascii();
    let what = match path.as_str() {
        HOST_NAME => is_host_name(text, &given.host_name).then_some("its host name"),
        path if MACHINE_IDS.contains(&path) => {
            (text == given.machine_id.as_bytes()).then_some("its machine-id")
        }
        path if path.starts_with("/etc/ssh/") && !text.is_empty() => {
            Some(if key.is_in(contents) { "its private SSH host key" } else { "a private SSH host key" })
        }
        _ => None,
    };
    what.map(|what| format!("{path} ({what})"))
}

/// A guest may use only the first label of a host name with dots.
fn is_host_name(text: &[u8], given: &str) -> bool {
    let first = given.split('.').next().unwrap_or(given);
    text != NO_HOST_NAME.as_bytes()
        && [given, first].iter().any(|name| text.eq_ignore_ascii_case(name.as_bytes()))
}

/// Whether sysprep has generalised the Windows with these files. If its state cannot be read, the answer is no.
fn is_generalised_windows(files: &[SmallFile]) -> bool {
    let state = files.iter().find(|file| file.path.eq_ignore_ascii_case(WINDOWS_STATE));
    state.is_some_and(|state| {
        // The file is in UTF-16.
        let text: Vec<u8> = state.contents.iter().copied().filter(|byte| *byte != 0).collect();
        Finder::new(WINDOWS_GENERALISED).find(&text).is_some()
    })
}

/// The lines of a private key that occur only in this key.
struct PrivateKey(Vec<Finder<'static>>);

impl PrivateKey {
    fn new(text: &str) -> Self {
        let lines = text.lines().skip(OPEN_LINES).filter(|line| line.len() >= LINE_CHARS_MIN);
        let secret = lines.filter(|line| !line.starts_with('-'));
        Self(secret.map(|line| Finder::new(line.as_bytes()).into_owned()).collect())
    }

    fn find(&self, bytes: &[u8]) -> Option<usize> {
        self.0.iter().find_map(|line| line.find(bytes))
    }

    fn is_in(&self, bytes: &[u8]) -> bool {
        self.find(bytes).is_some()
    }
}

fn io_failed(error: IoError) -> BackendError {
    BackendError::new(ProblemKind::Failed, "cannot read the machine's disk").because(error)
}

/// The offset on the disk of a secret line of the machine's private key, if the machine wrote one there.
fn search(disk: &FrozenView, key: &PrivateKey, cancel: &Cancel) -> Result<Option<u64>, BackendError> {
    let mut found = None;
    let mut buffer = vec![0; OVERLAP_BYTES + SEARCH_BYTES];
    // The overlap from the previous piece in the buffer, and where that piece ended on the disk.
    let (mut kept, mut end) = (0, 0);
    written(disk, cancel, &mut |offset, len| {
        if offset != end {
            kept = 0;
        }
        let Some(piece) = buffer.get_mut(kept..kept + len) else { return Ok(false) };
        blocking::read(disk, offset, piece).map_err(io_failed)?;
        let bytes = buffer.get(..kept + len).unwrap_or_default();
        if let Some(at) = key.find(bytes) {
            found = Some(offset.saturating_sub(kept as u64) + at as u64);
            return Ok(false);
        }
        end = offset + len as u64;
        let all = kept + len;
        kept = all.min(OVERLAP_BYTES);
        buffer.copy_within(all - kept..all, 0);
        Ok(true)
    })?;
    Ok(found)
}

/// Calls `next` with the pieces of a disk that its machine wrote, in order, until `next` returns false. Zeroes are left
/// out.
fn written(
    disk: &FrozenView,
    cancel: &Cancel,
    next: &mut dyn FnMut(u64, usize) -> Result<bool, BackendError>,
) -> Result<(), BackendError> {
    let size_bytes = disk.geometry().size_bytes;
    let mut at = 0;
    while let Some(rest) = ByteRange::new(at, size_bytes - at).filter(|rest| !rest.is_empty()) {
        for run in disk.changed(rest, RUNS) {
            let run_end = at + run.len;
            while run.changed && at < run_end {
                if cancel.is_cancelled() {
                    return Err(BackendError::new(
                        ProblemKind::Cancelled,
                        "the search for a private key was cancelled",
                    ));
                }
                let Some(range) = ByteRange::new(at, run_end - at) else { break };
                let extents = disk.extents(range, 1).map_err(io_failed)?;
                let Some(extent) = extents.first() else { break };
                let len = if extent.kind == ExtentKind::Data {
                    usize::try_from(extent.len.min(run_end - at)).unwrap_or(SEARCH_BYTES).min(SEARCH_BYTES)
                } else {
                    at += extent.len;
                    continue;
                };
                if !next(at, len)? {
                    return Ok(());
                }
                at += len as u64;
            }
            at = run_end;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use headwater_db::Secret;

    use super::*;

    const KEY: &str = "-----BEGIN OPENSSH PRIVATE KEY-----\n\
        b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW\n\
        QyNTUxOQAAACBJn4Rsll4yb5nrsJzKHPxzRg9RFvQE7rvHE3vSgTlPWgAAAJj+cFQz/nBU\n\
        MwAAAAtzc2gtZWQyNTUxOQAAACBJn4Rsll4yb5nrsJzKHPxzRg9RFvQE7rvHE3vSgTlPWg\n\
        AAAECHRyPUH5xWuyZ5hOFM7lv1fHZWlbVtZ5ycfsKxDCZiF0mfhGyWXjJvmeuwnMoc/HNG\n\
        D1EW9ATuu8cTe9KBOU9aAAAAEHJvb3RAbGFiAQIDBAU=\n\
        -----END OPENSSH PRIVATE KEY-----\n";

    fn given() -> Given {
        Given {
            host_name: "lab.example.com".to_owned(),
            machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
            ssh_host_key_private: Secret::new(KEY.to_owned()),
        }
    }

    fn told(path: &str, contents: &str) -> Option<String> {
        let file = SmallFile { path: path.to_owned(), contents: contents.into() };
        what_is(&file, &PrivateKey::new(KEY), &given())
    }

    #[test]
    fn what_was_given_is_known_and_what_is_empty_or_anothers_is_not() {
        let is_told = |path: &str, contents: &str| told(path, contents).is_some();
        assert_eq!(told("/etc/hostname", "lab\n").unwrap(), "/etc/hostname (its host name)");
        assert!(is_told("/etc/hostname", "LAB.example.com\n") && !is_told("/etc/hostname", "localhost\n"));
        assert!(is_told("/var/lib/dbus/machine-id", "0123456789abcdef0123456789abcdef\n"));
        for other in ["", "uninitialized\n", "ffffffffffffffffffffffffffffffff\n"] {
            assert!(!is_told("/etc/machine-id", other), "{other}");
        }
        assert!(told("/etc/ssh/ssh_host_ed25519_key", KEY).unwrap().ends_with("(its private SSH host key)"));
        // A key that the guest made itself identifies the machine too.
        assert!(told("/etc/ssh/ssh_host_rsa_key", "KEY").unwrap().ends_with("(a private SSH host key)"));
        assert!(!is_told("/etc/ssh/ssh_host_rsa_key", ""));
    }

    #[test]
    fn a_private_key_is_known_by_its_secret_lines_and_in_other_forms() {
        let key = PrivateKey::new(KEY);
        assert!(key.is_in(KEY.replace('\n', "\\n").as_bytes()));
        let public: String = KEY.lines().take(OPEN_LINES).collect();
        assert!(!key.is_in(public.as_bytes()));
        // The lines that are searched contain the secret bytes.
        assert!(key.0.len() >= 2 && key.is_in(KEY.lines().nth(4).unwrap().as_bytes()));
    }

    #[test]
    fn a_windows_counts_as_generalised_once_sysprep_says_so() {
        let file = |path: &str, text: &str| SmallFile {
            path: path.to_owned(),
            contents: text.encode_utf16().flat_map(u16::to_le_bytes).collect(),
        };
        let state =
            |text: &str| file("/Windows/Setup/State/State.ini", &format!("[State]\r\nImageState={text}\r\n"));
        assert!(!is_generalised_windows(&[]));
        assert!(!is_generalised_windows(&[state("IMAGE_STATE_COMPLETE")]));
        assert!(is_generalised_windows(&[state("IMAGE_STATE_GENERALIZE_RESEAL_TO_OOBE")]));
    }
}
