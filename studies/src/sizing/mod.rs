//! `sizing`: computes how much RAM a desktop's write cache needs, from a trace of its requests.
//!
//! A model of the cache ([`model`]) processes the whole trace at each size, without sampling. The real cache does the
//! same for one desktop at three sizes ([`check`]), so that the report shows the model's deviation.

pub mod check;
pub mod curve;
pub mod model;
mod report;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::desktop::{Profile, Sessions};
use crate::machine::Machine;
use crate::trace::Trace;
use crate::trace::blocks::Blocks;
use crate::validate;
use check::Checked;
use curve::Analysis;
pub use report::Report;

/// The result for a trace.
pub struct Sizing {
    /// The model's result.
    pub analysis: Analysis,
    /// The desktop whose requests were replayed on the real cache.
    pub checked_desktop: String,
    /// The results of the real cache.
    pub checked: Vec<Checked>,
    /// Why the check was skipped or is incomplete.
    pub unchecked: Option<String>,
    /// The error that ended the check early, if any.
    pub failure: Option<String>,
    /// The host.
    pub machine: Machine,
}

/// A trace of desktops of the model, which boot, log on and work.
pub fn modelled(profile: &Profile, seed: u64, count: u64, loops: u32) -> Trace {
    let sessions = Sessions { users: 1, logons_s: 0.0, loops, copies_files: false };
    let desktop = |number| validate::desktop(profile, seed.wrapping_add(number), &sessions, false).volume;
    Trace {
        volumes: (0..count).map(desktop).collect(),
        notes: vec![
            "The desktops are models: their requests are generated from parameters, not recorded.".into(),
        ],
        has_contents: true,
    }
}

/// Analyses a trace, and checks the model with the real cache, whose overflow is in `dir`.
pub fn size(
    trace: &Trace,
    dir: &Path,
    seed: u64,
    stop: &AtomicBool,
    progress: &(dyn Fn(&str, usize, usize) + Sync),
) -> Sizing {
    let disks: Vec<Blocks> = trace.volumes.iter().map(Blocks::of).collect();
    let analysis = curve::analyse(trace, &disks, seed, stop, progress);
    let mut sizing = Sizing {
        analysis,
        checked_desktop: String::new(),
        checked: Vec::new(),
        unchecked: None,
        failure: None,
        machine: Machine::describe(dir),
    };
    // The desktop that writes most, except desktops that write too much for a check.
    let fits = |(_, blocks): &(usize, &Blocks)| blocks.written_bytes <= check::MOST_BYTES;
    let chosen = disks.iter().enumerate().filter(fits).max_by_key(|(_, blocks)| blocks.written_bytes);
    if sizing.analysis.interrupted || stop.load(Ordering::Relaxed) {
        sizing.unchecked = Some("the study was interrupted".into());
    } else if let Some((number, _)) = chosen {
        let (volume, sizes) = (&trace.volumes[number], check::three_sizes(&sizing.analysis.points, number));
        sizing.checked_desktop.clone_from(&volume.name);
        match check::needs(&sizes).check(dir) {
            Err(why) => sizing.unchecked = Some(format!("{why:#}")),
            Ok(()) => match check::check(volume, &disks[number], &sizes, dir, stop, progress) {
                Ok(checked) => sizing.checked = checked,
                Err(error) => sizing.failure = Some(format!("{error:#}")),
            },
        }
        if sizing.failure.is_none() && sizing.unchecked.is_none() && sizing.checked.len() < sizes.len() {
            sizing.unchecked = Some("the check was interrupted".into());
        }
    } else {
        sizing.unchecked =
            Some("each desktop writes more than 16 GiB, and a check of so much takes too long".into());
    }
    sizing.machine.note_load();
    sizing
}
