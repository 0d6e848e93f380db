//! Draws the screen: the host at the top, the machines or the page of one machine below, the keys at the bottom.
//!
//! Only the terminal's 16 colours are used, and colour is never the only sign: the screen is readable on every
//! background, and with `NO_COLOR`.

use headwater_api::{CacheMode, Machine, MachineState};
use headwater_block::size;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};

use super::model::{Page, Top};
use super::text::{bar, duration, short_bytes};
use crate::show::machines::{ram_limit_bytes, version};
use crate::show::{printable, seconds, time};

/// The width of bars in the table and of the host's bars, in cells.
const BAR: usize = 8;
const HOST_BAR: usize = 20;

/// The most alarms above the table.
const ALARMS_MAX: usize = 3;

/// The smallest terminal on which anything is drawn.
const MIN_SIZE: (u16, u16) = (30, 8);

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// The style that the terminal supports.
#[derive(Clone, Copy, Debug)]
pub struct Palette {
    /// Whether colours are used.
    pub colours: bool,
    /// Whether only ASCII is used.
    pub plain: bool,
}

impl Palette {
    /// The style from the environment.
    pub fn of_terminal() -> Self {
        let is_set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(is_set).unwrap_or_default();
        let locale = locale.to_string_lossy().to_ascii_lowercase();
        Self {
            colours: is_set("NO_COLOR").is_none() && is_set("TERM").is_none_or(|term| term != "dumb"),
            plain: !(locale.contains("utf-8") || locale.contains("utf8")),
        }
    }

    fn colour(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// A bar; a bar that is nearly full is highlighted if `warns`.
    fn bar(self, used: u64, whole: u64, cells: usize, warns: bool) -> Vec<Span<'static>> {
        let (filled, empty) = bar(used, whole, cells, self.plain);
        let is_full = warns && whole > 0 && used >= whole / 10 * 9;
        let colour = if is_full { self.colour(Color::Red) } else { self.colour(Color::Cyan) };
        vec![Span::styled(filled, colour), Span::styled(empty, DIM)]
    }

    fn state(self, machine: &Machine) -> Span<'static> {
        let style = match machine.state {
            MachineState::Running => self.colour(Color::Green),
            MachineState::Starting | MachineState::Booting | MachineState::Stopping => {
                self.colour(Color::Yellow)
            }
            MachineState::Crashed | MachineState::Lost | MachineState::Unknown => {
                self.colour(Color::Red).add_modifier(Modifier::BOLD)
            }
            MachineState::Created | MachineState::Stopped => DIM,
        };
        Span::styled(machine.state.name(), style)
    }
}

/// Draws the screen.
pub fn draw(frame: &mut Frame<'_>, top: &Top, now_ms: u64, palette: &Palette) {
    let area = frame.area();
    if area.width < MIN_SIZE.0 || area.height < MIN_SIZE.1 {
        frame.render_widget(Paragraph::new("the terminal is too small; q leaves"), area);
        return;
    }
    let head = head(top, now_ms, palette, usize::from(area.width));
    let alarms = alarms(top, palette);
    let heights = [
        Constraint::Length(u16::try_from(head.len()).unwrap_or(u16::MAX)),
        Constraint::Length(u16::try_from(alarms.len()).unwrap_or(u16::MAX)),
        Constraint::Fill(1),
        Constraint::Length(1),
    ];
    let [above, warned, middle, below] = Layout::vertical(heights).areas(area);
    frame.render_widget(Paragraph::new(head), above);
    frame.render_widget(Paragraph::new(alarms), warned);
    match top.page {
        Page::Machines => table(frame, middle, top, palette),
        Page::Detail => {
            frame.render_widget(Paragraph::new(detail(top, palette)).wrap(Wrap { trim: false }), middle)
        }
        Page::Help => frame.render_widget(Paragraph::new(help()).wrap(Wrap { trim: false }), middle),
    }
    frame.render_widget(Paragraph::new(foot(top, now_ms, palette)), below);
}

/// The host, in three lines.
fn head(top: &Top, now_ms: u64, palette: &Palette, width: usize) -> Vec<Line<'static>> {
    let Some(status) = top.status() else { return vec![Line::raw("asking the daemon ..")] };
    let passed_ms = now_ms.saturating_sub(status.started_at_ms);
    let mut first = vec![
        Span::styled(format!("headwater {}", status.version), BOLD),
        Span::raw(format!("  up {}  ", duration(passed_ms / 1000))),
        Span::styled(format!("{} of {} machines on", status.machines_active, status.machines), BOLD),
    ];
    if status.tasks_running + status.tasks_waiting > 0 {
        first.push(Span::raw(format!("  {} tasks run, {} wait", status.tasks_running, status.tasks_waiting)));
    }
    if !status.alarms.is_empty() {
        let plural = if status.alarms.len() == 1 { "" } else { "s" };
        let text = format!("  {} alarm{plural}", status.alarms.len());
        first.push(Span::styled(text, palette.colour(Color::Red).add_modifier(Modifier::BOLD)));
    }
    if top.is_paused() {
        first.push(Span::styled("  paused", palette.colour(Color::Yellow).add_modifier(Modifier::BOLD)));
    }
    let ram = status.host_ram;
    let cells = HOST_BAR.min(width / 4);
    let mut memory = vec![Span::raw("cache RAM   ")];
    memory.extend(palette.bar(ram.used_bytes, ram.configured_bytes, cells, false));
    memory.push(Span::raw(format!(" {} of {}", size::format(ram.used_bytes), size::format(ram.limit_bytes))));
    if ram.limit_bytes < ram.configured_bytes {
        let text = format!(", lowered from {}", size::format(ram.configured_bytes));
        memory.push(Span::styled(text, palette.colour(Color::Yellow)));
    }
    let mut disk = vec![Span::raw("cache disk  ")];
    let whole = status.disk_used_bytes.saturating_add(status.free_bytes);
    disk.extend(palette.bar(status.disk_used_bytes, whole, cells, true));
    let (used, free) = (size::format(status.disk_used_bytes), size::format(status.free_bytes));
    disk.push(Span::raw(format!(" {used}, {free} free")));
    vec![Line::from(first), Line::from(memory), Line::from(disk)]
}

fn alarms(top: &Top, palette: &Palette) -> Vec<Line<'static>> {
    let Some(status) = top.status() else { return Vec::new() };
    let style = palette.colour(Color::Red);
    let mut lines: Vec<Line<'static>> = status
        .alarms
        .iter()
        .take(ALARMS_MAX)
        .map(|alarm| {
            let text = format!("! {} since {}: {}", alarm.subject, time(alarm.since_ms), alarm.message);
            Line::from(vec![
                Span::styled(printable(&text), style),
                Span::raw(printable(&format!("; {}", alarm.advice))),
            ])
        })
        .collect();
    if status.alarms.len() > ALARMS_MAX {
        let more = status.alarms.len() - ALARMS_MAX;
        lines.push(Line::styled(format!("! {more} more: headwater status"), style));
    }
    lines.push(Line::raw(""));
    lines
}

/// A column of the table: its heading, its width, and the width of the terminal from which on it is shown.
struct Column {
    heading: &'static str,
    width: Constraint,
    from: u16,
    cell: fn(&Top, &Machine, &Palette) -> Line<'static>,
}

const COLUMNS: [Column; 9] = [
    Column {
        heading: "MACHINE",
        width: Constraint::Fill(1),
        from: 0,
        cell: |_, m, palette| name(m, palette),
    },
    Column {
        heading: "STATE",
        width: Constraint::Length(8),
        from: 0,
        cell: |_, m, palette| palette.state(m).into(),
    },
    Column { heading: "RAM", width: Constraint::Length(16), from: 0, cell: |_, m, palette| ram(m, palette) },
    Column {
        heading: "DISK",
        width: Constraint::Length(16),
        from: 52,
        cell: |_, m, palette| disk(m, palette),
    },
    Column { heading: "   IOPS", width: Constraint::Length(7), from: 62, cell: |_, m, _| iops(m) },
    Column {
        heading: "WRITE/S",
        width: Constraint::Length(8),
        from: 76,
        cell: |top, m, _| rate(top.rates(m).map(|rates| rates.written_bytes), m),
    },
    Column {
        heading: "SPILL/S",
        width: Constraint::Length(8),
        from: 88,
        cell: |top, m, _| rate(top.rates(m).map(|rates| rates.spilled_bytes), m),
    },
    Column {
        heading: "BOOT S",
        width: Constraint::Length(6),
        from: 98,
        cell: |_, m, _| right(m.boot_ms.map_or_else(none, seconds), 6),
    },
    Column {
        heading: "VERSION",
        width: Constraint::Length(22),
        from: 110,
        cell: |_, m, _| Line::raw(version(m)),
    },
];

fn table(frame: &mut Frame<'_>, area: Rect, top: &Top, palette: &Palette) {
    let columns: Vec<&Column> = COLUMNS.iter().filter(|column| area.width >= column.from).collect();
    let sorted = match top.sort() {
        headwater_api::MachineSort::Name => vec!["MACHINE"],
        headwater_api::MachineSort::State => vec!["STATE"],
        headwater_api::MachineSort::Ram => vec!["RAM"],
        headwater_api::MachineSort::Disk => vec!["DISK"],
        headwater_api::MachineSort::Cache => vec!["RAM", "DISK"],
        headwater_api::MachineSort::Iops => vec!["   IOPS"],
        headwater_api::MachineSort::Boot => vec!["BOOT S"],
    };
    let headings = columns.iter().map(|column| {
        let style =
            if sorted.contains(&column.heading) { BOLD.add_modifier(Modifier::UNDERLINED) } else { BOLD };
        let indent = column.heading.len() - column.heading.trim_start().len();
        Cell::from(Line::from(vec![
            Span::raw(" ".repeat(indent)),
            Span::styled(column.heading.trim_start(), style),
        ]))
    });
    let rows = top.machines().iter().map(|machine| {
        Row::new(columns.iter().map(|column| Cell::from((column.cell)(top, machine, palette))))
    });
    if top.machines().is_empty() {
        let text = if top.filter().is_empty() {
            "There are no machines yet: headwater machine create NAME IMAGE".to_owned()
        } else {
            format!("No machine matches {}; Esc clears the filter", printable(top.filter()))
        };
        frame.render_widget(Paragraph::new(text), area);
        return;
    }
    let widths = columns.iter().map(|column| column.width);
    let table = Table::new(rows, widths)
        .header(Row::new(headings))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(top.chosen());
    frame.render_stateful_widget(table, area, &mut state);
}

fn none() -> String {
    "-".to_owned()
}

fn right(text: String, width: usize) -> Line<'static> {
    Line::raw(format!("{text:>width$}"))
}

fn name(machine: &Machine, palette: &Palette) -> Line<'static> {
    let mut spans = vec![Span::raw(machine.name.clone())];
    if machine.alarm.is_some() {
        spans.push(Span::styled(" !", palette.colour(Color::Red).add_modifier(Modifier::BOLD)));
    }
    Line::from(spans)
}

fn ram(machine: &Machine, palette: &Palette) -> Line<'static> {
    let used = machine.disk.map(|disk| disk.ram_used_bytes);
    // Full RAM is normal if the rest goes to disk.
    part(used, ram_limit_bytes(&machine.cache), machine.cache.mode == CacheMode::Ram, palette)
}

fn disk(machine: &Machine, palette: &Palette) -> Line<'static> {
    if machine.cache.mode == CacheMode::Ram {
        return Line::styled("none", DIM);
    }
    part(machine.disk.map(|disk| disk.disk_used_bytes), machine.cache.disk_bytes, true, palette)
}

fn part(used: Option<u64>, limit: u64, warns: bool, palette: &Palette) -> Line<'static> {
    let Some(used) = used else { return Line::styled(format!("{:>15}", none()), DIM) };
    let mut spans = palette.bar(used, limit, BAR, warns);
    spans.push(Span::raw(format!("{:>7}", short_bytes(used))));
    Line::from(spans)
}

fn iops(machine: &Machine) -> Line<'static> {
    right(machine.disk.map_or_else(none, |disk| disk.iops.to_string()), 7)
}

fn rate(bytes: Option<u64>, machine: &Machine) -> Line<'static> {
    match bytes {
        Some(bytes) => right(short_bytes(bytes), 7),
        // The rate is unknown until the second refresh.
        None if machine.disk.is_some() => right(String::new(), 7),
        None => right(none(), 7),
    }
}

/// The page of one machine.
fn detail(top: &Top, palette: &Palette) -> Vec<Line<'static>> {
    let Some((machine, events)) = top.detail() else {
        return vec![Line::raw("asking for the machine, or it was removed; Esc goes back")];
    };
    let fact = |name: &str, value: String| {
        Line::from(vec![Span::styled(format!("{name:<14}"), DIM), Span::raw(printable(&value))])
    };
    let mut lines = vec![Line::from(vec![
        Span::styled(machine.name.clone(), BOLD),
        Span::raw("  "),
        palette.state(machine),
        Span::raw(format!("  {}", version(machine))),
    ])];
    if let Some(reason) = &machine.reason {
        lines.push(fact("reason", reason.clone()));
    }
    if let Some(alarm) = &machine.alarm {
        lines.push(fact("alarm", alarm.to_string()));
    }
    let cache = |label: &str, used: Option<u64>, limit: u64| {
        let mut spans = vec![Span::styled(format!("{label:<14}"), DIM)];
        match used {
            Some(used) => {
                spans.extend(palette.bar(used, limit, HOST_BAR, label == "cache disk"));
                spans.push(Span::raw(format!(" {} of {}", size::format(used), size::format(limit))));
            }
            None => spans.push(Span::raw(format!("up to {}", size::format(limit)))),
        }
        Line::from(spans)
    };
    lines.push(cache("cache RAM", machine.disk.map(|d| d.ram_used_bytes), ram_limit_bytes(&machine.cache)));
    if machine.cache.mode != CacheMode::Ram {
        lines.push(cache("cache disk", machine.disk.map(|d| d.disk_used_bytes), machine.cache.disk_bytes));
    }
    if let Some(disk) = machine.disk {
        let rates = top.rates(machine).unwrap_or_default();
        let counted =
            |total: u64, rate: u64| format!("{}, {} a second", size::format(total), size::format(rate));
        lines.push(fact("read", counted(disk.read_bytes, rates.read_bytes)));
        lines.push(fact("of the image", size::format(disk.image_read_bytes)));
        lines.push(fact("written", counted(disk.written_bytes, rates.written_bytes)));
        lines.push(fact("spilled", counted(disk.spilled_bytes, rates.spilled_bytes)));
        lines.push(fact("requests", format!("{} a second", disk.iops)));
        if disk.pauses > 0 {
            lines.push(fact("paused writes", disk.pauses.to_string()));
        }
    }
    if let Some(boot_ms) = machine.boot_ms {
        lines.push(fact("boot", format!("{} s", seconds(boot_ms))));
    }
    lines.push(fact(
        "guest",
        format!("{} of memory, {} processors", size::format(machine.memory_bytes), machine.cpus),
    ));
    if let Some(catalog) = &machine.catalog {
        lines.push(fact("catalog", catalog.clone()));
    }
    lines.push(Line::raw(""));
    for event in events {
        let what = format!("  {} {}  ({})", event.action, event.detail, event.caller);
        lines.push(Line::from(vec![Span::styled(time(event.at_ms), DIM), Span::raw(printable(&what))]));
    }
    lines
}

fn help() -> Vec<Line<'static>> {
    let keys = [
        ("/", "filter, as for 'machine list': state:running version:old ram>80% -name:test-*"),
        ("< >", "sort by another column; the largest is first"),
        ("j k arrows", "choose a machine; also g G PageUp PageDown"),
        ("Enter", "the machine's page; Esc goes back"),
        ("s S R", "start, stop, reset the machine; y confirms"),
        ("p", "pause: the figures stay as they are"),
        ("q Ctrl-C", "leave"),
    ];
    let mut lines = vec![Line::styled("Keys", BOLD)];
    lines.extend(keys.map(|(key, what)| Line::raw(format!("  {key:<12}{what}"))));
    lines.push(Line::raw(""));
    lines.push(Line::raw("RAM and DISK show the use of the write cache and its limit. ! marks an alarm."));
    lines.push(Line::raw("Any key closes this."));
    lines
}

/// The last line: a question, the filter that is being typed, an error, or the keys.
fn foot(top: &Top, now_ms: u64, palette: &Palette) -> Line<'static> {
    let red = palette.colour(Color::Red).add_modifier(Modifier::BOLD);
    if let Some(asked) = &top.asked {
        let style = palette.colour(Color::Yellow).add_modifier(Modifier::BOLD);
        return Line::from(vec![
            Span::styled(asked.text.clone(), style),
            Span::raw("  y: yes, any other key: no"),
        ]);
    }
    if let Some(typed) = &top.typed {
        let mut spans = vec![Span::styled("/", BOLD), Span::raw(printable(typed)), Span::raw("_")];
        if let Some(odd) = &top.odd {
            spans.push(Span::styled(format!("  {}", printable(odd)), red));
        }
        return Line::from(spans);
    }
    if let Some((why, age_s)) = top.stale(now_ms) {
        return Line::styled(format!("figures of {} ago: {}", duration(age_s), printable(why)), red);
    }
    if let Some(said) = top.said() {
        return Line::raw(printable(said));
    }
    let (matching, total) = top.counts();
    let shown = top.machines().len() as u64;
    let mut spans = Vec::new();
    if !top.filter().is_empty() {
        spans.push(Span::styled(format!("/{}  ", printable(top.filter())), BOLD));
    }
    if matching < total {
        spans.push(Span::raw(format!("{matching} of {total}  ")));
    }
    if shown < matching {
        spans.push(Span::raw(format!("first {shown}  ")));
    }
    spans.push(Span::styled("? help  / filter  < > sort  Enter page  q leave", DIM));
    Line::from(spans)
}

#[cfg(test)]
mod tests;
