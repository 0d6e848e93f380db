//! Other programs' overlays beside ours: qcow2 over an empty disk, served by qemu-nbd on a unix socket.
//!
//! The server ends when its one client is gone, and its files lose their names as soon as it has them open. So nothing of it is left
//! once a client was connected, even if this program is killed.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use headwater_block::Device;
use headwater_nbd::Client;
use headwater_nbd::client::ClientOptions;

use crate::started::{Directory, Started, is_installed};

/// How long a server may take until it answers.
const PATIENCE: Duration = Duration::from_secs(60);

/// Programs that are needed.
const PROGRAMS: [&str; 2] = ["qemu-nbd", "qemu-img"];

/// A way to run the overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Past the page cache: `--cache=none --aio=native`.
    Direct,
    /// Through the page cache: `--cache=writeback`.
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

/// Why there are no peers here, if a program is missing.
pub fn missing() -> Option<String> {
    let program = PROGRAMS.into_iter().find(|program| !is_installed(program))?;
    Some(format!("the qcow2 overlays, because {program} is not installed (Debian's qemu-utils has it)"))
}

/// The release of the server, for a report.
pub fn version() -> Result<String> {
    let output = Started::start("qemu-nbd", Command::new("qemu-nbd").arg("--version"))?.output(|| false)?;
    Ok(output.unwrap_or_default().lines().next().unwrap_or("unknown").to_owned())
}

/// Disk that an overlay takes at most: all clusters, and its tables.
pub fn disk_bytes(set_bytes: u64) -> u64 {
    set_bytes + set_bytes / 64 + (16 << 20)
}

/// A server and its client.
pub struct Open {
    /// The overlay, over its protocol.
    pub device: Arc<dyn Device>,
    /// The server's process.
    pub server: Started,
}

/// Makes an overlay over an empty disk in `dir`, serves it, and connects to it.
pub fn open(peer: Peer, dir: &Path, set_bytes: u64, in_flight: usize) -> Result<Open> {
    let (files, sockets) = (Directory::new_in(dir)?, Directory::new()?);
    let base = files.path().join("base.raw");
    let made = std::fs::File::create_new(&base).and_then(|file| file.set_len(set_bytes));
    made.with_context(|| format!("cannot make {} of {set_bytes} bytes", base.display()))?;
    let base = base.canonicalize().with_context(|| format!("cannot find {}", base.display()))?;
    let overlay = files.path().join("overlay.qcow2");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&overlay);
    Started::start("qemu-img", &mut create)?.output(|| false).context("cannot make an overlay")?;
    let socket = sockets.path().join("nbd");
    let mut serve = Command::new("qemu-nbd");
    serve.args(["--format=qcow2", "--shared=1"]).args(peer.arguments());
    serve.arg("--socket").arg(&socket).arg(&overlay);
    let mut server = Started::start("qemu-nbd", &mut serve)?;
    server.wait_for("socket", PATIENCE, || Ok(socket.exists().then_some(())))?;
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let uri = uri.parse().context("the socket has an odd name")?;
    let options = ClientOptions { commands_in_flight: in_flight.max(64), ..ClientOptions::default() };
    // The socket is there before the server listens.
    let device = server.wait_for("connection", PATIENCE, || Ok(Client::connect(&uri, &options).ok()))?;
    Ok(Open { device, server })
}

#[cfg(test)]
mod tests {
    use headwater_block::blocking;
    use headwater_testkit::wait_until;

    use super::*;

    #[test]
    fn an_overlay_keeps_what_is_written_and_leaves_nothing() {
        // Not in memory: tmpfs has no direct I/O.
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
            // As if this program was killed: its connection is gone.
            drop(device);
            wait_until("the server ends without its client", || server.check().is_err());
        }
    }
}
