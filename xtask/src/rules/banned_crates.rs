//! Crates that must not come into the graph.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "banned-crates",
    why: "each of these is a second way of doing what the project has one way for, or has bitten before",
    instead: "use what the message names; switch off the default feature that pulls the crate in \
              (`cargo tree -i CRATE` shows who does)",
    check,
};

/// Crate, and what to use.
const BANNED: &[(&str, &str)] = &[
    ("chrono", "numbers of seconds from a clock that is passed in; `jiff` if a calendar is really needed"),
    ("dashmap", "a parking_lot lock over a map: dashmap deadlocks when held over an await"),
    ("native-tls", "rustls with aws-lc-rs"),
    ("nbd", "headwater-nbd"),
    ("openssl-sys", "rustls with aws-lc-rs"),
    ("ring", "aws-lc-rs: one crypto library to audit and to update"),
    ("rusqlite", "sqlx: two SQLite libraries in one process corrupt each other's locks"),
    ("serde_yaml", "TOML or JSON"),
    ("tokio-nbd", "headwater-nbd: tokio-nbd is GPL"),
];

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.path == "Cargo.lock") {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(name) = quoted(line, "name") {
                let banned = BANNED.iter().find(|(banned, _)| *banned == name);
                findings.extend(banned.map(|(name, instead)| {
                    Finding::error(&file.path, index + 1, format!("crate {name}; use {instead}"))
                }));
            }
            if let Some(source) = quoted(line, "source").filter(|source| *source != CRATES_IO) {
                let what = format!("a crate from {source}; only crates.io");
                findings.push(Finding::error(&file.path, index + 1, what));
            }
        }
    }
    findings
}

fn quoted<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn banned_crates_and_foreign_sources_are_found() {
        let lock = "[[package]]\nname = \"ring\"\nsource = \"git+https://example.org/ring\"\n";
        assert_eq!(lines_found(&RULE, "Cargo.lock", lock), [2, 3]);
        let lock = "name = \"stringy\"\nsource = \"registry+https://github.com/rust-lang/crates.io-index\"\n";
        assert_eq!(lines_found(&RULE, "Cargo.lock", lock), []);
    }
}
