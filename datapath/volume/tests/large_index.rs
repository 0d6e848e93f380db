//! A volume whose index alone exceeds its share of the host's memory and its own limit, beside a volume that
//! needs all memory: both can write and read, and the resident memory stays bounded. A program of its own,
//! because other tests' memory would count, too.

#[path = "it/setup/mod.rs"]
mod setup;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{Device, blocking};
use headwater_testkit::{FileDevice, Rng, resident_bytes, wait_until};
use headwater_volume::{CacheMode, Volume};
use headwater_writecache::Host;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Blocks that are written and read, contiguous: 128 MiB, several times the memory that the index leaves.
const BLOCKS: u64 = 32 << 10;
const HOST_MIB: u64 = 80;
/// The index that is filled besides the data: a table for each 2 MiB, for one zero block.
const INDEX_MIB: u64 = 56;
const TABLES: u64 = INDEX_MIB * MIB / 2048;

fn volume(host: &Host, ram_mib: u64, at: &Path) -> (Arc<Volume>, Arc<dyn Device>) {
    let path = at.join(format!("image-{ram_mib}"));
    std::fs::File::create(&path).unwrap().set_len((TABLES + 256) * 2 * MIB).unwrap();
    let image: Arc<dyn Device> = Arc::new(FileDevice::open(&path, true, 512).unwrap());
    let mut options = setup::options(&image, CacheMode::RamDisk, ram_mib, 1024, at);
    options.pause_limit = Duration::from_secs(600);
    setup::open(&options, host)
}

/// The operations of a volume so far.
#[derive(Default)]
struct Done {
    written: AtomicU64,
    read: AtomicU64,
}

impl Done {
    fn counts(&self) -> [u64; 2] {
        [self.written.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed)]
    }
}

/// The contents of a block after this many writes.
fn contents(block: u64, times: u8) -> Vec<u8> {
    Rng::new(block << 8 | u64::from(times)).bytes(BLOCK as usize)
}

/// Writes blocks and reads others back, until it is told to stop.
fn keep_working(device: &dyn Device, seed: u64, done: &Done, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let mut times = vec![0; BLOCKS as usize];
    let mut found = vec![0; BLOCK as usize];
    while !stop.load(Ordering::Relaxed) {
        let block = rng.below(BLOCKS);
        let count = &mut times[block as usize];
        *count += 1;
        blocking::write(device, block * BLOCK, &contents(block, *count)).unwrap();
        done.written.fetch_add(1, Ordering::Relaxed);
        let block = rng.below(BLOCKS);
        let count = times[block as usize];
        if count > 0 {
            blocking::read(device, block * BLOCK, &mut found).unwrap();
            assert!(found == contents(block, count), "block {block}, written {count} times");
            done.read.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Stops the writers even if the test panics, so that their scope ends.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_index_above_its_share_starves_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(HOST_MIB * MIB);
    let before = resident_bytes();
    let volumes = [volume(&host, 32, dir.path()), volume(&host, 72, dir.path())];
    let [(large, large_device), (other, _)] = &volumes;
    for table in 0..TABLES {
        blocking::write(&**large_device, (table + 256) * 2 * MIB, &[0; BLOCK as usize]).unwrap();
    }
    let cache = |volume: &Volume| volume.counters().cache;
    assert!(cache(large).index_bytes >= INDEX_MIB * MIB);
    let done = [Done::default(), Done::default()];
    let stop = AtomicBool::new(false);
    let more_of_each = |more: u64| {
        let before = done.each_ref().map(Done::counts);
        move |done: &[Done; 2]| {
            done.each_ref()
                .map(Done::counts)
                .iter()
                .zip(&before)
                .all(|(now, before)| now.iter().zip(before).all(|(now, before)| *now >= before + more))
        }
    };
    // The memory that is needed in any case: index, staging buffers, four segments, and one that cleaning
    // fills.
    let most = || {
        let least = |volume: &Volume| cache(volume).index_bytes + 10 * MIB;
        (HOST_MIB * MIB).max(least(large) + least(other) + 7 * MIB)
    };
    std::thread::scope(|scope| {
        let _guard = StopOnDrop(&stop);
        for (seed, ((_, device), done)) in (1..).zip(volumes.iter().zip(&done)) {
            let stop = &stop;
            scope.spawn(move || keep_working(&**device, seed, done, stop));
        }
        // The first volume may have all memory, and the other its minimum in addition, until shares are
        // computed.
        let have_begun = more_of_each(2000);
        wait_until("both volumes have begun", || have_begun(&done));
        // Each in turn: as much as both need at least, less, enough for all, and as at first.
        for host_mib in [HOST_MIB, 32, 4096, HOST_MIB] {
            host.set_limit_bytes(host_mib * MIB);
            let is_short = host_mib <= HOST_MIB;
            wait_until("they take no more than there is", || !is_short || host.used_bytes() <= most());
            for _ in 0..4 {
                let have_gone_on = more_of_each(2000);
                wait_until("both volumes write and read", || {
                    let used = host.used_bytes();
                    assert!(!is_short || used <= most(), "{used} in use, limit {host_mib} MiB");
                    have_gone_on(&done)
                });
            }
            let (resident, bound) = (resident_bytes() - before, most() * 103 / 100 + 32 * MIB);
            assert!(!is_short || resident <= bound, "{resident} bytes are resident, at most {bound} may be");
        }
        // The index is freed, and its memory goes to the other volume.
        blocking::discard(&**large_device, 512 * MIB, TABLES * 2 * MIB).unwrap();
        wait_until("the other volume has what the index took", || cache(other).ram_used_bytes > 32 * MIB);
    });
    assert!(host.used_bytes() <= most(), "{} in use", host.used_bytes());
}
