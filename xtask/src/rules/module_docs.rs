//! Rule: every Rust file starts with a sentence about its contents.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "module-docs",
    why: "readers decide by the first line whether this is the file that they need",
    instead: "start the file with `//! ` and one sentence that says what is in it, ending with . or :",
    check,
};

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let doc: String =
            file.text.lines().map_while(|line| line.strip_prefix("//! ")).collect::<Vec<_>>().join(" ");
        let doc = doc.trim();
        if doc.is_empty() {
            findings.push(Finding::error(&file.path, 1, "the file does not start with a `//! ` sentence"));
        } else if !doc.contains(['.', ':']) || doc.len() < 15 {
            findings.push(Finding::error(&file.path, 1, format!("'{doc}' is not a sentence")));
        } else if doc.starts_with("Placeholder") {
            findings.push(Finding::error(&file.path, 1, "a placeholder"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn files_start_with_a_sentence() {
        assert_eq!(lines_found(&RULE, "a.rs", "//! Finds the segment of a block.\n"), []);
        assert_eq!(lines_found(&RULE, "a.rs", "//! A sentence over\n//! two lines.\nuse a;\n"), []);
        for bad in ["use a;\n", "//!\n", "// Comment.\n", "//! Segments\n", "//! Placeholder.\n", ""] {
            assert_eq!(lines_found(&RULE, "a.rs", bad), [1], "{bad}");
        }
        assert_eq!(lines_found(&RULE, "a.toml", "[a]\n"), []);
    }
}
