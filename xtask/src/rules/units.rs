//! A number with a unit has the unit in its name.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "units",
    why: "`timeout: u64` is seconds for its author and milliseconds for a caller",
    instead: "name it timeout_ms, size_bytes, capacity_segments; or use a type that carries the unit (Duration)",
    check,
};

const MEASURES: &[&str] =
    &["timeout", "delay", "interval", "deadline", "elapsed", "grace", "size", "memory", "capacity", "budget"];
const INTEGERS: &[&str] = &["u16", "u32", "u64", "usize", "i32", "i64", "f64"];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let mut previous = "";
        for (index, line) in file.code.lines().enumerate() {
            // The field of an option is named like the option, whose help tells the unit.
            let is_option = previous.ends_with(")]");
            if let Some(name) = bare_measure(line).filter(|_| !is_option && !file.is_test(index + 1)) {
                findings.push(Finding::error(&file.path, index + 1, format!("`{name}` has no unit")));
            }
            if !line.trim().is_empty() {
                previous = line.trim();
            }
        }
    }
    findings
}

/// The first `NAME: INTEGER` whose name is, or ends with, a quantity.
fn bare_measure(line: &str) -> Option<&str> {
    for (colon, _) in line.match_indices(": ") {
        let rest = line[colon + 2..].trim_start_matches("Option<");
        let is_end = |c: char| !c.is_alphanumeric();
        let integer = rest.split(is_end).next().unwrap_or("");
        let name = line[..colon].rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
        let last = name.rsplit('_').next().unwrap_or(name);
        let is_generic = rest[integer.len()..].starts_with("::");
        if INTEGERS.contains(&integer) && MEASURES.contains(&last) && !is_generic {
            return Some(name);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn measures_carry_their_unit() {
        let text = "struct A {\n    pub idle_timeout: Option<u64>,\n    size: u32,\n    size_bytes: u64,\n\
                    \x20   wait: Duration,\n}\nfn b(name: &str, memory: u64) {}\n";
        assert_eq!(lines_found(&RULE, "a.rs", text), [2, 3, 7]);
    }

    #[test]
    fn options_and_values_are_left_alone() {
        let text = "#[arg(long, value_parser = size)]\npub memory: u64,\nlet a = A { size: u64::MAX };\n// size: u64\n";
        assert_eq!(lines_found(&RULE, "a.rs", text), []);
    }
}
