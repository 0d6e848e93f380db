//! Describes the host on which the figures were measured.

use std::process::Command;

use serde::Serialize;

/// Hardware and versions of a run.
#[derive(Debug, Default, Serialize)]
pub struct Machine {
    /// Model name of the processor.
    pub processor: String,
    /// Processors available to this program.
    pub processors: usize,
    /// Installed memory in bytes.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// First line of each program's `--version`.
    pub versions: Vec<String>,
}

impl Machine {
    /// The description on one line.
    pub fn summary(&self) -> String {
        format!(
            "{} x {}, {} memory, Linux {}; {}",
            self.processors,
            self.processor,
            headwater_block::size::format(self.memory_bytes),
            self.kernel,
            self.versions.join(", ")
        )
    }
}

/// Reads the description from the system.
pub fn describe() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let processor = field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown processor".into());
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let memory_kib = memory.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
    Machine {
        processor,
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory_kib * 1024,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        versions: ["fio", "nbdkit", "qemu-nbd"].into_iter().filter_map(version).collect(),
    }
}

fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim().to_owned())
}

fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn fields_of_proc_files() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2.0: fast\n";
        assert_eq!(field(text, "model name").as_deref(), Some("Some CPU @ 2.0: fast"));
        assert_eq!(field(text, "flags"), None);
    }
}
