//! Rule: the list of fuzzers and their lock file are up to date. The fuzzers are a separate workspace that no other
//! build checks.

use std::collections::BTreeSet;

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "fuzz",
    why: "make fuzz builds with --locked, from a manifest and a lock file that nothing else reads: it fails, or runs less than \
          it seems to, long after the change that broke it",
    instead: "give each entry of a crate's fuzzing::targets() a [[bin]] in fuzz/Cargo.toml, and run cargo metadata in fuzz/ after a \
              change of dependencies",
    check,
};

const MANIFEST: &str = "fuzz/Cargo.toml";
const LOCK: &str = "fuzz/Cargo.lock";

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let find = |path: &str| files.iter().find(|file| file.path == path);
    let mut findings = Vec::new();
    if let Some(manifest) = find(MANIFEST) {
        findings.extend(check_targets(files, manifest));
    }
    if let Some(lock) = find(LOCK) {
        findings.extend(check_lock(files, lock));
    }
    findings
}

/// Compares the targets that crates list with those that are built.
fn check_targets(files: &[SourceFile], manifest: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    let built = named(&manifest.text, "[[bin]]");
    let mut listed = BTreeSet::new();
    for file in files.iter().filter(|file| file.path.ends_with("src/fuzzing.rs")) {
        for (line, target) in targets(&file.text) {
            if !built.iter().any(|(_, bin)| *bin == target) {
                findings.push(Finding::error(
                    &file.path,
                    line,
                    format!("{target} has no [[bin]] in {MANIFEST}"),
                ));
            }
            listed.insert(target);
        }
    }
    for (line, bin) in built.iter().filter(|(_, bin)| *bin != "seeds" && !listed.contains(bin)) {
        findings.push(Finding::error(MANIFEST, *line, format!("no crate lists {bin}, so it is never run")));
    }
    findings
}

/// Entries of a list of targets: `"name", name, ..`. The function of a target has the target's name.
fn targets(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut at = 0;
    for piece in text.split('"') {
        let after = text.get(at + piece.len() + 1..).and_then(|rest| rest.strip_prefix(','));
        let is_function = after.map(str::trim_start).and_then(|after| after.strip_prefix(piece));
        if !piece.is_empty() && is_function.is_some_and(|after| after.starts_with(',')) {
            found.push((text[..at].matches('\n').count() + 1, piece));
        }
        at += piece.len() + 1;
    }
    found
}

/// Names of tables of a kind, with the line.
fn named<'a>(text: &'a str, header: &str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    let mut is_inside = false;
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            is_inside = line == header;
        } else if let Some(name) = line.strip_prefix("name = ").filter(|_| is_inside) {
            found.push((index + 1, name.trim_matches('"')));
        }
    }
    found
}

/// Checks that the lock file has each crate of this workspace with the dependencies that its manifest names.
fn check_lock(files: &[SourceFile], lock: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, name) in named(&lock.text, "[[package]]") {
        let manifest = files.iter().find(|file| {
            file.path.ends_with("/Cargo.toml")
                && named(&file.text, "[package]").iter().any(|(_, own)| *own == name)
        });
        let Some(manifest) = manifest else { continue };
        // An optional dependency is locked if a requested feature needs it.
        let (needed, possible) = (dependencies(&manifest.text, false), dependencies(&manifest.text, true));
        let locked = locked(&lock.text, line);
        for missing in needed.difference(&locked) {
            findings.push(Finding::error(LOCK, line, format!("{name} lacks {missing}, which it depends on")));
        }
        for extra in locked.difference(&possible) {
            findings.push(Finding::error(
                LOCK,
                line,
                format!("{name} has {extra}, which it does not depend on"),
            ));
        }
    }
    findings
}

/// Names in `[dependencies]`, those of build scripts and those of targets.
fn dependencies(manifest: &str, with_optional: bool) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut section = "";
    for line in manifest.lines() {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
        } else if ["dependencies", "build-dependencies"].contains(&section)
            || section.ends_with(".dependencies")
        {
            let end =
                line.find(|c: char| !c.is_alphanumeric() && !matches!(c, '-' | '_')).unwrap_or(line.len());
            if end > 0 && !line.starts_with('#') && (with_optional || !line.contains("optional = true")) {
                found.insert(&line[..end]);
            }
        }
    }
    found
}

/// Names in the list of dependencies of the package at `line`.
fn locked(lock: &str, line: usize) -> BTreeSet<&str> {
    let entry = lock.lines().skip(line).take_while(|line| !line.is_empty());
    let listed = entry.filter_map(|line| line.strip_prefix(" \""));
    listed.filter_map(|line| line.split(['"', ' ']).next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<SourceFile> = files.iter().map(|(path, text)| SourceFile::new(*path, *text)).collect();
        check(&files).into_iter().map(|finding| format!("{}:{}", finding.path, finding.line)).collect()
    }

    #[test]
    fn listed_and_built_fuzz_targets_agree() {
        let listed = "vec![\n(\"one\", one, vec![]),\n    (\n    \"two\", two, x()),\n(\"no\", other),\n]";
        let bins =
            "[[bin]]\nname = \"one\"\npath = \"x\"\n[[bin]]\nname = \"seeds\"\n[[bin]]\nname = \"old\"\n";
        let files = [("a/src/fuzzing.rs", listed), (MANIFEST, bins)];
        assert_eq!(found(&files), ["a/src/fuzzing.rs:4", "fuzz/Cargo.toml:7"]);
        let files = [("a/src/fuzzing.rs", "(\"one\", one, 1)\n(\"new\", new, 2)"), (MANIFEST, &bins[..36])];
        assert_eq!(found(&files), ["a/src/fuzzing.rs:2"]);
    }

    #[test]
    fn the_lock_file_has_the_dependencies_of_the_manifests() {
        let manifest = "[package]\nname = \"headwater-a\"\n[dependencies]\nblake3.workspace = true\nzstd = \"1\"\n\
                        shuttle = { version = \"1\", optional = true }\n\
                        [dev-dependencies]\nproptest = \"1\"\n";
        let lock = |list: &str| {
            format!(
                "[[package]]\nname = \"blake3\"\n\n[[package]]\nname = \"headwater-a\"\ndependencies = [\n{list}]\n\n"
            )
        };
        for good in [" \"blake3\",\n \"zstd 1.0\",\n", " \"blake3\",\n \"shuttle\",\n \"zstd\",\n"] {
            assert_eq!(found(&[("a/Cargo.toml", manifest), (LOCK, &lock(good))]), [""; 0]);
        }
        for bad in [" \"blake3\",\n", " \"blake3\",\n \"ntfs\",\n \"zstd\",\n"] {
            assert_eq!(found(&[("a/Cargo.toml", manifest), (LOCK, &lock(bad))]), ["fuzz/Cargo.lock:5"]);
        }
    }
}
