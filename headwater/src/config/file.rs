//! Reads a configuration file: converts TOML to words of a command line, and records the line of each key.

use std::ops::Range;
use std::path::Path;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, CommandFactory};
use headwater_api::{Problem, ProblemKind};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{has_name, serve_flags};
use crate::cli::Cli;

/// The largest file.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The most errors that are listed; further errors are only counted.
const NAMED_ERRORS_MAX: usize = 8;

/// An unknown key with a smaller edit distance to a known key is reported with that as a suggestion.
const SUGGESTION_DISTANCE: usize = 4;

/// A key of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag's name without its dashes.
    pub key: String,
    /// The line that sets it.
    pub line: usize,
    /// The words for a command line. Empty if the file sets a switch to `false`.
    pub words: Vec<String>,
}

/// Reads a file. The error lists all wrong keys and values, each with its line.
pub fn read(path: &Path) -> anyhow::Result<Vec<Setting>> {
    let text = text_of(path)?;
    settings(&text).map_err(|wrong| {
        let more = wrong.len().saturating_sub(NAMED_ERRORS_MAX);
        let named = wrong.into_iter().take(NAMED_ERRORS_MAX);
        let mut lines: Vec<String> =
            named.map(|(line, why)| format!("{}:{line}: {why}", path.display())).collect();
        if more > 0 {
            lines.push(format!("{more} more"));
        }
        Problem::new(ProblemKind::Invalid, lines.join("; ")).into()
    })
}

fn text_of(path: &Path) -> anyhow::Result<String> {
    let failed = || format!("cannot read the configuration file {}", path.display());
    let len = path.metadata().with_context(failed)?.len();
    if len > FILE_MAX_BYTES {
        let why = format!("{}: it has {len} bytes, and the maximum is {FILE_MAX_BYTES} bytes", failed());
        return Err(Problem::new(ProblemKind::Invalid, why).into());
    }
    std::fs::read_to_string(path).with_context(failed)
}

/// A line, and the error in it.
type Wrong = (usize, String);

fn settings(text: &str) -> Result<Vec<Setting>, Vec<Wrong>> {
    let line_at =
        |span: Range<usize>| text.bytes().take(span.start).filter(|byte| *byte == b'\n').count() + 1;
    let table = DeTable::parse(text).map_err(|e| {
        let line = line_at(e.span().unwrap_or(text.len()..text.len()));
        vec![(line, format!("it is not TOML: {}", e.message()))]
    })?;
    let flags = serve_flags();
    let (mut settings, mut wrong) = (Vec::new(), Vec::new());
    for (key, value) in table.into_inner() {
        let line = line_at(key.span());
        match setting(&flags, key.get_ref(), &value, line) {
            Ok(setting) => settings.push(setting),
            Err(why) => wrong.push((line, why)),
        }
    }
    settings.sort_by_key(|setting| setting.line);
    wrong.sort();
    if wrong.is_empty() { Ok(settings) } else { Err(wrong) }
}

fn setting(flags: &[Arg], key: &str, value: &Spanned<DeValue<'_>>, line: usize) -> Result<Setting, String> {
    let Some(flag) = flags.iter().find(|flag| flag.get_long() == Some(key)) else {
        return Err(unknown(flags, key));
    };
    let words = words(flag, key, value.get_ref())?;
    check(key, &words)?;
    Ok(Setting { key: key.to_owned(), line, words })
}

fn unknown(flags: &[Arg], key: &str) -> String {
    if let Some(name) = flags.iter().find(|flag| has_name(flag, key)).and_then(Arg::get_long) {
        return format!("unknown key '{key}': the key is '{name}' in this file");
    }
    let names = flags.iter().filter_map(Arg::get_long);
    let plain = key.replace('_', "-").to_lowercase();
    match names.map(|name| (distance(&plain, name), name)).min() {
        Some((far, name)) if far < SUGGESTION_DISTANCE => {
            format!("unknown key '{key}': did you mean '{name}'?")
        }
        _ => format!("unknown key '{key}': 'headwater config show' lists the keys"),
    }
}

/// The edit distance: the number of letters to add, remove or change.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

/// The words that set a flag to a value on a command line.
fn words(flag: &Arg, key: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let word = |value: &DeValue<'_>, wanted: &str| match value {
        DeValue::String(text) => Ok(format!("--{key}={text}")),
        DeValue::Integer(number) if number.radix() == 10 => Ok(format!("--{key}={}", number.as_str())),
        other => Err(format!("'{key}' takes {wanted}, not {}", described(other))),
    };
    match flag.get_action() {
        ArgAction::SetTrue => match value {
            DeValue::Boolean(true) => Ok(vec![format!("--{key}")]),
            DeValue::Boolean(false) => Ok(Vec::new()),
            other => Err(format!("'{key}' takes true or false, not {}", described(other))),
        },
        ArgAction::Append => match value {
            DeValue::Array(values) => {
                values.iter().map(|value| word(value.get_ref(), "a list of texts")).collect()
            }
            other => Ok(vec![word(other, "a list of texts")?]),
        },
        _ => Ok(vec![word(value, "a text in quotes or a number")?]),
    }
}

fn described(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(number) if number.radix() == 10 => "a number",
        DeValue::Integer(_) => "a number that is not decimal",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a section",
    }
}

/// Checks a value with the flag's own parser. Other flags that it requires are not checked.
fn check(key: &str, words: &[String]) -> Result<(), String> {
    let line = ["headwater", "serve"].into_iter().chain(words.iter().map(String::as_str));
    match Cli::command().try_get_matches_from(line) {
        Err(e) if e.kind() != ErrorKind::MissingRequiredArgument => {
            Err(format!("cannot use the value of '{key}': {}", crate::failure::usage_line(&e)))
        }
        _ => Ok(()),
    }
}

/// The value of one key in a file whose other contents are ignored.
pub fn value_of(path: &Path, key: &str) -> Option<String> {
    let text = text_of(path).ok()?;
    let table = DeTable::parse(&text).ok()?;
    let found = table.get_ref().iter().find(|(name, _)| name.get_ref() == key)?;
    found.1.get_ref().as_str().map(str::to_owned)
}
