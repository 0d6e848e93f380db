//! A question about the sizes of a table, which module `place` answers for one size: the OS disk, the
//! allowed places in order of preference, and the space that must be left.

use serde::Serialize;

use crate::date::Date;
use crate::size::{Architecture, GIB, Generation, OsDiskPlace, gib};

/// Properties of the image that a machine boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ImageFacts {
    /// The size of the OS disk.
    pub os_disk_bytes: u64,
    /// The generation of virtual hardware that it boots on. `None`: unknown, and no size is refused because of it.
    pub generation: Option<Generation>,
    /// The processor architecture that it runs on.
    pub architecture: Architecture,
}

/// A question about sizes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Question {
    /// The image.
    pub image: ImageFacts,
    /// The allowed places, in order of preference.
    pub places: Vec<OsDiskPlace>,
    /// Whether the whole image must be copied to the local disk, so that the machine no longer needs remote storage.
    pub full_copy: bool,
    /// Whether the machine boots with trusted launch, which needs generation 2 and 1 GiB in addition to the OS disk.
    pub trusted_launch: bool,
    /// The space that must be left on the temp disk, or on the NVMe disks together.
    pub temp_left_bytes: u64,
    /// The fewest vCPUs for the guest.
    pub vcpus_min: u32,
    /// The least memory for the guest.
    pub memory_min_bytes: u64,
    /// Today's date, because sizes are retired on a date.
    pub today: Date,
}

/// A question that contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuestionError {
    /// The disk's size is not a multiple of 1 GiB, as Azure demands.
    #[error("the OS disk has {0} bytes, but disks in Azure have whole GiB")]
    NotWholeGib(u64),
    /// The question names no place.
    #[error("no place is named")]
    NoPlace,
    /// A place is named twice.
    #[error("the place {0} is named twice")]
    PlaceTwice(OsDiskPlace),
    /// A managed disk is always complete.
    #[error("a full copy needs a local place, and only managed is named")]
    FullCopyOfManaged,
    /// Trusted launch is UEFI.
    #[error("trusted launch needs an image of generation 2, and this image is of generation 1")]
    TrustedLaunchNeedsUefi,
}

impl QuestionError {
    /// Advice: how to change the question.
    pub fn advice(&self) -> String {
        match self {
            Self::NotWholeGib(bytes) => format!("write for instance {}G", bytes.div_ceil(GIB).max(1)),
            Self::NoPlace => "write for instance cache,temp,nvme,managed".to_owned(),
            Self::PlaceTwice(_) => "name each place once, the best first".to_owned(),
            Self::FullCopyOfManaged => {
                "add cache, temp or nvme to the places, or leave out the full copy (--full-copy)".to_owned()
            }
            Self::TrustedLaunchNeedsUefi => {
                "leave trusted launch out, or use an image that boots by UEFI".to_owned()
            }
        }
    }
}

impl Question {
    /// A question about an OS disk of this size, with all places and no other conditions.
    pub fn about(os_disk_bytes: u64, today: Date) -> Self {
        Self {
            image: ImageFacts { os_disk_bytes, generation: None, architecture: Architecture::X64 },
            places: OsDiskPlace::ALL.to_vec(),
            full_copy: false,
            trusted_launch: false,
            temp_left_bytes: 0,
            vcpus_min: 0,
            memory_min_bytes: 0,
            today,
        }
    }

    /// Checks the question for contradictions.
    pub fn check(&self) -> Result<(), QuestionError> {
        let os_disk_bytes = self.image.os_disk_bytes;
        if os_disk_bytes == 0 || !os_disk_bytes.is_multiple_of(GIB) {
            return Err(QuestionError::NotWholeGib(os_disk_bytes));
        }
        if self.places.is_empty() {
            return Err(QuestionError::NoPlace);
        }
        let mut later = self.places.iter();
        while let Some(place) = later.next() {
            if later.clone().any(|other| other == place) {
                return Err(QuestionError::PlaceTwice(*place));
            }
        }
        if self.full_copy && !self.places.iter().any(|place| place.is_local()) {
            return Err(QuestionError::FullCopyOfManaged);
        }
        if self.trusted_launch && self.image.generation == Some(Generation::One) {
            return Err(QuestionError::TrustedLaunchNeedsUefi);
        }
        Ok(())
    }

    /// The generation that a size must boot.
    pub(crate) fn generation(&self) -> Option<Generation> {
        if self.trusted_launch { Some(Generation::Two) } else { self.image.generation }
    }

    /// The places as text: `cache, temp`.
    pub fn places_text(&self) -> String {
        let words: Vec<&str> = self.places.iter().map(|place| place.word()).collect();
        words.join(", ")
    }
}

impl std::fmt::Display for Question {
    /// The question as text: `an OS disk of 127 GiB as a full copy on cache, temp or nvme`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an OS disk of {}", gib(self.image.os_disk_bytes))?;
        if self.full_copy {
            f.write_str(" with a full copy")?;
        }
        if self.trusted_launch {
            f.write_str(" with trusted launch")?;
        }
        match self.places.split_last() {
            Some((last, [])) => write!(f, ", on {last}"),
            Some((last, rest)) => {
                let rest: Vec<&str> = rest.iter().map(|place| place.word()).collect();
                write!(f, ", on {} or {last}", rest.join(", "))
            }
            None => Ok(()),
        }
    }
}
