//! Requests over a socket and with curl: paths, ranges, tags, tokens, TLS and HTTP/2.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use headwater_store::{
    Access, Hash, Holes, LocalDir, Needs, NewVersion, Publication, Store, StoreError, Version,
};
use headwater_store_server::{Limits, Options, StoreServer, TlsFiles, token_line};
use headwater_testkit::wait_until;
use tokio::sync::watch;

/// A store with one version, served until this is dropped.
struct Served {
    dir: tempfile::TempDir,
    store: LocalDir,
    version: Version,
    object: Vec<u8>,
    address: SocketAddr,
    url: String,
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn options() -> Options {
    Options { listen: "127.0.0.1:0".parse().unwrap(), tls: None, token_file: None, limits: Limits::default() }
}

/// Adds a version that needs one object.
fn commit(publication: Box<dyn Publication>, manifest: &[u8], object: Hash) -> Version {
    let new = NewVersion {
        name: &"debian".parse().unwrap(),
        manifest,
        objects: &[object],
        size_bytes: 4096,
        created_at_s: 1,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(new).unwrap().version
}

fn serve(options: Options) -> Served {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
    let object: Vec<u8> = (0..300_000u32).flat_map(|n| (n ^ (n >> 7)).to_le_bytes()).collect();
    let mut publication = store.publish().unwrap();
    publication.append(&object).unwrap();
    let (id, _) = publication.finish_object().unwrap().unwrap();
    let version = commit(publication, b"a manifest", id);
    store.set_trace(version.manifest, Some(b"a trace")).unwrap();
    let (stop, stopped) = watch::channel(false);
    let (tell, told) = std::sync::mpsc::channel();
    let served: Arc<dyn Store> = Arc::new(store.clone());
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async move {
            let server = StoreServer::bind(served, &options).await.unwrap();
            tell.send((server.address(), server.url())).unwrap();
            server.run(stopped).await;
        });
    });
    let (address, url) = told.recv().unwrap();
    Served { dir, store, version, object, address, url, stop, thread: Some(thread) }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> &str {
        let line = self.head.lines().find(|line| line.to_lowercase().starts_with(&format!("{name}:")));
        line.map_or("", |line| line.split_once(':').unwrap().1.trim())
    }
}

impl Served {
    fn ask(&self, method: &str, path: &str, headers: &[&str]) -> Answer {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut more: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        if !more.contains("Host:") {
            more.push_str("Host: localhost\r\n");
        }
        write!(stream, "{method} {path} HTTP/1.1\r\nConnection: close\r\n{more}\r\n").unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        let body = bytes.split_off(end);
        let head = String::from_utf8(bytes).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head, body }
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[])
    }

    fn object_path(&self) -> String {
        format!("/objects/{}", self.version.objects[0])
    }
}

const FOR_EVER: &str = "public, max-age=31536000, immutable";

#[test]
fn served_bytes_equal_the_files_of_the_directory() {
    let served = serve(options());
    let file = |path: &str| std::fs::read(served.dir.path().join("store").join(path)).unwrap();
    let manifest = format!("/manifests/{}", served.version.manifest);
    let trace = format!("/traces/{}", served.version.manifest);
    for (path, cache) in [
        ("/store", "no-cache"),
        ("/images/debian", "no-cache"),
        (&manifest, FOR_EVER),
        (&served.object_path(), FOR_EVER),
        (&trace, "no-cache"),
    ] {
        let answer = served.get(path);
        assert_eq!(answer.status, 200, "{path}");
        let there = file(path.trim_start_matches('/'));
        assert!(answer.body == there, "{path}");
        assert_eq!(answer.header("cache-control"), cache, "{path}");
        assert_eq!(answer.header("content-length"), there.len().to_string(), "{path}");
        assert_eq!(answer.header("etag"), format!("\"{}\"", Hash::of(&there)), "{path}");
        assert_eq!(answer.header("headwater-store"), "1");
        let head = served.ask("HEAD", path, &[]);
        assert_eq!((head.status, head.body.len()), (200, 0));
        assert_eq!(head.header("content-length"), there.len().to_string(), "{path}");
        let same = served.ask("GET", path, &[&format!("If-None-Match: \"x\", {}", answer.header("etag"))]);
        assert_eq!((same.status, same.body.len()), (304, 0), "{path}");
    }
    assert_eq!(served.get("/images/").body, b"debian\n");
}

#[test]
fn answers_to_uncached_requests_are_not_cached() {
    let served = serve(options());
    let object = served.object_path();
    let tag = format!("\"{}\"", served.version.objects[0]);
    let (knows, past) = (format!("If-None-Match: {tag}"), "Cache-Control: no-cache");
    assert_eq!(served.ask("GET", &object, &[&knows]).status, 304);
    let all = served.get(&object).body;
    // It may have zeroes instead of bytes that were restored since.
    let anew = served.ask("GET", &object, &[&knows, past]);
    assert!(anew.status == 200 && anew.body == all);
    let (part, same) = ("Range: bytes=0-9", format!("If-Range: {tag}"));
    assert_eq!(served.ask("GET", &object, &[part, &same]).status, 206);
    let anew = served.ask("GET", &object, &[part, &same, past]);
    assert!(anew.status == 200 && anew.body == all);
    // A client that caches nothing gets only what it asks for.
    let again = served.ask("GET", &object, &[part, past, "Headwater-Reading: 1"]);
    assert!(again.status == 206 && again.body == all[..10]);
    // A file that is checked against the hash in its name never changes.
    let manifest = format!("/manifests/{}", served.version.manifest);
    let knows = format!("If-None-Match: \"{}\"", served.version.manifest);
    assert_eq!(served.ask("GET", &manifest, &[&knows, past]).status, 304);
}

/// Versions that need the beginning of their data object and no more.
struct Beginning(Hash);

const BEGINNING_BYTES: u64 = 10_000;

impl Needs for Beginning {
    fn objects(&self, _: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        Ok(vec![(self.0, 1_200_000)])
    }

    fn stretches(&self, _: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        needed(self.0, 0..BEGINNING_BYTES);
        Ok(())
    }
}

#[test]
fn the_holes_of_an_object_are_served() {
    let served = serve(options());
    let id = served.version.objects[0];
    let path = format!("/holes/{id}");
    let is_whole = |path: &str| {
        let answer = served.get(path);
        let says = String::from_utf8(answer.body).unwrap();
        assert!(answer.status == 404 && says.contains("has no holes in this store"), "{}{says}", answer.head);
    };
    is_whole(&path);
    is_whole(&format!("/holes/{}", Hash::of(b"nothing")));

    commit(served.store.publish().unwrap(), b"another manifest", id);
    served.store.remove(&"debian".parse().unwrap(), Some(1)).unwrap();
    let freed_bytes = served.store.trim(&Beginning(id)).unwrap();
    let list = served.dir.path().join("store/holes").join(id.to_string());
    let there = std::fs::read(&list).unwrap();
    let answer = served.get(&path);
    assert_eq!((answer.status, answer.header("cache-control")), (200, "no-cache"));
    assert_eq!(answer.header("etag"), format!("\"{}\"", Hash::of(&there)));
    assert!(answer.body == there);
    let holes = Holes::decode("there", &answer.body, 1_200_000).unwrap();
    // The hole is of whole blocks of 4 KiB, after the needed bytes and before the last block, which is not
    // full.
    assert_eq!(holes.stretches(), std::slice::from_ref(&(12_288..1_196_032)));
    assert_eq!(holes.bytes(), freed_bytes);
    let part = served.ask("GET", &path, &["Range: bytes=8-31"]);
    assert!(part.status == 206 && part.body == there[8..32], "{}", part.head);
    // The object has its old length, and its needed bytes are there.
    let object = served.get(&served.object_path());
    assert_eq!((object.status, object.body.len()), (200, served.object.len()));
    assert!(object.body[..10_000] == served.object[..10_000]);

    // A damaged list does not say what the holes are, so this answer must not claim to have no holes.
    let put = |bytes: &[u8]| {
        std::fs::remove_file(&list).unwrap();
        std::fs::write(&list, bytes).unwrap();
    };
    let mut damaged = there.clone();
    damaged[60] ^= 1;
    put(&damaged);
    for headers in [&[][..], &["Cache-Control: no-cache"]] {
        assert_eq!(served.ask("GET", &path, headers).status, 500);
    }
    put(&there);
    assert!(served.get(&path).body == there);
    std::fs::remove_file(&list).unwrap();
    is_whole(&path);
}

#[test]
fn parts_are_answered_exactly() {
    let served = serve(options());
    let (path, all) = (served.object_path(), &served.object);
    let len = all.len();
    for (range, first, last) in [
        ("0-0", 0, 0),
        ("100000-799999", 100_000, 799_999),
        ("1199999-", len - 1, len - 1),
        ("-5", len - 5, len - 1),
        ("262144-524287", 262_144, 524_287),
    ] {
        let answer = served.ask("GET", &path, &[&format!("Range: bytes={range}")]);
        assert_eq!(answer.status, 206, "{range}");
        assert_eq!(answer.header("content-range"), format!("bytes {first}-{last}/{len}"));
        assert!(answer.body == all[first..=last], "{range}");
    }
    let behind = served.ask("GET", &path, &["Range: bytes=1200000-"]);
    assert_eq!((behind.status, behind.header("content-range")), (416, "bytes */1200000"));
    let several = served.ask("GET", &path, &["Range: bytes=0-1,4-5"]);
    assert_eq!((several.status, several.body.len()), (200, len));
    let tag = format!("If-Range: \"{}\"", served.version.objects[0]);
    assert_eq!(served.ask("GET", &path, &["Range: bytes=0-9", &tag]).status, 206);
    assert_eq!(served.ask("GET", &path, &["Range: bytes=0-9", "If-Range: \"other\""]).status, 200);
}

#[test]
fn missing_and_forbidden_requests_are_refused_with_a_reason() {
    let served = serve(options());
    let nothing = Hash::of(b"nothing");
    for path in ["/images/nothing", "/lock", "/tmp/", "/images/../store", &format!("/objects/{nothing}")] {
        let answer = served.get(path);
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.header("content-type"), "application/problem+json");
        let body = String::from_utf8(answer.body).unwrap();
        assert!(body.starts_with("{\"kind\": \"not_found\", \"message\": \""), "{body}");
    }
    for method in ["PUT", "POST", "DELETE"] {
        let answer = served.ask(method, "/store", &["Content-Length: 0"]);
        assert_eq!((answer.status, answer.header("allow")), (405, "GET, HEAD"));
    }
    // If a file cannot be read, the answer is an error that does not show the server's secrets.
    std::fs::write(served.dir.path().join("store/images/debian"), b"HWREFS\n\0").unwrap();
    let answer = served.get("/images/debian");
    assert_eq!(answer.status, 500);
    assert!(!String::from_utf8(answer.body).unwrap().contains(served.dir.path().to_str().unwrap()));
    // The server keeps running.
    assert_eq!(served.get("/store").status, 200);
}

#[test]
fn a_server_reports_a_missing_directory() {
    let served = serve(options());
    assert_eq!(served.get("/store").status, 200);
    let (at, away) = (served.dir.path().join("store"), served.dir.path().join("away"));
    std::fs::rename(&at, &away).unwrap();
    let gone = served.get("/store");
    assert!(
        gone.status == 404 && String::from_utf8_lossy(&gone.body).contains("store was removed"),
        "{}",
        gone.head
    );
    std::fs::rename(&away, &at).unwrap();
    assert_eq!(served.get("/store").status, 200);
}

#[test]
fn a_requested_version_is_not_removed() {
    let served = serve(options());
    served.ask("HEAD", &format!("/manifests/{}", served.version.manifest), &[]);
    let refused = served.store.remove(&"debian".parse().unwrap(), Some(1));
    assert_eq!(refused.unwrap_err().kind(), headwater_store::StoreErrorKind::InUse);
    assert_eq!(served.get(&served.object_path()).status, 200);
}

#[test]
fn a_version_without_requests_can_be_removed_later() {
    let limits = Limits { lease: Duration::from_millis(200), ..Limits::default() };
    let served = serve(Options { limits, ..options() });
    served.ask("HEAD", &format!("/manifests/{}", served.version.manifest), &[]);
    wait_until("it can be removed", || {
        let removed = served.store.remove(&"debian".parse().unwrap(), Some(1));
        let refused = removed.err().map(|e| e.kind());
        assert!(refused.is_none_or(|kind| kind == headwater_store::StoreErrorKind::InUse), "{refused:?}");
        refused.is_none()
    });
}

#[test]
fn a_store_that_does_not_answer_uses_limited_threads() {
    let limits = Limits { reads: 2, read_wait: Duration::from_millis(100), ..Limits::default() };
    let served = serve(Options { limits, ..options() });
    // The server cannot open this object until somebody writes it: the clients give up, and the server's
    // reads go on.
    let id = Hash::of(b"of a store that hangs");
    let pipe = served.dir.path().join("store/objects").join(id.to_string());
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let ask = |_| {
        let mut stream = connect(&served);
        write!(stream, "GET /objects/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        stream
    };
    let given_up: Vec<_> = (0..3).map(ask).collect();
    let until = std::time::Instant::now() + Duration::from_secs(20);
    let refused = loop {
        let answer = served.get("/store");
        if answer.status != 200 || std::time::Instant::now() > until {
            break answer;
        }
    };
    drop(given_up);
    let _back = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    assert_eq!((refused.status, refused.header("retry-after")), (503, "1"));
    assert!(String::from_utf8(refused.body).unwrap().starts_with("{\"kind\": \"unavailable\""));
    while served.get("/store").status != 200 {
        assert!(std::time::Instant::now() < until + Duration::from_secs(20));
    }
    // Reads that their clients abandoned may still occupy threads, so the first attempts may fail.
    wait_until("the object is served", || served.get(&served.object_path()).body == served.object);
}

#[test]
fn only_a_token_of_the_file_opens_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, token_line("anna", "right").unwrap()).unwrap();
    let served = serve(Options { token_file: Some(file), ..options() });
    for headers in [&[][..], &["Authorization: Bearer wrong"], &["Authorization: Basic right"]] {
        let answer = served.ask("GET", &served.object_path(), headers);
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, "Bearer"));
    }
    let answer = served.ask("GET", &served.object_path(), &["Authorization: Bearer right"]);
    assert_eq!(
        (answer.status, answer.header("cache-control")),
        (200, "private, max-age=31536000, immutable")
    );
}

#[test]
fn web_pages_do_not_read_a_store_without_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, token_line("anna", "right").unwrap()).unwrap();
    let open = serve(options());
    let with_tokens = serve(Options { token_file: Some(file), ..options() });
    let port = open.address.port();
    let ours =
        ["localhost", &format!("localhost:{port}"), &format!("127.0.0.1:{port}"), "127.0.0.2", "[::1]:80"];
    for host in ours {
        assert_eq!(open.ask("GET", "/images/", &[&format!("Host: {host}")]).status, 200, "{host}");
    }
    for foreign in [
        &["Host: evil.example"][..],
        &[&format!("Host: evil.example:{port}")],
        &["Host: localhost.evil.example"],
        &["Host: localhost", "Origin: http://evil.example"],
        &["Host: localhost", "Origin: null"],
        &["Host: "],
    ] {
        let answer = open.ask("GET", "/images/", foreign);
        assert_eq!(answer.status, 400, "{foreign:?}");
        // A request with a valid token is allowed, since the token identifies the client.
        let with_token = [foreign, &["Authorization: Bearer right"]].concat();
        assert_eq!(with_tokens.ask("GET", "/images/", &with_token).status, 200, "{foreign:?}");
    }
}

fn curl(arguments: &[&str]) -> (String, Vec<u8>) {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--noproxy", "*", "--max-time", "20"]).args(arguments);
    let output = command.output().expect("curl runs; apt-get install curl");
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.stdout)
}

#[test]
fn curl_downloads_over_tls_with_both_versions_of_http() {
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let files = TlsFiles { certificate: certificate.clone(), key };
    let served = serve(Options { tls: Some(files), ..options() });
    assert!(served.url.starts_with("https://127.0.0.1:"));
    let url = format!("https://localhost:{}{}", served.address.port(), served.object_path());
    let ca = certificate.to_str().unwrap();
    for version in ["--http1.1", "--http2"] {
        let target = dir.path().join("body");
        let out = target.to_str().unwrap();
        let (errors, told) =
            curl(&[version, "--cacert", ca, "-o", out, "-w", "%{http_version} %{http_code}", &url]);
        let expected = if version == "--http2" { "2 200" } else { "1.1 200" };
        assert_eq!(String::from_utf8(told).unwrap(), expected, "{errors}");
        assert!(std::fs::read(&target).unwrap() == served.object);
        // An interrupted download is continued.
        std::fs::write(&target, &served.object[..500_000]).unwrap();
        let (errors, _) = curl(&[version, "--cacert", ca, "-C", "-", "-o", out, &url]);
        assert!(std::fs::read(&target).unwrap() == served.object, "{errors}");
    }
    let (errors, _) = curl(&["--cacert", "/dev/null", &url]);
    assert!(errors.contains("certificate") || errors.contains("CA"), "{errors}");
    // Without TLS nothing is answered, and nothing breaks.
    let mut plain = TcpStream::connect(served.address).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"));
}

#[test]
fn it_listens_to_other_hosts_only_with_tls_and_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalDir::open(dir.path(), Access::WRITE).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let refused = |options: Options| {
        let outcome = runtime.block_on(StoreServer::bind(Arc::clone(&store), &options));
        outcome.map(drop).unwrap_err().to_string()
    };
    let everywhere = Options { listen: "0.0.0.0:0".parse().unwrap(), ..options() };
    assert!(refused(everywhere.clone()).contains("--tls-cert"));
    let files = TlsFiles { certificate: dir.path().join("c"), key: dir.path().join("k") };
    assert!(refused(Options { tls: Some(files.clone()), ..everywhere }).contains("--token-file"));
    let message = refused(Options { tls: Some(files), ..options() });
    assert!(message.contains("for TLS"), "{message}");
    assert!(Path::new(&dir.path().join("store")).exists());
}

/// Clients that do nothing are disconnected soon.
fn fail_fast() -> Options {
    Options { limits: Limits { idle: Duration::from_millis(300), ..Limits::default() }, ..options() }
}

/// Whether the server ends the connection. What it sends before that is ignored.
fn is_ended(stream: &mut impl Read) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => {
                return !matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            }
        }
    }
}

fn connect(served: &Served) -> TcpStream {
    let stream = TcpStream::connect(served.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&len[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// Whether the head of the answer to `HEAD` over HTTP/2 is also the end of it.
fn is_head_alone(served: &Served, path: &str, (name, value): (&str, &str)) -> bool {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()][..], text.as_bytes()].concat();
    // `:method`, `:scheme` http, `:path`, `:authority`, and a field of any name.
    let mut fields =
        [vec![0x02], text("HEAD"), vec![0x86, 0x04], text(path), vec![0x01], text("localhost")].concat();
    fields.extend([vec![0x00], text(name), text(value)].concat());
    let mut stream = connect(served);
    stream.write_all(&[PREFACE, &frame(4, 0, 0, &[]), &frame(1, 5, 1, &fields)].concat()).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        stream.read_exact(&mut payload).unwrap();
        if head[3] == 1 {
            return head[4] & 1 == 1;
        }
    }
}

#[test]
fn an_answer_to_head_has_no_body_over_both_versions_of_http() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, token_line("anna", "right").unwrap()).unwrap();
    let (open, with_tokens) = (serve(options()), serve(Options { token_file: Some(file), ..options() }));
    let object = open.object_path();
    let tag = format!("\"{}\"", open.version.objects[0]);
    let nothing = ("accept", "*/*");
    for (served, path, header, status) in [
        (&open, object.as_str(), nothing, 200),
        (&open, "/images/nothing", nothing, 404),
        (&open, object.as_str(), ("range", "bytes=1200000-"), 416),
        (&open, object.as_str(), ("if-none-match", tag.as_str()), 304),
        (&open, object.as_str(), ("origin", "http://evil.example"), 400),
        (&with_tokens, object.as_str(), nothing, 401),
    ] {
        let answer = served.ask("HEAD", path, &[&format!("{}: {}", header.0, header.1)]);
        assert_eq!((answer.status, answer.body.len()), (status, 0), "{path} {header:?}");
        assert!(is_head_alone(served, path, header), "{path} {header:?}");
    }
}

#[test]
fn clients_without_a_complete_request_are_disconnected() {
    let served = serve(fail_fast());
    let settings = [PREFACE, &frame(4, 0, 0, &[])].concat();
    for said in [&b""[..], b"P", &PREFACE[..8], PREFACE, &settings, b"GET", b"GET / HTTP/1.1\r\nHost:"] {
        let mut stream = connect(&served);
        stream.write_all(said).unwrap();
        assert!(is_ended(&mut stream), "{:?}", String::from_utf8_lossy(said));
    }
}

#[test]
fn clients_that_keep_asking_without_a_token_are_disconnected() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, token_line("anna", "secret").unwrap()).unwrap();
    let limits = Limits { admission: Duration::from_millis(500), ..Limits::default() };
    let served = serve(Options { token_file: Some(tokens), limits, ..options() });
    // Whether the connection is still served after so many requests, each of which comes soon after the one
    // before.
    let lasts = |header: &str| {
        let mut stream = connect(&served);
        (0..40).all(|_| {
            std::thread::sleep(Duration::from_millis(50));
            let asked = write!(stream, "GET /store HTTP/1.1\r\nHost: localhost\r\n{header}\r\n");
            asked.is_ok() && stream.read(&mut [0; 4096]).is_ok_and(|n| n > 0)
        })
    };
    assert!(!lasts("") && !lasts("Authorization: Bearer other\r\n"));
    // On a busy host the token may come too late.
    assert!((0..20).any(|_| lasts("Authorization: Bearer secret\r\n")));
}

/// The answer for `/images/` on a connection that stays open, for a request with these headers.
fn ask_on(stream: &mut TcpStream, headers: &str) -> String {
    write!(stream, "GET /images/ HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").unwrap();
    let mut answer = Vec::new();
    let is_whole = |answer: &[u8]| answer.ends_with(b"\r\n\r\ndebian\n") || answer.ends_with(b"}\n");
    while !is_whole(&answer) {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).unwrap();
        assert!(read > 0, "it ended behind {:?}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&bytes[..read]);
    }
    String::from_utf8(answer).unwrap()
}

#[test]
fn unauthenticated_connections_are_closed_if_all_slots_are_taken() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    std::fs::write(&tokens, token_line("anna", "secret").unwrap()).unwrap();
    let with_token = "Authorization: Bearer secret\r\n";
    // Without tokens, a client is admitted when it has asked for something.
    for (token_file, let_in, refused) in [
        (Some(tokens), with_token, "Authorization: Bearer other\r\n"),
        (None, "", "Origin: http://evil.example\r\n"),
    ] {
        let limits = Limits { connections: 8, unauthenticated_many: 4, ..Limits::default() };
        let served = serve(Options { token_file, limits, ..options() });
        let connect = || {
            let stream = TcpStream::connect(served.address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream
        };
        let mut guest = connect();
        assert!(ask_on(&mut guest, let_in).starts_with("HTTP/1.1 200"));
        let mut strangers: Vec<_> = (0..7).map(|_| connect()).collect();
        // The request is refused but the connection is kept, since there was a free slot.
        assert!(ask_on(&mut strangers[6], refused).starts_with("HTTP/1.1 4"));
        for n in 0..40 {
            let mut stranger = connect();
            // This connection may already have been closed in favour of another one.
            let _ = stranger.write_all([&b""[..], b"GET /store HT", PREFACE][n % 3]);
            strangers.push(stranger);
        }
        let mut other = connect();
        assert!(ask_on(&mut other, let_in).starts_with("HTTP/1.1 200"));
        assert!(ask_on(&mut guest, let_in).starts_with("HTTP/1.1 200"));
        // Seven connections have slots, and one of these was taken last.
        assert!(strangers[..41].iter_mut().all(is_ended));
    }
}

#[test]
fn tls_clients_without_a_request_are_disconnected() {
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    // Long enough for the handshake of a client on a busy host.
    let limits = Limits { idle: Duration::from_secs(3), ..Limits::default() };
    let served = serve(Options { tls: Some(TlsFiles { certificate, key }), limits, ..options() });

    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let client = rustls::ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let mut stream = rustls::StreamOwned::new(client, connect(&served));
    stream.conn.complete_io(&mut stream.sock).unwrap();
    assert!(!stream.conn.is_handshaking());
    assert!(is_ended(&mut stream));
}

#[test]
fn pings_do_not_keep_a_connection_open() {
    let served = serve(fail_fast());
    let path = served.object_path();
    let no_window = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let mut headers = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    headers.extend_from_slice(path.as_bytes());
    headers.extend_from_slice(&[0x01, 1, b'x']);
    let asked = [PREFACE, &no_window, &frame(4, 1, 0, &[]), &frame(1, 5, 1, &headers)].concat();
    let mut stream = connect(&served);
    stream.write_all(&asked).unwrap();
    // The client answers the server's pings, but lets it send nothing of the answer to its request.
    let mut pings = 0;
    let mut head = [0; 9];
    while stream.read_exact(&mut head).is_ok() {
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        if stream.read_exact(&mut payload).is_err() {
            break;
        }
        assert_ne!(head[3], 0, "there is no room for a body");
        if (head[3], head[4]) == (6, 0) {
            pings += 1;
            assert!(pings < 30, "the server pings for ever");
            let _ = stream.write_all(&frame(6, 1, 0, &payload));
        }
    }
}

#[test]
fn a_key_file_without_a_key_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let certificate = dir.path().join("cert.pem");
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    let tls = Some(TlsFiles { key: certificate.clone(), certificate });
    let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let options = Options { tls, ..options() };
    let Err(refused) = runtime.block_on(StoreServer::bind(Arc::new(store), &options)) else {
        panic!("a certificate is taken for a key");
    };
    assert!(refused.to_string().contains("cert.pem for TLS: it holds no private key"), "{refused}");
}
