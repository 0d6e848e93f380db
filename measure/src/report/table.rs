//! The rows as text in columns.

use crate::targets::{Results, Row};

const HEAD: [&str; 8] = ["case", "figure", "ours", "peer", "theirs", "ratio", "goal", "reached"];

/// All rows; columns as wide as they need.
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
            let padded = if matches!(column, 2 | 4 | 5) {
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
    text
}

/// The cells of one row.
pub fn cells(row: &Row) -> [String; 8] {
    let reached = match (row.ratio, row.reached) {
        (None, _) => "not measured",
        (_, Some(true)) => "yes",
        (_, Some(false)) => "NO",
        (_, None) => "-",
    };
    [
        row.case.clone(),
        row.figure.to_owned(),
        number(row.ours),
        row.peer.clone(),
        number(row.theirs),
        row.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        row.goal.to_string(),
        reached.to_owned(),
    ]
}

/// Three or more significant digits.
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
    use crate::targets::Goal;

    #[test]
    fn columns_line_up_and_what_is_missing_is_said() {
        let row = |ours, ratio, reached| Row {
            case: "overflow-64m".into(),
            figure: "IOPS",
            ours,
            peer: "raw disk".into(),
            theirs: Some(90_000.0),
            ratio,
            goal: Goal::AtLeast(1.3),
            reached,
        };
        let rows = vec![row(Some(120_000.0), Some(1.33), Some(true)), row(None, None, None)];
        let text = render(&Results { rows, ..Results::default() });
        assert_eq!(
            text,
            "case          figure    ours  peer      theirs  ratio  goal     reached\n\
             overflow-64m  IOPS    120000  raw disk   90000   1.33  >= 1.30  yes\n\
             overflow-64m  IOPS         -  raw disk   90000      -  >= 1.30  not measured\n"
        );
    }
}
