//! A relay for HTTP/1.1 that damages requests and answers in ways in which networks and servers fail.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// A fault of a request, or of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The relay itself answers with this status; the request does not reach the server.
    Status(u16),
    /// The relay itself answers with status 503 and `Retry-After` of this many seconds; the request does not
    /// reach the server.
    Busy(u32),
    /// The tags in the answer's head are weak, as from a proxy that changes the form of bodies.
    WeakTags,
    /// As [`Fault::Status`], with this error code of S3.
    Refusal(u16, &'static str),
    /// The relay itself answers with status 200 and this body; the request does not reach the server.
    Instead(&'static str),
    /// No answer comes until the client gives up; [`HttpRelay::heal`] ends the connection.
    Silence,
    /// The connection ends before an answer; the request does not reach the server.
    Refuse,
    /// The server executes the request, and its answer is lost.
    LoseAnswer,
    /// The answer is delayed by this time.
    Delay(Duration),
    /// The second half of the answer's body is missing.
    Cut,
    /// The second half of the answer's body is missing, and the answer's head does not state the length of the body.
    CutUnnoticed,
    /// The answer's head announces a body of this many bytes, and the connection ends after the actual bytes.
    Claim(usize),
    /// An S3 listing is cut to this many keys and a continuation, as from a server with such short pages.
    Pages(usize),
    /// A byte in the middle of the answer's body is changed.
    Flip,
    /// The body of the answer arrives at one byte each 50 ms.
    Trickle,
}

/// The requests that a fault affects.
#[derive(Clone, Debug)]
pub struct Rule {
    /// `GET`, `PUT` ..; empty for all.
    pub method: &'static str,
    /// A part of the target; empty for all.
    pub target: String,
    /// The fault.
    pub fault: Fault,
    /// How many such requests it affects; later ones pass.
    pub times: u32,
}

/// Called before a change with the number of earlier changes. Returns whether the change reaches the server.
type BeforeChange = Box<dyn FnMut(u64) -> bool + Send>;

#[derive(Default)]
struct Shared {
    rules: Mutex<Vec<Rule>>,
    seen: Mutex<Vec<String>>,
    is_over: AtomicBool,
    /// How often all faults were ended.
    heals: AtomicU64,
    /// The callback before each change, and the number of changes. Locked while a change is at the server.
    before_changes: Mutex<Option<(BeforeChange, u64)>>,
    /// Set when nothing reaches the server any more.
    is_cut: AtomicBool,
}

/// A relay between a client and a server. It ends when it is dropped.
pub struct HttpRelay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl fmt::Debug for HttpRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpRelay").field("address", &self.address).finish_non_exhaustive()
    }
}

impl HttpRelay {
    /// Starts a relay to the server at `upstream`, without faults.
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it has an address");
        let shared = Arc::new(Shared::default());
        let relay = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if relay.is_over.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(client), relay) = (client, Arc::clone(&relay)) else { continue };
                std::thread::spawn(move || relay.serve(client, upstream));
            }
        });
        Self { address, shared }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Applies a fault to the next matching requests.
    pub fn fail(&self, method: &'static str, target: &str, fault: Fault, times: u32) {
        self.shared.rules.lock().push(Rule { method, target: target.to_owned(), fault, times });
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.shared.rules.lock().clear();
        self.shared.heals.fetch_add(1, Ordering::SeqCst);
    }

    /// From now on only one changing request is at the server at a time. `before` is called ahead of each,
    /// with the number of finished ones. At that moment the server has exactly what it keeps if the client's
    /// machine loses its power. If `before` returns false, neither this request nor any later one reaches the
    /// server.
    pub fn before_changes(&self, before: impl FnMut(u64) -> bool + Send + 'static) {
        *self.shared.before_changes.lock() = Some((Box::new(before), 0));
    }

    /// The requests since the last call: method and target.
    pub fn take_seen(&self) -> Vec<String> {
        std::mem::take(&mut *self.shared.seen.lock())
    }
}

impl Drop for HttpRelay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        // So that the thread that waits for connections checks the flag.
        let _ = TcpStream::connect(self.address);
    }
}

/// A request or an answer: everything up to the empty line, and the body.
struct Message {
    head: String,
    body: Vec<u8>,
}

impl Message {
    /// Reads a message; with `to_end`, its body lasts as long as the connection.
    fn read(stream: &mut TcpStream, to_end: bool) -> Option<Self> {
        let mut bytes = Vec::new();
        let mut buffer = [0; 64 << 10];
        let end = loop {
            if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            match stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(len) => bytes.extend_from_slice(&buffer[..len]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        };
        let body = bytes.split_off(end);
        let head = String::from_utf8_lossy(&bytes).into_owned();
        let mut message = Self { head, body };
        let len = message.header("content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
        while to_end || message.body.len() < len {
            match stream.read(&mut buffer) {
                Ok(0) if to_end => break,
                Ok(0) => return None,
                Ok(len) => message.body.extend_from_slice(&buffer[..len]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        Some(message)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The head with the end of the connection announced, so that each connection carries one request.
    fn closing_head(&self) -> String {
        self.head_without(&["connection"]) + "Connection: close\r\n\r\n"
    }

    /// The same for another body, whose length is announced if given.
    fn head_of(&self, len: Option<usize>) -> String {
        let len = len.map(|len| format!("Content-Length: {len}\r\n")).unwrap_or_default();
        self.head_without(&["connection", "content-length"]) + &len + "Connection: close\r\n\r\n"
    }

    /// The head without these lines, and without the empty line at its end.
    fn head_without(&self, names: &[&str]) -> String {
        let kept = self.head.trim_end().lines().filter(|line| {
            let is_one = |key: &str| names.iter().any(|name| key.eq_ignore_ascii_case(name));
            !line.split_once(':').is_some_and(|(key, _)| is_one(key))
        });
        kept.map(|line| format!("{line}\r\n")).collect()
    }
}

impl Shared {
    fn serve(&self, mut client: TcpStream, upstream: SocketAddr) {
        let Some(request) = Message::read(&mut client, false) else { return };
        let mut words = request.head.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        self.seen.lock().push(format!("{method} {target}"));
        let heals = self.heals.load(Ordering::SeqCst);
        let fault = self.fault_for(method, target);
        match fault {
            Some(Fault::Status(status)) => return answer(&mut client, method, status, &error("Injected")),
            Some(Fault::Refusal(status, code)) => return answer(&mut client, method, status, &error(code)),
            Some(Fault::Busy(seconds)) => {
                let fields = format!("Retry-After: {seconds}\r\n");
                return answer_with(&mut client, method, 503, &fields, &error("SlowDown"));
            }
            Some(Fault::Instead(body)) => return answer(&mut client, method, 200, body),
            Some(Fault::Silence) => {
                let _ = client.set_read_timeout(Some(Duration::from_millis(20)));
                while self.heals.load(Ordering::SeqCst) == heals && !self.is_over.load(Ordering::Relaxed) {
                    match client.read(&mut [0]) {
                        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                        _ => return,
                    }
                }
                return;
            }
            Some(Fault::Refuse) => {
                let _ = client.shutdown(Shutdown::Both);
                return;
            }
            _ => {}
        }
        let Some(answer) = self.pass_on(&request, upstream, matches!(method, "GET" | "HEAD")) else { return };
        match fault {
            Some(Fault::LoseAnswer) => {
                let _ = client.shutdown(Shutdown::Both);
                return;
            }
            Some(Fault::Delay(time)) => std::thread::sleep(time),
            _ => {}
        }
        let (mut head, mut body) = (answer.closing_head(), answer.body.clone());
        match fault {
            Some(Fault::Cut) => body.truncate(body.len() / 2),
            Some(Fault::CutUnnoticed) => {
                body.truncate(body.len() / 2);
                head = answer.head_of(None);
            }
            Some(Fault::WeakTags) => {
                head = head.replace("etag: \"", "ETag: W/\"").replace("ETag: \"", "ETag: W/\"")
            }
            Some(Fault::Claim(len)) => head = answer.head_of(Some(len)),
            Some(Fault::Pages(keys)) => {
                body = first_page(&body, keys);
                head = answer.head_of(Some(body.len()));
            }
            Some(Fault::Flip) => {
                let middle = body.len() / 2;
                if let Some(byte) = body.get_mut(middle) {
                    *byte ^= 1;
                }
            }
            _ => {}
        }
        if client.write_all(head.as_bytes()).is_err() {
            return;
        }
        if fault == Some(Fault::Trickle) {
            for byte in body {
                std::thread::sleep(Duration::from_millis(50));
                if client.write_all(&[byte]).is_err() {
                    return;
                }
            }
            return;
        }
        let _ = client.write_all(&body);
    }

    fn pass_on(&self, request: &Message, upstream: SocketAddr, only_reads: bool) -> Option<Message> {
        if self.is_cut.load(Ordering::SeqCst) {
            return None;
        }
        if only_reads {
            return forward(request, upstream);
        }
        let mut before_changes = self.before_changes.lock();
        let Some((before, changes)) = &mut *before_changes else {
            drop(before_changes);
            return forward(request, upstream);
        };
        // Another request may have been refused while this one waited for its turn.
        if self.is_cut.load(Ordering::SeqCst) || !before(*changes) {
            self.is_cut.store(true, Ordering::SeqCst);
            return None;
        }
        *changes += 1;
        forward(request, upstream)
    }

    fn fault_for(&self, method: &str, target: &str) -> Option<Fault> {
        let mut rules = self.rules.lock();
        let fits = |rule: &&mut Rule| {
            rule.times > 0
                && (rule.method.is_empty() || rule.method == method)
                && target.contains(rule.target.as_str())
        };
        let rule = rules.iter_mut().find(fits)?;
        rule.times -= 1;
        Some(rule.fault)
    }
}

fn error(code: &str) -> String {
    format!("<Error><Code>{code}</Code><Message>by the relay</Message></Error>")
}

/// Answers instead of the server.
fn answer(client: &mut TcpStream, method: &str, status: u16, body: &str) {
    answer_with(client, method, status, "", body);
}

/// The same with more fields in its head.
fn answer_with(client: &mut TcpStream, method: &str, status: u16, fields: &str, body: &str) {
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status} Injected\r\nContent-Length: {len}\r\n{fields}Connection: close\r\n\r\n");
    let _ = client.write_all((head + if method == "HEAD" { "" } else { body }).as_bytes());
}

/// The first keys of a complete listing, and a continuation: the test servers accept a key for that.
fn first_page(listing: &[u8], keys: usize) -> Vec<u8> {
    const COMPLETE: &str = "<IsTruncated>false</IsTruncated>";
    const END: &str = "</Contents>";
    let text = String::from_utf8_lossy(listing);
    let ends: Vec<usize> = text.match_indices(END).map(|(at, _)| at + END.len()).collect();
    let is_longer = ends.len() > keys && text.contains(COMPLETE);
    let Some((kept, end)) = keys.checked_sub(1).and_then(|at| ends.get(at)).zip(ends.last()) else {
        return listing.to_vec();
    };
    let last = text[..*kept].rsplit_once("<Key>").and_then(|(_, key)| key.split_once("</Key>"));
    let Some((last, _)) = last.filter(|_| is_longer) else { return listing.to_vec() };
    let goes_on =
        format!("<IsTruncated>true</IsTruncated><NextContinuationToken>{last}</NextContinuationToken>");
    format!("{}{}", &text[..*kept], &text[*end..]).replace(COMPLETE, &goes_on).into_bytes()
}

fn forward(request: &Message, upstream: SocketAddr) -> Option<Message> {
    let mut server = TcpStream::connect(upstream).ok()?;
    server.write_all(request.closing_head().as_bytes()).ok()?;
    server.write_all(&request.body).ok()?;
    Message::read(&mut server, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_cut_to_a_page_with_a_continuation() {
        let listing = |goes_on: &str, keys: &[&str]| {
            let key = |key: &&str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
            let keys: String = keys.iter().map(key).collect();
            format!("<ListBucketResult>{goes_on}{keys}<Name>b</Name></ListBucketResult>")
        };
        let complete = "<IsTruncated>false</IsTruncated>";
        let page = |of: &str, keys| String::from_utf8(first_page(of.as_bytes(), keys)).unwrap();
        let three = listing(complete, &["a", "b", "c"]);
        let goes_on = "<IsTruncated>true</IsTruncated><NextContinuationToken>b</NextContinuationToken>";
        assert_eq!(page(&three, 2), listing(goes_on, &["a", "b"]));
        assert_eq!(page(&three, 3), three);
        let none = listing(complete, &[]);
        assert_eq!(page(&none, 2), none);
        assert_eq!(page("<html></html>", 2), "<html></html>");
    }
}
