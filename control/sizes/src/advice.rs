//! Splits the sizes of a table into those that can hold an OS disk and the others, with the reasons against
//! the others. For `headwater size advise`.

use serde::Serialize;

use crate::place::{NotPlaced, PlaceReason, Placement, SizeRefusal, place};
use crate::question::{Question, QuestionError};
use crate::size::MachineSize;
use crate::table::SizeTable;

/// The advice for a whole table.
#[derive(Debug, Serialize)]
pub struct Advice<'a> {
    /// Sizes that can hold the disk, the smallest first.
    pub fitting: Vec<Fitting<'a>>,
    /// Sizes that cannot hold the disk, in the order of the table.
    pub others: Vec<Other<'a>>,
}

/// A size that can hold the disk.
#[derive(Debug, Serialize)]
pub struct Fitting<'a> {
    /// The size.
    pub size: &'a MachineSize,
    /// The place of the disk on that size.
    pub placement: Placement,
}

/// A size that cannot hold the disk.
#[derive(Debug, Serialize)]
pub struct Other<'a> {
    /// The name of the size.
    pub size: &'a str,
    /// The reasons.
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

/// Asks for each size of a table whether it can hold the OS disk.
///
/// # Errors
/// [`QuestionError`]: the question contradicts itself.
pub fn advise<'a>(table: &'a SizeTable, question: &Question) -> Result<Advice<'a>, QuestionError> {
    question.check()?;
    let mut advice = Advice { fitting: Vec::new(), others: Vec::new() };
    for size in &table.sizes {
        match place(size, question) {
            Ok(placement) => advice.fitting.push(Fitting { size, placement }),
            Err(reasons) => advice.others.push(Other { size: &size.name, reasons }),
        }
    }
    // A stable sort: equal sizes stay in the order of the table.
    advice.fitting.sort_by_key(|fitting| (fitting.size.vcpus_available, fitting.size.memory_bytes));
    Ok(advice)
}

impl<'a> Advice<'a> {
    /// The sizes that cannot hold the disk, grouped by their main reason, the largest group first.
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

/// The first reason against the size itself, or else the reason against the place that came nearest to a fit.
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
        Some(PlaceReason::NotOffered) => "the cloud does not offer these places on the size",
        Some(PlaceReason::AboveLimit { .. }) => "the disk is larger than any OS disk at these places",
        Some(PlaceReason::NotPublished) => "the space of the place is not published",
        Some(PlaceReason::ManagedHasNoFullCopy) => "a full copy needs a local place",
        Some(PlaceReason::FullCopyNeedsVcpus { .. }) => "a full copy needs 8 vCPUs",
        Some(PlaceReason::FullCopyNotDocumented) => "no full copy in this series",
        Some(PlaceReason::TooSmall { .. }) => "every place is too small",
        Some(PlaceReason::TooLittleLeft { .. }) => "too little temp space is left",
        None => "the question names no place",
    }
}
