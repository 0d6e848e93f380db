//! The client against the server, as a device: the conformance suite, late and out-of-order completions, errors.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::fixture::Fixture;
use headwater_block::{ByteRange, Completion, Device, ExtentKind, IoErrorKind, Request, blocking};
use headwater_nbd::client::{ClientOptions, ConnectError};
use headwater_nbd::wire::transmission::{command, command_flag};
use headwater_nbd::{
    Address, Client, ClientIdentity, Export, ExportInfo, Exports, Limits, NotOpened, Server, SingleExport,
};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits, wait_until};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn range(offset: u64, len: u64) -> ByteRange {
    ByteRange::new(offset, len).unwrap()
}

#[test]
fn a_disk_that_answers_at_once_passes_the_suite() {
    let fixture = Fixture::new(ReferenceDisk::new(4 * MIB));
    let client: Arc<dyn Device> = Client::open(&fixture.server.uri()).unwrap();
    let model = conformance::check(&client, &Options::seeded(21));
    conformance::verify(&*fixture.disk, &model);
}

#[test]
fn a_disk_that_answers_late_and_out_of_order_passes_the_suite() {
    let options = ReferenceOptions {
        waits: Waits::PerMille(600),
        delay: Duration::from_micros(30),
        ..Default::default()
    };
    let fixture = Fixture::new(ReferenceDisk::with_options(4 * MIB, options));
    let client: Arc<dyn Device> = Client::open(&fixture.server.uri()).unwrap();
    let model = conformance::check(&client, &Options { operations: 250, ..Options::seeded(22) });
    conformance::verify(&*fixture.disk, &model);
}

#[test]
fn a_disk_that_shares_pages_passes_the_suite() {
    for waits in [Waits::Never, Waits::PerMille(300)] {
        let options = ReferenceOptions { waits, lends: true, ..Default::default() };
        let fixture = Fixture::new(ReferenceDisk::with_options(4 * MIB, options));
        let client: Arc<dyn Device> = Client::open(&fixture.server.uri()).unwrap();
        let options = Options { max_request_bytes: MIB, ..Options::seeded(24) };
        let model = conformance::check(&client, &options);
        conformance::verify(&*fixture.disk, &model);
    }
}

#[test]
fn long_requests_tiny_limits_and_4096_byte_blocks_pass_the_suite() {
    let options =
        ReferenceOptions { logical_block_bytes: 4096, waits: Waits::PerMille(500), ..Default::default() };
    let limits = Limits {
        request_bytes: 64 << 10,
        requests_in_flight: 2,
        bytes_in_flight: 8192,
        extents_per_reply: 2,
        ..Limits::default()
    };
    let fixture = Fixture::with_limits(ReferenceDisk::with_options(8 * MIB, options), limits);
    let uri = fixture.server.uri().parse().unwrap();
    let options = ClientOptions { commands_in_flight: 3, bytes_in_flight: 100_000, ..Default::default() };
    let client: Arc<dyn Device> = Client::connect(&uri, &options).unwrap();
    let options = Options { operations: 150, max_request_bytes: 2 * MIB, ..Options::seeded(23) };
    conformance::check(&client, &options);
}

#[test]
fn a_read_only_export_passes_the_suite_over_tcp() {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    let bytes = Rng::new(3).bytes(MIB as usize);
    let disk = Arc::new(ReferenceDisk::with_contents(bytes.clone(), options));
    let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let server = Server::bind(address, SingleExport::new(disk.clone(), ""), Limits::default()).unwrap();
    let client: Arc<dyn Device> = Client::open(&server.uri()).unwrap();
    conformance::check(&client, &Options::seeded(24));
    assert_eq!(disk.contents(), bytes);
}

#[test]
fn several_connections_see_each_others_writes() {
    let fixture = Fixture::new(ReferenceDisk::new(MIB));
    let first = Client::open(&fixture.server.uri()).unwrap();
    let second = Client::open(&fixture.server.uri()).unwrap();
    for round in 1..50_u8 {
        blocking::write(&*first, 4096, &[round; 4096]).unwrap();
        let mut bytes = [0; 4096];
        blocking::read(&*second, 4096, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 4096]);
    }
}

#[test]
fn waiting_requests_do_not_delay_others() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let slow = Arc::new(ReferenceDisk::with_options(MIB, options));
    // Reads of the second half are answered at once, the others later.
    struct Halves(Arc<ReferenceDisk>, ReferenceDisk);
    impl Device for Halves {
        fn geometry(&self) -> headwater_block::Geometry {
            self.0.geometry()
        }
        fn try_now(
            &self,
            op: headwater_block::Op<'_>,
        ) -> Result<headwater_block::Attempt, headwater_block::IoError> {
            match &op {
                headwater_block::Op::Read { range, .. } if range.offset() >= MIB / 2 => self.1.try_now(op),
                _ => self.0.try_now(op),
            }
        }
        fn submit(&self, request: Request, done: Completion) {
            self.0.submit(request, done);
        }
        fn extents(
            &self,
            range: ByteRange,
            max: usize,
        ) -> Result<Vec<headwater_block::Extent>, headwater_block::IoError> {
            self.0.extents(range, max)
        }
    }
    slow.hold();
    let device = Arc::new(Halves(slow.clone(), ReferenceDisk::new(MIB)));
    let directory = tempfile::tempdir().unwrap();
    let address = Address::Unix(directory.path().join("s"));
    let server = Server::bind(address, SingleExport::new(device, ""), Limits::default()).unwrap();
    let client = Client::open(&server.uri()).unwrap();
    let (tx, rx) = mpsc::channel();
    client.submit(
        Request::Read { range: range(0, 4096), buffer: vec![0; 4096] },
        Completion::new(move |outcome| tx.send(outcome.result.is_ok()).unwrap()),
    );
    wait_until("the slow read", || slow.waiting() == 1);
    for _ in 0..20 {
        blocking::read(&*client, MIB / 2, &mut [0; 4096]).unwrap();
    }
    assert!(rx.try_recv().is_err());
    slow.release();
    assert!(rx.recv().unwrap());
}

#[test]
fn errors_of_the_device_keep_their_kind_and_message() {
    for structured in [true, false] {
        let options = ReferenceOptions {
            waits: if structured { Waits::Never } else { Waits::Always },
            ..Default::default()
        };
        let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
        let client = Client::open(&fixture.server.uri()).unwrap();
        for kind in [IoErrorKind::NoSpace, IoErrorKind::Device] {
            fixture.disk.fail(range(8192, 4096), kind);
            for len in [4096, 128 << 10] {
                let error = blocking::write(&*client, 8192, &vec![1; len]).unwrap_err();
                assert_eq!(error.kind(), kind);
                assert!(error.to_string().contains("injected failure"), "{error}");
                let what = |name: &str| format!(": {name} on 8192+{len} failed with ");
                assert!(error.to_string().contains(&what("NBD_CMD_WRITE")), "{error}");
                let error = blocking::read(&*client, 8192, &mut vec![1; len]).unwrap_err();
                assert_eq!(error.kind(), kind);
                assert!(error.to_string().contains(&what("NBD_CMD_READ")), "{error}");
            }
            fixture.disk.heal();
            blocking::write(&*client, 8192, &[1; 4096]).unwrap();
        }
    }
}

#[test]
fn flush_fua_discard_zeroes_and_prefetch_reach_the_device() {
    let fixture = Fixture::new(ReferenceDisk::new(MIB));
    let client = Client::open(&fixture.server.uri()).unwrap();
    let write = Request::Write { range: range(0, 4096), buffer: vec![1; 4096], fua: true };
    blocking::wait(&*client, write).unwrap();
    blocking::wait(&*client, Request::WriteZeroes { range: range(0, 4096), may_unmap: false, fua: true })
        .unwrap();
    let kinds = |extents: Vec<headwater_block::Extent>| extents.first().map(|e| e.kind);
    assert_eq!(kinds(client.extents(range(0, 4096), 1).unwrap()), Some(ExtentKind::Zero));
    blocking::discard(&*client, 0, 4096).unwrap();
    assert_eq!(kinds(client.extents(range(0, 4096), 1).unwrap()), Some(ExtentKind::Hole));
    blocking::wait(&*client, Request::Prefetch { range: range(0, 4096) }).unwrap();
    blocking::flush(&*client).unwrap();
    let counts = fixture.disk.counts();
    assert_eq!((counts.writes, counts.fua, counts.zeroes, counts.unmapping_zeroes), (1, 2, 2, 1));
    assert_eq!((counts.flushes, counts.prefetches), (1, 1));
}

/// A zero write has FUA, but may be refused for lack of space.
#[test]
fn a_durable_trim_is_a_discard_and_a_flush() {
    for waits in [Waits::Never, Waits::Always] {
        let options = ReferenceOptions { waits, ..ReferenceOptions::default() };
        let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
        let mut raw = fixture.started(false);
        raw.request(command::TRIM, command_flag::FUA, 7, 512, 8192);
        assert_eq!(raw.simple(), (0, 7));
        let counts = fixture.disk.counts();
        assert_eq!((counts.discards, counts.flushes, counts.zeroes), (1, 1, 0), "{waits:?}");
        fixture.disk.fail(range(0, 4096), IoErrorKind::Device);
        raw.request(command::TRIM, command_flag::FUA, 8, 512, 8192);
        assert_eq!(raw.simple(), (5, 8));
        let counts = fixture.disk.counts();
        assert_eq!(counts.flushes, 1, "{waits:?}");
    }
}

struct Named;

impl Exports for Named {
    fn list(&self, _client: &ClientIdentity) -> Vec<ExportInfo> {
        vec![ExportInfo { name: "alpha".into(), description: "first".into() }]
    }

    fn open(&self, name: &str, _client: &ClientIdentity) -> Result<Export, NotOpened> {
        if name != "alpha" {
            return Err(NotOpened::Unknown);
        }
        Ok(Export { device: Arc::new(ReferenceDisk::new(MIB)), description: "first".into() })
    }
}

#[test]
fn an_unknown_export_is_named_with_those_there_are() {
    let directory = tempfile::tempdir().unwrap();
    let address = Address::Unix(directory.path().join("with space"));
    let server = Server::bind(address, Arc::new(Named), Limits::default()).unwrap();
    let client = Client::open(&server.uri_of("alpha")).unwrap();
    assert_eq!(client.description(), "first");
    let Err(error) = Client::open(&server.uri_of("beta")) else { panic!("it was opened") };
    assert!(matches!(error, ConnectError::UnknownExport { .. }));
    let text = error.to_string();
    assert!(text.contains("'beta'") && text.contains("'alpha'"), "{text}");
}

#[test]
fn servers_of_other_protocols_give_clear_errors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let uri = format!("nbd+unix:///?socket={}", path.display());
    let Err(error) = Client::open(&uri) else { panic!() };
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let speaks = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
        let silent = listener.accept().unwrap();
        (stream, silent)
    });
    let Err(error) = Client::open(&uri) else { panic!() };
    assert!(matches!(error, ConnectError::Protocol { .. }), "{error}");
    let options = ClientOptions { connect_timeout_ms: 50, ..Default::default() };
    let Err(error) = Client::connect(&uri.parse().unwrap(), &options) else { panic!() };
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error}");
    drop(speaks.join());
}

#[test]
fn a_lost_server_fails_requests_in_flight_and_later_ones() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let limits = Limits { stop_timeout_ms: 10, ..Limits::default() };
    let fixture = Fixture::with_limits(ReferenceDisk::with_options(MIB, options), limits);
    let client = Client::open(&fixture.server.uri()).unwrap();
    fixture.disk.hold();
    let (tx, rx) = mpsc::channel();
    client.submit(
        Request::Read { range: range(0, 4096), buffer: vec![0; 4096] },
        Completion::new(move |outcome| tx.send(outcome.result).unwrap()),
    );
    wait_until("the read", || fixture.disk.waiting() == 1);
    fixture.server.stop();
    let error = rx.recv().unwrap().unwrap_err();
    assert_eq!(error.kind(), IoErrorKind::Device);
    assert!(error.to_string().contains("lost"), "{error}");
    assert!(blocking::read(&*client, 0, &mut [0; 512]).is_err());
    fixture.disk.release();
}

#[test]
fn a_hanging_server_fails_requests_and_an_idle_one_does_not() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    let options = ClientOptions { silence_limit_ms: Some(1_000), ..Default::default() };
    let mut opened = None;
    // Silence without requests is allowed. On a busy host a reply may take longer than the limit.
    wait_until("what is asked after a silence is answered", || {
        opened = Client::connect(&fixture.server.uri().parse().unwrap(), &options).ok();
        std::thread::sleep(Duration::from_millis(1_500));
        opened.as_ref().is_some_and(|client| blocking::read(&**client, 0, &mut [0; 512]).is_ok())
    });
    let client = opened.unwrap();
    fixture.disk.hold();
    let error = blocking::read(&*client, 0, &mut [0; 512]).unwrap_err();
    assert_eq!(error.kind(), IoErrorKind::Device);
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(source.contains("nothing came from the server for 1 s"), "{error}: {source}");
    fixture.disk.release();
}

#[test]
fn changes_on_a_closed_disk_end_the_connection() {
    for waits in [Waits::Never, Waits::Always] {
        let options = ReferenceOptions { waits, ..Default::default() };
        let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
        type Change = fn(&dyn Device) -> Result<(), headwater_block::IoError>;
        let changes: [Change; 3] = [
            |disk| blocking::write(disk, 8192, &[1; 4096]),
            |disk| blocking::discard(disk, 8192, 4096),
            |disk| blocking::write_zeroes(disk, 8192, 4096),
        ];
        for change in changes {
            let client = Client::open(&fixture.server.uri()).unwrap();
            fixture.disk.fail(range(8192, 4096), IoErrorKind::Closed);
            let error = blocking::read(&*client, 8192, &mut [0; 4096]).unwrap_err();
            assert!(error.to_string().contains("injected failure"), "{error}");
            blocking::write(&*client, 0, &[7; 4096]).unwrap();
            let error = change(&*client).unwrap_err();
            assert!(!error.to_string().contains("injected failure"), "it was answered: {error}");
            // Once the disk works again, a new connection can make the change.
            fixture.disk.heal();
            change(&*Client::open(&fixture.server.uri()).unwrap()).unwrap();
        }
    }
}

#[test]
fn closing_fails_requests_in_flight_at_once() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    let client = Client::open(&fixture.server.uri()).unwrap();
    fixture.disk.hold();
    let (tx, rx) = mpsc::channel();
    client.submit(
        Request::Read { range: range(0, 4096), buffer: vec![0; 4096] },
        Completion::new(move |outcome| tx.send(outcome.result).unwrap()),
    );
    wait_until("the read", || fixture.disk.waiting() == 1);
    client.close();
    assert_eq!(rx.recv().unwrap().unwrap_err().kind(), IoErrorKind::Closed);
    assert!(blocking::read(&*client, 0, &mut [0; 512]).is_err());
    fixture.disk.release();
}

#[test]
fn stopping_finishes_requests_in_flight_and_removes_the_socket() {
    let options = ReferenceOptions { waits: Waits::Always, ..Default::default() };
    let fixture = Fixture::new(ReferenceDisk::with_options(MIB, options));
    let client = Client::open(&fixture.server.uri()).unwrap();
    fixture.disk.hold();
    let (tx, rx) = mpsc::channel();
    for number in 0..8_u64 {
        let tx = tx.clone();
        client.submit(
            Request::Write { range: range(number * 4096, 4096), buffer: vec![9; 4096], fua: false },
            Completion::new(move |outcome| tx.send(outcome.result).unwrap()),
        );
    }
    wait_until("the writes", || fixture.disk.waiting() == 8);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| fixture.server.stop());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!stopping.is_finished());
        fixture.disk.release();
        stopping.join().unwrap();
    });
    for _ in 0..8 {
        rx.recv().unwrap().unwrap();
    }
    assert!(fixture.disk.contents()[..8 * 4096].iter().all(|b| *b == 9));
    assert!(!fixture.socket().exists());
    assert_eq!(fixture.server.connections(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Random sequences, with several requests in flight, against a disk that delays and reorders.
    #[test]
    fn random_sequences_end_in_the_same_contents(
        seed: u64, waits in 0..1001_u32, requests_in_flight in 1..20_usize, block in prop::sample::select(vec![512_u32, 4096]),
    ) {
        let options = ReferenceOptions {
            waits: Waits::PerMille(waits), seed, logical_block_bytes: block, ..Default::default()
        };
        let limits = Limits { requests_in_flight, ..Limits::default() };
        let fixture = Fixture::with_limits(ReferenceDisk::with_options(MIB, options), limits);
        let client: Arc<dyn Device> = Client::open(&fixture.server.uri()).unwrap();
        let options = Options { operations: 40, threads: 2, ..Options::seeded(seed) };
        let model = conformance::check(&client, &options);
        conformance::verify(&*fixture.disk, &model);
    }
}
