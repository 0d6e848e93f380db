//! Draws horizontal bars with error ranges as SVG.

use std::fmt::Write;

/// One bar.
pub struct Bar<'a> {
    /// Its label.
    pub label: &'a str,
    /// Its length: the median.
    pub value: f64,
    /// Minimum and maximum of the rounds.
    pub range: (f64, f64),
    /// Whether it has the colour of Headwater's results.
    pub is_ours: bool,
}

const WIDTH: f64 = 760.0;
const LABEL: f64 = 190.0;
const FIGURE: f64 = 90.0;
const ROW: f64 = 26.0;

/// A bar chart from zero to the largest value.
pub fn bars(bars: &[Bar<'_>]) -> String {
    let greatest = bars.iter().map(|bar| bar.range.1.max(bar.value)).fold(0.0, f64::max);
    let scale = if greatest > 0.0 { (WIDTH - LABEL - FIGURE) / greatest } else { 0.0 };
    let mut y = 4.0;
    let mut body = String::new();
    for bar in bars {
        let middle = y + ROW / 2.0;
        let class = if bar.is_ours { "ours" } else { "peer" };
        let (from, to) = (LABEL + bar.range.0 * scale, LABEL + bar.range.1 * scale);
        // Writing to a string cannot fail.
        let _ = writeln!(
            body,
            "<text x=\"{:.1}\" y=\"{:.1}\" class=\"label\">{}</text>\
             <rect x=\"{LABEL:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"16\" class=\"{class}\"/>\
             <line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\" class=\"spread\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LABEL - 8.0,
            middle + 4.0,
            escape(bar.label),
            middle - 8.0,
            bar.value * scale,
            to.max(LABEL + bar.value * scale) + 8.0,
            middle + 4.0,
            super::table::number(Some(bar.value)),
        );
        y += ROW;
    }
    let height = y + 4.0;
    format!("<svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=\"img\">\n{body}</svg>\n")
}

/// Escapes text for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fills_the_chart_and_others_are_in_proportion() {
        let bar = |label, value, is_ours| Bar { label, value, range: (value, value), is_ours };
        let svg = bars(&[bar("a<b", 100.0, true), bar("c", 50.0, false)]);
        assert!(svg.contains("width=\"480.0\" height=\"16\" class=\"ours\""), "{svg}");
        assert!(svg.contains("width=\"240.0\" height=\"16\" class=\"peer\""), "{svg}");
        assert!(svg.contains("a&lt;b"));
    }

    #[test]
    fn an_empty_chart_divides_by_nothing() {
        let svg = bars(&[Bar { label: "x", value: 0.0, range: (0.0, 0.0), is_ours: true }]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
