//! Rule: modules, files and packages have specific names.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "names",
    why: "a name that fits everything attracts everything, and tells a reader nothing",
    instead: "name it by what it does (sizes, retry, lease); test code that is shared goes to testkit",
    check,
};

const EMPTY_NAMES: &[&str] = &[
    "common", "util", "utils", "helper", "helpers", "manager", "managers", "core", "misc", "shared", "stuff",
];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        let parts = file.path.split('/').map(|part| part.split('.').next().unwrap_or(part));
        for name in parts.filter(|part| is_empty_name(part)) {
            findings.push(Finding::error(&file.path, 1, format!("a path with '{name}'")));
        }
        for (index, line) in file.code.lines().enumerate() {
            let mut words = line.trim().trim_start_matches("pub(crate) ").split_whitespace();
            let first = words.by_ref().find(|word| *word != "pub");
            let module =
                words.next().filter(|_| first == Some("mod")).map(|name| name.trim_end_matches([';', '{']));
            if let Some(name) = module.filter(|name| is_empty_name(name)) {
                findings.push(Finding::error(&file.path, index + 1, format!("a module named '{name}'")));
            }
        }
    }
    findings
}

fn is_empty_name(name: &str) -> bool {
    let last = name.rsplit(['_', '-']).next().unwrap_or(name);
    EMPTY_NAMES.contains(&name) || (EMPTY_NAMES.contains(&last) && last != "shared")
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn names_that_say_nothing_are_refused() {
        assert_eq!(lines_found(&RULE, "a/src/utils.rs", ""), [1]);
        assert_eq!(lines_found(&RULE, "control/core/Cargo.toml", ""), [1]);
        assert_eq!(lines_found(&RULE, "a/src/cache_manager.rs", ""), [1]);
        assert_eq!(lines_found(&RULE, "a/src/lib.rs", "mod a;\npub mod helpers;\nmod common {\n"), [2, 3]);
        assert_eq!(lines_found(&RULE, "a/src/score.rs", "mod model;\nuse helpers_of_mine;\n"), []);
    }
}
