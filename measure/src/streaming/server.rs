//! Runs `headwater export` of an image and `headwater store serve`, on this host or in a network namespace at one end of
//! the slow link (`line.rs`).

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

/// The longest wait for a start, and for counters.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// An image that is served over NBD.
pub struct Export {
    process: Process,
    stats: PathBuf,
    uri: String,
}

/// The options of an export.
pub struct Exported<'a> {
    /// The image.
    pub image: &'a str,
    /// The store: a directory, or URLs of servers.
    pub from: &'a str,
    /// `unix:PATH` or `tcp:HOST:PORT`; `None`: a new socket.
    pub nbd: Option<String>,
    /// Additional options.
    pub more: &'a [&'a str],
}

impl Export {
    /// Starts an export, and waits until it is ready. `command` runs `headwater`, directly or through another program such
    /// as `nsenter`.
    pub fn start(plan: &Plan, mut command: Command, what: &Exported<'_>) -> Result<Self> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let stats = plan.sockets.join(format!("stats-{number}"));
        let socket = plan.sockets.join(format!("image-{number}.sock"));
        let nbd = what.nbd.clone().unwrap_or_else(|| format!("unix:{}", socket.display()));
        command.args(["export", what.image, "--from", what.from, "--cache", "ram", "--ram", "64M"]);
        command.arg("--stats").arg(&stats).args(["--nbd", &nbd]).args(what.more);
        let mut process = Process::start(&mut command, "headwater")?;
        let uri = process.wait_for_output("nbd", START_TIMEOUT)?;
        Ok(Self { process, stats, uri })
    }

    /// Its NBD URI.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Opens a connection to it.
    pub fn connect(&self) -> Result<Arc<Client>> {
        Client::open(&self.uri).with_context(|| format!("cannot connect to {}", self.uri))
    }

    /// CPU seconds that it has used.
    pub fn cpu_seconds(&self) -> Result<f64> {
        process::cpu_seconds(self.process.pid())
    }

    /// Its counters of the image.
    pub fn counters(&self) -> Result<Counters> {
        std::fs::remove_file(&self.stats).context("cannot remove the export's file of counters")?;
        self.process.signal(Signal::USR1)?;
        let start = Instant::now();
        loop {
            if let Ok(text) = std::fs::read_to_string(&self.stats) {
                let stats: Value = serde_json::from_str(&text)?;
                return Ok(Counters(stats.get("image").cloned().unwrap_or(Value::Null)));
            }
            if start.elapsed() > START_TIMEOUT {
                bail!("the export wrote no counters: {}", self.process.last_line());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Counters of an image.
pub struct Counters(Value);

impl Counters {
    /// The value of one counter.
    pub fn get(&self, name: &str) -> Result<u64> {
        self.0.get(name).and_then(Value::as_u64).with_context(|| format!("there is no counter {name}"))
    }
}

/// A store that is served over TLS.
pub struct Offer {
    process: Process,
    port: u16,
}

impl Offer {
    /// Serves a store's directory on this loopback port, in the namespace in which `command` runs.
    pub fn start(mut command: Command, store: &Path, port: u16, tls: &Tls) -> Result<Self> {
        command.args(["store", "serve"]).arg(store).args(["--listen", &format!("127.0.0.1:{port}")]);
        command.arg("--tls-cert").arg(&tls.certificate).arg("--tls-key").arg(&tls.key);
        let mut process = Process::start(&mut command, "headwater store serve")?;
        process.wait_for_output("https://", START_TIMEOUT)?;
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

/// Certificates and keys in files.
pub struct Tls {
    /// The file of the authority's certificate.
    pub authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Tls {
    /// Makes new certificates for a server with these names, in a directory.
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
