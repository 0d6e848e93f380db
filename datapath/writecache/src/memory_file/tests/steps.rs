//! Tests the order of stores: makes each kind of change, and ends the process after each of its stores.

use headwater_testkit::rounds::is_long;

use super::*;

/// Ends a process after each store of `change`, and checks what the next process finds.
fn each_store(
    what: &str,
    overflow_mib: Option<u64>,
    prepare: impl Fn(&mut Process, &mut Model),
    change: impl Fn(&mut Process, &mut Model),
) {
    most_stores(60, what, overflow_mib, prepare, change);
}

/// Like [`each_store`], for a change with many stores: the first `dense` are tried one by one.
fn most_stores(
    dense: u64,
    what: &str,
    overflow_mib: Option<u64>,
    prepare: impl Fn(&mut Process, &mut Model),
    change: impl Fn(&mut Process, &mut Model),
) {
    let dir = tempfile::tempdir().unwrap();
    let options = options(16, overflow_mib.map(|mib| (dir.path(), mib * MIB)), 64 * MIB);
    let mut points = 0;
    loop {
        let mut model = Model::default();
        let mut process =
            Process::new(|host| WriteCache::open_in(memfd(), &options, &host.shared()).unwrap());
        prepare(&mut process, &mut model);
        let said = format!("{what}, after {points} stores");
        let (left, is_over) = match end_after(points, process, |process| change(process, &mut model)) {
            Ok(left) => (left, false),
            Err((process, _)) => {
                let handover = process.cache.handover().unwrap().unwrap();
                drop(process);
                (Left { handover, late: Vec::new() }, true)
            }
        };
        left.late.iter().for_each(|write| write.arrive());
        let process = recover(&left.handover, &options).unwrap_or_else(|e| panic!("{said}: {e}"));
        let blocks: Vec<u32> = model.blocks.keys().chain(model.under_way.keys()).copied().collect();
        process.check(&mut model, blocks.into_iter(), &said);
        // The recovered cache can be written to, and handed over again.
        process.write(&mut model, 12_000, &[7; BLOCK]);
        let handover = process.cache.handover().unwrap().unwrap();
        drop(process);
        let process = recover(&handover, &options).unwrap_or_else(|e| panic!("{said}, again: {e}"));
        let blocks: Vec<u32> = model.blocks.keys().copied().collect();
        process.check(&mut model, blocks.into_iter(), &said);
        if is_over {
            println!("{what}: {points} stores");
            assert!(points > 0, "{what}: nothing was stored");
            return;
        }
        // Some of the later stores are skipped, except in `make long`.
        points += if points < dense || is_long() { 1 } else { 61 };
    }
}

fn data(seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(BLOCK)
}

#[test]
fn a_new_block_and_an_overwritten_one() {
    each_store("new", None, |_, _| {}, |process, model| process.write(model, 3, &data(1)));
    let written = |process: &mut Process, model: &mut Model| process.write(model, 3, &data(1));
    each_store("in place", None, written, |process, model| process.write(model, 3, &data(2)));
    let frozen = |process: &mut Process, model: &mut Model| {
        process.write(model, 3, &data(1));
        process.view = Some((process.cache.freeze().unwrap(), BTreeMap::new()));
    };
    each_store("elsewhere", None, frozen, |process, model| {
        process.write(model, 3, &data(2));
        process.view = None;
        // The old slot is taken by another block.
        process.write(model, 4, &data(3));
    });
    each_store("zero", None, written, |process, model| process.write(model, 3, &vec![0; BLOCK]));
    each_store("as the image", None, written, |process, model| process.write(model, 3, &image(3)));
}

#[test]
fn a_table_that_is_made_and_folded() {
    let zero = |process: &mut Process, model: &mut Model| process.clear(model, 0, 512, Location::ZERO);
    each_store("of zeroes", None, zero, |process, model| {
        process.write(model, 3, &data(1));
        process.clear(model, 3, 4, Location::ZERO);
        process.write(model, 3, &image(3));
        process.clear(model, 0, 512, Location::ABSENT);
    });
    // The piece is taken by another leaf.
    each_store(
        "used again",
        None,
        |_, _| {},
        |process, model| {
            process.write(model, 3, &data(1));
            process.clear(model, 0, 512, Location::ABSENT);
            process.write(model, 700, &data(2));
            process.write(model, 3, &data(3));
        },
    );
}

#[test]
fn partial_blocks_that_come_and_go() {
    each_store(
        "parts",
        None,
        |_, _| {},
        |process, model| {
            process.write_part(model, 3, 512, &data(1)[..1024]);
            process.write_part(model, 3, 2048, &data(2)[..512]);
            process.write(model, 3, &data(3));
            process.write_part(model, 4, 0, &data(4)[..512]);
            process.clear(model, 4, 5, Location::ABSENT);
            process.write_part(model, 5, 0, &data(5)[..512]);
        },
    );
    let zero = |process: &mut Process, model: &mut Model| process.clear(model, 0, 512, Location::ZERO);
    each_store("of zeroes", None, zero, |process, model| {
        let view = process.cache.freeze().unwrap();
        process.write_part(model, 3, 512, &data(1)[..1024]);
        process.write_part(model, 3, 512, &data(2)[..1024]);
        drop(view);
    });
    each_store(
        "pairs",
        None,
        |_, _| {},
        |process, model| {
            assert!(process.write_pair(model, 3, 2048, &data(1)[..3072]));
            process.write(model, 3, &data(2));
            process.write_part(model, 4, 512, &data(3)[..512]);
            process.write(model, 4, &data(4));
            assert!(process.write_pair(model, 8, 2048, &data(5)[..3072]));
            process.clear(model, 9, 10, Location::ZERO);
            process.write_part(model, 9, 512, &data(6)[..512]);
        },
    );
    // Several pieces, of which the last one is freed first.
    let many = |process: &mut Process, model: &mut Model| {
        (0..64).for_each(|block| process.write_part(model, block, 512, &data(u64::from(block))[..512]));
    };
    each_store("a second piece", None, many, |process, model| {
        process.write_part(model, 64, 512, &data(64)[..512]);
        process.write(model, 64, &data(65));
        process.write_part(model, 65, 512, &data(66)[..512]);
    });
}

/// Fills the RAM with blocks that compress, or not.
fn fill(process: &Process, model: &mut Model, blocks: std::ops::Range<u32>, packs: bool) {
    for block in blocks {
        let mut data = data(u64::from(block) + 100);
        if packs {
            data[256..].fill(block as u8);
        }
        process.write(model, block, &data);
    }
}

#[test]
fn a_segment_that_is_packed_made_smaller_and_freed() {
    let full = |process: &mut Process, model: &mut Model| fill(process, model, 0..2600, true);
    most_stores(8, "packed", None, full, |process, model| {
        process.cache.set_ram_bytes(16 * MIB);
        process.work();
        process.clear(model, 0, 300, Location::ZERO);
        process.cache.packed.shrink(
            crate::packed::Dead::Quarter,
            (|id| process.cache.segments.get(id), process.cache.memory.as_ref()),
            |_| false,
        );
        process.clear(model, 300, 512, Location::ZERO);
        process.write(model, 5000, &data(1));
    });
}

#[test]
fn a_segment_that_is_spilled_evicted_and_freed() {
    let full = |process: &mut Process, model: &mut Model| fill(process, model, 0..2600, false);
    most_stores(8, "spilled", Some(64), full, |process, model| {
        process.work();
        process.disk.run(0, true);
        process.work();
        process.disk.run_all();
        process.cache.evict_one();
        process.clear(model, 0, 512, Location::ZERO);
        process.write(model, 5000, &data(1));
        process.work();
        process.disk.run_all();
    });
}
