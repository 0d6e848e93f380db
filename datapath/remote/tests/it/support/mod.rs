//! What the tests of this crate share: a store of one image, and readers of it through servers.

pub mod holes;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headwater_remote::{Limits, Options, RemoteStore, ServerState};
use headwater_store::{Access, Hash, LocalDir, NewVersion, Object, Store, StoreError, StoreErrorKind};
use headwater_testkit::{FileServer, Rng, wait_until};

pub const OBJECT_BYTES: usize = 1 << 20;
pub const MANIFEST: &[u8] = b"a manifest";

/// A store with one image, whose one object is returned.
pub fn store(dir: &Path) -> Vec<u8> {
    let mut bytes = vec![0; OBJECT_BYTES];
    let mut rng = Rng::new(7);
    bytes.chunks_mut(8).for_each(|part| part.copy_from_slice(&rng.next_u64().to_le_bytes()));
    let store = LocalDir::open(dir, Access::WRITE).unwrap();
    let mut publication = store.publish().unwrap();
    publication.append(&bytes).unwrap();
    let (id, _) = publication.finish_object().unwrap().unwrap();
    let version = NewVersion {
        name: &"debian".parse().unwrap(),
        manifest: MANIFEST,
        objects: &[id],
        size_bytes: 4096,
        created_at_s: 1_700_000_000,
        source: "/disk.raw",
        note: "",
        author: "anna",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(version).unwrap();
    store.set_trace(Hash::of(MANIFEST), Some(&trace())).unwrap();
    bytes
}

/// The trace of the image. Like each trace, it ends with the hash of the rest.
pub fn trace() -> Vec<u8> {
    [b"a trace".as_slice(), &Hash::of(b"a trace").0].concat()
}

/// Limits for servers that answer: no attempt times out on a slow host.
pub fn limits() -> Limits {
    Limits {
        stall: Duration::from_secs(20),
        hedge_after: Duration::from_millis(30),
        hedge_after_max: Duration::from_millis(200),
        probe_after: Duration::from_millis(20),
        probe_after_max: Duration::from_millis(200),
        distrust: Duration::from_secs(60),
        wait_for_better: Duration::from_millis(300),
        ..Limits::default()
    }
}

pub fn options(servers: &[&FileServer]) -> Options {
    let urls = servers.iter().map(|server| server.url().parse().unwrap()).collect();
    Options { limits: limits(), ..Options::new(urls) }
}

pub fn open_urls(urls: &[String], limits: Limits) -> RemoteStore {
    let urls = urls.iter().map(|url| url.parse().unwrap()).collect();
    RemoteStore::open(Options { limits, ..Options::new(urls) }).unwrap()
}

pub fn open(servers: &[&FileServer]) -> RemoteStore {
    RemoteStore::open(options(servers)).unwrap()
}

/// Limits for servers that go silent. On a busy host a good server may time out, too.
pub fn short_timeouts() -> Limits {
    Limits { stall: Duration::from_millis(800), ..limits() }
}

/// Opens a store with short timeouts, as soon as a server answers in time.
pub fn open_with_short_timeouts(options: &Options) -> RemoteStore {
    let mut opened = None;
    wait_until("a server answers in time", || {
        opened = RemoteStore::open(options.clone()).ok();
        opened.is_some()
    });
    opened.unwrap()
}

/// Whether the reason is that a server was slow. Which limit was exceeded first depends on how busy the host
/// is.
pub fn is_slow(why: &str) -> bool {
    ["the whole answer", "sent nothing", "did not answer"].iter().any(|says| why.contains(says))
}

pub fn object(store: &RemoteStore, bytes: &[u8]) -> Arc<dyn Object> {
    store.open_object_of(Hash::of(bytes), bytes.len() as u64).unwrap()
}

/// Reads a part and compares it with the expected bytes, like a reader that checks hashes.
pub fn read(object: &dyn Object, bytes: &[u8], at: usize, len: usize) -> Result<(), StoreError> {
    let mut into = vec![0; len];
    object.read_checked(at as u64, &mut into, &mut |got| {
        if got == &bytes[at..at + len] {
            return Ok(());
        }
        Err(StoreError::new(StoreErrorKind::Damaged, "these are not the bytes"))
    })?;
    assert!(into == bytes[at..at + len]);
    Ok(())
}

/// Waits until all servers of a store are up.
pub fn all_up(store: &RemoteStore) {
    let up = |store: &RemoteStore| store.status().servers.iter().all(|s| s.state == ServerState::Up);
    until(store, "all are up", || up(store));
}

/// Waits until `done` is true. If that takes too long, the panic shows the status of the servers.
#[track_caller]
pub fn until(store: &RemoteStore, what: &str, done: impl FnMut() -> bool) {
    wait_until(std::fmt::from_fn(|f| write!(f, "{what}: {:?}", store.status())), done);
}

/// The head of a message, and its body if the head has a length. `None` at the end.
pub fn message(from: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if from.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    from.read_exact(&mut body).ok()?;
    Some((head, body))
}

/// Answers of a proxy before a server: the function gets the head of a request and the number of earlier
/// requests on its connection. `None` passes the request to the server. After an answer with `Connection:
/// close` the proxy closes the connection.
pub type Answers = dyn Fn(&str, usize) -> Option<Vec<u8>> + Send + Sync;

/// The URL of a proxy before a server. It ends with the test's process.
pub fn before(server: &FileServer, answers: Arc<Answers>) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, behind) = (listener.local_addr().unwrap(), server.address());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, answers) = (client.unwrap(), Arc::clone(&answers));
            std::thread::spawn(move || pass(client, behind, &*answers));
        }
    });
    format!("http://{address}")
}

fn pass(mut client: TcpStream, behind: SocketAddr, answers: &Answers) -> Option<()> {
    let mut server = TcpStream::connect(behind).ok()?;
    let (mut asks, mut passed) =
        (BufReader::new(client.try_clone().unwrap()), BufReader::new(server.try_clone().unwrap()));
    for nth in 0.. {
        let (asked, _) = message(&mut asks)?;
        if let Some(answer) = answers(&asked, nth) {
            client.write_all(&answer).ok()?;
            if String::from_utf8_lossy(&answer).contains("Connection: close") {
                return None;
            }
            continue;
        }
        server.write_all(asked.as_bytes()).ok()?;
        let (head, body) = message(&mut passed)?;
        client.write_all(&[head.as_bytes(), &body].concat()).ok()?;
    }
    None
}

/// An answer with this status.
pub fn status(status: u16) -> Option<Vec<u8>> {
    Some(format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n").into_bytes())
}
