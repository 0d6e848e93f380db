//! The program `headwater`: the command line, the daemon's processes, and the adapters between the other crates.
//!
//! ```text
//!   cmd/  one file a command --> client/ --HTTP, unix socket--> daemon/ (serve; run starts one in-process)
//!                                                                  |
//!                                                    control/service over adapters/ (images, disks, QEMU)
//!
//!   cmd/cache --> client of limits/ --unix socket--> server of limits/ in cmd/export (volumes without a daemon)
//! ```
//!
//! | modules | purpose |
//! |---|---|
//! | `cli`, `cmd`, `show`, `failure`, `contexts`, `client` | the command line: options, commands, results, errors, servers, the API's client |
//! | `daemon`, `config`, `data_dir`, `database`, `secrets_key`, `logging`, `signals` | the daemon and its settings |
//! | `disk_process`, `guard`, `fleet` | the disk process, the guard of a node's leases, the connections between controller and nodes |
//! | `adapters`, `stores`, `streaming`, `traces`, `recording`, `last_known`, `copying`, `verification` | images: opening, reading, copying and checking them |
//! | `caches`, `keys`, `limits` | write caches: options, keys, changed limits |
//! | `oidc`, `alarm_channels`, `backup` | logins with an identity provider, sending alarms, backups of the daemon's data |
//! | `own_files`, `replace` | safe use of files |
//!
//! # Guarantees
//! - Every command ends with an exit code of `docs/exit-codes.md`. An error is one line that says what was tried, on what,
//!   why it failed and what to do. Only errors of usage have several lines, unless `--json` is given.
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
