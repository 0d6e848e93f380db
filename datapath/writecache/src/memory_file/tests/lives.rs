//! Random operations, with spilling, packing, cleaning, freezing and failing writes in flight, in processes
//! that end at any point.

use headwater_testkit::rounds;

use super::*;

const GROUP_BLOCKS: u32 = 1 << 18;

/// A block to write: some are at both ends of leaves, in two groups of leaves.
fn place(rng: &mut Rng) -> u32 {
    let first = if rng.chance(1, 4) { GROUP_BLOCKS + 5 * 512 } else { 0 };
    if rng.chance(1, 8) { first + 510 + rng.below(4) as u32 } else { first + rng.below(3200) as u32 }
}

fn places() -> impl Iterator<Item = u32> {
    (0..3700).chain(GROUP_BLOCKS + 5 * 512..GROUP_BLOCKS + 5 * 512 + 3700)
}

#[derive(Default, Debug)]
struct Seen {
    crashes: u64,
    late: u64,
    spilled: u64,
    packed: u64,
    cleaned: u64,
    evicted: u64,
    partial: u64,
    frozen: u64,
    failed: u64,
}

fn operation(process: &mut Process, model: &mut Model, rng: &mut Rng, seen: &mut Seen) {
    let block = place(rng);
    match rng.below(24) {
        0..6 => process.write(model, block, &bytes(rng, BLOCK)),
        6 => {
            // Many blocks at once fill segments, which compress or not.
            let packs = rng.chance(1, 3);
            for block in block..block + 400 {
                let data = if packs { rng.runs(BLOCK, 64) } else { rng.bytes(BLOCK) };
                process.write(model, block, &data);
            }
        }
        7..12 => {
            let (skip, sectors) = (rng.index(8), 1 + rng.index(7));
            let len = (sectors * SECTOR).min(BLOCK - skip * SECTOR);
            let data = if rng.chance(1, 8) { vec![0; len] } else { bytes(rng, len) };
            process.write_part(model, block, skip * SECTOR, &data);
        }
        12 => {
            let skip = (1 + rng.index(7)) * SECTOR;
            let sectors = rng.index((BLOCK - skip) / SECTOR);
            let data = bytes(rng, BLOCK - sectors * SECTOR);
            if data.len() > BLOCK - skip {
                process.write_pair(model, block, skip, &data);
            }
        }
        13 => {
            let skip = rng.index(4000);
            let len = 1 + rng.index(BLOCK - skip);
            process.write_part(model, block, skip, &bytes(rng, len));
        }
        14 => process.write(model, block, &vec![0; BLOCK]),
        15 => process.write(model, block, &image(block)),
        16 => {
            let end = if rng.chance(1, 4) { block + 1200 } else { block + 1 + rng.below(40) as u32 };
            let to = if rng.chance(1, 2) { Location::ZERO } else { Location::ABSENT };
            process.clear(model, block, end, to);
        }
        17 => match process.view.take() {
            None => {
                let now = places().step_by(37).map(|block| (block, model.now(block))).collect();
                process.view = Some((process.cache.freeze().unwrap(), now));
                seen.frozen += 1;
            }
            Some((frozen, kept)) => {
                for (block, expected) in &kept {
                    let number = BlockNumber(*block);
                    let parts = |into: &mut [u8], each: &mut dyn FnMut(usize, usize, Found)| {
                        frozen.read_parts(number, 0, into, each);
                    };
                    let found = process.contents(*block, |into| frozen.read(number, 0, into), parts);
                    assert!(found == *expected, "block {block} of a view");
                }
            }
        },
        18 => process.cache.set_ram_bytes((18 + rng.below(8)) * MIB),
        19 => process.cache.trim(),
        20 => {
            let (which, fails) = (rng.index(8), rng.chance(1, 4));
            seen.failed += u64::from(fails && process.disk.has_any());
            process.disk.run(which, fails);
        }
        // Writes stay in flight for long.
        21 => {
            process.work();
            process.cache.evict_one();
        }
        _ => process.work(),
    }
}

fn live(seed: u64, with_disk: bool, crashes: u64) -> Seen {
    let mut rng = Rng::new(seed);
    let dir = tempfile::tempdir().unwrap();
    let overflow = with_disk.then_some((dir.path(), 36 * MIB));
    let options = options(24, overflow, 2 << 30);
    let mut process = Process::new(|host| WriteCache::open_in(memfd(), &options, &host.shared()).unwrap());
    let (mut model, mut seen) = (Model::default(), Seen::default());
    while seen.crashes < crashes {
        let points = if rng.chance(1, 5) { rng.below(300) } else { rng.below(20_000) };
        let ended = end_after(points, process, |process| {
            for _ in 0..20 + rng.below(300) {
                operation(process, &mut model, &mut rng, &mut seen);
            }
            let now = process.cache.snapshot();
            seen.spilled += now.spilled_segments;
            seen.packed += now.packed_segments;
            seen.cleaned += now.cleaned_blocks;
            seen.evicted += now.evicted_segments;
            seen.partial += process.cache.map.partial_blocks();
        });
        let left = match ended {
            Ok(left) => left,
            // The process ends in order, and hands the cache over nevertheless.
            Err((process, _)) if rng.chance(1, 2) => {
                let handover = process.cache.handover().unwrap().unwrap();
                process.disk.run_all();
                drop(process);
                Left { handover, late: Vec::new() }
            }
            Err((again, _)) => {
                process = again;
                continue;
            }
        };
        seen.crashes += 1;
        seen.late += left.late.len() as u64;
        let (before, after): (Vec<_>, Vec<_>) = left.late.into_iter().partition(|_| rng.chance(1, 2));
        before.iter().for_each(|write| write.arrive());
        let points: Vec<u64> = (0..rng.below(3)).map(|_| rng.below(80)).collect();
        process = recover_at_last(&left.handover, &options, &points);
        let what = format!("seed {seed}, crash {}", seen.crashes);
        process.check(&mut model, places(), &what);
        // The other writes complete when the next process has written already.
        for _ in 0..rng.below(4) {
            process.write(&mut model, place(&mut rng), &bytes(&mut rng, BLOCK));
            process.work();
            process.disk.run_all();
        }
        after.iter().for_each(|write| write.arrive());
        process.check(&mut model, places(), &format!("{what}, later"));
    }
    gives_all_back(process, &mut model);
    seen
}

/// When the cache is empty, its file has only the memory that an empty cache needs.
fn gives_all_back(process: Process, model: &mut Model) {
    let cache = &process.cache;
    process.clear(model, 0, 2 * GROUP_BLOCKS, Location::ABSENT);
    for _ in 0..10 {
        process.disk.run_all();
        process.work();
        while cache.wants_trim() && !cache.memory.as_ref().unwrap().pieces.wants_trim() {
            cache.trim();
        }
        cache.trim();
    }
    let now = cache.snapshot();
    assert_eq!((now.packed_bytes, cache.map.table_bytes(), cache.map.partial_blocks()), (0, 0, 0));
    let filling = u64::from(cache.log.lock().ram_segments);
    assert!(filling <= 2, "{filling} segments are in RAM");
    let memory = File::from(cache.handover().unwrap().unwrap().memory);
    let bytes = std::os::unix::fs::MetadataExt::blocks(&memory.metadata().unwrap()) * 512;
    assert!(bytes <= filling * 2 * MIB + 5 * MIB, "{bytes} bytes are left in the file");
    cache.end();
    drop(process);
    let bytes = std::os::unix::fs::MetadataExt::blocks(&memory.metadata().unwrap()) * 512;
    assert_eq!(bytes, BLOCK as u64, "bytes are left when it has ended");
}

#[test]
fn what_was_answered_outlives_a_process_that_ends_at_any_store() {
    let mut all = Seen::default();
    for seed in 0..rounds(12) as u64 {
        let seen = live(seed + 1, true, 8);
        for (sum, one) in [
            (&mut all.crashes, seen.crashes),
            (&mut all.late, seen.late),
            (&mut all.spilled, seen.spilled),
            (&mut all.packed, seen.packed),
            (&mut all.cleaned, seen.cleaned),
            (&mut all.evicted, seen.evicted),
            (&mut all.partial, seen.partial),
            (&mut all.frozen, seen.frozen),
            (&mut all.failed, seen.failed),
        ] {
            *sum += one;
        }
    }
    println!("{all:?}");
    let Seen { late, spilled, packed, cleaned, evicted, partial, frozen, failed, .. } = all;
    assert!(
        [late, spilled, packed, cleaned, evicted, partial, frozen, failed].iter().all(|n| *n > 0),
        "{all:?}"
    );
}

#[test]
fn what_was_answered_outlives_a_process_without_an_overflow() {
    let mut packed = 0;
    for seed in 0..rounds(6) as u64 {
        packed += live(seed + 100, false, 8).packed;
    }
    assert!(packed > 0);
}
