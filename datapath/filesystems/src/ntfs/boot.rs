//! The boot sector: how long sectors, clusters and records are, and where the table of files (MFT) begins.

use super::fields::{u8_at, u16_at, u64_at};
use crate::{Fault, fault};

/// The largest cluster: Windows 10 makes clusters of up to 2 MiB.
const CLUSTER_BYTES_MAX: u64 = 2 << 20;
/// The largest record of a file or a directory. Disks with sectors of 4 KiB have records of 4 KiB.
pub(super) const RECORD_BYTES_MAX: u64 = 64 << 10;
/// The unit of update sequences, whatever the sectors of the disk are. No record is shorter.
pub(super) const STRIDE_BYTES: usize = 512;

/// The layout of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) cluster_bytes: u64,
    /// Whole clusters of the volume. The sectors after them hold the copy of the boot sector.
    pub(super) clusters: u64,
    pub(super) record_bytes: u64,
    pub(super) index_bytes: u64,
    /// The first cluster of the table of files (MFT).
    pub(super) mft_cluster: u64,
}

/// Whether a boot sector is that of an NTFS.
pub(super) fn is_ntfs(boot: &[u8; 512]) -> bool {
    boot.get(3..11) == Some(b"NTFS    ") && boot.get(510..) == Some(&[0x55, 0xaa])
}

/// A number of bytes that is stored as a count of clusters, or as a negative power of two.
fn record_bytes(value: u8, cluster_bytes: u64, what: &str) -> Result<u64, Fault> {
    let bytes = match value {
        0..0x80 => u64::from(value).checked_mul(cluster_bytes),
        _ => 1u64.checked_shl(u32::from(value.wrapping_neg())),
    };
    bytes
        .filter(|bytes| bytes.is_power_of_two() && (512..=RECORD_BYTES_MAX).contains(bytes))
        .ok_or_else(|| fault(format!("its boot sector is damaged: {value:#x} is not a size of {what}")))
}

impl Layout {
    pub(super) fn of(boot: &[u8; 512]) -> Result<Self, Fault> {
        let missing = || fault("its boot sector is too short");
        let byte = |at| u8_at(boot, at).ok_or_else(missing);
        let long = |at| u64_at(boot, at).ok_or_else(missing);
        let sector_bytes = u64::from(u16_at(boot, 11).ok_or_else(missing)?);
        if !sector_bytes.is_power_of_two() || !(256..=4096).contains(&sector_bytes) {
            return Err(fault(format!(
                "its boot sector is damaged: {sector_bytes} is not a size of sectors"
            )));
        }
        // More than 64 KiB in a cluster is a negative power of two.
        let sectors = match byte(13)? {
            count @ ..=0x80 => u64::from(count),
            power => 1u64.checked_shl(u32::from(power.wrapping_neg())).unwrap_or(0),
        };
        let cluster_bytes = sector_bytes.saturating_mul(sectors);
        if !sectors.is_power_of_two() || !(512..=CLUSTER_BYTES_MAX).contains(&cluster_bytes) {
            let sectors = byte(13)?;
            return Err(fault(format!("its boot sector is damaged: {sectors:#x} is not a size of clusters")));
        }
        let clusters = long(40)?.checked_mul(sector_bytes).map_or(0, |bytes| bytes / cluster_bytes);
        let mft_cluster = long(48)?;
        if mft_cluster == 0 || mft_cluster >= clusters {
            let last = clusters.saturating_sub(1);
            return Err(fault(format!(
                "its boot sector is damaged: it says that the master file table (MFT) begins in cluster {mft_cluster}, which is not within 1 to {last}"
            )));
        }
        Ok(Self {
            cluster_bytes,
            clusters,
            record_bytes: record_bytes(byte(64)?, cluster_bytes, "MFT records")?,
            index_bytes: record_bytes(byte(68)?, cluster_bytes, "index records")?,
            mft_cluster,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(sector_bytes: u16, clusters_of: u8, record: u8, index: u8) -> [u8; 512] {
        let mut boot = [0; 512];
        boot[11..13].copy_from_slice(&sector_bytes.to_le_bytes());
        boot[13] = clusters_of;
        boot[40..48].copy_from_slice(&100_000u64.to_le_bytes());
        boot[48..56].copy_from_slice(&4u64.to_le_bytes());
        boot[64] = record;
        boot[68] = index;
        boot
    }

    #[test]
    fn sizes_are_counts_or_negative_powers() {
        let layout = |boot| Layout::of(&boot).map(|l| (l.cluster_bytes, l.record_bytes, l.index_bytes));
        assert_eq!(layout(boot(512, 8, 0xf6, 1)).unwrap(), (4096, 1024, 4096));
        assert_eq!(layout(boot(512, 0x80, 0xf6, 0xf4)).unwrap(), (65_536, 1024, 4096));
        // 128 KiB, and the 2 MiB of Windows 10.
        assert_eq!(layout(boot(512, 0xf8, 0xf6, 0xf4)).unwrap(), (131_072, 1024, 4096));
        assert_eq!(layout(boot(512, 0xf4, 0xf6, 0xf4)).unwrap(), (2 << 20, 1024, 4096));
        assert_eq!(layout(boot(4096, 1, 1, 1)).unwrap(), (4096, 4096, 4096));
        for bad in [
            boot(0, 8, 0xf6, 1),
            boot(500, 8, 0xf6, 1),
            boot(512, 0, 0xf6, 1),
            boot(512, 3, 0xf6, 1),
            boot(512, 0xf3, 0xf6, 1),
            boot(512, 8, 0, 1),
            boot(512, 8, 3, 1),
            boot(512, 8, 0xff, 1),
            boot(512, 8, 0xf6, 0x80),
            boot(512, 0x80, 2, 1),
        ] {
            assert!(Layout::of(&bad).is_err(), "{:?}", layout(bad));
        }
    }
}
