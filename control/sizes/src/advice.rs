//! Which sizes of a table hold an OS disk, and why the others do not.

use serde::Serialize;

use crate::place::{NotPlaced, PlaceReason, Placement, SizeRefusal, place};
use crate::question::{Question, QuestionError};
use crate::size::MachineSize;
use crate::table::SizeTable;

/// The answer for a whole table.
#[derive(Debug, Serialize)]
pub struct Advice<'a> {
    /// Sizes that hold it, the smallest first.
    pub fitting: Vec<Fitting<'a>>,
    /// Sizes that do not, in the order of the table.
    pub others: Vec<Other<'a>>,
}

/// A size that holds the disk.
#[derive(Debug, Serialize)]
pub struct Fitting<'a> {
    /// The size.
    pub size: &'a MachineSize,
    /// Where on it.
    pub placement: Placement,
}

/// A size that does not.
#[derive(Debug, Serialize)]
pub struct Other<'a> {
    /// The name of the size.
    pub size: &'a str,
    /// Why not.
    pub reasons: NotPlaced,
}

/// Sizes that have the same main reason.
#[derive(Debug, PartialEq, Eq)]
pub struct Group<'a> {
    /// The reason.
    pub reason: &'static str,
    /// The names of the sizes.
    pub sizes: Vec<&'a str>,
}

/// Asks each size of a table.
///
/// # Errors
/// [`QuestionError`]: the question makes no sense.
pub fn advise<'a>(table: &'a SizeTable, question: &Question) -> Result<Advice<'a>, QuestionError> {
    question.check()?;
    let mut advice = Advice { fitting: Vec::new(), others: Vec::new() };
    for size in &table.sizes {
        match place(size, question) {
            Ok(placement) => advice.fitting.push(Fitting { size, placement }),
            Err(reasons) => advice.others.push(Other { size: &size.name, reasons }),
        }
    }
    // Stable: equal sizes stay in the order of the table.
    advice.fitting.sort_by_key(|fitting| (fitting.size.vcpus_available, fitting.size.memory_bytes));
    Ok(advice)
}

impl<'a> Advice<'a> {
    /// The others by their main reason, the most frequent first.
    pub fn groups(&self) -> Vec<Group<'a>> {
        let mut groups: Vec<Group<'a>> = Vec::new();
        for other in &self.others {
            let reason = main_reason(&other.reasons);
            match groups.iter_mut().find(|group| group.reason == reason) {
                Some(group) => group.sizes.push(other.size),
                None => groups.push(Group { reason, sizes: vec![other.size] }),
            }
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.sizes.len()));
        groups
    }
}

/// The first reason of the size, or that of the place which came nearest to a fit.
fn main_reason(reasons: &NotPlaced) -> &'static str {
    if let Some(refusal) = reasons.size.first() {
        return match refusal {
            SizeRefusal::Retired { .. } => "retired",
            SizeRefusal::OtherArchitecture { .. } => "other processors than the image is for",
            SizeRefusal::OtherGeneration { .. } => "do not boot the image's generation",
            SizeRefusal::TooFewVcpus { .. } => "too few vCPUs",
            SizeRefusal::TooLittleMemory { .. } => "too little memory",
        };
    }
    match reasons.places.iter().map(|refusal| &refusal.why).max() {
        Some(PlaceReason::NotEphemeral) => "no ephemeral OS disks",
        Some(PlaceReason::NotOffered) => "the cloud does not offer these places there",
        Some(PlaceReason::AboveLimit { .. }) => "the disk is larger than any OS disk there",
        Some(PlaceReason::NotPublished) => "the space of the place is not published",
        Some(PlaceReason::ManagedHasNoFullCopy) => "a full copy needs a local place",
        Some(PlaceReason::FullCopyNeedsVcpus { .. }) => "a full copy needs 8 vCPUs",
        Some(PlaceReason::FullCopyNotDocumented) => "no full copy in this series",
        Some(PlaceReason::TooSmall { .. }) => "every place is too small",
        Some(PlaceReason::TooLittleLeft { .. }) => "too little temp space is left",
        None => "no place was asked for",
    }
}
