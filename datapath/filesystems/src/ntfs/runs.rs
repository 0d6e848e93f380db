//! Runs: where the clusters of a value are on the disk.
//!
//! A value that is spread over the disk has more runs than one record can hold. Each record then has a part of them, and the
//! parts are joined here in the order of the clusters of the value.

use super::boot::Layout;
use super::record::Clusters;
use crate::{Fault, fault};

/// The most runs of one value. Windows itself stops at about 1.5 million.
pub(super) const VALUE_RUNS_MAX: usize = 2 << 20;

/// Clusters of a value that follow one another on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first of them, counted in the value.
    pub(super) first: u64,
    pub(super) clusters: u64,
    /// The first of them on the disk. `None`: they read as zeroes and take nothing.
    pub(super) on_disk: Option<u64>,
}

impl Run {
    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(self.clusters)
    }
}

/// A number of up to eight bytes with a sign, little-endian.
fn signed(bytes: &[u8]) -> i64 {
    let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
    let mut all = [fill; 8];
    for (to, from) in all.iter_mut().zip(bytes) {
        *to = *from;
    }
    i64::from_le_bytes(all)
}

/// Calls `found` with the runs of a part. All of them lie in the volume, and they have exactly the clusters that the part
/// says it has.
pub(super) fn each_run(
    part: &Clusters<'_>,
    layout: &Layout,
    mut found: impl FnMut(Run) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let unsound = || fault("the list of the fragments of a file (its runs) is invalid");
    let mut rest = part.runs;
    let (mut at, mut place) = (part.first, 0i64);
    while let Some((header, after)) = rest.split_first().filter(|(header, _)| **header != 0) {
        let (len_bytes, place_bytes) = (usize::from(header & 15), usize::from(header >> 4));
        let (len, after) =
            after.split_at_checked(len_bytes).filter(|_| len_bytes <= 8).ok_or_else(unsound)?;
        let (step, after) =
            after.split_at_checked(place_bytes).filter(|_| place_bytes <= 8).ok_or_else(unsound)?;
        rest = after;
        let clusters =
            u64::try_from(signed(len)).ok().filter(|clusters| *clusters > 0).ok_or_else(unsound)?;
        let on_disk = if step.is_empty() {
            None
        } else {
            place = place.checked_add(signed(step)).ok_or_else(unsound)?;
            let first = u64::try_from(place).ok();
            let end = first.and_then(|first| first.checked_add(clusters));
            Some(
                first
                    .filter(|_| end.is_some_and(|end| end <= layout.clusters))
                    .ok_or_else(|| fault("a file has clusters outside of its volume"))?,
            )
        };
        found(Run { first: at, clusters, on_disk })?;
        at = at.checked_add(clusters).filter(|at| *at < 1 << 63).ok_or_else(unsound)?;
    }
    // A value without clusters says that its last one is number -1.
    if part.last.wrapping_add(1) == at { Ok(()) } else { Err(unsound()) }
}

/// The runs of a whole value.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs(Vec<Run>);

impl Runs {
    /// Adds a part, which must begin where the one before ended.
    pub(super) fn add(&mut self, part: &Clusters<'_>, layout: &Layout) -> Result<(), Fault> {
        if part.first != self.end() {
            return Err(fault("a part of the list of a file's fragments is missing"));
        }
        each_run(part, layout, |run| {
            if self.0.len() >= VALUE_RUNS_MAX {
                let why = "a file of the NTFS has too many fragments: defragment it, or it is damaged";
                return Err(fault(format!("{why} (the limit is {VALUE_RUNS_MAX})")));
            }
            self.0.push(run);
            Ok(())
        })
    }

    /// How many clusters of the value it says the place of.
    pub(super) fn end(&self) -> u64 {
        self.0.last().map_or(0, Run::end)
    }

    pub(super) fn all(&self) -> &[Run] {
        &self.0
    }

    /// The run that has a cluster of the value.
    pub(super) fn run_of(&self, cluster: u64) -> Option<Run> {
        let after = self.0.partition_point(|run| run.first <= cluster);
        let run = self.0.get(after.checked_sub(1)?)?;
        (cluster < run.end()).then_some(*run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout =
        Layout { cluster_bytes: 4096, clusters: 1000, record_bytes: 1024, index_bytes: 4096, mft_cluster: 4 };

    fn read(first: u64, last: u64, runs: &[u8]) -> Result<Vec<Run>, Fault> {
        let mut out = Vec::new();
        let part = Clusters { first, last, runs, sizes: None, unit_power: 0 };
        each_run(&part, &LAYOUT, |run| {
            out.push(run);
            Ok(())
        })?;
        Ok(out)
    }

    #[test]
    fn places_are_steps_from_the_place_before() {
        let run = |first, clusters, on_disk| Run { first, clusters, on_disk };
        let found = read(10, 25, &[0x21, 5, 0x2c, 1, 0x01, 3, 0x11, 8, 0x9c, 0, 0x77]).unwrap();
        assert_eq!(found, [run(10, 5, Some(300)), run(15, 3, None), run(18, 8, Some(200))]);
        assert_eq!(read(0, u64::MAX, &[0]).unwrap(), []);
        for (last, bad) in [
            (4, &[0x11, 5, 0xff, 0][..]),
            (4, &[0x21, 5, 0xe7, 3, 0]),
            (5, &[0x11, 5, 1, 0]),
            (4, &[0x11, 5]),
            (4, &[0x91, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
            (4, &[0x10, 1, 0]),
            (4, &[0x11, 0x80, 1, 0]),
        ] {
            assert!(read(0, last, bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn parts_are_joined_without_gaps() {
        let part = |first, last, runs| Clusters { first, last, runs, sizes: None, unit_power: 0 };
        let mut runs = Runs::default();
        runs.add(&part(0, 4, &[0x11, 5, 9, 0]), &LAYOUT).unwrap();
        assert!(runs.clone().add(&part(6, 6, &[0x11, 1, 9, 0]), &LAYOUT).is_err());
        runs.add(&part(5, 5, &[0x11, 1, 9, 0]), &LAYOUT).unwrap();
        assert_eq!(runs.run_of(4).unwrap().on_disk, Some(9));
        assert_eq!(runs.run_of(5).unwrap(), Run { first: 5, clusters: 1, on_disk: Some(9) });
        assert_eq!((runs.run_of(6), runs.end()), (None, 6));
    }
}
