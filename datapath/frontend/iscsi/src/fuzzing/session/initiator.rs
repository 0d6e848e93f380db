//! The initiator of a session: sends right PDUs, and PDUs with an error.

use headwater_block::fuzzing::Input;
use headwater_scsi::{Cdb, Lun};

use super::super::target::{NONE, is_of_steps};
use super::{BLOCK, BLOCKS, Bench, CID};
use crate::wire::Bhs;
use crate::wire::digest::digest;

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

    /// Sets the number of a command: the next number, most of the time.
    fn numbered(&mut self, header: &mut Bhs, how: u8) {
        let number = match how & 7 {
            // A number is skipped, or used again.
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

    pub(super) fn scsi(&mut self, how: u8, input: &mut Input<'_>) {
        let [flags, tag, what, lba, blocks, more, ahead] = input.array();
        let (lba, blocks) = (lba % (BLOCKS + 2), blocks % 10);
        let is_held = self.disks[0].has_or_holds_requests();
        let mut cdb = cdb(what, lba, blocks, input);
        if is_held && is_of_steps(&cdb) {
            cdb = self::cdb(1, lba, blocks, input);
        }
        let mut header = [0; 48];
        header[0] = 0x01;
        // The bits for final, read and write match the command, or are taken from the flags.
        let writes = [0x0a, 0x2a, 0x8a, 0x15, 0x41, 0x42, 0x89, 0x55].contains(&cdb[0]);
        header[1] = match flags & 3 {
            0 | 1 => {
                if writes {
                    0xa0
                } else {
                    0xc0
                }
            }
            // More data follows unsolicited.
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
            // A read length; a longer CDB; arbitrary bytes.
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
        self.unsolicited = (u32::from(tag % 12), u32::try_from(data.len()).unwrap_or(0), 0);
        self.pdu(&header, &ahs, &data);
    }

    /// Sends data for an R2T that was seen, right or wrong.
    pub(super) fn data_out(&mut self, how: u8, input: &mut Input<'_>) {
        let wanted = self.model.wanted();
        let [which, part] = input.array();
        let Some((tag, transfer_tag, data_sn, offset, left)) =
            wanted.get(usize::from(which) % wanted.len().max(1)).copied()
        else {
            return self.unsolicited(how, input);
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

    /// Sends unsolicited data of the last command.
    pub(super) fn unsolicited(&mut self, how: u8, input: &mut Input<'_>) {
        let (tag, offset, data_sn) = self.unsolicited;
        let len = u32::from(how >> 1) * 8;
        let tag = if how == 0xff { u32::from(input.byte()) } else { tag };
        self.data_pdu([tag, NONE, data_sn, offset], len, how & 1 == 1);
        self.unsolicited = (tag, offset + len, data_sn.wrapping_add(1));
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

    pub(super) fn nop(&mut self, how: u8, input: &mut Input<'_>) {
        let [tag, len] = input.array();
        let mut header = [0; 48];
        (header[0], header[1]) = (0x00, 0x80);
        header[16..20].copy_from_slice(&if tag == 0xff { [0xff; 4] } else { [0, 0, 1, tag] });
        header[20..24].fill(0xff);
        self.numbered(&mut header, how);
        let data = self.some_data(usize::from(len) * 5);
        self.pdu(&header, &[], &data);
    }

    pub(super) fn text(&mut self, how: u8, input: &mut Input<'_>) {
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

    pub(super) fn function(&mut self, how: u8, input: &mut Input<'_>) {
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
            // As from an initiator that has sent more than has arrived.
            let own = self.cmd_sn.wrapping_add(u32::from(number >> 4));
            header[24..28].copy_from_slice(&own.to_be_bytes());
        }
        if number & 0xe0 == 0xe0 {
            header[9] = 1;
        }
        self.pdu(&header, &[], &[]);
    }

    pub(super) fn logout(&mut self, how: u8, input: &mut Input<'_>) {
        let [reason, tag] = input.array();
        let mut header = [0; 48];
        (header[0], header[1]) = (0x06, 0x80 | reason & 3);
        header[16..20].copy_from_slice(&[0, 0, 4, tag]);
        header[21] = u8::try_from(CID).unwrap_or(0) + (reason >> 7);
        self.numbered(&mut header, how >> 3);
        self.pdu(&header, &[], &[]);
    }

    /// Sends a header of arbitrary bytes, with right or wrong lengths.
    pub(super) fn raw(&mut self, how: u8, input: &mut Input<'_>) {
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
