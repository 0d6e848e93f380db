//! Prints results: tables for people, JSON for programs.

pub mod machines;
pub mod progress;

use std::io::{ErrorKind, Write};

use comfy_table::{ContentArrangement, Table, presets};
use headwater_api::EventList;
pub use headwater_api::words::time;
use serde::Serialize;

/// The reader of the output has gone, which is not a failure.
#[derive(Debug, thiserror::Error)]
#[error("the standard output was closed")]
pub struct OutputClosed;

/// Writes to standard output, which may be closed.
pub fn bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        Err(e) => Err(anyhow::Error::new(e).context("cannot write to the standard output")),
    }
}

/// Writes to standard error, for people. Errors are ignored, because they could not be reported, and the command
/// itself has not failed.
pub fn aside(text: &str) {
    crate::logging::aside(text);
}

/// Ignores a closed output, for commands that have more to do or a special exit code.
pub fn if_read(printed: anyhow::Result<()>) -> anyhow::Result<()> {
    printed.or_else(|error| if error.is::<OutputClosed>() { Ok(()) } else { Err(error) })
}

/// Writes a line.
pub fn line(text: &str) -> anyhow::Result<()> {
    bytes(format!("{text}\n").as_bytes())
}

/// Writes a value as JSON.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(&serde_json::to_string_pretty(value)?)
}

/// Writes the names of removed items as JSON, like the API's answer about removed versions.
pub fn removed(names: &[String]) -> anyhow::Result<()> {
    json(&serde_json::json!({ "removed": names }))
}

/// Writes the address of a server on one line, also as JSON, so that programs can read it while the server runs.
pub fn uri(uri: &str, json: bool) -> anyhow::Result<()> {
    line(&uri_text(uri, json))
}

/// The text of that line.
pub fn uri_text(uri: &str, json: bool) -> String {
    if json { serde_json::json!({ "uri": uri }).to_string() } else { uri.to_owned() }
}

/// Writes a table with headings.
pub fn table(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> anyhow::Result<()> {
    line(&table_text(headings, rows))
}

/// The text of a table, without trailing blanks.
pub fn table_text(headings: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    // Never wrapped, because scripts cut columns and people can scroll.
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().copied());
    for row in rows {
        table.add_row(row.into_iter().map(|cell| printable(&cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n")
}

/// Prints the events of one subject, which are given newest first, in the order of time after an empty line.
pub fn latest_events(list: EventList) -> anyhow::Result<()> {
    let rows = list
        .events
        .into_iter()
        .rev()
        .map(|event| vec![time(event.at_ms), event.caller, event.action, event.detail]);
    line("")?;
    table(&["TIME", "WHO", "ACTION", "DETAIL"], rows)
}

/// Writes names and values.
pub fn pairs(pairs: &[(&str, String)]) -> anyhow::Result<()> {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let lines: Vec<String> =
        pairs.iter().map(|(name, value)| format!("{name:width$}  {}", printable(value))).collect();
    line(&lines.join("\n"))
}

/// Escapes control characters in text from elsewhere, which could control the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Seconds with one decimal.
pub fn seconds(ms: u64) -> String {
    format!("{}.{}", ms / 1000, ms % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_no_blanks_at_the_end_and_no_control_characters() {
        let text = table_text(&["A", "B"], [vec!["x\u{1b}[2J".to_owned(), String::new()]]);
        assert_eq!(text.lines().count(), 2);
        assert!(text.lines().all(|line| !line.ends_with(' ')), "{text:?}");
        assert!(!text.contains('\u{1b}'));
    }
}
