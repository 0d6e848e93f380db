//! A simple model of a unit: its bytes, three modes, registrations. It parses parameter lists by the tables
//! of SPC-4 and SBC-3.

use super::decoded;
use super::registrations::{Registrations, Rejected};
use crate::cdb::{Check, Op, ReserveOut, Span};
use crate::mode::Values;
use crate::reservation::Access;
use crate::sense::{Code, Fault, SenseKey};

pub(super) const NEXUSES: usize = 3;
pub(super) const BLOCKS: u64 = 64;
pub(super) const BLOCK: u64 = 512;
pub(super) const TRANSFER_BLOCKS: u64 = 16;
/// Both halves of COMPARE AND WRITE are in one transfer.
const COMPARE_BLOCKS: u64 = TRANSFER_BLOCKS / 2;

const SHORT_LIST: Fault = Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);
const OUT_OF_RANGE: Fault = Fault::illegal(Code::LBA_OUT_OF_RANGE);
const OTHER_LENGTH: Fault = Fault::illegal(Code::INVALID_FIELD_IN_COMMAND_INFORMATION_UNIT);

/// The expected answer to a command.
#[derive(Debug)]
pub(super) enum Verdict {
    Good,
    Data(Vec<u8>),
    Refused(Fault),
    Conflict,
    /// A unit attention that the initiator has not seen.
    Attention,
    /// Information about the unit; changes nothing.
    About,
}

pub(super) struct Model {
    pub(super) bytes: Vec<u8>,
    pub(super) modes: Values,
    pub(super) registrations: Registrations,
    /// The initiator that has reserved the unit with RESERVE.
    simple: Option<usize>,
    attentions: [Vec<Code>; NEXUSES],
    /// Kind and bytes of the designators that name the unit in EXTENDED COPY.
    names: Vec<(u8, Vec<u8>)>,
}

const DEFAULT: Values = Values { write_cache: true, write_protect: false, descriptor_sense: false };

/// The big-endian number of `len` bytes at `at`, which must exist.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn short(bytes: &[u8], at: usize) -> usize {
    usize::from(bytes[at]) << 8 | usize::from(bytes[at + 1])
}

fn parameter(at: usize) -> Fault {
    Fault::parameter(u16::try_from(at).unwrap_or(u16::MAX))
}

/// The bytes of a run of blocks.
fn place(lba: u64, blocks: u64) -> Result<std::ops::Range<usize>, Fault> {
    if u128::from(lba) + u128::from(blocks) > u128::from(BLOCKS) {
        return Err(OUT_OF_RANGE);
    }
    let byte = |block: u64| usize::try_from(block * BLOCK).unwrap_or(usize::MAX);
    Ok(byte(lba)..byte(lba + blocks))
}

fn transfer(span: Span) -> Result<std::ops::Range<usize>, Fault> {
    let place = place(span.lba, span.blocks)?;
    if span.blocks > TRANSFER_BLOCKS {
        return Err(Fault::illegal(Code::INVALID_FIELD_IN_CDB));
    }
    Ok(place)
}

/// Zero blocks mean everything up to the end.
fn to_the_end(span: Span) -> Result<std::ops::Range<usize>, Fault> {
    let blocks = if span.blocks == 0 { BLOCKS.saturating_sub(span.lba) } else { span.blocks };
    place(span.lba, blocks)
}

fn compare(there: &[u8], sent: &[u8]) -> Result<(), Fault> {
    match there.iter().zip(sent).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(Fault::new(SenseKey::Miscompare, Code::MISCOMPARE_DURING_VERIFY)
            .with_information(u64::try_from(at).unwrap_or(u64::MAX))),
    }
}

impl Model {
    pub(super) fn new(bytes: Vec<u8>, names: Vec<(u8, Vec<u8>)>) -> Self {
        Self {
            bytes,
            modes: DEFAULT,
            registrations: Registrations::default(),
            simple: None,
            attentions: Default::default(),
            names,
        }
    }

    /// The content of a run, if the run is valid.
    pub(super) fn at(&self, span: Span) -> Option<&[u8]> {
        place(span.lba, span.blocks).ok().map(|place| &self.bytes[place])
    }

    fn add_attention(&mut self, who: usize, code: Code) {
        if !self.attentions[who].contains(&code) {
            self.attentions[who].push(code);
        }
    }

    pub(super) fn has_attention(&self, who: usize) -> bool {
        !self.attentions[who].is_empty()
    }

    /// Removes a unit attention that the unit reported to initiator `who`. Panics if none was pending.
    pub(super) fn take_attention(&mut self, who: usize, code: Code) {
        let index = self.attentions[who].iter().position(|pending| *pending == code);
        let Some(index) = index else {
            panic!("initiator {who} got the unit attention {code:?}, which was not pending")
        };
        self.attentions[who].remove(index);
    }

    /// The session of `who` ends, and a new one begins from the same port.
    pub(super) fn ends(&mut self, who: usize) {
        self.attentions[who].clear();
        if self.simple == Some(who) {
            self.simple = None;
        }
    }

    /// A reset replaces earlier unit attentions.
    pub(super) fn reset(&mut self) {
        self.modes = DEFAULT;
        self.simple = None;
        self.attentions = std::array::from_fn(|_| vec![Code::RESET_FUNCTION_OCCURRED]);
    }

    pub(super) fn run(&mut self, who: usize, cdb: [u8; 16], data: &[u8], announced: u64) -> Verdict {
        // INQUIRY and REPORT LUNS are executed even if a unit attention is pending.
        if self.has_attention(who) && ![0x12, 0xa0].contains(&cdb[0]) {
            return Verdict::Attention;
        }
        let op = match decoded(cdb) {
            Ok(op) => op,
            Err(fault) => return Verdict::Refused(fault),
        };
        let access = op.access();
        let reserved = self.simple.is_some_and(|holder| holder != who) && access != Access::Identify;
        if reserved || self.registrations.conflicts(who, access) {
            return Verdict::Conflict;
        }
        match self.execute(who, &op, data, announced) {
            Ok(verdict) => verdict,
            Err(Rejected::Conflict) => Verdict::Conflict,
            Err(Rejected::Fault(fault)) => Verdict::Refused(fault),
        }
    }

    fn writable(&self) -> Result<(), Fault> {
        if self.modes.write_protect {
            return Err(Fault::new(SenseKey::DataProtect, Code::SOFTWARE_WRITE_PROTECTED));
        }
        Ok(())
    }

    fn execute(&mut self, who: usize, op: &Op, data: &[u8], announced: u64) -> Result<Verdict, Rejected> {
        match *op {
            Op::Read { span, .. } => return Ok(Verdict::Data(self.bytes[transfer(span)?].to_vec())),
            Op::Write { span, .. } | Op::WriteVerify { span, .. } => {
                self.write(span, data, |to, from| *to = from)?;
            }
            Op::OrWrite { span, .. } => self.write(span, data, |to, from| *to |= from)?,
            Op::CompareAndWrite { span, .. } => self.compare_and_write(span, data, announced)?,
            Op::Verify { span, check } => self.verify(span, check, data)?,
            Op::WriteSame { span, unmap, no_data } => {
                self.writable()?;
                let place = to_the_end(span)?;
                let one = usize::try_from(BLOCK).unwrap_or(0);
                if !no_data && (data.len() < one || announced != BLOCK) {
                    return Err(OTHER_LENGTH.into());
                }
                let block = if unmap || no_data { vec![0; one] } else { data[..one].to_vec() };
                self.bytes[place].chunks_mut(one).for_each(|part| part.copy_from_slice(&block));
            }
            Op::Unmap { .. } => self.unmap(data)?,
            Op::ExtendedCopy { list_bytes } => self.copy(list_of(data, list_bytes))?,
            Op::Synchronize { span, .. } | Op::Prefetch { span, .. } => {
                to_the_end(span)?;
            }
            Op::ModeSelect { long, list_bytes } => {
                let modes = mode_select(self.modes, long, list_of(data, list_bytes)?)?;
                if modes != self.modes {
                    (0..NEXUSES)
                        .filter(|other| *other != who)
                        .for_each(|other| self.add_attention(other, Code::MODE_PARAMETERS_CHANGED));
                }
                self.modes = modes;
            }
            Op::Reserve | Op::Release => {
                if !self.registrations.is_empty() {
                    return Err(Rejected::Conflict);
                }
                if *op == Op::Reserve {
                    self.simple = Some(who);
                } else if self.simple == Some(who) {
                    self.simple = None;
                }
            }
            Op::ReserveOut(ref request) => self.reserve_out(who, request, data)?,
            Op::TestUnitReady | Op::StartStop { .. } | Op::PreventAllow { .. } | Op::SelfTest => {}
            _ => return Ok(Verdict::About),
        }
        Ok(Verdict::Good)
    }

    fn reserve_out(&mut self, who: usize, request: &ReserveOut, data: &[u8]) -> Result<(), Rejected> {
        let list = list_of(data, request.list_bytes)?;
        let result = self.registrations.out(who, request, list);
        for (other, code) in self.registrations.take_attentions() {
            self.add_attention(other, code);
        }
        result
    }

    /// Writes as many whole blocks as the data has.
    fn write(&mut self, span: Span, data: &[u8], change: impl Fn(&mut u8, u8)) -> Result<(), Fault> {
        self.writable()?;
        let place = transfer(span)?;
        let one = usize::try_from(BLOCK).unwrap_or(1);
        let whole = data.len().min(place.len()) / one * one;
        self.bytes[place].iter_mut().zip(&data[..whole]).for_each(|(to, from)| change(to, *from));
        Ok(())
    }

    fn compare_and_write(&mut self, span: Span, data: &[u8], announced: u64) -> Result<(), Fault> {
        self.writable()?;
        let place = place(span.lba, span.blocks)?;
        let both = 2 * span.blocks * BLOCK;
        if span.blocks > COMPARE_BLOCKS || announced > both {
            return Err(Fault::field(13));
        }
        if announced < both || data.len() < 2 * place.len() {
            return Err(OTHER_LENGTH);
        }
        let (old, new) = data.split_at(place.len());
        compare(&self.bytes[place.clone()], old)?;
        self.bytes[place.clone()].copy_from_slice(&new[..place.len()]);
        Ok(())
    }

    fn verify(&self, span: Span, check: Check, data: &[u8]) -> Result<(), Fault> {
        let place = match check {
            Check::Data => transfer(span)?,
            Check::Medium | Check::OneBlock => place(span.lba, span.blocks)?,
        };
        let one = usize::try_from(BLOCK).unwrap_or(1);
        let needed = match check {
            Check::Medium => return Ok(()),
            Check::Data => place.len(),
            Check::OneBlock => one.min(place.len()),
        };
        if data.len() < needed {
            return Err(OTHER_LENGTH);
        }
        if check == Check::Data {
            return compare(&self.bytes[place], data);
        }
        self.bytes[place].chunks(one).try_for_each(|block| compare(block, data))
    }

    /// SBC-3, 5.30: a header of 8 bytes, descriptors of 16; all are checked first.
    fn unmap(&mut self, list: &[u8]) -> Result<(), Fault> {
        self.writable()?;
        if list.is_empty() {
            return Ok(());
        }
        if list.len() < 8 {
            return Err(SHORT_LIST);
        }
        let descriptors = short(list, 2).min(list.len() - 8) / 16;
        let places = (0..descriptors)
            .map(|index| place(number(list, 8 + 16 * index, 8), number(list, 16 + 16 * index, 4)))
            .collect::<Result<Vec<_>, Fault>>()?;
        places.into_iter().for_each(|place| self.bytes[place].fill(0));
        Ok(())
    }

    /// SPC-4, 6.6: a header of 16 bytes, target descriptors of 32, segment descriptors of 28.
    fn copy(&mut self, list: Result<&[u8], Fault>) -> Result<(), Fault> {
        self.writable()?;
        let list = list?;
        if list.is_empty() {
            return Ok(());
        }
        if list.len() < 16 {
            return Err(SHORT_LIST);
        }
        let target_bytes = short(list, 2);
        let segment_bytes = usize::try_from(number(list, 8, 4)).unwrap_or(usize::MAX);
        if number(list, 12, 4) != 0 {
            return Err(Fault::parameter(12));
        }
        let both = target_bytes.saturating_add(segment_bytes);
        if both > 16 * 32 + 64 * 28 || list.len() - 16 < both {
            return Err(SHORT_LIST);
        }
        let (targets, rest) = list[16..].split_at(target_bytes);
        let mut ours = Vec::new();
        for (index, target) in targets.chunks(32).enumerate() {
            match (target[0], target.len(), index) {
                (0xe4, 32, 0..16) => {}
                (0xe4, 32, _) => return Err(Fault::illegal(Code::TOO_MANY_TARGET_DESCRIPTORS)),
                (0xe4, ..) => return Err(SHORT_LIST),
                _ => return Err(Fault::illegal(Code::UNSUPPORTED_TARGET_DESCRIPTOR)),
            }
            let name = target[8..].get(..usize::from(target[7]));
            let is_ours = self.names.iter().any(|(kind, bytes)| {
                *kind == target[5] & 0x3f && name == Some(bytes.as_slice()) && target[1] & 0x20 == 0
            });
            ours.push(is_ours);
        }
        let mut copies = Vec::new();
        for (index, segment) in rest[..segment_bytes].chunks(28).enumerate() {
            match (segment[0], segment.len(), index) {
                (0x02, 28, 0..64) => {}
                (0x02, _, 64..) => return Err(Fault::illegal(Code::TOO_MANY_SEGMENT_DESCRIPTORS)),
                (0x02, ..) => return Err(SHORT_LIST),
                _ => return Err(Fault::illegal(Code::UNSUPPORTED_SEGMENT_DESCRIPTOR)),
            }
            let aborted = |code| Fault::new(SenseKey::CopyAborted, code);
            for at in [4, 6] {
                match ours.get(short(segment, at)) {
                    Some(true) => {}
                    Some(false) => return Err(aborted(Code::COPY_TARGET_NOT_REACHABLE)),
                    None => return Err(aborted(Code::UNREACHABLE_COPY_TARGET)),
                }
            }
            let blocks = number(segment, 10, 2);
            let run = |at| place(number(segment, at, 8), blocks).map_err(|_| aborted(Code::NONE));
            copies.push((run(12)?, run(20)?));
        }
        for (from, to) in copies {
            self.bytes.copy_within(from, to.start);
        }
        Ok(())
    }
}

/// The parameter list, which must have been sent completely.
fn list_of(data: &[u8], list_bytes: u32) -> Result<&[u8], Fault> {
    data.get(..usize::try_from(list_bytes).unwrap_or(usize::MAX)).ok_or(SHORT_LIST)
}

/// A mode page: its code, and each byte after its length with the bits that may be changed.
type Page = (u8, &'static [(u8, u8)]);

const NO: (u8, u8) = (0, 0);
/// Error recovery; caching with WCE; control with D_SENSE and SWP; informational exceptions.
const PAGES: [Page; 4] = [
    (0x01, &[NO; 10]),
    (0x08, &[(0, 0x04), NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO, NO]),
    (0x0a, &[(0, 0x04), (0x10, 0), (0, 0x08), NO, NO, NO, (0xff, 0), (0xff, 0), NO, NO]),
    (0x1c, &[(0x08, 0), NO, NO, NO, NO, NO, NO, NO, NO, NO]),
];

/// SPC-4, 7.5.4 to 7.5.8: a header, block descriptors, pages. Nothing changes unless all of it is valid.
fn mode_select(before: Values, long: bool, list: &[u8]) -> Result<Values, Fault> {
    if list.is_empty() {
        return Ok(before);
    }
    let head = if long { 8 } else { 4 };
    if list.len() < head {
        return Err(SHORT_LIST);
    }
    let descriptor_bytes = if long { short(list, 6) } else { usize::from(list[3]) };
    let mut at = head + descriptor_bytes;
    if list.len() < at {
        return Err(SHORT_LIST);
    }
    // Number of blocks, length of a block, and the place of that field.
    let descriptor = match (descriptor_bytes, long && list[4] & 1 == 1) {
        (0, _) => None,
        (8, false) => Some((number(list, head, 4), number(list, head + 5, 3), head + 5)),
        (16, true) => Some((number(list, head, 8), number(list, head + 12, 4), head + 12)),
        _ => return Err(parameter(head)),
    };
    match descriptor {
        Some((blocks, ..)) if blocks != 0 && blocks != BLOCKS => return Err(parameter(head)),
        Some((_, bytes, field)) if bytes != BLOCK => return Err(parameter(field)),
        _ => {}
    }
    let mut after = before;
    while at < list.len() {
        if list.len() - at < 2 {
            return Err(SHORT_LIST);
        }
        // In byte 0, PS is ignored, and SPF indicates a subpage, which does not exist.
        let page = PAGES.iter().find(|(code, _)| *code == list[at] & 0x7f);
        let Some((code, bytes)) = page else { return Err(parameter(at)) };
        if usize::from(list[at + 1]) != bytes.len() {
            return Err(parameter(at + 1));
        }
        let Some(given) = list.get(at + 2..at + 2 + bytes.len()) else { return Err(SHORT_LIST) };
        for (index, (given, (fixed, changeable))) in given.iter().zip(*bytes).enumerate() {
            if given & !changeable != *fixed {
                return Err(parameter(at + 2 + index));
            }
        }
        match code {
            0x08 => after.write_cache = given[0] & 0x04 != 0,
            0x0a => {
                after.descriptor_sense = given[0] & 0x04 != 0;
                after.write_protect = given[2] & 0x08 != 0;
            }
            _ => {}
        }
        at += 2 + bytes.len();
    }
    Ok(after)
}
