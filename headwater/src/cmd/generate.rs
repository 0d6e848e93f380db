//! `headwater completions` and `headwater man`: makes completions for shells and manual pages, from the options in
//! [`crate::cli`].

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::env::Shells;

use crate::cli::Cli;
use crate::show;

/// Prints the completion script for a shell. The script runs this program, which gets names from the daemon.
pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    let shells = Shells::builtins();
    let completer =
        shells.completer(&shell.to_string()).context("there are no completions for this shell")?;
    completer.write_registration("COMPLETE", "headwater", "headwater", "headwater", &mut script)?;
    show::bytes(&script)
}

/// Writes one manual page for each command.
pub fn manual(dir: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write the manual to {}", dir.display());
    std::fs::create_dir_all(dir).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), dir).with_context(failed)
}
