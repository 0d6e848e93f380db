//! `headwater export` of an image and `headwater store serve`, on this host or at an end of a line.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use headwater_nbd::Client;
use headwater_testkit::TestTls;
use rustix::process::Signal;
use serde_json::Value;

use crate::systems::Process;
use crate::{Plan, process};

const PATIENCE: Duration = Duration::from_secs(60);

/// An image that is served over NBD.
pub struct Export {
    process: Process,
    stats: PathBuf,
    uri: String,
}

/// What to export, and how.
pub struct Exported<'a> {
    /// The image.
    pub image: &'a str,
    /// A store's directory or servers.
    pub from: &'a str,
    /// `unix:PATH` or `tcp:HOST:PORT`; without one a socket of its own.
    pub nbd: Option<String>,
    /// More options.
    pub more: &'a [&'a str],
}

impl Export {
    /// Starts one; ready when this returns. `program` is a command that runs the program after its own arguments.
    pub fn start(plan: &Plan, mut command: Command, what: &Exported<'_>) -> Result<Self> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let stats = plan.sockets.join(format!("stats-{number}"));
        let socket = plan.sockets.join(format!("image-{number}.sock"));
        let nbd = what.nbd.clone().unwrap_or_else(|| format!("unix:{}", socket.display()));
        command.args(["export", what.image, "--from", what.from, "--cache", "ram", "--ram", "64M"]);
        command.arg("--stats").arg(&stats).args(["--nbd", &nbd]).args(what.more);
        let mut process = Process::start(&mut command, "headwater")?;
        let uri = process.wait_until_said("nbd", PATIENCE)?;
        Ok(Self { process, stats, uri })
    }

    /// Its NBD URI.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// A connection to it.
    pub fn connect(&self) -> Result<Arc<Client>> {
        Client::open(&self.uri).with_context(|| format!("cannot connect to {}", self.uri))
    }

    /// CPU seconds that it used so far.
    pub fn cpu_seconds(&self) -> Result<f64> {
        process::cpu_seconds(self.process.pid())
    }

    /// Its counters of the image, by name.
    pub fn counters(&self) -> Result<Counters> {
        std::fs::remove_file(&self.stats).context("its counters are not there")?;
        self.process.signal(Signal::USR1)?;
        let start = Instant::now();
        loop {
            if let Ok(text) = std::fs::read_to_string(&self.stats) {
                let stats: Value = serde_json::from_str(&text)?;
                return Ok(Counters(stats.get("image").cloned().unwrap_or(Value::Null)));
            }
            if start.elapsed() > PATIENCE {
                bail!("it wrote no counters: {}", self.process.last_words());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Counters of an image.
pub struct Counters(Value);

impl Counters {
    /// One of them.
    pub fn get(&self, name: &str) -> Result<u64> {
        self.0.get(name).and_then(Value::as_u64).with_context(|| format!("there is no counter {name}"))
    }
}

/// A store that is offered over TLS.
pub struct Offer {
    process: Process,
    port: u16,
}

impl Offer {
    /// Offers a store's directory at this port of the loopback address that `command` runs at.
    pub fn start(mut command: Command, store: &Path, port: u16, tls: &Tls) -> Result<Self> {
        command.args(["store", "serve"]).arg(store).args(["--listen", &format!("127.0.0.1:{port}")]);
        command.arg("--tls-cert").arg(&tls.certificate).arg("--tls-key").arg(&tls.key);
        let mut process = Process::start(&mut command, "headwater store serve")?;
        process.wait_until_said("https://", PATIENCE)?;
        Ok(Self { process, port })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }
}

/// Certificates in files.
pub struct Tls {
    /// The authority.
    pub authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Tls {
    /// New ones for a server of these names, in a directory.
    pub fn make(dir: &Path, names: &[&str]) -> Result<Self> {
        let made = TestTls::of(names);
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Ok::<_, anyhow::Error>(path)
        };
        Ok(Self {
            authority: write("authority.pem", &made.ca_pem)?,
            certificate: write("certificate.pem", &made.certificate_pem)?,
            key: write("key.pem", &made.key_pem)?,
        })
    }
}
