//! A persistent volume is closed while its machine writes: all answered writes are kept, and later ones are
//! refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use headwater_block::{ByteRange, Device, IoErrorKind, Request, blocking};
use headwater_testkit::{ReferenceDisk, wait_until};
use headwater_volume::{CacheMode, PersistentOptions, VolumeOptions};

use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const WRITERS: u64 = 4;
/// Blocks of each writer.
const BLOCKS: u64 = 256;

fn options(at: &std::path::Path) -> VolumeOptions {
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::new(64 * MIB));
    let persistent = PersistentOptions { name: "disk1".into(), key: [3; 16], base_id: [5; 32] };
    VolumeOptions { persistent: Some(persistent), ..setup::options(&base, CacheMode::RamDisk, 16, 256, at) }
}

/// Writes its blocks repeatedly, sometimes zeroes, until a write is refused. Returns the last answered
/// contents of each block, and the refused block.
fn write_until_closed(device: &dyn Device, writer: u64, done: &AtomicUsize) -> (Vec<u8>, usize) {
    let mut held = vec![0; BLOCKS as usize];
    for number in 0.. {
        let (block, value) = (number % BLOCKS, (number / BLOCKS % 255) as u8);
        let at = (writer * BLOCKS + block) * BLOCK;
        let answer = match value % 3 {
            0 => blocking::write_zeroes(device, at, BLOCK),
            _ => blocking::write(device, at, &[value; BLOCK as usize]),
        };
        if let Err(error) = answer {
            assert_eq!(error.kind(), IoErrorKind::Closed, "{error}");
            return (held, block as usize);
        }
        held[block as usize] = if value.is_multiple_of(3) { 0 } else { value };
        done.fetch_add(1, Ordering::Relaxed);
    }
    unreachable!("it writes until it is refused")
}

#[test]
fn what_was_answered_before_a_volume_closed_is_there_when_it_is_opened_again() {
    for _ in 0..8 {
        let dir = tempfile::tempdir().unwrap();
        let (host, _) = setup::host(u64::MAX);
        let (volume, device) = setup::open(&options(dir.path()), &host);
        let done = AtomicUsize::new(0);
        let ended = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    let (device, done) = (&*device, &done);
                    scope.spawn(move || write_until_closed(device, writer, done))
                })
                .collect();
            wait_until("all is written once", || done.load(Ordering::Relaxed) as u64 > 8 * WRITERS * BLOCKS);
            volume.close();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect::<Vec<_>>()
        });
        drop((volume, device));
        let (_volume, device) = setup::open(&options(dir.path()), &host);
        for (writer, (held, refused)) in (0..).zip(ended) {
            let mut read = vec![0; (BLOCKS * BLOCK) as usize];
            blocking::read(&*device, writer * BLOCKS * BLOCK, &mut read).unwrap();
            let blocks = read.chunks(BLOCK as usize).zip(&held).enumerate();
            let lost =
                blocks.filter(|(block, (read, held))| *block != refused && read.iter().any(|b| b != *held));
            assert_eq!(lost.count(), 0, "blocks are not as they were answered");
        }
    }
}

#[test]
fn a_closed_volume_refuses_what_would_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(dir.path()), &host);
    blocking::write(&*device, 0, &[1; 8192]).unwrap();
    volume.close();
    let range = ByteRange::new(0, 64 * MIB).unwrap();
    let part = ByteRange::new(512, 512).unwrap();
    for (what, answer) in [
        ("overwrite", blocking::write(&*device, 0, &[2; 4096])),
        ("new block", blocking::write(&*device, MIB, &[2; 4096])),
        ("many blocks", blocking::write(&*device, 0, &[2; 1 << 20])),
        ("part of a block", blocking::write(&*device, 512, &[2; 512])),
        ("zeroes", blocking::write(&*device, 0, &[0; 4096])),
        ("zero write", blocking::write_zeroes(&*device, 0, 4096)),
        ("part of a zero write", blocking::write_zeroes(&*device, 512, 512)),
        ("discard", blocking::discard(&*device, 4096, 4096)),
        ("long discard", blocking::wait(&*device, Request::Discard { range }).map(drop)),
        (
            "FUA",
            blocking::wait(&*device, Request::Write { range: part, buffer: vec![2; 512], fua: true })
                .map(drop),
        ),
    ] {
        assert_eq!(answer.map_err(|error| error.kind()), Err(IoErrorKind::Closed), "{what}");
    }
    let mut together = [true];
    let block = ByteRange::new(0, 4096).unwrap();
    device.write_together(&[(block, &[2; 4096])], &mut together);
    assert_eq!(together, [false]);
    // All answered writes are durable and can be read.
    blocking::flush(&*device).unwrap();
    let mut read = [0; 8192];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert_eq!(read, [1; 8192]);
}

#[test]
fn a_disk_without_room_is_no_space_at_a_flush_and_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(dir.path()), &host);
    let full = |full| faults.full.store(full, Ordering::Relaxed);
    // More than go into the map only, which has a limit.
    blocking::write(&*device, 0, &[1; 1 << 17]).unwrap();
    full(true);
    assert_eq!(blocking::flush(&*device).unwrap_err().kind(), IoErrorKind::NoSpace);
    full(false);
    blocking::flush(&*device).unwrap();
    blocking::write(&*device, 0, &[2; 1 << 17]).unwrap();
    full(true);
    assert_eq!(volume.try_close().unwrap_err().kind(), IoErrorKind::NoSpace);
    assert_eq!(blocking::flush(&*device).unwrap_err().kind(), IoErrorKind::Closed);
}
