//! A session in the full feature phase, compared with the model in `target`. The input consists of right and
//! wrong PDUs of every kind, in pieces of any length, on a disk that answers when the test says so.
//!
//! The replies of one task arrive in order and equal the model's, to the last bit. Replies of different tasks
//! arrive in any order. Their numbers increase as RFC 7143 requires. After each round the session's counters
//! equal the model's. At the end both disks are equal.

mod initiator;
mod samples;

pub(super) use samples::samples;

use std::sync::Arc;

use headwater_block::Geometry;
use headwater_block::fuzzing::{Input, PlainDisk};
use headwater_scsi::{Identity, Initiator, LogicalUnit, Options, Target};

use super::target::{Expectation, Model, NONE, Numbered};
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
/// The most steps of one input.
const STEPS: usize = 300;
/// The most bytes between two rounds.
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

/// The negotiated parameters and the limits. They are small, so that all limits are reached.
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
    /// Bytes that have not been sent yet.
    outbound: Vec<u8>,
    /// The length of the pieces, if the bytes are cut.
    piece_bytes: usize,
    /// A bit of the next PDU that is flipped.
    damage: Option<usize>,
    inbound: Vec<u8>,
    cmd_sn: u32,
    stat_sn: u32,
    /// The last ExpCmdSN and MaxCmdSN.
    last_window: (u32, u32),
    fill: u8,
    /// Unsolicited data of the last command: its tag, the next offset, the next number.
    unsolicited: (u32, u32, u32),
    text_tag: u32,
}

/// A session: four bytes of negotiated parameters, and then steps.
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
            last_window: (FIRST_CMD_SN, FIRST_CMD_SN.wrapping_add(limits.queue_depth).wrapping_sub(1)),
            fill: 0,
            unsolicited: (NONE, 0, 0),
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
    /// `false`: the model cannot predict what follows.
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
                7 => self.unsolicited(how, input),
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
                    // Alone, so that no tag is guessed before it was seen.
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

    /// Waits until the disks have no request, because a waiting request blocks everything behind it.
    fn rest(&mut self) {
        for disk in &self.disks {
            disk.hold(false);
            while disk.release(0) {}
        }
    }

    /// The initiator disconnects, and the disks are compared.
    fn finish(&mut self) {
        if !self.settle(&[]) {
            return;
        }
        self.model.hang_up();
        self.session.hang_up();
        self.check();
        assert!(
            self.session.end().is_some() && self.model.end().is_some(),
            "it continues without an initiator"
        );
        let [ours, theirs] = self.disks.each_ref().map(|disk| disk.contents());
        assert!(ours == theirs, "the disk's contents differ from the model's");
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

    /// Sends the pending bytes in pieces, each followed by a round.
    fn flush(&mut self) -> bool {
        let outbound = std::mem::take(&mut self.outbound);
        // Not so many pieces that nothing else is tried.
        let piece_bytes = self.piece_bytes.max(outbound.len() / 64).min(PIECE_BYTES);
        for piece in outbound.chunks(piece_bytes) {
            if !self.settle(piece) {
                return false;
            }
        }
        // Tasks that ended meanwhile are answered as well.
        self.settle(&[])
    }

    /// Runs rounds until nothing is left to do.
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

    /// Checks that the replies are the expected ones.
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
        if let Some(text) = expectation.tagged {
            masked[20..24].fill(0);
            expected[20..24].fill(0);
            let (tag, is_new) =
                (number(20), !self.model.wanted().iter().any(|wanted| wanted.1 == number(20)));
            assert!(tag != NONE && is_new, "a tag that is in use: {tag:#x}");
            if header[0] == 0x31 {
                self.model.learn(number(16), number(36), tag);
            } else {
                self.model.learn_text(text, tag);
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
        // Neither number decreases, or goes beyond its value at the end.
        let (exp, max, counts) = (number(28), number(32), self.model.counts());
        for (was, is, most) in
            [(self.last_window.0, exp, counts.exp_cmd_sn), (self.last_window.1, max, counts.max_cmd_sn)]
        {
            let is_between = is.wrapping_sub(was) <= most.wrapping_sub(was) && is.wrapping_sub(was) < 1 << 20;
            assert!(is_between || self.model.end().is_some(), "a number of {header:02x?} after {was:#x}");
        }
        self.last_window = (exp, max);
    }
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
