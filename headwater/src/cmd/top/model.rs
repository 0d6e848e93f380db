//! The model of `headwater top`: what the screen shows, and the effects of keys. Pure: no terminal, no clock, no
//! daemon.

use std::collections::HashMap;

use headwater_api::{DiskCounters, Event, Filter, Machine, MachineSort, MachineState, Status};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use uuid::Uuid;

use super::{Figures, Question};

/// The number of lines for the keys PageUp and PageDown.
const PAGE: usize = 10;

/// The action of the main loop after a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    Nothing,
    /// Fetch new figures from the daemon now.
    Refresh,
    Change {
        verb: &'static str,
        name: String,
    },
    Leave,
}

/// What is shown instead of the table, or over it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Page {
    #[default]
    Machines,
    /// One machine.
    Detail,
    Help,
}

/// The rates of a machine's counters, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub spilled_bytes: u64,
}

/// A change of a machine that the user requested with a key and has not confirmed yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    pub verb: &'static str,
    pub name: String,
    pub text: String,
}

/// The state of the screen.
#[derive(Debug)]
pub struct Top {
    question: Question,
    /// Ok if machines can be changed from here, else the reason.
    may_change: Result<(), String>,
    figures: Option<Figures>,
    /// When the figures arrived.
    taken_at_ms: u64,
    before: HashMap<Uuid, (u64, DiskCounters)>,
    rates: HashMap<Uuid, Rates>,
    /// The selected machine, to which the keys apply. The selection stays if the order changes.
    chosen: Option<String>,
    pub page: Page,
    /// The filter that is being typed.
    pub typed: Option<String>,
    /// Why the typed text is not a valid filter.
    pub odd: Option<String>,
    pub asked: Option<Asked>,
    said: Option<String>,
    problem: Option<String>,
    is_paused: bool,
}

impl Top {
    pub fn new(question: Question, may_change: Result<(), String>) -> Self {
        Self {
            question,
            may_change,
            figures: None,
            taken_at_ms: 0,
            before: HashMap::new(),
            rates: HashMap::new(),
            chosen: None,
            page: Page::Machines,
            typed: None,
            odd: None,
            asked: None,
            said: None,
            problem: None,
            is_paused: false,
        }
    }

    /// The query for the daemon.
    pub const fn question(&self) -> &Question {
        &self.question
    }

    pub fn status(&self) -> Option<&Status> {
        self.figures.as_ref().map(|figures| &figures.status)
    }

    pub fn machines(&self) -> &[Machine] {
        self.figures.as_ref().map(|figures| &figures.list.machines[..]).unwrap_or_default()
    }

    /// The number of machines that match the filter, and of all machines.
    pub fn counts(&self) -> (u64, u64) {
        self.figures.as_ref().map_or((0, 0), |figures| (figures.list.matching, figures.list.total))
    }

    /// The machine whose page is shown, and its events, newest first.
    pub fn detail(&self) -> Option<(&Machine, &[Event])> {
        self.figures.as_ref()?.detail.as_ref().map(|(machine, events)| (machine, &events[..]))
    }

    pub fn filter(&self) -> &str {
        &self.question.filter
    }

    pub const fn sort(&self) -> MachineSort {
        self.question.sort
    }

    /// The rates of its counters; unknown until the second refresh.
    pub fn rates(&self, machine: &Machine) -> Option<Rates> {
        self.rates.get(&machine.uuid).copied()
    }

    /// The selected row.
    pub fn chosen(&self) -> Option<usize> {
        let name = self.chosen.as_ref()?;
        self.machines().iter().position(|machine| machine.name == *name)
    }

    pub const fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// The error of the last refresh, and the age of the figures in seconds.
    pub fn stale(&self, now_ms: u64) -> Option<(&str, u64)> {
        self.problem.as_deref().map(|why| (why, now_ms.saturating_sub(self.taken_at_ms) / 1000))
    }

    /// The result of the last change.
    pub fn said(&self) -> Option<&str> {
        self.said.as_deref()
    }

    pub fn say(&mut self, text: String) {
        self.said = Some(text);
    }

    pub fn fail(&mut self, why: String) {
        self.problem = Some(why);
    }

    /// Takes new figures.
    pub fn take(&mut self, figures: Figures, now_ms: u64) {
        let machines = figures.list.machines.iter().chain(figures.detail.iter().map(|(machine, _)| machine));
        let counted: HashMap<Uuid, (u64, DiskCounters)> =
            machines.filter_map(|machine| Some((machine.uuid, (now_ms, machine.disk?)))).collect();
        self.rates = counted
            .iter()
            .filter_map(|(uuid, (_, now))| {
                let (at_ms, before) = self.before.get(uuid)?;
                Some((*uuid, rates(before, now, now_ms.checked_sub(*at_ms).filter(|ms| *ms > 0)?)))
            })
            .collect();
        self.before = counted;
        self.taken_at_ms = now_ms;
        self.problem = None;
        let row = self.chosen();
        self.figures = Some(figures);
        // If the machine was removed, select its neighbour.
        if self.chosen().is_none() {
            self.choose(row.unwrap_or(0));
        }
    }

    fn choose(&mut self, row: usize) {
        let machines = self.machines();
        let last = machines.len().saturating_sub(1);
        self.chosen = machines.get(row.min(last)).map(|machine| machine.name.clone());
    }

    fn move_by(&mut self, rows: isize) {
        let row = self.chosen().unwrap_or(0).saturating_add_signed(rows);
        self.choose(row);
    }

    /// Handles a key.
    pub fn press(&mut self, key: KeyEvent) -> Effect {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Effect::Leave;
        }
        if self.typed.is_some() {
            return self.type_filter(key);
        }
        if let Some(asked) = self.asked.take() {
            let is_yes = matches!(key.code, KeyCode::Char('y' | 'Y'));
            self.said = Some(if is_yes {
                format!("{} {} ..", asked.verb, asked.name)
            } else {
                "nothing was changed".to_owned()
            });
            return if is_yes {
                Effect::Change { verb: asked.verb, name: asked.name }
            } else {
                Effect::Nothing
            };
        }
        self.said = None;
        match (&self.page, key.code) {
            (_, KeyCode::Char('q')) => Effect::Leave,
            (Page::Help, _) => {
                self.page = if self.question.detail.is_some() { Page::Detail } else { Page::Machines };
                Effect::Nothing
            }
            (_, KeyCode::Char('?')) => {
                self.page = Page::Help;
                Effect::Nothing
            }
            (_, KeyCode::Char('p' | 'f')) => {
                self.is_paused = !self.is_paused;
                if self.is_paused { Effect::Nothing } else { Effect::Refresh }
            }
            (_, KeyCode::Char(letter @ ('s' | 'S' | 'R'))) => self.ask(letter),
            (Page::Detail, KeyCode::Esc | KeyCode::Enter | KeyCode::Backspace | KeyCode::Left) => {
                self.page = Page::Machines;
                self.question.detail = None;
                Effect::Refresh
            }
            (Page::Detail, _) => Effect::Nothing,
            (Page::Machines, code) => self.press_in_table(code),
        }
    }

    fn press_in_table(&mut self, code: KeyCode) -> Effect {
        match code {
            KeyCode::Char('/') => self.typed = Some(self.question.filter.clone()),
            KeyCode::Char('j') | KeyCode::Down => self.move_by(1),
            KeyCode::Char('k') | KeyCode::Up => self.move_by(-1),
            KeyCode::PageDown => self.move_by(PAGE.cast_signed()),
            KeyCode::PageUp => self.move_by(-PAGE.cast_signed()),
            KeyCode::Char('g') | KeyCode::Home => self.choose(0),
            KeyCode::Char('G') | KeyCode::End => self.choose(usize::MAX),
            KeyCode::Char(step @ ('<' | '>')) => {
                let all = MachineSort::ALL;
                let at = all.iter().position(|sort| *sort == self.question.sort).unwrap_or(0);
                let next = if step == '>' { at + 1 } else { at + all.len() - 1 } % all.len();
                self.question.sort = all[next];
                return Effect::Refresh;
            }
            KeyCode::Enter => {
                self.question.detail.clone_from(&self.chosen);
                if self.question.detail.is_some() {
                    self.page = Page::Detail;
                    return Effect::Refresh;
                }
            }
            KeyCode::Esc if !self.question.filter.is_empty() => {
                self.question.filter.clear();
                return Effect::Refresh;
            }
            _ => {}
        }
        Effect::Nothing
    }

    /// Handles a key while the filter is being typed. Each valid filter applies at once.
    fn type_filter(&mut self, key: KeyEvent) -> Effect {
        let Some(mut text) = self.typed.take() else { return Effect::Nothing };
        match key.code {
            KeyCode::Enter | KeyCode::Esc if key.code == KeyCode::Enter || text.is_empty() => {
                self.odd = None;
                return Effect::Nothing;
            }
            KeyCode::Esc => text.clear(),
            KeyCode::Backspace => drop(text.pop()),
            KeyCode::Char('u') if key.modifiers.contains(KeyModifiers::CONTROL) => text.clear(),
            KeyCode::Char(c) if !key.modifiers.contains(KeyModifiers::CONTROL) => text.push(c),
            _ => {}
        }
        self.odd = Filter::parse(&text).err().map(|problem| problem.message);
        let is_new = self.odd.is_none() && text != self.question.filter;
        if is_new {
            self.question.filter.clone_from(&text);
        }
        self.typed = Some(text);
        if is_new { Effect::Refresh } else { Effect::Nothing }
    }

    /// Asks for confirmation before the selected machine is changed.
    fn ask(&mut self, letter: char) -> Effect {
        let on_page = self.detail().filter(|_| self.page == Page::Detail).map(|(machine, _)| machine);
        let Some(machine) = on_page.or_else(|| self.machines().get(self.chosen()?)) else {
            return Effect::Nothing;
        };
        match question(letter, machine) {
            _ if self.may_change.is_err() => self.said = self.may_change.clone().err(),
            Ok(asked) => self.asked = Some(asked),
            Err(why) => self.said = Some(why),
        }
        Effect::Nothing
    }
}

/// The question before a change, or why the change is not possible.
fn question(letter: char, machine: &Machine) -> Result<Asked, String> {
    let name = machine.name.clone();
    let is_on = machine.state.is_active();
    let written = machine.disk.map_or(0, |disk| disk.ram_used_bytes.saturating_add(disk.disk_used_bytes));
    let lost = if machine.cache.persistent {
        "its disk is persistent".to_owned()
    } else {
        format!("forgets the {} of its write cache", headwater_block::size::format(written))
    };
    match letter {
        's' if is_on => Err(format!("{name} is {}", machine.state)),
        's' => Ok(Asked { verb: "start", text: format!("start {name}?"), name }),
        'S' if !is_on => Err(format!("{name} is {}", machine.state)),
        'S' if machine.state == MachineState::Stopping => Err(format!("{name} is stopping")),
        'S' => Ok(Asked { verb: "stop", text: format!("stop {name}? {lost}"), name }),
        _ if machine.cache.persistent => {
            Ok(Asked { verb: "reset", text: format!("reset {name}? deletes its persistent disk"), name })
        }
        _ => Ok(Asked { verb: "reset", text: format!("reset {name}? {lost}"), name }),
    }
}

/// The growth per second. Counters of a machine that was restarted begin at zero.
fn rates(before: &DiskCounters, now: &DiskCounters, passed_ms: u64) -> Rates {
    let a_second = |before: u64, now: u64| {
        let grown = if now < before { now } else { now - before };
        (u128::from(grown) * 1000 / u128::from(passed_ms)).try_into().unwrap_or(u64::MAX)
    };
    Rates {
        read_bytes: a_second(before.read_bytes, now.read_bytes),
        written_bytes: a_second(before.written_bytes, now.written_bytes),
        spilled_bytes: a_second(before.spilled_bytes, now.spilled_bytes),
    }
}

#[cfg(test)]
pub mod tests;
