//! Measures what a queue's thread costs without a volume: serves a disk that does nothing, or only copies,
//! until the process is ended.
//!
//! `floor null|copy SOCKET`, with `headwater-measure --drive SOCKET` as the driver.

use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use headwater_vhost_user::{Options, Server};
use parking_lot::Mutex;

const SIZE_BYTES: u64 = 1 << 30;

/// Memory in several parts, each with its own lock, so that requests of different parts do not wait for each
/// other.
struct Floor(Vec<Mutex<Vec<u8>>>);

const PIECE_BYTES: u64 = 2 << 20;

impl Device for Floor {
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
        let place = |range: ByteRange| {
            let piece = self.0.get(usize::try_from(range.offset() / PIECE_BYTES).ok()?)?;
            let start = usize::try_from(range.offset() % PIECE_BYTES).ok()?;
            Some((piece, start..start + usize::try_from(range.len()).ok()?))
        };
        match op {
            Op::Read { range, into } => {
                if let Some((piece, part)) = place(range)
                    && let Some(from) = piece.lock().get(part)
                {
                    into.copy_from_slice(from);
                }
            }
            Op::Write { range, from, .. } => {
                if let Some((piece, part)) = place(range)
                    && let Some(to) = piece.lock().get_mut(part)
                {
                    to.copy_from_slice(from);
                }
            }
            _ => {}
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, kind, socket] = arguments.as_slice() else { panic!("floor null|copy SOCKET") };
    let pieces = if kind == "copy" { SIZE_BYTES / PIECE_BYTES } else { 0 };
    let piece = || Mutex::new(vec![1; usize::try_from(PIECE_BYTES).unwrap_or(0)]);
    let floor = Floor((0..pieces).map(|_| piece()).collect());
    let server = Server::bind(socket.as_ref(), Arc::new(floor), Options::default()).expect("it listens");
    println!("{}", server.path().display());
    loop {
        std::thread::park();
    }
}
