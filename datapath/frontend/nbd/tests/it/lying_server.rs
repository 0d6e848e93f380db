//! Servers that follow the protocol until a disk is open, and then reply without end.

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
/// More chunks of one reply than a client should wait for.
const CHUNKS: u64 = 20_000;

/// A proxy that forwards all bytes in both directions, until it is switched: then it replies by itself, with
/// chunks of `kind` of which none is the last. Counts the chunks that it could send.
struct EndlessReplies {
    is_replying: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    uri: String,
}

impl EndlessReplies {
    fn start(fixture: &Fixture, kind: u16, payload: Vec<u8>) -> Self {
        let path = fixture.directory.path().join("proxy.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut server = UnixStream::connect(fixture.socket()).unwrap();
        let (is_replying, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let proxy = Self {
            is_replying: Arc::clone(&is_replying),
            sent: Arc::clone(&sent),
            uri: format!("nbd+unix:///?socket={}", path.display()),
        };
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = client.read(&mut bytes) {
                if !is_replying.load(Ordering::SeqCst) {
                    server.write_all(&bytes[..len]).unwrap();
                    continue;
                }
                let request = RequestHead::decode(bytes[..REQUEST_BYTES].try_into().unwrap()).unwrap();
                let mut chunk_bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
                chunk_bytes.extend_from_slice(&0u16.to_be_bytes());
                chunk_bytes.extend_from_slice(&kind.to_be_bytes());
                chunk_bytes.extend_from_slice(&request.cookie.to_be_bytes());
                chunk_bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
                chunk_bytes.extend_from_slice(&payload);
                while sent.fetch_add(1, Ordering::SeqCst) < CHUNKS && client.write_all(&chunk_bytes).is_ok() {
                }
                return;
            }
        });
        proxy
    }
}

/// Sends one request, and has it answered without end.
fn error_of_endless_reply(kind: u16, payload: &[u8], ask: fn(&Client) -> Result<(), IoError>) -> String {
    let fixture = Fixture::new(ReferenceDisk::new(1 << 20));
    let proxy = EndlessReplies::start(&fixture, kind, payload.to_vec());
    let client = Client::open(&proxy.uri).unwrap();
    ask(&client).unwrap();
    proxy.is_replying.store(true, Ordering::SeqCst);
    let error = ask(&client).unwrap_err();
    assert_eq!(error.kind(), IoErrorKind::Device);
    assert!(proxy.sent.load(Ordering::SeqCst) < CHUNKS, "the client read all chunks: {error}");
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
    let error = error_of_endless_reply(chunk::BLOCK_STATUS, &status, ask_status);
    assert!(error.contains("a second chunk of block status"), "{error}");
    for ask in [ask_status, ask_read] {
        let error = error_of_endless_reply(chunk::NONE, &[], ask);
        assert!(error.contains("does not end its reply"), "{error}");
        // An error code without a message.
        let error = error_of_endless_reply(chunk::ERROR, &[0, 0, 0, 5, 0, 0], ask);
        assert!(error.contains("too many chunks"), "{error}");
    }
    let data = [&[0; 8][..], &[7; 512]].concat();
    assert!(error_of_endless_reply(chunk::OFFSET_DATA, &data, ask_read).contains("overlap"));
    assert!(error_of_endless_reply(chunk::OFFSET_DATA, &[0; 8], ask_read).contains("too many chunks"));
}
