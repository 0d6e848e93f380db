//! Parses the `Range` header.

/// The part of a body that a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// All of it.
    All,
    /// From this first byte, this many bytes.
    Part(u64, u64),
    /// A range beyond the end.
    Nothing,
}

/// Parses a header for a body of `len_bytes`. Anything other than a single range of bytes is ignored, as RFC
/// 9110 says.
pub(crate) fn wanted(header: Option<&str>, len_bytes: u64) -> Wanted {
    let Some(spec) = header.and_then(|header| header.trim().strip_prefix("bytes=")) else {
        return Wanted::All;
    };
    let Some((first, last)) = spec.trim().split_once('-') else { return Wanted::All };
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
        // A number larger than any body is treated like the largest.
        digits.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
    };
    match (number(first), number(last)) {
        (Some(first), _) if first >= len_bytes && (last.is_empty() || number(last).is_some()) => {
            Wanted::Nothing
        }
        (Some(first), None) if last.is_empty() => Wanted::Part(first, len_bytes - first),
        (Some(first), Some(last)) if last >= first => {
            Wanted::Part(first, last.min(len_bytes - 1).saturating_sub(first).saturating_add(1))
        }
        (None, Some(count)) if first.is_empty() => {
            let count = count.min(len_bytes);
            if count == 0 { Wanted::Nothing } else { Wanted::Part(len_bytes - count, count) }
        }
        _ => Wanted::All,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_rfc_9110() {
        let of_100 = |header: &str| wanted(Some(header), 100);
        assert_eq!(wanted(None, 100), Wanted::All);
        assert_eq!(of_100("bytes=0-0"), Wanted::Part(0, 1));
        assert_eq!(of_100("bytes=10-19"), Wanted::Part(10, 10));
        assert_eq!(of_100("bytes=90-"), Wanted::Part(90, 10));
        assert_eq!(of_100("bytes=90-1000"), Wanted::Part(90, 10));
        assert_eq!(of_100("bytes=0-99999999999999999999999999"), Wanted::Part(0, 100));
        assert_eq!(of_100("bytes=-30"), Wanted::Part(70, 30));
        assert_eq!(of_100("bytes=-300"), Wanted::Part(0, 100));
        assert_eq!(of_100("bytes=100-"), Wanted::Nothing);
        assert_eq!(of_100("bytes=200-300"), Wanted::Nothing);
        assert_eq!(of_100("bytes=-0"), Wanted::Nothing);
        assert_eq!(wanted(Some("bytes=0-"), 0), Wanted::Nothing);
        for ignored in
            ["bytes=5-4", "bytes=a-b", "bytes=-", "bytes=1-2,4-5", "lines=1-2", "bytes=+1-2", "1-2"]
        {
            assert_eq!(of_100(ignored), Wanted::All, "{ignored}");
        }
    }
}
