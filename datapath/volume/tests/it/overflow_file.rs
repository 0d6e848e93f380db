//! The overflow file as the system sees it: its space is reserved before it is written, it is opened with the
//! configured buffering, and it contains no readable data of a machine.

use std::collections::BTreeSet;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::filling::{MIB, assert_holds, empty, fill, fill_on, fill_patiently, pattern};
use crate::setup;
use headwater_block::{IoErrorKind, blocking};
use headwater_testkit::{Rng, test_name, wait_until};
use headwater_volume::{Buffering, CacheMode, PersistentOptions, VolumeOptions};
use headwater_writecache::Host;
use headwater_writecache::overflow::encrypt::ENCRYPTED_SEGMENT_BYTES;
use headwater_writecache::overflow::io::{Direction, IoEngine, IoOp, open_engine};

const BLOCK: usize = 4096;
const KEY: &[u8; 16] = b"a key to be kept";

fn options(persistent: bool, disk_mib: u64, at: &Path) -> VolumeOptions {
    let kept = PersistentOptions { name: "kept".into(), key: *KEY, base_id: [5; 32] };
    VolumeOptions {
        persistent: persistent.then_some(kept),
        ..setup::options(&empty(256), CacheMode::RamDisk, 16, disk_mib, at)
    }
}

/// The files of a directory that this process has open: their paths in `/proc/self/fd`, and their names.
fn open_files(dir: &Path) -> Vec<(PathBuf, PathBuf)> {
    let dir = dir.canonicalize().unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok).map(|link| link.path());
    links
        .filter_map(|link| std::fs::read_link(&link).ok().map(|target| (link, target)))
        .filter(|(link, target)| target.starts_with(&dir) && link.is_file())
        .collect()
}

/// The file with the blocks: unnamed, or called `data`.
fn overflow_file(persistent: bool, dir: &Path) -> PathBuf {
    let mut files = open_files(dir);
    files.retain(|(_, target)| !persistent || target.ends_with("data"));
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0).0
}

/// The real engine, which checks before each write whether the file has space for it.
struct LookingEngine {
    real: Arc<dyn IoEngine>,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Positions that were written.
    positions: Mutex<BTreeSet<u64>>,
    /// Writes to unreserved space, for messages.
    unclaimed: Mutex<Vec<String>>,
    failed: AtomicU64,
}

impl Seen {
    fn look(&self, op: &IoOp) {
        let metadata = op.file.metadata().expect("it is open");
        let mut positions = self.positions.lock().unwrap();
        positions.insert(op.offset / ENCRYPTED_SEGMENT_BYTES as u64);
        // No written position is freed meanwhile; so this position has space if the file has space for all of
        // them.
        let wanted = positions.len() as u64 * ENCRYPTED_SEGMENT_BYTES as u64;
        let (space, end) = (metadata.blocks() * 512, op.offset + op.len as u64);
        if space < wanted || metadata.len() < end {
            let text = format!("{space} of {wanted} bytes claimed, {} of {end} long", metadata.len());
            self.unclaimed.lock().unwrap().push(text);
        }
    }

    fn assert_all_was_claimed(&self, least_positions: usize) {
        let unclaimed = self.unclaimed.lock().unwrap();
        assert!(unclaimed.is_empty(), "{} writes, such as {}", unclaimed.len(), unclaimed[0]);
        let positions = self.positions.lock().unwrap().len();
        assert!(positions >= least_positions, "{positions} places were written to");
        assert_eq!(self.failed.load(Ordering::SeqCst), 0, "a write failed");
    }
}

impl IoEngine for LookingEngine {
    fn submit(&self, mut op: IoOp) {
        if op.direction == Direction::Write {
            self.seen.look(&op);
            let (seen, done) = (Arc::clone(&self.seen), op.done);
            op.done = Box::new(move |result, buffer| {
                seen.failed.fetch_add(u64::from(result.is_err()), Ordering::SeqCst);
                done(result, buffer);
            });
        }
        self.real.submit(op);
    }
}

fn looking_host() -> (Host, Arc<Seen>) {
    setup::end_with_a_panic_of_ours();
    let seen = Arc::new(Seen::default());
    let engine = LookingEngine { real: open_engine().unwrap(), seen: Arc::clone(&seen) };
    (Host::with_engine(u64::MAX, Arc::new(engine)).unwrap(), seen)
}

#[test]
fn space_is_claimed_before_it_is_written_to() {
    for persistent in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (host, seen) = looking_host();
        let (_volume, device) = setup::open(&options(persistent, 512, dir.path()), &host);
        assert_eq!(fill(&*device, 100), (100, None));
        seen.assert_all_was_claimed(40);
        // Free space is punched out except for a few positions; the same positions are claimed again later.
        blocking::discard(&*device, 0, 256 * MIB).unwrap();
        let file = overflow_file(persistent, dir.path());
        wait_until("the file shrinks", || {
            blocking::flush(&*device).unwrap();
            std::fs::metadata(&file).unwrap().blocks() * 512 <= 48 * MIB
        });
        seen.positions.lock().unwrap().clear();
        assert_eq!(fill(&*device, 100), (100, None));
        seen.assert_all_was_claimed(40);
        assert_holds(&*device, 100);
    }
}

#[test]
fn a_persistent_cache_gives_space_back_that_was_discarded_and_not_flushed() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _seen) = looking_host();
    let (volume, device) = setup::open(&options(true, 512, dir.path()), &host);
    assert_eq!(fill(&*device, 100), (100, None));
    blocking::flush(&*device).unwrap();
    let taken_bytes = || std::fs::metadata(overflow_file(true, dir.path())).unwrap().blocks() * 512;
    assert!(taken_bytes() > 100 * MIB);
    let commits = volume.counters().cache.commits;
    blocking::discard(&*device, 0, 256 * MIB).unwrap();
    // 16 positions stay claimed for the next writes, as many may wait for a flush, and some are being filled.
    wait_until("the file shrinks", || taken_bytes() <= 76 * MIB);
    assert!(volume.counters().cache.commits > commits);
}

#[test]
fn places_that_could_not_be_written_are_given_back() {
    const OFFERED: u64 = 18;
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let mut options = options(false, 2048, dir.path());
    // As long as the failing writes take.
    options.pause_limit = std::time::Duration::from_secs(600);
    let (volume, device) = setup::open(&options, &host);
    let file = overflow_file(false, dir.path());
    let taken_bytes = || std::fs::metadata(&file).unwrap().blocks() * 512;
    faults.write_error_every.store(1, Ordering::SeqCst);
    let writer = {
        let device = Arc::clone(&device);
        std::thread::spawn(move || assert_eq!(fill(&*device, OFFERED), (OFFERED, None)))
    };
    wait_until("many writes fail", || volume.counters().cache.disk_errors >= 50);
    // 16 free positions, 4 that failed, and those that fail between two checks.
    wait_until("what failed is punched out", || taken_bytes() <= 64 * MIB);
    faults.write_error_every.store(0, Ordering::SeqCst);
    writer.join().unwrap();
    assert_holds(&*device, OFFERED);
    blocking::discard(&*device, 0, 256 * MIB).unwrap();
    wait_until("the file shrinks", || taken_bytes() <= 48 * MIB);
}

/// Set for the child that may not have large files: where its caches are.
const CHILD_DIR: &str = "HEADWATER_TEST_CHILD_DIR";

fn fill_a_disk_without_room(dir: &Path) {
    for persistent in [false, true] {
        let (host, seen) = looking_host();
        let mut options = options(persistent, 256, dir);
        options.pause_limit = std::time::Duration::from_secs(10);
        let (volume, device) = setup::open(&options, &host);
        fill_patiently(&*device, 0..40);
        let (taken, why) = fill_on(&*device, 40..200);
        assert_eq!(why, Some(IoErrorKind::NoSpace), "a full disk is 'no space', not an I/O error");
        assert!(taken <= 74, "{taken} MiB of 64 on disk and 10 in RAM");
        // The disk was found full when space was claimed, not when accepted data was written.
        seen.assert_all_was_claimed(20);
        let cache = volume.counters().cache;
        assert!(cache.disk_errors > 0 && cache.spilled_segments > 0, "{cache:?}");
        assert_holds(&*device, taken);
        blocking::discard(&*device, 0, 16 * MIB).unwrap();
        wait_until("there is room again", || blocking::write(&*device, 0, &pattern(0)).is_ok());
        for number in 16..taken {
            let mut read = vec![0; MIB as usize];
            blocking::read(&*device, number * MIB, &mut read).unwrap();
            assert!(read == pattern(number), "MiB {number} was lost");
        }
        volume.close();
        println!("kept {taken} MiB");
    }
}

#[test]
fn a_disk_without_room_is_found_full_before_data_is_accepted_for_it() {
    if let Some(dir) = std::env::var_os(CHILD_DIR) {
        return fill_a_disk_without_room(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    // A limit on the size of files acts as a full disk. Its signal is ignored across exec, and calls fail
    // instead.
    let script = format!(
        "trap '' XFSZ; ulimit -f {}; exec \"$0\" --exact {} --nocapture",
        64 * MIB / 512,
        test_name(a_disk_without_room_is_found_full_before_data_is_accepted_for_it),
    );
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap()).env(CHILD_DIR, dir.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.matches("kept ").count() == 2, "{said}{complained}");
}

/// Whether a descriptor was opened past the page cache.
fn is_direct(file: &Path) -> bool {
    let number = file.file_name().unwrap().to_str().unwrap();
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:")).expect("the kernel says");
    u32::from_str_radix(flags.trim(), 8).unwrap() & rustix::fs::OFlags::DIRECT.bits() != 0
}

#[test]
fn the_file_is_open_as_its_buffering_says() {
    for (buffering, persistent) in Buffering::ALL.into_iter().flat_map(|b| [(b, false), (b, true)]) {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let options = VolumeOptions { buffering, ..options(persistent, 64, dir.path()) };
        let (volume, _) = setup::open(&options, &host);
        let says = volume.counters().cache.buffering;
        let expected = match buffering {
            Buffering::Direct => true,
            Buffering::Buffered => false,
            Buffering::Auto => says.starts_with("auto: direct"),
        };
        let file = overflow_file(persistent, dir.path());
        assert_eq!(is_direct(&file), expected, "{buffering}, persistent: {persistent}, '{says}'");
    }
}

/// Does not occur in random data.
const MARKER: &[u8; 16] = b"what it wrote...";

/// A block with the marker: compressible or not.
fn marked(number: u64) -> Vec<u8> {
    let mut block =
        if number.is_multiple_of(4) { vec![number as u8; BLOCK] } else { Rng::new(number).bytes(BLOCK) };
    for at in [0, 1000, BLOCK - MARKER.len()] {
        block[at..at + MARKER.len()].copy_from_slice(MARKER);
    }
    block
}

fn holds(bytes: &[u8], wanted: &[u8; 16]) -> bool {
    bytes.windows(wanted.len()).any(|window| window[0] == wanted[0] && window == wanted)
}

#[test]
fn nothing_that_was_written_can_be_read_in_the_file() {
    const BLOCKS: u64 = 48 * 256;
    for persistent in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let (volume, device) = setup::open(&options(persistent, 256, dir.path()), &host);
        for number in 0..BLOCKS {
            blocking::write(&*device, number * BLOCK as u64, &marked(number)).unwrap();
        }
        blocking::flush(&*device).unwrap();
        let cache = volume.counters().cache;
        assert!(cache.spilled_blocks > BLOCKS / 2, "{cache:?}");
        let bytes = std::fs::read(overflow_file(persistent, dir.path())).unwrap();
        // The data is there, and this check would find it.
        let used = bytes.chunks(BLOCK).filter(|page| page.iter().any(|byte| *byte != 0)).count() as u64;
        assert!(used >= cache.spilled_blocks, "{used} pages hold {} blocks", cache.spilled_blocks);
        assert!(holds(&marked(4), MARKER) && holds(&marked(5), MARKER));
        assert!(!holds(&bytes, MARKER), "a block can be read in the file");
        // Nor in the other files of a persistent cache; and its key is readable by its owner only.
        volume.close();
        for (link, target) in open_files(dir.path()) {
            let bytes = std::fs::read(link).unwrap();
            assert!(!holds(&bytes, MARKER) && !holds(&bytes, KEY), "{}", target.display());
        }
        let mut block = vec![0; BLOCK];
        for number in 0..BLOCKS {
            blocking::read(&*device, number * BLOCK as u64, &mut block).unwrap();
            assert!(block == marked(number), "block {number} was lost");
        }
    }
}

#[test]
fn a_bit_that_flips_in_the_file_costs_one_block() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(false, 64, dir.path()), &host);
    let data = Rng::new(8).bytes(48 * MIB as usize);
    for (number, piece) in data.chunks(MIB as usize).enumerate() {
        blocking::write(&*device, number as u64 * MIB, piece).unwrap();
    }
    // The segments that were written first are the coldest, so they are only on disk when most of the RAM has
    // other blocks.
    wait_until("the first blocks are not in RAM", || {
        let before = volume.counters().cache.read_disk_blocks;
        blocking::read(&*device, 0, &mut [0; 4096]).unwrap();
        volume.counters().cache.read_disk_blocks > before
    });
    let file =
        std::fs::OpenOptions::new().read(true).write(true).open(overflow_file(false, dir.path())).unwrap();
    // In the 21st slot of the first segment.
    let (at, mut byte) = (20 * 4112 + 100, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
    let damaged: Vec<u64> = (0..48 * MIB / 4096)
        .filter(|block| {
            let (from, mut read) = (*block as usize * 4096, vec![0; 4096]);
            match blocking::read(&*device, block * 4096, &mut read) {
                Ok(()) => {
                    assert!(read == data[from..from + 4096], "block {block}");
                    false
                }
                Err(error) => {
                    assert_eq!(error.kind(), IoErrorKind::Corrupt);
                    assert!(error.to_string().contains(&format!("at byte {from} of volume")), "{error}");
                    true
                }
            }
        })
        .collect();
    assert_eq!((damaged.len(), volume.counters().cache.corrupt_blocks), (1, 1), "{damaged:?}");
}
