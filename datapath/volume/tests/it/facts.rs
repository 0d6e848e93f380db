//! Failures of other products that must not happen here: one test for each that concerns a write cache.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::filling::{MIB, assert_holds, empty, fill, fill_patiently, pattern};
use crate::setup;
use headwater_block::{ByteRange, Completion, Device, IoErrorKind, Request, blocking};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, wait_until};
use headwater_volume::{CacheMode, PersistentOptions};
use headwater_writecache::Host;
use headwater_writecache::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};

const BLOCK: u64 = 4096;

/// Metadata of the unnamed files of this process in a directory.
fn open_files(dir: &Path) -> Vec<std::fs::Metadata> {
    let dir = dir.canonicalize().unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    links
        .filter(|link| std::fs::read_link(link.path()).is_ok_and(|target| target.starts_with(&dir)))
        .filter_map(|link| std::fs::metadata(link.path()).ok())
        .filter(|metadata| metadata.is_file())
        .collect()
}

/// The real engine, which counts its operations.
struct CountingEngine {
    real: Arc<dyn IoEngine>,
    counts: Arc<IoCounts>,
}

#[derive(Default)]
struct IoCounts {
    reads: AtomicU64,
    writes: AtomicU64,
    /// Writes that are not a whole segment.
    odd_writes: AtomicU64,
    /// Writes that do not begin at the end of the previous one.
    jumps: AtomicU64,
    /// The end of the last write.
    end: AtomicU64,
}

impl IoEngine for CountingEngine {
    fn submit(&self, op: IoOp) {
        let which = if op.direction == Direction::Read { &self.counts.reads } else { &self.counts.writes };
        which.fetch_add(1, Ordering::SeqCst);
        if op.direction != Direction::Read && op.len != ENCRYPTED_SEGMENT_BYTES {
            self.counts.odd_writes.fetch_add(1, Ordering::SeqCst);
        }
        if op.direction != Direction::Read
            && self.counts.end.swap(op.offset + op.len as u64, Ordering::SeqCst) != op.offset
        {
            self.counts.jumps.fetch_add(1, Ordering::SeqCst);
        }
        self.real.submit(op);
    }
}

fn counting_host() -> (Host, Arc<IoCounts>) {
    setup::end_with_a_panic_of_ours();
    let counts = Arc::new(IoCounts::default());
    let engine = CountingEngine { real: open_engine().unwrap(), counts: Arc::clone(&counts) };
    (Host::with_engine(u64::MAX, Arc::new(engine)).unwrap(), counts)
}

#[test]
fn full_disk_under_a_sparse_cache_file_killed_the_daemon_with_sigbus() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(256), CacheMode::RamDisk, 32, 512, dir.path());
    options.pause_limit = Duration::from_secs(10);
    let (volume, device) = setup::open(&options, &host);
    fill_patiently(&*device, 0..100);
    faults.full.store(true, Ordering::Relaxed);
    let (taken, why) = fill(&*device, 256);
    assert_eq!(why, Some(IoErrorKind::NoSpace), "a full disk is 'no space', not an I/O error");
    // Reads continue, from RAM and from the full disk.
    assert_holds(&*device, taken.max(90));
    assert!(volume.counters().cache.read_disk_blocks > 0);
    assert_nothing_is_mapped(dir.path());
}

/// No file of a cache is mapped, so a full disk cannot cause a signal.
fn assert_nothing_is_mapped(dir: &Path) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let dir = dir.canonicalize().unwrap();
    assert!(!open_files(&dir).is_empty(), "there is nothing that could be");
    assert!(!maps.contains(dir.to_str().unwrap()), "a file of the cache is mapped");
}

#[test]
fn no_file_of_a_cache_is_mapped_whatever_its_mode() {
    let persistent = || PersistentOptions { name: "disk1".into(), key: [3; 16], base_id: [5; 32] };
    for (mode, persistent) in [(CacheMode::Disk, None), (CacheMode::RamDisk, Some(persistent()))] {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let mut options = setup::options(&empty(256), mode, 32, 512, dir.path());
        options.persistent = persistent;
        let (volume, device) = setup::open(&options, &host);
        fill_patiently(&*device, 0..64);
        blocking::flush(&*device).unwrap();
        assert_holds(&*device, 64);
        assert!(volume.counters().cache.read_disk_blocks > 0);
        assert_nothing_is_mapped(dir.path());
        volume.close();
        drop((volume, device));
        if options.persistent.is_some() {
            let (_volume, device) = setup::open(&options, &host);
            assert_holds(&*device, 64);
            assert_nothing_is_mapped(dir.path());
        }
    }
}

#[test]
fn no_space_hung_for_good_even_when_space_was_back() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(256), CacheMode::RamDisk, 16, 512, dir.path());
    options.pause_limit = Duration::from_secs(10);
    let (volume, device) = setup::open(&options, &host);
    for round in 0..3 {
        faults.full.store(true, Ordering::Relaxed);
        let (taken, why) = fill(&*device, 256);
        assert_eq!(why, Some(IoErrorKind::NoSpace), "round {round}");
        // Management requests are answered meanwhile.
        let cache = volume.counters().cache;
        assert!(cache.refused_writes > 0 && cache.disk_errors > 0, "{cache:?}");
        assert!(volume.shortage().refusing, "round {round}");
        faults.full.store(false, Ordering::Relaxed);
        // Without any write or change of a limit.
        wait_until("it is not full any more", || !volume.shortage().refusing);
        wait_until("writes are taken again", || {
            blocking::write(&*device, taken * MIB, &pattern(taken)).is_ok()
        });
        fill_patiently(&*device, 0..200);
        assert_holds(&*device, 200);
        blocking::discard(&*device, 0, 256 * MIB).unwrap();
    }
}

#[test]
fn full_pool_queued_for_a_minute_and_growing_it_in_time_recovered_everything() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let mut options = setup::options(&empty(256), CacheMode::RamDisk, 16, 64, dir.path());
    options.pause_limit = Duration::from_secs(120);
    let (volume, device) = setup::open(&options, &host);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let device = &*device;
                scope.spawn(move || {
                    for number in (writer..200).step_by(4) {
                        blocking::write(device, number * MIB, &pattern(number)).unwrap();
                    }
                })
            })
            .collect();
        wait_until("writes queue", || volume.counters().cache.paused_writes > 0);
        std::thread::sleep(Duration::from_millis(200));
        assert!(writers.iter().any(|writer| !writer.is_finished()));
        volume.set_disk_bytes(512 * MIB);
    });
    assert_eq!(volume.counters().cache.refused_writes, 0);
    assert_holds(&*device, 200);
}

#[test]
fn copy_up_of_a_cluster_on_the_first_small_write_made_five_iops_of_147_thousand() {
    let dir = tempfile::tempdir().unwrap();
    let (host, counts) = counting_host();
    let base = Arc::new(ReferenceDisk::with_options(
        1024 * MIB,
        ReferenceOptions { read_only: true, ..ReferenceOptions::default() },
    ));
    let below: Arc<dyn Device> = Arc::clone(&base) as Arc<dyn Device>;
    let (volume, device) = setup::open(&setup::options(&below, CacheMode::Disk, 0, 512, dir.path()), &host);
    let data = pattern(1);
    // Each in another 2 MiB, so that each would copy another cluster.
    for number in 0..512u64 {
        let from = (number as usize % 255) * BLOCK as usize;
        blocking::write(&*device, number * 2 * MIB, &data[from..from + BLOCK as usize]).unwrap();
    }
    wait_until("spilling is over", || {
        let cache = volume.counters().cache;
        counts.writes.load(Ordering::SeqCst) == cache.spilled_segments
    });
    assert!(counts.writes.load(Ordering::SeqCst) <= 1, "512 first writes are one segment at most");
    assert_eq!(counts.reads.load(Ordering::SeqCst), 0, "the overflow was read");
    assert_eq!(base.counts().reads, 0, "the image was read");
}

#[test]
fn the_first_write_of_a_block_cost_three_disk_operations() {
    let dir = tempfile::tempdir().unwrap();
    let (host, counts) = counting_host();
    let (volume, device) =
        setup::open(&setup::options(&empty(1024), CacheMode::RamDisk, 16, 1024, dir.path()), &host);
    let data = pattern(2);
    let mut rng = Rng::new(3);
    let mut blocks: Vec<u64> = (0..64 * 512).map(|number| number * 8).collect();
    for index in (1..blocks.len()).rev() {
        blocks.swap(index, rng.index(index + 1));
    }
    for (number, block) in blocks.iter().enumerate() {
        let from = (number % 255) * BLOCK as usize;
        blocking::write(&*device, block * BLOCK, &data[from..from + BLOCK as usize]).unwrap();
    }
    let writes = counts.writes.load(Ordering::SeqCst);
    assert!(volume.counters().cache.spilled_segments > 40, "the cache did not overflow");
    assert!(writes <= blocks.len() as u64 / 512, "{writes} disk writes for {} first writes", blocks.len());
    assert_eq!(counts.reads.load(Ordering::SeqCst), 0);
    assert_eq!(counts.odd_writes.load(Ordering::SeqCst), 0, "every write is a whole segment");
    assert_eq!(counts.jumps.load(Ordering::SeqCst), 0, "they are written one behind the other");
}

#[test]
fn nobody_counted_the_operations_that_the_storage_gets() {
    let dir = tempfile::tempdir().unwrap();
    let (host, counts) = counting_host();
    let options = setup::options(&empty(1024), CacheMode::RamDisk, 16, 1024, dir.path());
    let (volume, device) = setup::open(&options, &host);
    fill_patiently(&*device, 0..64);
    assert_holds(&*device, 64);
    // The first MiB was spilled long ago, the last one is in RAM, and beyond that all is as in the image.
    let mut block = [0; BLOCK as usize];
    let before = volume.counters().reads;
    for offset in [0, 63 * MIB, 512 * MIB] {
        blocking::read(&*device, offset, &mut block).unwrap();
    }
    let now = volume.counters();
    let since = |of: fn(headwater_volume::ReadOps) -> u64| of(now.reads) - of(before);
    assert_eq!((since(|r| r.disk), since(|r| r.ram), since(|r| r.image)), (1, 1, 1), "{now:?}");
    let all = now.reads;
    assert_eq!(all.ram + all.packed + all.zero + all.disk + all.image, now.read_ops);
    wait_until("the disk is quiet, and has what the cache counted", || {
        let cache = volume.counters().cache;
        let counted = (counts.reads.load(Ordering::SeqCst), counts.writes.load(Ordering::SeqCst));
        counted == (cache.disk_read_ops, cache.disk_write_ops)
    });
    let cache = volume.counters().cache;
    assert!(cache.disk_read_ops > 0 && cache.disk_write_bytes == cache.spilled_bytes, "{cache:?}");
}

#[test]
fn trimming_in_the_guest_freed_nothing_on_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(512), CacheMode::RamDisk, 16, 1024, dir.path()), &host);
    assert_eq!(fill(&*device, 256), (256, None));
    let on_disk = || open_files(dir.path()).iter().map(|file| file.blocks() * 512).sum::<u64>();
    let full = on_disk();
    assert!(full >= 200 * MIB, "{} MiB on disk", full / MIB);
    // Like fstrim: discards everything except blocks in use, in pieces.
    for number in 8..64 {
        blocking::discard(&*device, number * 4 * MIB, 4 * MIB).unwrap();
    }
    // A few free positions stay claimed for the next spills.
    wait_until("the host's file shrinks", || on_disk() <= 96 * MIB);
    wait_until("RAM shrinks", || volume.counters().cache.ram_used_bytes <= 16 * MIB);
    assert_holds(&*device, 32);
    assert_eq!(fill(&*device, 256), (256, None));
    assert_holds(&*device, 256);
}

#[test]
fn sixty_clients_that_started_at_once_waited_for_minutes() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(1024 * MIB);
    let base = empty(64);
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let options = setup::options(&base, CacheMode::RamDisk, 64, 128, dir.path());
    let volumes: Vec<_> = (0..64).map(|_| setup::open(&options, &host)).collect();
    // Other tests of this process start and end threads meanwhile; 64 volumes with threads would add at least
    // 64, and keep them.
    wait_until("a volume has no thread of its own", || threads() < before + 48);
    std::thread::scope(|scope| {
        for (number, (_, device)) in (0..).zip(&volumes) {
            scope.spawn(move || {
                for mib in 0..8 {
                    blocking::write(&**device, mib * MIB, &pattern(number * 8 + mib)).unwrap();
                }
            });
        }
    });
    let mut read = vec![0; MIB as usize];
    for (number, (volume, device)) in (0..).zip(&volumes) {
        for mib in 0..8 {
            blocking::read(&**device, mib * MIB, &mut read).unwrap();
            assert!(read == pattern(number * 8 + mib), "volume {number}, MiB {mib}");
        }
        // All of it fits, so no write waited for space or took the slow path.
        let counters = volume.counters();
        let cache = counters.cache;
        assert_eq!(
            (cache.paused_writes, cache.paused_ns, cache.refused_writes),
            (0, 0, 0),
            "volume {number}"
        );
        assert_eq!(counters.latency.write_waited.count, 0, "volume {number}");
    }
}

#[test]
fn clients_of_one_export_shared_one_overlay() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let base = Arc::new(ReferenceDisk::new(64 * MIB));
    (0..64).for_each(|number| blocking::write(&*base, number * MIB, &pattern(number)).unwrap());
    let writes = base.counts().writes;
    let below: Arc<dyn Device> = Arc::clone(&base) as Arc<dyn Device>;
    let options = setup::options(&below, CacheMode::RamDisk, 16, 256, dir.path());
    let machines = [setup::open(&options, &host).1, setup::open(&options, &host).1];
    let untouched = setup::open(&options, &host).1;
    for (machine, device) in (1..).zip(&machines) {
        for number in 0..64 {
            blocking::write(&**device, number * MIB, &pattern(1000 * machine + number)).unwrap();
        }
        blocking::discard(&**device, machine * MIB, MIB).unwrap();
    }
    let mut read = vec![0; MIB as usize];
    for (machine, device) in (1..).zip(&machines) {
        for number in 0..64 {
            blocking::read(&**device, number * MIB, &mut read).unwrap();
            let own =
                if number == machine { vec![0; MIB as usize] } else { pattern(1000 * machine + number) };
            assert!(read == own, "machine {machine}, MiB {number}");
        }
    }
    assert_holds(&*untouched, 64);
    assert_holds(&*base, 64);
    assert_eq!(base.counts().writes, writes, "the image was written to");
}

#[test]
fn a_crash_left_devices_and_files_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&empty(128), CacheMode::RamDisk, 16, 256, dir.path()), &host);
    assert_eq!(fill(&*device, 64), (64, None));
    // An unnamed file cannot stay behind: the kernel frees it when the process ends, however
    // that happens.
    let files = open_files(dir.path());
    assert!(!files.is_empty() && files.iter().all(|file| file.nlink() == 0));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    drop((volume, device));
    wait_until("the space is free", || open_files(dir.path()).is_empty());
}

/// A guest may have a thousand of them in flight.
#[test]
fn long_discards_take_one_thread_however_many_there_are() {
    const COUNT: usize = 50;
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (_volume, device) =
        setup::open(&setup::options(&empty(2048), CacheMode::RamDisk, 64, 256, dir.path()), &host);
    let whole = ByteRange::new(0, 2048 * MIB).unwrap();
    let (first, at_first) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel::<()>();
    let done = Completion::new(move |outcome| {
        first.send((outcome.result.is_ok(), std::thread::current().id())).unwrap();
        goes_on.recv().unwrap();
    });
    device.submit(Request::Discard { range: whole }, done);
    let (is_ok, thread) = at_first.recv().unwrap();
    assert!(is_ok && thread != std::thread::current().id());
    // While the first one runs, the others delay no other request and take no threads.
    let (told, tells) = mpsc::channel();
    for _ in 0..COUNT {
        let told = told.clone();
        let done = Completion::new(move |outcome| {
            told.send((outcome.result.is_ok(), std::thread::current().id())).unwrap();
        });
        device.submit(Request::Discard { range: whole }, done);
    }
    blocking::write(&*device, 0, &[7; 4096]).unwrap();
    go_on.send(()).unwrap();
    assert!((0..COUNT).all(|_| tells.recv().unwrap() == (true, thread)));
}
