//! Properties that must hold for every request that a store's server can get: for the fuzzers in `fuzz/`, and
//! for a bounded test.
//!
//! `hyper` parses the request itself. These checks cover what this crate parses: the path, the range, the
//! token, and the token file. Each is parsed a second time by an independent simple parser.

use headwater_store::{Hash, ImageName};

use crate::answer::Target;
use crate::range::{Wanted, wanted};
use crate::tokens::{lines_of, token_line, token_of};

/// A check that a fuzzer or a test calls with bytes.
pub type Oracle = fn(&[u8]);

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let hash = Hash::of(b"x");
    let mut paths: Vec<Vec<u8>> = ["manifests", "objects", "holes", "traces"]
        .map(|kind| format!("/{kind}/{hash}").into_bytes())
        .to_vec();
    paths.extend(["/store", "/images/", "/images/debian-12"].map(|path| path.as_bytes().to_vec()));
    let ranges = ["bytes=10-19", "bytes=90-", "bytes=-30", "bytes=0-0"];
    let ranges = ranges.map(|range| [&100u64.to_le_bytes()[..], range.as_bytes()].concat());
    let lines = ["anna", "ben"].map(|name| token_line(name, "one").unwrap_or_default()).join("\n");
    vec![
        ("store_path", store_path, paths),
        ("http_range", http_range, ranges.to_vec()),
        (
            "store_tokens",
            store_tokens,
            vec![[&b"Bearer one\n# a comment\n\n"[..], lines.as_bytes()].concat()],
        ),
    ]
}

/// A path: only files of a store's directory are found, each under one name.
pub fn store_path(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    let parts: Vec<&str> = path.split('/').collect();
    let hash = |id: &str| {
        let digits = id.len() == 64 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        id.parse::<Hash>().ok().filter(|_| digits)
    };
    let expected = match parts.as_slice() {
        ["", "store"] => Some(Target::Settings),
        ["", "images", ""] => Some(Target::Images),
        ["", "images", name] => name.parse::<ImageName>().ok().map(Target::Image),
        ["", "manifests", id] => hash(id).map(Target::Manifest),
        ["", "objects", id] => hash(id).map(Target::Object),
        ["", "holes", id] => hash(id).map(Target::Holes),
        ["", "traces", id] => hash(id).map(Target::Trace),
        _ => None,
    };
    assert_eq!(Target::of(path), expected, "{path:?}");
    match expected {
        Some(Target::Image(name)) => {
            let shown = name.to_string();
            assert_eq!(path, format!("/images/{shown}"));
            assert!(!shown.contains(['/', '\\', '\0', '%']) && !shown.starts_with('.'), "{shown:?}");
        }
        Some(Target::Manifest(id) | Target::Object(id) | Target::Holes(id) | Target::Trace(id)) => {
            assert!(path.ends_with(&id.to_string()), "{path} has a second name");
        }
        _ => {}
    }
}

/// Eight bytes of a length, and a `Range` header: the sent range lies inside the body, and follows RFC 9110.
pub fn http_range(bytes: &[u8]) {
    let Some((len, header)) = bytes.split_first_chunk() else { return };
    let Ok(header) = std::str::from_utf8(header) else { return };
    let long = u64::from_le_bytes(*len);
    for len in [long, long % 1000, 0] {
        let found = wanted(Some(header), len);
        assert_eq!(found, plain_range(header, len), "{header:?} of {len} bytes");
        if let Wanted::Part(at, count) = found {
            assert!(
                count > 0 && u128::from(at) + u128::from(count) <= u128::from(len),
                "{header:?} of {len} bytes"
            );
        }
    }
    assert_eq!(wanted(None, long), Wanted::All);
}

/// `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`; anything else counts as no header.
fn plain_range(header: &str, len: u64) -> Wanted {
    let Some(spec) = header.trim().strip_prefix("bytes=").map(str::trim) else { return Wanted::All };
    let Some(dash) = spec.find('-') else { return Wanted::All };
    let (first, last) = (spec.get(..dash).unwrap_or_default(), spec.get(dash + 1..).unwrap_or_default());
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(first) || !digits(last) || first.is_empty() && last.is_empty() {
        return Wanted::All;
    }
    // Numbers of any length: a number larger than any body becomes one past the largest.
    let number = |text: &str| {
        text.bytes()
            .fold(0u128, |number, digit| (number * 10 + u128::from(digit - b'0')).min(u128::from(u64::MAX)))
    };
    let end = u128::from(len);
    let (from, to) = match (first, last) {
        ("", count) => (end.saturating_sub(number(count)), end),
        (first, "") => (number(first), end),
        (first, last) => (number(first), (number(last) + 1).min(end)),
    };
    if !first.is_empty() && from >= end || first.is_empty() && from == end {
        return Wanted::Nothing;
    }
    if to <= from {
        return Wanted::All;
    }
    let small = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
    Wanted::Part(small(from), small(to - from))
}

/// The first line is an `Authorization` header, the rest a token file.
pub fn store_tokens(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (header, file) = text.split_once('\n').unwrap_or((text, ""));
    let token = token_of(header);
    let mut words = header.splitn(2, ' ');
    let expected = match (words.next(), words.next()) {
        (Some(scheme), Some(token)) if scheme.eq_ignore_ascii_case("bearer") => Some(token.trim()),
        _ => None,
    };
    assert_eq!(token, expected);

    let parsed = lines_of(file);
    let mut expected = Vec::new();
    for (number, line) in (1..).zip(file.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let space = line.find(' ');
        let hash = space.and_then(|at| line.get(at + 1..)?.trim().parse::<Hash>().ok());
        match space.zip(hash) {
            Some((at, hash)) => expected.push((line.get(..at).unwrap_or_default().to_owned(), hash)),
            None => {
                assert_eq!(parsed, Err(number), "the number of the first invalid line");
                return;
            }
        }
    }
    assert_eq!(parsed.as_ref(), Ok(&expected));
    // A line that this program makes can be read again, and matches only its own token.
    if let Ok(line) = token_line(header, file) {
        assert_eq!(lines_of(&line), Ok(vec![(header.to_owned(), Hash::of(file.as_bytes()))]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
