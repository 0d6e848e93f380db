//! Walks the tree, runs every rule and prints its findings.
//!
//! To break a rule on purpose, write a comment `tidy(RULE): why` on the line or the line above. An
//! unnecessary exemption is an error too, so that none outlives its cause.

use std::path::Path;

use crate::rules::{self, Rule};
use crate::source::SourceFile;

/// A finding of a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// Path from the root.
    pub path: String,
    /// Line from 1.
    pub line: usize,
    /// What was found, on one line.
    pub what: String,
    /// A note is printed and is not a failure.
    pub is_note: bool,
}

impl Finding {
    /// A broken rule.
    pub fn error(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into(), is_note: false }
    }

    /// Something to check by hand.
    pub fn note(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { is_note: true, ..Self::error(path, line, what) }
    }
}

/// Checks the tree under `root`; `Ok(false)` if a rule is broken.
pub fn run(root: &Path) -> Result<bool, String> {
    let mut files = Vec::new();
    walk(root, root, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut broken = 0;
    let mut used = Vec::new();
    for rule in rules::ALL {
        let (kept, exempted) = apply(rule, &files);
        used.extend(exempted);
        broken += kept.iter().filter(|finding| !finding.is_note).count();
        print_findings(rule, &kept);
    }
    for (path, line) in unused_exemptions(&files, &used) {
        broken += 1;
        println!("error {path}:{line}: this `tidy(..)` exempts nothing; remove it, or name the right rule");
    }
    println!("tidy: {} files, {} rules, {broken} broken", files.len(), rules::ALL.len());
    Ok(broken == 0)
}

fn print_findings(rule: &Rule, findings: &[Finding]) {
    for finding in findings {
        let level = if finding.is_note { "note " } else { "error" };
        println!("{level} {}:{}: {} [{}]", finding.path, finding.line, finding.what, rule.name);
    }
    if findings.iter().any(|finding| !finding.is_note) {
        println!("      why: {}\n      instead: {}", rule.why, rule.instead);
    }
}

/// Runs one rule; returns the findings without an exemption, and the places of the exemptions that were used.
fn apply(rule: &Rule, files: &[SourceFile]) -> (Vec<Finding>, Vec<(String, usize)>) {
    let mut used = Vec::new();
    let mut kept = (rule.check)(files);
    kept.retain(|finding| {
        let file = files.iter().find(|file| file.path == finding.path);
        let exemption = file.and_then(|file| exemption_near(file, rule.name, finding.line));
        if let Some(line) = exemption {
            used.push((finding.path.clone(), line));
        }
        exemption.is_none()
    });
    (kept, used)
}

fn exemption_near(file: &SourceFile, rule: &str, line: usize) -> Option<usize> {
    let wanted = format!("tidy({rule}): ");
    [line, line.saturating_sub(1)].into_iter().find(|line| {
        let text = line.checked_sub(1).and_then(|index| file.text.lines().nth(index)).unwrap_or("");
        text.split_once(&wanted).is_some_and(|(before, reason)| {
            (before.contains("//") || before.contains('#')) && reason.trim().len() > 10
        })
    })
}

fn unused_exemptions(files: &[SourceFile], used: &[(String, usize)]) -> Vec<(String, usize)> {
    let mut unused = Vec::new();
    // This crate's own sources mention exemptions without making any.
    for file in files.iter().filter(|file| !file.path.starts_with("xtask/") && !file.path.ends_with(".md")) {
        for (index, line) in file.text.lines().enumerate() {
            let place = (file.path.clone(), index + 1);
            if line.contains(" tidy(") && line.contains("): ") && !used.contains(&place) {
                unused.push(place);
            }
        }
    }
    unused
}

fn walk(root: &Path, folder: &Path, files: &mut Vec<SourceFile>) -> Result<(), String> {
    let fail = |error: std::io::Error| format!("cannot read {}: {error}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().map_err(fail)?;
        // Cargo creates its folder beside each workspace, and the fuzzers have one of their own.
        let is_output = name == "target" || (folder == root && name == "build");
        // In a separate work tree `.git` is a file that points to the repository.
        if name == ".git" {
            continue;
        }
        if kind.is_dir() && !is_output && name != "node_modules" {
            walk(root, &path, files)?;
        } else if kind.is_file()
            && let Ok(text) = std::fs::read_to_string(&path)
        {
            // Files that are not text have no rules.
            let relative = path.strip_prefix(root).unwrap_or(&path);
            files.push(SourceFile::new(relative.to_string_lossy().replace('\\', "/"), text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_b(files: &[SourceFile]) -> Vec<Finding> {
        let file = &files[0];
        file.lines_with("bad").into_iter().map(|line| Finding::error(&file.path, line, "bad")).collect()
    }

    const RULE: Rule = Rule { name: "no-bad", why: "", instead: "", check: every_b };

    #[test]
    fn an_exemption_needs_the_rules_name_and_a_reason() {
        let text = "bad\n// tidy(no-bad): it is measured below\nbad\n// tidy(no-bad): x\nbad\n\
                    // tidy(other): it is measured below\nbad\n";
        let files = [SourceFile::new("a.rs", text)];
        let (kept, used) = apply(&RULE, &files);
        assert_eq!(kept.iter().map(|f| f.line).collect::<Vec<_>>(), [1, 5, 7]);
        assert_eq!(used, [("a.rs".to_owned(), 2)]);
        let unused: Vec<usize> = unused_exemptions(&files, &used).into_iter().map(|(_, line)| line).collect();
        assert_eq!(unused, [4, 6]);
    }
}
