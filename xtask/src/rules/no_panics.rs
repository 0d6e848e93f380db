//! Every data-path crate switches on the lints against panics and lost bits.
//!
//! The lints themselves are clippy's, because only a compiler can distinguish a slice from a map. They are in
//! the crate root, because a manifest cannot add to the workspace's lint table. They are off in the crate's
//! unit tests, where a panic is how a test fails.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "no-panics",
    why: "a panic in the data path takes every machine on this host with it, and a cast that loses bits \
          writes to the wrong block",
    instead: "copy the attribute from datapath/block/src/lib.rs; use get, let-else, try_from, checked arithmetic; \
              where a proof is near, `#[expect(LINT, reason = \"the proof\")]`",
    check,
};

const LINTS: &[&str] = &[
    "clippy::unwrap_used",
    "clippy::expect_used",
    "clippy::panic",
    "clippy::indexing_slicing",
    "clippy::string_slice",
    "clippy::cast_possible_truncation",
    "clippy::cast_possible_wrap",
    "clippy::cast_sign_loss",
    "clippy::cast_precision_loss",
    "clippy::get_unwrap",
    "clippy::todo",
    "clippy::unimplemented",
];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| is_root(&file.path)) {
        let start = file.code.find("#![cfg_attr(");
        let attribute = start.and_then(|at| file.code[at..].find(")]").map(|end| &file.code[at..at + end]));
        let attribute = attribute.filter(|a| a.contains("not(test)") && a.contains("warn(")).unwrap_or("");
        let missing: Vec<&str> =
            LINTS.iter().filter(|lint| !crate::source::has_word(attribute, lint)).copied().collect();
        if !missing.is_empty() {
            let which = if missing.len() == LINTS.len() { "all of them".into() } else { missing.join(", ") };
            let what = format!("the lints of #![cfg_attr(not(test), warn(..))] are missing: {which}");
            findings.push(Finding::error(&file.path, 1, what));
        }
    }
    findings
}

fn is_root(path: &str) -> bool {
    path.starts_with("datapath/") && (path.ends_with("/src/lib.rs") || path.ends_with("/src/main.rs"))
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, LINTS, RULE};

    #[test]
    fn a_data_path_crate_without_the_lints_is_refused() {
        let good =
            format!("//! A.\n#![cfg_attr(\n    not(test),\n    warn(\n{}\n    )\n)]\n", LINTS.join(",\n"));
        let loose = good.replace("clippy::indexing_slicing,\n", "");
        assert_eq!(lines_found(&RULE, "datapath/image/src/lib.rs", &good), []);
        assert_eq!(lines_found(&RULE, "datapath/image/src/lib.rs", &loose), [1]);
        assert_eq!(lines_found(&RULE, "datapath/frontend/nbd/src/lib.rs", "//! A.\n"), [1]);
        assert_eq!(lines_found(&RULE, "control/api/src/lib.rs", "//! A.\n"), []);
        assert_eq!(lines_found(&RULE, "datapath/image/src/chunk.rs", "//! A.\n"), []);
    }
}
