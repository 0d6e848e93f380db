//! Formats numbers for people.

/// An integer with thousands separators: 28,412.
pub fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::with_capacity(digits.len() + digits.len() / 3 + 1);
    if value < 0.0 && digits != "0" {
        text.push('-');
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of microseconds with a unit and two or three significant digits: 34 us, 1.2 ms.
pub fn latency(us: f64) -> String {
    match us {
        us if us < 10.0 => format!("{us:.1} us"),
        us if us < 1000.0 => format!("{us:.0} us"),
        us if us < 10_000.0 => format!("{:.1} ms", us / 1000.0),
        us if us < 1_000_000.0 => format!("{:.0} ms", us / 1000.0),
        us => format!("{:.1} s", us / 1_000_000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_separators_and_units() {
        let all = [0.4, 999.6, 28_412.0, 1_234_567.0, -1234.0].map(grouped);
        assert_eq!(all, ["0", "1,000", "28,412", "1,234,567", "-1,234"]);
        let all = [3.21, 34.2, 1234.0, 83_527.5, 2.5e6].map(latency);
        assert_eq!(all, ["3.2 us", "34 us", "1.2 ms", "84 ms", "2.5 s"]);
    }
}
