//! `headwater node`: manages the hosts of a fleet.

use std::io::BufRead;

use anyhow::Context;
use headwater_api::{CreateJoinToken, Host, SetHost};
use headwater_block::size;
use headwater_service::fleet::OwnHost;
use serde_json::json;

use crate::cli::NodeCommand;
use crate::client::Client;
use crate::cmd::task;
use crate::daemon;
use crate::data_dir::DataDir;
use crate::fleet::join;
use crate::show;
use crate::show::progress::Shown;

/// Runs a command. `client` connects to the daemon; joining does not use it.
pub async fn run(
    client: impl FnOnce() -> anyhow::Result<Client>,
    data_dir: impl FnOnce() -> anyhow::Result<DataDir>,
    command: NodeCommand,
    json: bool,
) -> anyhow::Result<u8> {
    match command {
        NodeCommand::Join { urls, token, name } => {
            let token = match token {
                Some(token) if token == "-" => Some(read_token()?),
                token => token,
            };
            let data_dir = data_dir()?;
            let _lock = data_dir.lock()?;
            let own = daemon::own_host(&data_dir)?;
            let own = OwnHost { name: name.unwrap_or(own.name.clone()), ..own };
            let is_joining = token.is_some();
            // Without a token, the URLs of the controllers of a host that has joined are changed.
            let fleet = match token {
                Some(token) => join::join(&data_dir, &urls, &token, own).await?,
                None => join::set_controllers(&data_dir, &urls)?,
            };
            if json {
                show::json(&fleet)?;
            } else {
                let (name, controller) = (&fleet.name, fleet.controllers());
                let done = if is_joining {
                    format!("this host has joined the fleet of {controller} as '{name}'")
                } else {
                    format!("this host, '{name}', now looks for its controllers at {controller}")
                };
                show::line(&format!("{done}: start 'headwater serve'"))?;
            }
        }
        NodeCommand::Token { expires } => {
            let token = client()?.create_join_token(&CreateJoinToken { valid_s: expires }).await?;
            if json {
                show::json(&token)?;
            } else {
                // Only the token goes to standard output, for scripts.
                let until = show::time(token.expires_at_ms);
                let how = format!("headwater node join {} --token -", token.url);
                show::aside(&format!(
                    "one host can join with this token until {until}. Run on that host, while no daemon runs there: {how} (reads the token from standard input)\n"
                ));
                show::line(&token.token)?;
            }
        }
        NodeCommand::List => {
            let list = client()?.hosts().await?;
            if json { show::json(&list)? } else { show_list(&list.hosts)? }
        }
        NodeCommand::Show { host } => {
            let client = client()?;
            let shown = client.host(&host).await?;
            if json { show::json(&shown)? } else { show_one(&client, &shown).await? }
        }
        NodeCommand::Cordon { host } => set_cordoned(&client()?, &host, true, json).await?,
        NodeCommand::Drain { host } => {
            let client = client()?;
            let mut shown = Shown::begin(&format!("drain {host}"), json);
            let result = client.drain_host(&host, |step| shown.update(step)).await;
            shown.end();
            let result = result?;
            if json { show::json(&result)? } else { task::show_result(&result)? }
        }
        NodeCommand::Uncordon { host } => set_cordoned(&client()?, &host, false, json).await?,
        NodeCommand::Accept { host } => {
            let accepted = client()?.accept_host(&host).await?;
            let text = format!("the node of host {host} is accepted at its next connection, within a minute");
            if json { show::json(&accepted)? } else { show::line(&text)? }
        }
        NodeCommand::Remove { host, force } => {
            client()?.remove_host(&host, force).await?;
            let text = format!("removed host {host}");
            if json { show::removed(&[host])? } else { show::line(&text)? }
        }
    }
    Ok(0)
}

/// The first line of the standard input.
fn read_token() -> anyhow::Result<String> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("cannot read the token from the standard input")?;
    Ok(line.trim().to_owned())
}

async fn set_cordoned(client: &Client, host: &str, cordoned: bool, json: bool) -> anyhow::Result<()> {
    let host = client.set_host(host, SetHost { cordoned }).await?;
    if json {
        return show::json(&json!(host));
    }
    let what = if host.cordoned { "no new machines" } else { "new machines again" };
    show::line(&format!("host {} gets {what}", host.name))
}

fn state(host: &Host) -> String {
    let cordoned = if host.cordoned { ", cordoned" } else { "" };
    format!("{}{cordoned}", host.state)
}

fn seen(host: &Host) -> String {
    match host.seen_at_ms {
        _ if host.own => "this host".to_owned(),
        Some(at_ms) => show::time(at_ms),
        None => "-".to_owned(),
    }
}

fn show_list(hosts: &[Host]) -> anyhow::Result<()> {
    let row = |host: &Host| {
        vec![
            host.name.clone(),
            state(host),
            format!("{}/{}", host.machines_active, host.machines),
            size::format(host.memory_bytes),
            size::format(host.memory_free_bytes),
            host.cpus.to_string(),
            seen(host),
        ]
    };
    show::table(&["HOST", "STATE", "MACHINES ON", "MEMORY", "FREE", "CPUS", "SEEN"], hosts.iter().map(row))
}

async fn show_one(client: &Client, host: &Host) -> anyhow::Result<()> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let clock = host.clock_ahead_ms.map(|ms| format!("{ms} ms ahead of the controller's"));
    show::pairs(&[
        ("host", host.name.clone()),
        ("id", host.id.to_string()),
        ("state", state(host)),
        ("machines", format!("{}, of which {} are on", host.machines, host.machines_active)),
        ("memory", size::format(host.memory_bytes)),
        ("free if all machines are on", size::format(host.memory_free_bytes)),
        ("processors", host.cpus.to_string()),
        ("release", or_dash(host.version.clone())),
        ("address", or_dash(host.address.clone())),
        ("clock", or_dash(clock)),
        ("fingerprint", or_dash(host.fingerprint.clone())),
        ("joined", show::time(host.joined_at_ms)),
        ("seen", seen(host)),
    ])?;
    show::latest_events(client.events(Some(&format!("host {}", host.name)), None, 10).await?)
}
