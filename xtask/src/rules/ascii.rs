//! Sources are ASCII.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "ascii",
    why: "look-alike and invisible characters hide in reviews, and terminals without UTF-8 print rubbish",
    instead: "write -> for an arrow, - for a dash, \"..\" for quotes; in a string that must hold one, \\u{..}",
    check,
};

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| is_source(file)) {
        for (index, line) in file.text.lines().enumerate() {
            if let Some(found) = line.chars().find(|c| !c.is_ascii()) {
                let code = u32::from(found);
                findings.push(Finding::error(&file.path, index + 1, format!("character U+{code:04X}")));
            }
        }
    }
    findings
}

fn is_source(file: &SourceFile) -> bool {
    let name = file.path.rsplit('/').next().unwrap_or(&file.path);
    let endings = [".rs", ".toml", ".sh", ".sql", ".proto"];
    name == "Makefile" || endings.iter().any(|ending| name.ends_with(ending)) || file.text.starts_with("#!/")
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn only_ascii_in_sources() {
        assert_eq!(lines_found(&RULE, "a.rs", "//! a\n// \u{2192} b\n"), [2]);
        assert_eq!(lines_found(&RULE, "demo/run", "#!/bin/sh\n# \u{e9}\n"), [2]);
        assert_eq!(lines_found(&RULE, "a.rs", "//! a -> b\n"), []);
        assert_eq!(lines_found(&RULE, "README.md", "table \u{2502}\n"), []);
    }
}
