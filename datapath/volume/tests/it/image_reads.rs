//! Reads of unchanged blocks: the image answers them, with the read's own buffer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, IoErrorKind, Op, Outcome,
    Request, blocking,
};
use headwater_volume::CacheMode;

use crate::setup;

const MIB: u64 = 1 << 20;

/// An image that answers only on command.
#[derive(Default)]
pub struct Asked {
    tries: AtomicU64,
    requests: Mutex<Vec<(Request, Completion)>>,
}

impl Asked {
    /// The requests in flight: their ranges, their buffers and their completions.
    pub fn take_all(&self) -> Vec<(ByteRange, Vec<u8>, Completion)> {
        let requests = std::mem::take(&mut *self.requests.lock().unwrap());
        let parts = requests.into_iter().map(|(request, done)| match request {
            Request::Read { range, buffer } => (range, buffer, done),
            other => panic!("{other:?}"),
        });
        parts.collect()
    }

    /// The only request in flight.
    pub fn take(&self) -> (ByteRange, Vec<u8>, Completion) {
        let mut requests = self.take_all();
        assert_eq!(requests.len(), 1);
        requests.remove(0)
    }
}

impl Device for Asked {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: 64 * MIB,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, _: Op<'_>) -> Result<Attempt, IoError> {
        self.tries.fetch_add(1, Ordering::SeqCst);
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        self.requests.lock().unwrap().push((request, done));
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

/// Starts a read; returns the address of its buffer and the receiver of its answer.
pub fn read(device: &dyn Device, range: ByteRange) -> (usize, mpsc::Receiver<Outcome>) {
    let (tell, told) = mpsc::channel();
    let buffer = vec![1; range.len() as usize];
    let at = buffer.as_ptr().addr();
    device
        .submit(Request::Read { range, buffer }, Completion::new(move |outcome| tell.send(outcome).unwrap()));
    (at, told)
}

#[test]
fn a_read_of_the_image_alone_is_the_images_with_its_buffer() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let asked = Arc::new(Asked::default());
    let base: Arc<dyn Device> = Arc::clone(&asked) as _;
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 32, 0, dir.path()), &host);
    let range = ByteRange::new(3 * 512, MIB).unwrap();
    for error in [None, Some(IoErrorKind::Corrupt)] {
        let before = volume.counters();
        let (at, answer) = read(&*device, range);
        let (asked_range, mut buffer, done) = asked.take();
        assert_eq!((asked_range, buffer.as_ptr().addr(), asked.tries.load(Ordering::SeqCst)), (range, at, 0));
        buffer.fill(7);
        done.complete(error.map_or(Ok(()), |kind| Err(IoError::new(kind, "as asked for"))), buffer);
        let outcome = answer.recv().unwrap();
        assert_eq!(outcome.result.map_err(|e| e.kind()), error.map_or(Ok(()), Err));
        assert_eq!(outcome.buffer.as_ptr().addr(), at);
        assert!(outcome.buffer.iter().all(|byte| *byte == 7));
        let now = volume.counters();
        assert_eq!(now.image_read_bytes - before.image_read_bytes, MIB);
        assert_eq!(now.latency.read_image.count - before.latency.read_image.count, 1);
    }
    // Changed blocks are put between those of the image.
    blocking::write(&*device, MIB / 2, &[9; 4096]).unwrap();
    let (_, answer) = read(&*device, ByteRange::new(MIB / 2, 8192).unwrap());
    let (rest, mut buffer, done) = asked.take();
    assert_eq!((rest.offset(), rest.len()), (MIB / 2 + 4096, 4096));
    buffer.fill(7);
    done.complete(Ok(()), buffer);
    assert_eq!(answer.recv().unwrap().buffer, [[9; 4096], [7; 4096]].concat());
}

#[test]
fn a_frozen_view_is_gone_before_its_last_read_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let asked = Arc::new(Asked::default());
    let base: Arc<dyn Device> = Arc::clone(&asked) as _;
    let (volume, _) = setup::open(&setup::options(&base, CacheMode::Ram, 32, 0, dir.path()), &host);
    let view = volume.freeze().unwrap();
    let (tell, told) = mpsc::channel();
    let again = Arc::clone(&volume);
    let done = Completion::new(move |outcome| tell.send((outcome.result, again.freeze().map(drop))).unwrap());
    view.submit(
        Request::Read { range: ByteRange::new(0, MIB).unwrap(), buffer: vec![0; MIB as usize] },
        done,
    );
    drop(view);
    let before = volume.counters().image_read_bytes;
    let (_, buffer, done) = asked.take();
    done.complete(Ok(()), buffer);
    let (read, frozen_again) = told.recv().unwrap();
    assert!(read.is_ok() && frozen_again.is_ok(), "{frozen_again:?}");
    assert_eq!(volume.counters().image_read_bytes, before);
}
