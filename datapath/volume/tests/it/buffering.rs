//! The overflow past the page cache, through it, and in the way that a measurement finds better.

use std::sync::Arc;

use headwater_block::{Device, blocking};
use headwater_testkit::{ReferenceDisk, Rng};
use headwater_volume::{Buffering, CacheMode};

use crate::setup;

const MIB: u64 = 1 << 20;

#[test]
fn every_buffering_keeps_what_is_written_and_says_what_it_is() {
    for buffering in Buffering::ALL {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(96 * MIB));
        let mut options = setup::options(&base, CacheMode::RamDisk, 16, 256, dir.path());
        options.buffering = buffering;
        let (volume, device) = setup::open(&options, &host);
        let data = |number| Rng::new(number).bytes(MIB as usize);
        (0..96).for_each(|number| blocking::write(&*device, number * MIB, &data(number)).unwrap());
        let mut read = vec![0; MIB as usize];
        for number in 0..96 {
            blocking::read(&*device, number * MIB, &mut read).unwrap();
            assert!(read == data(number), "MiB {number} was lost, {buffering}");
        }
        let cache = volume.counters().cache;
        assert!(cache.spilled_segments > 0 && cache.read_disk_blocks > 0, "{cache:?}");
        assert!(cache.buffering.starts_with(buffering.as_str()), "{}", cache.buffering);
        assert_eq!(cache.buffering.contains("MiB/s"), buffering == Buffering::Auto);
        // The measurement leaves no file.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
