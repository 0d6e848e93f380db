//! Functions are about 70 lines, and at most 100.

use super::Rule;
use crate::source::{SourceFile, body_end};
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "function-length",
    why: "a function that does not fit on a screen hides which of its steps depend on one another",
    instead: "give each step a function with a name; a long match calls one function an arm",
    check,
};

const LOOK_AT_LINES: usize = 70;
const MOST_LINES: usize = 100;

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        for (at, name) in functions(&file.code) {
            let line = file.line_of(at);
            let Some(end) = body_end(&file.code, at).filter(|_| !file.is_test(line)) else { continue };
            let lines = file.line_of(end) - line + 1;
            if lines > MOST_LINES {
                let what = format!("fn {name} has {lines} lines, at most {MOST_LINES}");
                findings.push(Finding::error(&file.path, line, what));
            } else if lines > LOOK_AT_LINES {
                findings.push(Finding::note(&file.path, line, format!("fn {name} has {lines} lines")));
            }
        }
    }
    findings
}

/// Where functions with a name start, and the name.
fn functions(code: &str) -> Vec<(usize, &str)> {
    let starts = code.match_indices("fn ");
    starts
        .filter(|(at, _)| *at == 0 || matches!(code.as_bytes()[at - 1], b' ' | b'\n' | b'('))
        .map(|(at, _)| {
            let name = &code[at + 3..];
            let len = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            (at, &name[..len])
        })
        .filter(|(_, name)| !name.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn long_functions_are_found_whatever_their_strings_hold() {
        let body = "    let a = \"{\";\n".repeat(99);
        let long = format!("struct A;\nfn long(a: [u8; 3]) {{\n{body}}}\nfn short() {{}}\n");
        assert_eq!(lines_found(&RULE, "a.rs", &long), [2]);
        let body = "    let a = '}';\n".repeat(98);
        assert_eq!(lines_found(&RULE, "a.rs", &format!("fn fits() {{\n{body}}}\n")), []);
    }

    #[test]
    fn tests_and_declarations_are_left_alone() {
        let body = "    a();\n".repeat(200);
        assert_eq!(lines_found(&RULE, "a.rs", &format!("#[test]\nfn long() {{\n{body}}}\n")), []);
        assert_eq!(
            lines_found(&RULE, "a.rs", &format!("trait A {{\n fn a(&self);\n}}\nmod b {{\n{body}}}\n")),
            []
        );
    }
}
