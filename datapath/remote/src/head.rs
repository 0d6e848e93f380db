//! Parses the head (status line and fields) of an HTTP/1.1 answer. No sockets.

/// The largest head.
pub(crate) const HEAD_MAX_BYTES: usize = 16 << 10;

/// `Content-Range: bytes FIRST-LAST/TOTAL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContentRange {
    pub first: u64,
    pub last: u64,
    /// `None`: the server wrote `*`.
    pub total: Option<u64>,
}

/// The fields of an answer's head that are used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub status: u16,
    pub length: Option<u64>,
    pub range: Option<ContentRange>,
    /// The server closes the connection after this answer.
    pub close: bool,
    /// The body is encoded in a way that was not requested: chunked or compressed.
    pub encoded: bool,
    pub location: Option<String>,
    /// Whether it has a `Retry-After`, readable or not.
    pub says_when: bool,
    /// Seconds of `Retry-After`. A date is ignored.
    pub retry_after_s: Option<u64>,
}

/// Parses the head at the start of `bytes`. Returns `None` if it has not arrived completely, otherwise the
/// head and its length. An error is the server's fault.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, &'static str> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let Some(end) = end else {
        // Bytes that cannot be the start of an answer are refused before they fill the buffer.
        let start = b"HTTP/1.";
        if bytes.iter().zip(start).any(|(got, wanted)| got != wanted) {
            return Err("its answer is not HTTP/1.1");
        }
        return if bytes.len() >= HEAD_MAX_BYTES {
            Err("the head of its answer is too long")
        } else {
            Ok(None)
        };
    };
    let text = bytes.get(..end).and_then(|head| std::str::from_utf8(head).ok());
    let mut lines = text.ok_or("the head of its answer is not text")?.split("\r\n");
    let mut head = status_line(lines.next().unwrap_or_default())?;
    for line in lines {
        let (name, value) =
            line.split_once(':').ok_or("the head of its answer has a line without a colon")?;
        field(&mut head, name, value.trim())?;
    }
    Ok(Some((head, end + 4)))
}

fn status_line(line: &str) -> Result<Head, &'static str> {
    let bad = "its answer is not HTTP/1.1";
    let (version, rest) = line.split_once(' ').ok_or(bad)?;
    let close = match version {
        "HTTP/1.1" => false,
        "HTTP/1.0" => true,
        _ => return Err(bad),
    };
    let code = rest.split(' ').next().unwrap_or_default();
    let status = code.parse().ok().filter(|code: &u16| (100..600).contains(code)).ok_or(bad)?;
    Ok(Head { status, close, ..Head::default() })
}

fn field(head: &mut Head, name: &str, value: &str) -> Result<(), &'static str> {
    let is = |other: &str| name.eq_ignore_ascii_case(other);
    if is("content-length") {
        let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
        let length = value.parse().ok().filter(|_| digits).ok_or("its answer has an odd Content-Length")?;
        if head.length.is_some_and(|before| before != length) {
            return Err("its answer has two different lengths");
        }
        head.length = Some(length);
    } else if is("content-range") {
        head.range = content_range(value);
    } else if is("connection") {
        head.close |= value.split(',').any(|token| token.trim().eq_ignore_ascii_case("close"));
    } else if is("transfer-encoding") {
        head.encoded = true;
    } else if is("content-encoding") {
        head.encoded |= !value.eq_ignore_ascii_case("identity");
    } else if is("location") {
        head.location = Some(value.chars().take(200).collect());
    } else if is("retry-after") {
        (head.says_when, head.retry_after_s) = (true, value.parse().ok());
    }
    Ok(())
}

fn content_range(value: &str) -> Option<ContentRange> {
    let (range, total) = value.strip_prefix("bytes ")?.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some(ContentRange { first: first.parse().ok()?, last: last.parse().ok()?, total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_in_any_number_of_parts() {
        let bytes =
            b"HTTP/1.1 206 Partial Content\r\ncontent-length: 10\r\nContent-Range: bytes 5-14/100\r\n\
                      Connection: keep-alive\r\n\r\nbody";
        let end = bytes.len() - 4;
        for cut in 0..end {
            assert_eq!(parse(&bytes[..cut]), Ok(None), "{cut}");
        }
        let (head, len) = parse(bytes).unwrap().unwrap();
        assert_eq!((head.status, head.length, len, head.close), (206, Some(10), end, false));
        assert_eq!(head.range, Some(ContentRange { first: 5, last: 14, total: Some(100) }));
    }

    #[test]
    fn odd_heads_are_refused() {
        for bad in [
            &b"SSH-2.0-x"[..],
            b"HTTP/2 200\r\n\r\n",
            b"HTTP/1.1 99 x\r\n\r\n",
            b"HTTP/1.1 abc\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: \xff\r\n\r\n",
        ] {
            assert!(parse(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        let mut long = b"HTTP/1.1 200 OK\r\nX: ".to_vec();
        long.resize(HEAD_MAX_BYTES, b'x');
        assert!(parse(&long).is_err());
    }

    #[test]
    fn connection_end_and_body_encoding_are_recognised() {
        let head = |text: &str| parse(text.as_bytes()).unwrap().unwrap().0;
        assert!(head("HTTP/1.0 200 OK\r\n\r\n").close);
        assert!(head("HTTP/1.1 200 OK\r\nConnection: x, Close\r\n\r\n").close);
        assert!(head("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").encoded);
        assert!(head("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n").encoded);
        assert!(!head("HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\n\r\n").encoded);
        assert_eq!(head("HTTP/1.1 503 x\r\nRetry-After: 3\r\n\r\n").retry_after_s, Some(3));
        assert_eq!(head("HTTP/1.1 302 x\r\nLocation: http://e/\r\n\r\n").location.unwrap(), "http://e/");
    }
}
