//! Finds the place of a machine's OS disk on one size, and computes the space that is left on the size.
//!
//! The functions are pure. The first place in the question's order that can hold the disk is chosen.
//!
//! ```text
//!   required, local:  OS disk (+ 1 GiB for trusted launch), inclusive
//!   required, full:   more than 2 x OS disk + 1 GiB (+ 1 GiB for trusted launch)
//!   taken, cache:     nothing of the temp disk
//!   taken, temp:      OS disk, with a full copy twice (+ 1 GiB for trusted launch)
//!   taken, nvme:      the same, rounded up to whole disks
//! ```

use serde::Serialize;

use crate::question::Question;
use crate::size::{Architecture, GIB, Generation, MachineSize, OsDiskPlace, Rate, gib};

/// The largest ephemeral OS disk in Azure.
pub const EPHEMERAL_MAX_BYTES: u64 = 2040 * GIB;

/// The largest managed OS disk in Azure.
pub const MANAGED_MAX_BYTES: u64 = 4095 * GIB;

/// The fewest vCPUs with which Azure offers a full copy.
pub const FULL_COPY_MIN_VCPUS: u32 = 8;

/// Space that trusted launch needs in addition to the OS disk.
const TRUSTED_LAUNCH_BYTES: u64 = GIB;

/// The place of an OS disk on a size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// The place.
    pub place: OsDiskPlace,
    /// The space of that place; `None` for a managed disk, which uses no space of the size.
    pub capacity_bytes: Option<u64>,
    /// The part of that space that the OS disk occupies. On NVMe it is rounded up to whole disks.
    pub taken_bytes: u64,
    /// The local space that is left for page file and scratch.
    pub left: Left,
    /// The highest read rate of the size at that place.
    pub read: Rate,
    /// The highest write rate of the size at that place.
    pub write: Rate,
}

/// The local space that a machine has beside its OS disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Free space of the temp disk; `None` if its size is not published, 0 without a temp disk.
    pub temp_bytes: Option<u64>,
    /// The number of NVMe disks that the OS disk does not use.
    pub nvme_disks: u64,
    /// The total size of these NVMe disks.
    pub nvme_bytes: u64,
}

impl Left {
    /// Whether the temp disk, or the free NVMe disks together, have this much space.
    fn holds(&self, wanted_bytes: u64) -> bool {
        self.temp_bytes.unwrap_or(0).max(self.nvme_bytes) >= wanted_bytes
    }

    /// Whether no device is left for page file and scratch.
    pub fn is_nothing(&self) -> bool {
        !self.holds(1)
    }
}

/// A reason against the size itself, independent of the place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SizeRefusal {
    /// The size is retired.
    Retired {
        /// The day on which it was retired.
        on: crate::Date,
    },
    /// The image is built for another processor architecture.
    OtherArchitecture {
        /// The architecture of the image.
        image: Architecture,
        /// The architecture of the size.
        size: Architecture,
    },
    /// The size does not boot the image's generation.
    OtherGeneration {
        /// The generation of the image.
        image: Generation,
        /// The generations that the size boots.
        size: Vec<Generation>,
    },
    /// Too few vCPUs.
    TooFewVcpus {
        /// The vCPUs that the guest gets.
        has: u32,
        /// The fewest vCPUs that the question demands.
        wanted: u32,
    },
    /// Too little memory.
    TooLittleMemory {
        /// The size's memory.
        has_bytes: u64,
        /// The least memory that the question demands.
        wanted_bytes: u64,
    },
}

/// The reason why one place is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlaceRefusal {
    /// The place.
    pub place: OsDiskPlace,
    /// The reason.
    #[serde(flatten)]
    pub why: PlaceReason,
}

/// A reason against one place, in the order of the checks: a later reason is nearer to a fit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum PlaceReason {
    /// The size has no ephemeral OS disks.
    NotEphemeral,
    /// The cloud does not offer this place on this size.
    NotOffered,
    /// The disk is larger than the cloud allows there.
    AboveLimit {
        /// The largest disk that the cloud allows.
        max_bytes: u64,
    },
    /// The space of the place is not published.
    NotPublished,
    /// A managed disk is always complete, so a full copy of it makes no sense.
    ManagedHasNoFullCopy,
    /// The size has too few vCPUs for a full copy.
    FullCopyNeedsVcpus {
        /// The size's vCPUs.
        has: u32,
    },
    /// A full copy is not documented for the size.
    FullCopyNotDocumented,
    /// There is too little space.
    TooSmall {
        /// The space of the place.
        has_bytes: u64,
        /// The least space that is needed.
        needs_bytes: u64,
        /// Whether the space must be larger than `needs_bytes`; otherwise `needs_bytes` suffices.
        is_exclusive: bool,
    },
    /// The disk fits, but leaves too little local space.
    TooLittleLeft {
        /// The free space of the temp disk or of the NVMe disks, whichever is larger.
        left_bytes: u64,
        /// The least space that the question demands.
        wanted_bytes: u64,
    },
}

/// Why a size is refused: the reasons against the size itself, and against each place of the question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotPlaced {
    /// Reasons against the size itself.
    pub size: Vec<SizeRefusal>,
    /// Reasons against places, in the order of the question. A place that fits is not in the list.
    pub places: Vec<PlaceRefusal>,
}

/// The placement of a machine's OS disk on this size.
///
/// # Errors
/// [`NotPlaced`]: the size is refused, or no place of the question can hold the disk.
pub fn place(size: &MachineSize, question: &Question) -> Result<Placement, NotPlaced> {
    let refusals = size_refusals(size, question);
    let mut places = Vec::new();
    let mut fitting = None;
    for place in &question.places {
        match place_on(size, *place, question) {
            Ok(placement) => fitting = fitting.or(Some(placement)),
            Err(why) => places.push(PlaceRefusal { place: *place, why }),
        }
    }
    match fitting {
        Some(placement) if refusals.is_empty() => Ok(placement),
        _ => Err(NotPlaced { size: refusals, places }),
    }
}

fn size_refusals(size: &MachineSize, question: &Question) -> Vec<SizeRefusal> {
    let mut refusals = Vec::new();
    if let Some(on) = size.retired.filter(|on| *on <= question.today) {
        refusals.push(SizeRefusal::Retired { on });
    }
    let image = question.image.architecture;
    if size.architecture != image {
        refusals.push(SizeRefusal::OtherArchitecture { image, size: size.architecture });
    }
    if let Some(image) = question.generation().filter(|wanted| !size.generations.contains(wanted)) {
        refusals.push(SizeRefusal::OtherGeneration { image, size: size.generations.clone() });
    }
    if size.vcpus_available < question.vcpus_min {
        let (has, wanted) = (size.vcpus_available, question.vcpus_min);
        refusals.push(SizeRefusal::TooFewVcpus { has, wanted });
    }
    if size.memory_bytes < question.memory_min_bytes {
        let (has_bytes, wanted_bytes) = (size.memory_bytes, question.memory_min_bytes);
        refusals.push(SizeRefusal::TooLittleMemory { has_bytes, wanted_bytes });
    }
    refusals
}

fn place_on(size: &MachineSize, place: OsDiskPlace, question: &Question) -> Result<Placement, PlaceReason> {
    let placement = match place {
        OsDiskPlace::Managed => on_managed_disk(size, question)?,
        local => on_local_disk(size, local, question)?,
    };
    let (left, wanted_bytes) = (placement.left, question.temp_left_bytes);
    if !left.holds(wanted_bytes) {
        let left_bytes = left.temp_bytes.unwrap_or(0).max(left.nvme_bytes);
        return Err(PlaceReason::TooLittleLeft { left_bytes, wanted_bytes });
    }
    Ok(placement)
}

fn on_managed_disk(size: &MachineSize, question: &Question) -> Result<Placement, PlaceReason> {
    if question.image.os_disk_bytes > MANAGED_MAX_BYTES {
        return Err(PlaceReason::AboveLimit { max_bytes: MANAGED_MAX_BYTES });
    }
    if question.full_copy {
        return Err(PlaceReason::ManagedHasNoFullCopy);
    }
    Ok(Placement {
        place: OsDiskPlace::Managed,
        capacity_bytes: None,
        taken_bytes: 0,
        left: all_of(size),
        read: size.uncached,
        write: size.uncached,
    })
}

fn on_local_disk(
    size: &MachineSize,
    place: OsDiskPlace,
    question: &Question,
) -> Result<Placement, PlaceReason> {
    let os_disk_bytes = question.image.os_disk_bytes;
    if !size.ephemeral {
        return Err(PlaceReason::NotEphemeral);
    }
    if !size.places.contains(&place) {
        return Err(PlaceReason::NotOffered);
    }
    if os_disk_bytes > EPHEMERAL_MAX_BYTES {
        return Err(PlaceReason::AboveLimit { max_bytes: EPHEMERAL_MAX_BYTES });
    }
    // A figure that is not published counts neither as zero nor as enough.
    let capacity_bytes = size.capacity_bytes(place).ok_or(PlaceReason::NotPublished)?;
    if question.full_copy && size.vcpus < FULL_COPY_MIN_VCPUS {
        return Err(PlaceReason::FullCopyNeedsVcpus { has: size.vcpus });
    }
    if question.full_copy && !size.full_copy {
        return Err(PlaceReason::FullCopyNotDocumented);
    }
    let copies = if question.full_copy { 2 } else { 1 };
    let beside = if question.trusted_launch { TRUSTED_LAUNCH_BYTES } else { 0 };
    // At most 2 x 2040 GiB + 1 GiB: no sum overflows.
    let wanted_bytes = copies * os_disk_bytes + beside;
    let needs_bytes = if question.full_copy { wanted_bytes + GIB } else { wanted_bytes };
    let is_exclusive = question.full_copy;
    if capacity_bytes < needs_bytes || (is_exclusive && capacity_bytes == needs_bytes) {
        return Err(PlaceReason::TooSmall { has_bytes: capacity_bytes, needs_bytes, is_exclusive });
    }
    Ok(taken(size, place, capacity_bytes, wanted_bytes))
}

/// The placement of `wanted_bytes`, which must fit.
fn taken(size: &MachineSize, place: OsDiskPlace, capacity_bytes: u64, wanted_bytes: u64) -> Placement {
    let mut left = all_of(size);
    let (mut read, mut write) = (size.cached_temp, size.cached_temp);
    let mut taken_bytes = wanted_bytes;
    match (place, size.nvme) {
        (OsDiskPlace::Nvme, Some(disks)) => {
            let used = wanted_bytes.div_ceil(disks.each_bytes.max(1)).min(disks.count);
            taken_bytes = used.saturating_mul(disks.each_bytes);
            left.nvme_disks = disks.count - used;
            left.nvme_bytes = left.nvme_disks.saturating_mul(disks.each_bytes);
            // The OS disk has the rate of the disks that it occupies.
            read = size.nvme_read.share(used, disks.count);
            write = size.nvme_write.share(used, disks.count);
        }
        (OsDiskPlace::Temp, _) => left.temp_bytes = capacity_bytes.checked_sub(wanted_bytes),
        _ => {}
    }
    Placement { place, capacity_bytes: Some(capacity_bytes), taken_bytes, left, read, write }
}

fn all_of(size: &MachineSize) -> Left {
    let (nvme_disks, nvme_bytes) = size.nvme.map_or((0, 0), |disks| (disks.count, disks.total_bytes()));
    Left { temp_bytes: size.temp_bytes, nvme_disks, nvme_bytes }
}

impl std::fmt::Display for SizeRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Retired { on } => write!(f, "retired on {on}"),
            Self::OtherArchitecture { image, size } => {
                write!(f, "its processors are {size}, but the image is for {image}")
            }
            Self::OtherGeneration { image, size } => {
                let boots: Vec<String> = size.iter().map(Generation::to_string).collect();
                write!(f, "boots only generation {}, the image is of generation {image}", boots.join(" and "))
            }
            Self::TooFewVcpus { has, wanted } => write!(f, "{has} of {wanted} vCPUs"),
            Self::TooLittleMemory { has_bytes, wanted_bytes } => {
                write!(f, "{} of {} memory", gib(*has_bytes), gib(*wanted_bytes))
            }
        }
    }
}

impl std::fmt::Display for PlaceReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotEphemeral => f.write_str("no ephemeral OS disks"),
            Self::NotOffered => f.write_str("not offered"),
            Self::AboveLimit { max_bytes } => {
                write!(f, "the largest OS disk at this place has {}", gib(*max_bytes))
            }
            Self::NotPublished => f.write_str("its space is not published"),
            Self::ManagedHasNoFullCopy => f.write_str("a full copy needs a local place"),
            Self::FullCopyNeedsVcpus { has } => {
                write!(f, "a full copy needs {FULL_COPY_MIN_VCPUS} vCPUs, it has {has}")
            }
            Self::FullCopyNotDocumented => f.write_str("no full copy in this series"),
            Self::TooSmall { has_bytes, needs_bytes, is_exclusive } => {
                let more = if *is_exclusive { "more than " } else { "" };
                write!(f, "has {}, needs {more}{}", gib(*has_bytes), gib(*needs_bytes))
            }
            Self::TooLittleLeft { left_bytes, wanted_bytes } => {
                write!(f, "leaves {} of {} temp space", gib(*left_bytes), gib(*wanted_bytes))
            }
        }
    }
}

impl std::fmt::Display for PlaceRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}

impl std::fmt::Display for NotPlaced {
    /// All reasons on one line. The places are left out if the size itself is refused.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons: Vec<String> = match self.size.is_empty() {
            true => self.places.iter().map(PlaceRefusal::to_string).collect(),
            false => self.size.iter().map(SizeRefusal::to_string).collect(),
        };
        f.write_str(&reasons.join("; "))
    }
}
