//! Mounts an empty disk in memory as a file, to measure the front-end alone: `serve DIR SIZE [READERS]`.

use std::path::Path;
use std::sync::Arc;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use headwater_fuse::{Limits, Options, Server};

/// Drops writes and reads as zeroes.
struct Null(u64);

impl Device for Null {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.0,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if let Op::Read { into, .. } = op {
            into.fill(0);
        }
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _max_extents: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, dir, size, more @ ..] = arguments.as_slice() else { panic!("serve DIR SIZE [READERS]") };
    let mut limits = Limits::default();
    if let Some(readers) = more.first() {
        limits.readers = readers.parse().expect("a number of readers");
    }
    let size = headwater_block::size::parse(size).expect("a size");
    let server =
        Server::mount(Path::new(dir), Arc::new(Null(size)), Options { limits, ..Options::default() });
    let server = server.unwrap_or_else(|error| panic!("{error}"));
    println!("{}", server.path().display());
    // Serves until standard input ends.
    let _ = std::io::stdin().read_line(&mut String::new());
}
