//! One HTTP request and its answer on a connection. The answer is checked while it arrives.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use crate::connection::{AfterAnswer, Connection};
use crate::head::{self, HEAD_MAX_BYTES, Head};

/// The most by which the body's buffer grows at a time, because the announced length may be false.
const GROW_BYTES: usize = 4 << 20;
/// The pause for a busy server that does not say when to retry.
const BUSY: Duration = Duration::from_millis(500);
const BUSY_MIN: Duration = Duration::from_millis(100);
const BUSY_MAX: Duration = Duration::from_secs(30);

/// The most informational answers (status 1xx) before an answer.
const ANNOUNCED_MAX: usize = 16;

/// The first bytes of an answer from a server that expected TLS: a TLS alert.
const TLS_ALERT: [u8; 2] = [21, 3];
/// The advice for that case.
const USE_TLS: &str = "if it speaks TLS, write https://";

/// What is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// `len` bytes from `first` of a file of `total` bytes, if that is known.
    Range { first: u64, len: u64, total: Option<u64> },
    /// All of a file of at most `max_bytes`.
    Whole { max_bytes: u64 },
}

impl Wanted {
    /// The expected number of bytes, as far as it is known.
    pub(crate) fn len_bytes(self) -> u64 {
        match self {
            Self::Range { len, .. } => len,
            Self::Whole { .. } => 0,
        }
    }
}

/// Why there is no usable answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The server cannot be reached; it may be later.
    Gone(String),
    /// The answer broke off, or was a failure of the server: the request may succeed later, or never.
    Broke(String),
    /// The server is overloaded, or is a proxy that does not reach its server.
    Busy(Busy),
    /// Another answer than was requested: the server should not be asked again soon.
    Odd(String),
    /// The server does not accept the token, or requires one.
    Refused(String),
    /// The server has a wrong file under this name.
    Wrong(String),
    /// The server does not have the file.
    Missing,
    /// The server closed an idle connection before or when it received this request: repeat the request on a
    /// new connection.
    Stale,
}

/// A reachable server cannot answer at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Busy {
    /// After how long to retry.
    pub wait: Duration,
    pub status: u16,
    /// Whether the server is overloaded and itself said when to retry: reads wait for such a server.
    pub says_when: bool,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Gone(why) | Self::Broke(why) | Self::Odd(why) | Self::Refused(why) | Self::Wrong(why) => {
                why
            }
            Self::Busy(Busy { status: 502 | 504, .. }) => {
                "it is a proxy, and cannot reach the server behind it"
            }
            Self::Busy(_) => "it is too busy",
            Self::Missing => "it does not have this file",
            Self::Stale => "it closed the connection",
        })
    }
}

pub(crate) struct Transfer {
    connection: Connection,
    wanted: Wanted,
    reused: bool,
    head: Option<Head>,
    head_bytes: Vec<u8>,
    /// Informational answers so far.
    announced: usize,
    body: Vec<u8>,
    got: usize,
    expected: usize,
    started: Instant,
    first_byte: Option<Instant>,
    last_progress: Instant,
}

/// What a request says about earlier ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PriorRequests {
    /// Their answers were wrong: caches on the way must ask the server.
    pub caches: bool,
    /// The attempt number of a full re-read of an object.
    pub reading: Option<u32>,
}

impl PriorRequests {
    pub(crate) fn caches(caches: bool) -> Self {
        Self { caches, reading: None }
    }
}

/// The bytes of a request.
pub(crate) fn request(
    authority: &str,
    target: &str,
    token: Option<&str>,
    wanted: Wanted,
    past: PriorRequests,
) -> Vec<u8> {
    let mut text = format!(
        "GET {target} HTTP/1.1\r\nHost: {authority}\r\nUser-Agent: headwater/{}\r\nAccept-Encoding: identity\r\n",
        env!("CARGO_PKG_VERSION")
    );
    if let Wanted::Range { first, len, .. } = wanted {
        let last = first.saturating_add(len.saturating_sub(1));
        text.push_str(&format!("Range: bytes={first}-{last}\r\n"));
    }
    if past.caches {
        text.push_str("Cache-Control: no-cache\r\n");
    }
    if let Some(reading) = past.reading {
        text.push_str(&format!("Headwater-Reading: {reading}\r\n"));
    }
    if let Some(token) = token {
        text.push_str(&format!("Authorization: Bearer {token}\r\n"));
    }
    text.push_str("\r\n");
    text.into_bytes()
}

impl Transfer {
    /// Sends `request` on a connection. `reused`: the connection was used before.
    pub(crate) fn start(
        mut connection: Connection,
        reused: bool,
        request: &[u8],
        wanted: Wanted,
    ) -> Result<Self, Fault> {
        connection.send(request).map_err(|e| Fault::Gone(e.to_string()))?;
        let now = Instant::now();
        Ok(Self {
            connection,
            wanted,
            reused,
            head: None,
            head_bytes: Vec::new(),
            announced: 0,
            body: Vec::new(),
            got: 0,
            expected: 0,
            started: now,
            first_byte: None,
            last_progress: now,
        })
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// When bytes last arrived, or when the transfer was started.
    pub(crate) fn last_progress(&self) -> Instant {
        self.last_progress
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// When the request was sent. A new connection sends it when it is ready. Without this, a server that is
    /// asked rarely, each time on a new connection, would seem slower than one with an idle connection.
    /// `None`: the connection is not ready.
    pub(crate) fn sent(&self) -> Option<Instant> {
        self.connection.ready_at().map(|ready| ready.max(self.started))
    }

    /// Time from the request to the first byte, and to now.
    pub(crate) fn times(&self) -> (Duration, Duration) {
        let sent = self.sent().unwrap_or(self.started);
        let first = self.first_byte.unwrap_or_else(Instant::now);
        (first.duration_since(sent), sent.elapsed())
    }

    /// How much of the body has arrived.
    pub(crate) fn got_bytes(&self) -> u64 {
        u64::try_from(self.got).unwrap_or(u64::MAX)
    }

    /// The length of the whole file to which the range belongs.
    pub(crate) fn total(&self) -> Option<u64> {
        self.head.as_ref()?.range?.total
    }

    /// The body, after `advance` returned that it is complete, and the connection if it can be used again.
    /// Bytes after the body are a fault of the server, and would be taken for its next answer.
    pub(crate) fn finish(mut self) -> (Vec<u8>, Result<Option<Connection>, Fault>) {
        let close = self.head.as_ref().is_none_or(|head| head.close);
        let connection = match self.connection.after_answer() {
            AfterAnswer::More => Err(sends_more()),
            AfterAnswer::Quiet if !close => Ok(Some(self.connection)),
            AfterAnswer::Quiet | AfterAnswer::Ended => Ok(None),
        };
        (self.body, connection)
    }

    /// Continues as far as possible without waiting. `true`: the answer is complete.
    pub(crate) fn advance(&mut self) -> Result<bool, Fault> {
        self.connection.drive().map_err(|e| self.failed_files(&e))?;
        if self.head.is_none() && !self.receive_head()? {
            return Ok(false);
        }
        while self.got < self.expected {
            let end = self.expected.min(self.body.len().max(self.got.saturating_add(GROW_BYTES)));
            if self.body.len() < end {
                self.body.resize(end, 0);
            }
            let Some(rest) = self.body.get_mut(self.got..) else { break };
            match self.connection.read(rest) {
                Ok(0) => {
                    let (got, expected) = (self.got, self.expected);
                    return Err(Fault::Broke(format!("it broke off after {got} of {expected} bytes")));
                }
                Ok(len) => {
                    self.got += len;
                    self.last_progress = Instant::now();
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(self.failed_files(&e)),
            }
        }
        Ok(true)
    }

    fn failed_files(&self, error: &std::io::Error) -> Fault {
        if self.reused && self.head_bytes.is_empty() && self.head.is_none() {
            return Fault::Stale;
        }
        if error.kind() == ErrorKind::InvalidData {
            return Fault::Odd(format!("it cannot be trusted: {error}"));
        }
        if self.head.is_some() {
            let (got, expected) = (self.got, self.expected);
            return Fault::Broke(format!("it broke off after {got} of {expected} bytes: {error}"));
        }
        Fault::Gone(error.to_string())
    }

    /// Returns `true` if the head has arrived and is valid.
    fn receive_head(&mut self) -> Result<bool, Fault> {
        let mut part = [0; 4096];
        loop {
            // An informational head may have arrived together with the answer itself, after which nothing
            // more arrives.
            while let Some((head, end)) = head::parse(&self.head_bytes).map_err(|why| self.no_head(why))? {
                if (100..200).contains(&head.status) {
                    self.head_bytes.drain(..end);
                    self.announced += 1;
                    // Each of them counts as progress. Without a limit, an endless series would not be
                    // noticed.
                    if self.announced > ANNOUNCED_MAX {
                        return Err(Fault::Odd(
                            "it announces an answer again and again, and sends none".into(),
                        ));
                    }
                    continue;
                }
                if head.status == 408 && self.reused {
                    // Some servers announce in this way that they close an idle connection.
                    return Err(Fault::Stale);
                }
                let len = judge(&head, self.wanted).map_err(|fault| match fault {
                    // Most servers that expected TLS answer like this.
                    Fault::Odd(why) if head.status == 400 && self.connection.is_plain() => {
                        Fault::Odd(format!("{why}: {USE_TLS}"))
                    }
                    fault => fault,
                })?;
                self.expected = usize::try_from(len).unwrap_or(usize::MAX);
                self.body = self.head_bytes.split_off(end);
                self.got = self.body.len();
                self.head = Some(head);
                return if self.got > self.expected { Err(sends_more()) } else { Ok(true) };
            }
            if self.head_bytes.len() > HEAD_MAX_BYTES + part.len() {
                return Err(Fault::Odd("the head of its answer is too long".into()));
            }
            let len = match self.connection.read(&mut part) {
                Ok(0) if self.reused && self.head_bytes.is_empty() => return Err(Fault::Stale),
                Ok(0) => return Err(Fault::Gone("it closed the connection without an answer".into())),
                Ok(len) => len,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(self.failed_files(&e)),
            };
            self.last_progress = Instant::now();
            self.first_byte.get_or_insert(self.last_progress);
            self.head_bytes.extend_from_slice(part.get(..len).unwrap_or_default());
        }
    }
}

impl Transfer {
    /// The error for bytes that are not the head of an answer.
    fn no_head(&self, why: &str) -> Fault {
        let is_alert = self.connection.is_plain() && self.head_bytes.starts_with(&TLS_ALERT);
        Fault::Odd(if is_alert { format!("{why}: {USE_TLS}") } else { why.to_owned() })
    }
}

fn sends_more() -> Fault {
    Fault::Odd("it sends more than it announced".into())
}

/// Returns the length of the body if the answer fits the request.
fn judge(head: &Head, wanted: Wanted) -> Result<u64, Fault> {
    let odd = |why: String| Err(Fault::Odd(why));
    match head.status {
        200 | 206 => {}
        300..=399 => {
            let place = head.location.as_deref().unwrap_or("nowhere");
            return odd(format!("it redirects to '{}', which is not followed", place.escape_debug()));
        }
        401 | 403 => {
            let why =
                format!("it refuses access (status {}): give it the right token (--token FILE)", head.status);
            return Err(if head.status == 401 { Fault::Refused(why) } else { Fault::Odd(why) });
        }
        404 | 410 => return Err(Fault::Missing),
        416 => return Err(Fault::Wrong("its file is shorter than it should be".into())),
        429 | 502..=504 => {
            let wait = head.retry_after_s.map_or(BUSY, Duration::from_secs);
            let says_when = head.says_when && matches!(head.status, 429 | 503);
            let wait = wait.clamp(BUSY_MIN, BUSY_MAX);
            return Err(Fault::Busy(Busy { wait, status: head.status, says_when }));
        }
        status @ 500.. => return Err(Fault::Broke(format!("it answers with status {status}"))),
        status => return odd(format!("it answers with status {status}")),
    }
    if head.encoded {
        return odd("it sends a body in an encoding that was not asked for, or without a length".into());
    }
    let Some(length) = head.length else {
        return odd("it does not say how long its answer is".into());
    };
    match wanted {
        Wanted::Whole { max_bytes } if length > max_bytes => {
            odd(format!("it announces {length} bytes, and at most {max_bytes} are possible"))
        }
        Wanted::Whole { .. } if head.status == 200 => Ok(length),
        Wanted::Whole { .. } => odd("it sends a part where the whole was asked for".into()),
        Wanted::Range { first, len, total } if head.status == 206 => {
            let Some(range) = head.range else {
                return odd("it sends a part without saying which".into());
            };
            if let (Some(there), Some(total)) = (range.total, total)
                && there != total
            {
                return Err(Fault::Wrong(format!("its file has {there} bytes instead of {total}")));
            }
            let last = first.saturating_add(len.saturating_sub(1));
            let (from, to) = (range.first, range.last);
            let why = || format!("it sends {length} bytes, {from} to {to}, instead of {first} to {last}");
            if (from, to) != (first, last) {
                return Err(Fault::Wrong(why()));
            }
            if length == len { Ok(length) } else { odd(why()) }
        }
        Wanted::Range { first: 0, len, .. } if length == len => Ok(length),
        Wanted::Range { .. } => {
            odd("it sends all when asked for a part: it does not support range requests".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: Wanted = Wanted::Range { first: 100, len: 50, total: Some(1000) };

    fn verdict(text: &str, wanted: Wanted) -> Result<u64, Fault> {
        judge(&head::parse(text.as_bytes()).unwrap().unwrap().0, wanted)
    }

    #[test]
    fn only_an_answer_to_the_question_is_taken() {
        let ok = "HTTP/1.1 206 x\r\nContent-Length: 50\r\nContent-Range: bytes 100-149/1000\r\n\r\n";
        assert_eq!(verdict(ok, RANGE), Ok(50));
        let whole = Wanted::Whole { max_bytes: 64 };
        assert_eq!(verdict("HTTP/1.1 200 x\r\nContent-Length: 64\r\n\r\n", whole), Ok(64));
        for (text, wanted, says) in [
            ("200 x\r\nContent-Length: 1000", RANGE, "range requests"),
            ("206 x\r\nContent-Length: 50", RANGE, "without saying which"),
            ("206 x\r\nContent-Length: 49\r\nContent-Range: bytes 100-149/1000", RANGE, "49 bytes"),
            ("206 x\r\nTransfer-Encoding: chunked", RANGE, "encoding"),
            ("206 x\r\nContent-Range: bytes 100-149/1000", RANGE, "how long"),
            ("302 x\r\nLocation: http://evil/", RANGE, "http://evil/"),
            ("403 x", RANGE, "--token FILE"),
            ("204 x", RANGE, "status 204"),
            ("200 x\r\nContent-Length: 65", whole, "at most 64"),
            ("206 x\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/9", whole, "a part"),
        ] {
            let Err(Fault::Odd(why)) = verdict(&format!("HTTP/1.1 {text}\r\n\r\n"), wanted) else {
                panic!("{text} was taken");
            };
            assert!(why.contains(says), "{text}: {why}");
        }
        for (text, says) in [
            ("206 x\r\nContent-Length: 50\r\nContent-Range: bytes 0-49/1000", "0 to 49"),
            ("206 x\r\nContent-Length: 50\r\nContent-Range: bytes 100-149/150", "150 bytes instead"),
            ("206 x\r\nContent-Length: 20\r\nContent-Range: bytes 100-119/120", "120 bytes instead"),
            ("416 x", "shorter"),
        ] {
            let Err(Fault::Wrong(why)) = verdict(&format!("HTTP/1.1 {text}\r\n\r\n"), RANGE) else {
                panic!("{text} is not about what was asked for");
            };
            assert!(why.contains(says), "{text}: {why}");
        }
        assert_eq!(verdict("HTTP/1.1 404 x\r\n\r\n", RANGE), Err(Fault::Missing));
        assert!(matches!(verdict("HTTP/1.1 401 x\r\n\r\n", RANGE), Err(Fault::Refused(_))));
        let busy = verdict("HTTP/1.1 503 x\r\nRetry-After: 2\r\n\r\n", RANGE);
        let wait = Duration::from_secs(2);
        assert_eq!(busy, Err(Fault::Busy(Busy { wait, status: 503, says_when: true })));
        let origin = verdict("HTTP/1.1 502 x\r\n\r\n", RANGE);
        assert_eq!(origin, Err(Fault::Busy(Busy { wait: BUSY, status: 502, says_when: false })));
        let silent = verdict("HTTP/1.1 503 x\r\n\r\n", RANGE);
        assert_eq!(silent, Err(Fault::Busy(Busy { wait: BUSY, status: 503, says_when: false })));
        // "At once" becomes a minimum, a day is shortened, and a date is ignored.
        for (after, wait_ms) in [("0", 100), ("86400", 30_000), ("Mon, 23 Nov 2026 03:00:00 GMT", 500)] {
            let busy = verdict(&format!("HTTP/1.1 503 x\r\nRetry-After: {after}\r\n\r\n"), RANGE);
            let wait = Duration::from_millis(wait_ms);
            assert_eq!(busy, Err(Fault::Busy(Busy { wait, status: 503, says_when: true })), "{after}");
        }
        assert!(matches!(verdict("HTTP/1.1 500 x\r\n\r\n", RANGE), Err(Fault::Broke(_))));
    }

    #[test]
    fn an_answer_together_with_its_informational_head_is_read() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let connection = Connection::start(listener.local_addr().unwrap(), None).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let request = request("a", "/x", None, RANGE, PriorRequests::default());
        let mut transfer = Transfer::start(connection, false, &request, RANGE).unwrap();
        assert_eq!(transfer.advance(), Ok(false));
        server.read_exact(&mut vec![0; request.len()]).unwrap();
        let heads = "HTTP/1.1 103 x\r\nLink: <y>\r\n\r\nHTTP/1.1 206 x\r\nContent-Length: 50\r\n\
                     Content-Range: bytes 100-149/1000\r\n\r\n";
        server.write_all(&[heads.as_bytes(), &[7; 50]].concat()).unwrap();
        // The whole answer has arrived before it is checked; nothing comes after it.
        let until = Instant::now() + Duration::from_secs(60);
        while !transfer.advance().unwrap() {
            assert!(Instant::now() < until, "the answer was not seen");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(transfer.finish().0, [7; 50]);
    }

    #[test]
    fn a_server_that_expected_tls_is_recognised() {
        use std::io::Write;
        let answered = |answer: &[u8]| {
            let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let connection = Connection::start(listener.local_addr().unwrap(), None).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            let request = request("a", "/x", None, RANGE, PriorRequests::default());
            let mut transfer = Transfer::start(connection, false, &request, RANGE).unwrap();
            server.write_all(answer).unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            loop {
                assert!(Instant::now() < until, "the transfer still waits");
                match transfer.advance() {
                    Ok(_) => std::thread::sleep(Duration::from_millis(5)),
                    Err(fault) => return fault.to_string(),
                }
            }
        };
        for (answer, is_tls) in [
            (&[21, 3, 3, 0, 2, 2, 50][..], true),
            (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", true),
            (b"SSH-2.0-x\r\n", false),
            (b"HTTP/1.1 402 x\r\nContent-Length: 0\r\n\r\n", false),
        ] {
            let why = answered(answer);
            assert_eq!(why.contains("https://"), is_tls, "{why}");
        }
    }

    #[test]
    fn a_server_that_only_announces_answers_is_given_up() {
        use std::io::Write;
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let connection = Connection::start(listener.local_addr().unwrap(), None).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let request = request("a", "/x", None, RANGE, PriorRequests::default());
        let mut transfer = Transfer::start(connection, false, &request, RANGE).unwrap();
        server.write_all(&b"HTTP/1.1 102 x\r\n\r\n".repeat(ANNOUNCED_MAX + 1)).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let fault = loop {
            assert!(Instant::now() < until, "the transfer still waits");
            match transfer.advance() {
                Ok(_) => std::thread::sleep(Duration::from_millis(5)),
                Err(fault) => break fault,
            }
        };
        assert!(matches!(&fault, Fault::Odd(why) if why.contains("announces")), "{fault:?}");
    }

    #[test]
    fn a_request_asks_for_the_range_and_shows_the_token() {
        let text = String::from_utf8(request(
            "a:1",
            "/x/objects/1",
            Some("secret"),
            RANGE,
            PriorRequests::default(),
        ))
        .unwrap();
        assert!(text.starts_with("GET /x/objects/1 HTTP/1.1\r\nHost: a:1\r\n"), "{text}");
        assert!(text.contains("Range: bytes=100-149\r\n") && text.contains("Bearer secret\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\n") && !text.contains("Cache-Control"));
        let text =
            String::from_utf8(request("a:1", "/x/objects/1", None, RANGE, PriorRequests::caches(true)))
                .unwrap();
        assert!(text.contains("\r\nCache-Control: no-cache\r\n"), "{text}");
    }
}
