//! Logic uses neither the wall clock nor random numbers of the operating system: both are parameters.
//!
//! `Instant::now` is allowed: it measures durations and does not tell the time. Keys and nonces come from the
//! crypto library and are not covered by this rule.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "no-clock",
    why: "logic that reads the wall clock or global randomness cannot be replayed by a test, and breaks \
          when the clock jumps",
    instead: "take the time or the identifier as a parameter; headwater/ reads the clock and makes the UUID",
    check,
};

const GLOBAL: &[&str] = &[
    "SystemTime::now",
    "UNIX_EPOCH.elapsed",
    "OffsetDateTime::now_utc",
    "thread_rng",
    "rand::random",
    "rand::rng",
    "fastrand::",
    "Uuid::new_v4",
    "Uuid::now_v7",
    "getrandom",
];

/// Folders with logic. The programs around it (headwater, measure, xtask, testkit) may use clock and random
/// numbers.
const LOGIC: &[&str] = &["datapath/", "control/", "hosting/", "boot/"];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let logic = |file: &&SourceFile| file.is_rust() && LOGIC.iter().any(|plane| file.path.starts_with(plane));
    for file in files.iter().filter(logic) {
        for word in GLOBAL {
            let lines = file.lines_with(word);
            findings
                .extend(lines.into_iter().map(|line| Finding::error(&file.path, line, format!("`{word}`"))));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::{super::lines_found, RULE};

    #[test]
    fn clocks_and_dice_are_refused_in_logic_only() {
        let text = "fn a() { std::time::SystemTime::now(); }\nfn b() { std::time::Instant::now(); }\n\
                    fn c() { uuid::Uuid::new_v4(); }\n#[cfg(test)]\nmod tests { fn d() { SystemTime::now(); } }\n";
        assert_eq!(lines_found(&RULE, "control/service/src/a.rs", text), [1, 3]);
        assert_eq!(lines_found(&RULE, "headwater/src/main.rs", text), []);
        assert_eq!(lines_found(&RULE, "datapath/volume/tests/a.rs", text), []);
    }
}
