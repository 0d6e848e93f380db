//! Persistent volumes: the conformance suite, opening again, refusals, and damage.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use headwater_block::{Attempt, ByteRange, Device, IoErrorKind, Op, Request, blocking};
use headwater_testkit::conformance::{self, Options};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, wait_until};
use headwater_volume::{CacheMode, PersistentOptions, Volume, VolumeOptions};

use crate::setup;

const MIB: u64 = 1 << 20;

fn image(size_bytes: u64, seed: u64) -> Arc<dyn Device> {
    let options = ReferenceOptions { read_only: true, ..Default::default() };
    Arc::new(ReferenceDisk::with_contents(Rng::new(seed).bytes(size_bytes as usize), options))
}

fn empty(size_mib: u64) -> Arc<dyn Device> {
    Arc::new(ReferenceDisk::new(size_mib * MIB))
}

fn persistent(name: &str) -> PersistentOptions {
    PersistentOptions { name: name.into(), key: [3; 16], base_id: [5; 32] }
}

fn options(base: &Arc<dyn Device>, mode: CacheMode, disk_mib: u64, at: &Path) -> VolumeOptions {
    VolumeOptions { persistent: Some(persistent("disk1")), ..setup::options(base, mode, 16, disk_mib, at) }
}

fn suite(seed: u64, span_mib: u64) -> Options {
    Options {
        operations: 2500,
        span_bytes: span_mib * MIB,
        max_request_bytes: 512 << 10,
        ..Options::seeded(seed)
    }
}

fn refusal(options: &VolumeOptions) -> (IoErrorKind, String) {
    let (host, _) = setup::host(u64::MAX);
    let error = Volume::open(options, &host).err().expect("it was accepted");
    (error.kind(), error.to_string())
}

#[test]
fn the_suite_passes_and_its_end_is_there_after_reopening() {
    for (mode, seed) in [(CacheMode::RamDisk, 1), (CacheMode::Disk, 2)] {
        let dir = tempfile::tempdir().unwrap();
        let base = image(40 * MIB + 512, seed);
        // 40 MiB of blocks in 16 MiB of RAM and 52 MiB of disk: cleaning has to work.
        let options = options(&base, mode, 52, dir.path());
        let (host, _) = setup::host(u64::MAX);
        let (volume, device) = setup::open(&options, &host);
        assert!(device.geometry().volatile_cache);
        let model = conformance::check(&device, &suite(seed, 40));
        let cache = volume.counters().cache;
        assert!(cache.spilled_segments > 10 && cache.cleaned_segments > 0, "{cache:?}");
        assert_eq!(
            (cache.packed_segments, cache.corrupt_blocks, cache.refused_writes),
            (0, 0, 0),
            "{cache:?}"
        );
        volume.close();
        drop((volume, device));
        let (volume, device) = setup::open(&options, &host);
        conformance::verify(&*device, &model);
        let model = conformance::check(&device, &suite(seed + 10, 40));
        volume.close();
        drop((volume, device, host));
        let (host, _) = setup::host(u64::MAX);
        let (_volume, device) = setup::open(&options, &host);
        conformance::verify(&*device, &model);
    }
}

#[test]
fn flushing_is_a_no_op_only_while_nothing_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(&empty(8), CacheMode::RamDisk, 64, dir.path()), &host);
    assert_eq!(device.try_now(Op::Flush).unwrap(), Attempt::Done);
    blocking::write(&*device, 0, &[1; 4096]).unwrap();
    assert_eq!(device.try_now(Op::Flush).unwrap(), Attempt::MustWait);
    blocking::flush(&*device).unwrap();
    assert_eq!(device.try_now(Op::Flush).unwrap(), Attempt::Done);
    // Written again, it takes a new slot, because the old one was flushed.
    blocking::write(&*device, 0, &[2; 4096]).unwrap();
    assert_eq!(device.try_now(Op::Flush).unwrap(), Attempt::MustWait);
    assert_eq!(volume.counters().cache.write_new_blocks, 2);
    let range = ByteRange::new(4096, 4096).unwrap();
    assert_eq!(device.try_now(Op::Write { range, from: &[3; 4096], fua: true }).unwrap(), Attempt::MustWait);
    blocking::wait(&*device, Request::Write { range, buffer: vec![3; 4096], fua: true }).unwrap();
    assert_eq!(device.try_now(Op::Flush).unwrap(), Attempt::Done);
}

#[test]
fn many_flushes_at_once_share_commits() {
    let dir = tempfile::tempdir().unwrap();
    let (host, _) = setup::host(u64::MAX);
    let options = options(&empty(32), CacheMode::RamDisk, 64, dir.path());
    let (volume, device) = setup::open(&options, &host);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..20u64 {
                    let data = [(thread + round) as u8 + 1; 4096];
                    blocking::write(&**device, (thread * 20 + round) * 4096, &data).unwrap();
                    blocking::flush(&**device).unwrap();
                }
            });
        }
    });
    let commits = volume.counters().cache.commits;
    assert!((20..160).contains(&commits), "{commits} commits for 160 flushes");
    volume.close();
    drop((volume, device));
    let (_volume, device) = setup::open(&options, &host);
    let mut read = vec![0; 4096];
    for block in 0..160u64 {
        blocking::read(&*device, block * 4096, &mut read).unwrap();
        assert_eq!(read, vec![(block / 20 + block % 20) as u8 + 1; 4096]);
    }
}

#[test]
fn what_another_user_put_in_a_caches_place_is_refused_and_not_followed() {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    let dir = tempfile::tempdir().unwrap();
    let options = options(&empty(16), CacheMode::RamDisk, 64, dir.path());
    let cache = dir.path().join("disk1");
    let refused = |what: &str, because: &str| {
        let (host, _) = setup::host(u64::MAX);
        let error = Volume::open(&options, &host).err().expect("it was accepted");
        let text = format!("{error}: {:?}", std::error::Error::source(&error));
        assert!(text.contains(because) && text.contains("disk1"), "{what}: {text}");
    };
    let target = dir.path().join("target");
    std::fs::write(&target, "precious").unwrap();
    for name in ["lock", "map", "data"] {
        std::fs::create_dir(&cache).unwrap();
        std::fs::set_permissions(&cache, Permissions::from_mode(0o700)).unwrap();
        symlink(&target, cache.join(name)).unwrap();
        refused(name, "is a link");
        std::fs::remove_dir_all(&cache).unwrap();
    }
    std::fs::create_dir(&cache).unwrap();
    std::fs::set_permissions(&cache, Permissions::from_mode(0o700)).unwrap();
    let made = std::process::Command::new("mkfifo").arg(cache.join("data")).status().unwrap();
    assert!(made.success());
    refused("a pipe", "or a pipe");
    std::fs::remove_file(cache.join("data")).unwrap();
    for mode in [0o720, 0o702, 0o1777] {
        std::fs::set_permissions(&cache, Permissions::from_mode(mode)).unwrap();
        refused("a directory for others", "chmod");
    }
    let elsewhere = dir.path().join("elsewhere");
    std::fs::set_permissions(&cache, Permissions::from_mode(0o700)).unwrap();
    std::fs::rename(&cache, &elsewhere).unwrap();
    symlink(&elsewhere, &cache).unwrap();
    refused("a link to a directory", "symbolic link");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    // The same directory, in the right place.
    std::fs::remove_file(&cache).unwrap();
    std::fs::rename(&elsewhere, &cache).unwrap();
    // These files are written under other names first: a link there is removed, and its target is unchanged.
    symlink(&target, cache.join("map.new")).unwrap();
    symlink(&target, cache.join("id.new")).unwrap();
    let (host, _) = setup::host(u64::MAX);
    drop(setup::open(&options, &host));
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
}

#[test]
fn a_cache_belongs_to_one_base_one_key_and_one_volume() {
    let dir = tempfile::tempdir().unwrap();
    let right = options(&empty(16), CacheMode::RamDisk, 64, dir.path());
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&right, &host);
    blocking::write(&*device, 0, &[1; 4096]).unwrap();

    let (kind, text) = refusal(&right);
    assert!(kind == IoErrorKind::Invalid && text.contains("in use"), "{text}");
    volume.close();

    let mut other = right.clone();
    other.persistent.as_mut().unwrap().base_id = [0xee; 32];
    let (kind, text) = refusal(&other);
    let both = [&"05".repeat(32), &"ee".repeat(32)];
    assert!(kind == IoErrorKind::Invalid && both.iter().all(|id| text.contains(*id)), "{text}");

    other.persistent = right.persistent.clone();
    other.persistent.as_mut().unwrap().key = [4; 16];
    let (kind, text) = refusal(&other);
    assert!(kind == IoErrorKind::Invalid && text.contains("key"), "{text}");

    let (kind, text) = refusal(&VolumeOptions { base: empty(17), ..right.clone() });
    assert!(kind == IoErrorKind::Invalid && text.contains("16777216 bytes"), "{text}");

    for name in ["", ".", "..", "a/b", ".hidden", "a b"] {
        other.persistent = Some(persistent(name));
        let (kind, text) = refusal(&other);
        assert!(kind == IoErrorKind::Invalid && text.contains("not a valid name"), "{text}");
    }
    let (kind, text) = refusal(&VolumeOptions { mode: CacheMode::Ram, ..right.clone() });
    assert!(kind == IoErrorKind::Invalid && text.contains("needs an overflow disk"), "{text}");
    let (kind, text) = refusal(&VolumeOptions { cache_dir: dir.path().join("missing"), ..right.clone() });
    assert!(kind == IoErrorKind::Invalid && text.contains("needs a directory"), "{text}");

    // Nothing of that did any harm.
    let (_volume, device) = setup::open(&right, &host);
    let mut read = [0; 4096];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert_eq!(read, [1; 4096]);
}

#[test]
fn a_cache_is_told_from_one_that_is_made_anew_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&empty(16), CacheMode::RamDisk, 64, dir.path());
    let id = || {
        let (host, _) = setup::host(u64::MAX);
        let (volume, _device) = setup::open(&options, &host);
        volume.close();
        volume.cache_id().unwrap()
    };
    let cache = dir.path().join("disk1");
    let first = id();
    assert_eq!(id(), first);
    // Made by a version without this file, or damaged.
    std::fs::remove_file(cache.join("id")).unwrap();
    let second = id();
    assert_eq!((second == first, id()), (false, second));
    std::fs::write(cache.join("id"), "short").unwrap();
    let third = id();
    assert_eq!((third == second, id()), (false, third));
    // Without its map it is not a new cache: its contents would be overwritten.
    std::fs::remove_file(cache.join("map")).unwrap();
    let (kind, why) = refusal(&options);
    assert!(kind == IoErrorKind::Corrupt && why.contains("map is missing"), "{kind:?}: {why}");
    // A crash while the cache was being made leaves this: another cache is made, although other files were
    // left.
    std::fs::write(cache.join("data"), "").unwrap();
    assert_ne!(id(), third);
}

#[test]
fn a_map_that_a_crash_left_half_written_is_gone_after_opening() {
    let dir = tempfile::tempdir().unwrap();
    let (options, states) = with_commits(dir.path());
    let half = dir.path().join("disk1/map.new");
    std::fs::write(&half, [7; 100_000]).unwrap();
    assert!(contents(&options).unwrap() == *states.last().unwrap());
    assert!(!half.exists());
}

#[test]
fn a_cache_that_goes_on_from_an_older_copy_seals_under_other_nonces() {
    let dir = tempfile::tempdir().unwrap();
    let (options, states) = with_commits(dir.path());
    let copies: Vec<_> = (0..2)
        .map(|number| {
            let at = dir.path().join(number.to_string());
            std::fs::create_dir(&at).unwrap();
            let copied =
                std::process::Command::new("cp").arg("-a").arg(dir.path().join("disk1")).arg(&at).status();
            assert!(copied.unwrap().success());
            let copy = VolumeOptions { cache_dir: at.clone(), ..options.clone() };
            let (host, _) = setup::host(u64::MAX);
            let (volume, device) = setup::open(&copy, &host);
            blocking::write(&*device, 0, &[9; 4096]).unwrap();
            volume.close();
            drop((volume, device));
            let mut expected = states.last().unwrap().clone();
            expected[..4096].fill(9);
            assert!(contents(&copy).unwrap() == expected);
            std::fs::read(at.join("disk1/data")).unwrap()
        })
        .collect();
    // The same block with the same contents in the same slot: with one nonce the bytes would be equal.
    assert!(copies[0] != copies[1]);
}

/// A closed cache with a few commits; the contents after each, and the base.
fn with_commits(at: &Path) -> (VolumeOptions, Vec<Vec<u8>>) {
    let options = options(&image(MIB, 7), CacheMode::RamDisk, 64, at);
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    let mut contents = vec![0; MIB as usize];
    blocking::read(&*device, 0, &mut contents).unwrap();
    let mut states = vec![contents.clone()];
    for round in 1..=5u8 {
        for block in 0..4usize {
            let at = (block * usize::from(round) * 3 % 256) * 4096;
            contents[at..at + 4096].fill(round * 8 + block as u8);
            blocking::write(&*device, at as u64, &contents[at..at + 4096]).unwrap();
        }
        let at = usize::from(round) * 40 * 4096;
        contents[at..at + 8192].fill(0);
        blocking::discard(&*device, at as u64, 8192).unwrap();
        blocking::flush(&*device).unwrap();
        states.push(contents.clone());
    }
    volume.close();
    (options, states)
}

/// The map without the zeroes behind its last commit, which does not end in eight of them.
fn records(map: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(map).unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    bytes.truncate(end.next_multiple_of(8));
    bytes
}

fn contents(options: &VolumeOptions) -> Result<Vec<u8>, headwater_block::IoError> {
    let (host, _) = setup::host(u64::MAX);
    let volume = Volume::open(options, &host)?;
    let mut read = vec![0; MIB as usize];
    let result = blocking::read(&*volume, 0, &mut read);
    volume.close();
    result.map(|()| read)
}

#[test]
fn a_map_that_is_cut_short_gives_a_state_that_was_committed() {
    let dir = tempfile::tempdir().unwrap();
    let (options, states) = with_commits(dir.path());
    let map = dir.path().join("disk1/map");
    let bytes = records(&map);
    let mut seen = std::collections::BTreeSet::new();
    for len in (0..=bytes.len()).rev().step_by(113) {
        std::fs::write(&map, &bytes[..len]).unwrap();
        match contents(&options) {
            Ok(found) => {
                let state = states.iter().position(|s| *s == found);
                seen.insert(state.unwrap_or_else(|| panic!("cut at {len}: no committed state")));
            }
            Err(error) => {
                assert_eq!(error.kind(), IoErrorKind::Corrupt, "{error}");
                assert!(len < 128 + 32, "cut at {len}: {error}");
            }
        }
    }
    assert_eq!(seen.len(), states.len(), "{seen:?}");
    // The data is still there, but useless without the map.
    for nothing in [&b""[..], &[0; 4096]] {
        std::fs::write(&map, nothing).unwrap();
        let (kind, why) = refusal(&options);
        assert!(kind == IoErrorKind::Corrupt && why.contains("restore the map"), "{kind:?}: {why}");
    }
}

#[test]
fn a_map_with_a_flipped_byte_is_refused_or_gives_the_commit_before_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let (options, states) = with_commits(dir.path());
    let map = dir.path().join("disk1/map");
    let bytes = records(&map);
    let mut refused = 0;
    for at in (0..bytes.len()).step_by(111) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        std::fs::write(&map, &flipped).unwrap();
        match contents(&options) {
            Ok(found) => {
                assert!(at > bytes.len() / 2, "byte {at}");
                assert!(found == states[4] || found == states[5], "byte {at}: not the last states");
            }
            Err(error) => {
                refused += 1;
                assert_eq!(error.kind(), IoErrorKind::Corrupt, "{error}");
                assert!(error.to_string().contains("disk1"), "{error}");
            }
        }
    }
    assert!(refused > 10);
    std::fs::write(&map, &bytes).unwrap();
    assert!(contents(&options).unwrap() == states[5]);
    // Another version is distinguished from damage.
    let mut newer = bytes;
    newer[8] += 1;
    std::fs::write(&map, &newer).unwrap();
    let (kind, why) = refusal(&options);
    let version = format!("version {},", newer[8]);
    assert!(kind == IoErrorKind::Corrupt && why.contains(&version), "{kind:?}: {why}");
}

#[test]
fn commits_go_over_zeroes_that_were_written_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let (options, states) = with_commits(dir.path());
    let map = dir.path().join("disk1/map");
    let len = || std::fs::metadata(&map).unwrap().len();
    let (before, end) = (len(), records(&map).len());
    assert!(before > end as u64 + 100_000, "{before} bytes, of which {end} are records");
    // Each opening adds a commit.
    for _ in 0..3 {
        assert!(contents(&options).unwrap() == states[5]);
    }
    assert!(records(&map).len() == end + 3 * 32 && len() == before);
    // Nothing is left of an unfinished commit.
    let file = std::fs::OpenOptions::new().write(true).open(&map).unwrap();
    file.write_all_at(&[1; 40], end as u64 + 5000).unwrap();
    assert!(contents(&options).unwrap() == states[5]);
    assert!(records(&map).len() == end + 4 * 32 && len() == end as u64 + 4 * 32);
}

#[test]
fn damage_to_the_data_is_an_error_on_that_block_only() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&empty(8), CacheMode::RamDisk, 64, dir.path());
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    let data = Rng::new(4).bytes(64 * 4096);
    blocking::write(&*device, 0, &data).unwrap();
    volume.close();
    drop((volume, device));
    let file =
        std::fs::OpenOptions::new().read(true).write(true).open(dir.path().join("disk1/data")).unwrap();
    // The test does not know which position was used: it searches for it.
    let mut head = [0; 16];
    let position = (0..64u64)
        .map(|position| position * 514 * 4096)
        .find(|at| file.read_at(&mut head, *at).is_ok_and(|n| n == 16) && head != [0; 16])
        .expect("a slot was written");
    let at = position + 20 * 4112 + 100;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
    let (volume, device) = setup::open(&options, &host);
    let mut read = vec![0; 4096];
    for block in 0..64usize {
        let result = blocking::read(&*device, block as u64 * 4096, &mut read);
        if block == 20 {
            assert_eq!(result.unwrap_err().kind(), IoErrorKind::Corrupt);
        } else {
            result.unwrap();
            assert!(read == data[block * 4096..][..4096], "block {block}");
        }
    }
    // Written again, the block is readable.
    blocking::write(&*device, 20 * 4096, &data[20 * 4096..21 * 4096]).unwrap();
    blocking::flush(&*device).unwrap();
    blocking::read(&*device, 20 * 4096, &mut read).unwrap();
    assert_eq!(volume.counters().cache.corrupt_blocks, 1);
    // Closed, not only dropped: a dropped volume may still write, which would make the file long again.
    volume.close();
    drop((volume, device));
    std::fs::write(dir.path().join("disk1/data"), b"").unwrap();
    let error = Volume::open(&options, &host).err().expect("it was accepted");
    assert_eq!(error.kind(), IoErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("shorter"), "{error}");
}

#[test]
fn a_full_disk_pauses_then_refuses_keeps_everything_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&empty(128), CacheMode::RamDisk, 40, dir.path());
    options.pause_limit = Duration::from_secs(10);
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    let pattern = |number: u64| Rng::new(number).bytes(MIB as usize);
    let write = |number: u64| blocking::write(&*device, number * MIB, &pattern(number));
    // A commit on a busy disk may take longer than a write waits.
    let is_taken = |number: u64| wait_until(format!("MiB {number} is taken"), || write(number).is_ok());
    (0..28).for_each(is_taken);
    let refused = (28..128).find_map(|number| Some((number, write(number).err()?.kind())));
    let (taken, why) = refused.expect("40 MiB are full before 128 were written");
    assert_eq!(why, IoErrorKind::NoSpace);
    assert!(taken <= 38, "{taken} MiB were taken");
    // All accepted writes can be flushed.
    blocking::flush(&*device).unwrap();
    // A discard frees space without a flush; so does a higher limit.
    blocking::discard(&*device, 0, 8 * MIB).unwrap();
    is_taken(100);
    volume.set_disk_bytes(300 * MIB);
    (0..100).for_each(is_taken);
    volume.close();
    drop((volume, device));
    options.disk_bytes = 300 * MIB;
    let (_volume, device) = setup::open(&options, &host);
    let mut read = vec![0; MIB as usize];
    for number in 0..=100 {
        blocking::read(&*device, number * MIB, &mut read).unwrap();
        assert!(read == pattern(number), "MiB {number} was lost");
    }
}

#[test]
fn a_disk_that_fails_fails_flushes_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&empty(64), CacheMode::RamDisk, 200, dir.path());
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    let data = Rng::new(8).bytes(4 * MIB as usize);
    blocking::write(&*device, 0, &data).unwrap();
    faults.full.store(true, Ordering::Relaxed);
    assert!(blocking::flush(&*device).is_err());
    blocking::write(&*device, 4 * MIB, &data[..8192]).unwrap();
    faults.full.store(false, Ordering::Relaxed);
    blocking::flush(&*device).unwrap();
    faults.write_error_every.store(3, Ordering::Relaxed);
    for number in 0..24u64 {
        blocking::write(&*device, 8 * MIB + number * MIB, &data[..MIB as usize]).unwrap();
    }
    faults.write_error_every.store(0, Ordering::Relaxed);
    blocking::flush(&*device).unwrap();
    volume.close();
    drop((volume, device));
    let (_volume, device) = setup::open(&options, &host);
    let mut read = vec![0; 4 * MIB as usize + 8192];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert!(read[..data.len()] == data && read[data.len()..] == data[..8192]);
    let mut read = vec![0; MIB as usize];
    for number in 0..24u64 {
        blocking::read(&*device, 8 * MIB + number * MIB, &mut read).unwrap();
        assert!(read == data[..MIB as usize], "MiB {number}");
    }
}

#[test]
fn a_volume_that_is_dropped_gives_its_memory_and_its_lock_back() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&empty(64), CacheMode::RamDisk, 200, dir.path());
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    let data = Rng::new(8).bytes(MIB as usize);
    for number in 0..24u64 {
        blocking::write(&*device, number * MIB, &data).unwrap();
    }
    blocking::flush(&*device).unwrap();
    drop((volume, device));
    wait_until("its memory is given back", || host.used_bytes() == 0);
    // The lock is released with the last reference, after the memory.
    let mut opened = None;
    wait_until("its lock is given back", || {
        opened = Volume::open(&options, &host).ok();
        opened.is_some()
    });
    let device = opened.unwrap();
    let mut read = vec![0; MIB as usize];
    blocking::read(&*device, 23 * MIB, &mut read).unwrap();
    assert!(read == data);
}

#[test]
fn a_flush_that_falls_on_the_end_of_a_segment_is_no_special_case() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(&empty(64), CacheMode::RamDisk, 200, dir.path());
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    let data = |number: u64| Rng::new(number).bytes(2 * MIB as usize);
    for number in 0..30 {
        blocking::write(&*device, number * 2 * MIB, &data(number)).unwrap();
        blocking::flush(&*device).unwrap();
    }
    let cache = volume.counters().cache;
    assert!(cache.disk_errors == 0 && cache.evicted_segments > 0, "{cache:?}");
    volume.close();
    drop((volume, device));
    let (_volume, device) = setup::open(&options, &host);
    let mut read = vec![0; 2 * MIB as usize];
    for number in 0..30 {
        blocking::read(&*device, number * 2 * MIB, &mut read).unwrap();
        assert!(read == data(number), "segment {number}");
    }
}

#[test]
fn blocks_that_are_zero_do_not_have_the_map_replaced_with_each_flush() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let base = image(256 * MIB, 3);
    let (host, _) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options(&base, CacheMode::RamDisk, 64, dir.path()), &host);
    // No two are neighbours, so each has a record of its own in a checkpoint.
    for block in (0..256 * MIB / 4096).step_by(2) {
        blocking::write_zeroes(&*device, block * 4096, 4096).unwrap();
    }
    let map = || std::fs::metadata(dir.path().join("disk1/map")).unwrap().ino();
    let (mut replaced, mut last) = (0, map());
    for round in 0..12 {
        blocking::write(&*device, 4096, &[round + 1; 4096]).unwrap();
        blocking::flush(&*device).unwrap();
        replaced += u32::from(map() != last);
        last = map();
    }
    assert!((1..=2).contains(&replaced), "the map was replaced {replaced} times");
    volume.close();
}

/// Writes that need no slot are noted for the next commit: but not without limit while there is no commit.
#[test]
fn writes_that_take_no_place_take_one_while_a_commit_takes_long() {
    let dir = tempfile::tempdir().unwrap();
    let image = Rng::new(6).bytes(1 << 20);
    let base: Arc<dyn Device> = Arc::new(ReferenceDisk::with_contents(image.clone(), Default::default()));
    let options = options(&base, CacheMode::RamDisk, 64, dir.path());
    let (host, faults) = setup::host(u64::MAX);
    let (volume, device) = setup::open(&options, &host);
    // More than go into the map.
    blocking::write(&*device, 65536, &[5; 32 * 4096]).unwrap();
    faults.hold.store(true, Ordering::Relaxed);
    let flush = std::thread::spawn({
        let device = Arc::clone(&device);
        move || blocking::flush(&*device)
    });
    wait_until("the flush is under way", || faults.in_flight.load(Ordering::SeqCst) != 0);
    // Zero, and equal to the image, alternately.
    let write = |step: usize| {
        let data = if step.is_multiple_of(2) { &[0; 4096] } else { &image[..4096] };
        blocking::write(&*device, 0, data)
    };
    // A million of them: 24 MiB of notes, if each was noted.
    (0..1 << 20).for_each(|step| write(step).unwrap());
    let counters = volume.counters().cache;
    let elided = counters.elided_zero_blocks + counters.elided_equal_blocks;
    // As many as can be noted, and some that needed no note; the others took one slot.
    assert!((1 << 18..(1 << 19) + (1 << 12)).contains(&elided), "{elided}");
    // A discard frees blocks that have a slot, and leaves the others unchanged. A zero write waits.
    blocking::discard(&*device, 0, 65536).unwrap();
    let mut read = vec![1; 65536];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert!(read[..4096] == [0; 4096] && read[4096..] == image[4096..65536]);
    let paused_writes = || volume.counters().cache.paused_writes;
    let before = paused_writes();
    let zero = std::thread::spawn({
        let device = Arc::clone(&device);
        move || blocking::write_zeroes(&*device, 0, 65536)
    });
    wait_until("the zero write waits", || paused_writes() > before);
    faults.hold.store(false, Ordering::Relaxed);
    flush.join().unwrap().unwrap();
    zero.join().unwrap().unwrap();
    write(1).unwrap();
    volume.close();
    drop((volume, device));
    let (_volume, device) = setup::open(&options, &host);
    let mut read = vec![1; 1 << 20];
    blocking::read(&*device, 0, &mut read).unwrap();
    assert!(read[..4096] == image[..4096] && read[4096..65536].iter().all(|byte| *byte == 0));
    let end = 65536 + 32 * 4096;
    assert!(read[65536..end].iter().all(|byte| *byte == 5) && read[end..] == image[end..]);
}
