//! A session in the full feature phase: PDUs of every kind, right ones and wrong ones, in pieces of any length, on a disk that
//! answers when it is told to; against the model in `target`.
//!
//! Replies of one task come in their order and as the model says, to the last bit; those of different tasks in any. Their numbers
//! go up as RFC 7143 wants it. After each round the session counts what the model counts, and at the end both disks are the same.

use std::sync::Arc;

use headwater_block::Geometry;
use headwater_block::fuzzing::{Input, PlainDisk};
use headwater_scsi::{Cdb, Identity, Initiator, LogicalUnit, Lun, Options, Target};

use super::target::{Expectation, Model, NONE, Numbered, is_of_steps};
use super::texts::TARGET;
use crate::limits::Limits;
use crate::login::Established;
use crate::login::keys::Parameters;
use crate::server::session::alone::{Alone, Ended, with_session};
use crate::targets::{FixedTargets, Offer};
use crate::wire::Bhs;
use crate::wire::digest::digest;

const BLOCKS: u8 = 32;
const BLOCK: usize = 512;
const CID: u16 = 7;
const FIRST_CMD_SN: u32 = u32::MAX - 5;
const FIRST_STAT_SN: u32 = u32::MAX - 9;
/// Most steps of one input.
const STEPS: usize = 300;
/// Most bytes between two rounds.
const PIECE_BYTES: usize = 8192;

fn disk() -> Arc<PlainDisk> {
    let size_bytes = u64::from(BLOCKS) * 512;
    let geometry = Geometry {
        size_bytes,
        logical_block_bytes: 512,
        physical_block_bytes: 512,
        read_only: false,
        volatile_cache: false,
    };
    Arc::new(PlainDisk::new(geometry, (0..251).cycle().take(usize::from(BLOCKS) * BLOCK).collect()))
}

fn target(disk: &Arc<PlainDisk>, power_on_attention: bool) -> Arc<Target> {
    let identity = Identity {
        vendor: "HEADWATR".into(),
        product: "Volume".into(),
        revision: "0001".into(),
        serial: "7".into(),
        uuid: [7; 16],
    };
    let options = Options { power_on_attention, transfer_bytes: 4096, ..Options::default() };
    Target::new(TARGET, vec![(0, LogicalUnit::new(Arc::clone(disk) as _, identity, options))])
}

/// What was agreed on, and how much there may be of everything: small, so that all limits are met.
fn settings(input: &mut Input<'_>) -> (Parameters, Limits, bool) {
    let [flags, bursts, sizes, bytes] = input.array();
    let max_burst_bytes = 512 << (bursts & 3);
    let agreed = Parameters {
        header_digest: flags & 1 != 0,
        data_digest: flags & 2 != 0,
        initial_r2t: flags & 4 != 0,
        immediate_data: flags & 8 == 0,
        send_segment_bytes: 512 << (sizes >> 3 & 3),
        max_burst_bytes,
        first_burst_bytes: max_burst_bytes.min(512 << (bursts >> 2 & 3)),
        outstanding_r2t: 1 + u16::from(bursts >> 4 & 3),
        ..Parameters::default()
    };
    let limits = Limits {
        queue_depth: 1 + u32::from(sizes & 7),
        receive_segment_bytes: 8192,
        text_bytes: 8192,
        bytes_collected: 512 << (bytes & 7),
        bytes_executing: 512 << (bytes >> 3 & 7),
        batch_bytes: 0,
        keepalive_ms: 1 << 30,
        warnings_per_10_s: 1,
        ..Limits::default()
    };
    (agreed, limits.sane(), flags & 16 != 0)
}

struct Bench<'a, 'b> {
    session: &'a mut Alone<'b>,
    model: Model,
    disks: [Arc<PlainDisk>; 2],
    /// What is not sent yet.
    outbound: Vec<u8>,
    /// Where it is cut, if anywhere.
    piece_bytes: usize,
    /// A bit of the next PDU that is not as it should be.
    damage: Option<usize>,
    inbound: Vec<u8>,
    cmd_sn: u32,
    stat_sn: u32,
    /// The last ExpCmdSN and MaxCmdSN.
    told: (u32, u32),
    fill: u8,
    /// Unsolicited data of the last command: tag, where it goes on, its number.
    unasked: (u32, u32, u32),
    text_tag: u32,
}

/// A session: four bytes of what was agreed on, and steps.
pub fn iscsi_session(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (agreed, limits, attention) = settings(&mut input);
    let disks = [disk(), disk()];
    let [target, second] = disks.each_ref().map(|disk| target(disk, attention));
    let initiator = || Initiator {
        transport_id: vec![0x45, 0, 0, 4, 0, 0, 0, 0].into_boxed_slice(),
        target_port: 1,
        target_port_name: TARGET.into(),
    };
    let (Ok(name), Ok(initiator_name)) = (TARGET.parse(), "iqn.2026-01.org.example:initiator".parse()) else {
        panic!("names that are none")
    };
    let offer = Offer { scsi: target, alias: String::new(), accounts: None };
    let established = Established {
        initiator: initiator_name,
        proved: None,
        isid: [0x80, 1, 2, 3, 4, 5],
        tsih: 0,
        cid: CID,
        target: Some((name, offer)),
        parameters: agreed.clone(),
        exp_cmd_sn: FIRST_CMD_SN,
        stat_sn: FIRST_STAT_SN,
    };
    let twin = (second.nexus(initiator()), Arc::clone(&disks[1]));
    let model = Model::new(limits.clone(), agreed, twin, CID, FIRST_CMD_SN);
    let result = with_session(FixedTargets::new(Vec::new()), limits.clone(), established, |session| {
        let mut bench = Bench {
            session,
            model,
            disks,
            outbound: Vec::new(),
            piece_bytes: PIECE_BYTES,
            damage: None,
            inbound: Vec::new(),
            cmd_sn: FIRST_CMD_SN,
            stat_sn: FIRST_STAT_SN,
            told: (FIRST_CMD_SN, FIRST_CMD_SN.wrapping_add(limits.queue_depth).wrapping_sub(1)),
            fill: 0,
            unasked: (NONE, 0, 0),
            text_tag: NONE,
        };
        let is_known = bench.steps(&mut input);
        bench.rest();
        if is_known {
            bench.finish();
        }
    });
    assert!(result.is_ok(), "no resources: {result:?}");
}

impl Bench<'_, '_> {
    /// `false`: nothing more can be said of it.
    fn steps(&mut self, input: &mut Input<'_>) -> bool {
        for _ in 0..STEPS {
            if input.is_empty() || self.model.end().is_some() {
                break;
            }
            let [kind, how] = input.array();
            match kind & 15 {
                0..=4 => self.scsi(how, input),
                5 | 6 => {
                    if !self.flush() {
                        return false;
                    }
                    self.data_out(how, input);
                }
                7 => self.unasked(how, input),
                8 => self.nop(how, input),
                9 => self.text(how, input),
                10 => self.function(how, input),
                11 if how & 7 == 0 => self.logout(how, input),
                11 => self.raw(how, input),
                12 | 13 => {
                    if !self.flush() {
                        return false;
                    }
                    self.move_disks(how);
                }
                14 => self.piece_bytes = if how == 0 { PIECE_BYTES } else { usize::from(how) * 4 - 3 },
                _ => {
                    // Alone, so that no tag can be hit that was not seen.
                    if !self.flush() {
                        return false;
                    }
                    self.damage = Some(usize::from(how) << 3 | usize::from(input.byte() & 7));
                }
            }
            let waits = kind & 0x80 != 0 && self.outbound.len() < PIECE_BYTES / 2;
            if !waits && !self.flush() {
                return false;
            }
        }
        self.flush()
    }

    /// The disks come to rest: a request that waits keeps all that is behind it.
    fn rest(&mut self) {
        for disk in &self.disks {
            disk.hold(false);
            while disk.release(0) {}
        }
    }

    /// The initiator goes away, and the disks are compared.
    fn finish(&mut self) {
        if !self.settle(&[]) {
            return;
        }
        self.model.hang_up();
        self.session.hang_up();
        self.check();
        assert!(
            self.session.end().is_some() && self.model.end().is_some(),
            "it goes on without an initiator"
        );
        let [ours, theirs] = self.disks.each_ref().map(|disk| disk.contents());
        assert!(ours == theirs, "the disk holds other bytes than the model's");
    }

    fn move_disks(&mut self, how: u8) {
        for disk in &self.disks {
            match how & 3 {
                0 => disk.hold(true),
                1 => disk.hold(false),
                _ => drop(disk.release(usize::from(how >> 2) % disk.waiting().max(1))),
            }
        }
    }

    /// Sends what is to be sent, in pieces, each with a round.
    fn flush(&mut self) -> bool {
        let outbound = std::mem::take(&mut self.outbound);
        // Not so many that nothing else is tried.
        let piece_bytes = self.piece_bytes.max(outbound.len() / 64).min(PIECE_BYTES);
        for piece in outbound.chunks(piece_bytes) {
            if !self.settle(piece) {
                return false;
            }
        }
        // What ended meanwhile is answered as well.
        self.settle(&[])
    }

    /// Rounds until nothing is left to do.
    fn settle(&mut self, piece: &[u8]) -> bool {
        let mut piece = piece;
        loop {
            self.model.round(piece);
            if self.model.is_open {
                return false;
            }
            if !piece.is_empty() {
                self.session.send(piece);
            }
            self.session.round();
            self.check();
            piece = &[];
            if !self.model.has_events() {
                break;
            }
        }
        self.cmd_sn = self.model.counts().exp_cmd_sn;
        true
    }

    /// What was answered is what was expected.
    fn check(&mut self) {
        self.inbound.extend(self.session.replies());
        while let Some((header, data)) = self.take_reply() {
            let tag = header[16..20].to_vec();
            let expected = &mut self.model.expected;
            let place = expected.iter().position(|expected| expected.header[16..20] == tag);
            let Some(place) = place else { panic!("{header:02x?} answers nothing") };
            let expectation = expected.remove(place);
            self.compare(&header, &data, &expectation);
        }
        assert_eq!(self.session.end(), self.model.end(), "how it ended");
        if self.model.end() == Some(Ended::Fault) {
            // The last replies may not have been sent.
            self.model.expected.clear();
        }
        assert!(self.inbound.is_empty(), "a part of a PDU");
        assert!(self.model.expected.is_empty(), "not answered: {:02x?}", self.model.expected);
        if self.model.end().is_none() {
            assert_eq!(self.session.counts(), self.model.counts());
        }
        assert_eq!(self.disks[0].waiting(), self.disks[1].waiting(), "requests to the disk");
    }

    fn take_reply(&mut self) -> Option<(Bhs, Vec<u8>)> {
        let header = *self.inbound.first_chunk::<48>()?;
        let number = |at: usize| header[at + 1..at + 4].iter().fold(0, |n, byte| n << 8 | usize::from(*byte));
        let (len, mut at) = (number(4), 48);
        assert_eq!(header[4], 0, "additional headers");
        if self.model.agreed.header_digest {
            assert_eq!(self.inbound[48..52], digest(&[&header]), "a header digest");
            at += 4;
        }
        let padded = len.next_multiple_of(4);
        let covered = &self.inbound[at..at + padded];
        let data = covered[..len].to_vec();
        assert!(covered[len..].iter().all(|byte| *byte == 0), "padding");
        at += padded;
        if self.model.agreed.data_digest && len > 0 {
            assert_eq!(self.inbound[at..at + 4], digest(&[covered]), "a data digest");
            at += 4;
        }
        self.inbound.drain(..at);
        Some((header, data))
    }

    fn compare(&mut self, header: &Bhs, data: &[u8], expectation: &Expectation) {
        let number = |at: usize| header[at..at + 4].iter().fold(0, |n, byte| n << 8 | u32::from(*byte));
        let mut masked = *header;
        masked[24..36].fill(0);
        let mut expected = expectation.header;
        if expectation.tagged {
            masked[20..24].fill(0);
            expected[20..24].fill(0);
            let (tag, is_new) =
                (number(20), !self.model.wanted().iter().any(|wanted| wanted.1 == number(20)));
            assert!(tag != NONE && is_new, "a tag that is in use: {tag:#x}");
            if header[0] == 0x31 {
                self.model.learn(number(16), number(36), tag);
            } else {
                self.model.texts.tag = Some(tag);
                self.text_tag = tag;
            }
        }
        assert_eq!(masked, expected, "{header:02x?}");
        assert!(data == expectation.data, "other data in {header:02x?}");
        match expectation.numbered {
            Numbered::Status => {
                assert_eq!(number(24), self.stat_sn, "StatSN of {header:02x?}");
                self.stat_sn = self.stat_sn.wrapping_add(1);
            }
            Numbered::Next => assert_eq!(number(24), self.stat_sn, "StatSN of {header:02x?}"),
            Numbered::Nothing => {}
        }
        // Neither goes back, nor past where it is when all is done.
        let (exp, max, counts) = (number(28), number(32), self.model.counts());
        for (was, is, most) in [(self.told.0, exp, counts.exp_cmd_sn), (self.told.1, max, counts.max_cmd_sn)]
        {
            let is_between = is.wrapping_sub(was) <= most.wrapping_sub(was) && is.wrapping_sub(was) < 1 << 20;
            assert!(is_between || self.model.end().is_some(), "a number of {header:02x?} after {was:#x}");
        }
        self.told = (exp, max);
    }
}

/// What the initiator sends.
impl Bench<'_, '_> {
    fn pdu(&mut self, header: &Bhs, ahs: &[u8], data: &[u8]) {
        let mut header = *header;
        if header[4..8] == [0; 4] {
            let len = u32::try_from(data.len()).unwrap_or(0).to_be_bytes();
            header[5..8].copy_from_slice(&len[1..]);
            header[4] = u8::try_from(ahs.len() / 4).unwrap_or(0);
        }
        let start = self.outbound.len();
        let mut covered = header.to_vec();
        covered.extend_from_slice(ahs);
        self.outbound.extend_from_slice(&covered);
        if self.model.agreed.header_digest {
            self.outbound.extend_from_slice(&digest(&[&covered]));
        }
        let mut data = data.to_vec();
        data.resize(data.len().next_multiple_of(4), 0);
        self.outbound.extend_from_slice(&data);
        if self.model.agreed.data_digest && !data.is_empty() {
            self.outbound.extend_from_slice(&digest(&[&data]));
        }
        if let Some(bit) = self.damage.take() {
            let len = self.outbound.len() - start;
            self.outbound[start + bit / 8 % len] ^= 1 << (bit % 8);
        }
    }

    /// A number for a command: the next one, most of the time.
    fn numbered(&mut self, header: &mut Bhs, how: u8) {
        let number = match how & 7 {
            // One is left out, or sent again.
            1 => self.cmd_sn.wrapping_add(1),
            2 => self.cmd_sn.wrapping_sub(1),
            3 => self.cmd_sn.wrapping_add(u32::from(how >> 3)),
            4 => {
                header[0] |= 0x40;
                self.cmd_sn
            }
            _ => {
                self.cmd_sn = self.cmd_sn.wrapping_add(1);
                self.cmd_sn.wrapping_sub(1)
            }
        };
        header[24..28].copy_from_slice(&number.to_be_bytes());
    }

    fn some_data(&mut self, len: usize) -> Vec<u8> {
        self.fill = self.fill.wrapping_add(1);
        (0..len).map(|at| self.fill.wrapping_add(u8::try_from(at / BLOCK).unwrap_or(0))).collect()
    }

    fn scsi(&mut self, how: u8, input: &mut Input<'_>) {
        let [flags, tag, what, lba, blocks, more, ahead] = input.array();
        let (lba, blocks) = (lba % (BLOCKS + 2), blocks % 10);
        let is_held = self.disks[0].is_held();
        let mut cdb = cdb(what, lba, blocks, input);
        if is_held && is_of_steps(&cdb) {
            cdb = self::cdb(1, lba, blocks, input);
        }
        let mut header = [0; 48];
        header[0] = 0x01;
        // Final, read and write as the command has it, or as the flags say.
        let writes = [0x0a, 0x2a, 0x8a, 0x15, 0x41, 0x42, 0x89, 0x55].contains(&cdb[0]);
        header[1] = match flags & 3 {
            0 | 1 => {
                if writes {
                    0xa0
                } else {
                    0xc0
                }
            }
            // More comes unasked.
            2 => {
                if writes {
                    0x20
                } else {
                    0x40
                }
            }
            _ => flags & 0xe0,
        };
        let attribute = flags >> 2 & 7;
        header[1] |= if is_held && attribute == 2 { 0 } else { attribute };
        let lun = if more & 0xe0 == 0xe0 { [0, 1, 0, 0, 0, 0, 0, 0] } else { [0; 8] };
        header[8..16].copy_from_slice(&lun);
        header[16..20].copy_from_slice(&[0, 0, 0, tag % 12]);
        let natural = u32::try_from(self.model.moves(Lun(lun), &Cdb::new(&cdb))).unwrap_or(0).min(65_536);
        let announced = match more & 7 {
            5 => natural + 512,
            6 => natural.saturating_sub(1 + u32::from(ahead)),
            7 => u32::from(ahead) * 8,
            _ => natural,
        };
        header[20..24].copy_from_slice(&announced.to_be_bytes());
        self.numbered(&mut header, how);
        header[32..].copy_from_slice(&cdb);
        let ahs = match more >> 3 & 3 {
            // A read length; a longer CDB; anything.
            1 => vec![0, 5, 2, 0, 0, 0, ahead, 0],
            2 => vec![0, 1, 1, 0],
            3 if ahead & 1 == 1 => input.array::<8>().to_vec(),
            _ => Vec::new(),
        };
        let most = announced.min(4096) + u32::from(ahead & 0x80) * 4;
        let data = match ahead & 3 {
            0 => 0,
            1 => most,
            2 => most.min(512),
            _ => most.min(512) + u32::from(ahead & 0x40),
        };
        let data = if header[1] & 0x20 != 0 { data } else { data & u32::from(ahead) };
        let data = self.some_data(usize::try_from(data).unwrap_or(0));
        self.unasked = (u32::from(tag % 12), u32::try_from(data.len()).unwrap_or(0), 0);
        self.pdu(&header, &ahs, &data);
    }

    /// Data for an R2T that was seen: as it should be, or not.
    fn data_out(&mut self, how: u8, input: &mut Input<'_>) {
        let wanted = self.model.wanted();
        let [which, part] = input.array();
        let Some((tag, transfer_tag, data_sn, offset, left)) =
            wanted.get(usize::from(which) % wanted.len().max(1)).copied()
        else {
            return self.unasked(how, input);
        };
        let all = left.min(4096);
        let (len, is_final, step, jump, bogus) = match how & 15 {
            8 => (all / 2, false, 0, 0, 0),
            9 => (all, all == left, 1, 0, 0),
            10 => (all, all == left, 0, 4, 0),
            11 => (all + 4, true, 0, 0, 0),
            12 => (all / 2, true, 0, 0, 0),
            13 => (all, all == left, 0, 0, 0x8000_0000),
            14 => (u32::from(part) % (all + 1), part & 0x80 != 0, 0, 0, 0),
            15 => (all, false, 0, 0, 0),
            _ => (all, all == left, 0, 0, 0),
        };
        self.data_pdu([tag, transfer_tag ^ bogus, data_sn.wrapping_add(step), offset + jump], len, is_final);
    }

    /// Data that nobody asked for, of the last command.
    fn unasked(&mut self, how: u8, input: &mut Input<'_>) {
        let (tag, offset, data_sn) = self.unasked;
        let len = u32::from(how >> 1) * 8;
        let tag = if how == 0xff { u32::from(input.byte()) } else { tag };
        self.data_pdu([tag, NONE, data_sn, offset], len, how & 1 == 1);
        self.unasked = (tag, offset + len, data_sn.wrapping_add(1));
    }

    fn data_pdu(&mut self, [tag, transfer_tag, data_sn, offset]: [u32; 4], len: u32, is_final: bool) {
        let mut header = [0; 48];
        (header[0], header[1]) = (0x05, if is_final { 0x80 } else { 0 });
        for (at, number) in [(16, tag), (20, transfer_tag), (36, data_sn), (40, offset)] {
            header[at..at + 4].copy_from_slice(&number.to_be_bytes());
        }
        let data = self.some_data(usize::try_from(len).unwrap_or(0));
        self.pdu(&header, &[], &data);
    }

    fn nop(&mut self, how: u8, input: &mut Input<'_>) {
        let [tag, len] = input.array();
        let mut header = [0; 48];
        (header[0], header[1]) = (0x00, 0x80);
        header[16..20].copy_from_slice(&if tag == 0xff { [0xff; 4] } else { [0, 0, 1, tag] });
        header[20..24].fill(0xff);
        self.numbered(&mut header, how);
        let data = self.some_data(usize::from(len) * 5);
        self.pdu(&header, &[], &data);
    }

    fn text(&mut self, how: u8, input: &mut Input<'_>) {
        let [flags, tag, len] = input.array();
        let mut header = [0; 48];
        // Final most of the time.
        (header[0], header[1]) = (0x04, flags & 0x40 | if flags & 1 == 0 { 0x80 } else { 0 });
        header[16..20].copy_from_slice(&[0, 0, 2, tag]);
        let goes_on = flags & 2 != 0;
        header[20..24].copy_from_slice(&if goes_on { self.text_tag } else { NONE }.to_be_bytes());
        self.numbered(&mut header, how);
        let text: Vec<u8> = match flags >> 2 & 7 {
            0 => b"SendTargets=\0".to_vec(),
            1 => format!("MaxRecvDataSegmentLength={}\0", 512 + 64 * u32::from(len)).into_bytes(),
            // Many keys, whose answers are longer than they are.
            2 => (0..len).flat_map(|key| format!("X-{key}=\0").into_bytes()).collect(),
            3 => Vec::new(),
            4 => vec![b'a'; usize::from(len) * 32],
            _ => input.some(usize::from(len)).to_vec(),
        };
        self.pdu(&header, &[], &text);
    }

    fn function(&mut self, how: u8, input: &mut Input<'_>) {
        let [function, tag, referenced, number] = input.array();
        let mut header = [0; 48];
        let function = match function % 16 {
            function @ 1..=6 => function,
            7 => 8,
            8 => 3,
            9 if number == 0xff => 7,
            _ => 1,
        };
        (header[0], header[1]) = (0x02, 0x80 | function);
        header[16..20].copy_from_slice(&[0, 0, 3, tag]);
        header[23] = referenced % 12;
        self.numbered(&mut header, how);
        let referenced_cmd_sn = self.cmd_sn.wrapping_add(u32::from(number & 7)).wrapping_sub(3);
        header[32..36].copy_from_slice(&referenced_cmd_sn.to_be_bytes());
        if number & 8 != 0 {
            // From an initiator that has sent more than has come.
            let own = self.cmd_sn.wrapping_add(u32::from(number >> 4));
            header[24..28].copy_from_slice(&own.to_be_bytes());
        }
        if number & 0xe0 == 0xe0 {
            header[9] = 1;
        }
        self.pdu(&header, &[], &[]);
    }

    fn logout(&mut self, how: u8, input: &mut Input<'_>) {
        let [reason, tag] = input.array();
        let mut header = [0; 48];
        (header[0], header[1]) = (0x06, 0x80 | reason & 3);
        header[16..20].copy_from_slice(&[0, 0, 4, tag]);
        header[21] = u8::try_from(CID).unwrap_or(0) + (reason >> 7);
        self.numbered(&mut header, how >> 3);
        self.pdu(&header, &[], &[]);
    }

    /// A header of any bytes, with lengths that are right or not.
    fn raw(&mut self, how: u8, input: &mut Input<'_>) {
        let mut header: Bhs = input.array();
        let ahs = input.some(usize::from(how >> 3 & 3) * 4).to_vec();
        let ahs = if ahs.len().is_multiple_of(4) { ahs } else { Vec::new() };
        if how & 0x80 == 0 {
            header[4..8].fill(0);
        }
        if how & 0x40 == 0 {
            self.numbered(&mut header, 0);
        }
        let data = self.some_data(usize::from(how >> 5 & 1) * 200);
        self.pdu(&header, &ahs, &data);
    }
}

fn cdb(what: u8, lba: u8, blocks: u8, input: &mut Input<'_>) -> [u8; 16] {
    let ten = |code| [code, 0, 0, 0, 0, lba, 0, 0, blocks, 0, 0, 0, 0, 0, 0, 0];
    let sixteen = |code| [code, 0, 0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, blocks, 0, 0];
    let six = |code, list| [code, 0, 0, 0, list, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    match what % 20 {
        0 | 16 => ten(0x28),
        1 | 17..=19 => ten(0x2a),
        2 => six(0x00, 0),
        3 => six(0x12, blocks * 20),
        4 => six(0x03, blocks * 4),
        5 => six(0xc1, 0),
        6 => sixteen(0x8a),
        7 => sixteen(0x88),
        8 => [0x1a, 0, 0x3f, 0, blocks * 25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        9 => [0x15, 0x10, 0, 0, blocks, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        10 => ten(0x35),
        11 => ten(0x41),
        12 => sixteen(0x89),
        13 => [0x42, 0, 0, 0, 0, 0, 0, 0, blocks * 8, 0, 0, 0, 0, 0, 0, 0],
        14 => [0xa0, 0, 0, 0, 0, 0, 0, 0, lba, blocks * 8, 0, 0, 0, 0, 0, 0],
        _ => input.array(),
    }
}

/// Bytes to begin with: sessions of several kinds.
pub(super) fn samples() -> Vec<Vec<u8>> {
    // Kind and how, then flags, tag, command, block, blocks, lengths, data.
    let write = |tag: u8, lba: u8, blocks: u8, data: u8| [0, 0, 0, tag, 1, lba, blocks, 0, data];
    let read = |tag: u8, lba: u8, blocks: u8| [0, 0, 0, tag, 0, lba, blocks, 0, 0];
    let batched = |mut step: [u8; 9]| {
        step[0] |= 0x80;
        step
    };
    const HOLD: [u8; 2] = [12, 0];
    const GO_ON: [u8; 2] = [12, 1];
    const RELEASE: [u8; 2] = [12, 2];
    let asked: [u8; 4] = [5, 0, 0, 0];
    let plain = [
        &[0, 3, 0x1f, 0x3f][..],
        &write(1, 2, 3, 1),
        &read(2, 1, 8),
        &write(3, 9, 8, 0),
        &asked,
        &asked,
        // Unsolicited data.
        &[0, 0, 2, 4, 1, 4, 4, 0, 0],
        &[7, 0x80],
        &[7, 0x81],
        &asked,
        &[8, 0, 5, 9],
        &[9, 0, 0, 1, 0],
        &[9, 0, 8, 1, 200],
        &[9, 0, 14, 1, 0],
        &[9, 0, 4, 1, 9],
        &[11, 0, 0, 9],
    ]
    .concat();
    let digests = [
        &[0x17, 0, 3, 0][..],
        &batched(write(1, 2, 3, 2)),
        &batched(read(2, 1, 8)),
        &batched(write(3, 2, 2, 0)),
        &[0, 4, 8, 4, 1, 3, 1, 0, 1],
        &asked,
        &asked,
        // A bit of the data, then one of a header.
        &[15, 60, 1],
        &asked,
        &[14, 5],
        &read(5, 0, 9),
        &[10, 4, 2, 1, 0, 0],
        &[15, 3, 1],
        &[8, 0, 5, 9],
    ]
    .concat();
    let aborts = [
        &[0, 0, 0x0f, 0x1b][..],
        &HOLD,
        &write(1, 0, 1, 1),
        &read(2, 0, 2),
        &[0, 0, 0x0c, 3, 1, 1, 1, 0, 1],
        &[10, 4, 1, 1, 1, 0],
        &[10, 4, 2, 2, 0, 0],
        &RELEASE,
        &RELEASE,
        &GO_ON,
        &RELEASE,
        &write(4, 3, 5, 0),
        &[10, 4, 1, 3, 4, 0],
        &write(4, 3, 5, 0),
        &[10, 4, 5, 4, 0, 0],
        &read(1, 0, 8),
        &read(1, 0, 8),
    ]
    .concat();
    let out_of_turn = [
        &[2, 1, 0x0f, 0x3f][..],
        &[0, 1, 0, 1, 0, 0, 1, 0, 0],
        &[0, 1, 0, 1, 0, 0, 1, 0, 0],
        &read(2, 0, 1),
        &[8, 1, 5, 9],
        &[0, 1, 8, 2, 1, 0, 9, 0, 0],
        &[10, 4, 1, 1, 1, 0x3b],
        &asked,
        // Additional headers, and commands that end at once.
        &[0, 0, 3 | 0xe0, 4, 0, 1, 1, 8, 8],
        &[0, 0, 0, 4, 4, 0, 9, 0, 0],
        &[0, 0, 0, 4, 3, 0, 9, 0, 0],
        &[0, 0, 0, 4, 12, 3, 1, 0, 1],
        &[9, 0, 0x43, 1, 0],
        &[9, 0, 1, 1, 0],
        &[9, 0, 2, 1, 0],
        &[10, 4, 9, 1, 0, 0xff],
    ]
    .concat();
    vec![plain, digests, aborts, out_of_turn]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps that are mostly right, so that sessions last.
    #[test]
    fn random_sessions_go_as_the_model_says() {
        let samples = samples();
        let mut rng = headwater_testkit::Rng::new(1);
        for _ in 0..3000 {
            let mut bytes = rng.bytes(4);
            for _ in 0..rng.below(60) {
                let step = match rng.below(12) {
                    0..=4 => {
                        let what = rng.below(20) as u8;
                        let flags = if rng.chance(1, 3) { 2 } else { (rng.below(4) << 2) as u8 };
                        let step =
                            [flags, rng.below(12) as u8, what, rng.below(32) as u8, rng.below(10) as u8];
                        let how = if rng.chance(1, 10) { rng.below(8) as u8 } else { 0 };
                        let rest = if rng.chance(1, 5) { rng.bytes(2) } else { vec![0, rng.below(4) as u8] };
                        [&[(rng.below(2) * 128) as u8, how], &step[..], &rest].concat()
                    }
                    5..=8 => vec![5, rng.below(16) as u8 * rng.below(2) as u8, rng.below(4) as u8, 77],
                    9 => vec![12, rng.below(8) as u8],
                    10 => vec![10, 4, rng.below(16) as u8, 1, rng.below(12) as u8, rng.below(256) as u8],
                    _ => rng.bytes(8),
                };
                bytes.extend(step);
            }
            if rng.chance(1, 4) {
                bytes.extend(&samples[rng.index(samples.len())][4..]);
            }
            iscsi_session(&bytes);
        }
    }
}
