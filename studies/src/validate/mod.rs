//! `validate`: compares recorded boots and sessions of real guests with the desktop model, by phase, and compares the
//! effect of the same write cache on both.
//!
//! ```text
//!   recordings + phases --+--> figures of each phase --> comparison
//!   model, some seeds ----+--> the real write cache at three sizes --> spilled bytes, operations of the overflow
//! ```
//!
//! Start reading at [`run`].

pub mod figures;
mod report;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use headwater_report::statistics::median;
use serde::Serialize;

use crate::desktop::{Generator, Profile, Sessions};
use crate::guest::{Phase, parse_phases};
use crate::machine::Machine;
use crate::needs::Needs;
use crate::sizing::check;
use crate::sizing::model::replay;
use crate::trace::blocks::Blocks;
use crate::trace::{Request, Trace, Volume};
use figures::{Figures, by_kind};
pub use report::Report;

const MIB: u64 = 1 << 20;

/// The smallest RAM of a cache, in bytes.
const LEAST_BYTES: u64 = 16 * MIB;

/// The time between the model's boot and logon, in seconds.
const IDLE_S: f64 = 60.0;

/// The largest deviation that counts as agreement.
pub const TOLERANCE: f64 = 0.20;

/// The number of recordings that a validation should have.
pub const ENOUGH: usize = 5;

/// A kind of phase. All desktops of a validation have the same kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// From the start until the system is up.
    Boot,
    /// From the logon until the desktop is ready.
    Logon,
    /// One of several equal parts of a session.
    Loop,
    /// Everything after the boot, if the phases are not known.
    Session,
}

impl Kind {
    fn of(name: &str) -> Option<Self> {
        match name {
            "boot" => Some(Self::Boot),
            "logon" => Some(Self::Logon),
            "session" => Some(Self::Session),
            name if name.starts_with("segment ") => Some(Self::Loop),
            _ => None,
        }
    }

    /// Title for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::Boot => "Boot",
            Self::Logon => "Logon",
            Self::Loop => "One loop of a session",
            Self::Session => "Session",
        }
    }
}

/// A desktop: its requests, and the times of its phases.
#[derive(Clone, Debug)]
pub struct Desktop {
    /// Its requests.
    pub volume: Volume,
    /// Its phases, sorted by time.
    pub phases: Vec<(Kind, Phase)>,
}

impl Desktop {
    /// Its kinds of phases, without duplicates.
    pub fn kinds(&self) -> Vec<Kind> {
        let mut kinds: Vec<Kind> = self.phases.iter().map(|(kind, _)| *kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }

    fn loops(&self) -> usize {
        self.phases.iter().filter(|(kind, _)| *kind == Kind::Loop).count()
    }
}

/// The recordings to compare with the model.
#[derive(Debug)]
pub struct Recorded {
    /// One desktop for each disk of each recording.
    pub desktops: Vec<Desktop>,
    /// Remarks about missing data in the recordings.
    pub notes: Vec<String>,
}

impl Recorded {
    /// Reads recordings. `NAME.phases` contains the phases of `NAME.rec`; without that file, the boot ends after
    /// `boot_s`.
    pub fn load(files: &[PathBuf], boot_s: Option<f64>) -> Result<Self> {
        let mut recorded = Self { desktops: Vec::new(), notes: Vec::new() };
        for file in files {
            let failed = || format!("cannot use the recording {}", file.display());
            let trace = Trace::load(std::slice::from_ref(file))?;
            if !trace.has_contents {
                bail!(
                    "{} is a trace of another program: validate needs recordings of headwater, which contain the classes of written data",
                    file.display()
                );
            }
            let duration_s = trace.duration_us() as f64 / 1e6;
            let phases = phases_of(file, boot_s, duration_s).with_context(failed)?;
            recorded.notes.extend(trace.notes);
            for volume in trace.volumes {
                recorded.desktops.push(Desktop { volume, phases: phases.clone() });
            }
        }
        let Some(first) = recorded.desktops.first() else {
            bail!("no recording was given: headwater-study validate FILE.rec ..")
        };
        let kinds = first.kinds();
        if let Some(other) = recorded.desktops.iter().find(|desktop| desktop.kinds() != kinds) {
            bail!(
                "{} has the phases {kinds:?}, but {} has {:?}: all recordings must have the same kinds of phases",
                first.volume.name,
                other.volume.name,
                other.kinds()
            );
        }
        Ok(recorded)
    }
}

fn phases_of(file: &Path, boot_s: Option<f64>, duration_s: f64) -> Result<Vec<(Kind, Phase)>> {
    let beside = file.with_extension("phases");
    let phases = match (std::fs::read_to_string(&beside), boot_s) {
        (Ok(text), _) => parse_phases(&text).with_context(|| format!("cannot use {}", beside.display()))?,
        (Err(_), Some(boot_s)) if boot_s >= duration_s => {
            bail!("the recording ends after {duration_s:.0} s, so nothing follows a boot of {boot_s:.0} s")
        }
        (Err(_), Some(boot_s)) => {
            let phase = |name: &str, from_s, to_s| Phase { name: name.into(), from_s, to_s };
            // The last request belongs to the session too.
            vec![phase("boot", 0.0, boot_s), phase("session", boot_s, duration_s + 1.0)]
        }
        (Err(error), None) => bail!(
            "its phases are not known: cannot read {} ({error}); give the duration of the boot with --boot-seconds",
            beside.display()
        ),
    };
    let named = phases.into_iter().map(|phase| match Kind::of(&phase.name) {
        Some(kind) => Ok((kind, phase)),
        None => bail!(
            "{} has an unknown phase {:?}: known phases are boot, logon, segment N, and session",
            beside.display(),
            phase.name
        ),
    });
    named.collect()
}

/// As many desktops of the model as there are recordings, with their phases.
pub fn modelled(profile: &Profile, recorded: &Recorded, seed: u64) -> Vec<Desktop> {
    let loops: Vec<f64> = recorded.desktops.iter().map(|desktop| desktop.loops() as f64).collect();
    let has_loops = loops.iter().any(|loops| *loops > 0.0);
    let loops = if has_loops { median(&loops).unwrap_or(1.0).round() as u32 } else { 1 };
    // Only the guest of study 003 has segments, and that guest copies files.
    let sessions = Sessions { users: 1, logons_s: 0.0, loops, copies_files: has_loops };
    let count = recorded.desktops.len() as u64;
    (0..count).map(|number| desktop(profile, seed.wrapping_add(number), &sessions, has_loops)).collect()
}

/// One desktop of the model.
pub fn desktop(profile: &Profile, seed: u64, sessions: &Sessions, has_loops: bool) -> Desktop {
    let life = Generator::new(profile, seed).life(sessions);
    let boot_s = profile.get("boot_seconds");
    let (logon_s, loop_s) = (profile.get("logon_seconds"), profile.get("loop_seconds"));
    let begin_s = boot_s + IDLE_S;
    let shift_us = (begin_s * 1e6) as u64;
    let later =
        life.session.iter().map(|request| Request { time_us: request.time_us + shift_us, ..*request });
    let requests = life.boot.iter().copied().chain(later).collect();
    let phase =
        |name: &str, from_s: f64, seconds: f64| Phase { name: name.into(), from_s, to_s: from_s + seconds };
    let mut phases = vec![(Kind::Boot, phase("boot", 0.0, boot_s))];
    let loops_s = f64::from(sessions.loops) * loop_s;
    if has_loops {
        phases.push((Kind::Logon, phase("logon", begin_s, logon_s)));
        for number in 0..sessions.loops {
            let from_s = begin_s + logon_s + f64::from(number) * loop_s;
            phases.push((Kind::Loop, phase(&format!("segment {}", number + 1), from_s, loop_s)));
        }
    } else {
        phases.push((Kind::Session, phase("session", begin_s, logon_s + loops_s)));
    }
    Desktop { volume: Volume { name: format!("model, seed {seed}"), requests }, phases }
}

/// The effect of a write cache on one desktop.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Overflowed {
    /// Bytes written to the overflow disk.
    pub spilled_bytes: u64,
    /// Reads and writes of the overflow disk.
    pub operations: u64,
}

/// A RAM limit, and the results with each desktop.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Size {
    /// The limit.
    pub ram_bytes: u64,
    /// The results with the recordings.
    pub recorded: Vec<Overflowed>,
    /// The results with the model.
    pub modelled: Vec<Overflowed>,
}

/// The deviation of the model's median from the recordings' median, as a share. `None`: the recordings' median is
/// zero, but the model's is not.
pub fn deviation(recorded: &[f64], modelled: &[f64]) -> Option<f64> {
    let (recorded, modelled) = (median(recorded)?, median(modelled)?);
    match (recorded > 0.0, modelled > 0.0) {
        (true, _) => Some(modelled / recorded - 1.0),
        (false, false) => Some(0.0),
        (false, true) => None,
    }
}

impl Size {
    fn of(&self, of: fn(&Overflowed) -> u64) -> Option<f64> {
        let each = |desktops: &[Overflowed]| -> Vec<f64> {
            desktops.iter().map(|overflowed| of(overflowed) as f64).collect()
        };
        deviation(&each(&self.recorded), &each(&self.modelled))
    }

    /// The deviation of the spilled bytes.
    pub fn bytes_deviation(&self) -> Option<f64> {
        self.of(|overflowed| overflowed.spilled_bytes)
    }

    /// The deviation of the operations.
    pub fn operations_deviation(&self) -> Option<f64> {
        self.of(|overflowed| overflowed.operations)
    }

    /// Whether at least half of the recordings or half of the models spill nothing.
    pub fn spills_nothing(&self) -> bool {
        let middle = |desktops: &[Overflowed]| {
            let spilled: Vec<f64> =
                desktops.iter().map(|overflowed| overflowed.spilled_bytes as f64).collect();
            median(&spilled).unwrap_or(0.0)
        };
        middle(&self.recorded) == 0.0 && middle(&self.modelled) == 0.0
    }

    /// Whether recordings and model agree.
    pub fn agrees(&self) -> bool {
        let is_near = |deviation: Option<f64>| deviation.is_some_and(|by| by.abs() <= TOLERANCE);
        is_near(self.bytes_deviation()) && is_near(self.operations_deviation())
    }
}

/// The results of a validation.
#[derive(Debug)]
pub struct Validation {
    /// The figures of each recording, by kind of phase.
    pub recorded: Vec<Vec<(Kind, Figures)>>,
    /// The figures of each desktop of the model.
    pub modelled: Vec<Vec<(Kind, Figures)>>,
    /// The results with caches of several sizes.
    pub sizes: Vec<Size>,
    /// Whether the study was interrupted.
    pub interrupted: bool,
    /// The error that ended the study early, if any.
    pub failure: Option<String>,
    /// The host.
    pub machine: Machine,
}

/// Three RAM limits: a quarter, half and all of the median of the recordings' peaks of live data.
fn limits(recorded: &[(&Desktop, Blocks)]) -> Vec<u64> {
    let peaks: Vec<f64> = recorded
        .iter()
        .map(|(_, blocks)| {
            replay(blocks, u64::MAX / 4).peak_live as f64 * headwater_block::BLOCK_BYTES as f64
        })
        .collect();
    let peak_bytes = median(&peaks).unwrap_or(0.0) as u64;
    let mut limits: Vec<u64> =
        [4, 2, 1].map(|part| (peak_bytes / part).next_multiple_of(8 * MIB).max(LEAST_BYTES)).to_vec();
    limits.dedup();
    limits
}

/// The needs of a cache of this size for a desktop.
fn needs(blocks: &Blocks, ram_bytes: u64) -> Needs {
    check::needs(&[(ram_bytes, replay(blocks, ram_bytes))])
}

/// All desktops, and the RAM limits of the caches for each.
struct Caches<'a> {
    recorded: Vec<(&'a Desktop, Blocks)>,
    modelled: Vec<(&'a Desktop, Blocks)>,
    limits: Vec<u64>,
}

impl Caches<'_> {
    fn all(&self) -> usize {
        self.limits.len() * (self.recorded.len() + self.modelled.len())
    }

    /// Fails if the host does not meet the needs of each cache.
    fn check(&self, dir: &Path) -> Result<()> {
        for ram_bytes in &self.limits {
            for (_, blocks) in self.recorded.iter().chain(&self.modelled) {
                needs(blocks, *ram_bytes).check(dir)?;
            }
        }
        Ok(())
    }
}

/// Compares recordings with the model. The overflow of the caches is in `dir`. An error means that nothing was
/// started; later failures are in the results.
pub fn run<'a>(
    recorded: &'a Recorded,
    models: &'a [Desktop],
    dir: &Path,
    stop: &AtomicBool,
    progress: &dyn Fn(&str, usize, usize),
) -> Result<Validation> {
    let with_blocks = |desktops: &'a [Desktop]| -> Vec<(&'a Desktop, Blocks)> {
        desktops.iter().map(|desktop| (desktop, Blocks::of(&desktop.volume))).collect()
    };
    let mut caches = Caches {
        recorded: with_blocks(&recorded.desktops),
        modelled: with_blocks(models),
        limits: Vec::new(),
    };
    caches.limits = limits(&caches.recorded);
    caches.check(dir)?;
    let figures = |desktops: &[Desktop]| desktops.iter().map(by_kind).collect();
    let mut validation = Validation {
        recorded: figures(&recorded.desktops),
        modelled: figures(models),
        sizes: Vec::new(),
        interrupted: false,
        failure: None,
        machine: Machine::describe(dir),
    };
    if let Err(error) = validation.use_caches(&caches, dir, stop, progress) {
        validation.failure = Some(format!("{error:#}"));
    }
    validation.interrupted = stop.load(Ordering::Relaxed);
    validation.machine.note_load();
    Ok(validation)
}

impl Validation {
    /// Replays all desktops on the real write cache, at each size.
    fn use_caches(
        &mut self,
        caches: &Caches<'_>,
        dir: &Path,
        stop: &AtomicBool,
        progress: &dyn Fn(&str, usize, usize),
    ) -> Result<()> {
        let mut done = 0;
        for ram_bytes in &caches.limits {
            let mut size = Size { ram_bytes: *ram_bytes, ..Size::default() };
            for (desktops, overflowed) in
                [(&caches.recorded, &mut size.recorded), (&caches.modelled, &mut size.modelled)]
            {
                for (desktop, blocks) in desktops {
                    progress("the real write cache", done, caches.all());
                    let disk_bytes = needs(blocks, *ram_bytes).disk_bytes;
                    let ran = check::real(&desktop.volume, blocks, (*ram_bytes, disk_bytes), dir, stop)
                        .with_context(|| format!("the write cache failed with {}", desktop.volume.name))?;
                    let Some(counters) = ran else { return Ok(()) };
                    let cache = counters.cache;
                    let operations = cache.disk_read_ops + cache.disk_write_ops;
                    overflowed.push(Overflowed { spilled_bytes: cache.spilled_bytes, operations });
                    done += 1;
                }
            }
            self.sizes.push(size);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
