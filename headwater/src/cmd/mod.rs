//! Carries out the commands: most have one file each. A command asks the daemon through [`crate::client`], or works
//! without a daemon, and prints the result as text or JSON. The options are parsed in [`crate::cli`].

mod advice;
mod attach;
mod audit;
mod backup;
mod boot;
mod boot_media;
mod cache;
mod catalog;
mod channels;
mod config;
mod connection;
mod console;
mod contents;
mod context;
mod counters;
mod cp;
mod demo;
mod diff;
mod disks;
mod doctor;
mod events;
mod exec;
mod export;
mod fuse;
mod generate;
mod image;
mod iscsi;
mod libvirt;
mod machine;
mod nbd;
mod node;
mod orphans;
mod persistent;
mod personality;
mod publish;
mod pull;
mod reference;
mod resume;
mod run;
mod scheme;
mod seal;
mod secrets;
mod serve;
mod serve_disks;
mod size;
mod size_table;
mod source_url;
mod spool;
mod stats;
mod status;
mod store;
mod task;
mod token;
mod top;
mod trace;
mod trim;
mod upgrade;
mod web_console;
mod when;

use std::future::Future;
use std::time::Duration;

use anyhow::Context;

use crate::cli::{Cli, Command, LogFormat, SchemeCommand, SizeCommand};
use crate::client::Client;
use crate::daemon::starting::EndedAtStart;
use crate::data_dir::DataDir;

/// How long an ending daemon waits for abandoned requests to a store.
const REQUESTS_GRACE: Duration = Duration::from_secs(5);

/// Runs a command. Returns the exit code of a command that did not fail.
pub fn run(cli: Cli) -> anyhow::Result<u8> {
    let json = cli.json;
    let data_dir = || DataDir::locate(cli.data_dir.clone());
    let client = || Client::choose(cli.context.as_deref(), cli.data_dir.clone());
    match cli.command {
        Command::Run(args) => as_daemon(run::run(data_dir()?, args, json)),
        Command::Serve(args) => as_daemon(serve::run(data_dir()?, *args)),
        Command::Disks(args) => serve_disks::run(&data_dir()?, &args),
        Command::Upgrade(args) => upgrade::run(&DataDir::of_daemon(cli.data_dir)?, &args, json),
        // Ends the machines of a node whose controller is silent, even if the daemon is gone.
        Command::Guard => {
            own_only();
            crate::logging::to_stderr("info", LogFormat::Text)?;
            let data_dir = data_dir()?;
            on_one_core(async move { crate::guard::run(&data_dir).await })
        }
        Command::Config(command) => config::run(command, json),
        Command::Demo(args) => demo::run(&args).map(|()| 0),
        Command::Doctor(args) => on_one_core(doctor::run(cli.data_dir.clone(), args, json)),
        Command::Image(command) => on_one_core(image::run(client()?, command, json)),
        Command::Catalog(command) => on_one_core(catalog::run(client()?, command, json)),
        Command::Machine(command) => on_one_core(machine::run(client()?, command, json)),
        Command::Task(command) => on_one_core(task::run(client()?, command, json)),
        Command::Node(command) => on_one_core(node::run(client, data_dir, command, json)),
        Command::Token(command) => on_one_core(token::run(client()?, command, json)),
        Command::Connection(command) => on_one_core(connection::run(client()?, command, json)),
        Command::Backup(args) => {
            own_only();
            backup::refuse_remote(cli.context.as_deref())?;
            on_one_core(backup::write(DataDir::of_daemon(cli.data_dir)?, args, json))
        }
        Command::Restore(args) => {
            own_only();
            backup::refuse_remote(cli.context.as_deref())?;
            on_one_core(backup::restore(data_dir()?, args, json))
        }
        Command::Secrets(command) => {
            own_only();
            backup::refuse_remote(cli.context.as_deref())?;
            on_one_core(secrets::run(data_dir()?, command, json))
        }
        Command::Login(args) => on_one_core(context::login(args, json)),
        Command::Logout => on_one_core(context::logout(cli.context.clone(), json)),
        Command::Context(command) => context::run(command, json),
        Command::Size(SizeCommand::Advise(args)) => size::advise(&args, json).map(|()| 0),
        Command::Scheme(SchemeCommand::Check(args)) => scheme::check(*args, json).map(|()| 0),
        Command::Boot(command) => boot::run(&command, json),
        Command::Console(args) => on_one_core(web_console::run(client()?, args, json)),
        Command::Status => on_one_core(status::run(client()?, json)),
        Command::Top(args) => on_one_core(top::run(client()?, args, json)),
        Command::Stats(args) => on_one_core(stats::run(client()?, args, json)),
        Command::Audit(command) => on_one_core(audit::run(client, command, json)),
        Command::Events(args) => on_one_core(events::run(client()?, args, json)),
        Command::Store(command) => {
            own_only();
            store::run(command, json)
        }
        Command::Export(mut args) => {
            args.json = json;
            export::run(data_dir, args).map(|()| 0)
        }
        Command::Attach(mut args) => {
            args.json = json;
            args.attach.attach = true;
            export::run(data_dir, args).map(|()| 0)
        }
        Command::Libvirt(command) => libvirt::run(&command, json),
        Command::Cache(command) => on_one_core(cache::run(client, command, json)),
        Command::Detach(args) => attach::detach(&args, json),
        Command::Attachments => attach::list(json),
        Command::Completions { shell } => generate::completions(shell).map(|()| 0),
        Command::Man { dir: Some(dir), .. } => generate::manual(&dir).map(|()| 0),
        Command::Man { dir: None, .. } => reference::print().map(|()| 0),
    }
}

fn on_one_core(work: impl Future<Output = anyhow::Result<u8>>) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let outcome = runtime.block_on(work);
    // A thread may still wait for the terminal's next key, so do not wait for threads.
    runtime.shutdown_background();
    outcome
}

/// Restricts new files to their owner: disks of machines, keys, console logs, and stores. The other commands leave the
/// user's umask as it is.
fn own_only() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

fn as_daemon(work: impl Future<Output = anyhow::Result<u8>>) -> anyhow::Result<u8> {
    own_only();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    match runtime.block_on(work) {
        Err(error) if error.is::<EndedAtStart>() => {
            // A blocked operation of the start must not delay the end.
            runtime.shutdown_background();
            crate::show::aside(&format!("headwater: {error}\n"));
            Ok(0)
        }
        outcome => {
            // A store that does not answer must not delay the end either.
            runtime.shutdown_timeout(REQUESTS_GRACE);
            outcome
        }
    }
}
