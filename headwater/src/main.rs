//! The program `headwater`: the command line and the daemon. It only connects the other crates.
//!
//! ```text
//!   cmd/  one file a command --> client/ --HTTP, unix socket--> daemon/ (serve; run starts one in-process)
//!   cmd/export: volumes in the foreground, no daemon               |
//!   cmd/cache --unix socket--> limits/ in cmd/export               |
//!                                                    control/service over adapters/ (images, disks, QEMU)
//! ```
//!
//! # Guarantees
//! - Every command ends with an exit code of `docs/exit-codes.md`; an error is one line that says what was
//!   tried, on what, why it failed and what to do.
//! - Results go to standard output, everything else to standard error.
//!
//! # Not here
//! Rules of the control plane and the data of disks: they are in `control/` and `datapath/`.
//!
//! Start reading at `cli/mod.rs`, then `daemon/mod.rs`.

mod adapters;
mod alarm_channels;
mod backup;
mod caches;
mod cli;
mod client;
mod cmd;
mod config;
mod contexts;
mod copying;
mod daemon;
mod data_dir;
mod database;
mod disk_process;
mod failure;
mod fleet;
mod guard;
mod keys;
mod last_known;
mod limits;
mod logging;
mod oidc;
mod own_files;
mod recording;
mod replace;
mod secrets_key;
mod show;
mod signals;
mod stores;
mod streaming;
mod traces;
mod verification;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn main() -> ExitCode {
    // If the shell asks for completions, this answers and exits.
    CompleteEnv::with_factory(cli::Cli::command).complete();
    let words: Vec<_> = std::env::args_os().collect();
    let wants_json = words.iter().any(|word| word == "--json");
    let words = match config::with_file(words) {
        Ok(words) => words,
        Err(e) => return failure::report(&e, wants_json),
    };
    let cli = match cli::Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() && wants_json => {
            return failure::report(&failure::usage(&e), true);
        }
        Err(e) => {
            // Ignored: if the reader is gone, nobody needs the usage text.
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(failure::USAGE) } else { ExitCode::SUCCESS };
        }
    };
    allow_open_files();
    let json = cli.json;
    let code = match signals::outlive_file_limit().and_then(|()| cmd::run(cli)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => failure::report(&error, json),
    };
    logging::flush();
    code
}

/// Raises the limit of open files to the maximum that the process may have: a connection needs up to five. (The lower
/// default exists for programs that use `select(2)`.)
fn allow_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(why) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%why, "the limit of open files stays as it is");
    }
}
