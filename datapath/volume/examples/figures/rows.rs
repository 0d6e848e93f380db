//! Rows of results, each with a goal and whether it was reached: as a table for people, and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

/// The goal of a figure.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// Less is better.
    AtMost(f64),
    /// More is better.
    AtLeast(f64),
    /// No goal: for information.
    None,
}

impl Goal {
    fn is_reached(self, value: f64) -> Option<bool> {
        match self {
            Self::AtMost(goal) => Some(value <= goal),
            Self::AtLeast(goal) => Some(value >= goal),
            Self::None => None,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtMost(goal) => format!("<= {goal}"),
            Self::AtLeast(goal) => format!(">= {goal}"),
            Self::None => "-".into(),
        }
    }
}

/// Measurements of one kind, whose median counts.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    pub name: String,
    pub median: f64,
    pub samples: Vec<f64>,
}

impl Series {
    pub fn new(name: impl Into<String>, samples: Vec<f64>) -> Self {
        Self { name: name.into(), median: median(&samples), samples }
    }
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub case: &'static str,
    pub figure: String,
    /// The figure to which the goal applies.
    pub value: f64,
    pub unit: &'static str,
    pub goal: Goal,
    pub reached: Option<bool>,
    /// The measurements from which it was computed, with their unit; empty if it was measured once.
    pub from: Vec<Series>,
    pub from_unit: &'static str,
}

impl Row {
    /// A figure that was measured as it is.
    pub fn plain(
        case: &'static str,
        figure: impl Into<String>,
        value: f64,
        unit: &'static str,
        goal: Goal,
    ) -> Self {
        let reached = goal.is_reached(value);
        Self { case, figure: figure.into(), value, unit, goal, reached, from: Vec::new(), from_unit: "" }
    }

    /// A figure that this machine is too small for.
    pub fn missing(case: &'static str, figure: impl Into<String>, goal: Goal) -> Self {
        Self { reached: None, ..Self::plain(case, figure, f64::NAN, "", goal) }
    }

    /// The ratio of a limit that was reached, by the medians of rounds in which both ran. It is a ratio of
    /// speeds: the limit's time divided by ours.
    pub fn part(
        case: &'static str,
        figure: impl Into<String>,
        (ours, limit): (Series, Series),
        from_unit: &'static str,
        goal: Goal,
    ) -> Self {
        let value = limit.median / ours.median;
        Self { from: vec![ours, limit], from_unit, ..Self::plain(case, figure, value, "x", goal) }
    }

    /// How much the most expensive of some sizes differs from the first one, by their medians.
    pub fn growth(
        case: &'static str,
        figure: impl Into<String>,
        from: Vec<Series>,
        from_unit: &'static str,
        goal: Goal,
    ) -> Self {
        let first = from.first().map_or(f64::NAN, |series| series.median);
        let value = from.iter().skip(1).map(|series| series.median / first).fold(0.0, f64::max);
        Self { from, from_unit, ..Self::plain(case, figure, value, "x", goal) }
    }

    fn measured(&self) -> String {
        let parts: Vec<String> =
            self.from.iter().map(|series| format!("{} {}", series.name, number(series.median))).collect();
        if parts.is_empty() { "-".into() } else { format!("{} {}", parts.join(", "), self.from_unit) }
    }

    fn cells(&self) -> [String; 6] {
        let reached = match self.reached {
            Some(true) => "yes",
            Some(false) => "NO",
            None if self.value.is_nan() => "not measured",
            None => "-",
        };
        [
            self.case.into(),
            self.figure.clone(),
            self.measured(),
            if self.value.is_nan() { "-".into() } else { format!("{} {}", number(self.value), self.unit) },
            self.goal.text(),
            reached.into(),
        ]
    }
}

/// All rows of a run.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub rows: Vec<Row>,
}

impl Report {
    /// Adds a row, and shows it.
    pub fn add(&mut self, row: Row) {
        println!("  {}", row.cells().join("  "));
        self.rows.push(row);
    }

    /// Number of figures that miss their goals.
    pub fn missed(&self) -> usize {
        self.rows.iter().filter(|row| row.reached == Some(false)).count()
    }

    /// Number of figures that have a goal.
    pub fn goals(&self) -> usize {
        self.rows.iter().filter(|row| row.reached.is_some()).count()
    }

    /// All rows; columns as wide as they need.
    pub fn table(&self) -> String {
        let head = ["case", "figure", "measured", "value", "goal", "reached"].map(str::to_owned);
        let lines: Vec<[String; 6]> = std::iter::once(head).chain(self.rows.iter().map(Row::cells)).collect();
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..6).map(width).collect();
        let mut text = String::new();
        for line in &lines {
            let mut row = String::new();
            for (cell, width) in line.iter().zip(&widths) {
                let _ = write!(row, "{cell:<width$}  ");
            }
            text.push_str(row.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Three significant digits or more.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        small if small < 0.1 => format!("{value:.3}"),
        _ => format!("{value:.2}"),
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
