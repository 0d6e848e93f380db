//! How much memory `headwater export` has resident while far more than its RAM budget is written.

use anyhow::Result;
use serde::Serialize;

use crate::bench::check_space;
use crate::cases::device_bytes;
use crate::fio::{self, Job, LARGE_BYTES};
use crate::systems::{Cache, System};
use crate::{Plan, process};

const MIB: u64 = 1 << 20;
/// Of the case with large requests.
const CLIENTS: u32 = 4;
const DEPTH: u32 = 16;

/// One budget.
pub struct MemoryCase {
    /// Name for `--only`.
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    ram_bytes: u64,
    /// In large requests by several clients, rather than in blocks by one.
    is_large: bool,
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
    /// What was written, and read.
    pub written_bytes: u64,
    /// Data of the requests that clients had under way, where these are large.
    pub in_flight_bytes: u64,
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
            is_large: false,
        },
        MemoryCase {
            name: "memory-1g",
            title: "resident while 10 GB are written, 1 GB RAM",
            ram_bytes: large,
            is_large: false,
        },
        MemoryCase {
            name: "memory-64m-large",
            title: "resident while 4 clients write and read 10 GB in requests of 1 MiB, depth 16, 64 MB RAM",
            ram_bytes: 64 * MIB,
            is_large: true,
        },
        MemoryCase {
            name: "memory-1g-large",
            title: "resident while 4 clients write and read 10 GB in requests of 1 MiB, depth 16, 1 GB RAM",
            ram_bytes: large,
            is_large: true,
        },
    ]
}

/// Writes ten times the large budget and asks the kernel for the peak.
pub fn run(plan: &Plan, case: &MemoryCase) -> Result<MemoryResult> {
    println!("\n{}: {}", case.name, case.title);
    let total_bytes = device_bytes(plan.quick);
    let cache = Cache { mode: "ram+disk", ram_bytes: Some(case.ram_bytes), disk_bytes: 2 * total_bytes };
    check_space(plan, cache.disk_bytes)?;
    let running = System::Headwater(cache).start(plan, total_bytes)?;
    let (job, in_flight_bytes) = if case.is_large {
        let in_flight_bytes = u64::from(CLIENTS * DEPTH) * LARGE_BYTES;
        (Job::Large { clients: CLIENTS, depth: DEPTH, total_bytes }, in_flight_bytes)
    } else {
        (Job::RandomWrites { total_bytes }, 0)
    };
    fio::run(&running.target, total_bytes, job, 0)?;
    let pid = running.process.as_ref().map(crate::systems::Process::pid).unwrap_or_default();
    let peak_resident_bytes = process::peak_resident_bytes(pid)?;
    println!("  peak {} MiB with a budget of {} MiB", peak_resident_bytes / MIB, case.ram_bytes / MIB);
    let MemoryCase { name, title, ram_bytes, .. } = *case;
    let written_bytes = total_bytes;
    Ok(MemoryResult { name, title, ram_bytes, written_bytes, in_flight_bytes, peak_resident_bytes })
}
