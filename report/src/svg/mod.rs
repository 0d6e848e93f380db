//! Draws plots as SVG elements. The page's style sets their colours, for light and dark mode.

mod bars;
mod curves;
mod lines;

pub use bars::{Bar, BarChart, Group, Scale};
pub use curves::{Curve, CurveChart};
pub use lines::{Line, LineChart, Phase};

/// The number of colours in the style. Further series repeat them.
const COLOURS: usize = 6;

/// Escapes text for HTML, XML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The CSS class of a series' colour.
fn colour(series: usize) -> String {
    format!("c{}", series % COLOURS)
}

/// The tick distance: 1, 2 or 5 times a power of ten, so that there are at most `most` ticks up to `end`.
fn tick_step(end: f64, most: f64) -> f64 {
    let rough = (end / most).max(f64::MIN_POSITIVE);
    let power = 10.0_f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps.into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power)
}

/// The label of a tick, without superfluous digits.
fn tick_label(value: f64, step: f64) -> String {
    let digits = if step >= 1.0 { 0 } else { (-step.log10()).ceil() as usize };
    if value >= 10_000.0 { format!("{:.0}k", value / 1000.0) } else { format!("{value:.digits$}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        for (end, step, label) in [(2.4, 0.5, "0.5"), (9.0, 1.0, "1"), (130_000.0, 20_000.0, "20k")] {
            assert_eq!(tick_step(end, 9.0), step, "up to {end}");
            assert_eq!(tick_label(step, step), label);
        }
    }
}
