//! Serves a disk in memory until it is killed: what the front-end itself costs, without a volume behind it.
//!
//! `cargo run --release -p headwater-vhost-user --example vhost_user_memory /tmp/x.sock 1G`

use std::path::Path;
use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request, size,
};
use headwater_vhost_user::{Options, Server};
use parking_lot::RwLock;

/// The cheapest disk that keeps what is written: one lock, one allocation, touched beforehand.
struct Memory(RwLock<Vec<u8>>);

fn span(range: ByteRange) -> std::ops::Range<usize> {
    range.offset() as usize..range.end() as usize
}

impl Device for Memory {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.0.read().len() as u64,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        match op {
            Op::Read { range, into } => into.copy_from_slice(&self.0.read()[span(range)]),
            Op::Write { range, from, .. } => self.0.write()[span(range)].copy_from_slice(from),
            Op::WriteZeroes { range, .. } | Op::Discard { range } => self.0.write()[span(range)].fill(0),
            Op::Flush => {}
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        // Never called: nothing ever has to wait.
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(size)) = (arguments.next(), arguments.next()) else {
        return Err("usage: vhost_user_memory PATH SIZE".into());
    };
    // Ones, not zeroes, so that all pages are there before the first request.
    let memory = vec![1; usize::try_from(size::parse(&size)?)?];
    let device = Arc::new(Memory(RwLock::new(memory)));
    let options = Options { name: "memory".into(), ..Options::default() };
    let server = Server::bind(Path::new(&path), device, options)?;
    println!("vhost-user:{}", server.path().display());
    loop {
        std::thread::park();
    }
}
