//! Servers that keep to the protocol until a disk is open, and then reply without end.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::fixture::Fixture;
use headwater_block::{ByteRange, Device, IoError, IoErrorKind, blocking};
use headwater_nbd::Client;
use headwater_nbd::wire::transmission::{REQUEST_BYTES, RequestHead, chunk};
use headwater_testkit::ReferenceDisk;

const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// More of a reply than a client should wait for.
const CHUNKS: u64 = 20_000;

/// Hands all on, in both directions, until it is to lie: then it answers itself, with chunks of `kind` that are never
/// the last. Counts those that it got rid of.
struct Liar {
    lies: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    uri: String,
}

impl Liar {
    fn start(fixture: &Fixture, kind: u16, payload: Vec<u8>) -> Self {
        let path = fixture.directory.path().join("liar.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut server = UnixStream::connect(fixture.socket()).unwrap();
        let (lies, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let liar = Self {
            lies: Arc::clone(&lies),
            sent: Arc::clone(&sent),
            uri: format!("nbd+unix:///?socket={}", path.display()),
        };
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = client.read(&mut bytes) {
                if !lies.load(Ordering::SeqCst) {
                    server.write_all(&bytes[..len]).unwrap();
                    continue;
                }
                let request = RequestHead::decode(bytes[..REQUEST_BYTES].try_into().unwrap()).unwrap();
                let mut lie = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
                lie.extend_from_slice(&0u16.to_be_bytes());
                lie.extend_from_slice(&kind.to_be_bytes());
                lie.extend_from_slice(&request.cookie.to_be_bytes());
                lie.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
                lie.extend_from_slice(&payload);
                while sent.fetch_add(1, Ordering::SeqCst) < CHUNKS && client.write_all(&lie).is_ok() {}
                return;
            }
        });
        liar
    }
}

/// Has a request answered without end.
fn lied_to(kind: u16, payload: &[u8], ask: fn(&Client) -> Result<(), IoError>) -> String {
    let fixture = Fixture::new(ReferenceDisk::new(1 << 20));
    let liar = Liar::start(&fixture, kind, payload.to_vec());
    let client = Client::open(&liar.uri).unwrap();
    ask(&client).unwrap();
    liar.lies.store(true, Ordering::SeqCst);
    let error = ask(&client).unwrap_err();
    assert_eq!(error.kind(), IoErrorKind::Device);
    assert!(liar.sent.load(Ordering::SeqCst) < CHUNKS, "it took all: {error}");
    error.to_string()
}

fn ask_status(client: &Client) -> Result<(), IoError> {
    client.extents(ByteRange::new(0, 1 << 20).unwrap(), 16).map(drop)
}

fn ask_read(client: &Client) -> Result<(), IoError> {
    blocking::read(client, 0, &mut [0; 4096])
}

#[test]
fn a_reply_without_an_end_is_refused() {
    let status = [[0, 0, 0, 1], [0, 16, 0, 0], [0, 0, 0, 0]].concat();
    let error = lied_to(chunk::BLOCK_STATUS, &status, ask_status);
    assert!(error.contains("a second chunk of block status"), "{error}");
    for ask in [ask_status, ask_read] {
        let error = lied_to(chunk::NONE, &[], ask);
        assert!(error.contains("only ends a reply"), "{error}");
        // An error, and no message.
        let error = lied_to(chunk::ERROR, &[0, 0, 0, 5, 0, 0], ask);
        assert!(error.contains("too many chunks"), "{error}");
    }
    let data = [&[0; 8][..], &[7; 512]].concat();
    assert!(lied_to(chunk::OFFSET_DATA, &data, ask_read).contains("overlap"));
    assert!(lied_to(chunk::OFFSET_DATA, &[0; 8], ask_read).contains("too many chunks"));
}
