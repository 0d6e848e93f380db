//! The properties of one size of virtual machine, such as memory, temp disk and rates, and the places where
//! such a machine can have its OS disk. Only data: module `table` reads it, module `place` decides with
//! it.

use serde::{Deserialize, Serialize};

use crate::date::Date;

/// Bytes of a GiB, the unit of a cloud's tables.
pub const GIB: u64 = 1 << 30;

/// A place for an OS disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OsDiskPlace {
    /// In the cache on the host's SSD. Azure's name is `CacheDisk`.
    Cache,
    /// On the temp disk. Azure's name is `ResourceDisk`.
    Temp,
    /// On local NVMe disks, rounded up to whole disks. Azure's name is `NvmeDisk`.
    Nvme,
    /// On a managed disk, over the network.
    Managed,
}

impl OsDiskPlace {
    /// All places, in the default order of preference.
    pub const ALL: [Self; 4] = [Self::Cache, Self::Temp, Self::Nvme, Self::Managed];

    /// The word for the place on the command line and in schemes.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Temp => "temp",
            Self::Nvme => "nvme",
            Self::Managed => "managed",
        }
    }

    /// The place with this word.
    pub fn parse(word: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|place| place.word() == word)
            .ok_or_else(|| format!("unknown place '{word}': use cache, temp, nvme or managed"))
    }

    /// Whether the disk is on the host, and lost with the host.
    pub const fn is_local(self) -> bool {
        !matches!(self, Self::Managed)
    }
}

impl std::fmt::Display for OsDiskPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.word())
    }
}

/// The generation of virtual hardware that an image boots on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Generation {
    /// BIOS.
    #[serde(rename = "1")]
    One,
    /// UEFI.
    #[serde(rename = "2")]
    Two,
}

impl Generation {
    /// Reads `1` or `2`.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "1" => Ok(Self::One),
            "2" => Ok(Self::Two),
            _ => Err(format!("there is no generation '{text}': write 1 (BIOS) or 2 (UEFI)")),
        }
    }
}

impl std::fmt::Display for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::One => "1",
            Self::Two => "2",
        })
    }
}

/// The architecture of a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// x86-64, as Headwater's images.
    X64,
    /// 64-bit Arm.
    Arm64,
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::X64 => "x64",
            Self::Arm64 => "arm64",
        })
    }
}

/// The highest rates of a size at a place; `None` if not published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rate {
    /// Operations per second.
    pub iops: Option<u64>,
    /// Bytes per second.
    pub bytes_per_second: Option<u64>,
}

impl Rate {
    /// The rate of `some` out of `all` equal disks, if this is the rate of all of them.
    pub(crate) fn share(self, some: u64, all: u64) -> Self {
        let part = |value: Option<u64>| value.and_then(|value| value.checked_mul(some)?.checked_div(all));
        Self { iops: part(self.iops), bytes_per_second: part(self.bytes_per_second) }
    }
}

/// Local NVMe disks, all of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NvmeDisks {
    /// The number of disks.
    pub count: u64,
    /// The size of each disk.
    pub each_bytes: u64,
}

impl NvmeDisks {
    /// The size of all disks together.
    pub const fn total_bytes(self) -> u64 {
        self.count.saturating_mul(self.each_bytes)
    }
}

/// The properties of a size, as a table or the cloud lists them. `None` means that the figure is not published; it
/// never means zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MachineSize {
    /// The name, such as `Standard_D8ds_v5`.
    pub name: String,
    /// The series, such as `Ddsv5`. Azure counts quota for each series.
    pub series: String,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The virtual CPUs that the guest gets; fewer than `vcpus` if the size constrains them.
    pub vcpus_available: u32,
    /// The memory in bytes.
    pub memory_bytes: u64,
    /// The architecture of its processors.
    pub architecture: Architecture,
    /// The size in bytes of the host cache for managed disks, on the host's SSD.
    pub cache_bytes: Option<u64>,
    /// Space of the temp disk.
    pub temp_bytes: Option<u64>,
    /// Local NVMe disks.
    pub nvme: Option<NvmeDisks>,
    /// The rate of the cache and the temp disk together.
    pub cached_temp: Rate,
    /// The read rate of all NVMe disks together.
    pub nvme_read: Rate,
    /// The write rate of all NVMe disks together.
    pub nvme_write: Rate,
    /// The rate of all managed disks together.
    pub uncached: Rate,
    /// Whether the size supports ephemeral OS disks.
    pub ephemeral: bool,
    /// The local places for an OS disk that the cloud offers on the size.
    pub places: Vec<OsDiskPlace>,
    /// Whether a full copy is documented for the size.
    pub full_copy: bool,
    /// The generations of virtual machines that the size supports.
    pub generations: Vec<Generation>,
    /// The day on which the cloud retires the size.
    pub retired: Option<Date>,
    /// The price per hour, in millionths of a US dollar.
    pub micro_usd_per_hour: Option<u64>,
    /// The source of the figures.
    pub source: String,
    /// A remark for people; may be empty.
    pub note: String,
}

impl MachineSize {
    /// The space that the size has at a local place.
    pub fn capacity_bytes(&self, place: OsDiskPlace) -> Option<u64> {
        match place {
            OsDiskPlace::Cache => self.cache_bytes,
            OsDiskPlace::Temp => self.temp_bytes,
            OsDiskPlace::Nvme => self.nvme.map(NvmeDisks::total_bytes),
            OsDiskPlace::Managed => None,
        }
    }

    /// Its generations as text: `1, 2`.
    pub fn generations_text(&self) -> String {
        let words: Vec<String> = self.generations.iter().map(Generation::to_string).collect();
        words.join(", ")
    }
}

/// A number of bytes in GiB, as in a cloud's tables: `127 GiB`, `3.5 GiB`.
pub fn gib(bytes: u64) -> String {
    let thousandths = u128::from(bytes % GIB) * 1000 / u128::from(GIB);
    let fraction = format!(".{thousandths:03}");
    format!("{}{} GiB", bytes / GIB, fraction.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_said_in_gib() {
        let said = [0, GIB / 2, 127 * GIB, 2040 * GIB, 218 * GIB + GIB / 4 * 3].map(gib);
        assert_eq!(said, ["0 GiB", "0.5 GiB", "127 GiB", "2040 GiB", "218.75 GiB"]);
    }

    #[test]
    fn a_share_of_an_unknown_rate_is_unknown() {
        let rate = Rate { iops: Some(300_000), bytes_per_second: None };
        assert_eq!(rate.share(1, 2), Rate { iops: Some(150_000), bytes_per_second: None });
        assert_eq!(rate.share(1, 0), Rate::default());
    }
}
