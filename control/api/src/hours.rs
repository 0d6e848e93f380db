//! Hours of a week by the clock of a time zone, such as `mon-fri 07:00-19:00 Europe/Berlin`: when machines of a
//! catalog are kept ready, or the window of a rolling update. Parses and prints them; `control/service` decides whether an instant is
//! within them.
//!
//! ```text
//!   mon-fri            from 07:00 until 19:00 of each of these days
//!   fri 22:00-06:00    from Friday 22:00 until Saturday 06:00
//! ```
//! Wall-clock time counts: an hour that a change of the clock skips is never within the hours; an hour that occurs twice is
//! within them twice.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

/// The names of days, Monday first.
const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

/// The number of minutes of a day.
const DAY_MIN: u16 = 24 * 60;

/// The longest name of a time zone.
const ZONE_MAX_BYTES: usize = 64;

/// Hours of a week.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hours {
    /// The days on which the hours begin, Monday first.
    days: [bool; 7],
    /// When the hours begin, in minutes since midnight.
    from_min: u16,
    /// When the hours end, in minutes since midnight. If this is not later than `from_min`, they end on the next day.
    to_min: u16,
    /// The time zone. Absent: that of the daemon's host.
    zone: Option<String>,
}

impl Hours {
    /// Reads `DAYS HH:MM-HH:MM [ZONE]`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let form = || {
            format!("'{text}' is not DAYS HH:MM-HH:MM [ZONE], such as 'mon-fri 07:00-19:00 Europe/Berlin'")
        };
        let mut words = text.split_whitespace();
        let (days, times) = words.next().zip(words.next()).ok_or_else(form)?;
        let (from, to) = times.split_once('-').ok_or_else(form)?;
        let zone = words.next();
        if words.next().is_some() {
            return Err(form());
        }
        Self::new(days, from, to, zone)
    }

    /// Creates hours from the text forms of days, two times of day and a time zone.
    pub fn new(days: &str, from: &str, to: &str, zone: Option<&str>) -> Result<Self, String> {
        let (from_min, to_min) = (minutes(from)?, minutes(to)?);
        if from_min == DAY_MIN {
            return Err("hours cannot begin at 24:00: write 00:00 of the next day".to_owned());
        }
        if from_min == to_min {
            return Err(format!(
                "hours from {from} to {to} have no length: write 00:00 and 24:00 for a whole day"
            ));
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '-' | '+');
        if let Some(zone) =
            zone.filter(|zone| zone.is_empty() || zone.len() > ZONE_MAX_BYTES || !zone.chars().all(is_plain))
        {
            return Err(format!(
                "'{}' is not the name of a time zone, such as Europe/Berlin or UTC",
                zone.escape_debug()
            ));
        }
        Ok(Self { days: days_of(days)?, from_min, to_min, zone: zone.map(str::to_owned) })
    }

    /// The name of the time zone, if it is set.
    pub fn zone(&self) -> Option<&str> {
        self.zone.as_deref()
    }

    /// The same hours in a time zone.
    pub fn in_zone(self, zone: String) -> Self {
        Self { zone: Some(zone), ..self }
    }

    /// The minute since midnight at which hours begin on a day (0 is Monday). `None`: none begin on that day.
    pub fn begin_on(&self, day: usize) -> Option<u16> {
        self.days.get(day % 7).filter(|is_one| **is_one).map(|_| self.from_min)
    }

    /// How long the hours of one day are, in seconds.
    pub fn length_s(&self) -> u64 {
        let (from, to) = (u64::from(self.from_min), u64::from(self.to_min));
        let minutes = if from < to { to - from } else { to + u64::from(DAY_MIN) - from };
        minutes * 60
    }

    /// Whether a minute of a day (0 is Monday) is within these hours.
    pub fn contain(&self, day: usize, minute: u16) -> bool {
        let is_one = |day: usize| self.days.get(day % 7).copied().unwrap_or(false);
        if self.from_min < self.to_min {
            return is_one(day) && (self.from_min..self.to_min).contains(&minute);
        }
        // Until the next day.
        (is_one(day) && minute >= self.from_min) || (is_one(day + 6) && minute < self.to_min)
    }
}

/// Reads `HH:MM`.
fn minutes(text: &str) -> Result<u16, String> {
    let error = || format!("'{text}' is not a time of day, such as 07:00");
    let number = |text: &str| {
        let is_number = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|_| is_number)
    };
    let (hour, minute) = text.split_once(':').ok_or_else(error)?;
    let (hour, minute) = number(hour).zip(number(minute)).ok_or_else(error)?;
    let sum = hour * 60 + minute;
    if minute < 60 && sum <= DAY_MIN { Ok(sum) } else { Err(error()) }
}

/// Reads `mon`, `mon-fri`, `sat,sun` or `daily`.
fn days_of(text: &str) -> Result<[bool; 7], String> {
    if text == "daily" {
        return Ok([true; 7]);
    }
    let number = |name: &str| {
        DAYS.iter()
            .position(|day| *day == name)
            .ok_or_else(|| format!("'{text}' names no days: write them as mon-fri, sat,sun or daily"))
    };
    let mut days = [false; 7];
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (mut day, last) = (number(first)?, number(last)?);
        loop {
            if let Some(day) = days.get_mut(day) {
                *day = true;
            }
            if day == last {
                break;
            }
            day = (day + 1) % 7;
        }
    }
    Ok(days)
}

impl std::fmt::Display for Hours {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for day in (0..7).filter(|day| self.days.get(*day).copied().unwrap_or(false)) {
            match runs.last_mut().filter(|(_, last)| last + 1 == day) {
                Some((_, last)) => *last = day,
                None => runs.push((day, day)),
            }
        }
        let name = |day: usize| DAYS.get(day).copied().unwrap_or_default();
        let parts: Vec<String> = runs
            .into_iter()
            .map(|(first, last)| match first == last {
                true => name(first).to_owned(),
                false => format!("{}-{}", name(first), name(last)),
            })
            .collect();
        let days = if self.days == [true; 7] { "daily".to_owned() } else { parts.join(",") };
        let Self { from_min, to_min, .. } = *self;
        write!(f, "{days} {:02}:{:02}-{:02}:{:02}", from_min / 60, from_min % 60, to_min / 60, to_min % 60)?;
        match &self.zone {
            Some(zone) => write!(f, " {zone}"),
            None => Ok(()),
        }
    }
}

impl Serialize for Hours {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_string())
    }
}

impl<'de> Deserialize<'de> for Hours {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

impl utoipa::PartialSchema for Hours {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        String::schema()
    }
}

impl ToSchema for Hours {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_are_written_as_they_are_read() {
        for text in [
            "mon-fri 07:00-19:00 Europe/Berlin",
            "sat-sun 22:00-06:00",
            "daily 00:00-24:00 UTC",
            "mon,wed,fri-sun 08:30-08:31 America/Port-au-Prince",
        ] {
            assert_eq!(Hours::parse(text).unwrap().to_string(), text);
        }
        // Days that go round the week, and days that are named twice.
        assert_eq!(Hours::parse("sat-mon 01:00-02:00").unwrap().to_string(), "mon,sat-sun 01:00-02:00");
        assert_eq!(Hours::parse("mon,mon-tue 01:00-02:00").unwrap().to_string(), "mon-tue 01:00-02:00");
        assert_eq!(
            serde_json::to_string(&Hours::parse("sun 1:00-02:00").err()).unwrap(),
            "\"'1:00' is not a time of day, such as 07:00\""
        );
    }

    #[test]
    fn what_is_no_hours_is_refused_with_what_to_write() {
        for (text, told) in [
            ("", "such as 'mon-fri"),
            ("mon", "such as 'mon-fri"),
            ("mon 07:00", "such as 'mon-fri"),
            ("mon 07:00-08:00 UTC more", "such as 'mon-fri"),
            ("mo 07:00-08:00", "names no days"),
            ("mon- 07:00-08:00", "names no days"),
            ("mon 7:00-08:00", "not a time of day"),
            ("mon 07:60-08:00", "not a time of day"),
            ("mon 07:00-24:01", "not a time of day"),
            ("mon 24:00-08:00", "cannot begin at 24:00"),
            ("mon 07:00-07:00", "have no length"),
            ("mon 07:00-08:00 ../zone\u{1b}", "not the name of a time zone"),
        ] {
            let error = Hours::parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn hours_until_the_next_day_are_those_of_the_day_that_begins_them() {
        let night = Hours::parse("fri 22:00-06:00").unwrap();
        for (day, minute, is_in) in [
            (4, 22 * 60 - 1, false),
            (4, 22 * 60, true),
            (5, 0, true),
            (5, 6 * 60 - 1, true),
            (5, 6 * 60, false),
            (5, 23 * 60, false),
            (4, 60, false),
        ] {
            assert_eq!(night.contain(day, minute), is_in, "day {day}, minute {minute}");
        }
        let sunday = Hours::parse("sun 12:00-11:00").unwrap();
        assert!(sunday.contain(0, 10 * 60) && !sunday.contain(0, 11 * 60) && !sunday.contain(6, 10 * 60));
        assert_eq!((sunday.begin_on(6), sunday.begin_on(5)), (Some(720), None));
    }
}
