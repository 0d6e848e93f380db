//! Clients that ask for much and read nothing: how much memory the server uses for them, and whether others
//! are served.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use headwater_store::{
    Access, Hash, Image, ImageName, LocalDir, NewVersion, Object, Pin, Publication, Removed, Store,
    StoreError,
};
use headwater_store_server::{
    CONNECTION_PIECES_BYTES, Limits, Options, PIECE_BYTES, SMALL_PIECE_BYTES, StoreServer,
};
use tokio::sync::watch;

/// A store that counts what is read of its objects, and the manifests that are read, which takes a while.
struct Counted(LocalDir, Arc<AtomicUsize>, Arc<AtomicUsize>);

struct CountedObject(Arc<dyn Object>, Arc<AtomicUsize>);

impl Object for CountedObject {
    fn id(&self) -> Hash {
        self.0.id()
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.1.fetch_add(into.len(), Ordering::SeqCst);
        self.0.read_range(offset, into)
    }
}

impl Store for Counted {
    fn chunk_bytes(&self) -> u32 {
        self.0.chunk_bytes()
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        self.0.images()
    }

    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        self.0.image(name)
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        self.2.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(500));
        self.0.manifest(id)
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        Ok(Arc::new(CountedObject(self.0.open_object(id)?, Arc::clone(&self.1))))
    }

    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.0.pin(manifest)
    }

    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        self.0.publish()
    }

    fn change(
        &self,
        name: &ImageName,
        change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.0.change(name, change)
    }

    fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
        self.0.remove(name, number)
    }
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&len[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

/// A `SETTINGS` frame with this initial window for each stream.
fn window(bytes: u32) -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[&[0, 4], &bytes.to_be_bytes()[..]].concat())
}

/// Type, flags, stream and payload of the next frame.
fn read_frame(stream: &mut TcpStream) -> (u8, u8, u8, Vec<u8>) {
    let mut head = [0; 9];
    stream.read_exact(&mut head).unwrap();
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    stream.read_exact(&mut payload).unwrap();
    (head[3], head[4], head[8], payload)
}

/// A served store with one version, counts of what was read of it, its address, and the version's manifest
/// and object.
struct Served {
    bytes_read: Arc<AtomicUsize>,
    manifests_read: Arc<AtomicUsize>,
    address: SocketAddr,
    manifest: Hash,
    object: Hash,
    content: Vec<u8>,
    _stop: watch::Sender<bool>,
    _runtime: tokio::runtime::Runtime,
    _dir: tempfile::TempDir,
}

fn serve() -> Served {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    let content: Vec<u8> = (0..200_000u32).flat_map(|n| (n ^ (n >> 7)).to_le_bytes()).collect();
    let mut publication = store.publish().unwrap();
    publication.append(&content).unwrap();
    let (object, _) = publication.finish_object().unwrap().unwrap();
    let new = NewVersion {
        name: &"debian".parse().unwrap(),
        manifest: b"a manifest",
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
    let manifest = publication.commit(new).unwrap().version.manifest;
    let (bytes_read, manifests_read) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let counted: Arc<dyn Store> =
        Arc::new(Counted(store, Arc::clone(&bytes_read), Arc::clone(&manifests_read)));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (stop, stopped) = watch::channel(false);
    let listen = "127.0.0.1:0".parse().unwrap();
    let options = Options { listen, tls: None, token_file: None, limits: Limits::default() };
    let server = runtime.block_on(StoreServer::bind(counted, &options)).unwrap();
    let address = server.address();
    runtime.spawn(server.run(stopped));
    let (_stop, _runtime, _dir) = (stop, runtime, dir);
    Served { bytes_read, manifests_read, address, manifest, object, content, _stop, _runtime, _dir }
}

/// The answer to a client that reads all of it.
fn get(address: SocketAddr, path: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    answer
}

#[test]
fn a_manifest_that_many_request_at_once_is_read_once() {
    let served = serve();
    let path = format!("/manifests/{}", served.manifest);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..16).map(|_| scope.spawn(|| get(served.address, &path))).collect();
        assert!(all.into_iter().all(|one| one.join().unwrap().ends_with(b"a manifest")));
    });
    assert_eq!(served.manifests_read.load(Ordering::SeqCst), 1);
}

#[test]
fn a_client_that_reads_nothing_uses_little_memory_and_blocks_nobody() {
    const STREAMS: u8 = 100;
    let Served { bytes_read: read, address, object: id, content, .. } = &serve();
    let path = format!("/objects/{id}");
    let mut headers = vec![0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    headers.extend_from_slice(path.as_bytes());
    headers.extend_from_slice(b"\x01\x09localhost");
    let mut slow = TcpStream::connect(address).unwrap();
    slow.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut said =
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &window(1)[..], &frame(SETTINGS, 1, 0, &[])].concat();
    (0..STREAMS).for_each(|n| said.extend(frame(HEADERS, 5, n * 2 + 1, &headers)));
    slow.write_all(&said).unwrap();
    let mut got: HashMap<u8, Vec<u8>> = HashMap::new();
    let mut heads = 0;
    while heads < STREAMS || got.len() < usize::from(STREAMS) {
        match read_frame(&mut slow) {
            (HEADERS, ..) => heads += 1,
            (DATA, _, stream, bytes) => got.entry(stream).or_default().extend(bytes),
            _ => {}
        }
    }
    let most = CONNECTION_PIECES_BYTES + usize::from(STREAMS) * SMALL_PIECE_BYTES;
    assert!(most < usize::from(STREAMS) * PIECE_BYTES / 4);
    let kept = read.load(Ordering::SeqCst);
    assert!(kept <= most, "{kept} bytes are kept for a client that reads nothing, and at most {most} may be");

    // Other clients are served.
    assert!(get(*address, &path).ends_with(content));

    // So is the slow one, when it reads.
    slow.write_all(&[window(1 << 30), frame(WINDOW_UPDATE, 0, 0, &(1u32 << 30).to_be_bytes())].concat())
        .unwrap();
    let mut ended = 0;
    while ended < STREAMS {
        let (kind, flags, stream, bytes) = read_frame(&mut slow);
        if kind == DATA {
            got.entry(stream).or_default().extend(bytes);
            ended += flags & END_STREAM;
        }
    }
    assert!(got.values().all(|bytes| bytes == content));
}
