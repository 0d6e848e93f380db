//! Rule: linked documents and headings exist, and the book lists all pages of docs/.

use std::path::{Component, Path, PathBuf};

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "links",
    why: "a link to a missing file or heading wastes the time of every reader",
    instead: "write the document, correct the path or the heading, or remove the link; list a new page in docs/SUMMARY.md",
    check,
};

/// The table of contents of the book that `make book` builds.
const CONTENTS: &str = "docs/SUMMARY.md";

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        let is_document = file.path.ends_with(".md");
        for (index, line) in file.text.lines().enumerate() {
            let links = if is_document { markdown_links(&file.path, line) } else { Vec::new() };
            // In comments of sources, paths start at the root of the tree.
            let is_comment = file.is_rust() && line.trim_start().starts_with("//");
            let mentions = if is_comment { documents(line) } else { Vec::new() };
            let mentions = mentions.into_iter().map(|path| (PathBuf::from(path), ""));
            for (target, anchor) in links.into_iter().chain(mentions) {
                if let Some(what) = broken(files, &target, anchor) {
                    findings.push(Finding::error(&file.path, index + 1, what));
                }
            }
        }
    }
    findings.extend(pages_without_a_place(files));
    findings
}

/// What is wrong with a link; `None` if it is valid.
fn broken(files: &[SourceFile], target: &Path, anchor: &str) -> Option<String> {
    // Pictures are not text files, so they are not in the list.
    if target.extension().is_some_and(|extension| extension == "png") {
        return None;
    }
    let Some(file) = files.iter().find(|file| Path::new(&file.path).starts_with(target)) else {
        return Some(format!("there is no {}", target.display()));
    };
    let has_headings = file.path.ends_with(".md") && !anchor.is_empty();
    let is_there = !has_headings || anchors(&file.text).iter().any(|there| there == anchor);
    (!is_there).then(|| format!("{} has no heading #{anchor}", file.path))
}

/// Pages below docs/ that the book does not list. Nothing is checked if there is no table of contents.
fn pages_without_a_place(files: &[SourceFile]) -> Vec<Finding> {
    let Some(contents) = files.iter().find(|file| file.path == CONTENTS) else { return Vec::new() };
    let listed: Vec<_> = contents.text.lines().flat_map(|line| markdown_links(CONTENTS, line)).collect();
    let pages = files.iter().filter(|file| file.path.starts_with("docs/") && file.path.ends_with(".md"));
    let is_listed = |path: &str| path == CONTENTS || listed.iter().any(|(page, _)| page == Path::new(path));
    let missing = pages.filter(|page| !is_listed(&page.path));
    missing.map(|page| Finding::error(&page.path, 1, format!("{CONTENTS} does not list this page"))).collect()
}

/// The anchors of a document's headings, as mdBook and GitHub make them.
fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#');
        if is_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        // Only the text of a link counts.
        let shown = title.split("](").enumerate().map(|(part, text)| match text.split_once(')') {
            Some((_, rest)) if part > 0 => rest,
            _ => text,
        });
        let shown = shown.collect::<String>().trim().to_lowercase().replace(' ', "-");
        let anchor: String = shown.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
        let again = anchors.iter().filter(|other| **other == anchor).count();
        anchors.push(if again == 0 { anchor } else { format!("{anchor}-{again}") });
    }
    anchors
}

/// Targets of `[text](target#anchor)` that are files of this tree, relative to its root.
fn markdown_links<'a>(path: &str, line: &'a str) -> Vec<(PathBuf, &'a str)> {
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let links = targets.filter(|target| !target.is_empty() && !target.contains(':'));
    let links = links.map(|target| target.split_once('#').unwrap_or((target, "")));
    links
        .map(|(target, anchor)| match target {
            "" => (PathBuf::from(path), anchor),
            target => (normal(&folder.join(target)), anchor),
        })
        .collect()
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

    const NBD: &str = "# NBD\n## Limits (`Limits`)\n```\n# a comment\n```\n## Limits (`Limits`)\n";

    fn missing(path: &str, text: &str) -> usize {
        let mut files = vec![SourceFile::new("docs/nbd.md", NBD)];
        files.extend(["a/src/lib.rs", "a/README.md"].map(|path| SourceFile::new(path, "")));
        files.push(SourceFile::new(path, text));
        check(&files).len()
    }

    #[test]
    fn links_of_documents_are_followed() {
        assert_eq!(missing("README.md", "[a](a/README.md), [b](docs), [c](https://example.org/x)"), 0);
        assert_eq!(missing("a/NEWS.md", "[a](src/lib.rs) [b](../docs/nbd.md)"), 0);
        assert_eq!(missing("a/NEWS.md", "[a](lib.rs) and [b](../docs/none.md)"), 2);
    }

    #[test]
    fn links_name_headings_that_exist() {
        assert_eq!(missing("a/NEWS.md", "[a](../docs/nbd.md#limits-limits)"), 0);
        assert_eq!(missing("a/NEWS.md", "[a](../docs/nbd.md#limits-limits-1)"), 0);
        assert_eq!(missing("a/NEWS.md", "[a](../docs/nbd.md#a-comment)"), 1);
        assert_eq!(missing("README.md", "# Many [words](docs/nbd.md), once\n[d](#many-words-once)"), 0);
        assert_eq!(missing("README.md", "# Words\n[d](#word)"), 1);
    }

    #[test]
    fn the_book_lists_all_pages() {
        assert_eq!(missing("docs/SUMMARY.md", "- [NBD](nbd.md)\n- [a](../a/README.md)"), 0);
        assert_eq!(missing("docs/SUMMARY.md", "- [a](../a/README.md)"), 1);
    }

    #[test]
    fn documents_that_comments_name_exist() {
        assert_eq!(missing("a/src/x.rs", "//! See `docs/nbd.md`.\nlet a = \"`docs/none.md`\";"), 0);
        assert_eq!(missing("a/src/x.rs", "//! See `docs/none.md`."), 1);
        assert_eq!(missing("a/src/x.rs", "/// A record, `docs/decisions/NNNN-title.md`."), 0);
    }
}
