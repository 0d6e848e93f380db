//! Measures the resident memory of `headwater export` while much more data is written than its RAM budget.

use anyhow::Result;
use serde::Serialize;

use crate::bench::check_space;
use crate::cases::device_bytes;
use crate::fio::{self, Job, LARGE_BYTES};
use crate::systems::{Cache, System};
use crate::{Plan, process};

const MIB: u64 = 1 << 20;
/// For the case with large requests.
const CLIENTS: u32 = 4;
const DEPTH: u32 = 16;

/// One case: a RAM budget and a load.
pub struct MemoryCase {
    /// Name for `--only`.
    pub name: &'static str,
    /// Title of the case.
    pub title: &'static str,
    ram_bytes: u64,
    /// Whether several clients send large requests; otherwise one client writes 4 KiB blocks.
    is_large: bool,
}

/// The result of one case.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryResult {
    /// Name of the case.
    pub name: &'static str,
    /// Title of the case.
    pub title: &'static str,
    /// The RAM budget.
    pub ram_bytes: u64,
    /// Bytes that were written and read.
    pub written_bytes: u64,
    /// Bytes of all requests in flight if they are large, else 0.
    pub in_flight_bytes: u64,
    /// The highest resident memory.
    pub peak_resident_bytes: u64,
}

/// The cases.
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

/// Writes ten times the large budget, and reads the peak of resident memory from the kernel.
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
