//! Options of `headwater top`, which shows the host and its machines on the full screen.

use std::time::Duration;

use clap::Args;
use headwater_api::MachineSort;

/// `headwater top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Only machines that match all terms, such as state:running catalog:class version:old 'ram>80%' desk; begin one with ! for "not"
    pub filter: Vec<String>,
    /// The order: name, state, ram, disk, cache (both together), iops or boot
    #[arg(long, value_name = "ORDER", default_value_t = MachineSort::Cache, value_parser = MachineSort::parse)]
    pub sort: MachineSort,
    /// Seconds between updates, 1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// Print the table once and end; the default if the output is not a terminal
    #[arg(long)]
    pub once: bool,
    /// Disable the keys that start, stop and reset machines
    #[arg(long)]
    pub read_only: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 1..=3600) => Ok(Duration::from_secs(seconds)),
        _ => Err("give whole seconds, 1 to 3600".to_owned()),
    }
}
