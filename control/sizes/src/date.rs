//! Calendar dates as tables write them, `2026-09-30`: parses and compares them. It does not read the clock.

use serde::{Serialize, Serializer};

/// A day of the Gregorian calendar, counted from 1970-01-01.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Date {
    days: i64,
}

impl Date {
    /// The day that contains a time in seconds since 1970 UTC.
    pub fn of_seconds(seconds: u64) -> Self {
        Self { days: i64::try_from(seconds / 86_400).unwrap_or(i64::MAX) }
    }

    /// Parses `YYYY-MM-DD`. `None` if the text is not a day of the years 1970 to 9999.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut number = |length: usize| {
            let part = parts.next()?;
            let is_plain = part.len() == length && part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse::<i64>().ok().filter(|_| is_plain)
        };
        let (year, month, day) = (number(4)?, number(2)?, number(2)?);
        let is_in_range = year >= 1970 && (1..=12).contains(&month) && (1..=31).contains(&day);
        if parts.next().is_some() || !is_in_range {
            return None;
        }
        let date = Self { days: days_of(year, month, day) };
        // Rejects dates such as 31 April: it counts as 1 May, so its text differs.
        (date.to_string() == text).then_some(date)
    }

    /// How many days there are until `later`; negative if that is before this day.
    pub fn days_until(self, later: Self) -> i64 {
        later.days.saturating_sub(self.days)
    }
}

/// Days since 1970-01-01. Eras of 400 years begin on 1 March, so that leap days come last.
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let shifted_year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (shifted_year.div_euclid(400), shifted_year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

impl std::fmt::Display for Date {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shifted = self.days.saturating_add(719_468);
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        write!(f, "{year:04}-{month:02}-{day:02}")
    }
}

impl Serialize for Date {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_days_of_the_calendar() {
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("2000-02-29", 951_827_696),
            ("2026-11-20", 1_795_174_469),
            ("2100-02-28", 4_107_542_399),
        ] {
            assert_eq!(Date::parse(text), Some(Date::of_seconds(seconds)), "{text}");
            assert_eq!(Date::of_seconds(seconds).to_string(), text);
        }
        for bad in
            ["", "2026", "2026-9-30", "2026-13-01", "2026-04-31", "2100-02-29", "2026-01-01-", "+026-01-01"]
        {
            assert_eq!(Date::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn days_between_dates_are_counted() {
        let day = |text| Date::parse(text).unwrap();
        assert_eq!(day("2026-11-28").days_until(day("2027-01-01")), 34);
        assert_eq!(day("2026-11-28").days_until(day("2026-09-30")), -59);
        assert!(day("2026-09-30") < day("2026-11-28"));
    }
}
