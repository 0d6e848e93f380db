//! Text forms of times and sizes for messages and for the history.

/// A UTC time, such as `2026-11-20 11:34:29Z`.
pub fn time(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, in_day) = (seconds / 86_400, seconds % 86_400);
    // Days are counted in eras of 400 years that begin on 1 March, so that leap days come last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

/// A size in the largest binary unit that divides it: `512 MiB`.
pub fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = units.iter().find(|(shift, _)| bytes >> shift != 0 && bytes.is_multiple_of(1 << shift));
    match fits {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_calendar_times() {
        assert_eq!(time(0), "1970-01-01 00:00:00Z");
        assert_eq!(time(951_827_696_000), "2000-02-29 12:34:56Z");
        assert_eq!(time(1_795_174_469_999), "2026-11-20 11:34:29Z");
        assert_eq!(time(4_107_542_399_000), "2100-02-28 23:59:59Z");
    }

    #[test]
    fn sizes_are_exact() {
        let words = [0, 1, 1536, 64 << 20, (1 << 30) + 512].map(size);
        assert_eq!(words, ["0 B", "1 B", "1536 B", "64 MiB", "1073742336 B"]);
        assert_eq!(size(3 << 40), "3 TiB");
    }
}
