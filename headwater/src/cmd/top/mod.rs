//! `headwater top`: shows the host and its machines on the full screen, and refreshes them every second or at
//! `--interval`.
//!
//! ```text
//!   keys ----> model (pure) --effect--> refresh or change ---> the daemon
//!                |    ^                        |
//!                v    +------------------------+
//!              draw
//! ```
//!
//! One refresh runs at a time, so a slow daemon gets fewer requests. The screen then shows the last figures, and
//! since when the daemon has not answered.

mod draw;
mod model;
mod once;
mod screen;
mod text;

use std::io::IsTerminal;
use std::time::{Duration, SystemTime};

use headwater_api::{Event, Machine, MachineList, MachineSort, Problem, ProblemKind, Role, Status};
use ratatui::crossterm::event::{Event as Input, KeyEventKind};
use tokio::sync::mpsc;

use self::draw::Palette;
use self::model::{Effect, Top};
use self::screen::Screen;
use crate::cli::TopArgs;
use crate::client::Client;
use crate::cmd::machine::terms;
use crate::failure::Unreachable;
use crate::signals::EndSignals;

/// The most machines that are fetched and can be scrolled through.
const MACHINES_MAX: u32 = 500;

/// The number of events on a machine's page.
const EVENTS: u32 = 10;

/// After this time a daemon is shown as not answering.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The figures of one refresh.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The host.
    status: Status,
    /// Machines that match the filter.
    list: MachineList,
    /// The machine whose page is shown, and its latest events.
    detail: Option<(Machine, Vec<Event>)>,
}

/// What one refresh asks the daemon for.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    filter: String,
    sort: MachineSort,
    /// The machine whose page is shown.
    detail: Option<String>,
}

/// The result of a background task.
enum Answer {
    Figures(Question, Box<anyhow::Result<Figures>>),
    Changed(String),
}

/// Shows the screen until the user leaves it, or prints the table once.
pub async fn run(client: Client, args: TopArgs, json: bool) -> anyhow::Result<u8> {
    let question = Question { filter: terms(&args.filter), sort: args.sort, detail: None };
    let figures = fetch(&client, &question).await?;
    if json || args.once || !std::io::stdout().is_terminal() {
        once::print(&figures, json)?;
        return Ok(0);
    }
    let may_change = may_change(&client, args.read_only).await?;
    let mut top = Top::new(question, may_change);
    top.take(figures, now());
    let signals = EndSignals::catch()?;
    let mut screen = Screen::enter()?;
    follow(&client, &mut top, &mut screen, signals, args.interval).await?;
    Ok(0)
}

/// Ok if machines can be changed from here, else the reason.
async fn may_change(client: &Client, read_only: bool) -> anyhow::Result<Result<(), String>> {
    if read_only {
        return Ok(Err("top was started with --read-only".to_owned()));
    }
    let role = client.caller().await?.role;
    if matches!(role, Role::Operator | Role::Admin) {
        return Ok(Ok(()));
    }
    Ok(Err(format!("you have the role {role}, and this needs operator")))
}

/// Milliseconds since 1970, the daemon's unit of time.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

async fn follow(
    client: &Client,
    top: &mut Top,
    screen: &mut Screen,
    mut signals: EndSignals,
    interval: Duration,
) -> anyhow::Result<()> {
    let mut inputs = screen::inputs();
    let (sender, mut answers) = mpsc::channel(16);
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let style = Palette::of_terminal();
    let mut is_looking = false;
    loop {
        screen.draw(|frame| draw::draw(frame, top, now(), &style))?;
        let mut effects = Vec::new();
        tokio::select! {
            _ = signals.next() => return Ok(()),
            _ = ticks.tick() => effects.push(if top.is_paused() { Effect::Nothing } else { Effect::Refresh }),
            input = inputs.recv() => {
                // The terminal is gone, so the user cannot leave otherwise.
                let Some(input) = input else { return Ok(()) };
                effects.push(take_input(top, input));
                // Draws once for a pasted text.
                while let Ok(input) = inputs.try_recv() {
                    effects.push(take_input(top, input));
                }
            }
            Some(answer) = answers.recv() => match answer {
                Answer::Figures(asked, answer) => {
                    is_looking = false;
                    effects.push(take_answer(top, &asked, *answer));
                }
                Answer::Changed(said) => {
                    top.say(said);
                    effects.push(Effect::Refresh);
                }
            },
        }
        for effect in effects {
            match effect {
                Effect::Nothing => {}
                Effect::Leave => return Ok(()),
                Effect::Refresh if is_looking => {}
                Effect::Refresh => {
                    is_looking = true;
                    let (client, question, sender) = (client.clone(), top.question().clone(), sender.clone());
                    tokio::spawn(async move {
                        let figures = fetch(&client, &question).await;
                        // If the receiver is gone, the screen is closed.
                        let _ = sender.send(Answer::Figures(question, Box::new(figures))).await;
                    });
                }
                Effect::Change { verb, name } => {
                    let (client, sender) = (client.clone(), sender.clone());
                    tokio::spawn(async move {
                        let said = match client.change_machine(&name, verb).await {
                            Ok(machine) => format!("{name} is {}", machine.state),
                            Err(error) => format!("cannot {verb} {name}: {error:#}"),
                        };
                        let _ = sender.send(Answer::Changed(said)).await;
                    });
                }
            }
        }
    }
}

fn take_input(top: &mut Top, input: Input) -> Effect {
    match input {
        Input::Key(key) if key.kind != KeyEventKind::Release => top.press(key),
        // The next iteration redraws.
        _ => Effect::Nothing,
    }
}

/// Takes a result. If the query has changed since, sends the new query.
fn take_answer(top: &mut Top, asked: &Question, answer: anyhow::Result<Figures>) -> Effect {
    let is_current = asked == top.question();
    match answer {
        Ok(figures) if is_current => top.take(figures, now()),
        Ok(_) => {}
        Err(error) => {
            let is_gone = error.is::<Unreachable>();
            top.fail(if is_gone { "the daemon does not answer".to_owned() } else { format!("{error:#}") });
        }
    }
    if is_current { Effect::Nothing } else { Effect::Refresh }
}

async fn fetch(client: &Client, question: &Question) -> anyhow::Result<Figures> {
    let asking = async {
        let status = client.status().await?;
        let list = client.machines_like(&question.filter, question.sort, Some(MACHINES_MAX)).await?;
        let detail = match &question.detail {
            Some(name) => detail(client, name).await?,
            None => None,
        };
        Ok(Figures { status, list, detail })
    };
    let answered = tokio::time::timeout(ANSWER_LIMIT, asking).await;
    answered.unwrap_or_else(|_| {
        let message = format!("the daemon has not answered within {} seconds", ANSWER_LIMIT.as_secs());
        Err(Problem::new(ProblemKind::Failed, message).into())
    })
}

async fn detail(client: &Client, name: &str) -> anyhow::Result<Option<(Machine, Vec<Event>)>> {
    match client.machine(name).await {
        Ok(machine) => {
            let events = client.events(Some(&format!("machine {name}")), None, EVENTS).await?.events;
            Ok(Some((machine, events)))
        }
        // It was removed meanwhile.
        Err(error) if error.downcast_ref::<Problem>().is_some_and(|p| p.kind == ProblemKind::NotFound) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
