//! `cargo xtask`: the project's own checks, in Rust and from the standard library only.
//!
//! - `cargo xtask tidy`: the house rules that neither rustc nor clippy checks. Each rule is a file in [`rules`], with
//!   its reason and what to do instead.
//! - `cargo xtask test [FILTER]`: formatting, tidy, clippy and all tests, summed up in the last line.
//!
//! Start reading at [`tidy`].

mod programs;
mod rules;
mod runs;
mod source;
mod suite;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  tidy           check the house rules (CONTRIBUTING.md lists them); exit 1 if one is broken
  test [FILTER]  formatting, tidy, clippy and all tests; the last line is `N passed, N failed`";

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let good = match words.as_slice() {
        ["tidy"] => tidy::run(root),
        ["test", filter @ ..] => suite::run(root, filter),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match good {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}
