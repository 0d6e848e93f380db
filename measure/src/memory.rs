//! How much memory `headwater export` has resident while far more than its RAM budget is written.

use anyhow::Result;
use serde::Serialize;

use crate::cases::device_bytes;
use crate::fio::{self, Job};
use crate::systems::{Cache, System};
use crate::{Plan, process};

const MIB: u64 = 1 << 20;

/// One budget.
pub struct MemoryCase {
    /// Name for `--only`.
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    ram_bytes: u64,
}

/// Peak of one budget.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryResult {
    /// Name of the case.
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// The budget.
    pub ram_bytes: u64,
    /// What was written.
    pub written_bytes: u64,
    /// The most that was resident.
    pub peak_resident_bytes: u64,
}

/// The budgets that are measured.
pub fn cases(quick: bool) -> Vec<MemoryCase> {
    let large = if quick { 256 * MIB } else { 1024 * MIB };
    vec![
        MemoryCase {
            name: "memory-64m",
            title: "resident while 10 GB are written, 64 MB RAM",
            ram_bytes: 64 * MIB,
        },
        MemoryCase {
            name: "memory-1g",
            title: "resident while 10 GB are written, 1 GB RAM",
            ram_bytes: large,
        },
    ]
}

/// Writes ten times the large budget and asks the kernel for the peak.
pub fn run(plan: &Plan, case: &MemoryCase) -> Result<MemoryResult> {
    println!("\n{}: {}", case.name, case.title);
    let total_bytes = device_bytes(plan.quick);
    let cache = Cache { mode: "ram+disk", ram_bytes: Some(case.ram_bytes), disk_bytes: 2 * total_bytes };
    let running = System::Headwater(cache).start(plan, total_bytes)?;
    fio::run(&running.target, total_bytes, Job::RandomWrites { total_bytes }, 0)?;
    let pid = running.process.as_ref().map(crate::systems::Process::pid).unwrap_or_default();
    let peak_resident_bytes = process::peak_resident_bytes(pid)?;
    println!("  peak {} MiB with a budget of {} MiB", peak_resident_bytes / MIB, case.ram_bytes / MIB);
    let MemoryCase { name, title, ram_bytes } = *case;
    Ok(MemoryResult { name, title, ram_bytes, written_bytes: total_bytes, peak_resident_bytes })
}
