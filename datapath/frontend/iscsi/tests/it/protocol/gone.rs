//! Initiators that disconnect while one of their commands runs for very long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::fixture::{Raw, TARGET, name, target};
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use headwater_iscsi::wire::request::LogoutRequest;
use headwater_iscsi::{Address, FixedTargets, Limits, Offer, Server};
use headwater_testkit::wait_until;

/// A disk so large that discarding all of it never ends. It answers in the caller's thread, or from its own
/// thread.
struct Endless {
    clears: Arc<AtomicU64>,
    late: Option<Mutex<mpsc::Sender<(Request, Completion)>>>,
}

const SIZE_BYTES: u64 = 1 << 62;

fn finish(request: Request, done: Completion, clears: &AtomicU64) {
    if matches!(request, Request::Discard { .. } | Request::WriteZeroes { .. }) {
        clears.fetch_add(1, Ordering::SeqCst);
    }
    done.complete(Ok(()), request.into_buffer());
}

impl Endless {
    fn new(late: bool) -> Self {
        let clears = Arc::<AtomicU64>::default();
        let late = late.then(|| {
            let (sender, receiver) = mpsc::channel();
            let clears = Arc::clone(&clears);
            std::thread::spawn(move || {
                for (request, done) in receiver {
                    finish(request, done, &clears);
                }
            });
            Mutex::new(sender)
        });
        Self { clears, late }
    }

    fn clears(&self) -> u64 {
        self.clears.load(Ordering::SeqCst)
    }
}

impl Device for Endless {
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
        if let Op::Read { into, .. } = op {
            into.fill(0);
            return Ok(Attempt::Done);
        }
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        match &self.late {
            Some(late) => late.lock().unwrap().send((request, done)).unwrap(),
            None => finish(request, done, &self.clears),
        }
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Hole }])
    }
}

fn serve(disk: &Arc<Endless>) -> Server {
    let offer = Offer { scsi: target(TARGET, disk.clone(), 1), alias: String::new(), accounts: None };
    let address = Address { host: "127.0.0.1".into(), port: 0 };
    Server::bind(&address, FixedTargets::new(vec![(name(TARGET), offer)]), Limits::default()).unwrap()
}

/// A session whose command discards the whole disk, by WRITE SAME with UNMAP and NDOB.
fn clearing(server: &Server, disk: &Endless) -> Raw {
    let mut raw = Raw::connect(server.port());
    raw.log_in(&[]);
    raw.clear_attention();
    let mut write_same = [0; 16];
    write_same[..2].copy_from_slice(&[0x93, 0x09]);
    raw.command(&write_same, 0, None);
    let before = disk.clears();
    wait_until("the disk to clear", || disk.clears() > before);
    raw
}

/// The same initiator port logs in again: then the command has ended.
fn comes_back(server: &Server, disk: &Endless, isid: [u8; 6]) {
    let mut raw = Raw::connect(server.port());
    raw.isid = isid;
    raw.log_in(&[]);
    let cleared = disk.clears();
    raw.clear_attention();
    assert_eq!(raw.read(0, 1), [0; 512]);
    assert_eq!(disk.clears(), cleared, "the disk goes on clearing");
    raw.log_out();
}

#[test]
fn the_commands_of_an_initiator_that_hung_up_end() {
    for late in [false, true] {
        let disk = Arc::new(Endless::new(late));
        let server = serve(&disk);
        let raw = clearing(&server, &disk);
        let isid = raw.isid;
        drop(raw);
        wait_until("the session to end", || server.connections() == 0);
        comes_back(&server, &disk, isid);
    }
}

#[test]
fn a_login_ends_the_commands_of_the_replaced_session() {
    for late in [false, true] {
        let disk = Arc::new(Endless::new(late));
        let server = serve(&disk);
        let mut raw = clearing(&server, &disk);
        comes_back(&server, &disk, raw.isid);
        raw.ends();
        // A session that has requested a logout, and waits for the end of its commands.
        let mut raw = clearing(&server, &disk);
        let logout = LogoutRequest {
            immediate: true,
            reason: 0,
            task_tag: raw.next_tag(),
            cid: raw.cid,
            cmd_sn: raw.cmd_sn,
            exp_stat_sn: raw.exp_stat_sn,
        };
        raw.pdu(&logout.encode(), &[]);
        // So that the logout arrives first. The result does not depend on the order.
        std::thread::sleep(Duration::from_millis(50));
        comes_back(&server, &disk, raw.isid);
        raw.ends();
    }
}
