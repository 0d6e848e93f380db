//! Calls to the disk process, as a daemon makes them, and disks without machines.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Daemon, tiny_disk};

/// A connection to the disk process.
pub struct Calls(BufReader<UnixStream>);

impl Calls {
    pub fn to(dir: &Path) -> Self {
        Self(BufReader::new(UnixStream::connect(dir.join("disks.sock")).expect("a disk process listens")))
    }

    /// Makes a call. `None`: the process has ended.
    pub fn call(&mut self, call: &Value) -> Option<Value> {
        writeln!(self.0.get_mut(), "{call}").ok()?;
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(1..) => Some(serde_json::from_str(&line).expect("an answer")),
            _ => None,
        }
    }

    /// Reads the frozen disk of this connection. `None`: the process has ended.
    pub fn read(&mut self, offset: usize, into: &mut [u8]) -> Option<()> {
        let answer = self.call(&json!({ "read": { "offset": offset, "len": into.len() } }))?;
        assert!(answer.get("done").is_some(), "{answer}");
        self.0.read_exact(into).ok()
    }
}

/// Makes a call to the disk process, which must answer.
pub fn ask(dir: &Path, call: &Value) -> Value {
    Calls::to(dir).call(call).expect("the disk process answers")
}

/// Imports the tiny disk as `big`, with zeroes up to a size. Returns its version.
pub fn import_big(daemon: &Daemon, size_bytes: u64) -> Value {
    let path = daemon.path().join("big.raw");
    std::fs::write(&path, tiny_disk()).expect("it can be written");
    let file = std::fs::File::options().write(true).open(&path).expect("it is there");
    file.set_len(size_bytes).expect("it is sparse");
    daemon.cli(&["image", "import", path.to_str().expect("UTF-8")]).ok();
    let shown: Value =
        serde_json::from_str(&daemon.cli(&["--json", "image", "show", "big"]).ok()).expect("JSON");
    shown["versions"][0].clone()
}

/// A disk without a machine, over NBD, with 24 MiB of RAM and 1 GiB of overflow: for a client that verifies.
pub struct LoneDisk {
    dir: PathBuf,
    name: String,
    pub uuid: String,
    /// Where it is served.
    pub uri: String,
    version: Value,
    is_persistent: bool,
}

impl LoneDisk {
    /// Opens a disk over a version. Its number is different from those of others.
    pub fn open(daemon: &Daemon, number: u32, version: &Value, is_persistent: bool) -> Self {
        let (dir, name) = (daemon.path().to_owned(), format!("load-{number}"));
        let run_dir = dir.join("run").join(&name);
        std::fs::create_dir(&run_dir).expect("it can be made");
        let disk = Self {
            uuid: format!("6f1c2a54-0000-4000-8000-{number:012}"),
            uri: format!("nbd+unix:///?socket={}", run_dir.join("disk.sock").display()),
            version: version.clone(),
            dir,
            name,
            is_persistent,
        };
        disk.open_again(false);
        disk
    }

    fn cache(&self) -> Value {
        json!({
            "mode": "ram+disk", "ram_bytes": 24 << 20, "disk_bytes": 1 << 30, "persistent": self.is_persistent,
            "weight": 100,
        })
    }

    /// Freezes a persistent disk that is closed, as a seal does, for a moment. Returns the answer.
    pub fn freeze(&self) -> Value {
        let kept = json!({ "id": self.uuid, "is_begun": true });
        let request =
            json!({ "kept": kept, "version": self.version, "cache": self.cache(), "is_edit": false });
        ask(&self.dir, &json!({ "open_persistent": { "request": request } }))
    }

    /// Opens a persistent disk again.
    pub fn open_again(&self, is_begun: bool) {
        let kept = self.is_persistent.then(|| json!({ "id": self.uuid, "is_begun": is_begun }));
        let cache = self.cache();
        let request = json!({
            "machine": self.name, "uuid": self.uuid, "run_dir": self.dir.join("run").join(&self.name),
            "version": self.version, "cache": cache, "kept": kept, "goes_on": true, "is_recorded": false,
            "transport": "nbd", "firmware": "bios", "secure_boot": false, "scratch_bytes": 0,
        });
        let opened = ask(&self.dir, &json!({ "open": { "request": request } }));
        assert!(opened["done"].is_object(), "{opened}");
    }

    /// Closes it, which must succeed.
    pub fn close(&self) {
        let closed = ask(&self.dir, &json!({ "close": { "uuid": self.uuid } }));
        assert!(closed.get("done").is_some(), "{closed}");
    }

    /// Its counters and metrics.
    pub fn figures(&self) -> Value {
        ask(&self.dir, &"snapshot".into())["done"]["disks"][&self.uuid].clone()
    }
}

impl Drop for LoneDisk {
    fn drop(&mut self) {
        // Or the disk process would outlive its daemon, also if the test fails.
        if UnixStream::connect(self.dir.join("disks.sock")).is_ok() {
            Calls::to(&self.dir).call(&json!({ "close": { "uuid": self.uuid } }));
        }
    }
}
