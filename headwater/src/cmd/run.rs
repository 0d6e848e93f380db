//! `headwater run`: starts a daemon in this process, runs machines on it, and shows a table until a signal arrives or
//! all machines are off. Then it removes the machines.
//!
//! It uses the daemon through its socket like any other client, so `headwater machine list` in another
//! terminal shows the same machines.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use headwater_api::name::ImageRef;
use headwater_api::{CacheSettings, Machine, MachineState, Problem, ProblemKind, TaskResult};
use tokio::sync::Mutex;

use crate::cli::{MachineArgs, RunArgs};
use crate::client::Client;
use crate::cmd::{image, machine};
use crate::daemon::{Options, starting};
use crate::data_dir::DataDir;
use crate::signals::EndSignals;
use crate::{logging, show, stores};

/// How often the states are read and the table is drawn.
const INTERVAL: Duration = Duration::from_secs(1);

/// The longest prefix of a machine's name, to which its number is appended.
const MAX_STEM_BYTES: usize = 56;

/// The machines that this command has created and must remove.
#[derive(Default)]
struct Created {
    /// Their names. The creation of the last one may still be in progress.
    names: Vec<String>,
    /// Locked while a machine is being created.
    making: Arc<Mutex<()>>,
}

/// Runs machines until a signal arrives, or all of them are off.
pub async fn run(data_dir: DataDir, args: RunArgs, json: bool) -> anyhow::Result<u8> {
    // Invalid options fail before anything is imported.
    args.machine.cache_settings(CacheSettings::default())?;
    let mut signals = EndSignals::catch()?;
    let options = Options {
        store: args.from.clone(),
        credentials: args.credentials.clone(),
        stream: args.stream.clone(),
        caches: args.caches.clone(),
        recordings: args.record.clone(),
        ..Options::default()
    };
    let daemon = starting::start(data_dir, options, &mut signals, note).await?;
    logging::to_file(&daemon.data_dir().path().join("run.log"))?;
    let client = Client::new(daemon.data_dir().socket());
    let mut created = Created::default();
    let outcome = tokio::select! {
        outcome = bring_up_and_watch(&client, &args, &mut created, json) => outcome,
        _ = signals.next() => Ok(0),
    };
    if !created.names.is_empty() {
        note("stopping; Ctrl-C again ends the machines at once");
    }
    let hurry = daemon.hurry();
    tokio::spawn(async move {
        signals.next().await;
        hurry.await;
    });
    let cleaned = clean_up(&client, &created).await;
    daemon.stop().await;
    let code = outcome?;
    cleaned.map(|()| code)
}

async fn bring_up_and_watch(
    client: &Client,
    args: &RunArgs,
    created: &mut Created,
    json: bool,
) -> anyhow::Result<u8> {
    // A store on servers is read-only, so a file with this name is not imported.
    let may_import = !args.from.as_deref().is_some_and(stores::is_server);
    let image = image_of(client, args, may_import, json).await?;
    let names = free_names(client, &image, args.count).await?;
    create(client, names, &image, &args.machine, created).await?;
    let verb = if args.record.is_some() { machine::START_RECORDED } else { "start" };
    for name in &created.names {
        client.change_machine(name, verb).await.map_err(for_another_run)?;
    }
    watch(client, &created.names, json).await
}

/// Changes the advice of an error: `run` removes the machine, so 'machine set' cannot help. Advises an option of the
/// next run instead.
fn for_another_run(error: anyhow::Error) -> anyhow::Error {
    let mut problem = match error.downcast::<Problem>() {
        Ok(problem) => problem,
        Err(other) => return other,
    };
    if problem.advice.as_ref().is_some_and(|advice| advice.contains("headwater machine set")) {
        problem.advice = Some("give another limit with --disk SIZE".to_owned());
    }
    problem.into()
}

/// Imports a file or an NBD export. Other sources are images of the store.
async fn image_of(client: &Client, args: &RunArgs, may_import: bool, json: bool) -> anyhow::Result<String> {
    let source = args.source.as_str();
    if may_import && image::is_source(source) {
        let form = image::Form { backing: args.backing, ..image::Form::default() };
        let name = image::is_standard_input(source).then(|| "stdin".to_owned());
        let named = image::Named { name, ..image::Named::default() };
        let result = image::import(client, source, form, named, json).await?;
        let TaskResult::Imported { version, created, damaged_chunks, remarks, edited_by } = result else {
            anyhow::bail!(
                "the daemon did not answer with the result of an import: it may be of another version than this program"
            );
        };
        // The import may change what other machines of this data directory boot; the new ones name the version by its
        // number.
        if created && let Some(moved) = image::moved(client, &version).await {
            show::aside(&format!("headwater: {moved}\n"));
        }
        if json {
            // The JSON of the import, which has these remarks, is not printed.
            image::remark(client, &version, damaged_chunks, edited_by.as_deref());
            image::say_seen(&remarks);
        }
        return Ok(format!("{}@{}", version.image, version.number));
    }
    let missing = |problem: Problem| problem.during(format!("'{source}' is neither a file nor an image"));
    ImageRef::parse(source).map_err(missing)?;
    if !may_import {
        // A plain web server cannot list its images. A missing image is noticed when the first machine is created.
        return Ok(source.to_owned());
    }
    match client.image(source).await {
        Ok(_) => Ok(source.to_owned()),
        Err(e) => match e.downcast::<Problem>() {
            Ok(problem) if problem.kind == ProblemKind::NotFound => Err(missing(problem).into()),
            Ok(problem) => Err(problem.into()),
            Err(e) => Err(e),
        },
    }
}

/// Free names of the form `IMAGE-1`, `IMAGE-2`, ..
async fn free_names(client: &Client, image: &str, count: u32) -> anyhow::Result<Vec<String>> {
    let image = image.split(['@', ':']).next().unwrap_or(image);
    let stem: String = image.replace(['.', '_'], "-").chars().take(MAX_STEM_BYTES).collect();
    let stem = stem.trim_matches('-');
    let machines = client.machines().await?.machines.into_iter().map(|machine| machine.name);
    let catalogs = client.catalogs().await?.catalogs.into_iter().map(|catalog| catalog.name);
    let taken: BTreeSet<String> = machines.chain(catalogs).collect();
    let names = (1u32..).map(|number| format!("{stem}-{number}")).filter(|name| !taken.contains(name));
    Ok(names.take(usize::try_from(count)?).collect())
}

async fn create(
    client: &Client,
    names: Vec<String>,
    image: &str,
    args: &MachineArgs,
    created: &mut Created,
) -> anyhow::Result<()> {
    for name in names {
        let request = machine::creation(name.clone(), machine::Boots::Image(image.to_owned()), args)?;
        // A signal may interrupt this before the answer. The request continues then, and is awaited before its
        // machine is removed.
        created.names.push(name);
        let turn = created.making.clone().lock_owned().await;
        let client = client.clone();
        let made = tokio::spawn(async move {
            let made = client.create_machine(&request).await;
            drop(turn);
            made
        });
        if let Err(e) = made.await.context(machine::NO_RESULT)? {
            // A problem means that no machine was created. If the answer was lost, there may be one.
            if e.is::<Problem>() {
                created.names.pop();
            }
            return Err(e);
        }
    }
    Ok(())
}

/// Shows the machines until all are off. Fails if a machine crashed.
async fn watch(client: &Client, names: &[String], json: bool) -> anyhow::Result<u8> {
    let mut screen = Screen::new(json);
    let mut tick = tokio::time::interval(INTERVAL);
    loop {
        tick.tick().await;
        let all = client.machines().await?.machines;
        let ours: Vec<Machine> = all.into_iter().filter(|machine| names.contains(&machine.name)).collect();
        screen.show(&ours)?;
        if ours.iter().all(machine::is_off) {
            let crashed = ours.iter().any(|machine| machine.state == MachineState::Crashed);
            note(if crashed {
                "all machines are off, and some of them crashed"
            } else {
                "all machines are off"
            });
            return Ok(u8::from(crashed));
        }
    }
}

async fn clean_up(client: &Client, created: &Created) -> anyhow::Result<()> {
    let _all_made = created.making.lock().await;
    let tasks: Vec<_> = created
        .names
        .iter()
        .map(|name| {
            let (client, name) = (client.clone(), name.clone());
            tokio::spawn(async move {
                let done = async {
                    client.change_machine(&name, "stop").await?;
                    client.remove_machine(&name, true).await
                };
                done.await.or_else(unless_gone)
            })
        })
        .collect();
    let mut outcome = Ok(());
    for task in tasks {
        let done = task.await.context(machine::NO_RESULT)?;
        outcome = outcome.and(done);
    }
    outcome.context("cannot stop and remove the machines of this run")
}

/// Ignores that a machine does not exist: the signal arrived before it was created.
fn unless_gone(error: anyhow::Error) -> anyhow::Result<()> {
    match error.downcast_ref::<Problem>() {
        Some(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

/// Prints a note to standard error.
fn note(text: &str) {
    show::aside(&format!("{text}\n"));
}

/// Shows states: a table that is redrawn on a terminal; otherwise one line for each change of a state; with --json
/// the machine as an object.
struct Screen {
    is_terminal: bool,
    json: bool,
    drawn_lines: usize,
    said: BTreeMap<String, String>,
}

impl Screen {
    fn new(json: bool) -> Self {
        Self {
            is_terminal: std::io::stdout().is_terminal() && !json,
            json,
            drawn_lines: 0,
            said: BTreeMap::new(),
        }
    }

    fn show(&mut self, machines: &[Machine]) -> anyhow::Result<()> {
        if self.is_terminal { self.redraw(machines) } else { self.print_changes(machines) }
    }

    fn redraw(&mut self, machines: &[Machine]) -> anyhow::Result<()> {
        let table = show::machines::live(machines);
        let width = terminal_columns();
        let mut text = String::new();
        if self.drawn_lines > 0 {
            text.push_str(&format!("\u{1b}[{}A\u{1b}[J", self.drawn_lines));
        }
        self.drawn_lines = table.lines().count();
        for line in table.lines() {
            // A line that wraps would shift the next drawing.
            text.extend(line.chars().take(width));
            text.push('\n');
        }
        show::bytes(text.as_bytes())
    }

    fn print_changes(&mut self, machines: &[Machine]) -> anyhow::Result<()> {
        for machine in machines {
            let sentence = machine::sentence(machine);
            if self.said.get(&machine.name) != Some(&sentence) {
                show::line(&if self.json { serde_json::to_string(machine)? } else { sentence.clone() })?;
                self.said.insert(machine.name.clone(), sentence);
            }
        }
        Ok(())
    }
}

fn terminal_columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stdout());
    size.map(|size| usize::from(size.ws_col)).ok().filter(|columns| *columns > 0).unwrap_or(80)
}
