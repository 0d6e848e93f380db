//! Power cuts: the contents of the disk at one moment, and a check that a cache opened from them is a prefix
//! of the writes.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use headwater_writecache::persist::format::{HEADER_BYTES, Record, decode};
use headwater_writecache::{CacheOptions, Host, WriteCache};
use shuttle::thread;

use super::client::Client;
use super::close;
use super::disk::Disk;
use super::oracle::Oracle;

/// The contents that a power cut left.
pub struct Cut {
    data: Vec<u8>,
    /// Length of the data file: space is claimed before it is written.
    data_len: u64,
    map: Vec<u8>,
    /// A flush that began at this moment was answered.
    begun: u64,
    /// No write that began later is there.
    ended: u64,
}

impl Cut {
    /// Cuts the power now. No other thread runs meanwhile.
    pub fn now(disk: &Disk, dir: &Path, oracle: &Oracle, flushed: &AtomicU64) -> Self {
        let open = |name| File::open(dir.join(name)).unwrap();
        let data = open("data");
        let data_len = data.metadata().unwrap().len();
        Self {
            data: disk.left_of(&data),
            data_len,
            map: disk.left_of(&open("map")),
            begun: flushed.load(Ordering::Relaxed),
            ended: oracle.tick(),
        }
    }

    /// Whether the map itself contains encrypted slots.
    pub fn has_encrypted(&self) -> bool {
        let mut at = HEADER_BYTES;
        while let Some((_, record, next)) = decode(&self.map, at) {
            if matches!(record, Record::Encrypted { .. }) {
                return true;
            }
            at = next;
        }
        false
    }

    /// Opens the cache from these contents, and checks it. `options` are those of the original cache.
    pub fn check(self, mut options: CacheOptions, oracle: &Arc<Oracle>, within: &Path) {
        let dir = tempfile::tempdir_in(within).unwrap();
        let cache_dir = dir.path().join(&options.persistent.as_ref().unwrap().name);
        std::fs::create_dir(&cache_dir).unwrap();
        std::fs::write(cache_dir.join("map"), &self.map).unwrap();
        let data = File::create(cache_dir.join("data")).unwrap();
        data.set_len(self.data_len).unwrap();
        options.overflow.as_mut().unwrap().at = dir.path().to_owned();
        let disk = Arc::new(Disk::with_file(&data, self.data));
        let (host, run) = Host::without_thread(1 << 30, disk.clone());
        let reads = Arc::clone(&disk);
        let machinery = [thread::spawn(run), thread::spawn(move || reads.run())];
        let cache = WriteCache::open(&options, &host.shared()).unwrap();
        Client::new(&cache, oracle).check_recovered(self.begun, self.ended);
        close(cache, &host);
        drop(host);
        disk.stop();
        for thread in machinery {
            thread.join().unwrap();
        }
    }
}
