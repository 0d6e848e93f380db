//! Rule: banned crates are not used.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "banned-crates",
    why: "each of these is a second way of doing what the project has one way for, or has caused damage before",
    instead: "use what the message names; switch off the default feature that pulls the crate in \
              (`cargo tree -i CRATE` shows who does)",
    check,
};

/// Crate, and what to use.
const BANNED: &[(&str, &str)] = &[
    ("dashmap", "a parking_lot lock over a map: dashmap deadlocks when held over an await"),
    ("native-tls", "rustls with aws-lc-rs"),
    ("nbd", "headwater-nbd"),
    ("openssl-sys", "rustls with aws-lc-rs"),
    ("ring", "aws-lc-rs: one crypto library to audit and to update"),
    ("rusqlite", "sqlx: two SQLite libraries in one process corrupt each other's locks"),
    ("serde_yaml", "TOML or JSON"),
    ("tokio-nbd", "headwater-nbd: tokio-nbd is GPL"),
];

/// Crates that other crates may use, but that no package of ours may name; and what to use instead.
const BANNED_HERE: &[(&str, &str)] =
    &[("chrono", "numbers of seconds from a clock that is passed in; `jiff` if a calendar is really needed")];

/// Packages whose lock entries name a banned crate without using it, because Cargo also locks crates of
/// unused optional features. If the crate is really used, a package that is not listed here names it, too.
const NEVER_ASKED: &[(&str, &[&str])] = &[("ring", &["quinn-proto", "rustls-webpki"])];

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.path.ends_with("Cargo.toml")) {
        for (index, line) in file.text.lines().enumerate() {
            let name = line.split(['=', '.', ' ']).next().unwrap_or_default();
            let banned = BANNED_HERE.iter().find(|(banned, _)| *banned == name);
            findings.extend(banned.map(|(name, instead)| {
                Finding::error(&file.path, index + 1, format!("crate {name}; use {instead}"))
            }));
        }
    }
    for file in files.iter().filter(|file| file.path == "Cargo.lock") {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(name) = quoted(line, "name") {
                let banned = BANNED.iter().find(|(banned, _)| *banned == name);
                findings.extend(banned.filter(|_| is_used(name, &file.text)).map(|(name, instead)| {
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

/// Whether a package in the lock file depends on this one, not counting those that do not use it.
fn is_used(name: &str, lock: &str) -> bool {
    let Some((_, never_asked)) = NEVER_ASKED.iter().find(|(banned, _)| *banned == name) else { return true };
    let depends = format!("\n \"{name}\",");
    let mut users = lock.split("[[package]]").filter(|package| package.contains(&depends)).peekable();
    // A crate without a user in the lock file is one of ours.
    users.peek().is_none()
        || users.any(|package| {
            let user = package.lines().find_map(|line| quoted(line, "name")).unwrap_or_default();
            !never_asked.contains(&user)
        })
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
        let asked =
            |user: &str| format!("{lock}\n[[package]]\nname = \"{user}\"\ndependencies = [\n \"ring\",\n]\n");
        assert_eq!(lines_found(&RULE, "Cargo.lock", &asked("rustls-webpki")), [3]);
        assert_eq!(lines_found(&RULE, "Cargo.lock", &asked("rustls")), [2, 3]);
        assert_eq!(lines_found(&RULE, "store/Cargo.toml", "chrono.workspace = true\nchronos = \"1\"\n"), [1]);
        let lock = "name = \"stringy\"\nsource = \"registry+https://github.com/rust-lang/crates.io-index\"\n";
        assert_eq!(lines_found(&RULE, "Cargo.lock", lock), []);
    }
}
