//! The house rules. Each file has one rule, with its reason and what to do instead.
//!
//! To add one: write `rules/NAME.rs` with a `RULE` and good and bad samples as tests, and list it in [`ALL`].

mod ascii;
mod banned_crates;
mod dependencies;
mod file_length;
mod function_length;
mod fuzz;
mod links;
mod machine_paths;
mod module_docs;
mod names;
mod no_allow;
mod no_clock;
mod no_panics;
mod no_print;
mod reexports;
mod retired_words;
mod units;
mod unsafe_reason;
mod unused_dependencies;

use crate::source::SourceFile;
use crate::tidy::Finding;

/// One house rule.
pub struct Rule {
    /// Name, as used in `tidy(NAME): reason`.
    pub name: &'static str,
    /// What goes wrong without it.
    pub why: &'static str,
    /// What to do instead.
    pub instead: &'static str,
    /// Finds the violations.
    pub check: fn(&[SourceFile]) -> Vec<Finding>,
}

/// All rules, in the order in which they are run.
pub const ALL: &[Rule] = &[
    ascii::RULE,
    banned_crates::RULE,
    dependencies::RULE,
    file_length::RULE,
    function_length::RULE,
    fuzz::RULE,
    links::RULE,
    machine_paths::RULE,
    module_docs::RULE,
    names::RULE,
    no_allow::RULE,
    no_clock::RULE,
    no_panics::RULE,
    no_print::RULE,
    reexports::RULE,
    retired_words::RULE,
    units::RULE,
    unsafe_reason::RULE,
    unused_dependencies::RULE,
];

/// Lines found by a rule's check in one sample file.
#[cfg(test)]
fn lines_found(rule: &Rule, path: &str, text: &str) -> Vec<usize> {
    let found = (rule.check)(&[SourceFile::new(path, text)]);
    found.iter().filter(|finding| !finding.is_note).map(|finding| finding.line).collect()
}

#[cfg(test)]
mod tests {
    use super::ALL;

    #[test]
    fn every_rule_has_a_name_a_reason_and_a_replacement() {
        for rule in ALL {
            assert!(rule.name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{}", rule.name);
            assert!(rule.why.len() > 20 && rule.instead.len() > 20, "{}", rule.name);
        }
    }
}
