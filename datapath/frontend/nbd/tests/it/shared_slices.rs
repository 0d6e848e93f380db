//! Reads that the device answers with slices of its own memory, of which it drops or reuses its part long
//! before the client receives the bytes.

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Pages,
    Request, SharedPages, SharedSlice,
};
use headwater_nbd::wire::transmission::{REPLY_BYTES, ReplyHead, command};
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_testkit::wait_until;
use parking_lot::Mutex;

use crate::fixture::{PATIENCE, Raw};

const SIZE_BYTES: u64 = 64 << 20;
const PIECE_BYTES: u64 = 16 << 10;
/// Far less than a socket buffers.
const PIECES_KEPT: usize = 4;

/// A disk of which every 8 bytes contain their own offset. It stores nothing but the pieces that it has
/// returned last.
#[derive(Default)]
struct LendingDisk {
    kept: Mutex<Vec<SharedPages>>,
    taken_back: AtomicUsize,
}

fn fill(bytes: &mut [u8], offset: u64) {
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(offset + at as u64 * 8).to_le_bytes());
    }
}

impl LendingDisk {
    /// A piece of the disk. It reuses the memory of the oldest piece if nothing refers to that any more.
    fn piece(&self, index: u64) -> SharedPages {
        let mut kept = self.kept.lock();
        let oldest = (kept.len() == PIECES_KEPT).then(|| kept.remove(0));
        let mut pages = match oldest.and_then(SharedPages::take_back) {
            Some(pages) => {
                self.taken_back.fetch_add(1, Ordering::Relaxed);
                pages
            }
            None => Pages::new(PIECE_BYTES as usize).unwrap(),
        };
        fill(&mut pages, index * PIECE_BYTES);
        let shared = pages.share();
        kept.push(shared.clone());
        shared
    }
}

impl Device for LendingDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: SIZE_BYTES,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, _: Op<'_>) -> Result<Attempt, IoError> {
        Err(IoError::new(IoErrorKind::Device, "this disk only lends"))
    }

    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let mut at = range.offset();
        while at < range.end() {
            let end = (at / PIECE_BYTES + 1).saturating_mul(PIECE_BYTES).min(range.end());
            let from = (at % PIECE_BYTES) as usize;
            parts.push(SharedSlice::new(self.piece(at / PIECE_BYTES), from, (end - at) as usize).unwrap());
            at = end;
        }
        true
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Err(IoError::new(IoErrorKind::Device, "this disk only lends")), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

fn serve(address: Address) -> (Arc<LendingDisk>, Server) {
    let disk = Arc::new(LendingDisk::default());
    let device: Arc<dyn Device> = Arc::clone(&disk) as Arc<dyn Device>;
    let server = Server::bind(address, SingleExport::new(device, "lends"), Limits::default()).unwrap();
    (disk, server)
}

/// Sends all requests before it reads any reply, and then reads now fast, now slowly.
fn read_late(disk: &LendingDisk, mut raw: Raw) {
    // Whole pieces; parts of pieces; more than a pipe buffers; one that begins and ends in the middle of
    // pages.
    let sizes = [128 << 10, 32 << 10, 4 << 20, 33 << 10, 1 << 20, (64 << 10) + 512, 100 << 10];
    let mut asked = Vec::new();
    let mut offset = 512;
    for number in 0..70 {
        let len = sizes[number % sizes.len()];
        offset = (offset + 7 * 1024 * 1024 + 512 * number as u64) % (SIZE_BYTES - u64::from(len));
        offset -= offset % 512;
        asked.push((number as u64, offset, len));
        raw.request(command::READ, 0, number as u64, offset, len);
    }
    // The server fills the sockets' buffers, and meanwhile reuses all its pieces.
    std::thread::sleep(Duration::from_millis(100));
    let mut expected = Vec::new();
    for (cookie, offset, len) in asked {
        if cookie % 16 == 3 {
            std::thread::sleep(Duration::from_millis(20));
        }
        match ReplyHead::decode(&raw.take::<REPLY_BYTES>()).unwrap() {
            ReplyHead::Simple { error, cookie: of } => assert_eq!((error, of), (0, cookie)),
            other => panic!("{other:?}"),
        }
        expected.resize(len as usize, 0);
        fill(&mut expected, offset);
        assert!(raw.take_vec(len as usize) == expected, "request {cookie}: {len} bytes at {offset}");
    }
    assert!(disk.taken_back.load(Ordering::Relaxed) > 100, "the memory was written to again");
}

#[test]
fn shared_pages_arrive_unchanged_over_a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let (disk, _server) = serve(Address::Unix(path.clone()));
    let mut raw = Raw::connect(&path);
    raw.shake_hands(false);
    read_late(&disk, raw);
}

#[test]
fn shared_pages_arrive_unchanged_over_tcp() {
    let (disk, server) = serve(Address::Tcp { host: "127.0.0.1".into(), port: 0 });
    let uri = server.uri();
    let stream = TcpStream::connect(uri.trim_start_matches("nbd://").trim_end_matches('/')).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut raw = Raw(UnixStream::from(OwnedFd::from(stream)));
    raw.shake_hands(false);
    read_late(&disk, raw);
}

#[test]
fn a_client_that_goes_in_the_middle_ends_only_its_connection() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let (_disk, server) = serve(Address::Unix(path.clone()));
    let mut gone = Raw::connect(&path);
    gone.shake_hands(false);
    for cookie in 0..8 {
        gone.request(command::READ, 0, cookie, 0, 4 << 20);
    }
    let mut some = [0; 100_000];
    gone.0.read_exact(&mut some).unwrap();
    drop(gone);
    wait_until("the end of the connection", || server.connections() == 0);
    let mut raw = Raw::connect(&path);
    raw.shake_hands(false);
    raw.request(command::READ, 0, 9, 4096, 64 << 10);
    assert_eq!(raw.simple(), (0, 9));
    let mut expected = vec![0; 64 << 10];
    fill(&mut expected, 4096);
    assert!(raw.take_vec(64 << 10) == expected);
}
