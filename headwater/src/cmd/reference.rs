//! `headwater man --markdown`: prints all commands and options as one page, for the documentation.

use std::fmt::Write as _;

use clap::builder::StyledStr;
use clap::{Arg, Command, CommandFactory};

use crate::cli::Cli;
use crate::show;

/// Prints the page.
pub fn print() -> anyhow::Result<()> {
    show::bytes(page().as_bytes())
}

fn page() -> String {
    let mut root = Cli::command();
    root.build();
    let mut page = String::from(
        "# Every command and option\n\nThis page is generated from the program (`headwater man --markdown`). \
         [The command line](cli.md) explains how commands work together, and [Exit codes](exit-codes.md) lists how they \
         end.\n\n## Options of all commands\n\n",
    );
    options(&mut page, root.get_arguments().filter(|arg| arg.is_global_set()));
    for command in shown(&root) {
        section(&mut page, command, "headwater", 2);
    }
    let lines: Vec<&str> = page.lines().map(str::trim_end).collect();
    format!("{}\n", lines.join("\n").trim_end())
}

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

/// The section of a command, followed by those of its subcommands.
fn section(page: &mut String, command: &Command, above: &str, level: usize) {
    let path = format!("{above} {}", command.get_name());
    let about = command.get_long_about().or_else(|| command.get_about()).map(text).unwrap_or_default();
    let _ = write!(page, "\n{} {path}\n\n", "#".repeat(level.min(4)));
    if !about.is_empty() {
        let _ = write!(page, "{}\n\n", sentence(&about));
    }
    let is_shown = |arg: &&Arg| !arg.is_hide_set() && !arg.is_global_set() && arg.get_id() != "help";
    let has_arguments = command.get_arguments().any(|arg| is_shown(&arg));
    if command.get_subcommands().next().is_none() || has_arguments {
        let usage = command.clone().render_usage().to_string();
        let _ = write!(page, "```text\n{}\n```\n\n", usage.trim_start_matches("Usage: ").trim());
    }
    options(page, command.get_arguments().filter(is_shown));
    for below in shown(command) {
        section(page, below, &path, level + 1);
    }
}

/// A list of arguments and options.
fn options<'a>(page: &mut String, arguments: impl Iterator<Item = &'a Arg>) {
    for arg in arguments {
        let help = arg.get_long_help().or_else(|| arg.get_help()).map(text).unwrap_or_default();
        let _ = write!(page, "- `{}`: {}", name(arg), sentence(&help));
        let defaults = arg.get_default_values();
        let takes_value = arg.get_action().takes_values();
        if takes_value && !defaults.is_empty() && !arg.is_hide_default_value_set() {
            let values: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
            let _ = write!(page, " Default: `{}`.", values.join(" "));
        }
        let possible: Vec<_> =
            arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
        if takes_value && !possible.is_empty() && !arg.is_hide_possible_values_set() {
            let _ = write!(page, " One of {}.", possible.join(", "));
        }
        if let Some(variable) = arg.get_env() {
            let _ = write!(page, " Environment: `{}`.", variable.to_string_lossy());
        }
        page.push('\n');
    }
}

/// `-n, --count <COUNT>`, `--wait[=<SECONDS>]`, or `<NAME>...`.
fn name(arg: &Arg) -> String {
    let values: Vec<String> = arg
        .get_value_names()
        .filter(|_| arg.get_action().takes_values())
        .map(|names| names.iter().map(|name| format!("<{name}>")).collect())
        .unwrap_or_default();
    let many = if arg.get_num_args().is_some_and(|range| range.max_values() > 1 && values.len() == 1) {
        "..."
    } else {
        ""
    };
    let values = values.join(" ") + many;
    let flags: Vec<String> =
        [arg.get_short().map(|short| format!("-{short}")), arg.get_long().map(|long| format!("--{long}"))]
            .into_iter()
            .flatten()
            .collect();
    let flags = flags.join(", ");
    if arg.is_require_equals_set() {
        return format!("{flags}[={values}]");
    }
    format!("{flags} {values}").trim().to_owned()
}

/// Plain text in one paragraph, with characters escaped that Markdown could take for a tag.
fn text(styled: &StyledStr) -> String {
    let text = styled.to_string();
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").replace('<', "&lt;")
}

/// Adds a full stop.
fn sentence(text: &str) -> String {
    if text.is_empty() || text.ends_with(['.', '!', '?', ':']) { text.to_owned() } else { format!("{text}.") }
}
