//! Parses times on the command line: `2026-12-24T03:00Z`, or `+90m` from now.

use anyhow::{Context, bail, ensure};
use headwater_api::{Problem, ProblemKind};

/// Milliseconds since 1970 UTC.
pub fn parse(text: &str, now_ms: u64) -> Result<u64, Problem> {
    let parsed = match text.strip_prefix('+') {
        Some(span) => span_ms(span).and_then(|ms| now_ms.checked_add(ms).context("it is too large")),
        None => calendar_ms(text),
    };
    parsed.map_err(|why| {
        Problem::new(ProblemKind::Invalid, format!("'{text}' is not a time: {why}"))
            .advise("write 2026-12-24T03:00Z, which is UTC, or +90m, +12h, +7d from now")
    })
}

fn span_ms(text: &str) -> anyhow::Result<u64> {
    let unit = text.chars().next_back().context("nothing follows the '+'")?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => bail!("it does not end in s, m, h or d"),
    };
    let count: u64 = text.strip_suffix(unit).unwrap_or_default().parse()?;
    count.checked_mul(seconds * 1000).context("it is too large")
}

fn calendar_ms(text: &str) -> anyhow::Result<u64> {
    let utc = text.strip_suffix('Z').context("it does not end in Z")?;
    let (date, time) = utc.split_once(['T', ' ']).context("it has no T between date and time")?;
    let date = numbers::<3>(date, '-', &[4, 2, 2])?;
    let seconds_given = time.matches(':').count() == 2;
    let [hour, minute, second] = if seconds_given {
        numbers::<3>(time, ':', &[2, 2, 2])?
    } else {
        let [hour, minute] = numbers::<2>(time, ':', &[2, 2])?;
        [hour, minute, 0]
    };
    ensure!(hour < 24 && minute < 60 && second < 60, "there is no such time of day");
    let seconds = days_since_1970(date)? * 86_400 + hour * 3600 + minute * 60 + second;
    Ok(seconds * 1000)
}

fn numbers<const N: usize>(text: &str, between: char, digits: &[usize]) -> anyhow::Result<[u64; N]> {
    let parts: Vec<&str> = text.split(between).collect();
    let fits = parts.len() == N
        && parts
            .iter()
            .zip(digits)
            .all(|(part, len)| part.len() == *len && part.bytes().all(|byte| byte.is_ascii_digit()));
    ensure!(fits, "'{text}' is neither YYYY-MM-DD nor HH:MM nor HH:MM:SS");
    let mut out = [0; N];
    for (number, part) in out.iter_mut().zip(parts) {
        *number = part.parse()?;
    }
    Ok(out)
}

fn days_since_1970([year, month, day]: [u64; 3]) -> anyhow::Result<u64> {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let lengths = [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let at = usize::try_from(month)?.checked_sub(1).context("there is no month 0")?;
    let length = lengths.get(at).context("a year has twelve months")?;
    ensure!(year >= 1970 && (1..=*length).contains(&day), "there is no such day");
    let years: u64 = (1970..year).map(|year| if is_leap(year) { 366 } else { 365 }).sum();
    Ok(years + lengths.iter().take(at).sum::<u64>() + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calendar_times_are_those_that_are_shown() {
        for text in
            ["1970-01-01 00:00:00Z", "2000-02-29 12:34:56Z", "2026-11-20 11:34:29Z", "2100-02-28 23:59:59Z"]
        {
            assert_eq!(crate::show::time(parse(text, 0).unwrap()), text);
        }
        assert_eq!(parse("2026-12-24T03:00Z", 0).unwrap(), parse("2026-12-24 03:00:00Z", 0).unwrap());
    }

    #[test]
    fn spans_count_from_now() {
        assert_eq!(parse("+90m", 1000).unwrap(), 5_401_000);
        assert_eq!(parse("+7d", 0).unwrap(), 604_800_000);
    }

    #[test]
    fn what_is_no_time_is_refused_with_what_to_write() {
        for bad in [
            "",
            "now",
            "+",
            "+5",
            "+5w",
            "+-5m",
            "+18446744073709551615d",
            "2026-12-24",
            "2026-12-24T03:00",
            "2026-13-01T00:00Z",
            "2026-02-29T00:00Z",
            "2026-1-1T00:00Z",
            "2026-12-24T24:00Z",
            "1969-12-31T00:00Z",
        ] {
            let error = parse(bad, 1).unwrap_err();
            assert!(error.to_string().contains("+90m"), "{bad}: {error}");
        }
    }
}
