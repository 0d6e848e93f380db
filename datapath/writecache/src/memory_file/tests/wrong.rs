//! A memory file that contradicts itself is refused and not changed.

use std::os::unix::fs::FileExt;

use headwater_block::IoErrorKind;

use super::*;
use crate::memory_file::{DIRECTORY_AT, ENTRY_BYTES, Layout, PAGE, RECORD_BYTES, check};
use crate::segment::State;
use crate::units::SegmentId;

/// The contents of a file: its pages that are not zero, and their checksums.
fn sum(file: &File) -> Vec<(u64, u32)> {
    let end = file.metadata().unwrap().len();
    let mut sums = Vec::new();
    for part in check::data(file, 0..end).unwrap() {
        let mut bytes = vec![0; (part.end - part.start) as usize];
        file.read_exact_at(&mut bytes, part.start).unwrap();
        let pages = (part.start..).step_by(PAGE).zip(bytes.chunks(PAGE));
        let zero = crc32c::crc32c(&[0; PAGE]);
        sums.extend(pages.map(|(at, page)| (at, crc32c::crc32c(page))).filter(|(_, sum)| *sum != zero));
    }
    sums
}

struct Quiet {
    _dir: tempfile::TempDir,
    options: CacheOptions,
    handover: Handover,
    layout: Layout,
}

/// A cache with blocks in RAM, packed, and on disk, that was handed over.
fn quiet() -> Quiet {
    let dir = tempfile::tempdir().unwrap();
    let options = options(24, Some((dir.path(), 64 * MIB)), 64 * MIB);
    let process = Process::new(|host| WriteCache::open_in(memfd(), &options, &host.shared()).unwrap());
    let (mut model, mut rng) = (Model::default(), Rng::new(5));
    for block in (0..5000).chain(9000..12_000) {
        let data = if block < 5000 { rng.bytes(BLOCK) } else { rng.runs(BLOCK, 64) };
        process.write(&mut model, block, &data);
        if block % 256 == 0 {
            process.work();
            process.disk.run_all();
        }
    }
    process.write_part(&mut model, 7000, 512, &[1; 512]);
    process.clear(&mut model, 8192, 8192 + 512, Location::ZERO);
    let states: Vec<State> =
        (0..20).map(|id| process.cache.segments.get(SegmentId(id)).unwrap().word().state()).collect();
    assert!(states.contains(&State::Packed) && states.contains(&State::Spilled), "{states:?}");
    let handover = process.cache.handover().unwrap().unwrap();
    let layout = process.cache.memory.as_ref().unwrap().layout;
    drop(process);
    Quiet { _dir: dir, options, handover, layout }
}

impl Quiet {
    fn memory(&self) -> File {
        File::from(self.handover.memory.try_clone().unwrap())
    }

    fn number(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.memory().read_exact_at(&mut bytes, at).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn put(&self, at: u64, number: u32) {
        self.memory().write_all_at(&number.to_le_bytes(), at).unwrap();
    }

    /// The byte of the file at which the word of a block begins.
    fn word(&self, block: u64) -> u64 {
        let table = self.number(DIRECTORY_AT + block / 512 * ENTRY_BYTES) - 2;
        self.layout.pieces_at + u64::from(table) * 2048 + block % 512 * 4
    }

    fn record(&self, segment: u32) -> u64 {
        self.layout.records_at + u64::from(segment) * RECORD_BYTES
    }

    /// The first segment in this state.
    fn segment(&self, state: State) -> u32 {
        (0..100).find(|segment| self.number(self.record(*segment)) & 7 == state as u32).unwrap()
    }

    /// Checks that the changed file is refused for a reason with these words, and accepted when the change is
    /// undone.
    fn refuse(&self, at: u64, number: u32, words: &str) {
        let before = self.number(at);
        assert_ne!(before, number, "{words}");
        self.put(at, number);
        let overflow = File::from(self.handover.overflow.as_ref().unwrap().try_clone().unwrap());
        let sums = (sum(&self.memory()), sum(&overflow));
        let error = match recover(&self.handover, &self.options) {
            Err(error) => error,
            Ok(_) => panic!("it is recovered: {words}"),
        };
        assert_eq!(error.kind(), IoErrorKind::Corrupt);
        let said = error.to_string();
        assert!(said.contains(words) && said.contains("'tested'"), "{said}");
        assert!(sums == (sum(&self.memory()), sum(&overflow)), "a refused file was changed: {said}");
        self.put(at, before);
    }
}

#[test]
fn what_contradicts_itself_is_given_up_and_stays_as_it_is() {
    let quiet = quiet();
    let word = |block| quiet.word(block);
    quiet.refuse(0, 7, "not the memory of a write cache");
    quiet.refuse(8, 2, "format 2");
    quiet.refuse(16, 5, "checksum");
    quiet.refuse(96, 5, "checksum");
    quiet.refuse(136, 2, "was ended");
    quiet.refuse(136, 0, "was not completed");
    // Words.
    quiet.refuse(word(3), quiet.number(word(4)), "is that of block 3 and that of block 4");
    quiet.refuse(word(3), 90 << 9, "which is not in use");
    quiet.refuse(word(3), Location::partial(3).bits(), "whose sectors are not in the table");
    quiet.refuse(word(7001), Location::partial(0).bits(), "have the same sectors");
    // The directory.
    let entry = |leaf: u64| DIRECTORY_AT + leaf * ENTRY_BYTES;
    quiet.refuse(entry(1), quiet.number(entry(0)), "already belongs to another leaf");
    quiet.refuse(entry(1), 1 << 30, "already belongs to another leaf");
    quiet.refuse(entry(13) + 12, 1, "is missing");
    quiet.refuse(entry(16) + 4, 9, "has partial blocks and no table");
    quiet.refuse(entry(40), 1, "past the end of the volume");
    // Records.
    let (spilled, packed) = (quiet.segment(State::Spilled), quiet.segment(State::Packed));
    let in_ram = quiet.segment(State::Filling);
    quiet.refuse(quiet.record(spilled), 0, "which is not in use");
    quiet.refuse(quiet.record(spilled), 77, "an unknown state");
    quiet.refuse(quiet.record(spilled) + 16, 0, "has no position on disk");
    quiet.refuse(quiet.record(in_ram), State::Filling as u32, "its memory does not fit");
    quiet.refuse(quiet.record(in_ram), State::Packed as u32, "is damaged, or belongs to another");
    quiet.refuse(quiet.record(packed) + 24, 0, "is damaged, or belongs to another");
    let at = u64::from(quiet.number(quiet.record(packed) + 24))
        | u64::from(quiet.number(quiet.record(packed) + 28)) << 32;
    quiet.refuse(at + 100, 1, "is damaged, or belongs to another");
    let other =
        (spilled + 1..100).find(|id| quiet.number(quiet.record(*id)) == State::Spilled as u32).unwrap();
    quiet.refuse(quiet.record(other) + 16, quiet.number(quiet.record(spilled) + 16), "same position on disk");
    // Afterwards all is as before.
    let process = recover(&quiet.handover, &quiet.options).unwrap();
    assert!(process.cache.snapshot().packed_bytes > 0);
}

#[test]
fn what_was_handed_over_in_part_is_given_up() {
    let quiet = quiet();
    let refused = |left: Handover, options: &CacheOptions| {
        let host = Host::prepare(u64::MAX, Arc::new(LateDisk::default()), NoPressure).0;
        WriteCache::recover(left, options, &host.shared()).err().expect("it is recovered").to_string()
    };
    let whole = || again(&quiet.handover);
    let said = refused(Handover { overflow: None, ..whole() }, &quiet.options);
    assert!(said.contains("overflow file was not handed over"), "{said}");
    if quiet.handover.key.is_some() {
        let said = refused(Handover { key: None, ..whole() }, &quiet.options);
        assert!(said.contains("key of its overflow file was not handed over"), "{said}");
    }
    let said = refused(whole(), &CacheOptions { overflow: None, ..quiet.options.clone() });
    assert!(said.contains("it has an overflow disk"), "{said}");
    let said = refused(whole(), &CacheOptions { size_bytes: 32 * MIB, ..quiet.options.clone() });
    assert!(said.contains("8192"), "{said}");
    let said = refused(Handover { memory: memfd().into(), ..whole() }, &quiet.options);
    assert!(said.contains("is empty"), "{said}");
    let short = memfd();
    let mut head = vec![0; PAGE];
    quiet.memory().read_exact_at(&mut head, 0).unwrap();
    short.write_all_at(&head, 0).unwrap();
    let said = refused(Handover { memory: short.into(), ..whole() }, &quiet.options);
    assert!(said.contains("shorter than its head says"), "{said}");
    recover(&quiet.handover, &quiet.options).unwrap();
}

#[test]
fn generations_and_places_given_up_stay_behind_at_each_crash() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(24, Some((dir.path(), 64 * MIB)), 64 * MIB);
    let mut process = Process::new(|host| WriteCache::open_in(memfd(), &options, &host.shared()).unwrap());
    let (mut model, mut rng) = (Model::default(), Rng::new(5));
    let mut last = 0;
    for crash in 1..4u64 {
        for block in 0..5000 {
            process.write(&mut model, block, &rng.bytes(BLOCK));
            if block % 256 == 0 {
                process.work();
                process.disk.run_all();
            }
        }
        // All of it is free again: no record shows which generations were used.
        process.clear(&mut model, 0, 5000, Location::ZERO);
        process.disk.run_all();
        let used = process.cache.overflow.as_ref().unwrap().next_generation();
        assert!(used > last, "generation {used} after {last}");
        let handover = process.cache.handover().unwrap().unwrap();
        drop(process);
        process = recover(&handover, &options).unwrap();
        let used = {
            let next = process.cache.overflow.as_ref().unwrap().next_generation();
            assert!(next >= used + (1 << 20), "generation {next} after {used}");
            next
        };
        for block in 0..5000 {
            process.write(&mut model, block, &rng.bytes(BLOCK));
            process.work();
            if process.disk.has_any() {
                break;
            }
        }
        assert!(process.disk.has_any(), "nothing is spilled: {:?}", process.cache.snapshot());
        let handover = process.cache.handover().unwrap().unwrap();
        let ended = end_after(0, process, |process| process.disk.run(0, false));
        let Ok(left) = ended else { panic!("the process continues") };
        assert!(!left.late.is_empty());
        process = recover(&handover, &options).unwrap();
        let overflow = process.cache.overflow.as_ref().unwrap();
        last = overflow.next_generation();
        assert!(last >= used + (1 << 20), "generation {last} after {used}");
        let file = process.cache.memory.as_ref().unwrap();
        let given_up = check::given_up(file).unwrap().len();
        assert!(given_up >= crash as usize, "{given_up} places after crash {crash}");
        left.late.iter().for_each(|write| write.arrive());
        process.check(&mut model, 0..5000, "given up");
    }
}
