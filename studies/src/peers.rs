//! Runs overlays of other programs: qcow2 over an empty disk, served by qemu-nbd on a unix socket.
//!
//! The server ends when its only client disconnects, and its files are unlinked as soon as it has opened them. So
//! nothing is left behind after a client has connected, even if this program is killed.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_block::Device;
use headwater_nbd::Client;
use headwater_nbd::client::ClientOptions;

use crate::started::{Directory, Started, is_installed};

/// How long a server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The programs that are needed.
const PROGRAMS: [&str; 2] = ["qemu-nbd", "qemu-img"];

/// The cache mode of the overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Without the page cache: `--cache=none --aio=native`.
    Direct,
    /// With the page cache: `--cache=writeback`.
    Writeback,
}

impl Peer {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Direct => &["--cache=none", "--aio=native"],
            Self::Writeback => &["--cache=writeback"],
        }
    }
}

/// The reason why the peers are skipped, if a program is missing.
pub fn missing() -> Option<String> {
    let program = PROGRAMS.into_iter().find(|program| !is_installed(program))?;
    Some(format!("the qcow2 overlays, because {program} is not installed (Debian's qemu-utils has it)"))
}

/// The version of the server, for the report.
pub fn version() -> Result<String> {
    let output = Started::start("qemu-nbd", Command::new("qemu-nbd").arg("--version"))?.output(|| false)?;
    Ok(output.unwrap_or_default().lines().next().unwrap_or("unknown").to_owned())
}

/// The largest size of an overlay on disk: all clusters, and its tables.
pub fn disk_bytes(set_bytes: u64) -> u64 {
    set_bytes + set_bytes / 64 + (16 << 20)
}

/// A connected client and its server.
pub struct Open {
    /// The overlay, accessed over NBD.
    pub device: Arc<dyn Device>,
    /// The server process.
    pub server: Started,
}

/// Creates an overlay over an empty disk in `dir`, serves it, and connects to it.
pub fn open(peer: Peer, dir: &Path, set_bytes: u64, in_flight: usize) -> Result<Open> {
    let (files, sockets) = (Directory::new_in(dir)?, Directory::new()?);
    let base = files.path().join("base.raw");
    let made = std::fs::File::create_new(&base).and_then(|file| file.set_len(set_bytes));
    made.with_context(|| format!("cannot make {} of {set_bytes} bytes", base.display()))?;
    let base = base.canonicalize().with_context(|| format!("cannot find {}", base.display()))?;
    let overlay = files.path().join("overlay.qcow2");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&overlay);
    Started::start("qemu-img", &mut create)?.output(|| false).context("cannot create the qcow2 overlay")?;
    let socket = sockets.path().join("nbd");
    let mut serve = Command::new("qemu-nbd");
    serve.args(["--format=qcow2", "--shared=1"]).args(peer.arguments());
    serve.arg("--socket").arg(&socket).arg(&overlay);
    let mut server = Started::start("qemu-nbd", &mut serve)?;
    server.wait_for("socket", CONNECT_TIMEOUT, || Ok(socket.exists().then_some(())))?;
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let uri = uri.parse().context("the path of the socket is not valid in a URI")?;
    let options = ClientOptions { commands_in_flight: in_flight.max(64), ..ClientOptions::default() };
    // The socket exists before the server listens.
    let device =
        server.wait_for("connection", CONNECT_TIMEOUT, || Ok(Client::connect(&uri, &options).ok()))?;
    Ok(Open { device, server })
}

#[cfg(test)]
mod tests {
    use headwater_block::blocking;
    use headwater_testkit::wait_until;

    use super::*;

    #[test]
    fn an_overlay_stores_writes_and_leaves_no_files() {
        // Not in /tmp, because tmpfs may have no direct I/O.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for peer in [Peer::Direct, Peer::Writeback] {
            let Open { device, mut server } = open(peer, dir.path(), 8 << 20, 16).unwrap();
            assert_eq!(device.geometry().size_bytes, 8 << 20);
            let data = headwater_testkit::Rng::new(1).bytes(4096);
            blocking::write(&*device, 512, &data).unwrap();
            let mut found = vec![0; 4096];
            blocking::read(&*device, 512, &mut found).unwrap();
            assert!(found == data, "{peer:?}");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "its files have no names");
            // If this program is killed, its connection ends too.
            drop(device);
            wait_until("the server ends without its client", || server.check().is_err());
        }
    }
}
