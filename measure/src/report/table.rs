//! Formats the rows as a text table.

use std::fmt::Write as _;

use crate::targets::{Results, Row, Verdict};

const HEAD: [&str; 9] = ["case", "figure", "ours", "rounds", "peer", "theirs", "ratio", "goal", "reached"];

/// Formats all rows with columns of the necessary width, and lists the skipped cases.
pub fn render(results: &Results) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(results.rows.iter().map(cells));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let mut row = String::new();
        for (column, cell) in line.iter().enumerate() {
            let width = widths[column];
            // Figures to the right, words to the left.
            let padded = if matches!(column, 2 | 5 | 6) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            };
            row.push_str(&padded);
            row.push_str("  ");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    for left in &results.left_out {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} was skipped: {}", left.case, left.reason);
    }
    text
}

/// The cells of one row.
pub fn cells(row: &Row) -> [String; 9] {
    let reached = match row.verdict {
        Verdict::NotMeasured => "not measured",
        Verdict::Reached => "yes",
        Verdict::Accepted => "known",
        Verdict::Missed => "NO",
        Verdict::Reported => "-",
    };
    let rounds = match row.range {
        Some((least, greatest)) if row.rounds > 1 => {
            format!("{} ({} to {})", row.rounds, number(Some(least)), number(Some(greatest)))
        }
        _ => row.rounds.to_string(),
    };
    let goal = match row.accepted {
        Some(accepted) => {
            format!("{}, accepted {}: decision {}", row.goal, accepted.bound, accepted.decision)
        }
        None => row.goal.to_string(),
    };
    [
        row.case.clone(),
        row.figure.to_owned(),
        number(row.ours),
        rounds,
        row.peer.clone(),
        number(row.theirs),
        row.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        goal,
        reached.to_owned(),
    ]
}

/// A number with three or more significant digits.
pub fn number(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value >= 100.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::{Goal, LeftOut};

    #[test]
    fn columns_line_up_and_what_is_missing_is_said() {
        let row = |ours: &[f64]| {
            Row::new("overflow-64m", "IOPS", ours, "raw disk", &[90_000.0], Goal::AtLeast(1.3))
        };
        let rows = vec![row(&[120_000.0, 90_000.0, 126_000.0]), row(&[]), row(&[99_000.0]), row(&[81_000.0])];
        let left_out = vec![LeftOut { case: "slow-link".into(), reason: "no line".into() }];
        let text = render(&Results { rows, left_out, ..Results::default() });
        let goal = ">= 1.30, accepted >= 1.00: decision 15";
        let head = "case          figure    ours  rounds               peer      theirs  ratio  goal";
        let lines = [
            format!("{head:<pad$}  reached", pad = head.len() - 4 + goal.len()),
            format!(
                "overflow-64m  IOPS    120000  3 (90000 to 126000)  raw disk   90000   1.33  {goal}  yes"
            ),
            format!(
                "overflow-64m  IOPS         -  0                    raw disk   90000      -  {goal}  not measured"
            ),
            format!(
                "overflow-64m  IOPS     99000  1                    raw disk   90000   1.10  {goal}  known"
            ),
            format!("overflow-64m  IOPS     81000  1                    raw disk   90000   0.90  {goal}  NO"),
            "slow-link was skipped: no line".to_owned(),
            String::new(),
        ];
        assert_eq!(text, lines.join("\n"));
    }
}
