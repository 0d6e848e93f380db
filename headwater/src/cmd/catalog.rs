//! `headwater catalog`: machines that are made alike and boot the same.

use headwater_api::{CacheSettings, Catalog, CreateCatalog, CreateMachine, SetCatalog};
use headwater_block::size;

use crate::cli::{CatalogCommand, MachineArgs};
use crate::client::Client;
use crate::cmd::{channels, machine};
use crate::show::{self, progress::said_if_slow};

/// Carries out one of the catalog commands.
pub async fn run(client: Client, command: CatalogCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        CatalogCommand::Create { name, image, persistent, machine } => {
            let what = channels::behind_store(&image);
            let request = creation(name, image, persistent, &machine)?;
            let catalog = said_if_slow(json, &what, client.create_catalog(&request)).await?;
            let text = format!("created catalog {}; its machines boot {}", catalog.name, catalog.image);
            if json { show::json(&catalog)? } else { show::line(&text)? }
        }
        CatalogCommand::List => {
            let list = client.catalogs().await?;
            if json { show::json(&list)? } else { show_list(&list.catalogs)? }
        }
        CatalogCommand::Show { name } => {
            let catalog = client.catalog(&name).await?;
            if json { show::json(&catalog)? } else { show_one(&client, catalog).await? }
        }
        CatalogCommand::Set { name, image } => {
            let (what, request) = (channels::behind_store(&image), SetCatalog { image });
            let catalog = said_if_slow(json, &what, client.set_catalog(&name, &request)).await?;
            if json { show::json(&catalog)? } else { told_next(&catalog)? }
        }
        CatalogCommand::Remove { name } => {
            client.remove_catalog(&name).await?;
            let text = format!("removed catalog {name}");
            if json { show::removed(&[name])? } else { show::line(&text)? }
        }
    }
    Ok(0)
}

fn creation(
    name: String,
    image: String,
    persistent: bool,
    args: &MachineArgs,
) -> anyhow::Result<CreateCatalog> {
    Ok(CreateCatalog {
        name,
        image,
        cache: args.cache_settings(CacheSettings { persistent, ..CacheSettings::default() })?,
        memory_bytes: args.memory.unwrap_or(CreateMachine::default_memory_bytes()),
        cpus: args.cpus.unwrap_or(CreateMachine::default_cpus()),
        transport: args.transport.unwrap_or_default(),
        user_data: machine::user_data(args)?,
    })
}

/// Says what a catalog's machines boot from now on.
pub fn told_next(catalog: &Catalog) -> anyhow::Result<()> {
    let what = catalog.pin.as_ref().unwrap_or(&catalog.image);
    let next = match catalog.next_version.as_ref() {
        Some(next) if next == what => next.clone(),
        Some(next) => format!("{what}, which is {next},"),
        None => format!("{what}, which is not there,"),
    };
    let from = if catalog.cache.persistent {
        "from their next boot on, those whose disks are kept once they are reset"
    } else {
        "from their next boot on"
    };
    show::line(&format!("the machines of {} boot {next} {from}", catalog.name))?;
    if catalog.old.is_empty() {
        return Ok(());
    }
    show::line(&format!("still on another version until then: {}", catalog.old.join(", ")))
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

async fn show_one(client: &Client, catalog: Catalog) -> anyhow::Result<()> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    show::pairs(&[
        ("catalog", catalog.name.clone()),
        ("image", catalog.image.clone()),
        ("pinned to", or_dash(catalog.pin.clone())),
        ("at the next boot", or_dash(catalog.next_version.clone())),
        ("write cache", machine::cache_text(&catalog.cache)),
        ("memory", size::format(catalog.memory_bytes)),
        ("processors", catalog.cpus.to_string()),
        ("disk reached by", catalog.transport.to_string()),
        ("created", show::time(catalog.created_at_ms)),
    ])?;
    let machines = client.machines().await?.machines;
    let machines: Vec<_> =
        machines.into_iter().filter(|machine| machine.catalog.as_ref() == Some(&catalog.name)).collect();
    show::line("")?;
    show::line(&show::machines::machines(&machines))
}
