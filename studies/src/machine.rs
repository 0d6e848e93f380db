//! Describes the host on which a study ran.

use std::path::Path;

use serde::Serialize;

/// The host of a study: hardware, kernel and load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Model name of the processor.
    pub processor: String,
    /// Processors available to this program.
    pub processors: usize,
    /// Installed memory.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// The disk under test.
    pub disk: String,
    /// Load averages over one minute, before and after the study.
    pub load_averages: Vec<String>,
}

impl Machine {
    /// Describes the system, and the disk below a directory. Also takes the first load average.
    pub fn describe(dir: &Path) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let mut machine = Self {
            processor: field(&read("/proc/cpuinfo"), "model name")
                .unwrap_or_else(|| "unknown processor".into()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory_bytes(&read("/proc/meminfo"), "MemTotal"),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            disk: disk_of(dir).unwrap_or_else(|| "unknown".into()),
            load_averages: Vec::new(),
        };
        machine.note_load();
        machine
    }

    /// Name and value of each fact, as text for people.
    pub fn facts(&self) -> Vec<(String, String)> {
        vec![
            ("Processor".into(), format!("{} x {}", self.processors, self.processor)),
            ("Memory".into(), headwater_block::size::format(self.memory_bytes)),
            ("Disk".into(), self.disk.clone()),
            ("Kernel".into(), format!("Linux {}", self.kernel)),
            ("Load average before and after".into(), self.load_averages.join(", ")),
        ]
    }

    /// Adds the present load average.
    pub fn note_load(&mut self) {
        let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        self.load_averages.extend(text.split_whitespace().next().map(str::to_owned));
    }
}

/// The block device below a directory, with its model if the kernel knows it.
fn disk_of(dir: &Path) -> Option<String> {
    let stat = rustix::fs::stat(dir).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let sysfs = format!("/sys/dev/block/{major}:{minor}");
    let uevent = std::fs::read_to_string(format!("{sysfs}/uevent")).ok()?;
    let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    // The sysfs directory of a partition is below that of its disk.
    let models = ["device/model", "../device/model"].map(|path| format!("{sysfs}/{path}"));
    let model = models.iter().find_map(|path| std::fs::read_to_string(path).ok());
    Some(model.map_or_else(|| name.to_owned(), |model| format!("{name} ({})", model.trim())))
}

/// Installed memory; 0 if unknown.
pub fn installed_memory_bytes() -> u64 {
    memory_bytes(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal")
}

/// Memory that programs can still allocate; 0 if unknown.
pub fn available_memory_bytes() -> u64 {
    memory_bytes(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable")
}

fn memory_bytes(meminfo: &str, name: &str) -> u64 {
    let field = field(meminfo, name);
    field.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files() {
        assert_eq!(memory_bytes("MemTotal:  100 kB\nMemAvailable:   7 kB\n", "MemAvailable"), 7168);
        assert_eq!(field("processor\t: 0\n", "flags"), None);
    }
}
