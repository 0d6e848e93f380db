//! Compares frozen views with an exact model: a view does not change, whatever happens to the volume, in
//! every kind of place; and it is a consistent cut between writes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use headwater_block::{Attempt, ByteRange, Device, IoErrorKind, Op, blocking};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, wait_until};
use headwater_volume::{CacheMode, FrozenView, PersistentOptions, Volume, VolumeOptions};

use crate::image_reads::{self, Asked};
use crate::setup;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;

fn image(contents: &[u8]) -> Arc<dyn Device> {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    Arc::new(ReferenceDisk::with_contents(contents.to_vec(), options))
}

/// A volume with its expected contents, and a view with its own.
struct Life {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
    model: Vec<u8>,
    base: Vec<u8>,
    view: Option<(Arc<FrozenView>, Vec<u8>)>,
    rng: Rng,
    /// Whether the written data compresses well.
    packs: bool,
    freezes: u32,
}

impl Life {
    fn range(&mut self) -> (usize, usize) {
        let sectors = self.model.len() / 512;
        let longest = if self.rng.chance(1, 4) { 600 } else { 40 };
        let len = 1 + self.rng.index(longest);
        let first = self.rng.index(sectors - len);
        if self.rng.chance(1, 2) {
            (first * 512, len * 512)
        } else {
            (first / 8 * 4096, len.div_ceil(8) * 4096)
        }
    }

    fn step(&mut self) {
        let (offset, len) = self.range();
        let len = len.min(self.model.len() - offset);
        let at = offset as u64;
        match self.rng.below(24) {
            0..14 => {
                let bytes = if self.packs { self.rng.runs(len, 64) } else { self.rng.bytes(len) };
                blocking::write(&*self.device, at, &bytes).unwrap();
                self.model[offset..offset + len].copy_from_slice(&bytes);
            }
            14 => {
                // Equal to the image, or to the view's contents.
                let from = self.view.as_ref().map_or(&self.base, |(_, kept)| kept);
                let bytes = from[offset..offset + len].to_vec();
                blocking::write(&*self.device, at, &bytes).unwrap();
                self.model[offset..offset + len].copy_from_slice(&bytes);
            }
            15 => {
                blocking::discard(&*self.device, at, len as u64).unwrap();
                self.model[offset..offset + len].fill(0);
            }
            16 => {
                blocking::write_zeroes(&*self.device, at, len as u64).unwrap();
                self.model[offset..offset + len].fill(0);
            }
            17 | 18 => {
                let mut found = vec![1; len];
                blocking::read(&*self.device, at, &mut found).unwrap();
                assert!(found == self.model[offset..offset + len], "a read of {len} bytes at {offset}");
            }
            _ => self.look_at_view(offset, len),
        }
        if self.rng.chance(1, 150) {
            self.view = match self.view.take() {
                Some(_) => None,
                None => {
                    self.freezes += 1;
                    Some((self.volume.freeze().unwrap(), self.model.clone()))
                }
            };
        }
    }

    fn look_at_view(&self, offset: usize, len: usize) {
        let Some((view, kept)) = &self.view else { return };
        let mut found = vec![1; len];
        blocking::read(&**view, offset as u64, &mut found).unwrap();
        assert!(found == kept[offset..offset + len], "the view has changed at {offset}");
        let mut at = offset;
        for run in view.changed(ByteRange::new(offset as u64, len as u64).unwrap(), usize::MAX) {
            let part = at..at + run.len as usize;
            assert!(run.changed || kept[part.clone()] == self.base[part], "a change at {at} is not told");
            at += run.len as usize;
        }
        assert_eq!(at, offset + len, "runs without gaps");
    }

    /// Each block that takes space is changed. Each block with a sector that is neither zero nor equal to the
    /// image takes space.
    fn look_at_places(&self) {
        let Some((view, kept)) = &self.view else { return };
        let mut placed = vec![false; kept.len().div_ceil(BLOCK)];
        let mut end = 0;
        let mut note = |first: u32, blocks: u32, _| {
            assert!(first >= end && blocks > 0, "{blocks} blocks at {first}");
            end = first + blocks;
            (first..end).for_each(|block| placed[block as usize] = true);
            Ok::<_, ()>(())
        };
        view.places(&mut note).unwrap();
        for (block, is_placed) in placed.into_iter().enumerate() {
            let at = block * BLOCK..kept.len().min((block + 1) * BLOCK);
            let range = ByteRange::new(at.start as u64, at.len() as u64).unwrap();
            let is_changed = view.changed(range, usize::MAX).iter().any(|run| run.changed);
            assert!(is_changed || !is_placed, "block {block} takes space and is not changed");
            let sectors = kept[at.clone()].chunks(512).zip(self.base[at].chunks(512));
            let is_free = |(its, base): (&[u8], &[u8])| its == base || its.iter().all(|byte| *byte == 0);
            assert!(is_placed || sectors.into_iter().all(is_free), "block {block} has no place");
        }
    }

    fn check_all(&self) {
        self.look_at_places();
        for offset in (0..self.model.len()).step_by(MIB as usize) {
            let len = (self.model.len() - offset).min(MIB as usize);
            let mut found = vec![1; len];
            blocking::read(&*self.device, offset as u64, &mut found).unwrap();
            assert!(found == self.model[offset..offset + len], "the volume at {offset}");
            self.look_at_view(offset, len);
        }
    }
}

fn life(
    options: &VolumeOptions,
    base: Vec<u8>,
    seed: u64,
    packs: bool,
    host: &headwater_writecache::Host,
) -> Life {
    let (volume, device) = setup::open(options, host);
    let model = base.clone();
    Life { device, volume, model, base, view: None, rng: Rng::new(seed), packs, freezes: 0 }
}

fn lives(mode: CacheMode, sizes_mib: [u64; 3], seed: u64, packs: bool) {
    let [size_mib, ram_mib, disk_mib] = sizes_mib;
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let base = Rng::new(seed).bytes((size_mib * MIB) as usize + 512);
    let options = VolumeOptions {
        pause_limit: Duration::from_secs(20),
        ..setup::options(&image(&base), mode, ram_mib, disk_mib, dir.path())
    };
    let mut life = life(&options, base, seed, packs, &host);
    for _ in 0..6_000 {
        life.step();
    }
    life.check_all();
    let cache = life.volume.counters().cache;
    assert!(life.freezes > 10, "{} freezes", life.freezes);
    match mode {
        CacheMode::Ram => assert!(cache.packed_segments > 0, "{cache:?}"),
        _ => assert!(cache.spilled_segments > 20 && cache.cleaned_blocks > 0, "{cache:?}"),
    }
    assert_eq!((cache.corrupt_blocks, cache.refused_writes), (0, 0), "{cache:?}");
    // Everything that views kept is free again: nothing is left when the volume is empty.
    life.view = None;
    let end = life.model.len() as u64;
    blocking::write(&*life.device, 0, &life.base[..BLOCK]).unwrap();
    blocking::discard(&*life.device, 0, end).unwrap();
    wait_until("all space is free", || {
        let now = life.volume.counters().cache;
        now.packed_bytes == 0 && now.disk_used_bytes == 0 && now.ram_used_bytes < 8 * MIB
    });
}

#[test]
fn in_ram_and_packed() {
    lives(CacheMode::Ram, [24, 24, 0], 1, true);
}

#[test]
fn spilled_and_cleaned() {
    // Twice the blocks because of the view, on a disk that is hardly larger: cleaning has to move both.
    lives(CacheMode::RamDisk, [24, 16, 68], 2, false);
    lives(CacheMode::RamDisk, [24, 16, 68], 3, true);
}

#[test]
fn in_disk_mode() {
    lives(CacheMode::Disk, [24, 16, 68], 4, false);
}

#[test]
fn a_view_passes_the_suite_while_the_volume_does() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let base = image(&Rng::new(9).bytes(24 * MIB as usize));
    let (volume, device) =
        setup::open(&setup::options(&base, CacheMode::RamDisk, 16, 128, dir.path()), &host);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut views = 0u64;
            while !over.load(Ordering::Relaxed) || views == 0 {
                let view: Arc<dyn Device> = volume.freeze().unwrap();
                let options = Options { operations: 150, span_bytes: 12 * MIB, ..Options::seeded(views) };
                conformance::check(&view, &options);
                views += 1;
            }
        });
        let options = Options {
            operations: 2000,
            span_bytes: 24 * MIB,
            max_request_bytes: 512 << 10,
            ..Options::seeded(5)
        };
        conformance::check(&device, &options);
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn one_view_at_a_time_and_none_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) =
        setup::open(&setup::options(&image(&[0; 1 << 20]), CacheMode::Ram, 16, 0, dir.path()), &host);
    blocking::write(&*device, 0, &[7; BLOCK]).unwrap();
    let view = volume.freeze().unwrap();
    let refused = volume.freeze().unwrap_err();
    assert!(refused.to_string().contains("frozen already"), "{refused}");
    assert_eq!(blocking::write(&*view, 0, &[1; BLOCK]).unwrap_err().kind(), IoErrorKind::ReadOnly);
    blocking::write(&*device, 0, &[8; BLOCK]).unwrap();
    drop(view);
    let view = volume.freeze().unwrap();
    let mut found = vec![0; BLOCK];
    blocking::read(&*view, 0, &mut found).unwrap();
    assert_eq!(found, vec![8; BLOCK]);
    // It outlives its volume.
    drop((volume, device, host));
    blocking::read(&*view, 0, &mut found).unwrap();
    assert_eq!(found, vec![8; BLOCK]);
}

/// Two blocks; only the second comes from the image.
fn two_blocks(at: u64) -> ByteRange {
    ByteRange::new(at, 2 * BLOCK as u64).unwrap()
}

#[test]
fn a_view_that_was_dropped_is_gone_while_its_read_waits_for_the_image_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let asked = Arc::new(Asked::default());
    let base: Arc<dyn Device> = Arc::clone(&asked) as _;
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 16, 0, dir.path()), &host);
    blocking::write(&*device, 0, &[7; BLOCK]).unwrap();
    let view = volume.freeze().unwrap();
    let (_, answer) = image_reads::read(&*view, two_blocks(0));
    blocking::write(&*device, 0, &[8; BLOCK]).unwrap();
    drop(view);
    // A store that is unreachable may answer after hours.
    let next = volume.freeze().unwrap();
    let (range, mut buffer, done) = asked.take();
    assert_eq!((range.offset(), range.len()), (BLOCK as u64, BLOCK as u64));
    buffer.fill(9);
    done.complete(Ok(()), buffer);
    assert_eq!(answer.recv().unwrap().buffer, [[7; BLOCK], [9; BLOCK]].concat());
    drop(next);
}

#[test]
fn a_view_whose_read_was_on_disk_is_gone_once_that_was_fetched() {
    const BLOCKS: u64 = 6_000;
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let asked = Arc::new(Asked::default());
    let base: Arc<dyn Device> = Arc::clone(&asked) as _;
    let options = setup::options(&base, CacheMode::RamDisk, 16, 128, dir.path());
    let (volume, device) = setup::open(&options, &host);
    // Every second block, and more than fit into RAM.
    let step = 2 * BLOCK as u64;
    let held = |number: u64| Rng::new(number).bytes(BLOCK);
    (0..BLOCKS).for_each(|number| blocking::write(&*device, number * step, &held(number)).unwrap());
    let view = volume.freeze().unwrap();
    let is_on_disk = |number: &u64| {
        let range = ByteRange::new(*number * step, BLOCK as u64).unwrap();
        view.try_now(Op::Read { range, into: &mut [0; BLOCK] }).unwrap() == Attempt::MustWait
    };
    let mut found = None;
    wait_until("a block is on disk alone", || {
        found = (0..BLOCKS).find(is_on_disk);
        found.is_some()
    });
    let number = found.unwrap();
    let (_, answer) = image_reads::read(&*view, two_blocks(number * step));
    drop(view);
    // The disk answers; the image does not.
    wait_until("the view is gone", || volume.freeze().is_ok());
    let (_, mut buffer, done) = asked.take();
    buffer.fill(9);
    done.complete(Ok(()), buffer);
    assert_eq!(answer.recv().unwrap().buffer, [held(number), vec![9; BLOCK]].concat());
}

#[test]
fn a_volume_that_is_closed_gives_all_back_while_reads_wait_for_the_image_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let asked = Arc::new(Asked::default());
    let base: Arc<dyn Device> = Arc::clone(&asked) as _;
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::Ram, 16, 0, dir.path()), &host);
    blocking::write(&*device, 0, &[7; BLOCK]).unwrap();
    let view = volume.freeze().unwrap();
    let both = two_blocks(0);
    let images = ByteRange::new(BLOCK as u64, BLOCK as u64).unwrap();
    // Of the view, and of the machine.
    let answers = [
        image_reads::read(&*view, both).1,
        image_reads::read(&*view, images).1,
        image_reads::read(&*device, both).1,
        image_reads::read(&*device, images).1,
    ];
    assert!(host.used_bytes() > 0);
    volume.close();
    drop((view, volume, device));
    wait_until("its memory is given back", || host.used_bytes() == 0);
    // They are answered all the same.
    for (_, mut buffer, done) in asked.take_all() {
        buffer.fill(9);
        done.complete(Ok(()), buffer);
    }
    let answers = answers.map(|answer| answer.recv().unwrap());
    let [seen, of_image, read, of_image_too] =
        answers.map(|outcome| outcome.result.map(|()| outcome.buffer).unwrap());
    assert!(seen == [[7; BLOCK], [9; BLOCK]].concat() && read == seen);
    assert!(of_image == [9; BLOCK] && of_image_too == of_image);
}

/// The writers take turns, so that all writes have one order. A view contains a prefix of it, with at least
/// the writes that were answered before the freeze.
#[test]
fn a_view_is_a_cut_through_the_writes_of_all_threads() {
    const BLOCKS: u64 = 4096;
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let base = image(&vec![0; BLOCKS as usize * BLOCK]);
    let (volume, device) = setup::open(&setup::options(&base, CacheMode::RamDisk, 16, 64, dir.path()), &host);
    let turn = std::sync::Mutex::new(Vec::<u64>::new());
    let answered = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (device, turn, answered, over) = (&device, &turn, &answered, &over);
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                while !over.load(Ordering::Relaxed) {
                    let mut order = turn.lock().unwrap();
                    let block = rng.below(BLOCKS);
                    order.push(block);
                    let number = order.len() as u64;
                    blocking::write(&**device, block * BLOCK as u64, &number.to_le_bytes().repeat(BLOCK / 8))
                        .unwrap();
                    answered.store(number, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..15 {
            let before = answered.load(Ordering::SeqCst);
            let view = volume.freeze().unwrap();
            let mut found = vec![0; BLOCKS as usize * BLOCK];
            for (number, chunk) in found.chunks_mut(1 << 20).enumerate() {
                blocking::read(&*view, number as u64 * MIB, chunk).unwrap();
            }
            let words: Vec<u64> =
                found.chunks(BLOCK).map(|b| u64::from_le_bytes(b[..8].try_into().unwrap())).collect();
            let count = words.iter().copied().max().unwrap();
            assert!(count >= before, "{before} were answered, and the view has {count}");
            let mut expected = vec![0; BLOCKS as usize];
            let order = turn.lock().unwrap();
            for (number, block) in (1..=count).zip(order.iter()) {
                expected[*block as usize] = number;
            }
            drop(order);
            assert!(words == expected, "the view is not the first {count} writes");
        }
        over.store(true, Ordering::Relaxed);
    });
}

fn persistent(base: &Arc<dyn Device>, at: &Path) -> VolumeOptions {
    VolumeOptions {
        persistent: Some(PersistentOptions { name: "kept".into(), key: [3; 16], base_id: [5; 32] }),
        pause_limit: Duration::from_secs(20),
        ..setup::options(base, CacheMode::RamDisk, 16, 72, at)
    }
}

/// Flushes and checkpoints during a view contain the volume's blocks, and none that only the view needs.
#[test]
fn a_persistent_volume_comes_back_as_it_was_and_not_as_a_view() {
    let dir = tempfile::tempdir().unwrap();
    let base = Rng::new(6).bytes(20 * MIB as usize);
    let options = persistent(&image(&base), dir.path());
    let (host, _) = setup::host(u64::MAX);
    let mut life = life(&options, base, 6, false, &host);
    let mut commits = 0;
    for session in 0..6 {
        for step in 0..900 {
            life.step();
            if step % 40 == 0 {
                blocking::flush(&*life.device).unwrap();
            }
        }
        if life.view.is_none() {
            life.view = Some((life.volume.freeze().unwrap(), life.model.clone()));
            (0..100).for_each(|_| life.step());
        }
        life.check_all();
        commits += life.volume.counters().cache.commits;
        life.volume.close();
        life.view = None;
        let (volume, device) = {
            // The last user gives the directory's lock back with close(), so that this opens it.
            let opened = Volume::open(&options, &host).unwrap_or_else(|e| panic!("session {session}: {e}"));
            (Arc::clone(&opened), opened as Arc<dyn Device>)
        };
        (life.volume, life.device) = (volume, device);
        life.check_all();
    }
    assert!(life.freezes > 2 && commits > 20, "{} freezes, {commits} commits", life.freezes);
}
