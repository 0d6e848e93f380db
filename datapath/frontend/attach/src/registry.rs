//! Records of attached devices: a file for each in a directory, so that the next process finds the devices
//! that a dead one left.

use std::fs::{File, Permissions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Way;
use crate::mark::{Mark, start_ticks};

/// How often a busy lock is tried again.
const RETRY_EVERY: Duration = Duration::from_millis(20);

/// Only the owner may open a lock file: others could hold the lock for ever.
const LOCK_MODE: u32 = 0o600;

/// One attached device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// How it is attached.
    pub way: Way,
    /// Its number.
    pub number: u32,
    /// The name that its user gave it, if any.
    pub name: Option<String>,
    /// The image or file that is attached.
    pub source: String,
    /// The identity of the image and the write cache. A server that takes the device over must have the same.
    pub identity: String,
    /// Whether another server may take the device over.
    pub survives: bool,
    /// Process id of its server.
    pub pid: u32,
    /// When that process started, in the kernel's ticks: process ids are reused.
    pub started: u64,
    /// The mark of the process that made the device; `None`: the record is of an earlier version, and the
    /// process that serves the device made it.
    #[serde(default)]
    pub made_by: Option<Mark>,
    /// Directory of the persistent write cache; `None`: there is none, or the record is of an earlier
    /// version.
    #[serde(default)]
    pub kept_in: Option<PathBuf>,
}

/// A device that is about to be attached. The kernel chooses the number, so a process that dies before it has
/// recorded the number leaves a device that can be found only by its mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// How it is attached.
    pub way: Way,
    /// The mark of the process.
    pub mark: Mark,
}

impl Record {
    /// The record of a device that this process has made and serves.
    pub fn of_this_process(
        way: Way,
        number: u32,
        name: Option<String>,
        source: String,
        identity: String,
        survives: bool,
    ) -> Self {
        let pid = std::process::id();
        let started = start_ticks(pid).unwrap_or(0);
        Self { way, number, name, source, identity, survives, pid, started, made_by: None, kept_in: None }
    }

    /// The mark that the device carries if it is still the recorded one.
    pub fn mark(&self) -> Mark {
        self.made_by.unwrap_or(Mark { pid: self.pid, thread: self.pid, started: 0 })
    }

    /// Whether both records are of the same device and the same server process.
    fn is_of_same_server(&self, other: &Self) -> bool {
        let of = |record: &Self| (record.device(), record.pid, record.started, record.mark());
        of(self) == of(other)
    }

    /// Path of the device.
    pub fn device(&self) -> String {
        self.way.device(self.number)
    }

    /// Whether its server process is running.
    pub fn is_served(&self) -> bool {
        start_ticks(self.pid) == Some(self.started)
    }

    /// Whether `text` means this device: its path, the last part of the path, or its name.
    pub fn is_meant_by(&self, text: &str) -> bool {
        let device = self.device();
        text == device || device.strip_prefix("/dev/") == Some(text) || self.name.as_deref() == Some(text)
    }
}

/// The directory of records.
#[derive(Clone, Debug)]
pub struct Registry {
    dir: PathBuf,
}

impl Registry {
    /// Uses `dir`, which is created with the first record.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    fn intent_file(&self, intent: &Intent) -> PathBuf {
        self.dir.join(format!("{}.intent", intent.mark.text()))
    }

    fn file(&self, way: Way, number: u32) -> PathBuf {
        let device = way.device(number);
        self.dir.join(format!("{}.json", device.strip_prefix("/dev/").unwrap_or(&device)))
    }

    /// Writes a record, replacing an older one of the same device.
    pub fn record(&self, record: &Record) -> std::io::Result<()> {
        self.write(&self.file(record.way, record.number), &serde_json::to_vec_pretty(record)?)
    }

    fn write(&self, file: &Path, bytes: &[u8]) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let part = file.with_extension("part");
        std::fs::write(&part, bytes)?;
        std::fs::rename(&part, file)
    }

    /// Writes an intent before the device is attached.
    pub fn intend(&self, intent: &Intent) -> std::io::Result<()> {
        self.write(&self.intent_file(intent), &serde_json::to_vec_pretty(intent)?)
    }

    /// Waits until no other process writes or removes a record and the name beside it. Unlike
    /// [`Registry::turn`], the lock is held only for that short time, so a server can end while another one
    /// waits for the kernel. Dropping the file releases the lock.
    pub fn lock_records(&self, longest: Duration) -> std::io::Result<File> {
        self.lock(
            "records.lock",
            longest,
            "another process has held the lock on the records of attached devices for too long; end that process",
        )
    }

    /// Takes the lock of this name, waiting up to `longest` for other processes.
    fn lock(&self, name: &str, longest: Duration, otherwise: &'static str) -> std::io::Result<File> {
        std::fs::create_dir_all(&self.dir)?;
        let mut options = File::options();
        let path = self.dir.join(name);
        let lock = options.create(true).truncate(false).write(true).mode(LOCK_MODE).open(&path)?;
        // Lock files of earlier releases can be opened by everybody.
        lock.set_permissions(Permissions::from_mode(LOCK_MODE))?;
        let until = Instant::now() + longest;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(RETRY_EVERY),
                Err(TryLockError::WouldBlock) => {
                    let why = format!("{otherwise}; 'fuser {}' shows the process", path.display());
                    return Err(std::io::Error::new(ErrorKind::WouldBlock, why));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// Waits up to `longest` until no other process is between reading the records and attaching a device.
    /// That can take long: the kernel reads the partition table of a new device, and the store of its image
    /// may be unreachable. Dropping the file releases the lock.
    pub fn turn(&self, longest: Duration) -> std::io::Result<File> {
        let otherwise =
            "another process has been attaching a device for too long; wait until it has finished, or end it";
        self.lock("lock", longest, otherwise)
    }

    /// Removes an intent: the device is recorded, or was not made.
    pub fn settle(&self, intent: &Intent) -> std::io::Result<()> {
        absent_or(std::fs::remove_file(self.intent_file(intent)))
    }

    /// Removes the record of a device, if there is one. `false`: another process has recorded a device of its
    /// own under this number; nothing is removed.
    ///
    /// The caller holds [`Registry::lock_records`], so no other process writes a record between the check and
    /// the removal.
    /// The caller has [`Registry::lock_records`]: between the look and the removal nobody records another one.
    pub fn forget(&self, record: &Record) -> std::io::Result<bool> {
        let file = self.file(record.way, record.number);
        match read::<Record>(&file) {
            Ok(found) if !found.is_of_same_server(record) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
            // An unreadable file is not a record.
            Ok(_) | Err(_) => {}
        }
        absent_or(std::fs::remove_file(file)).map(|()| true)
    }

    /// All records, sorted by device.
    pub fn all(&self) -> std::io::Result<Vec<Record>> {
        let mut records: Vec<Record> = self.read_all("json")?;
        records.sort_by_key(Record::device);
        Ok(records)
    }

    /// All intents that were not removed: devices that may have been attached without a record.
    pub fn intents(&self) -> std::io::Result<Vec<Intent>> {
        self.read_all("intent")
    }

    fn read_all<T: serde::de::DeserializeOwned>(&self, kind: &str) -> std::io::Result<Vec<T>> {
        let entries = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut records = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != kind) {
                continue;
            }
            // A file that was removed meanwhile is no error; a damaged one is skipped.
            match read(&path) {
                Ok(record) => records.push(record),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => tracing::warn!("attach: the record {} cannot be read: {error}", path.display()),
            }
        }
        Ok(records)
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> std::io::Result<T> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

/// Turns "not found" into success.
fn absent_or(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_kept_by_device_and_know_whether_their_server_lives() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path().join("attached"));
        assert_eq!(registry.all().unwrap(), []);
        let mark = Mark::of_this_thread();
        let ours =
            Record::of_this_process(Way::Ublk, 3, Some("lab".into()), "win11".into(), "id".into(), true);
        let ours = Record { made_by: Some(mark), ..ours };
        assert_eq!(ours.mark(), mark);
        let gone = Record { way: Way::Nbd, number: 0, name: None, started: ours.started + 1, ..ours.clone() };
        registry.record(&ours).unwrap();
        registry.record(&gone).unwrap();
        std::fs::write(dir.path().join("attached/x.json"), "{").unwrap();
        assert_eq!(registry.all().unwrap(), [gone.clone(), ours.clone()]);
        assert!(ours.is_served() && !gone.is_served());
        for text in ["/dev/ublkb3", "ublkb3", "lab"] {
            assert!(ours.is_meant_by(text) && !gone.is_meant_by(text), "{text}");
        }
        assert!(registry.forget(&gone).unwrap());
        assert!(registry.forget(&gone).unwrap());
        assert_eq!(registry.all().unwrap(), [ours]);
    }

    #[test]
    fn an_older_server_of_a_number_does_not_forget_the_device_of_a_newer_one() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let newer = Record::of_this_process(Way::Ublk, 3, None, "win11".into(), "id".into(), false);
        let marked = |started| Some(Mark { started, ..newer.mark() });
        let older = [
            Record { pid: newer.pid + 1, ..newer.clone() },
            Record { started: newer.started + 1, ..newer.clone() },
            Record { made_by: marked(newer.started + 1), ..newer.clone() },
        ];
        for older in older {
            registry.record(&older).unwrap();
            registry.record(&newer).unwrap();
            assert!(!registry.forget(&older).unwrap(), "{older:?}");
            assert_eq!(registry.all().unwrap(), std::slice::from_ref(&newer), "{older:?}");
        }
        // Other fields may differ.
        assert!(registry.forget(&Record { source: "other".into(), ..newer }).unwrap());
        assert_eq!(registry.all().unwrap(), []);
    }

    #[test]
    fn a_lock_is_for_its_owner_alone_and_is_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path().join("attached"));
        let locks = [Registry::turn as fn(&Registry, Duration) -> _, Registry::lock_records];
        let modes = || {
            ["lock", "records.lock"].map(|name| {
                let lock = dir.path().join("attached").join(name);
                lock.metadata().unwrap().permissions().mode() & 0o777
            })
        };
        for lock in locks {
            let held: File = lock(&registry, Duration::ZERO).unwrap();
            assert_eq!(lock(&registry, Duration::ZERO).unwrap_err().kind(), ErrorKind::WouldBlock);
            drop(held);
        }
        assert_eq!(modes(), [0o600; 2]);
        // Lock files as an earlier release left them.
        for name in ["lock", "records.lock"] {
            let lock = dir.path().join("attached").join(name);
            std::fs::set_permissions(lock, Permissions::from_mode(0o644)).unwrap();
        }
        for lock in locks {
            lock(&registry, Duration::ZERO).unwrap();
        }
        assert_eq!(modes(), [0o600; 2]);
    }

    #[test]
    fn a_record_without_a_mark_has_that_of_earlier_versions() {
        let text = r#"{"way":"nbd","number":0,"name":null,"source":"s","identity":"i","survives":false,"pid":7,"started":9}"#;
        let record: Record = serde_json::from_str(text).unwrap();
        assert_eq!(record.mark(), Mark { pid: 7, thread: 7, started: 0 });
        assert_eq!(record.mark().number(), 0x6865_6164_7761_7472);
        assert_ne!(Mark { pid: 7, thread: 7, started: 9 }.number(), record.mark().number());
    }

    #[test]
    fn what_is_about_to_be_attached_is_found_until_it_is_settled() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path());
        let ours = Intent { way: Way::Nbd, mark: Mark::of_this_thread() };
        let dead = Intent { way: Way::Ublk, mark: Mark { started: ours.mark.started + 1, ..ours.mark } };
        assert!(ours.mark.is_alive() && !dead.mark.is_alive());
        registry.intend(&ours).unwrap();
        registry.intend(&dead).unwrap();
        let mut found = registry.intents().unwrap();
        found.sort_by_key(|intent| intent.mark.started);
        assert_eq!(found, [ours.clone(), dead.clone()]);
        assert_eq!(registry.all().unwrap(), []);
        registry.settle(&dead).unwrap();
        registry.settle(&dead).unwrap();
        assert_eq!(registry.intents().unwrap(), [ours]);
    }
}
