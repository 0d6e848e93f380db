//! A package names no dependency that its sources do not use, and the workspace none that no package uses.

use std::collections::BTreeSet;

use super::Rule;
use super::dependencies::dependencies_of;
use crate::source::{SourceFile, has_word};
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "unused-dependencies",
    why: "an unused dependency is still fetched, built, audited and licensed",
    instead: "remove the line; a crate whose sources go by another name is listed in this rule",
    check,
};

/// Packages whose crate has another name.
const RENAMED: &[(&str, &str)] = &[("md-5", "md5"), ("vhdx-core", "vhdx"), ("vmdk-core", "vmdk")];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut named = BTreeSet::new();
    for file in files {
        let Some(folder) = file.path.strip_suffix("Cargo.toml").filter(|folder| folder.ends_with('/')) else {
            continue;
        };
        for (line, name, _) in dependencies_of(&file.text) {
            let renamed = RENAMED.iter().find(|(package, _)| *package == name);
            let word = renamed.map_or_else(|| name.replace('-', "_"), |(_, word)| (*word).to_owned());
            let mut sources = files.iter().filter(|it| it.is_rust() && it.path.starts_with(folder));
            if !sources.any(|source| has_word(&source.code, &word)) {
                findings.push(Finding::error(
                    &file.path,
                    line,
                    format!("no source of this package names {word}"),
                ));
            }
            named.insert(name);
        }
    }
    for root in files.iter().filter(|file| file.path == "Cargo.toml") {
        for (line, name, _) in dependencies_of(&root.text) {
            if !named.contains(&name) {
                findings.push(Finding::error(
                    &root.path,
                    line,
                    format!("no package of the workspace uses {name}"),
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_dependencies_are_found() {
        let files = [
            SourceFile::new(
                "Cargo.toml",
                "[workspace.dependencies]\nlibc = \"1\"\nmd-5 = \"1\"\nserde = \"1\"\n",
            ),
            SourceFile::new(
                "a/b/Cargo.toml",
                "[dependencies]\nlibc.workspace = true\nmd-5.workspace = true\n",
            ),
            SourceFile::new("a/b/tests/c.rs", "use md5::Md5;\n// libc\nfn f() -> &str { \"libc\" }\n"),
            SourceFile::new("a/c/src/lib.rs", "use libc::c_int;\n"),
        ];
        let found: Vec<_> = check(&files).into_iter().map(|it| (it.path, it.line)).collect();
        assert_eq!(found, [("a/b/Cargo.toml".into(), 2), ("Cargo.toml".into(), 4)]);
    }
}
