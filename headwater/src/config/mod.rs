//! The configuration file of `headwater serve`: each key is a flag without its dashes.
//!
//! ```text
//!   headwater.toml --file.rs--> settings with their lines --here--> words of a command line --clap--> ServeArgs
//! ```
//! The definitions of clap are used for both: flags are the keys, and their parsers check the values. A flag on the
//! command line has priority over its environment variable, that over the file, and the file over the default.
//!
//! # Not here
//! The file has no sections, includes no other file, and contains no secrets: it names the files that have them.

mod file;

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, CommandFactory, FromArgMatches};
use headwater_api::{Problem, ProblemKind};

pub use self::file::read;
use crate::cli::{Cli, Command, ServeArgs};

/// The file of the service that the package installs.
pub const SYSTEM_FILE: &str = "/etc/headwater/headwater.toml";

/// Flags of `serve` that are not settings of a daemon.
const NO_KEYS: [&str; 4] = ["config", "context", "json", "help"];

/// The flags of `headwater serve`, including those of all commands.
pub fn serve_flags() -> Vec<Arg> {
    let mut root = Cli::command();
    root.build();
    let serve = root.find_subcommand("serve");
    let flags = serve.into_iter().flat_map(|serve| serve.get_arguments()).cloned();
    flags.filter(|flag| flag.get_long().is_some_and(|name| !NO_KEYS.contains(&name))).collect()
}

/// Adds the settings of the configuration file to a command line of `serve --config FILE`. Other command lines are
/// not changed.
pub fn with_file(words: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    // Errors are reported when the result is parsed: a flag may require another one that is in the file.
    let parsed = Cli::command().ignore_errors(true).try_get_matches_from(&words);
    let Some(file) = parsed.as_ref().ok().and_then(file_of) else { return Ok(words) };
    let given = given_flags(&words);
    let settings = read(&file)?;
    let from_file =
        settings.iter().filter(|setting| !given.contains(&setting.key) && !is_in_environment(&setting.key));
    let more: Vec<OsString> =
        from_file.flat_map(|setting| setting.words.iter().map(OsString::from)).collect();
    let mut words = words;
    // Words after `--` are not flags.
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    words.splice(end..end, more);
    Ok(words)
}

fn file_of(parsed: &ArgMatches) -> Option<PathBuf> {
    let ("serve", serve) = parsed.subcommand()? else { return None };
    serve.try_get_one::<PathBuf>("config").ok().flatten().cloned()
}

/// The keys of the flags on a command line.
fn given_flags(words: &[OsString]) -> HashSet<String> {
    let flags = serve_flags();
    let names = words.iter().filter_map(|word| {
        let word = word.to_str()?.strip_prefix("--")?;
        Some(word.split_once('=').map_or(word, |(name, _)| name))
    });
    let known = names.filter_map(|name| flags.iter().find(|flag| has_name(flag, name)));
    known.filter_map(Arg::get_long).map(str::to_owned).collect()
}

fn has_name(flag: &Arg, name: &str) -> bool {
    let aliases = flag.get_all_aliases().unwrap_or_default();
    flag.get_long() == Some(name) || aliases.contains(&name)
}

fn is_in_environment(key: &str) -> bool {
    variable(key).is_some_and(|name| std::env::var_os(name).is_some())
}

/// The environment variable with a flag's value.
fn variable(key: &str) -> Option<OsString> {
    let flag = serve_flags().into_iter().find(|flag| flag.get_long() == Some(key))?;
    flag.get_env().map(OsStr::to_owned)
}

/// The effective settings of a command line of `headwater serve`, parsed and as text.
pub struct Effective {
    /// The settings for the daemon.
    pub args: ServeArgs,
    /// The values of each key that has any, as text, and their origin.
    pub values: BTreeMap<String, (Vec<String>, Source)>,
}

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A line of the file.
    File(PathBuf, usize),
    /// A flag on the command line.
    CommandLine,
    /// An environment variable.
    Environment(String),
    /// The default.
    Default,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::CommandLine => f.write_str("command line"),
            Self::Environment(name) => write!(f, "environment, {name}"),
            Self::Default => f.write_str("default"),
        }
    }
}

impl Effective {
    /// The settings of a command line of `headwater serve`. Everything is checked that can be checked without
    /// starting.
    pub fn of(words: Vec<OsString>) -> anyhow::Result<Self> {
        let file =
            Cli::command().ignore_errors(true).try_get_matches_from(&words).ok().as_ref().and_then(file_of);
        let given = given_flags(&words);
        let settings = file.as_deref().map(read).transpose()?.unwrap_or_default();
        let parsed = Cli::command().try_get_matches_from(with_file(words)?);
        let in_file = |why: String| match &file {
            Some(file) => Problem::new(ProblemKind::Invalid, format!("cannot use {}: {why}", file.display())),
            None => Problem::new(ProblemKind::Invalid, why),
        };
        let parsed = parsed.map_err(|e| in_file(crate::failure::usage_line(&e)))?;
        let cli = Cli::from_arg_matches(&parsed).map_err(|e| in_file(crate::failure::usage_line(&e)))?;
        let Command::Serve(args) = cli.command else {
            return Err(in_file("it is not a command line of 'headwater serve'".to_owned()).into());
        };
        args.check().map_err(|e| in_file(crate::failure::one_line(&e)))?;
        let lines: BTreeMap<&str, usize> =
            settings.iter().map(|setting| (setting.key.as_str(), setting.line)).collect();
        let source = |key: &str, source: ValueSource| match (source, lines.get(key)) {
            (ValueSource::DefaultValue, _) => Source::Default,
            (ValueSource::EnvVariable, _) => {
                Source::Environment(variable(key).unwrap_or_default().to_string_lossy().into_owned())
            }
            (_, Some(line)) if !given.contains(key) => Source::File(file.clone().unwrap_or_default(), *line),
            _ => Source::CommandLine,
        };
        let serve = parsed.subcommand().map(|(_, serve)| serve);
        let values = serve.map(|serve| values(serve, source)).unwrap_or_default();
        Ok(Self { args: *args, values })
    }

    /// The data directory, if it is set.
    pub fn data_dir(&self) -> Option<PathBuf> {
        self.values.get("data-dir").and_then(|(values, _)| values.first()).map(PathBuf::from)
    }

    /// The keys with other values in `later`.
    pub fn changed(&self, later: &Self) -> Vec<String> {
        let value = |of: &Self, key: &str| of.values.get(key).map(|(values, _)| values.clone());
        let keys: std::collections::BTreeSet<&String> =
            self.values.keys().chain(later.values.keys()).collect();
        keys.into_iter().filter(|key| value(self, key) != value(later, key)).cloned().collect()
    }
}

fn values(
    serve: &ArgMatches,
    source: impl Fn(&str, ValueSource) -> Source,
) -> BTreeMap<String, (Vec<String>, Source)> {
    let mut values = BTreeMap::new();
    for flag in serve_flags() {
        let (Some(key), id) = (flag.get_long(), flag.get_id().as_str()) else { continue };
        let raw = serve.try_get_raw(id).ok().flatten();
        if let (Some(raw), Some(from)) = (raw, serve.value_source(id)) {
            let texts = raw.map(|value| value.to_string_lossy().into_owned()).collect();
            values.insert(key.to_owned(), (texts, source(key, from)));
        }
    }
    values
}

/// The command line of `headwater serve` with only a file.
pub fn serve_with(file: Option<&Path>) -> Vec<OsString> {
    let mut words = vec![OsString::from("headwater"), "serve".into()];
    words.extend(file.into_iter().flat_map(|file| ["--config".into(), file.into()]));
    words
}

/// The data directory in the configuration file of this host's service.
pub fn system_data_dir() -> Option<PathBuf> {
    // Errors of the file are ignored here: `serve` and `config check` report them.
    file::value_of(Path::new(SYSTEM_FILE), "data-dir").map(PathBuf::from)
}

#[cfg(test)]
mod tests;
