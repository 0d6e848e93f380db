//! `unsafe` is only in files that give the reason, and each use says why it is sound.

use super::Rule;
use crate::source::{SourceFile, has_word};
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "unsafe-reason",
    why: "unsafe code can be reviewed only where it is little, in one place, and states what it relies on",
    instead: "use the safe call (rustix, std); else put it into its own module that starts with a `//!` which says \
              why, `#![expect(unsafe_code, reason = \"..\")]`, and `// SAFETY: ..` above each use",
    check,
};

/// How far above its use a `SAFETY` comment may begin.
const COMMENT_LINES: usize = 12;

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let code: Vec<&str> = file.code.lines().collect();
        let text: Vec<&str> = file.text.lines().collect();
        let lines: Vec<usize> = (0..code.len()).filter(|index| has_word(code[*index], "unsafe")).collect();
        let Some(first) = lines.first() else { continue };
        let expected =
            file.code.find("#![expect(unsafe_code").or_else(|| file.code.find("#![expect(\n    unsafe_code"));
        if expected.is_none() {
            findings.push(Finding::error(&file.path, first + 1, "`unsafe` in a file that does not say why"));
        }
        for index in lines {
            let is_declaration = code[index].contains("unsafe fn") || code[index].contains("unsafe extern");
            let above = &text[index.saturating_sub(COMMENT_LINES)..=index];
            if !is_declaration && !above.iter().any(|line| line.contains("SAFETY:")) {
                findings.push(Finding::error(
                    &file.path,
                    index + 1,
                    "`unsafe` without `// SAFETY: ..` above it",
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    const HEAD: &str = "//! Maps memory.\n#![expect(unsafe_code, reason = \"mmap\")]\n";

    #[test]
    fn unsafe_needs_a_reason_for_the_file_and_for_each_use() {
        assert_eq!(lines_found(&RULE, "a.rs", &format!("{HEAD}// SAFETY: a.\nunsafe {{ }}\n")), []);
        assert_eq!(lines_found(&RULE, "a.rs", &format!("{HEAD}unsafe {{ }}\n")), [3]);
        assert_eq!(lines_found(&RULE, "a.rs", "//! A.\n// SAFETY: a.\nunsafe { }\n"), [3]);
        assert_eq!(lines_found(&RULE, "a.rs", "//! unsafe.\n#![deny(unsafe_code)]\n// unsafe\n"), []);
        assert_eq!(lines_found(&RULE, "a.rs", &format!("{HEAD}unsafe fn a() {{}}\n")), []);
    }
}
