//! The log lines about a failing disk and about a machine at its limit: they name the volume and the reason,
//! at a limited rate.

#[path = "it/filling/mod.rs"]
#[expect(dead_code, reason = "it is for others, too")]
mod filling;
#[path = "it/setup/mod.rs"]
mod setup;

use std::fmt::{Debug, Write};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use filling::{MIB, empty, fill};
use headwater_block::{IoErrorKind, blocking};
use headwater_testkit::{Rng, wait_until};
use headwater_volume::{CacheMode, VolumeOptions};
use headwater_writecache::Host;
use headwater_writecache::overflow::io::open_engine;
use headwater_writecache::pressure::SystemPressure;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the lines of the log.
struct Log;

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        write!(self.0, " {value:?}").unwrap();
    }
}

/// The lines about a volume; at most as many as the log accepts since `begun`: 20 in ten seconds, and one
/// about suppressed lines.
fn few_lines_about(name: &str, begun: Instant) -> Vec<String> {
    let name = format!("volume '{name}'");
    let lines: Vec<_> = LINES.lock().unwrap().iter().filter(|line| line.contains(&name)).cloned().collect();
    let most = 20 * (begun.elapsed().as_secs() / 10 + 2);
    assert!((1..=most).contains(&(lines.len() as u64)), "{} lines: {:?}", lines.len(), lines.first());
    lines
}

fn keep_lines() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| tracing::subscriber::set_global_default(Log).unwrap());
}

#[test]
fn a_machine_at_its_limit_does_not_fill_the_log() {
    keep_lines();
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let options = setup::options(&empty(256), CacheMode::Ram, 16, 0, dir.path());
    let options = VolumeOptions { name: "full".into(), pause_limit: Duration::ZERO, ..options };
    let (volume, device) = setup::open(&options, &host);
    let (taken, why) = fill(&*device, 256);
    assert!(taken > 2 && why == Some(IoErrorKind::NoSpace));
    let begun = Instant::now();
    let mut next = (taken + 1) * 256;
    // As few blocks as free space, repeatedly.
    for part in 0..100 {
        assert!(volume.shortage().refusing);
        blocking::discard(&*device, part << 16, 1 << 16).unwrap();
        wait_until("there is room", || !volume.shortage().refusing);
        while blocking::write(&*device, next * 4096, &Rng::new(next).bytes(4096)).is_ok() {
            next += 1;
        }
    }
    let lines = few_lines_about("full", begun);
    for what in ["the write cache is full", "has space again"] {
        assert!(lines.iter().any(|line| line.contains(what)), "{lines:?}");
    }
}

#[test]
fn a_disk_that_fails_does_not_fill_the_log() {
    keep_lines();
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let open = |name: &str| {
        let options = setup::options(&empty(256), CacheMode::RamDisk, 16, 256, dir.path());
        // As long as the failing writes take.
        let pause_limit = Duration::from_secs(600);
        setup::open(&VolumeOptions { name: name.into(), pause_limit, ..options }, &host)
    };
    // A machine that reads one block repeatedly.
    for (name, kind) in [("damaged", IoErrorKind::Corrupt), ("unreadable", IoErrorKind::Device)] {
        let (_volume, device) = open(name);
        assert_eq!(fill(&*device, 64), (64, None));
        let begun = Instant::now();
        faults.flip.store(kind == IoErrorKind::Corrupt, Ordering::SeqCst);
        faults.read_error_every.store(u64::from(kind == IoErrorKind::Device), Ordering::SeqCst);
        for _ in 0..1000 {
            let error = blocking::read(&*device, 0, &mut [0; 4096]).unwrap_err();
            assert_eq!(error.kind(), kind);
        }
        faults.flip.store(false, Ordering::SeqCst);
        faults.read_error_every.store(0, Ordering::SeqCst);
        let lines = few_lines_about(name, begun);
        // Earlier lines may say that writes waited for a slow disk.
        let says = |line: &String| line.starts_with("ERROR") && line.contains("the block at byte 0 of");
        assert!(lines.iter().any(says), "{lines:?}");
    }
    // A machine whose writes find a disk that accepts nothing.
    let (volume, device) = open("unwritable");
    let begun = Instant::now();
    faults.write_error_every.store(1, Ordering::SeqCst);
    let writer = std::thread::spawn(move || assert_eq!(fill(&*device, 18), (18, None)));
    wait_until("many writes fail", || volume.counters().cache.disk_errors >= 60);
    let lines = few_lines_about("unwritable", begun);
    assert!(lines.iter().any(|line| line.contains("a segment could not be written")), "{lines:?}");
    faults.write_error_every.store(0, Ordering::SeqCst);
    writer.join().unwrap();
}

#[test]
fn memory_pressure_and_its_end_are_in_the_log() {
    keep_lines();
    let dir = tempfile::tempdir().unwrap();
    // The kernel's files about a machine.
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("proc")).unwrap();
    let available = |kib: u64| {
        let text = format!("MemTotal: 1000000 kB\nMemAvailable: {kib} kB\n");
        std::fs::write(root.path().join("proc/meminfo"), text).unwrap();
    };
    available(900_000);
    let pressure = SystemPressure::under(root.path());
    let host = Host::with_parts(u64::MAX, open_engine().unwrap(), pressure).unwrap();
    let options = setup::options(&empty(64), CacheMode::RamDisk, 64, 256, dir.path());
    let (volume, device) = setup::open(&options, &host);
    assert_eq!(fill(&*device, 64), (64, None));
    let has = |level: &str, part: &str| {
        let lines = LINES.lock().unwrap();
        lines.iter().any(|line| line.starts_with(level) && line.contains(part))
    };
    assert!(!has("WARN", "memory is short on this host"));
    available(10_000);
    wait_until("the log tells of it", || has("WARN", "memory is short on this host"));
    // It is logged before it is counted.
    wait_until("it is counted", || volume.counters().cache.pressure_shrinks > 0);
    let cache = volume.counters().cache;
    assert!(cache.host_limit_bytes < 64 * MIB, "{cache:?}");
    assert!(!has("INFO", "memory is no longer short"));
    available(900_000);
    wait_until("the log tells of its end", || has("INFO", "memory is no longer short"));
    assert_eq!(host.snapshot().limit_bytes, u64::MAX);
}
