//! The agent in a target's initramfs: it makes the root disk, hands over to the system on it, and serves the disk until the end.
//!
//! ```text
//!   settings (cpio of the boot server) --> card, link, address --> image stream, verified
//!                                                                        |
//!   /dev/ublkb0 or /dev/nbd0 <-- volume: write cache in RAM -------------+
//!        |
//!   mount, identity, drop-ins --> /run/headwater/ready --> switch_root by the initramfs --> systemd
//!                                                           the agent goes on, and keeps its lease
//! ```
//!
//! # Guarantees
//! - Every byte of the image is checked by the hash that the settings name.
//! - The root disk is found by its number on the agent's own device: a local disk with the same label or UUID is never mounted.
//! - No local disk is written to, or read.
//! - Its first argument begins with `@`, so that systemd leaves it alone at the end; its memory is locked, and the kernel does not
//!   kill it for want of memory.
//!
//! # Limits
//! The write cache takes what the settings say, at most half of the memory. Chunks of the image take an eighth, 16 to 256 MiB.
//! [`network::LINK_PATIENCE`] for a link, [`network::LEASE_PATIENCE`] for an address; servers of the image are waited for without end.
//!
//! # Errors
//! What fails before the hand-over is said on the console, and the agent ends with 1: the initramfs then restarts the machine. When
//! it dies later the root disk is gone, and what is on the machine with it.
//!
//! # Not here
//! Overflow to a local disk, enrolment, recovery of the agent itself.
//!
//! Start reading at [`run`].

mod console;
mod disk;
mod network;
mod process;
mod root;

pub use network::{LEASE_PATIENCE, LINK_PATIENCE};

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use headwater_boot_script::{DIRECTORY, SETTINGS_FILE, Settings};

/// The directory of the agent's files. It stays in memory and is still there after the hand-over.
const RUN_DIR: &str = "/run/headwater";
/// The file that tells the initramfs that the root is mounted.
const READY: &str = "ready";
/// How often it is looked whether the device is still there.
const LOOKED_EVERY: Duration = Duration::from_secs(5);

/// The agent. It returns when it failed, or when its device is gone.
pub fn run() -> ExitCode {
    if let Err(error) = process::rename_self() {
        console::say(&format!("the agent goes on under its own name: {error:#}"));
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
    process::take_files(&settings_dir, Path::new(RUN_DIR)).context("cannot keep the settings")?;
    let card = network::find_card(&settings.mac)?;
    let lease = network::configure(&card)?;
    process::set_clock(settings.now_ms);
    let disk = disk::open(&settings)?;
    let device = disk.partition(settings.root_partition)?;
    root::mount(&device)?;
    root::prepare(&settings, &card, &lease)?;
    // Relative: it is the directory that stays, whatever is mounted over its path later.
    std::fs::write(READY, b"").context("cannot tell the initramfs that the root is mounted")?;
    console::say(&format!("{} is mounted; the system starts", device.display()));
    console::end();
    tracing::info!(machine = settings.machine, version = settings.version, device = %device.display(), "serves the root disk");
    network::keep(card, lease);
    while !disk.is_gone() {
        std::thread::sleep(LOOKED_EVERY);
    }
    anyhow::bail!("the root disk {} is gone", device.display())
}
