//! Rule: a crate root lists its exports by name.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "reexports",
    why: "after `pub use x::*` nobody can see what is public, and adding an item below changes it",
    instead: "re-export by name: `pub use x::{A, B};`",
    check,
};

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for (at, _) in file.code.match_indices("use ").filter(|(at, _)| is_public(&file.code[..*at])) {
            let statement = file.code[at..].split(';').next().unwrap_or("");
            if statement.contains('*') {
                findings.push(Finding::error(&file.path, file.line_of(at), "a public `use` of everything"));
            }
        }
    }
    findings
}

fn is_public(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or("").trim();
    line == "pub" || (line.starts_with("pub(") && line.ends_with(')'))
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn glob_reexports_are_refused() {
        assert_eq!(
            lines_found(&RULE, "a.rs", "use a::*;\npub use b::*;\npub(crate) use c::{\n  d::*,\n};\n"),
            [2, 3]
        );
        assert_eq!(lines_found(&RULE, "a.rs", "pub use a::{B, C};\nfn d(e: *const u8) {}\n"), []);
    }
}
