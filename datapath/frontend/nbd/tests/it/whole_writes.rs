//! Long writes that were received completely: the device gets their data in the receive buffer, without a
//! copy.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use headwater_nbd::wire::transmission::{RequestHead, command};
use headwater_nbd::{Address, Limits, Server, SingleExport};

use crate::fixture::Raw;

const SIZE_BYTES: u64 = 1 << 20;
/// Writes from this offset on must wait.
const WAITS_FROM: u64 = SIZE_BYTES / 2;
const LONG_BYTES: u32 = 64 << 10;

/// A disk that reports the memory address of each write's data, and holds the first write until it is
/// released.
struct RecordingDisk {
    contents: Mutex<Vec<u8>>,
    offered: Sender<usize>,
    release: Mutex<Receiver<()>>,
}

impl RecordingDisk {
    fn store(&self, range: ByteRange, from: &[u8]) {
        let at = range.offset() as usize;
        self.contents.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
    }
}

impl Device for RecordingDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: SIZE_BYTES,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if let Op::Write { range, from, .. } = op {
            self.offered.send(from.as_ptr().addr()).unwrap();
            if range.offset() >= WAITS_FROM {
                return Ok(Attempt::MustWait);
            }
            // The second call returns at once: the sender is dropped.
            let _ = self.release.lock().unwrap().recv();
            self.store(range, from);
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        if let Request::Write { range, buffer, .. } = &request {
            self.store(*range, buffer);
        }
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

#[test]
fn a_long_write_that_arrived_completely_is_not_copied() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let ((offered, was_offered), (release, released)) = (channel(), channel());
    let contents = Mutex::new(vec![0; SIZE_BYTES as usize]);
    let disk = Arc::new(RecordingDisk { contents, offered, release: Mutex::new(released) });
    let exports = SingleExport::new(disk.clone(), "a disk");
    let _server = Server::bind(Address::Unix(path.clone()), exports, Limits::default()).unwrap();
    let mut raw = Raw::connect(&path);
    raw.shake_hands(false);
    let write = |cookie, offset: u64, length: u32| {
        let head = RequestHead { flags: 0, command: command::WRITE, cookie, offset, length: length.into() };
        let data: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        ([&head.encode()[..], &data].concat(), data)
    };
    let (short, short_data) = write(1, 0, 4096);
    raw.send(&short);
    let received_at = was_offered.recv().unwrap();
    // The server is blocked here, so that afterwards it finds the next write complete.
    let (long, long_data) = write(2, 4096, LONG_BYTES);
    raw.send(&long);
    drop(release);
    assert_eq!((raw.simple(), raw.simple()), ((0, 1), (0, 2)));
    // Both were at the same address of the receive buffer.
    assert_eq!(was_offered.recv().unwrap(), received_at);

    // A write that waits for the device is copied, and its part of the buffer reused.
    let (waits, waits_data) = write(3, WAITS_FROM, LONG_BYTES);
    let (last, last_data) = write(4, WAITS_FROM + u64::from(LONG_BYTES), 512);
    raw.send(&[waits, last].concat());
    let mut answers = [raw.simple(), raw.simple()];
    answers.sort_unstable();
    assert_eq!(answers, [(0, 3), (0, 4)]);
    let contents = disk.contents.lock().unwrap();
    let waits_from = WAITS_FROM as usize;
    assert!(contents.starts_with(&[short_data, long_data].concat()));
    assert!(contents[waits_from..].starts_with(&[waits_data, last_data].concat()));
}
