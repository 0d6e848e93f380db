//! Properties that must hold for every answer of a server and every server URL: for the fuzzers in `fuzz/`,
//! and for a bounded test.
//!
//! Each function parses the bytes twice: with the code of this crate, and with an independent simple parser
//! that follows RFC 9112. The two must agree on what is refused, and on each field of what is accepted.

use crate::head::{ContentRange, HEAD_MAX_BYTES, Head, parse};
use crate::remote_store::listed_names;
use crate::url::ServerUrl;

/// A check that a fuzzer or a test calls with bytes.
pub type Oracle = fn(&[u8]);

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 5-14/100\r\n\
        Connection: keep-alive, close\r\nContent-Encoding: gzip\r\nLocation: http://a/\r\nRetry-After: 3\r\n\r\nbody";
    let other = b"HTTP/1.0 503 x\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 0-0/*\r\n\r\n";
    let urls = ["https://a", "http://[::1]:80/x/y/", "https://[2001:db8::1]:8443", "http://localhost:8080"];
    vec![
        ("http_head", http_head, vec![head.to_vec(), other.to_vec()]),
        ("list_of_images", list_of_images, vec![b"debian\na\n12.x_y-z\n".to_vec(), b"a\r\nb".to_vec()]),
        ("server_url", server_url, urls.map(|url| url.as_bytes().to_vec()).to_vec()),
    ]
}

/// A number as the standard library parses it; a sign is allowed only if `signs`.
fn number(text: &str, signs: bool) -> Option<u64> {
    if text.starts_with('+') && !signs { None } else { text.parse().ok() }
}

/// The head of an answer, line by line. The error has no details.
fn plain(bytes: &[u8]) -> Result<Option<(Head, usize)>, ()> {
    let end = (0..bytes.len()).find(|at| bytes.get(*at..at + 4) == Some(b"\r\n\r\n"));
    let Some(end) = end else {
        let expected = b"HTTP/1.";
        let common = bytes.len().min(expected.len());
        let can_become_one = bytes.get(..common) == expected.get(..common) && bytes.len() < HEAD_MAX_BYTES;
        return if can_become_one { Ok(None) } else { Err(()) };
    };
    let text = std::str::from_utf8(bytes.get(..end).ok_or(())?).map_err(drop)?;
    let mut lines = text.split("\r\n");
    let status = lines.next().ok_or(())?;
    let mut words = status.splitn(3, ' ');
    let close = match words.next() {
        Some("HTTP/1.1") => false,
        Some("HTTP/1.0") => true,
        _ => return Err(()),
    };
    let status = number(words.next().ok_or(())?, true).filter(|code| (100..600).contains(code)).ok_or(())?;
    let mut head = Head { status: u16::try_from(status).map_err(drop)?, close, ..Head::default() };
    for line in lines {
        let colon = line.find(':').ok_or(())?;
        let (name, value) =
            (line.get(..colon).ok_or(())?.to_ascii_lowercase(), line.get(colon + 1..).ok_or(())?.trim());
        match name.as_str() {
            "content-length" => {
                let length = number(value, false).ok_or(())?;
                if head.length.replace(length).is_some_and(|before| before != length) {
                    return Err(());
                }
            }
            "content-range" => head.range = range(value),
            "connection" => {
                let mut tokens = value.split(',').map(|token| token.trim().to_ascii_lowercase());
                head.close |= tokens.any(|token| token == "close");
            }
            "transfer-encoding" => head.encoded = true,
            "content-encoding" => head.encoded |= !value.eq_ignore_ascii_case("identity"),
            "location" => head.location = Some(value.chars().take(200).collect()),
            "retry-after" => (head.says_when, head.retry_after_s) = (true, number(value, true)),
            _ => {}
        }
    }
    Ok(Some((head, end + 4)))
}

fn range(value: &str) -> Option<ContentRange> {
    let rest = value.strip_prefix("bytes ")?.trim();
    let slash = rest.find('/')?;
    let (span, total) = (rest.get(..slash)?, rest.get(slash + 1..)?);
    let dash = span.find('-')?;
    let total = match total {
        "*" => None,
        digits => Some(number(digits, true)?),
    };
    Some(ContentRange {
        first: number(span.get(..dash)?, true)?,
        last: number(span.get(dash + 1..)?, true)?,
        total,
    })
}

/// The head of an answer: complete, incomplete, or invalid.
pub fn http_head(bytes: &[u8]) {
    let found = parse(bytes).map_err(drop);
    assert_eq!(found, plain(bytes));
    if let Ok(Some((_, len))) = found {
        assert!(bytes.get(..len).is_some_and(|head| head.ends_with(b"\r\n\r\n")), "a head of {len} bytes");
        // The body is not parsed, and an incomplete head is not an answer yet.
        assert_eq!(parse(bytes.get(..len).unwrap_or_default()).map_err(drop), found);
        for cut in [len - 1, len / 2, 7] {
            assert_eq!(
                parse(bytes.get(..cut).unwrap_or_default()).map_err(drop),
                plain(bytes.get(..cut).unwrap_or_default())
            );
        }
    }
}

/// A server's list of images: a second, bytewise parser finds the same names, or also none.
pub fn list_of_images(bytes: &[u8]) {
    let found = listed_names(bytes).map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(found, plain_names(bytes));
}

/// The names of a list in ascending order, each at most once.
fn plain_names(bytes: &[u8]) -> Option<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| *byte == b'\n');
        let line = rest.get(..end.unwrap_or(rest.len()))?;
        rest = rest.get(end.map_or(rest.len(), |end| end + 1)..)?;
        let line = line.strip_suffix(b"\r").filter(|_| end.is_some()).unwrap_or(line);
        let is_known = |byte: &u8| b"abcdefghijklmnopqrstuvwxyz0123456789._-".contains(byte);
        let begins = line.first().is_some_and(u8::is_ascii_alphanumeric);
        if !begins || line.len() > 63 || !line.iter().all(is_known) {
            return None;
        }
        names.push(String::from_utf8(line.to_vec()).ok()?);
    }
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    (names.len() == count).then_some(names)
}

/// The URL of a server: its displayed form parses to the same URL, and nothing in it ends the line of a
/// request.
pub fn server_url(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let list = ServerUrl::parse_list(text);
    let Ok(url) = text.parse::<ServerUrl>() else {
        let one = !text.contains(',') && text.trim() == text;
        assert!(!one || list.is_err(), "{text}: a list of one that is none");
        return;
    };
    let shown = url.to_string();
    assert_eq!(shown.parse::<ServerUrl>().ok().as_ref(), Some(&url), "{text} is shown as {shown}");
    assert!(url.port > 0 && !url.host.is_empty(), "{shown}");
    let line = format!("{}{}{}", url.authority(), url.path, url.host);
    assert!(line.bytes().all(|byte| byte.is_ascii_graphic()), "{shown}");
    assert!(!line.contains(['?', '#', '@', '\\']), "{shown}");
    assert!(url.path.is_empty() || url.path.starts_with('/') && !url.path.ends_with('/'), "{shown}");
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
