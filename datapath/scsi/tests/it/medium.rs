//! Commands that read or change the medium, compared with a model: a vector of bytes, with a second
//! implementation of the rules of SBC-3.

use crate::session::{
    self, Answer, initiator, read10, send, send_with, sixteen, target, target_with, ten, write10,
};
use headwater_scsi::{Nexus, Options, Status};
use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng, Waits};

const OUT_OF_RANGE: (u8, u16) = (5, 0x2100);
const BAD_CDB: (u8, u16) = (5, 0x2400);
const BAD_UNIT: (u8, u16) = (5, 0x0e03);
const MISCOMPARE: (u8, u16) = (0xe, 0x1d00);

/// The model of the medium.
struct Model {
    block: usize,
    bytes: Vec<u8>,
}

impl Model {
    fn blocks(&self) -> u64 {
        (self.bytes.len() / self.block) as u64
    }

    /// The bytes of a run of blocks, if it is inside the disk.
    fn place(&self, lba: u64, blocks: u64) -> Result<std::ops::Range<usize>, (u8, u16)> {
        if u128::from(lba) + u128::from(blocks) > u128::from(self.blocks()) {
            return Err(OUT_OF_RANGE);
        }
        Ok(lba as usize * self.block..(lba + blocks) as usize * self.block)
    }

    fn apply(&mut self, command: &Random) -> Result<Vec<u8>, (u8, u16)> {
        let (lba, blocks, data) = (command.lba, command.blocks, &command.data);
        let block = self.block;
        let whole = |n: usize| if data.len() < n { Err(BAD_UNIT) } else { Ok(()) };
        match command.kind {
            Verb::Read => Ok(self.bytes[self.place(lba, blocks)?].to_vec()),
            // Whole blocks of the data.
            Verb::Write | Verb::WriteVerify => {
                let place = self.place(lba, blocks)?;
                let data = &data[..data.len().min(place.len()) / block * block];
                self.bytes[place.start..place.start + data.len()].copy_from_slice(data);
                Ok(Vec::new())
            }
            Verb::Or => {
                let place = self.place(lba, blocks)?;
                let data = &data[..data.len() / block * block];
                self.bytes[place].iter_mut().zip(data).for_each(|(to, from)| *to |= from);
                Ok(Vec::new())
            }
            Verb::CompareAndWrite => {
                let place = self.place(lba, blocks)?;
                match data.len().cmp(&(place.len() * 2)) {
                    std::cmp::Ordering::Less => return Err(BAD_UNIT),
                    std::cmp::Ordering::Equal => {}
                    std::cmp::Ordering::Greater => return Err(BAD_CDB),
                }
                let (old, new) = data.split_at(place.len());
                if self.bytes[place.clone()] != *old {
                    return Err(MISCOMPARE);
                }
                self.bytes[place].copy_from_slice(new);
                Ok(Vec::new())
            }
            Verb::Verify => {
                let place = self.place(lba, blocks)?;
                whole(place.len())?;
                let len = place.len();
                if self.bytes[place] == data[..len] { Ok(Vec::new()) } else { Err(MISCOMPARE) }
            }
            Verb::VerifyOne => {
                let place = self.place(lba, blocks)?;
                whole(block.min(place.len()))?;
                let same = self.bytes[place].chunks(block).all(|part| *part == data[..block]);
                if same { Ok(Vec::new()) } else { Err(MISCOMPARE) }
            }
            Verb::VerifyMedium => self.place(lba, blocks).map(|_| Vec::new()),
            Verb::Same => {
                let blocks = if blocks == 0 && lba <= self.blocks() { self.blocks() - lba } else { blocks };
                let place = self.place(lba, blocks)?;
                if data.len() != block {
                    return Err(BAD_UNIT);
                }
                // With UNMAP it is zero, whatever the data.
                let unmap = command.cdb[1] & 0x08 != 0;
                for part in self.bytes[place].chunks_mut(block) {
                    if unmap { part.fill(0) } else { part.copy_from_slice(data) }
                }
                Ok(Vec::new())
            }
            Verb::Unmap => {
                let mut places = Vec::new();
                for descriptor in data[8..].chunks_exact(16) {
                    let lba = u64::from_be_bytes(descriptor[..8].try_into().unwrap());
                    let blocks = u32::from_be_bytes(descriptor[8..12].try_into().unwrap());
                    places.push(self.place(lba, u64::from(blocks))?);
                }
                places.into_iter().for_each(|place| self.bytes[place].fill(0));
                Ok(Vec::new())
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Read,
    Write,
    WriteVerify,
    Or,
    CompareAndWrite,
    Verify,
    VerifyOne,
    VerifyMedium,
    Same,
    Unmap,
}

const VERBS: [Verb; 10] = [
    Verb::Read,
    Verb::Write,
    Verb::WriteVerify,
    Verb::Or,
    Verb::CompareAndWrite,
    Verb::Verify,
    Verb::VerifyOne,
    Verb::VerifyMedium,
    Verb::Same,
    Verb::Unmap,
];

struct Random {
    kind: Verb,
    lba: u64,
    blocks: u64,
    data: Vec<u8>,
    cdb: Vec<u8>,
}

/// Data that is all zero, or equal in each block, or random, so that comparisons often succeed.
fn data(rng: &mut Rng, len: usize, block: usize) -> Vec<u8> {
    match rng.below(3) {
        0 => vec![0; len],
        1 => (0..len).map(|at| (at % block) as u8 % 3).collect(),
        _ => {
            let mut bytes = vec![0; len];
            rng.fill(&mut bytes);
            bytes
        }
    }
}

fn random(rng: &mut Rng, model: &Model) -> Random {
    let kind = VERBS[rng.below(VERBS.len() as u64) as usize];
    let block = model.block;
    let lba = rng.below(model.blocks() + 4);
    let blocks = rng.below(20);
    let len = blocks as usize * block;
    let mut sent = match kind {
        Verb::Read | Verb::VerifyMedium => Vec::new(),
        Verb::Same => data(rng, block, block),
        Verb::VerifyOne => data(rng, block, block),
        Verb::CompareAndWrite => data(rng, len * 2, block),
        Verb::Verify | Verb::Write | Verb::WriteVerify | Verb::Or => data(rng, len, block),
        Verb::Unmap => unmap_list(rng, model),
    };
    if matches!(kind, Verb::Verify | Verb::CompareAndWrite)
        && rng.below(2) == 0
        && let Ok(place) = model.place(lba, blocks)
    {
        let len = place.len();
        sent[..len].copy_from_slice(&model.bytes[place]);
    }
    // Now and then the initiator sends another length.
    if kind != Verb::Unmap && rng.below(16) == 0 && !sent.is_empty() {
        let len = sent.len();
        sent.truncate(len - 1 - rng.below(len as u64 - 1) as usize % len);
    }
    let cdb = encode(rng, kind, lba, blocks, sent.len());
    Random { kind, lba, blocks, data: sent, cdb }
}

fn unmap_list(rng: &mut Rng, model: &Model) -> Vec<u8> {
    let count = rng.below(5) as u16;
    let mut list = vec![0; 8];
    list[..2].copy_from_slice(&(count * 16 + 6).to_be_bytes());
    list[2..4].copy_from_slice(&(count * 16).to_be_bytes());
    for _ in 0..count {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&rng.below(model.blocks() + 1).to_be_bytes());
        descriptor[8..12].copy_from_slice(&(rng.below(9) as u32).to_be_bytes());
        list.extend_from_slice(&descriptor);
    }
    list
}

/// Encodes the command in one of the forms whose fields are large enough.
fn encode(rng: &mut Rng, kind: Verb, lba: u64, blocks: u64, sent: usize) -> Vec<u8> {
    let fua = if rng.below(2) == 0 { 0x08 } else { 0 };
    let form = rng.below(3);
    let (flags, codes) = match kind {
        Verb::Read => (fua, [0x28, 0xa8, 0x88]),
        Verb::Write => (fua, [0x2a, 0xaa, 0x8a]),
        Verb::WriteVerify => (if fua == 0 { 0 } else { 0x02 }, [0x2e, 0xae, 0x8e]),
        Verb::Verify => (0x02, [0x2f, 0xaf, 0x8f]),
        Verb::VerifyOne => (0x06, [0x2f, 0xaf, 0x8f]),
        Verb::VerifyMedium => (0, [0x2f, 0xaf, 0x8f]),
        Verb::Same => (fua, [0x41, 0x41, 0x93]),
        Verb::Or => (fua, [0x8b, 0x8b, 0x8b]),
        Verb::CompareAndWrite => {
            let mut cdb = sixteen(0x89, fua, lba, 0);
            cdb[13] = blocks as u8;
            return cdb.to_vec();
        }
        Verb::Unmap => return ten(0x42, 0, 0, sent as u16).to_vec(),
    };
    let code = codes[form as usize];
    match code >> 5 {
        1 | 2 => ten(code, flags, lba as u32, blocks as u16).to_vec(),
        5 => {
            let mut cdb = [0; 12];
            cdb[0] = code;
            cdb[1] = flags;
            cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
            cdb[6..10].copy_from_slice(&(blocks as u32).to_be_bytes());
            cdb.to_vec()
        }
        _ => sixteen(code, flags, lba, blocks as u32).to_vec(),
    }
}

fn against_model(seed: u64, block: u32, waits: Waits, commands: usize) {
    let options = ReferenceOptions { logical_block_bytes: block, waits, seed, ..ReferenceOptions::default() };
    let blocks = 300;
    let nexus = target(blocks, options).nexus(initiator("a"));
    let block = block as usize;
    let mut model = Model { block, bytes: vec![0; blocks as usize * block] };
    let mut rng = Rng::new(seed);
    let mut good = 0;
    for number in 0..commands {
        let command = random(&mut rng, &model);
        let room = if rng.below(4) == 0 { 512 } else { 1 << 20 };
        let answer = send_with(&nexus, session::LUN, &command.cdb, &command.data, room);
        let expected = match model.apply(&command) {
            Ok(data) => Answer::good(data),
            Err((key, code)) => Answer::check(key, code),
        };
        good += usize::from(expected.status == Status::Good);
        let (kind, cdb, sent) = (command.kind, &command.cdb, command.data.len());
        assert!(
            answer == expected,
            "seed {seed}, command {number}, {kind:?} {cdb:02x?} with {sent} bytes: {:?} {:x?}, not {:?} {:x?}",
            answer.status,
            answer.sense,
            expected.status,
            expected.sense
        );
    }
    assert!(good > commands / 2, "seed {seed}: only {good} of {commands} commands were good");
    let all = send(&nexus, &sixteen(0x88, 0, 0, blocks as u32), &[]);
    assert!(all.data == model.bytes, "seed {seed}: the disk differs from the model in the end");
}

#[test]
fn random_commands_on_512_byte_blocks() {
    for (seed, waits) in [(1, Waits::Never), (2, Waits::PerMille(300)), (3, Waits::Always)] {
        against_model(seed, 512, waits, 2000);
    }
}

#[test]
fn random_commands_on_4096_byte_blocks() {
    for (seed, waits) in [(4, Waits::Never), (5, Waits::PerMille(500))] {
        against_model(seed, 4096, waits, 1000);
    }
}

fn session_on(disk: ReferenceDisk, options: Options) -> Nexus {
    target_with(disk, options).nexus(initiator("a"))
}

#[test]
fn read_6_of_zero_blocks_reads_256() {
    let nexus = session_on(ReferenceDisk::new(1 << 20), Options::default());
    assert_eq!(send(&nexus, &[0x0a, 0, 0, 5, 1, 0], &[7; 512]), Answer::good(vec![]));
    let data = send(&nexus, &[0x08, 0, 0, 0, 0, 0], &[]).data;
    assert_eq!(data.len(), 256 * 512);
    assert_eq!(data[5 * 512..6 * 512], [7; 512]);
    assert_eq!(send(&nexus, &[0x08, 0x1f, 0xff, 0xff, 1, 0], &[]), Answer::check(5, 0x2100));
}

#[test]
fn transfers_of_no_blocks_only_check_the_address() {
    let nexus = session_on(ReferenceDisk::new(1 << 20), Options::default());
    for code in [0x28, 0x2a, 0x2e, 0x2f] {
        assert_eq!(send(&nexus, &ten(code, 0, 2048, 0), &[]), Answer::good(vec![]), "{code:x}");
        assert_eq!(send(&nexus, &ten(code, 0, 2049, 0), &[]), Answer::check(5, 0x2100), "{code:x}");
    }
    assert_eq!(send(&nexus, &sixteen(0x88, 0, 1 << 63, 0), &[]), Answer::check(5, 0x2100));
    assert_eq!(send(&nexus, &sixteen(0x8b, 0, u64::MAX, 0), &[]), Answer::check(5, 0x2100));
    assert_eq!(send(&nexus, &sixteen(0x89, 0, 0, 0), &[]), Answer::good(vec![]));
}

#[test]
fn transfers_longer_than_the_limit_are_refused() {
    let options = Options { transfer_bytes: 8192, ..Options::default() };
    let nexus = session_on(ReferenceDisk::new(1 << 20), options);
    assert_eq!(send(&nexus, &read10(0, 16), &[]).status, Status::Good);
    assert_eq!(send(&nexus, &read10(0, 17), &[]), Answer::check(BAD_CDB.0, BAD_CDB.1));
    assert_eq!(send(&nexus, &write10(0, 17), &[0; 17 * 512]), Answer::check(5, 0x2400));
    // The whole medium can be verified.
    assert_eq!(send(&nexus, &ten(0x2f, 0, 0, 2048), &[]), Answer::good(vec![]));
    // Only half of the data of COMPARE AND WRITE is written.
    let mut compare = sixteen(0x89, 0, 0, 0);
    compare[13] = 9;
    assert_eq!(send(&nexus, &compare, &[0; 18 * 512]), Answer::check(5, 0x2400));
}

#[test]
fn protection_information_and_reserved_values_are_refused() {
    let nexus = session_on(ReferenceDisk::new(1 << 20), Options::default());
    for protect in 1..8 {
        for code in [0x28, 0x2a, 0x2e, 0x2f, 0x41] {
            let answer = send(&nexus, &ten(code, protect << 5, 0, 1), &[0; 512]);
            assert_eq!(answer, Answer::check(5, 0x2400), "{code:x} {protect}");
        }
        for code in [0x88, 0x8a, 0x8b, 0x8e, 0x8f, 0x93] {
            let answer = send(&nexus, &sixteen(code, protect << 5, 0, 1), &[0; 512]);
            assert_eq!(answer, Answer::check(5, 0x2400), "{code:x} {protect}");
        }
    }
    assert_eq!(send(&nexus, &ten(0x2f, 0x04, 0, 1), &[0; 512]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &ten(0x2e, 0x06, 0, 1), &[0; 512]), Answer::check(5, 0x2400));
    // ANCHOR, in WRITE SAME and UNMAP; NACA.
    assert_eq!(send(&nexus, &ten(0x41, 0x18, 0, 1), &[0; 512]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &ten(0x42, 0x01, 0, 8), &[0; 8]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &[0, 0, 0, 0, 0, 4], &[]), Answer::check(5, 0x2400));
}

#[test]
fn data_of_another_length_than_the_cdb_says() {
    let nexus = session_on(ReferenceDisk::new(1 << 20), Options::default());
    let refused = Answer::check(BAD_UNIT.0, BAD_UNIT.1);
    // If data is missing, whole blocks are written.
    assert_eq!(send(&nexus, &write10(8, 2), &[7; 1023]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &read10(8, 2), &[]).data, [[7; 512], [0; 512]].concat());
    assert_eq!(send(&nexus, &write10(8, 2), &[]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &ten(0x2f, 2, 8, 2), &[7; 1023]), refused);
    // More was announced than arrived: the transport lost data, and nothing is written.
    let (cdb, data_out) = (headwater_scsi::Cdb::new(&write10(8, 2)), [9; 512]);
    let command = headwater_scsi::Command {
        lun: session::LUN,
        attribute: headwater_scsi::Attribute::Simple,
        cdb: &cdb,
        data_out: &data_out,
        announced_bytes: 1024,
    };
    let headwater_scsi::Now::Done { reply, .. } = nexus.try_now(&command, &mut []) else {
        panic!("the disk never waits")
    };
    assert_eq!(reply.sense.map(|sense| sense.code().0), Some(0x0e03));
    assert_eq!(send(&nexus, &read10(8, 1), &[]).data, [7; 512]);
    // Excess data is ignored by plain writes, and refused if it would change the halves of a comparison or
    // the pattern.
    assert_eq!(send(&nexus, &write10(0, 1), &[7; 1024]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &read10(0, 2), &[]).data, [[7; 512], [0; 512]].concat());
    assert_eq!(send(&nexus, &ten(0x41, 0, 0, 1), &[0; 1024]), refused);
    assert_eq!(send(&nexus, &ten(0x41, 0, 0, 1), &[0; 256]), refused);
    let mut compare = sixteen(0x89, 0, 0, 0);
    compare[13] = 1;
    assert_eq!(send(&nexus, &compare, &[7; 2048]), Answer::check(5, 0x2400));
    assert_eq!(send(&nexus, &compare, &[7; 512]), refused);
    assert_eq!(send(&nexus, &compare, &[7; 1024]), Answer::good(vec![]));
    // Data that the command does not use.
    assert_eq!(send(&nexus, &ten(0x2f, 0, 0, 1), &[9; 512]), Answer::good(vec![]));
}

#[test]
fn a_miscompare_tells_where() {
    let nexus = session_on(ReferenceDisk::new(4 << 20), Options::default());
    let mut data = vec![0; 3000 * 512];
    data[2_500 * 512 + 9] = 1;
    let cdb = headwater_scsi::Cdb::new(&ten(0x2f, 0x02, 0, 3000));
    let outcome = session::wait(&session::start(&nexus, session::LUN, &cdb, &data, 1));
    let sense = outcome.reply.unwrap().sense.unwrap();
    assert_eq!(sense.bytes()[..3], [0xf0, 0, 0x0e]);
    assert_eq!(sense.bytes()[3..7], (2_500_u32 * 512 + 9).to_be_bytes());
}

#[test]
fn read_only_units_are_never_written() {
    let reference = || ReferenceOptions { read_only: true, ..ReferenceOptions::default() };
    let by_device = session_on(ReferenceDisk::with_options(1 << 20, reference()), Options::default());
    let options = Options { read_only: true, ..Options::default() };
    let by_option = session_on(ReferenceDisk::new(1 << 20), options);
    let by_mode = session_on(ReferenceDisk::new(1 << 20), Options::default());
    let select = [0, 0, 0, 0, 0x0a, 0x0a, 0, 0x10, 8, 0, 0, 0, 0xff, 0xff, 0, 0];
    assert_eq!(send(&by_mode, &[0x15, 0x10, 0, 0, 16, 0], &select), Answer::good(vec![]));
    let mut compare = sixteen(0x89, 0, 0, 0);
    compare[13] = 1;
    for (nexus, code) in [(&by_device, 0x2700), (&by_option, 0x2700), (&by_mode, 0x2702)] {
        let refused = Answer::check(7, code);
        assert_eq!(send(nexus, &[0x1a, 8, 8, 0, 255, 0], &[]).data[2], 0x90);
        assert_eq!(send(nexus, &[0x0a, 0, 0, 0, 1, 0], &[1; 512]), refused);
        assert_eq!(send(nexus, &write10(0, 1), &[1; 512]), refused);
        assert_eq!(send(nexus, &ten(0x2e, 0, 0, 1), &[1; 512]), refused);
        assert_eq!(send(nexus, &ten(0x41, 0, 0, 1), &[0; 512]), refused);
        assert_eq!(send(nexus, &sixteen(0x8b, 0, 0, 1), &[1; 512]), refused);
        assert_eq!(send(nexus, &compare, &[0; 1024]), refused);
        assert_eq!(send(nexus, &ten(0x42, 0, 0, 8), &[0; 8]), refused);
        assert_eq!(send(nexus, &read10(0, 1), &[]), Answer::good(vec![0; 512]));
        assert_eq!(send(nexus, &ten(0x2f, 2, 0, 1), &[0; 512]), Answer::good(vec![]));
        assert_eq!(send(nexus, &ten(0x35, 0, 0, 0), &[]), Answer::good(vec![]));
    }
}

#[test]
fn unmap_lists() {
    let nexus = session_on(ReferenceDisk::new(1 << 20), Options::default());
    assert_eq!(send(&nexus, &write10(0, 64), &[7; 64 * 512]), Answer::good(vec![]));
    let unmap = |list: &[u8]| send(&nexus, &ten(0x42, 0, 0, list.len() as u16), list);
    assert_eq!(unmap(&[]), Answer::good(vec![]));
    assert_eq!(unmap(&[0; 8]), Answer::good(vec![]));
    assert_eq!(unmap(&[0; 7]), Answer::check(5, 0x1a00));
    let descriptor =
        |lba: u64, blocks: u32| [&lba.to_be_bytes()[..], &blocks.to_be_bytes(), &[0; 4]].concat();
    let list = |descriptors: &[Vec<u8>]| {
        let len = descriptors.len() as u16 * 16;
        [&(len + 6).to_be_bytes()[..], &len.to_be_bytes(), &[0; 4], &descriptors.concat()].concat()
    };
    assert_eq!(unmap(&list(&[descriptor(2048, 0)])), Answer::good(vec![]));
    assert_eq!(unmap(&list(&[descriptor(0, 1), descriptor(2048, 1)])), Answer::check(5, 0x2100));
    assert_eq!(send(&nexus, &read10(0, 64), &[]).data, [7; 64 * 512]);
    assert_eq!(unmap(&list(&[descriptor(8, 8), descriptor(5, 0), descriptor(32, 8)])), Answer::good(vec![]));
    let mut expected = vec![7; 64 * 512];
    expected[8 * 512..16 * 512].fill(0);
    expected[32 * 512..40 * 512].fill(0);
    assert_eq!(send(&nexus, &read10(0, 64), &[]).data, expected);
    // A new hole is reported: from 8 on 8 blocks, then data.
    let status = send(&nexus, &sixteen(0x9e, 0x12, 8, 40), &[]).data;
    assert_eq!(status[..4], [0, 0, 0, 36]);
    assert_eq!(status[8..24], [0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 8, 1, 0, 0, 0]);
    assert_eq!(status[24..40], [0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 16, 0, 0, 0, 0]);
    assert_eq!(send(&nexus, &sixteen(0x9e, 0x12, 2048, 24), &[]), Answer::check(5, 0x2100));
}

#[test]
fn write_same_without_data_and_up_to_the_end() {
    let nexus = session_on(ReferenceDisk::new(1 << 20), Options::default());
    assert_eq!(send(&nexus, &ten(0x41, 0, 2000, 0), &[7; 512]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &read10(1999, 49), &[]).data, [vec![0; 512], vec![7; 48 * 512]].concat());
    assert_eq!(send(&nexus, &sixteen(0x93, 0x09, 2040, 8), &[]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &read10(2040, 8), &[]).data, [0; 8 * 512]);
    assert_eq!(send(&nexus, &sixteen(0x9e, 0x12, 2040, 24), &[]).data[20], 1);
    assert_eq!(send(&nexus, &ten(0x41, 0, 2049, 0), &[7; 512]), Answer::check(5, 0x2100));
    // UNMAP unmaps, whatever the data.
    assert_eq!(send(&nexus, &ten(0x41, 0x08, 2000, 8), &[7; 512]), Answer::good(vec![]));
    assert_eq!(send(&nexus, &read10(2000, 9), &[]).data, [vec![0; 4096], vec![7; 512]].concat());
}
