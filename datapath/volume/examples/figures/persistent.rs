//! Measures how often a persistent volume can flush, against the disk itself.

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use headwater_block::blocking;
use headwater_testkit::Rng;
use headwater_volume::{CacheMode, PersistentOptions, VolumeOptions};

use crate::rows::{Goal, Report, Row, Series};
use crate::work::{self, BLOCK, GIB, MIB};

const TIME: Duration = Duration::from_secs(3);
const SPAN_BYTES: u64 = 512 * MIB;

/// Random writes of 4 KiB, with a flush after every 1, 8, 64 or 512 writes.
pub fn flushes(dir: &Path, report: &mut Report) {
    for every in [1u64, 8, 64, 512] {
        let at = tempfile::tempdir_in(dir).expect("a directory");
        let name = "figures".to_owned();
        let persistent = Some(PersistentOptions { name, key: [1; 16], base_id: [2; 32] });
        let options = work::options(CacheMode::RamDisk, 256 * MIB, 8 * GIB, at.path());
        let host = work::host();
        let volume = work::open(&VolumeOptions { persistent, ..options }, &host);
        let mut rng = Rng::new(6);
        let data = rng.bytes(BLOCK as usize);
        let start = Instant::now();
        let mut writes = 0u64;
        while start.elapsed() < TIME {
            work::write(&volume, rng.below(SPAN_BYTES / BLOCK), &data);
            writes += 1;
            if writes.is_multiple_of(every) {
                blocking::flush(&*volume).expect("it flushes");
            }
        }
        let ours = writes as f64 / start.elapsed().as_secs_f64();
        volume.close();
        let raw = raw(at.path(), every);
        let (figure, us) = (format!("a flush after every {every} writes"), 1e6);
        let pair = (Series::new("headwater", vec![us / ours]), Series::new("raw file", vec![us / raw]));
        report.add(Row::part("flush", figure, pair, "us a write", Goal::None));
    }
}

/// The same writes to a file whose space is reserved and written, with `O_DIRECT`.
fn raw(dir: &Path, every: u64) -> f64 {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(dir.join("raw"))
        .expect("the disk takes direct I/O");
    let mut memory = vec![7u8; 2 * MIB as usize];
    let skip = memory.as_ptr().align_offset(4096);
    let aligned = &mut memory[skip..][..MIB as usize];
    (0..SPAN_BYTES / MIB).for_each(|number| file.write_all_at(aligned, number * MIB).expect("it writes"));
    file.sync_data().expect("it syncs");
    let mut rng = Rng::new(7);
    let start = Instant::now();
    let mut writes = 0u64;
    while start.elapsed() < TIME {
        let at = rng.below(SPAN_BYTES / BLOCK) * BLOCK;
        file.write_all_at(&aligned[..BLOCK as usize], at).expect("it writes");
        writes += 1;
        if writes.is_multiple_of(every) {
            file.sync_data().expect("it syncs");
        }
    }
    writes as f64 / start.elapsed().as_secs_f64()
}
