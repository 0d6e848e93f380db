//! Commands in the documentation: each is understood by the command line.
//!
//! Nothing is carried out. Each command gets an option at its end that does not exist; if the command line complains
//! about that option, it has understood everything before it.

use std::path::{Path, PathBuf};

use crate::support::{headwater, run};

/// An option that no command has.
const UNKNOWN: &str = "--no-command-has-this";

/// README.md and the pages of `docs/`, but not the page that is generated: its commands are forms.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let entries = std::fs::read_dir(root.join("docs")).expect("there is docs/");
    let pages = entries.map(|entry| entry.expect("docs/ can be read").path());
    let mut pages: Vec<_> = pages.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    pages.retain(|path| !path.ends_with("cli-reference.md"));
    pages.push(root.join("README.md"));
    pages.sort();
    pages
}

/// Lines of code blocks that begin with `headwater`, after a prompt or not, with the lines that continue them.
fn commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let (mut is_fenced, mut after_blank) = (false, true);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
            continue;
        }
        // An indented block begins after a blank line; other indented lines continue a list.
        let is_code = is_fenced || (line.starts_with("    ") && after_blank);
        after_blank = line.is_empty() || is_code;
        let line = line.trim_start();
        let line = line.strip_prefix("$ ").unwrap_or(line);
        let line = line.strip_prefix("target/release/").unwrap_or(line);
        if !is_code || !line.starts_with("headwater ") {
            continue;
        }
        let mut command = line.to_owned();
        while let Some(begun) = command.strip_suffix('\\') {
            command = format!("{begun}{}", lines.next().expect("a line that continues the command").trim());
        }
        commands.push(command);
    }
    commands
}

/// Splits a command as a shell does, up to a comment or to what the shell takes for itself.
fn words(command: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in command.chars() {
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '&' | '|' | '<' | '>' | ';') => break,
            (None, '#') if word.is_none() => break,
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The page of all commands is what the program says of itself. `HEADWATER_BLESS=1` writes it.
#[test]
fn the_page_of_all_commands_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli-reference.md");
    let page = run(headwater().args(["man", "--markdown"])).ok();
    if std::env::var_os("HEADWATER_BLESS").is_some() {
        std::fs::write(&path, &page).expect("the page can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/cli-reference.md is not what `headwater man --markdown` prints; HEADWATER_BLESS=1 writes it"
    );
}

#[test]
fn documented_commands_are_understood() {
    let mut count = 0;
    let mut wrong = Vec::new();
    for page in pages() {
        let text = std::fs::read_to_string(&page).expect("the page can be read");
        for command in commands(&text) {
            let mut words = words(&command);
            // Behind `--` is a command for a guest.
            let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
            words.insert(end, UNKNOWN.to_owned());
            let ran = run(headwater().args(&words[1..]));
            // clap quotes the option that it does not know.
            if ran.code != 2 || !ran.err.contains(&format!("'{UNKNOWN}'")) {
                wrong.push(format!("{}: {command}\n    {}", page.display(), ran.err));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 100, "only {count} commands were found");
}

#[test]
fn a_command_is_read_as_a_shell_reads_it() {
    let text = "text\n\n    $ headwater a 'b c' --d \\\n        e  # f\n\n```\nheadwater g -- h > i\nother\n```\nheadwater j\n";
    let read: Vec<_> = commands(text).iter().map(|command| words(command)).collect();
    assert_eq!(read, [vec!["headwater", "a", "b c", "--d", "e"], vec!["headwater", "g", "--", "h"]]);
}
