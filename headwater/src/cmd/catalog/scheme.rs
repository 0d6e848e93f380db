//! `headwater catalog scheme`, and the settings of `headwater catalog set`. The scheme of a catalog is its machines'
//! settings, with a version for each change.

use headwater_api::{Catalog, Problem, ProblemKind, SchemeDifference, SchemeVersion, SetScheme};
use headwater_block::size;

use crate::cli::{MachineArgs, SchemeVersionCommand};
use crate::client::Client;
use crate::cmd::machine;
use crate::show;

/// The change of the settings that the options of `catalog set` say. `None`: they say nothing of settings.
pub async fn change(
    client: &Client,
    catalog: &str,
    args: &MachineArgs,
    no_user_data: bool,
) -> anyhow::Result<Option<SetScheme>> {
    let limits = &args.limits;
    let is_of_cache =
        limits.cache.is_some() || limits.ram.is_some() || limits.disk.is_some() || args.weight.is_some();
    let cache = match is_of_cache {
        // Settings that are not given stay.
        true => Some(args.cache_settings(client.catalog(catalog).await?.cache)?),
        false => None,
    };
    let user_data = if no_user_data { Some(String::new()) } else { machine::user_data(args)? };
    let scheme = SetScheme {
        cache,
        memory_bytes: args.memory,
        cpus: args.cpus,
        transport: args.transport,
        firmware: args.firmware(),
        secure_boot: args.secure_boot,
        tpm: args.tpm,
        display: args.display,
        network: args.network.clone(),
        scratch_bytes: args.scratch,
        user_data,
    };
    Ok(Some(scheme).filter(|scheme| *scheme != SetScheme::default()))
}

/// Carries out one of the commands.
pub async fn run(client: &Client, command: SchemeVersionCommand, json: bool) -> anyhow::Result<()> {
    match command {
        SchemeVersionCommand::List { catalog } => {
            let list = client.schemes(&catalog).await?;
            if json { show::json(&list) } else { show_list(&list.versions) }
        }
        SchemeVersionCommand::Show { catalog, version } => {
            let list = client.schemes(&catalog).await?;
            let version = find(&list.versions, &catalog, version)?;
            if json { show::json(version) } else { show_one(version) }
        }
        SchemeVersionCommand::Diff { catalog, from, to } => {
            let list = client.schemes(&catalog).await?;
            let from = find(&list.versions, &catalog, Some(from))?;
            let to = find(&list.versions, &catalog, to)?;
            let differences = from.settings.differences(&to.settings);
            if json { show::json(&differences) } else { show_differences(&differences) }
        }
        SchemeVersionCommand::Revert { catalog, version } => {
            let catalog = client.revert_scheme(&catalog, version).await?;
            if json { show::json(&catalog) } else { show_newest(&catalog) }
        }
    }
}

fn find<'v>(
    versions: &'v [SchemeVersion],
    catalog: &str,
    version: Option<u32>,
) -> Result<&'v SchemeVersion, Problem> {
    let found = match version {
        Some(number) => versions.iter().find(|version| version.version == number),
        None => versions.first(),
    };
    found.ok_or_else(|| {
        let number = version.map(|number| format!(" {number}")).unwrap_or_default();
        let message = format!("there is no version{number} of the scheme of catalog '{catalog}'");
        Problem::new(ProblemKind::NotFound, message)
            .advise(format!("'headwater catalog scheme list {catalog}' shows the versions"))
    })
}

/// Says which version machines take.
pub fn show_newest(catalog: &Catalog) -> anyhow::Result<()> {
    let text = format!("the newest settings of {} are version {}", catalog.name, catalog.scheme);
    if catalog.scheme_old.is_empty() {
        return show::line(&text);
    }
    show::line(&format!(
        "{text}; these machines take them at their next boot: {}",
        catalog.scheme_old.join(", ")
    ))
}

/// The version, and how many machines have an older one.
pub fn in_words(catalog: &Catalog) -> String {
    let newest = format!("version {}", catalog.scheme);
    match catalog.scheme_old.len() {
        0 => newest,
        old => {
            let names = catalog.scheme_old.join(", ");
            let have = if old == 1 { "has" } else { "have" };
            format!("{newest}; {old} of {} machines {have} an older one: {names}", catalog.machines.len())
        }
    }
}

fn show_list(versions: &[SchemeVersion]) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for (n, version) in versions.iter().enumerate() {
        let earlier = versions.get(n + 1);
        let changes = earlier.map(|earlier| earlier.settings.differences(&version.settings));
        let changes = changes.map_or_else(
            || "-".to_owned(),
            |all| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        );
        rows.push(vec![
            version.version.to_string(),
            version.machines.len().to_string(),
            show::time(version.created_at_ms),
            version.created_by.clone(),
            changes,
        ]);
    }
    show::table(&["VERSION", "MACHINES", "CREATED", "BY", "CHANGES"], rows)
}

fn show_one(version: &SchemeVersion) -> anyhow::Result<()> {
    let settings = &version.settings;
    let machines = match version.machines.as_slice() {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let user_data = settings.user_data.as_deref().map_or_else(|| "none".to_owned(), show::printable);
    show::pairs(&[
        ("version", version.version.to_string()),
        ("created", format!("{} by {}", show::time(version.created_at_ms), version.created_by)),
        ("write cache", machine::cache_text(&settings.cache)),
        ("memory", size::format(settings.memory_bytes)),
        ("processors", settings.cpus.to_string()),
        ("disk reached by", settings.transport.to_string()),
        ("firmware", machine::firmware_text(settings.firmware, settings.secure_boot)),
        ("TPM", machine::tpm_text(settings.tpm)),
        ("display", settings.display.to_string()),
        ("network", machine::network_text(&settings.network)),
        ("scratch disk", machine::scratch_text(settings.scratch_bytes)),
        ("user data", user_data),
        ("machines", machines),
    ])
}

fn show_differences(differences: &[SchemeDifference]) -> anyhow::Result<()> {
    if differences.is_empty() {
        return show::line("the settings are the same");
    }
    let row = |it: &SchemeDifference| vec![it.setting.clone(), it.before.clone(), it.after.clone()];
    show::table(&["SETTING", "BEFORE", "AFTER"], differences.iter().map(row))
}
