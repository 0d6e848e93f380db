//! `headwater cache`: the limits of write caches of running exports and attached devices, and the report of what
//! occupies a machine's write cache.

use headwater_api::CacheMode;
use headwater_block::size;

use crate::caches::NewLimits;
use crate::cli::CacheCommand;
use crate::client::Client;
use crate::cmd::contents;
use crate::limits::{self, Cache, Change, Process, State};
use crate::show;

/// Runs a command. Only `contents` calls `client`: it asks the daemon.
pub async fn run(
    client: impl FnOnce() -> anyhow::Result<Client>,
    command: CacheCommand,
    json: bool,
) -> anyhow::Result<u8> {
    match command {
        CacheCommand::List => {
            let processes = limits::client::list().await?;
            if json { show::json(&processes)? } else { table(&processes)? }
        }
        CacheCommand::Contents { machine, catalog, machines, by, lines } => {
            let (contents, whose) = match (machine, catalog) {
                (_, Some(catalog)) => contents::of_catalog(&client()?, &catalog, machines.into()).await?,
                (machine, None) => {
                    let machine = machine.unwrap_or_default();
                    (client()?.cache_contents(&machine).await?, format!("machine {machine}"))
                }
            };
            if json { show::json(&contents)? } else { contents::show(&contents, &whose, by, lines)? }
        }
        CacheCommand::Set { which, volume, limits: NewLimits { ram, disk }, weight } => {
            let change = Change { volume, ram_bytes: ram, disk_bytes: disk, weight };
            let process = limits::client::set(&which, change).await?;
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
        "WEIGHT",
        "STATE",
    ];
    show::table(&headings, rows)
}

fn row(process: &Process, cache: &Cache) -> Vec<String> {
    let disk = |bytes| if cache.mode == CacheMode::Ram { "-".to_owned() } else { size::format(bytes) };
    let state = match cache.state {
        State::Ok => "",
        State::Waiting => "writes wait for space",
        State::Full => "full: writes fail",
        State::Failing => "flushes fail: its disk is full, or failed",
    };
    // The name of a device is more useful than that of its volume.
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
        cache.weight.to_string(),
        state.to_owned(),
    ]
}
