//! Rule: a lint is silenced by `expect` with a reason, never by `allow`.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "no-allow",
    why: "an `allow` stays behind when its cause is gone, and says nothing about why it is there",
    instead: "fix the cause, or write `#[expect(LINT, reason = \"..\")]`, which complains when it is no longer needed",
    check,
};

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for (index, line) in file.code.lines().enumerate() {
            let line = line.trim_start();
            let is_attribute = line.starts_with("#[") || line.starts_with("#![");
            if is_attribute && (line.contains("[allow(") || line.contains(" allow(")) {
                findings.push(Finding::error(&file.path, index + 1, "an `allow` attribute"));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn allow_is_refused_and_expect_is_not() {
        assert_eq!(lines_found(&RULE, "a.rs", "#![allow(dead_code)]\n  #[allow(x)]\n"), [1, 2]);
        assert_eq!(lines_found(&RULE, "a.rs", "#[cfg_attr(test, allow(x))]\n"), [1]);
        assert_eq!(lines_found(&RULE, "a.rs", "#[expect(x, reason = \"allow(y)\")]\n// #[allow(z)]\n"), []);
    }
}
