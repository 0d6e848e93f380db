//! Identifiers do not use words that the glossary has retired.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "retired-words",
    why: "one word per idea: a reader who met the idea under another name must decode this one",
    instead: "use the word beside it in `RETIRED` of this rule, which ARCHITECTURE.md explains",
    check,
};

/// Retired words, and the words to use. A word counts in any part of an identifier: `kept_disk`, `KeptDisk`.
const RETIRED: &[(&str, &str)] = &[
    ("beneath", "base"),
    ("holed", "partial"),
    ("impatient", "fail_fast"),
    ("kept_disk", "persistent_disk"),
    ("leftover", "orphan"),
    ("leftovers", "orphans"),
    ("lent", "shared, or lease"),
    ("mend", "repair"),
    ("mended", "repaired"),
    ("patient", "retrying"),
    ("seat", "permit"),
    ("second_look", "dedup_scan"),
    ("stranger", "unauthenticated"),
    ("strangers", "unauthenticated"),
    ("unnoted", "pending"),
    ("whom", "choice"),
];

/// Names in other libraries, which are exempt.
const FOREIGN: &[&str] = &["PathBeneath"];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for (index, line) in file.code.lines().enumerate().filter(|(index, _)| !file.is_test(index + 1)) {
            let identifiers = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            for identifier in identifiers.filter(|identifier| !FOREIGN.contains(identifier)) {
                let spaced = in_snake_case(identifier);
                for (retired, instead) in RETIRED.iter().filter(|(retired, _)| has_part(&spaced, retired)) {
                    let what = format!("'{identifier}' uses '{retired}'; say {instead}");
                    findings.push(Finding::error(&file.path, index + 1, what));
                }
            }
        }
    }
    findings
}

/// Converts `KeptDisk` and `KEPT_DISK` to `kept_disk`.
fn in_snake_case(identifier: &str) -> String {
    let mut spaced = String::new();
    let mut after_small = false;
    for c in identifier.chars() {
        if c.is_ascii_uppercase() && after_small {
            spaced.push('_');
        }
        after_small = c.is_ascii_lowercase();
        spaced.push(c.to_ascii_lowercase());
    }
    spaced
}

fn has_part(spaced: &str, part: &str) -> bool {
    spaced.match_indices(part).any(|(at, _)| {
        let before = spaced[..at].chars().next_back();
        let after = spaced[at + part.len()..].chars().next();
        before.is_none_or(|c| c == '_') && after.is_none_or(|c| c == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn retired_words_are_found_in_any_case() {
        let code =
            "struct KeptDisk;\nfn kept_disks() {}\nconst HOLED: u8 = 1;\nlet whom = 1;\nfn amend() {}\n";
        assert_eq!(lines_found(&RULE, "a/src/lib.rs", code), [1, 3, 4]);
    }

    #[test]
    fn names_of_other_libraries_are_free() {
        assert_eq!(
            lines_found(&RULE, "a/src/lib.rs", "use landlock::PathBeneath;\nfn is_beneath() {}\n"),
            [2]
        );
    }

    #[test]
    fn comments_strings_and_tests_are_free() {
        assert_eq!(lines_found(&RULE, "a/src/lib.rs", "// a seat\nlet a = \"whom\";\n"), []);
        assert_eq!(lines_found(&RULE, "a/tests/it/a.rs", "fn whom() {}\n"), []);
    }
}
