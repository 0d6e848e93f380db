//! Draws groups of horizontal bars. Each group has a pale bar for the published value (the ghost), and a bar for each
//! series with its interval and samples. Amounts begin at zero. Ratios begin at 1 on a logarithmic axis, so 2 and 0.5
//! are equally far from 1.

use std::fmt::Write;

use super::{colour, escape, tick_label, tick_step};

/// One bar.
#[derive(Clone, Debug, Default)]
pub struct Bar {
    /// Its length: the median. `None`: not measured.
    pub value: Option<f64>,
    /// The ends of the whisker.
    pub interval: Option<(f64, f64)>,
    /// Each sample, as a dot.
    pub samples: Vec<f64>,
}

/// Bars with one label.
#[derive(Clone, Debug)]
pub struct Group {
    /// The label.
    pub label: String,
    /// A second line of the label.
    pub note: String,
    /// The published value.
    pub printed: Option<f64>,
    /// A bar of each series.
    pub bars: Vec<Bar>,
}

/// The meaning of a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From zero.
    Amounts,
    /// From 1: to the right for values above 1, to the left for values below 1.
    Ratios,
}

/// The data of a chart.
#[derive(Clone, Debug)]
pub struct BarChart {
    /// The meaning of a length.
    pub scale: Scale,
    /// The title of the axis.
    pub axis: String,
    /// A reference line: its value and its name.
    pub reference: Option<(f64, String)>,
    /// The name of the ghosts in the legend.
    pub printed: String,
    /// Names of the series.
    pub series: Vec<String>,
    /// The groups, from the top.
    pub groups: Vec<Group>,
    /// Digits after the decimal point.
    pub digits: usize,
}

const WIDTH: f64 = 960.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 58.0;
const BAR: f64 = 16.0;
const PITCH: f64 = 20.0;
const GAP: f64 = 18.0;

/// Converts values to positions.
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        match scale {
            Scale::Amounts => Self { scale, low: 0.0, high: if high > 0.0 { high * 1.04 } else { 1.0 } },
            Scale::Ratios => Self { scale, low: low.min(0.5) / 1.15, high: high.max(2.0) * 1.1 },
        }
    }

    fn x(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Amounts => value / self.high,
            Scale::Ratios => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        };
        LEFT + place * (WIDTH - LEFT - RIGHT)
    }

    /// The position at which bars begin.
    fn origin(&self) -> f64 {
        self.x(if self.scale == Scale::Ratios { 1.0 } else { 0.0 })
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        if self.scale == Scale::Ratios {
            let steps =
                [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0];
            let inside = steps.into_iter().filter(|step| (self.low..=self.high).contains(step));
            return inside.map(|step| (step, format!("{step} x"))).collect();
        }
        let step = tick_step(self.high, 9.0);
        let values = (0..=9).map(|number| f64::from(number) * step).filter(|value| *value <= self.high);
        values.map(|value| (value, tick_label(value, step))).collect()
    }
}

/// Draws a rectangle between two positions, in the colour of a class.
fn bar(svg: &mut String, class: &str, from: f64, to: f64, y: f64) {
    // Writing to a string cannot fail.
    let _ = write!(
        svg,
        "<rect class=\"{class}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"2\"/>",
        from.min(to),
        (to - from).abs()
    );
}

impl BarChart {
    /// The chart as an SVG element.
    pub fn svg(&self) -> String {
        let values = |bar: &Bar| bar.samples.iter().copied().chain(bar.value).collect::<Vec<f64>>();
        let all =
            self.groups.iter().flat_map(|group| group.bars.iter().flat_map(values).chain(group.printed));
        let axis = Axis::new(self.scale, all.chain(self.reference.as_ref().map(|(value, _)| *value)));
        let rows = |group: &Group| (group.bars.len() + usize::from(group.printed.is_some())) as f64;
        let bottom: f64 = TOP + self.groups.iter().map(|group| rows(group) * PITCH + GAP).sum::<f64>();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {:.0}\" role=\"img\" aria-label=\"{}\">\n",
            bottom + 44.0,
            escape(&self.axis)
        );
        self.legend(&mut svg);
        self.axis(&mut svg, &axis, bottom);
        let mut y = TOP + GAP / 2.0;
        for group in &self.groups {
            group.draw(&mut svg, &axis, y, rows(group) * PITCH, self.digits);
            y += rows(group) * PITCH + GAP;
        }
        if let Some((value, name)) = &self.reference {
            let x = axis.x(*value);
            let _ = writeln!(
                svg,
                "<line class=\"reference\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\"/>\
                 <text class=\"strong\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
                TOP - 6.0,
                TOP - 11.0,
                escape(name)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn legend(&self, svg: &mut String) {
        let mut x = LEFT;
        let printed = (!self.printed.is_empty()).then(|| ("ghost".to_owned(), &self.printed));
        let series = self.series.iter().enumerate().map(|(number, name)| (colour(number), name));
        for (class, name) in printed.into_iter().chain(series) {
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"8\" width=\"16\" height=\"12\" rx=\"2\"/>\
                 <text x=\"{:.1}\" y=\"18\">{}</text>",
                x + 22.0,
                escape(name)
            );
            x += 48.0 + 7.2 * name.chars().count() as f64;
        }
    }

    fn axis(&self, svg: &mut String, axis: &Axis, bottom: f64) {
        for (value, label) in axis.ticks() {
            let x = axis.x(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\"/>\
                 <text class=\"quiet\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{:.1}\">{label}</text>",
                bottom + 17.0
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"quiet\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            bottom + 36.0,
            escape(&self.axis)
        );
    }
}

impl Group {
    fn draw(&self, svg: &mut String, axis: &Axis, top: f64, height: f64, digits: usize) {
        let middle = top + height / 2.0;
        let _ = writeln!(
            svg,
            "<text class=\"strong\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\
             <text class=\"quiet\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT - 12.0,
            middle - 3.0,
            escape(&self.label),
            LEFT - 12.0,
            middle + 13.0,
            escape(&self.note)
        );
        let mut y = top;
        if let Some(printed) = self.printed {
            let (origin, end) = (axis.origin(), axis.x(printed));
            bar(svg, "ghost", origin, end, y);
            let _ = writeln!(
                svg,
                "<text class=\"quiet\" x=\"{:.1}\" y=\"{:.1}\">{printed:.digits$}</text>",
                origin.max(end) + 8.0,
                y + 12.5
            );
            y += PITCH;
        }
        for (series, bar) in self.bars.iter().enumerate() {
            bar.draw(svg, axis, y, &colour(series), digits);
            y += PITCH;
        }
    }
}

impl Bar {
    fn draw(&self, svg: &mut String, axis: &Axis, y: f64, class: &str, digits: usize) {
        let Some(value) = self.value else {
            let _ = writeln!(
                svg,
                "<text class=\"quiet\" x=\"{:.1}\" y=\"{:.1}\">not measured</text>",
                axis.origin() + 8.0,
                y + 12.5
            );
            return;
        };
        let middle = y + BAR / 2.0;
        bar(svg, class, axis.origin(), axis.x(value), y);
        if let Some((low, high)) = self.interval.filter(|(low, high)| low < high) {
            let (from, to) = (axis.x(low), axis.x(high));
            let _ = write!(
                svg,
                "<path class=\"whisker\" d=\"M{from:.1} {:.1}v8M{from:.1} {middle:.1}H{to:.1}M{to:.1} {:.1}v8\"/>",
                middle - 4.0,
                middle - 4.0
            );
        }
        for sample in &self.samples {
            let _ = write!(
                svg,
                "<circle class=\"sample\" cx=\"{:.1}\" cy=\"{middle:.1}\" r=\"2.4\"/>",
                axis.x(*sample)
            );
        }
        let end = self.samples.iter().copied().fold(value, f64::max);
        let _ = writeln!(
            svg,
            "<text class=\"strong\" x=\"{:.1}\" y=\"{:.1}\">{value:.digits$}</text>",
            axis.origin().max(axis.x(end)) + 8.0,
            y + 12.5
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale) -> String {
        let measured = Bar { value: Some(1.0), interval: Some((0.5, 2.0)), samples: vec![0.5, 1.0, 2.0] };
        let group = |bars, printed| Group { label: "a <b>".into(), note: String::new(), printed, bars };
        let chart = BarChart {
            scale,
            axis: "ratio".into(),
            reference: Some((1.0, "raw".into())),
            printed: "printed".into(),
            series: vec!["ours".into()],
            groups: vec![group(vec![measured], Some(4.0)), group(vec![Bar::default()], Some(0.25))],
            digits: 2,
        };
        chart.svg()
    }

    #[test]
    fn amounts_have_lengths_and_samples_have_dots() {
        let svg = chart(Scale::Amounts);
        let unit = (WIDTH - LEFT - RIGHT) / (4.0 * 1.04);
        for value in [4.0, 1.0, 0.25] {
            let bar = format!("x=\"{LEFT:.1}\" y=\"");
            let width = format!("width=\"{:.1}\" height=\"16\"", value * unit);
            assert!(svg.lines().any(|line| line.contains(&bar) && line.contains(&width)), "{width}: {svg}");
        }
        assert_eq!((svg.matches("<circle").count(), svg.matches("whisker").count()), (3, 1));
        assert!(svg.contains("a &lt;b&gt;") && svg.contains("not measured"), "{svg}");
    }

    #[test]
    fn a_quarter_is_as_far_left_as_four_is_right() {
        let axis = Axis::new(Scale::Ratios, [0.25, 4.0].into_iter());
        let (left, right) = (axis.origin() - axis.x(0.25), axis.x(4.0) - axis.origin());
        assert!(left > 100.0 && (left - right).abs() < 1e-6, "{left} and {right}");
        let svg = chart(Scale::Ratios);
        assert!(svg.matches(&format!("width=\"{right:.1}\" height=\"16\"")).count() == 2, "{svg}");
    }
}
