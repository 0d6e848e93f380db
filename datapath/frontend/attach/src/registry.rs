//! Which devices are attached, and by whom: a file for each in a directory, so that the next process finds what a dead
//! one left.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Way;

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
    /// What another server must have to go on with it: the image's identity and the cache's name.
    pub identity: String,
    /// Whether another server may go on with it.
    pub survives: bool,
    /// Process that serves it.
    pub pid: u32,
    /// When that process started, in the kernel's ticks: numbers of processes are used again.
    pub started: u64,
}

impl Record {
    /// A record of this process.
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
        Self { way, number, name, source, identity, survives, pid, started }
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

    fn file(&self, way: Way, number: u32) -> PathBuf {
        let device = way.device(number);
        self.dir.join(format!("{}.json", device.strip_prefix("/dev/").unwrap_or(&device)))
    }

    /// Keeps a record, in place of an older one of the device.
    pub fn record(&self, record: &Record) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let file = self.file(record.way, record.number);
        let part = file.with_extension("part");
        std::fs::write(&part, serde_json::to_vec_pretty(record)?)?;
        std::fs::rename(&part, &file)
    }

    /// Forgets a device. Harmless where it is not known.
    pub fn forget(&self, way: Way, number: u32) -> std::io::Result<()> {
        match std::fs::remove_file(self.file(way, number)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All records, by device.
    pub fn all(&self) -> std::io::Result<Vec<Record>> {
        let entries = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut records = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            // One that went away meanwhile is no error, and one that is damaged is no device.
            match read(&path) {
                Ok(record) => records.push(record),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => tracing::warn!("attach: the record {} cannot be read: {error}", path.display()),
            }
        }
        records.sort_by_key(Record::device);
        Ok(records)
    }
}

fn read(path: &Path) -> std::io::Result<Record> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

/// When a process started, field 22 of `/proc/PID/stat`; `None` where there is no such process, or only what its
/// parent has not taken note of yet.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may have blanks and parentheses.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_ascii_whitespace();
    let is_dead = matches!(fields.next()?, "Z" | "X");
    let ticks = fields.nth(18)?.parse().ok()?;
    (!is_dead).then_some(ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_kept_by_device_and_know_whether_their_server_lives() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new(dir.path().join("attached"));
        assert_eq!(registry.all().unwrap(), []);
        let ours =
            Record::of_this_process(Way::Ublk, 3, Some("lab".into()), "win11".into(), "id".into(), true);
        let gone = Record { way: Way::Nbd, number: 0, name: None, started: ours.started + 1, ..ours.clone() };
        registry.record(&ours).unwrap();
        registry.record(&gone).unwrap();
        std::fs::write(dir.path().join("attached/x.json"), "{").unwrap();
        assert_eq!(registry.all().unwrap(), [gone.clone(), ours.clone()]);
        assert!(ours.is_served() && !gone.is_served());
        for text in ["/dev/ublkb3", "ublkb3", "lab"] {
            assert!(ours.is_meant_by(text) && !gone.is_meant_by(text), "{text}");
        }
        registry.forget(Way::Nbd, 0).unwrap();
        registry.forget(Way::Nbd, 0).unwrap();
        assert_eq!(registry.all().unwrap(), [ours]);
    }
}
