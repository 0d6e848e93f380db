//! Checks of the data directory: its owner, free space, and write speed.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use headwater_block::size;
use rustix::fs::{Mode, OFlags, statvfs};

use super::Check;

/// Less free space is a failure: an import of a small image would not fit.
const LEAST_FREE_BYTES: u64 = 2 << 30;

/// The default disk limit of one machine.
const ONE_MACHINE_BYTES: u64 = 10 << 30;

/// The number of bytes that `--write` writes.
const WRITTEN_BYTES: u64 = 64 << 20;
const PIECE_BYTES: usize = 1 << 20;

/// Bytes per second below which a disk is too slow for the overflow of several machines.
const SLOW_BYTES: u64 = 50 << 20;

/// Checks the data directory, or the directory in which it will be created.
pub fn data_directory(dir: &Path, write: bool) -> Vec<Check> {
    let Some(there) = dir.ancestors().find(|ancestor| ancestor.exists()) else { return Vec::new() };
    let mut checks = vec![owner(dir, there), free(there)];
    checks.extend(write.then(|| speed(there)));
    checks
}

fn owner(dir: &Path, there: &Path) -> Check {
    const CHECK: &str = "data directory";
    if dir != there {
        return Check::ok(CHECK, format!("{} does not exist yet; the daemon makes it", dir.display()));
    }
    match dir.metadata() {
        Ok(found) if found.mode() & 0o022 != 0 => Check::fail(
            CHECK,
            format!(
                "{} is writable by its group or by other users (mode {:o}), so the daemon refuses to start",
                dir.display(),
                found.mode() & 0o7777
            ),
            format!("check its contents, then run 'chmod go-w {}'", dir.display()),
        ),
        Ok(found) => Check::ok(
            CHECK,
            format!("{} belongs to user {}, mode {:o}", dir.display(), found.uid(), found.mode() & 0o7777),
        ),
        Err(e) => Check::fail(
            CHECK,
            format!("cannot read the attributes of {}: {e}", dir.display()),
            "run this as root",
        ),
    }
}

fn free(there: &Path) -> Check {
    const CHECK: &str = "free space";
    let found = match statvfs(there) {
        Ok(found) => found,
        Err(e) => {
            return Check::fail(
                CHECK,
                format!("cannot determine the free space of {}: {e}", there.display()),
                "mount it",
            );
        }
    };
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    let text = format!("{} free in {}", size::format(free_bytes), there.display());
    let advice = "free space, or choose another directory ('data-dir' in the configuration, or --data-dir)";
    if free_bytes < LEAST_FREE_BYTES {
        Check::fail(CHECK, text, advice)
    } else if free_bytes < ONE_MACHINE_BYTES {
        let text = format!("{text}: a machine with the default --disk 10G cannot start");
        Check::warn(CHECK, text, format!("{advice}, or create machines with a smaller --disk"))
    } else {
        Check::ok(CHECK, text)
    }
}

fn speed(there: &Path) -> Check {
    const CHECK: &str = "write speed";
    let (took_s, bytes) = match written(there) {
        Ok(took) => (took.as_secs_f64().max(0.001), WRITTEN_BYTES),
        Err(e) => {
            let found = format!("cannot write {} in {}: {e}", size::format(WRITTEN_BYTES), there.display());
            return Check::warn(CHECK, found, "run this as root, or as the user of the daemon");
        }
    };
    let mib_s = (bytes >> 20) as f64 / took_s;
    let text = format!(
        "{} written and synced in {there} at {mib_s:.0} MiB/s",
        size::format(bytes),
        there = there.display()
    );
    if mib_s * 1048576.0 < SLOW_BYTES as f64 {
        Check::warn(
            CHECK,
            text,
            "machines wait for this disk when their write caches overflow: use a faster one, or more --ram",
        )
    } else {
        Check::ok(CHECK, text)
    }
}

/// Writes the file and returns the duration. The file is unlinked, so it disappears in any case.
fn written(there: &Path) -> std::io::Result<std::time::Duration> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut file: std::fs::File = rustix::fs::open(there, flags, Mode::RUSR | Mode::WUSR)?.into();
    // Not zeroes, which some disks do not store.
    let piece: Vec<u8> =
        (0..PIECE_BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let began = Instant::now();
    for _ in 0..WRITTEN_BYTES >> 20 {
        file.write_all(&piece)?;
    }
    file.sync_data()?;
    Ok(began.elapsed())
}
