//! Lines over a linear axis, such as time, with shaded phases and bands.

use std::fmt::Write;

use super::{colour, escape, tick_label, tick_step};

/// One line.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// The label in the legend.
    pub label: String,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
    /// The shaded band around the line: x, lower end and upper end of each point, from left to right.
    pub band: Vec<(f64, f64, f64)>,
    /// Whether the figures are from a publication; the line is dashed then.
    pub is_printed: bool,
}

/// A labelled range of the horizontal axis.
#[derive(Clone, Debug)]
pub struct Phase {
    /// The name of the phase.
    pub label: String,
    /// The value on the horizontal axis at which the phase begins.
    pub from: f64,
    /// The value at which the phase ends.
    pub to: f64,
}

/// A chart of lines over a horizontal axis of numbers. Both axes begin at zero.
#[derive(Clone, Debug, Default)]
pub struct LineChart {
    /// The title of the horizontal axis, with its unit.
    pub x_axis: String,
    /// The title of the vertical axis, with its unit.
    pub y_axis: String,
    /// The lines.
    pub lines: Vec<Line>,
    /// Phases of the horizontal axis; every second phase has another shade.
    pub phases: Vec<Phase>,
}

const WIDTH: f64 = 960.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 250.0;
const TOP: f64 = 34.0;
const HEIGHT: f64 = 220.0;

/// Converts values to positions.
struct Axes {
    x_end: f64,
    y_end: f64,
}

impl Axes {
    fn x(&self, x: f64) -> f64 {
        LEFT + x / self.x_end * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        TOP + (1.0 - y / self.y_end) * HEIGHT
    }

    fn point(&self, x: f64, y: f64) -> String {
        format!("{:.1},{:.1}", self.x(x), self.y(y))
    }
}

impl LineChart {
    fn axes(&self) -> (Axes, f64, f64) {
        let points = self.lines.iter().flat_map(|series| &series.points).copied();
        let tops = self.lines.iter().flat_map(|series| &series.band).map(|(x, _, high)| (*x, *high));
        let (x_end, y_end) = points
            .chain(tops)
            .fold((0.0_f64, 0.0_f64), |(x_end, y_end), (x, y)| (x_end.max(x), y_end.max(y)));
        let (x_end, y_end) = (if x_end > 0.0 { x_end } else { 1.0 }, if y_end > 0.0 { y_end } else { 1.0 });
        let (x_step, y_step) = (tick_step(x_end, 9.0), tick_step(y_end, 5.0));
        (Axes { x_end, y_end: (y_end / y_step).ceil() * y_step }, x_step, y_step)
    }

    /// The chart as an SVG element.
    pub fn svg(&self) -> String {
        let (axes, x_step, y_step) = self.axes();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {:.0}\" role=\"img\" aria-label=\"{}\">\n",
            TOP + HEIGHT + 48.0,
            escape(&self.y_axis)
        );
        self.phases(&mut svg, &axes);
        self.grid(&mut svg, &axes, x_step, y_step);
        // A line has the same colour in all charts of a page, even if another line has no points in this chart.
        let drawn = self.lines.iter().enumerate().filter(|(_, line)| !line.points.is_empty());
        for (row, (number, series)) in drawn.enumerate() {
            let class = colour(number);
            if !series.band.is_empty() {
                let low = series.band.iter().map(|(x, low, _)| axes.point(*x, *low));
                let high = series.band.iter().rev().map(|(x, _, high)| axes.point(*x, *high));
                let points: Vec<String> = low.chain(high).collect();
                let _ = writeln!(svg, "<polygon class=\"band {class}\" points=\"{}\"/>", points.join(" "));
            }
            let points: Vec<String> = series.points.iter().map(|(x, y)| axes.point(*x, *y)).collect();
            let dashed = if series.is_printed { " dashed" } else { "" };
            let y = TOP + 14.0 + 24.0 * row as f64;
            let _ = writeln!(
                svg,
                "<polyline class=\"curve {class}{dashed}\" points=\"{}\"/>\
                 <rect class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"16\" height=\"4\"/>\
                 <text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
                points.join(" "),
                WIDTH - RIGHT + 18.0,
                y - 6.0,
                WIDTH - RIGHT + 42.0,
                escape(&series.label)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Draws the phases: a shaded rectangle and a centred label each. Writing to a string cannot fail.
    fn phases(&self, svg: &mut String, axes: &Axes) {
        for (number, phase) in self.phases.iter().enumerate() {
            let (from, to) = (axes.x(phase.from.min(axes.x_end)), axes.x(phase.to.min(axes.x_end)));
            let shade = if number % 2 == 0 { "phase" } else { "phase odd" };
            let _ = writeln!(
                svg,
                "<rect class=\"{shade}\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{HEIGHT}\"/>\
                 <text class=\"quiet\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                to - from,
                f64::midpoint(from, to),
                TOP - 6.0,
                escape(&phase.label)
            );
        }
    }

    fn grid(&self, svg: &mut String, axes: &Axes, x_step: f64, y_step: f64) {
        let bottom = TOP + HEIGHT;
        for tick in 0..=(axes.y_end / y_step).round() as usize {
            let value = tick as f64 * y_step;
            let y = axes.y(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"quiet\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.0,
                tick_label(value, y_step)
            );
        }
        for tick in 0..=(axes.x_end / x_step).floor() as usize {
            let value = tick as f64 * x_step;
            let _ = writeln!(
                svg,
                "<text class=\"quiet\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                axes.x(value),
                bottom + 18.0,
                tick_label(value, x_step)
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"quiet\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\
             <text class=\"quiet\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            bottom + 38.0,
            escape(&self.x_axis),
            WIDTH - RIGHT + 18.0,
            TOP - 6.0,
            escape(&self.y_axis)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_lie_between_the_axes_and_phases_are_named() {
        let series = Line {
            label: "a < b".into(),
            points: vec![(0.0, 0.0), (50.0, 10.0)],
            band: vec![(0.0, 0.0, 1.0), (50.0, 9.0, 10.0)],
            is_printed: true,
        };
        let phases = vec![Phase { label: "boot".into(), from: 0.0, to: 25.0 }];
        let chart = LineChart { x_axis: "s".into(), y_axis: "IOPS".into(), lines: vec![series], phases };
        let svg = chart.svg();
        let right = WIDTH - RIGHT;
        assert!(
            svg.contains(&format!("points=\"{LEFT:.1},{:.1} {right:.1},{TOP:.1}\"", TOP + HEIGHT)),
            "{svg}"
        );
        assert!(svg.contains(">boot</text>") && svg.contains("a &lt; b") && svg.contains("curve c0 dashed"));
        let middle = (right - LEFT) / 2.0;
        assert!(svg.contains(&format!("width=\"{middle:.1}\" height=\"{HEIGHT}\"")), "{svg}");
        assert!(svg.contains(">10</text>") && !svg.contains("NaN"));
    }

    #[test]
    fn a_line_without_points_is_unlabelled_but_keeps_its_colour() {
        let line = |label: &str, points: &[(f64, f64)]| Line {
            label: label.into(),
            points: points.to_vec(),
            ..Line::default()
        };
        let lines = vec![line("absent", &[]), line("there", &[(0.0, 1.0), (1.0, 2.0)])];
        let svg = LineChart { lines, ..LineChart::default() }.svg();
        assert!(!svg.contains("absent") && svg.contains("curve c1") && svg.contains("there"), "{svg}");
    }

    #[test]
    fn a_chart_without_points_has_axes() {
        assert!(!LineChart { lines: vec![Line::default()], ..LineChart::default() }.svg().contains("NaN"));
    }
}
