//! The agent runs in the initramfs of a diskless machine: it attaches the root disk, hands over to the system on that
//! disk, and serves the disk until the machine is off.
//!
//! ```text
//!   settings (cpio of the boot server) --> card, link, address --> image stream, verified
//!                                                                        |
//!   /dev/ublkb0 or /dev/nbd0 <-- volume: write cache in RAM -------------+
//!        |
//!   mount, identity, drop-ins --> /run/headwater/ready --> switch_root by the initramfs --> systemd
//!                                                           the agent keeps running, and renews its DHCP lease
//! ```
//!
//! # Guarantees
//! - Every byte of the image is verified with the manifest hash that the settings name.
//! - The root partition is chosen by its number on the agent's own device: a local disk with the same label or UUID
//!   is never mounted.
//! - No local disk is read or written.
//! - The agent's first argument begins with `@`, so that systemd does not kill it at shutdown. Its memory is locked,
//!   and the kernel's out-of-memory killer skips it.
//!
//! # Limits
//! The write cache takes what the settings say, at most half of the memory. Cached chunks of the image take an
//! eighth, 16 to 256 MiB. The agent waits [`network::LINK_TIMEOUT`] for a link and [`network::LEASE_TIMEOUT`] for an
//! address; for the image servers it waits without end.
//!
//! # Errors
//! An error before the handover is printed on the console, and the agent ends with code 1: the initramfs then
//! restarts the machine. If the agent dies after the handover, the root disk is gone, and so are all changes of the
//! machine.
//!
//! # Not here
//! Overflow to a local disk, enrolment of machines, restart of a dead agent.
//!
//! Start reading at [`run`].

mod console;
mod disk;
mod network;
mod process;
mod root;

pub use network::{LEASE_TIMEOUT, LINK_TIMEOUT};

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use headwater_boot_script::{DIRECTORY, SETTINGS_FILE, Settings};

/// The directory of the agent's files. It stays in memory and is still there after the hand-over.
const RUN_DIR: &str = "/run/headwater";
/// The agent makes this file when the root is mounted; the initramfs waits for it.
const READY: &str = "ready";
/// How often the agent checks that its block device still exists.
const DEVICE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Runs the agent. Returns only if the agent failed, or if its block device was removed.
pub fn run() -> ExitCode {
    if let Err(error) = process::rename_self() {
        console::say(&format!("cannot rename the agent, so systemd may kill it at shutdown: {error:#}"));
    }
    console::log_to_kernel();
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::say(&format!("FAILED: {error:#}"));
            tracing::error!("the agent failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> anyhow::Result<()> {
    process::protect();
    let settings_dir = Path::new("/").join(DIRECTORY);
    let file = settings_dir.join(SETTINGS_FILE);
    let bytes = std::fs::read(&file).with_context(|| {
        format!("cannot read {}: the boot server gives it to each machine that it boots", file.display())
    })?;
    let settings = Settings::from_json(&bytes).with_context(|| format!("cannot use {}", file.display()))?;
    console::say(&format!("{} boots {}", settings.machine, settings.version));
    process::take_files(&settings_dir, Path::new(RUN_DIR))
        .context("cannot move the settings to /run/headwater")?;
    let card = network::find_card(&settings.mac)?;
    let lease = network::configure(&card)?;
    process::set_clock(settings.now_ms);
    let disk = disk::open(&settings)?;
    let device = disk.partition(settings.root_partition)?;
    root::mount(&device)?;
    root::prepare(&settings, &card, &lease)?;
    // A relative path: the agent's directory stays the same even if something is mounted over its path later.
    std::fs::write(READY, b"").context("cannot tell the initramfs that the root is mounted")?;
    console::say(&format!("{} is mounted; the system starts", device.display()));
    console::end();
    tracing::info!(machine = settings.machine, version = settings.version, device = %device.display(), "serves the root disk");
    network::keep(card, lease);
    while !disk.is_gone() {
        std::thread::sleep(DEVICE_CHECK_INTERVAL);
    }
    anyhow::bail!("the root disk {} is gone", device.display())
}
