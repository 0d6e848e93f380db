//! `headwater cache`: the write caches of exports and attached devices that run.

use clap::{ArgGroup, Subcommand};
use headwater_api::CacheMode;
use headwater_block::size;

use crate::limits::{Cache, Change, Process, State, client};
use crate::show;

/// `headwater cache ...`.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List the write caches of this user's exports and attached devices that run (for root: of all users), with their limits and
    /// use
    List,
    /// Change the limits of such a write cache, up or down, at once
    #[command(group = ArgGroup::new("limits").required(true).multiple(true))]
    Set {
        /// The number of the process, what it serves, or the device that it attached
        #[arg(value_name = "PID|SOURCE|DEVICE")]
        which: String,
        /// Only of this volume, where the process serves several
        #[arg(long, value_name = "VOLUME")]
        volume: Option<String>,
        /// The most memory that the write cache takes; not with --cache disk
        #[arg(long, value_name = "SIZE", value_parser = size::parse, group = "limits")]
        ram: Option<u64>,
        /// The most disk space that the write cache takes; not with --cache ram
        #[arg(long, value_name = "SIZE", value_parser = size::parse, group = "limits")]
        disk: Option<u64>,
    },
}

/// Carries one out.
pub async fn run(command: CacheCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        CacheCommand::List => {
            let processes = client::list().await?;
            if json { show::json(&processes)? } else { table(&processes)? }
        }
        CacheCommand::Set { which, volume, ram, disk } => {
            let change = Change { volume, ram_bytes: ram, disk_bytes: disk };
            let process = client::set(&which, change).await?;
            if json { show::json(&process)? } else { table(&[process])? }
        }
    }
    Ok(0)
}

fn table(processes: &[Process]) -> anyhow::Result<()> {
    let rows = processes.iter().flat_map(|process| process.caches.iter().map(|cache| row(process, cache)));
    let headings = [
        "PROCESS",
        "USER",
        "SOURCE",
        "VOLUME",
        "MODE",
        "RAM USED",
        "RAM LIMIT",
        "DISK USED",
        "DISK LIMIT",
        "STATE",
    ];
    show::table(&headings, rows)
}

fn row(process: &Process, cache: &Cache) -> Vec<String> {
    let disk = |bytes| if cache.mode == CacheMode::Ram { "-".to_owned() } else { size::format(bytes) };
    let state = match cache.state {
        State::Ok => "",
        State::Waiting => "writes wait for room",
        State::Full => "full: writes are refused",
    };
    // A device says more than what is on it.
    let volume = process.devices.first().filter(|_| process.caches.len() == 1).unwrap_or(&cache.volume);
    vec![
        process.pid.to_string(),
        process.uid.to_string(),
        process.source.clone(),
        volume.clone(),
        cache.mode.to_string(),
        size::format(cache.ram_used_bytes),
        size::format(cache.ram_limit_bytes),
        disk(cache.disk_used_bytes),
        disk(cache.disk_limit_bytes),
        state.to_owned(),
    ]
}
