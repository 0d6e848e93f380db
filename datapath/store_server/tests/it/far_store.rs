//! A server of a store on another host: what the server caches of that store, and for how long.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_store::{
    Hash, Holes, Image, ImageName, Object, Pin, Publication, Removed, Store, StoreError, StoreErrorKind,
};
use headwater_store_server::{Limits, Options, StoreServer};
use headwater_testkit::wait_until;
use tokio::sync::watch;

/// More than HTTP/2 sends on a connection before the client reads some of it.
const MANIFEST_BYTES: usize = 512 << 10;

/// A store with two versions and one object, which the tests truncate and repair. It pins any version on
/// request.
#[derive(Default)]
struct Far {
    object: Mutex<Vec<u8>>,
    holes: Mutex<Arc<Holes>>,
    /// How often the object was opened with caches bypassed.
    past_caches: AtomicU64,
    /// The `Headwater-Reading` count of each read that bypasses caches: which repetition of the whole object
    /// it belonged to.
    readings: Arc<Mutex<Vec<Option<u32>>>>,
    held: Arc<()>,
}

/// An object as it was when it was opened.
struct Opened(Hash, Vec<u8>, Arc<Holes>, Arc<Mutex<Vec<Option<u32>>>>);

impl Object for Opened {
    fn id(&self) -> Hash {
        self.0
    }

    fn len_bytes(&self) -> u64 {
        self.1.len() as u64
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let at = usize::try_from(offset).unwrap();
        into.copy_from_slice(&self.1[at..at + into.len()]);
        Ok(())
    }

    fn read_range_past_caches(
        &self,
        offset: u64,
        into: &mut [u8],
        reading: Option<u32>,
    ) -> Result<(), StoreError> {
        self.3.lock().unwrap().push(reading);
        self.read_range(offset, into)
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        Ok(Arc::clone(&self.2))
    }
}

fn read_only() -> StoreError {
    StoreError::new(StoreErrorKind::ReadOnly, "it is on another host")
}

/// The names of its two versions.
fn versions() -> [Hash; 2] {
    [Hash::of(b"one"), Hash::of(b"two")]
}

impl Store for Far {
    fn chunk_bytes(&self) -> u32 {
        65_536
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        Ok(Vec::new())
    }

    fn image(&self, _: &ImageName) -> Result<Option<Image>, StoreError> {
        Ok(None)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        if versions().contains(&id) {
            return Ok(vec![id.0[0]; MANIFEST_BYTES]);
        }
        Err(StoreError::new(StoreErrorKind::NotFound, "no such version"))
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        let holes = Arc::clone(&self.holes.lock().unwrap());
        let (bytes, readings) = (self.object.lock().unwrap().clone(), Arc::clone(&self.readings));
        Ok(Arc::new(Opened(id, bytes, holes, readings)))
    }

    fn open_object_uncached(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        self.past_caches.fetch_add(1, Ordering::SeqCst);
        self.open_object(id)
    }

    fn pin(&self, _: Hash) -> Result<Pin, StoreError> {
        Ok(Pin::new(Arc::clone(&self.held)))
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        Err(read_only())
    }

    fn change(
        &self,
        _: &ImageName,
        _: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        Err(read_only())
    }

    fn remove(&self, _: &ImageName, _: Option<u32>) -> Result<Removed, StoreError> {
        Err(read_only())
    }
}

struct Served {
    far: Arc<Far>,
    address: SocketAddr,
    _stop: watch::Sender<bool>,
    _runtime: tokio::runtime::Runtime,
}

fn serve(limits: Limits) -> Served {
    let far = Arc::<Far>::default();
    let store: Arc<dyn Store> = far.clone();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (stop, stopped) = watch::channel(false);
    let options = Options { listen: "127.0.0.1:0".parse().unwrap(), tls: None, token_file: None, limits };
    let server = runtime.block_on(StoreServer::bind(store, &options)).unwrap();
    let address = server.address();
    runtime.spawn(server.run(stopped));
    Served { far, address, _stop: stop, _runtime: runtime }
}

impl Served {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Status, head and body of an answer.
    fn get(&self, path: &str, headers: &str) -> (u16, String, Vec<u8>) {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n")
            .unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        let body = bytes.split_off(end);
        let head = String::from_utf8(bytes).unwrap().to_lowercase();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), head, body)
    }
}

#[test]
fn a_repaired_object_is_seen_by_uncached_requests() {
    let served = serve(Limits::default());
    let path = format!("/objects/{}", Hash::of(b"an object"));
    let is_now = |len: usize| *served.far.object.lock().unwrap() = vec![7; len];
    let range = |first: usize, total: usize, headers: &str| {
        let last = first + 99;
        let (status, head, body) = served.get(&path, &format!("Range: bytes={first}-{last}\r\n{headers}"));
        assert_eq!((status, body), (206, vec![7; 100]), "{head}");
        assert!(head.contains(&format!("content-range: bytes {first}-{last}/{total}\r\n")), "{head}");
    };
    is_now(1000);
    range(0, 1000, "");
    is_now(5000);
    range(0, 5000, "Cache-Control: max-age=0, No-Cache\r\n");
    // The object that was opened last stays open.
    range(0, 5000, "");
    is_now(9000);
    range(8000, 9000, "");
    range(0, 9000, "");
    assert_eq!(served.get(&path, "Range: bytes=9000-\r\n").0, 416);
}

#[test]
fn the_attempt_number_of_a_full_reread_is_passed_on() {
    let served = serve(Limits::default());
    *served.far.object.lock().unwrap() = vec![7; 1000];
    let path = format!("/objects/{}", Hash::of(b"an object"));
    let past = "Cache-Control: no-cache\r\n";
    for headers in ["", past, "Headwater-Reading: 1\r\n"] {
        assert_eq!(served.get(&path, headers).2, [7; 1000]);
    }
    for reading in ["1", " 20 ", "-1", "x", "99999999999"] {
        assert_eq!(served.get(&path, &format!("{past}Headwater-Reading: {reading}\r\n")).2, [7; 1000]);
    }
    // The count is passed on only from readers that bypass caches, and only if it is a number.
    let readings = served.far.readings.lock().unwrap().clone();
    assert_eq!(readings, [None, Some(1), Some(20), None, None, None]);
}

/// The list of one hole in an object of this length.
fn list_of_one(len_bytes: u64, offset: u64, hole_bytes: u64) -> Vec<u8> {
    let mut list = b"HWHOLES\n\x01\0\0\0\0\0\0\0".to_vec();
    for word in [len_bytes, 1, offset, hole_bytes] {
        list.extend_from_slice(&word.to_le_bytes());
    }
    list.extend_from_slice(&[7; 32]);
    let sum = Hash::of(&list);
    list.extend_from_slice(&sum.0);
    list
}

#[test]
fn current_holes_of_an_open_object_are_reported() {
    let served = serve(Limits::default());
    *served.far.object.lock().unwrap() = vec![7; 20_000];
    let id = Hash::of(b"an object");
    let path = format!("/holes/{id}");
    assert_eq!(served.get(&format!("/objects/{id}"), "").0, 200);
    assert_eq!(served.get(&path, "").0, 404);
    for offset in [8192, 4096] {
        let list = list_of_one(20_000, offset, 4096);
        let holes = Holes::decode("there", &list, 20_000).unwrap();
        *served.far.holes.lock().unwrap() = Arc::new(holes);
        for headers in ["", "Cache-Control: no-cache\r\n"] {
            let (status, head, body) = served.get(&path, headers);
            assert!(status == 200 && body == list, "{head}");
            assert!(head.contains("cache-control: no-cache\r\n"), "{head}");
        }
    }
    // A reader that found wrong bytes in the object gets no answer from caches behind this server, either.
    assert_eq!(served.far.past_caches.load(Ordering::SeqCst), 2);
}

#[test]
fn unknown_versions_are_not_leased() {
    let served = serve(Limits::default());
    let holds = || Arc::strong_count(&served.far.held) - 1;
    for name in 0..10u8 {
        assert_eq!(served.get(&format!("/manifests/{}", Hash::of(&[name])), "").0, 404);
    }
    assert_eq!(holds(), 0);
    for _ in 0..2 {
        assert_eq!(served.get(&format!("/manifests/{}", versions()[0]), "").0, 200);
        assert_eq!(holds(), 1);
    }
}

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&len[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// Sends a request over HTTP/2, and reads only the head of the answer.
fn ask_without_reading(served: &Served, path: &str) -> TcpStream {
    let mut headers = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    headers.extend_from_slice(path.as_bytes());
    headers.extend_from_slice(b"\x01\x09localhost");
    let asked =
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(4, 0, 0, &[])[..], &frame(1, 5, 1, &headers)].concat();
    let mut stream = served.connect();
    stream.write_all(&asked).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).unwrap();
        if head[3] == 1 {
            return stream;
        }
    }
}

#[test]
fn manifests_that_clients_do_not_read_use_limited_memory() {
    let served = serve(Limits { contents_bytes: MANIFEST_BYTES * 3 / 2, ..Limits::default() });
    let [one, two] = versions().map(|id| format!("/manifests/{id}"));
    let slow: Vec<_> = (0..3).map(|_| ask_without_reading(&served, &one)).collect();
    let (status, head, _) = served.get(&two, "");
    assert!(status == 503 && head.contains("retry-after: 1\r\n"), "{head}");
    // Manifests that are already in memory can be sent to all clients, and so can small answers.
    assert!(served.get(&one, "").2 == vec![versions()[0].0[0]; MANIFEST_BYTES]);
    assert_eq!(served.get("/store", "").0, 200);
    drop(slow);
    wait_until("there is room again", || served.get(&two, "").0 == 200);
    assert!(served.get(&two, "").2 == vec![versions()[1].0[0]; MANIFEST_BYTES]);
}
