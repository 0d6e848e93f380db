//! `headwater connection`: adds, lists, checks, changes, sweeps and removes connections to Azure.

use std::path::Path;

use anyhow::Context;
use headwater_api::{
    Connection, ConnectionCheck, CreateConnection, MAX_CLIENT_SECRET_BYTES, OneTimeSecret, Problem,
    ProblemKind, SetConnection, SweepReport, SweepRequest, TaskResult,
};
use headwater_block::small_file;

use crate::cli::{AddConnectionArgs, ConnectionCommand};
use crate::client::Client;
use crate::show::{self, progress::Shown, progress::said_if_slow};

/// The exit code of a check that found a lacking right.
const LACKS: u8 = 1;

/// Runs a command.
pub async fn run(client: Client, command: ConnectionCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        ConnectionCommand::Add(args) => add(&client, *args, json).await?,
        ConnectionCommand::List => {
            let list = client.connections().await?;
            if json { show::json(&list)? } else { show_list(&list.connections)? }
        }
        ConnectionCommand::Show { connection } => {
            let shown = client.connection(&connection).await?;
            if json { show::json(&shown)? } else { show_one(&shown)? }
        }
        ConnectionCommand::Check { connection } => {
            let what = "waiting for Azure";
            let check = said_if_slow(json, what, client.check_connection(&connection)).await?;
            if json {
                show::json(&check)?
            } else {
                show_check(&check)?
            }
            return Ok(if check.lacks.is_empty() { 0 } else { LACKS });
        }
        ConnectionCommand::Set { connection, secret_file } => {
            let request = SetConnection { secret: read_secret(&secret_file)? };
            let set = client.set_connection(&connection, &request).await?;
            let text = format!(
                "connection {name} has another client secret; 'headwater connection check {name}' tries it",
                name = set.name
            );
            if json { show::json(&set)? } else { show::line(&text)? }
        }
        ConnectionCommand::Sweep { connection, remove } => {
            let mut shown = Shown::begin(&format!("sweep {connection}"), json);
            let request = SweepRequest { remove };
            let result = client.sweep_connection(&connection, request, |step| shown.update(step)).await;
            shown.end();
            let TaskResult::Swept(report) = result? else {
                anyhow::bail!(
                    "the daemon did not answer with a report: it may be of another version than this program"
                );
            };
            if json {
                show::json(&report)?
            } else {
                show_sweep(&report)?
            }
            let failed: Vec<String> = report
                .orphans
                .iter()
                .filter_map(|it| Some(format!("{}: {}", it.resource, it.why.as_ref()?)))
                .collect();
            if !failed.is_empty() {
                let why = format!("cannot remove {}", failed.join("; "));
                return Err(Problem::new(ProblemKind::Failed, why).into());
            }
        }
        ConnectionCommand::Remove { connection, forget } => {
            let there = if forget { Some(client.connection(&connection).await?) } else { None };
            client.remove_connection(&connection, forget).await?;
            if json {
                show::removed(&[connection])?;
            } else {
                show::line(&format!("removed connection {connection}"))?;
                there.iter().try_for_each(show_forgotten)?;
            }
        }
    }
    Ok(0)
}

async fn add(client: &Client, args: AddConnectionArgs, json: bool) -> anyhow::Result<()> {
    let AddConnectionArgs { connection, subscription, tenant, group, region, auth, client_id, .. } = args;
    let secret = args.secret_file.as_deref().map(read_secret).transpose()?;
    let (authority, management) = (args.authority, args.management);
    let request = CreateConnection {
        name: connection,
        subscription,
        tenant,
        group,
        region,
        auth,
        client_id,
        secret,
        authority,
        management,
    };
    let added = client.create_connection(&request).await?;
    if json {
        return show::json(&added);
    }
    show::line(&format!(
        "added connection {name}; 'headwater connection check {name}' tries it",
        name = added.name
    ))
}

fn read_secret(path: &Path) -> anyhow::Result<OneTimeSecret> {
    let most = u64::try_from(MAX_CLIENT_SECRET_BYTES)?;
    let read = small_file::read(path, most).and_then(small_file::text);
    let text = read.with_context(|| format!("cannot read the client secret from {}", path.display()))?;
    Ok(OneTimeSecret(text.trim().to_owned()))
}

fn show_list(connections: &[Connection]) -> anyhow::Result<()> {
    let row = |it: &Connection| {
        vec![
            it.name.clone(),
            it.subscription.clone(),
            it.group.clone(),
            it.region.clone(),
            it.auth.to_string(),
            show::time(it.created_at_ms),
            it.created_by.clone(),
        ]
    };
    let headings = ["CONNECTION", "SUBSCRIPTION", "GROUP", "REGION", "AUTH", "ADDED", "BY"];
    show::table(&headings, connections.iter().map(row))
}

fn show_one(connection: &Connection) -> anyhow::Result<()> {
    let Connection { name, subscription, tenant, group, region, auth, client_id, .. } = connection;
    let client_id = client_id.as_deref().unwrap_or("-");
    for (what, value) in [
        ("connection", name.as_str()),
        ("subscription", subscription),
        ("tenant", tenant),
        ("group", group),
        ("region", region),
        ("auth", auth.name()),
        ("client id", client_id),
        ("authority", &connection.authority),
        ("management", &connection.management),
    ] {
        show::line(&format!("{what:<13} {}", show::printable(value)))?;
    }
    let (added, by) = (show::time(connection.created_at_ms), &connection.created_by);
    show::line(&format!("{:<13} {added} by {by}", "added"))
}

/// Says what may be left in Azure.
fn show_forgotten(connection: &Connection) -> anyhow::Result<()> {
    let Connection { group, subscription, .. } = connection;
    show::line(
        "its catalogs, their machines and its published versions were removed here; Azure was not asked",
    )?;
    show::line(&format!(
        "what is left in resource group {} of subscription {} has the tag headwater-owner, and costs until you \
         delete it",
        show::printable(group),
        show::printable(subscription)
    ))
}

fn show_check(check: &ConnectionCheck) -> anyhow::Result<()> {
    let ConnectionCheck { connection, identity, group_region, lacks, remarks } = check;
    show::line(&format!(
        "{connection} works: the resource group is in {group_region}, and Azure sees {}",
        show::printable(identity)
    ))?;
    for remark in remarks {
        show::line(&format!("remark: {}", show::printable(remark)))?;
    }
    for right in lacks {
        show::line(&format!("lacks: {right}"))?;
    }
    if !lacks.is_empty() {
        show::line(
            "give the identity the role Contributor on the resource group, or a role with these rights",
        )?;
    }
    Ok(())
}

fn show_sweep(report: &SweepReport) -> anyhow::Result<()> {
    if report.orphans.is_empty() {
        return show::line("nothing there is unneeded");
    }
    for orphan in &report.orphans {
        let resource = show::printable(&orphan.resource);
        let state = match (orphan.removed, orphan.removable) {
            (true, _) => "removed".to_owned(),
            (false, true) => format!("unneeded since {}", show::time(orphan.seen_at_ms)),
            (false, false) => {
                format!("unneeded, seen first {}; wait 30 minutes", show::time(orphan.seen_at_ms))
            }
        };
        show::line(&format!("{resource}: {state}"))?;
    }
    Ok(())
}
