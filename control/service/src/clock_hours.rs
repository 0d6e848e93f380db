//! Says whether an instant is within weekly hours such as `mon-fri 07:00-19:00 Europe/Berlin`, and when such hours begin next. A
//! rolling update waits for its window with it, and a catalog keeps machines ready with it. `headwater_api::hours` parses the
//! hours. The time zone rules are those of the host; if it has none, those that are compiled in.

use std::path::Path;

use headwater_api::hours::Hours;
use headwater_api::{Problem, ProblemKind};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};

/// The name of the host's time zone. A host without a setting has UTC, as in other programs.
fn zone_of_host() -> Result<String, Problem> {
    let is_set = std::env::var_os("TZ").is_some() || Path::new("/etc/localtime").exists();
    match TimeZone::try_system() {
        Err(_) if !is_set => Ok("UTC".to_owned()),
        zone => name_of(zone.ok().as_ref()),
    }
}

/// The IANA name of a time zone. A zone that is given only by its rules has no name, which is an error.
fn name_of(zone: Option<&TimeZone>) -> Result<String, Problem> {
    let name = zone.and_then(TimeZone::iana_name).filter(|name| *name != "Etc/Unknown");
    name.map(str::to_owned).ok_or_else(|| {
        Problem::new(ProblemKind::Invalid, "the time zone of this host has no name")
            .advise("name a time zone, such as Europe/Berlin, with --zone or after the hours")
    })
}

/// The hours with a time zone that is known: that of the host unless they name one.
pub(crate) fn with_zone(hours: Hours) -> Result<Hours, Problem> {
    let zone = hours.zone().map_or_else(zone_of_host, |zone| Ok(zone.to_owned()))?;
    let hours = hours.in_zone(zone);
    zone_of(&hours).map(|_| hours)
}

fn zone_of(hours: &Hours) -> Result<TimeZone, Problem> {
    let name = hours.zone().unwrap_or("UTC");
    TimeZone::get(name).map_err(|_| {
        let message = format!("this host does not know the time zone '{name}'");
        Problem::new(ProblemKind::Invalid, message).advise(
            "name it as Europe/Berlin, America/New_York or UTC; 'timedatectl list-timezones' lists all",
        )
    })
}

/// Whether an instant is within these hours.
pub(crate) fn is_within(hours: &Hours, now_ms: u64) -> Result<bool, Problem> {
    let now = instant(now_ms)?.to_zoned(zone_of(hours)?);
    let minute = u16::try_from(i32::from(now.hour()) * 60 + i32::from(now.minute())).unwrap_or(0);
    let day = usize::try_from(now.weekday().to_monday_zero_offset()).unwrap_or(0);
    Ok(hours.contain(day, minute))
}

/// When these hours begin next, after an instant that is not within them.
pub(crate) fn next_begin(hours: &Hours, now_ms: u64) -> Result<Option<u64>, Problem> {
    let zone = zone_of(hours)?;
    let now = instant(now_ms)?;
    let today = now.to_zoned(zone.clone()).date();
    for days in 0..=8 {
        let Ok(date) = today.checked_add(days.days()) else { continue };
        let day = usize::try_from(date.weekday().to_monday_zero_offset()).unwrap_or(0);
        let Some(minute) = hours.begin_on(day) else { continue };
        let (hour, minute) = (i8::try_from(minute / 60).unwrap_or(0), i8::try_from(minute % 60).unwrap_or(0));
        // If a change of the clock skips the time, they begin after the skipped hour.
        let Ok(begin) = date.at(hour, minute, 0, 0).to_zoned(zone.clone()) else { continue };
        if begin.timestamp() > now {
            return Ok(u64::try_from(begin.timestamp().as_millisecond()).ok());
        }
    }
    Ok(None)
}

fn instant(ms: u64) -> Result<Timestamp, Problem> {
    let instant = i64::try_from(ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    instant
        .ok_or_else(|| Problem::new(ProblemKind::Invalid, "the clock of this host shows an impossible time"))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    /// Day (0 is Monday) and minute of each instant, as `date` of the system says it.
    fn by_date(zone: &str, instants_s: &[u64]) -> Vec<(usize, u16)> {
        let mut child = Command::new("date")
            .env("TZ", zone)
            .args(["-f", "-", "+%u %H %M"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let lines: String = instants_s.iter().map(|at| format!("@{at}\n")).collect();
        let writing = std::thread::spawn(move || input.write_all(lines.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writing.join().unwrap().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let of = |line: &str| {
            let numbers: Vec<u16> = line.split(' ').map(|number| number.parse().unwrap()).collect();
            (usize::from(numbers[0]) - 1, numbers[1] * 60 + numbers[2])
        };
        text.lines().map(of).collect()
    }

    /// A year of random instants, in zones that change their clocks by an hour, by half an hour, at other times of the year and never.
    #[test]
    fn hours_follow_the_clock_that_the_system_shows() {
        const YEAR_S: u64 = 366 * 86_400;
        let begin_s = 1_767_225_600;
        let mut seed = 5u64;
        let mut draw = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for zone in ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"] {
            let mut instants: Vec<u64> = (0..4_000).map(|_| begin_s + draw(YEAR_S)).collect();
            // The nights in which Europe changes its clocks, minute by minute.
            for night_s in [1_774_742_400, 1_792_886_400] {
                instants.extend((0..360).map(|minute| night_s + minute * 60));
            }
            let local = by_date(zone, &instants);
            for text in [
                "mon-fri 07:00-19:00",
                "sun 02:00-03:00",
                "sat 22:00-06:30",
                "daily 00:00-24:00",
                "wed 12:00-11:59",
            ] {
                let hours = with_zone(Hours::parse(&format!("{text} {zone}")).unwrap()).unwrap();
                for (at_s, (day, minute)) in instants.iter().zip(&local) {
                    let is_in = is_within(&hours, at_s * 1000).unwrap();
                    assert_eq!(is_in, hours.contain(*day, *minute), "{hours} at {at_s}");
                    if is_in {
                        continue;
                    }
                    // The next hours are later, within a week and a day, and nothing before them is in the hours.
                    let next = next_begin(&hours, at_s * 1000).unwrap().unwrap() / 1000;
                    assert!(next > *at_s && next - at_s <= 8 * 86_400, "{hours} at {at_s}: {next}");
                    assert!(!is_within(&hours, (next - 1) * 1000).unwrap(), "{hours} at {at_s}: {next}");
                }
            }
        }
    }

    #[test]
    fn an_unknown_zone_is_refused_and_that_of_the_host_is_named() {
        let error = with_zone(Hours::parse("mon 01:00-02:00 Europe/Atlantis").unwrap()).unwrap_err();
        assert!(error.message.contains("'Europe/Atlantis'"), "{error}");
        let settled = with_zone(Hours::parse("mon 01:00-02:00").unwrap()).unwrap();
        assert!(settled.zone().is_some());
        let error = name_of(Some(&TimeZone::fixed(jiff::tz::offset(1)))).unwrap_err();
        assert!(error.advice.is_some_and(|it| it.contains("--zone")));
        assert_eq!(name_of(Some(&TimeZone::UTC)).unwrap(), "UTC");
    }
}
