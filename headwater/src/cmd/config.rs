//! `headwater config`: checks and shows the configuration file of `headwater serve`. It changes nothing;
//! [`crate::config`] reads the file.

use std::path::{Path, PathBuf};

use crate::cli::ConfigCommand;
use crate::config::{self, Effective, SYSTEM_FILE, Source, serve_flags, serve_with};
use crate::show;

/// Runs a command.
pub fn run(command: ConfigCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        ConfigCommand::Check { file } => check(&file.unwrap_or_else(|| SYSTEM_FILE.into()), json)?,
        ConfigCommand::Show { file } => show(file, json)?,
    }
    Ok(0)
}

fn check(file: &Path, json: bool) -> anyhow::Result<()> {
    Effective::of(serve_with(Some(file)))?;
    let keys = config::read(file)?.len();
    if json {
        return show::json(&serde_json::json!({ "file": file, "keys": keys }));
    }
    show::line(&format!("{} is valid: {keys} keys are set", file.display()))
}

fn show(file: Option<PathBuf>, json: bool) -> anyhow::Result<()> {
    let file = file.or_else(|| Path::new(SYSTEM_FILE).exists().then(|| SYSTEM_FILE.into()));
    let effective = Effective::of(serve_with(file.as_deref()))?;
    let rows = serve_flags().into_iter().filter_map(|flag| {
        let key = flag.get_long()?.to_owned();
        let found = effective.values.get(&key);
        let (values, from) = found.cloned().unwrap_or((Vec::new(), Source::Default));
        Some((key, values, from))
    });
    if json {
        let row = |(key, values, from): (String, Vec<String>, Source)| serde_json::json!({ "key": key, "values": values, "from": from.to_string() });
        return show::json(&serde_json::json!({ "settings": rows.map(row).collect::<Vec<_>>() }));
    }
    let row = |(key, values, from): (String, Vec<String>, Source)| {
        let shown = if values.is_empty() { "-".to_owned() } else { values.join(", ") };
        vec![key, shown, from.to_string()]
    };
    show::table(&["KEY", "VALUE", "FROM"], rows.map(row))
}
