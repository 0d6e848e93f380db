//! Which devices are attached, and by whom: a file for each in a directory, so that the next process finds what a dead
//! one left.

use std::fs::{File, Permissions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Way;
use crate::mark::{Mark, start_ticks};

/// How often is looked whether it is our turn.
const LOOKED_EVERY: Duration = Duration::from_millis(20);

/// Who may open a lock could hold it for ever.
const LOCK_MODE: u32 = 0o600;

/// One attached device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// How it is attached.
    pub way: Way,
    /// Its number.
    pub number: u32,
    /// What its user called it, if anything.
    pub name: Option<String>,
    /// What is attached.
    pub source: String,
    /// What another server must have to go on with it: the image's identity and the cache's.
    pub identity: String,
    /// Whether another server may go on with it.
    pub survives: bool,
    /// Process that serves it.
    pub pid: u32,
    /// When that process started, in the kernel's ticks: numbers of processes are used again.
    pub started: u64,
    /// Who made the device; `None`: the process that serves it, which is of a version that gave no marks.
    #[serde(default)]
    pub made_by: Option<Mark>,
    /// The directory of what keeps the contents; `None`: nothing does, or it is of a version that did not say.
    #[serde(default)]
    pub kept_in: Option<PathBuf>,
}

/// What is about to be attached, kept before it is: the kernel chooses the number, and who dies before that is recorded
/// leaves a device that is found by its mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// How it is attached.
    pub way: Way,
    /// By whom.
    pub mark: Mark,
}

impl Record {
    /// A record of a device that this process serves and has made.
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

    /// What the device carries if it still is the one that was recorded.
    pub fn mark(&self) -> Mark {
        self.made_by.unwrap_or(Mark { pid: self.pid, thread: self.pid, started: 0 })
    }

    /// Whether it is of the same device, and the same process served it.
    fn is_of_same_server(&self, other: &Self) -> bool {
        let of = |record: &Self| (record.device(), record.pid, record.started, record.mark());
        of(self) == of(other)
    }

    /// Path of the device.
    pub fn device(&self) -> String {
        self.way.device(self.number)
    }

    /// Whether its server lives.
    pub fn is_served(&self) -> bool {
        start_ticks(self.pid) == Some(self.started)
    }

    /// Whether `text` means this device: its path, the last part of that, or its name.
    pub fn is_meant_by(&self, text: &str) -> bool {
        let device = self.device();
        text == device || device.strip_prefix("/dev/") == Some(text) || self.name.as_deref() == Some(text)
    }
}

/// The directory.
#[derive(Clone, Debug)]
pub struct Registry {
    dir: PathBuf,
}

impl Registry {
    /// Uses `dir`, which is made when something is recorded.
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

    /// Keeps a record, in place of an older one of the device.
    pub fn record(&self, record: &Record) -> std::io::Result<()> {
        self.write(&self.file(record.way, record.number), &serde_json::to_vec_pretty(record)?)
    }

    fn write(&self, file: &Path, bytes: &[u8]) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let part = file.with_extension("part");
        std::fs::write(&part, bytes)?;
        std::fs::rename(&part, file)
    }

    /// Keeps what is about to be attached.
    pub fn intend(&self, intent: &Intent) -> std::io::Result<()> {
        self.write(&self.intent_file(intent), &serde_json::to_vec_pretty(intent)?)
    }

    /// Waits until no other process makes or forgets a record, and the name beside it. Held for no longer than that takes, unlike
    /// [`Registry::turn`], so that a server can end while another one waits for the kernel. Ends when the file is dropped.
    pub fn lock_records(&self, longest: Duration) -> std::io::Result<File> {
        self.lock("records.lock", longest, "another process has been noting a device for long; end it")
    }

    /// The lock of this name, for which the others are waited for so long.
    fn lock(&self, name: &str, longest: Duration, otherwise: &'static str) -> std::io::Result<File> {
        std::fs::create_dir_all(&self.dir)?;
        let mut options = File::options();
        let lock =
            options.create(true).truncate(false).write(true).mode(LOCK_MODE).open(self.dir.join(name))?;
        // One that an earlier release made can be opened by everybody.
        lock.set_permissions(Permissions::from_mode(LOCK_MODE))?;
        let until = Instant::now() + longest;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOOKED_EVERY),
                Err(TryLockError::WouldBlock) => {
                    return Err(std::io::Error::new(ErrorKind::WouldBlock, otherwise));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// Waits until no other process is between looking at the records and making one, but not for ever: the kernel looks for
    /// partitions of what is attached, and its image may be on servers that are away. Ends when the file is dropped.
    pub fn turn(&self, longest: Duration) -> std::io::Result<File> {
        let otherwise =
            "another process has been attaching a device for long; wait until it has one, or end it";
        self.lock("lock", longest, otherwise)
    }

    /// Forgets it: the device is recorded, or there is none.
    pub fn settle(&self, intent: &Intent) -> std::io::Result<()> {
        absent_or(std::fs::remove_file(self.intent_file(intent)))
    }

    /// Forgets a device. Harmless where it is not known. `false`: another process has recorded its own device of this number, of which
    /// nothing is touched.
    ///
    /// The caller has [`Registry::lock_records`]: between the look and the removal nobody records another one.
    pub fn forget(&self, record: &Record) -> std::io::Result<bool> {
        let file = self.file(record.way, record.number);
        match read::<Record>(&file) {
            Ok(found) if !found.is_of_same_server(record) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
            // What cannot be read is no record.
            Ok(_) | Err(_) => {}
        }
        absent_or(std::fs::remove_file(file)).map(|()| true)
    }

    /// All records, by device.
    pub fn all(&self) -> std::io::Result<Vec<Record>> {
        let mut records: Vec<Record> = self.read_all("json")?;
        records.sort_by_key(Record::device);
        Ok(records)
    }

    /// All that was about to be attached and has not been settled.
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
            // One that went away meanwhile is no error, and one that is damaged is no device.
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

/// What is not there need not be removed.
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
        // Whatever else it says.
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
        // As an earlier release left them.
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
