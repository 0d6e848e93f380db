//! Looking for a machine's identity on its disk, before others boot a version of it.
//!
//! ```text
//!   file systems that can be read   SSH host keys, machine-id, host name, a Windows that sysprep has not generalised
//!   all blocks that were written    the private SSH host key: in file systems that cannot be read, and in blocks of removed files
//! ```
//! File systems are read by [`small_files`] alone, the readers of `image diff`: what replaces them is put in here.

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
/// Every Windows has it.
const WINDOWS: &str = "/Windows/System32/ntoskrnl.exe";
/// What setup and sysprep did last.
const WINDOWS_STATE: &str = "/Windows/Setup/State/State.ini";
/// What that says once sysprep has generalised it.
const WINDOWS_GENERALISED: &[u8] = b"IMAGE_STATE_GENERALIZE_RESEAL_TO_OOBE";

/// The host name of a system that has none.
const NO_HOST_NAME: &str = "localhost";

/// How much is searched at a time.
const SEARCH_BYTES: usize = 1 << 20;
/// How much of that is searched once more with what follows it: no line of a key is longer.
const OVERLAP_BYTES: usize = 128;
/// Runs of changed blocks that are looked up at a time.
const RUNS: usize = 1024;

/// Lines of a private key file before the first one that holds something of the secret: the opening one, and three with the format's bytes
/// and, twice, the public key.
const OPEN_LINES: usize = 4;
/// A line that is shorter may be by chance in other bytes.
const LINE_CHARS_MIN: usize = 40;

/// What of a machine's identity is on its disk.
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
    // Where it is in a file, that is what is to be told.
    if !has_key && let Some(offset) = search(disk, &key, &cancel)? {
        left.found.push(format!(
            "its private SSH host key at byte {offset} of the disk (of a removed file, or in a file system that is not looked into)"
        ));
    }
    Ok(left)
}

/// What a file is of the identity.
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

/// A guest may use the first part of a name with dots.
fn is_host_name(text: &[u8], given: &str) -> bool {
    let first = given.split('.').next().unwrap_or(given);
    text != NO_HOST_NAME.as_bytes()
        && [given, first].iter().any(|name| text.eq_ignore_ascii_case(name.as_bytes()))
}

/// Whether sysprep has generalised a Windows that has these files. A state that cannot be read does not say so.
fn is_generalised_windows(files: &[SmallFile]) -> bool {
    let state = files.iter().find(|file| file.path.eq_ignore_ascii_case(WINDOWS_STATE));
    state.is_some_and(|state| {
        // It is in UTF-16.
        let text: Vec<u8> = state.contents.iter().copied().filter(|byte| *byte != 0).collect();
        Finder::new(WINDOWS_GENERALISED).find(&text).is_some()
    })
}

/// The lines of a private key that nothing else has.
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

/// Where on a disk the machine wrote its private key, if it did.
fn search(disk: &FrozenView, key: &PrivateKey, cancel: &Cancel) -> Result<Option<u64>, BackendError> {
    let mut found = None;
    let mut buffer = vec![0; OVERLAP_BYTES + SEARCH_BYTES];
    // What lies before the next piece in the buffer, and where that ended on the disk.
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

/// Shows the pieces of a disk that its machine wrote, in order, until `next` wants no more. What reads as zeroes is left out.
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
        // One that the guest made itself is a secret of one machine, too.
        assert!(told("/etc/ssh/ssh_host_rsa_key", "KEY").unwrap().ends_with("(a private SSH host key)"));
        assert!(!is_told("/etc/ssh/ssh_host_rsa_key", ""));
    }

    #[test]
    fn a_private_key_is_known_by_its_secret_lines_and_in_other_forms() {
        let key = PrivateKey::new(KEY);
        assert!(key.is_in(KEY.replace('\n', "\\n").as_bytes()));
        let public: String = KEY.lines().take(OPEN_LINES).collect();
        assert!(!key.is_in(public.as_bytes()));
        // The key's own bytes are in the lines that are searched for.
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
