//! Records every read request of a booting guest, from nbdkit's log of a boot under QEMU.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::Plan;
use crate::systems::Process;

/// How long the boot may take until the login prompt. An emulated boot takes about 15 s.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// A read request of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
}

/// Boots the plan's image once, without a network. Returns the read requests in order.
pub fn record(plan: &Plan) -> Result<Vec<Read>> {
    println!("  recording a boot of {}", plan.image.display());
    let (socket, log) = (plan.sockets.join("boot.sock"), plan.sockets.join("boot.log"));
    let console = plan.sockets.join("console");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "-U"]).arg(&socket);
    command.args(["--filter=log", "--filter=cow", "file"]).arg(plan.image.canonicalize()?);
    command.arg(format!("logfile={}", log.display())).env("TMPDIR", plan.work_dir.canonicalize()?);
    let nbdkit = Process::start(&mut command, "nbdkit")?;
    let start = Instant::now();
    while !socket.exists() {
        if start.elapsed() > BOOT_TIMEOUT {
            bail!(
                "nbdkit did not make its socket within {} s: {}",
                BOOT_TIMEOUT.as_secs(),
                nbdkit.last_line()
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"]);
    command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-m", "512", "-serial"]);
    command.arg(format!("file:{}", console.display()));
    command.args(["-device", "virtio-rng-pci", "-drive"]);
    command.arg(format!("if=virtio,format=raw,file=nbd:unix:{}", socket.display()));
    let qemu = Process::start(&mut command, "qemu-system-x86_64")?;
    wait_for_login(&console, &qemu)?;
    drop((qemu, nbdkit));
    let reads = parse(&std::fs::read_to_string(&log).context("cannot read the log of nbdkit")?);
    if reads.len() < 100 {
        bail!(
            "the guest read only {} times while it booted; nbdkit's log format may have changed",
            reads.len()
        );
    }
    Ok(reads)
}

fn wait_for_login(console: &Path, qemu: &Process) -> Result<()> {
    let start = Instant::now();
    loop {
        let said = std::fs::read(console).unwrap_or_default();
        if said.windows(6).any(|part| part == b"login:") {
            return Ok(());
        }
        if start.elapsed() > BOOT_TIMEOUT {
            bail!(
                "the guest showed no login prompt within {} s: {}",
                BOOT_TIMEOUT.as_secs(),
                qemu.last_line()
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Parses lines such as `.. connection=1 Read id=7 offset=0x1000 count=0x200 ...`. Lines of answers begin with dots
/// instead of the request's name.
fn parse(log: &str) -> Vec<Read> {
    let number = |line: &str, name: &str| {
        let (_, rest) = line.split_once(name)?;
        u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()
    };
    let read = |line: &str| {
        let (_, request) = line.split_once(" Read id=")?;
        let len = usize::try_from(number(request, "count=0x")?).ok()?;
        Some(Read { offset: number(request, "offset=0x")?, len })
    };
    log.lines().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_and_answers_are_not() {
        let log = "2026-11-21 19:24:15.7 connection=1 Connect export=\"\" tls=0 size=0x100000\n\
                   2026-11-21 19:24:15.7 connection=1 Read id=1 offset=0x0 count=0x10000 ...\n\
                   2026-11-21 19:24:15.7 connection=1 ...Read id=1 return=0\n\
                   2026-11-21 19:24:15.7 connection=1 Write id=2 offset=0x0 count=0x200 ...\n\
                   2026-11-21 19:24:15.7 connection=1 Read id=3 offset=0x1000 count=0x200 ...\n";
        assert_eq!(parse(log), [Read { offset: 0, len: 65_536 }, Read { offset: 4096, len: 512 }]);
    }
}
