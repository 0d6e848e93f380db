//! Reads the kernel's figures of a process: CPU time, resident memory, bytes written to disks.

use anyhow::{Context, Result};

/// Whether a program is in PATH.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// CPU seconds (user and system) of all threads of a process.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = read(pid, "stat")?;
    let ticks = parse_cpu_ticks(&stat).context("/proc/PID/stat has an unexpected form")?;
    let per_second = u32::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(100);
    Ok(f64::from(ticks) / f64::from(per_second))
}

/// The highest resident memory of a process, in bytes.
pub fn peak_resident_bytes(pid: u32) -> Result<u64> {
    parse_field(&read(pid, "status")?, "VmHWM:").map(|kib| kib * 1024).context("no VmHWM in /proc/PID/status")
}

/// Resident memory of a process without shared memory, in bytes.
pub fn private_resident_bytes(pid: u32) -> Result<u64> {
    let status = read(pid, "status")?;
    let field = |name| parse_field(&status, name).map(|kib| kib * 1024);
    let private = field("VmRSS:").zip(field("RssShmem:")).map(|(all, shared)| all.saturating_sub(shared));
    private.context("no VmRSS and RssShmem in /proc/PID/status")
}

/// Bytes that a process has written to disks. `None` if the kernel does not count them.
pub fn disk_written_bytes(pid: u32) -> Option<u64> {
    parse_field(&read(pid, "io").ok()?, "write_bytes:")
}

/// Bytes that a process has read, including pipes, sockets and the page cache.
pub fn read_bytes(pid: u32) -> Result<u64> {
    parse_field(&read(pid, "io")?, "rchar:").context("no rchar in /proc/PID/io")
}

fn read(pid: u32, file: &str) -> Result<String> {
    std::fs::read_to_string(format!("/proc/{pid}/{file}"))
        .with_context(|| format!("cannot read /proc/{pid}/{file}; has the process ended?"))
}

/// Fields 14 and 15, counted after the name, which may contain blanks and parentheses.
fn parse_cpu_ticks(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

fn parse_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ticks_are_found_behind_an_odd_name() {
        let stat = "42 (a) b (c)) S 1 42 42 0 -1 4194560 100 0 0 0 120 30 5 6 20 0 3 0 100 1 2";
        assert_eq!(parse_cpu_ticks(stat), Some(150));
        assert_eq!(parse_cpu_ticks("42 a S"), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = "Name:\tx\nVmPeak:\t  900 kB\nVmHWM:\t  300 kB\n";
        assert_eq!(parse_field(status, "VmHWM:"), Some(300));
        assert_eq!(parse_field(status, "VmRSS:"), None);
        let io = "wchar: 4\nwrite_bytes: 4096\ncancelled_write_bytes: 7\n";
        assert_eq!(parse_field(io, "write_bytes:"), Some(4096));
    }

    /// The kernel sums up each processor's part of a process's memory only from time to time.
    const KERNEL_COUNTS_LATE: u64 = 4 << 20;

    #[test]
    fn this_process_has_used_cpu_and_memory() {
        let pid = std::process::id();
        assert!(cpu_seconds(pid).unwrap() >= 0.0);
        assert!(peak_resident_bytes(pid).unwrap() > 100_000);
        // Other tests allocate memory concurrently, so the present value is read before the peak.
        let now = private_resident_bytes(pid).unwrap();
        assert!((100_000..=peak_resident_bytes(pid).unwrap() + KERNEL_COUNTS_LATE).contains(&now), "{now}");
        assert!(cpu_seconds(u32::MAX).unwrap_err().to_string().contains("cannot read"));
    }
}
