//! The program does not use print macros, which panic if the output cannot be written.

use super::Rule;
use crate::source::SourceFile;
use crate::tidy::Finding;

pub const RULE: Rule = Rule {
    name: "no-print",
    why: "`println!` and `eprintln!` panic if the standard output or error cannot be written: what was done is \
          undone or told with a wrong exit code",
    instead: "in headwater/ `show::line` (results) and `show::aside` (for people); elsewhere `tracing`",
    check,
};

const PRINTING: &[&str] = &["println!", "print!", "eprintln!", "eprint!", "dbg!"];

/// Code that users run; tools for developers (measure, xtask, testkit) may print.
const SHIPPED: &[&str] = &["headwater/", "datapath/", "control/", "hosting/"];

fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let shipped =
        |file: &&SourceFile| file.is_rust() && SHIPPED.iter().any(|folder| file.path.starts_with(folder));
    for file in files.iter().filter(shipped) {
        for word in PRINTING {
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
    fn print_macros_are_refused_only_in_shipped_code() {
        let text = "fn a() { println!(); }\nfn b() { eprintln!(); }\nfn c() { let _ = writeln!(out); }\n\
                    fn d() { eprint!(); }\n#[cfg(test)]\nmod tests { fn e() { eprintln!(); } }\n";
        let mut found = lines_found(&RULE, "headwater/src/cmd/a.rs", text);
        found.sort_unstable();
        assert_eq!(found, [1, 2, 4]);
        assert_eq!(lines_found(&RULE, "xtask/src/main.rs", text), []);
        assert_eq!(lines_found(&RULE, "headwater/tests/a.rs", text), []);
        assert_eq!(lines_found(&RULE, "datapath/volume/examples/a.rs", text), []);
    }
}
