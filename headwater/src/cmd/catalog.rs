//! Carries out the commands of `headwater catalog` with requests to the daemon. A catalog is a group of machines that
//! have the same settings and boot the same image.

mod cloud;
mod scheme;

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Context;
use headwater_api::{
    CacheSettings, Catalog, Claim, ClaimRequest, CreateCatalog, CreateMachine, ListedMachine, OnHostLoss,
    RollRequest, ScaleRequest, SetCatalog, machine_list,
};
use headwater_block::{size, small_file};
use headwater_service::backend::{Clock as _, SystemClock};

use crate::cli::{CatalogCommand, MachineArgs, RollArgs};
use crate::client::{Client, Owner};
use crate::cmd::{channels, machine, personality, task, when};
use crate::failure::invalid;
use crate::show;
use crate::show::progress::{Shown, said_if_slow};

/// The longest CSV file of machines: 10,000 lines have less.
const MAX_LIST_BYTES: u64 = 2 << 20;

/// Carries out one command of `headwater catalog`.
pub async fn run(client: Client, command: CatalogCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        command @ CatalogCommand::Create { .. } => create(&client, command, json).await?,
        CatalogCommand::Scale { name, count, machines, start, force } => {
            let machines = listed(machines.as_deref())?;
            scale(&client, &name, ScaleRequest { count, machines, start, force }, json).await?;
        }
        CatalogCommand::Roll(args) => roll(&client, args, json).await?,
        CatalogCommand::List => {
            let list = client.catalogs().await?;
            if json { show::json(&list)? } else { show_list(&list.catalogs)? }
        }
        CatalogCommand::Advice { name } => {
            let advice = client.advice(&name).await?;
            if json { show::json(&advice)? } else { super::advice::show(&advice)? }
        }
        CatalogCommand::Show { name } => {
            let catalog = client.catalog(&name).await?;
            if json { show::json(&catalog)? } else { show_one(&client, catalog).await? }
        }
        CatalogCommand::Set {
            name,
            image,
            seal_removes,
            seal_removes_nothing,
            keep_ready,
            hours,
            on_host_loss,
            always,
            no_user_data,
            personality,
            machine,
            rotate_after,
        } => {
            let sets_seal_removes = seal_removes_nothing || !seal_removes.is_empty();
            let scheme = scheme::change(&client, &name, &machine, no_user_data).await?;
            let request = SetCatalog {
                image,
                scheme,
                keep_ready,
                ready_hours: hours.hours()?,
                ready_always: always,
                stop_idle_s: hours.stop_idle,
                seal_removes: sets_seal_removes.then_some(seal_removes),
                on_host_loss,
                rotate_after_s: rotate_after,
            };
            let is_all = request == SetCatalog::default();
            personality::set(&client, Owner::Catalog(&name), personality, is_all, json).await?;
            if !is_all {
                set(&client, &name, &request, sets_seal_removes, json).await?;
            }
        }
        CatalogCommand::Scheme(command) => scheme::run(&client, command, json).await?,
        CatalogCommand::Claim { catalog, holder, ttl, wait, key, secret, reset_on } => {
            let request = ClaimRequest { holder, ttl_s: ttl, wait_s: wait, key, secret, reset_on };
            let claim = client.claim(&catalog, &request).await?;
            if json { show::json(&claim)? } else { show_claim(&claim)? }
        }
        CatalogCommand::Claims { catalog } => claims(&client, catalog.as_deref(), json).await?,
        CatalogCommand::Release { claim } => release(&client, &claim, json).await?,
        CatalogCommand::Remove { name } => remove(&client, name, json).await?,
    }
    Ok(0)
}

/// Creates a catalog, and with `--count` its machines.
async fn create(client: &Client, command: CatalogCommand, json: bool) -> anyhow::Result<()> {
    let CatalogCommand::Create {
        name,
        image,
        persistent,
        count,
        machines,
        name_rule,
        first,
        keep_ready,
        hours,
        start,
        on_host_loss,
        seal_removes,
        machine,
        cloud,
    } = command
    else {
        return Ok(());
    };
    let cloud = cloud::scheme(&cloud)?;
    let machines = listed(machines.as_deref())?;
    let scaling = ScaleRequest { count, machines, start, force: false };
    let what = channels::behind_store(&image);
    let rule = NamesOfMachines { name_rule, first };
    let new = creation(name, image, persistent, rule, &machine)?;
    let (ready_hours, stop_idle_s) = (hours.hours()?, hours.stop_idle);
    let request =
        CreateCatalog { keep_ready, ready_hours, stop_idle_s, seal_removes, on_host_loss, cloud, ..new };
    let catalog = said_if_slow(json, &what, client.create_catalog(&request)).await?;
    let text = format!("created catalog {}; its machines boot {}", catalog.name, catalog.image);
    if !json {
        show::line(&text)?;
    }
    if count.is_some() || !scaling.machines.is_empty() {
        fill(client, &catalog.name, scaling, json).await?;
    } else if json {
        show::json(&catalog)?;
    }
    Ok(())
}

async fn claims(client: &Client, catalog: Option<&str>, json: bool) -> anyhow::Result<()> {
    let list = client.claims(catalog).await?;
    if json { show::json(&list) } else { show_claims(&list.claims) }
}

async fn release(client: &Client, claim: &str, json: bool) -> anyhow::Result<()> {
    let claim = client.release(claim).await?;
    let text = format!("released {}; it is reset, or switched off if enough others are ready", claim.machine);
    if json { show::json(&claim) } else { show::line(&text) }
}

async fn remove(client: &Client, name: String, json: bool) -> anyhow::Result<()> {
    client.remove_catalog(&name).await?;
    let text = format!("removed catalog {name}");
    if json { show::removed(&[name]) } else { show::line(&text) }
}

async fn set(
    client: &Client,
    name: &str,
    request: &SetCatalog,
    sets_seal_removes: bool,
    json: bool,
) -> anyhow::Result<()> {
    let what = channels::behind_store(request.image.as_deref().unwrap_or_default());
    let catalog = said_if_slow(json, &what, client.set_catalog(name, request)).await?;
    if json { show::json(&catalog) } else { show_change(&catalog, request, sets_seal_removes) }
}

/// Says what was changed of a catalog.
fn show_change(catalog: &Catalog, request: &SetCatalog, sets_seal_removes: bool) -> anyhow::Result<()> {
    if request.image.is_some() {
        show_next_version(catalog)?;
    }
    if request.scheme.is_some() {
        scheme::show_newest(catalog)?;
    }
    let is_pool_set = request.ready_hours.is_some() || request.ready_always || request.stop_idle_s.is_some();
    if request.keep_ready.is_some() || is_pool_set {
        show::line(&format!(
            "machines of {} that are kept ready to be claimed: {}",
            catalog.name,
            ready_text(catalog)
        ))?;
    }
    if sets_seal_removes {
        let what = removed_text(catalog);
        show::line(&format!("a seal of a machine of {} also removes {what}", catalog.name))?;
    }
    if request.on_host_loss.is_some() {
        let what = loss_text(catalog);
        show::line(&format!("when their host is lost, machines of {} {what}", catalog.name))?;
    }
    if request.rotate_after_s.is_some() {
        show::line(&format!("SSH host keys of machines of {}: {}", catalog.name, rotation_text(catalog)))?;
    }
    Ok(())
}

/// When SSH host keys are replaced.
fn rotation_text(catalog: &Catalog) -> String {
    match catalog.rotate_after_s {
        0 => "not replaced automatically".to_owned(),
        after_s if after_s % 86_400 == 0 => format!("replaced at a boot after {} d", after_s / 86_400),
        after_s => format!("replaced at a boot after {after_s} s"),
    }
}

/// The policy for machines whose host is lost.
fn loss_text(catalog: &Catalog) -> &'static str {
    match catalog.on_host_loss {
        OnHostLoss::Wait => "wait for it",
        OnHostLoss::Restart => "are started on other hosts",
    }
}

async fn scale(client: &Client, name: &str, request: ScaleRequest, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("scale {name}"), json);
    let result = client.scale_catalog(name, &request, |step| shown.update(step)).await;
    shown.end();
    let result = result?;
    if json { show::json(&result) } else { task::show_result(&result) }
}

/// Makes the machines of a new catalog.
async fn fill(client: &Client, name: &str, request: ScaleRequest, json: bool) -> anyhow::Result<()> {
    let is_list = !request.machines.is_empty();
    let scaled = scale(client, name, request, json).await;
    // If a line was refused, no machine was made, and the command can be repeated. A catalog with machines cannot be removed.
    if scaled.is_err() && is_list && client.remove_catalog(name).await.is_ok() {
        show::aside(&format!("removed catalog {name} again, because it has no machine\n"));
    }
    scaled
}

/// The machines of a CSV file.
fn listed(path: Option<&Path>) -> anyhow::Result<Vec<ListedMachine>> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let failed = || format!("cannot read the list of machines {}", path.display());
    let text = match small_file::read(path, MAX_LIST_BYTES).and_then(small_file::text) {
        Err(e) if e.kind() == ErrorKind::InvalidData => return Err(invalid(format!("{}: {e}", failed()))),
        read => read.with_context(failed)?,
    };
    Ok(machine_list::parse(&text).map_err(|problem| problem.during(failed()))?)
}

async fn roll(client: &Client, args: RollArgs, json: bool) -> anyhow::Result<()> {
    let request = RollRequest {
        to: args.to,
        canary: args.canary,
        batch: args.batch,
        pause_s: args.pause.unwrap_or(0),
        health: args.health,
        health_s: args.health_timeout,
        boot_s: args.boot_timeout,
        max_failures: args.max_failures,
        at_ms: args.at.as_deref().map(|at| when::parse(at, SystemClock.now_ms())).transpose()?,
        window: args.window,
        wait_idle_s: args.wait_idle,
        message: args.message,
        deadline_s: args.deadline,
    };
    if args.no_wait {
        let id = client.begin_roll(&args.name, &request).await?;
        let text = format!("task {id} rolls {}; 'headwater task wait {id}' follows it", args.name);
        return if json { show::json(&client.task(id).await?) } else { show::line(&text) };
    }
    let mut shown = Shown::begin(&format!("roll {}", args.name), json);
    let result = client.roll_catalog(&args.name, &request, |step| shown.update(step)).await;
    shown.end();
    let result = result?;
    if json { show::json(&result) } else { task::show_result(&result) }
}

/// The names and numbers of the machines that `--count` creates.
struct NamesOfMachines {
    name_rule: Option<String>,
    first: u32,
}

fn creation(
    name: String,
    image: String,
    persistent: bool,
    names: NamesOfMachines,
    args: &MachineArgs,
) -> anyhow::Result<CreateCatalog> {
    Ok(CreateCatalog {
        name_rule: names.name_rule,
        first_number: names.first,
        keep_ready: 0,
        ready_hours: None,
        stop_idle_s: None,
        name,
        image,
        cache: args.cache_settings(CacheSettings { persistent, ..CacheSettings::default() })?,
        memory_bytes: args.memory.unwrap_or(CreateMachine::default_memory_bytes()),
        cpus: args.cpus.unwrap_or(CreateMachine::default_cpus()),
        transport: args.transport.unwrap_or_default(),
        firmware: args.firmware().unwrap_or_default(),
        secure_boot: args.secure_boot.unwrap_or_default(),
        tpm: args.tpm.unwrap_or_default(),
        display: args.display.unwrap_or_default(),
        network: args.network.clone().unwrap_or_default(),
        scratch_bytes: args.scratch.unwrap_or_default(),
        user_data: machine::user_data(args)?,
        seal_removes: Vec::new(),
        on_host_loss: OnHostLoss::Wait,
        cloud: None,
    })
}

/// How many machines are kept ready, at which hours, and when idle machines are switched off.
fn ready_text(catalog: &Catalog) -> String {
    let hours = catalog.ready_hours.as_ref().map(|hours| format!(" {hours}")).unwrap_or_default();
    let idle = match catalog.stop_idle_s {
        0 => String::new(),
        idle_s => format!(", others are switched off after {idle_s} s"),
    };
    format!("{}{hours}{idle}", catalog.keep_ready)
}

fn removed_text(catalog: &Catalog) -> String {
    match catalog.seal_removes.as_slice() {
        [] => "nothing else".to_owned(),
        paths => paths.join(", "),
    }
}

/// Prints what the catalog's machines boot from their next boot on.
pub fn show_next_version(catalog: &Catalog) -> anyhow::Result<()> {
    let what = catalog.pin.as_ref().unwrap_or(&catalog.image);
    let next = match catalog.next_version.as_ref() {
        Some(next) if next == what => next.clone(),
        Some(next) => format!("{what}, which is {next},"),
        None => format!("{what}, which does not exist,"),
    };
    let from = if catalog.cache.persistent {
        "from their next boot on, those with persistent disks after a reset"
    } else {
        "from their next boot on"
    };
    show::line(&format!("the machines of {} boot {next} {from}", catalog.name))?;
    if catalog.old.is_empty() {
        return Ok(());
    }
    show::line(&format!("these machines still have another version: {}", catalog.old.join(", ")))
}

fn show_list(catalogs: &[Catalog]) -> anyhow::Result<()> {
    let row = |catalog: &Catalog| {
        vec![
            catalog.name.clone(),
            catalog.image.clone(),
            catalog.pin.clone().unwrap_or_else(|| "-".to_owned()),
            catalog.next_version.clone().unwrap_or_else(|| "-".to_owned()),
            catalog.machines.len().to_string(),
            catalog.old.len().to_string(),
        ]
    };
    show::table(&["CATALOG", "IMAGE", "PINNED TO", "NEXT", "MACHINES", "OLD"], catalogs.iter().map(row))
}

/// Prints the name of the machine, and its secret if it has one, on standard output, where scripts read them. All else
/// goes to standard error.
fn show_claim(claim: &Claim) -> anyhow::Result<()> {
    let until = claim.expires_at_ms.map_or_else(
        || "until it is released or shuts down".to_owned(),
        |end| format!("until {}", show::time(end)),
    );
    let addresses: Vec<String> = claim.addresses.iter().map(ToString::to_string).collect();
    let at = match addresses.is_empty() {
        true => "the guest agent has not reported addresses".to_owned(),
        false => format!("its addresses: {}", addresses.join(", ")),
    };
    let holder = show::printable(&claim.holder);
    show::aside(&format!(
        "claimed for {holder} {until}; {at}; its console: {}\n",
        show::printable(&claim.console)
    ));
    show::line(&claim.machine)?;
    claim.secret.as_ref().map_or(Ok(()), |secret| show::line(&secret.0))
}

fn show_claims(claims: &[Claim]) -> anyhow::Result<()> {
    let row = |claim: &Claim| {
        vec![
            claim.machine.clone(),
            claim.catalog.clone(),
            show::printable(&claim.holder),
            claim.addresses.first().map_or_else(|| "-".to_owned(), ToString::to_string),
            show::time(claim.created_at_ms),
            claim.expires_at_ms.map_or_else(|| "-".to_owned(), show::time),
            claim.ended.as_deref().map_or_else(|| "claimed".to_owned(), |why| format!("being reset: {why}")),
        ]
    };
    show::table(&["MACHINE", "CATALOG", "FOR", "ADDRESS", "SINCE", "UNTIL", "STATE"], claims.iter().map(row))
}

async fn show_one(client: &Client, catalog: Catalog) -> anyhow::Result<()> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let strings = client.personality(Owner::Catalog(&catalog.name)).await?.strings;
    let mut pairs = vec![
        ("catalog", catalog.name.clone()),
        ("image", catalog.image.clone()),
        ("pinned to", or_dash(catalog.pin.clone())),
        ("at the next boot", or_dash(catalog.next_version.clone())),
    ];
    pairs.extend(match &catalog.cloud {
        Some(cloud) => cloud::pairs(&catalog, cloud),
        None => pairs_of_hosts(&catalog),
    });
    if catalog.cloud.is_none() {
        pairs.push(("personality", personality::in_words(&strings)));
    }
    pairs.push(("created", show::time(catalog.created_at_ms)));
    show::pairs(&pairs)?;
    let machines = client.machines().await?.machines;
    let machines: Vec<_> =
        machines.into_iter().filter(|machine| machine.catalog.as_ref() == Some(&catalog.name)).collect();
    show::line("")?;
    show::line(&show::machines::machines(&machines))
}

/// The settings of machines that run on hosts.
fn pairs_of_hosts(catalog: &Catalog) -> Vec<(&'static str, String)> {
    vec![
        ("write cache", machine::cache_text(&catalog.cache)),
        ("memory", size::format(catalog.memory_bytes)),
        ("processors", catalog.cpus.to_string()),
        ("disk reached by", catalog.transport.to_string()),
        ("firmware", machine::firmware_text(catalog.firmware, catalog.secure_boot)),
        ("TPM", machine::tpm_text(catalog.tpm)),
        ("display", catalog.display.to_string()),
        ("network", machine::network_text(&catalog.network)),
        ("scratch disk", machine::scratch_text(catalog.scratch_bytes)),
        ("scheme", scheme::in_words(catalog)),
        ("machines are named", format!("{} from {}", catalog.name_rule, catalog.first_number)),
        ("kept ready", ready_text(catalog)),
        ("a seal also removes", removed_text(catalog)),
        ("when their host is lost", format!("machines {}", loss_text(catalog))),
        ("SSH host keys", rotation_text(catalog)),
    ]
}
