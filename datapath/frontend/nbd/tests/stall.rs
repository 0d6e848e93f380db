//! Clients that send requests and never read: each is disconnected when it has accepted no bytes for too
//! long, and the log names it.

#[path = "it/fixture/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod fixture;

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Pages, Request,
    SharedPages, SharedSlice,
};
use headwater_nbd::wire::transmission::command;
use headwater_nbd::{Address, Limits, Server, SingleExport};
use headwater_testkit::{Log, wait_until};

use fixture::{PATIENCE, Raw};

const LEN: u32 = 1 << 20;

/// A disk of ones, which it returns as shared slices or copies.
struct Ones {
    slices: Option<SharedPages>,
}

impl Device for Ones {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: u64::from(LEN),
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: true,
            volatile_cache: false,
        }
    }

    fn try_now(&self, op: Op<'_>) -> Result<Attempt, IoError> {
        if let Op::Read { into, .. } = op {
            into.fill(1);
        }
        Ok(Attempt::Done)
    }

    fn read_shared(&self, range: ByteRange, parts: &mut Vec<SharedSlice>) -> bool {
        let Some(pages) = &self.slices else { return false };
        parts.push(SharedSlice::new(pages.clone(), range.offset() as usize, range.len() as usize).unwrap());
        true
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

static LOG: LazyLock<Log> = LazyLock::new(Log::of_warnings);

/// A client that requests far more than sockets buffer, from a server with this limit, and reads nothing.
fn ask_and_never_read(lends: bool, over_tcp: bool, send_stall_ms: u64) {
    LazyLock::force(&LOG);
    let slices = lends.then(|| {
        let mut pages = Pages::new(LEN as usize).unwrap();
        pages.fill(1);
        pages.share()
    });
    let limits = Limits { send_stall_ms, ..Limits::default() };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let address = if over_tcp {
        Address::Tcp { host: "127.0.0.1".into(), port: 0 }
    } else {
        Address::Unix(path.clone())
    };
    let server = Server::bind(address, SingleExport::new(Arc::new(Ones { slices }), "ones"), limits).unwrap();
    let (mut raw, who) = if over_tcp {
        let uri = server.uri();
        let stream = TcpStream::connect(uri.trim_start_matches("nbd://").trim_end_matches('/')).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let who = format!("client {}", stream.local_addr().unwrap());
        (Raw(UnixStream::from(OwnedFd::from(stream))), who)
    } else {
        (Raw::connect(&path), format!("client process {}", std::process::id()))
    };
    raw.shake_hands(true);
    for cookie in 0..64 {
        raw.request(command::READ, 0, cookie, 0, LEN);
    }
    let why = format!("the client accepted no bytes of a reply for {send_stall_ms} ms");
    LOG.wait_for(&format!("{who}: the connection was closed: {why}"));
    wait_until("the end of the connection", || server.connections() == 0);
}

#[test]
fn copied_replies_over_a_unix_socket() {
    ask_and_never_read(false, false, 201);
}

#[test]
fn copied_replies_over_tcp() {
    ask_and_never_read(false, true, 202);
}

#[test]
fn replies_with_shared_pages_over_a_unix_socket() {
    ask_and_never_read(true, false, 203);
}

#[test]
fn replies_with_shared_pages_over_tcp() {
    ask_and_never_read(true, true, 204);
}
