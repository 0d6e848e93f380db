//! No paths of one developer's machine get into the tree.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "machine-paths",
    why: "a path or a host of one machine works there and nowhere else, and tells strangers about it",
    instead: "use a path relative to the tree or a temporary directory; leave registries to each user's own cargo settings",
    check,
};

/// Written in two halves, so that this file does not find itself.
const MARKS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/home/", "runner"),
    concat!("/Us", "ers/"),
    concat!("/root/.", "cargo"),
    concat!("/tmp/", "bash_jobs"),
    concat!("/tmp/", "team"),
    concat!("artif", "actory"),
    concat!("jfr", "og"),
    concat!("nexus", "3"),
    concat!(".corp", "/"),
    concat!(".internal", "/"),
];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(mark) = MARKS.iter().find(|mark| line.contains(*mark)) {
                findings.push(Finding::error(
                    &file.path,
                    index + 1,
                    format!("'{mark}' belongs to one machine"),
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn paths_of_a_machine_are_found_in_every_file() {
        let line = concat!("cd /wo", "rk/tree\n");
        assert_eq!(lines_found(&RULE, "README.md", line), [1]);
        assert_eq!(lines_found(&RULE, "demo/run", "cd \"$(dirname \"$0\")/..\"\n"), []);
    }
}
