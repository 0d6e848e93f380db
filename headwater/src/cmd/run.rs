//! `headwater run`: a daemon in this process, machines on it, and a table until Ctrl-C.
//!
//! It drives the daemon through its socket like any other client, so `headwater machine list` from another
//! terminal shows the same machines, and there is no second way of doing things.

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

/// How often the table is drawn, and states are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// The longest beginning of a machine's name; its number follows.
const MAX_STEM_BYTES: usize = 56;

/// The machines that are ours to remove.
#[derive(Default)]
struct Created {
    /// Their names; of the last one perhaps only asked for.
    names: Vec<String>,
    /// Held while one is being made.
    making: Arc<Mutex<()>>,
}

/// Runs machines until a signal comes, or until all of them are off.
pub async fn run(data_dir: DataDir, args: RunArgs, json: bool) -> anyhow::Result<u8> {
    // What cannot be is refused before anything is imported.
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
    // Nothing can be imported into the store of servers, so a file of this name is not what is meant.
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

/// The same with what helps: the machine is removed, so that no limit of it can be set any more.
fn for_another_run(error: anyhow::Error) -> anyhow::Error {
    let mut problem = match error.downcast::<Problem>() {
        Ok(problem) => problem,
        Err(other) => return other,
    };
    if problem.advice.as_ref().is_some_and(|advice| advice.contains("headwater machine set")) {
        problem.advice = Some("say another limit with --disk SIZE".to_owned());
    }
    problem.into()
}

/// Imports a file or an NBD export; anything else is an image of the store.
async fn image_of(client: &Client, args: &RunArgs, may_import: bool, json: bool) -> anyhow::Result<String> {
    let source = args.source.as_str();
    if may_import && image::is_source(source) {
        let form = image::Form { backing: args.backing, ..image::Form::default() };
        let name = image::is_standard_input(source).then(|| "stdin".to_owned());
        let named = image::Named { name, ..image::Named::default() };
        let result = image::import(client, source, form, named, json).await?;
        let TaskResult::Imported { version, created, damaged_chunks, remarks, edited_by } = result else {
            anyhow::bail!("the import ended as something else");
        };
        // Other machines of the image, on a data directory that has some: ours have the version by its number.
        if created && let Some(moved) = image::moved(client, &version).await {
            show::aside(&format!("headwater: {moved}\n"));
        }
        if json {
            // Nobody sees the JSON of the import, which says so.
            image::remark(client, &version, damaged_chunks, edited_by.as_deref());
            image::say_seen(&remarks);
        }
        return Ok(format!("{}@{}", version.image, version.number));
    }
    let missing = |problem: Problem| problem.during(format!("'{source}' is neither a file nor an image"));
    ImageRef::parse(source).map_err(missing)?;
    if !may_import {
        // A plain web server cannot list its images. What there is not is found out when the first machine is made.
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

/// `IMAGE-1`, `IMAGE-2`, ...: those that are free.
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
        // A signal may cut us off before the answer. The request goes on then, and is waited for before its
        // machine is removed.
        created.names.push(name);
        let turn = created.making.clone().lock_owned().await;
        let client = client.clone();
        let made = tokio::spawn(async move {
            let made = client.create_machine(&request).await;
            drop(turn);
            made
        });
        if let Err(e) = made.await.context("a request did not end")? {
            // Refused, so there is none of ours. Where the answer was lost, there may be.
            if e.is::<Problem>() {
                created.names.pop();
            }
            return Err(e);
        }
    }
    Ok(())
}

/// Shows the machines until all are off. A machine that crashed makes it a failure.
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
            note(if crashed { "all machines are off, not all of them well" } else { "all machines are off" });
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
        let done = task.await.context("a request did not end")?;
        outcome = outcome.and(done);
    }
    outcome.context("cannot clean up")
}

/// A machine that there is not needs no cleaning up: the signal came before it was made.
fn unless_gone(error: anyhow::Error) -> anyhow::Result<()> {
    match error.downcast_ref::<Problem>() {
        Some(problem) if problem.kind == ProblemKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

/// For people, beside the results.
fn note(text: &str) {
    show::aside(&format!("{text}\n"));
}

/// A table that is drawn over itself on a terminal; elsewhere, a line for each change of a state, and for programs the machine.
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
        if self.is_terminal { self.redraw(machines) } else { self.say(machines) }
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
            // A line that wraps would make the next drawing begin too low.
            text.extend(line.chars().take(width));
            text.push('\n');
        }
        show::bytes(text.as_bytes())
    }

    fn say(&mut self, machines: &[Machine]) -> anyhow::Result<()> {
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
