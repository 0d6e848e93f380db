//! Draws curves over a logarithmic axis, such as distributions of latencies.

use std::fmt::Write;

use super::{colour, escape};

/// One line.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Its label.
    pub label: String,
    /// Points from left to right. Points with x <= 0 cannot be drawn on this axis and are skipped.
    pub points: Vec<(f64, f64)>,
    /// Whether the points are drawn as dots without a line between them.
    pub is_dots: bool,
}

/// Curves whose values are between 0 and 1.
#[derive(Clone, Debug)]
pub struct CurveChart {
    /// The title of the horizontal axis.
    pub axis: String,
    /// Formats a value of that axis.
    pub label: fn(f64) -> String,
    /// The lines.
    pub curves: Vec<Curve>,
}

const WIDTH: f64 = 960.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 280.0;
const TOP: f64 = 16.0;
const HEIGHT: f64 = 260.0;

impl CurveChart {
    /// The chart as an SVG element.
    pub fn svg(&self) -> String {
        let x_values =
            self.curves.iter().flat_map(|curve| &curve.points).map(|(x, _)| *x).filter(|x| *x > 0.0);
        let (low, high) = x_values.fold((f64::MAX, 0.0_f64), |(low, high), x| (low.min(x), high.max(x)));
        let (low, high) = if high > 0.0 { (low.log10().floor(), high.log10().ceil()) } else { (0.0, 1.0) };
        let high = high.max(low + 1.0);
        let x_of = |x: f64| LEFT + (x.log10() - low) / (high - low) * (WIDTH - LEFT - RIGHT);
        let y_of = |y: f64| TOP + (1.0 - y) * HEIGHT;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {:.0}\" role=\"img\" aria-label=\"{}\">\n",
            TOP + HEIGHT + 48.0,
            escape(&self.axis)
        );
        for quarter in 0..=4 {
            let y = y_of(f64::from(quarter) / 4.0);
            // Writing to a string cannot fail.
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"quiet\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{} %</text>",
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.0,
                quarter * 25
            );
        }
        let mut decade = low;
        while decade <= high {
            let value = 10.0_f64.powf(decade);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{TOP}\" y2=\"{1:.1}\"/>\
                 <text class=\"quiet\" text-anchor=\"middle\" x=\"{0:.1}\" y=\"{2:.1}\">{3}</text>",
                x_of(value),
                TOP + HEIGHT,
                TOP + HEIGHT + 18.0,
                escape(&(self.label)(value))
            );
            decade += 1.0;
        }
        let _ = writeln!(
            svg,
            "<text class=\"quiet\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            TOP + HEIGHT + 38.0,
            escape(&self.axis)
        );
        for (number, curve) in self.curves.iter().enumerate() {
            let class = colour(number);
            let places = curve.points.iter().filter(|(x, _)| *x > 0.0).map(|(x, y)| (x_of(*x), y_of(*y)));
            if curve.is_dots {
                for (x, y) in places {
                    let _ = writeln!(svg, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\"/>");
                }
            } else {
                let points: Vec<String> = places.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let _ = writeln!(svg, "<polyline class=\"curve {class}\" points=\"{}\"/>", points.join(" "));
            }
            let y = TOP + 14.0 + 24.0 * number as f64;
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"16\" height=\"4\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                WIDTH - RIGHT + 18.0,
                y - 6.0,
                WIDTH - RIGHT + 42.0,
                y,
                escape(&curve.label)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decades_are_equally_wide() {
        let curve = Curve {
            label: "a & b".into(),
            points: vec![(0.0, 0.0), (10.0, 0.5), (1000.0, 1.0)],
            is_dots: false,
        };
        let chart = CurveChart { axis: "us".into(), label: |x| format!("{x:.0}"), curves: vec![curve] };
        let svg = chart.svg();
        let (left, right) = (LEFT, WIDTH - RIGHT);
        let points = format!("points=\"{left:.1},{:.1} {right:.1},{TOP:.1}\"", TOP + HEIGHT / 2.0);
        assert!(svg.contains(&points), "{points} in {svg}");
        let middle = format!("x=\"{:.1}\"", f64::midpoint(left, right));
        assert!(svg.contains(&middle) && svg.contains(">100</text>") && svg.contains("a &amp; b"), "{svg}");
    }
}
