//! Text for the screen of `headwater top`: bars, and short forms of sizes and durations.

use headwater_block::size;

/// Eighths of a cell, from none to all.
const EIGHTHS: [char; 9] =
    [' ', '\u{258f}', '\u{258e}', '\u{258d}', '\u{258c}', '\u{258b}', '\u{258a}', '\u{2589}', '\u{2588}'];

/// The filled and the empty part of a bar, `cells` wide together. `plain` is for terminals that know ASCII only.
pub fn bar(used: u64, whole: u64, cells: usize, plain: bool) -> (String, String) {
    let share = if whole == 0 { 0.0 } else { (used as f64 / whole as f64).clamp(0.0, 1.0) };
    // At least one step if anything is used.
    let least = usize::from(used > 0);
    if plain {
        let filled = ((share * cells as f64).round() as usize).max(least).min(cells);
        return ("#".repeat(filled), "-".repeat(cells - filled));
    }
    let eighths = ((share * cells as f64 * 8.0).round() as usize).max(least);
    let mut filled: String = std::iter::repeat_n(EIGHTHS[8], eighths / 8).collect();
    if eighths % 8 > 0 {
        filled.push(EIGHTHS[eighths % 8]);
    }
    let empty = cells.saturating_sub(filled.chars().count());
    (filled, "\u{2500}".repeat(empty))
}

/// A number of bytes in at most seven characters: `61.0M`, `1023K`.
pub fn short_bytes(bytes: u64) -> String {
    let long = size::format(bytes);
    match long.split_once(' ') {
        Some((number, unit)) => format!("{number}{}", unit.trim_end_matches("iB")),
        None => long,
    }
}

/// A duration in its two largest units.
pub fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {:02}s", seconds % 60),
        (0, ..) => format!("{hours}h {minutes:02}m"),
        _ => format!("{days}d {hours:02}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_wide_as_their_cells_at_every_share() {
        for plain in [false, true] {
            for used in [0, 1, 50, 99, 100, 400] {
                let (filled, empty) = bar(used, 100, 10, plain);
                assert_eq!(filled.chars().count() + empty.chars().count(), 10, "{used}");
                assert_eq!(filled.is_empty(), used == 0, "{used}");
            }
        }
        assert_eq!(bar(1, 2, 10, true), ("#####".to_owned(), "-----".to_owned()));
        assert_eq!(bar(7, 0, 2, true).1, "-");
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(short_bytes(64 << 20), "64.0M");
        assert_eq!(short_bytes(1023 << 10), "1023.0K");
        assert_eq!(short_bytes(10 << 30), "10.0G");
        assert_eq!([59, 61, 3_700, 90_000].map(duration), ["59s", "1m 01s", "1h 01m", "1d 01h"]);
    }
}
