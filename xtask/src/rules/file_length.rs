//! Files are about 600 lines, and at most 1,000.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "file-length",
    why: "a file that keeps growing becomes the one that everybody must edit and nobody can read",
    instead: "split by verb (read, write, spill, recover), not by kind (types, impls); move long tests to tests.rs",
    check,
};

const LOOK_AT_LINES: usize = 600;
const MOST_LINES: usize = 1000;

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let lines = file.text.lines().count();
        if lines > MOST_LINES {
            let what = format!("{lines} lines, at most {MOST_LINES}");
            findings.push(Finding::error(&file.path, MOST_LINES + 1, what));
        } else if lines > LOOK_AT_LINES {
            findings.push(Finding::note(
                &file.path,
                LOOK_AT_LINES + 1,
                format!("{lines} lines; think of a split"),
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE, check};
    use crate::source::SourceFile;

    #[test]
    fn long_files_are_noted_and_very_long_ones_refused() {
        assert_eq!(lines_found(&RULE, "a.rs", &"\n".repeat(1001)), [1001]);
        assert_eq!(lines_found(&RULE, "a.rs", &"\n".repeat(1000)), []);
        assert!(check(&[SourceFile::new("a.rs", "\n".repeat(601))])[0].is_note);
        assert!(check(&[SourceFile::new("a.rs", "\n".repeat(600))]).is_empty());
    }
}
