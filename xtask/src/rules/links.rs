//! Documents that are pointed at exist.

use std::path::{Component, Path, PathBuf};

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "links",
    why: "a pointer to a file that is not there costs every reader the time to find that out",
    instead: "write the document, correct the path, or take the pointer out",
    check,
};

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        for (index, line) in file.text.lines().enumerate() {
            let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
            let links = if file.path.ends_with(".md") { markdown_links(line) } else { Vec::new() };
            let links = links.into_iter().map(|link| normal(&folder.join(link)));
            // In the comments of sources, paths start at the root of the tree.
            let is_comment = file.is_rust() && line.trim_start().starts_with("//");
            let mentions = if is_comment { documents(line) } else { Vec::new() };
            for target in links.chain(mentions.into_iter().map(PathBuf::from)) {
                // Pictures are no text, and not among the files.
                if target.extension().is_some_and(|extension| extension == "png") {
                    continue;
                }
                let is_there = files.iter().any(|other| Path::new(&other.path).starts_with(&target));
                if !is_there {
                    let what = format!("there is no {}", target.display());
                    findings.push(Finding::error(&file.path, index + 1, what));
                }
            }
        }
    }
    findings
}

/// Targets of `[text](target)` that are files of this tree.
fn markdown_links(line: &str) -> Vec<&str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let paths = targets.map(|target| target.split('#').next().unwrap_or(target));
    paths.filter(|path| !path.is_empty() && !path.contains(':')).collect()
}

/// Paths below docs/ between backticks.
fn documents(line: &str) -> Vec<&str> {
    let quoted = line.split('`').skip(1).step_by(2);
    let is_path = |text: &&str| {
        let rest = text.strip_prefix("docs/").unwrap_or("");
        !rest.is_empty() && rest.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
    };
    quoted.filter(is_path).filter(|path| !path.contains("NNNN")).collect()
}

fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(path: &str, text: &str) -> usize {
        let there = ["docs/nbd.md", "a/src/lib.rs", "a/README.md"].map(|path| SourceFile::new(path, ""));
        let mut files = Vec::from(there);
        files.push(SourceFile::new(path, text));
        check(&files).len()
    }

    #[test]
    fn links_of_documents_are_followed() {
        assert_eq!(
            missing("README.md", "[a](a/README.md), [b](docs), [c](https://example.org/x) [d](#words)"),
            0
        );
        assert_eq!(missing("a/NEWS.md", "[a](src/lib.rs) [b](../docs/nbd.md#limits)"), 0);
        assert_eq!(missing("a/NEWS.md", "[a](lib.rs) and [b](../docs/none.md)"), 2);
    }

    #[test]
    fn documents_that_comments_name_exist() {
        assert_eq!(missing("a/src/x.rs", "//! See `docs/nbd.md`.\nlet a = \"`docs/none.md`\";"), 0);
        assert_eq!(missing("a/src/x.rs", "//! See `docs/none.md`."), 1);
        assert_eq!(missing("a/src/x.rs", "/// A record, `docs/decisions/NNNN-title.md`."), 0);
    }
}
