//! A plain web server over a directory: ranges, keep-alive, TLS, and faults on demand.
//!
//! It does not know stores, like a web server in front of one. Faults affect only data objects, unless
//! [`FileServer::fail_all`] is used, so that a server can pass probes and still serve wrong data.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// A fault of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HttpFault {
    /// Nothing.
    #[default]
    None,
    /// It accepts the request and never answers.
    Hang,
    /// Each answer comes after this time.
    Delay(Duration),
    /// It sends this many bytes of a body, then closes the connection.
    BreakAfter(usize),
    /// It sends this many bytes of a body, and then no more.
    HangAfter(usize),
    /// The head of its answer has no end, and arrives byte by byte with this pause.
    Drip(Duration),
    /// One bit of each body is flipped.
    WrongBytes,
    /// It announces and sends one byte less than requested.
    Short,
    /// It sends a body without a length and without an end.
    Endless,
    /// It sends more than it announced.
    TooMuch,
    /// It redirects to this URL.
    Redirect(String),
    /// It answers with this status.
    Status(u16),
    /// It answers every `each`th request with this status and this `Retry-After`.
    Busy {
        /// One request in this many.
        each: u64,
        /// 503 or 429.
        status: u16,
        /// Seconds.
        retry_after: u64,
    },
    /// It sends everything when asked for a part.
    NoRanges,
    /// What it sends is not HTTP.
    Garbage,
}

/// A certificate authority and a server's certificate, for `localhost` and `127.0.0.1` by default.
#[derive(Clone)]
pub struct TestTls {
    /// The authority's certificate, PEM.
    pub ca_pem: String,
    /// The server's certificate, PEM.
    pub certificate_pem: String,
    /// The server's key, PEM.
    pub key_pem: String,
    config: Arc<ServerConfig>,
}

impl TestTls {
    /// A new pair.
    pub fn new() -> Self {
        Self::of(&["localhost", "127.0.0.1"])
    }

    /// A new pair for a server with these names and addresses.
    pub fn of(names: &[&str]) -> Self {
        use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
        let ca_key = KeyPair::generate().expect("a key");
        let mut ca = CertificateParams::new(Vec::new()).expect("parameters");
        // OpenSSL considers a certificate self-signed if its issuer has the same name.
        ca.distinguished_name.push(DnType::CommonName, "authority of a test");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_pem = ca.self_signed(&ca_key).expect("a certificate").pem();
        let issuer = Issuer::new(ca, ca_key);
        let key = KeyPair::generate().expect("a key");
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut leaf = CertificateParams::new(names).expect("parameters");
        leaf.use_authority_key_identifier_extension = true;
        let certificate = leaf.signed_by(&key, &issuer).expect("a certificate");
        Self::with(ca_pem, &certificate, &key)
    }

    /// A certificate for localhost that is its own authority, as OpenSSL makes it by default.
    pub fn of_authority() -> Self {
        use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
        let key = KeyPair::generate().expect("a key");
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut both = CertificateParams::new(names).expect("parameters");
        both.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = both.self_signed(&key).expect("a certificate");
        Self::with(certificate.pem(), &certificate, &key)
    }

    fn with(ca_pem: String, certificate: &rcgen::Certificate, key: &rcgen::KeyPair) -> Self {
        let (certificate_pem, key_pem) = (certificate.pem(), key.serialize_pem());
        let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .expect("a certificate and its key");
        Self { ca_pem, certificate_pem, key_pem, config: Arc::new(config) }
    }
}

impl Default for TestTls {
    fn default() -> Self {
        Self::new()
    }
}

struct Serving {
    root: PathBuf,
    tls: Option<Arc<ServerConfig>>,
    token: Mutex<Option<String>>,
    fault: Mutex<HttpFault>,
    all: AtomicBool,
    stopped: AtomicBool,
    connections: Mutex<Vec<TcpStream>>,
    accepted: AtomicU64,
    requests: AtomicU64,
    object_requests: AtomicU64,
    body_bytes: AtomicU64,
}

/// A server on a port of the loopback address. It ends when it is dropped.
pub struct FileServer {
    serving: Arc<Serving>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
    /// Never listens: it reserves the port for when the server comes back.
    _port: OwnedFd,
}

/// A socket bound to an address that other sockets of this kind may share. Nobody else is given its port.
fn bound(at: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &at)?;
    Ok(socket)
}

fn listen(at: SocketAddr) -> TcpListener {
    let socket = bound(at).expect("a port of our own");
    rustix::net::listen(&socket, 128).expect("a socket that is bound");
    socket.into()
}

impl FileServer {
    /// Serves `root` on a free port.
    pub fn start(root: &Path, tls: Option<&TestTls>) -> Self {
        let serving = Arc::new(Serving {
            root: root.to_owned(),
            tls: tls.map(|tls| Arc::clone(&tls.config)),
            token: Mutex::default(),
            fault: Mutex::default(),
            all: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            connections: Mutex::default(),
            accepted: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            object_requests: AtomicU64::new(0),
            body_bytes: AtomicU64::new(0),
        });
        let port = bound((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
        let address = rustix::net::getsockname(&port).expect("a socket that is bound");
        let address = address.try_into().expect("an internet address");
        let accepting = Some(accept(Arc::clone(&serving), listen(address)));
        Self { serving, address, accepting, _port: port }
    }

    /// Its base URL.
    pub fn url(&self) -> String {
        let scheme = if self.serving.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Requires this token from now on.
    pub fn ask_for_token(&self, token: &str) {
        *self.serving.token.lock() = Some(token.to_owned());
    }

    /// Answers with a fault from now on when asked for a data object.
    pub fn fail(&self, fault: HttpFault) {
        self.serving.all.store(false, Ordering::Release);
        *self.serving.fault.lock() = fault;
    }

    /// As [`FileServer::fail`], for every request.
    pub fn fail_all(&self, fault: HttpFault) {
        *self.serving.fault.lock() = fault;
        self.serving.all.store(true, Ordering::Release);
    }

    /// Requests answered so far.
    pub fn requests(&self) -> u64 {
        self.serving.requests.load(Ordering::Acquire)
    }

    /// How many of them were for data objects.
    pub fn object_requests(&self) -> u64 {
        self.serving.object_requests.load(Ordering::Acquire)
    }

    /// Bytes of bodies sent so far.
    pub fn body_bytes(&self) -> u64 {
        self.serving.body_bytes.load(Ordering::Acquire)
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> u64 {
        self.serving.accepted.load(Ordering::Acquire)
    }

    /// Simulates a crash: all connections are cut, and the port refuses new ones.
    pub fn kill(&mut self) {
        self.serving.stopped.store(true, Ordering::Release);
        // Wakes the thread that accepts connections.
        drop(TcpStream::connect(self.address));
        if let Some(accepting) = self.accepting.take() {
            accepting.join().expect("the accepting thread");
        }
        for connection in self.serving.connections.lock().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Comes back on the same port.
    pub fn revive(&mut self) {
        self.serving.stopped.store(false, Ordering::Release);
        self.accepting = Some(accept(Arc::clone(&self.serving), listen(self.address)));
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn accept(serving: Arc<Serving>, listener: TcpListener) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if serving.stopped.load(Ordering::Acquire) {
                return;
            }
            let Ok(stream) = stream else { continue };
            serving.accepted.fetch_add(1, Ordering::AcqRel);
            let _ = stream.set_nodelay(true);
            let Ok(end) = stream.try_clone() else { continue };
            if let Ok(clone) = stream.try_clone() {
                serving.connections.lock().push(clone);
            }
            let serving = Arc::clone(&serving);
            std::thread::spawn(move || {
                // A client that disconnects is not an error.
                let _ = match &serving.tls {
                    None => converse(&serving, stream),
                    Some(config) => match ServerConnection::new(Arc::clone(config)) {
                        Ok(session) => converse(&serving, StreamOwned::new(session, stream)),
                        Err(_) => Ok(()),
                    },
                };
                // Otherwise the clones keep it open.
                let _ = end.shutdown(Shutdown::Both);
            });
        }
    })
}

struct Asked {
    path: String,
    range: Option<(u64, Option<u64>)>,
    token: Option<String>,
}

fn converse(serving: &Serving, stream: impl Read + Write) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    while let Some(asked) = read_request(&mut stream)? {
        if serving.stopped.load(Ordering::Acquire) {
            return Ok(());
        }
        let number = serving.requests.fetch_add(1, Ordering::AcqRel) + 1;
        let is_object = asked.path.starts_with("/objects/");
        if is_object {
            serving.object_requests.fetch_add(1, Ordering::AcqRel);
        }
        let fault = if is_object || serving.all.load(Ordering::Acquire) {
            serving.fault.lock().clone()
        } else {
            HttpFault::None
        };
        if let HttpFault::Busy { each, status, retry_after } = fault
            && number.is_multiple_of(each)
        {
            let head =
                format!("HTTP/1.1 {status} x\r\nRetry-After: {retry_after}\r\nContent-Length: 0\r\n\r\n");
            stream.get_mut().write_all(head.as_bytes())?;
            continue;
        }
        if !answer(serving, stream.get_mut(), &asked, &fault)? {
            return Ok(());
        }
    }
    Ok(())
}

fn read_request(stream: &mut impl BufRead) -> std::io::Result<Option<Asked>> {
    let mut asked = Asked { path: String::new(), range: None, token: None };
    let mut line = String::new();
    for number in 0.. {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let text = line.trim_end();
        if number == 0 {
            asked.path = text.split(' ').nth(1).unwrap_or_default().to_owned();
        } else if text.is_empty() {
            break;
        } else if let Some(range) = text.strip_prefix("Range: bytes=") {
            let (first, last) = range.split_once('-').unwrap_or((range, ""));
            asked.range = first.parse().ok().map(|first| (first, last.parse().ok()));
        } else if let Some(token) = text.strip_prefix("Authorization: Bearer ") {
            asked.token = Some(token.to_owned());
        }
    }
    Ok(Some(asked))
}

/// Answers a request. Returns whether the connection continues.
fn answer(serving: &Serving, to: &mut impl Write, asked: &Asked, fault: &HttpFault) -> std::io::Result<bool> {
    let wanted = serving.token.lock().clone();
    if wanted.is_some() && wanted != asked.token {
        to.write_all(b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    match fault {
        HttpFault::Hang => {
            while !serving.stopped.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(20));
            }
            return Ok(false);
        }
        HttpFault::Delay(time) => std::thread::sleep(*time),
        HttpFault::Redirect(place) => {
            write!(to, "HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n")?;
            return Ok(true);
        }
        HttpFault::Status(status) => {
            write!(to, "HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n")?;
            return Ok(true);
        }
        HttpFault::Garbage => {
            to.write_all(b"220 mail.example ESMTP\r\n")?;
            to.flush()?;
            return Ok(false);
        }
        HttpFault::Endless => return endless(serving, to),
        HttpFault::Drip(pause) => return drip(serving, to, *pause),
        _ => {}
    }
    let part = match load(serving, asked, fault) {
        Ok(part) => part,
        Err(status) => {
            write!(to, "HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n")?;
            return Ok(true);
        }
    };
    send(serving, to, part, fault)
}

struct Part {
    body: Vec<u8>,
    range: Option<(u64, u64)>,
    total: u64,
}

fn load(serving: &Serving, asked: &Asked, fault: &HttpFault) -> Result<Part, u16> {
    let name = asked.path.trim_start_matches('/');
    if name.split('/').any(|part| part == "..") {
        return Err(404);
    }
    let file = File::open(serving.root.join(name)).map_err(|_| 404u16)?;
    let meta = file.metadata().map_err(|_| 500u16)?;
    if !meta.is_file() {
        return Err(403);
    }
    let total = meta.len();
    let range = asked.range.filter(|_| *fault != HttpFault::NoRanges);
    let (first, last) = match range {
        None => (0, total.saturating_sub(1)),
        Some((first, _)) if first >= total => return Err(416),
        Some((first, last)) => (first, last.unwrap_or(u64::MAX).min(total - 1)),
    };
    let len = if total == 0 { 0 } else { last + 1 - first };
    let mut body = vec![0; usize::try_from(len).map_err(|_| 500u16)?];
    file.read_exact_at(&mut body, first).map_err(|_| 500u16)?;
    Ok(Part { body, range: range.map(|_| (first, last)), total })
}

fn send(serving: &Serving, to: &mut impl Write, mut part: Part, fault: &HttpFault) -> std::io::Result<bool> {
    let middle = part.body.len() / 2;
    match fault {
        HttpFault::WrongBytes => {
            if let Some(byte) = part.body.get_mut(middle) {
                *byte ^= 1;
            }
        }
        HttpFault::Short => drop(part.body.pop()),
        _ => {}
    }
    let status = if part.range.is_some() { "206 Partial Content" } else { "200 OK" };
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", part.body.len());
    if let Some((first, last)) = part.range {
        head.push_str(&format!("Content-Range: bytes {first}-{last}/{}\r\n", part.total));
    }
    head.push_str("\r\n");
    to.write_all(head.as_bytes())?;
    let cut = match fault {
        HttpFault::BreakAfter(bytes) | HttpFault::HangAfter(bytes) => Some((*bytes).min(part.body.len())),
        _ => None,
    };
    let body = part.body.get(..cut.unwrap_or(part.body.len())).unwrap_or_default();
    serving.body_bytes.fetch_add(u64::try_from(body.len()).unwrap_or(0), Ordering::AcqRel);
    to.write_all(body)?;
    if *fault == HttpFault::TooMuch {
        to.write_all(b"and more")?;
    }
    to.flush()?;
    if matches!(fault, HttpFault::HangAfter(_)) {
        while !serving.stopped.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(cut.is_none())
}

fn endless(serving: &Serving, to: &mut impl Write) -> std::io::Result<bool> {
    to.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
    while !serving.stopped.load(Ordering::Acquire) {
        to.write_all(b"4\r\nmore\r\n")?;
    }
    Ok(false)
}

fn drip(serving: &Serving, to: &mut impl Write, pause: Duration) -> std::io::Result<bool> {
    to.write_all(b"HTTP/1.1 200 OK\r\nX-Drops: ")?;
    while !serving.stopped.load(Ordering::Acquire) {
        to.write_all(b".")?;
        to.flush()?;
        std::thread::sleep(pause);
    }
    Ok(false)
}
