//! Computes how much RAM and disk a study needs, and checks that the host has them, before the first byte is written.

use std::path::Path;

use anyhow::{Context, Result, bail};
use headwater_block::size;
use headwater_volume::{CacheMode, disk_mode_ram_bytes};

use crate::disks::overflow_bytes;
use crate::machine::available_memory_bytes;
use crate::peers;
use crate::study::{Case, System};

/// RAM in addition to the limits of the volumes: buffers, and the program itself.
const BESIDES_BYTES: u64 = 128 << 20;

/// RAM and disk that the cases of a run need at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// RAM, in bytes.
    pub ram_bytes: u64,
    /// Disk, in bytes.
    pub disk_bytes: u64,
}

impl Needs {
    /// The needs of these cases, which are all open at the same time.
    pub fn of(cases: &[Case]) -> Self {
        let mut needs = Self { ram_bytes: BESIDES_BYTES, disk_bytes: 0 };
        for case in cases {
            match case.system {
                System::Raw => needs.disk_bytes += case.set_bytes,
                System::Peer(_) => needs.disk_bytes += peers::disk_bytes(case.set_bytes),
                System::Cache(cache) => {
                    needs.ram_bytes += match cache.mode {
                        CacheMode::Disk => disk_mode_ram_bytes(false),
                        _ => cache.ram_bytes,
                    };
                    needs.disk_bytes += overflow_bytes(case.set_bytes);
                }
            }
        }
        needs
    }

    /// The needs as text for people.
    pub fn summary(&self) -> String {
        format!("{} RAM and {} disk", size::format(self.ram_bytes), size::format(self.disk_bytes))
    }

    /// Fails if the host does not meet the needs.
    pub fn check(self, dir: &Path) -> Result<()> {
        let stat = rustix::fs::statvfs(dir)
            .with_context(|| format!("cannot read the free space of {}", dir.display()))?;
        let free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free_bytes < self.disk_bytes {
            bail!(
                "not enough disk: the study needs {}, but {} has {} free; choose another directory with --work-dir, or use --quick",
                size::format(self.disk_bytes),
                dir.display(),
                size::format(free_bytes)
            );
        }
        let available_bytes = available_memory_bytes();
        if available_bytes < self.ram_bytes {
            bail!(
                "not enough RAM: the study needs {}, but {} are available; end other programs, or use --quick",
                size::format(self.ram_bytes),
                size::format(available_bytes)
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::studies::study_001;

    #[test]
    fn a_lack_of_disk_or_ram_is_reported_with_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let lack = |ram_bytes, disk_bytes| {
            Needs { ram_bytes, disk_bytes }.check(dir.path()).unwrap_err().to_string()
        };
        let disk = lack(0, 1 << 60);
        assert!(
            disk.contains("not enough disk: the study needs 1024.0 PiB") && disk.contains("free"),
            "{disk}"
        );
        let ram = lack(1 << 60, 0);
        assert!(ram.contains("not enough RAM: the study needs 1024.0 PiB"), "{ram}");
        assert!(Needs { ram_bytes: 0, disk_bytes: 0 }.check(dir.path()).is_ok());
    }

    #[test]
    fn the_full_study_needs_its_sets_and_their_ram() {
        let needs = Needs::of(&study_001(false).cases);
        assert!(needs.ram_bytes > 8 << 30 && needs.ram_bytes < 9 << 30, "{needs:?}");
        assert!(needs.disk_bytes > 40 << 30 && needs.disk_bytes < 60 << 30, "{needs:?}");
    }
}
