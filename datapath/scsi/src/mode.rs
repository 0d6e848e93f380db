//! Mode pages: error recovery (01h), caching (08h), control (0Ah), informational exceptions (1Ch).
//!
//! | field | changeable | effect |
//! |---|---|---|
//! | WCE (08h) | if the device has a volatile cache | 0: each write is durable before it is answered; the command that sets 0 makes all earlier writes durable |
//! | SWP (0Ah) | yes | 1: writes are refused |
//! | D_SENSE (0Ah) | yes | 1: sense data in descriptor format |
//!
//! The values are the same for all initiators, are not saved, and return to their defaults at a reset.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cdb::ModeSense;
use crate::sense::{Code, Fault};
use crate::unit::LogicalUnit;
use crate::wire::{bit_at, len8, len16, put, u8_at, u16_at, u32_at, u64_at};

/// The values that can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Values {
    pub(crate) write_cache: bool,
    pub(crate) write_protect: bool,
    pub(crate) descriptor_sense: bool,
}

/// The current values, read by every command.
#[derive(Debug)]
pub(crate) struct Mode {
    write_cache: AtomicBool,
    write_protect: AtomicBool,
    descriptor_sense: AtomicBool,
}

impl Mode {
    pub(crate) fn new(values: Values) -> Self {
        Self {
            write_cache: AtomicBool::new(values.write_cache),
            write_protect: AtomicBool::new(values.write_protect),
            descriptor_sense: AtomicBool::new(values.descriptor_sense),
        }
    }

    pub(crate) fn set(&self, values: Values) {
        self.write_cache.store(values.write_cache, Ordering::SeqCst);
        self.write_protect.store(values.write_protect, Ordering::SeqCst);
        self.descriptor_sense.store(values.descriptor_sense, Ordering::SeqCst);
    }

    pub(crate) fn values(&self) -> Values {
        Values {
            write_cache: self.write_cache(),
            write_protect: self.write_protect(),
            descriptor_sense: self.descriptor_sense(),
        }
    }

    /// WCE.
    pub(crate) fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    /// SWP.
    pub(crate) fn write_protect(&self) -> bool {
        self.write_protect.load(Ordering::Relaxed)
    }

    /// D_SENSE.
    pub(crate) fn descriptor_sense(&self) -> bool {
        self.descriptor_sense.load(Ordering::Relaxed)
    }
}

/// All page codes, in order.
const PAGES: [u8; 4] = [0x01, 0x08, 0x0a, 0x1c];

/// A page with these values; `None` if the page does not exist.
fn page(code: u8, values: Values) -> Option<Vec<u8>> {
    let flag = |set: bool, mask: u8| if set { mask } else { 0 };
    match code {
        // Error recovery is the device's task: nothing is reallocated or retried on request.
        0x01 => Some(vec![0x01, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        0x08 => {
            let mut bytes = vec![0; 20];
            put(&mut bytes, 0, &[0x08, 0x12, flag(values.write_cache, 0x04)]);
            Some(bytes)
        }
        0x0a => {
            let mut bytes = vec![0; 12];
            // QUEUE ALGORITHM MODIFIER 1: simple tasks may be reordered. BUSY TIMEOUT PERIOD unlimited.
            put(&mut bytes, 0, &[0x0a, 0x0a, flag(values.descriptor_sense, 0x04), 0x10]);
            put(&mut bytes, 4, &[flag(values.write_protect, 0x08)]);
            put(&mut bytes, 8, &[0xff, 0xff]);
            Some(bytes)
        }
        0x1c => {
            let mut bytes = vec![0; 12];
            // DEXCPT: no exceptions are reported.
            put(&mut bytes, 0, &[0x1c, 0x0a, 0x08]);
            Some(bytes)
        }
        _ => None,
    }
}

/// The bits of a page that may be changed, as a page of ones.
fn changeable(code: u8, cache: bool) -> Option<Vec<u8>> {
    let none = Values { write_cache: false, write_protect: false, descriptor_sense: false };
    let all = Values { write_cache: cache, write_protect: true, descriptor_sense: true };
    let mut mask: Vec<u8> = page(code, none)?.iter().zip(page(code, all)?).map(|(a, b)| a ^ b).collect();
    let head = page(code, none)?;
    put(&mut mask, 0, head.get(..2).unwrap_or_default());
    Some(mask)
}

/// MODE SENSE (6) and (10).
pub(crate) fn sense(unit: &LogicalUnit, request: &ModeSense) -> Result<Vec<u8>, Fault> {
    if !matches!((request.page, request.subpage), (_, 0 | 0xff)) {
        return Err(Fault::field(3));
    }
    let values = match request.control {
        2 => unit.default_mode(),
        3 => return Err(Fault::illegal(Code::SAVING_PARAMETERS_NOT_SUPPORTED)),
        _ => unit.mode.values(),
    };
    let make = |code| {
        if request.control == 1 { changeable(code, unit.geometry.volatile_cache) } else { page(code, values) }
    };
    let pages: Vec<u8> = match request.page {
        0x3f => PAGES.iter().filter_map(|code| make(*code)).flatten().collect(),
        code => make(code).ok_or(Fault::field(2))?,
    };
    let descriptor =
        if request.no_descriptors { Vec::new() } else { block_descriptor(unit, request.long_lba) };
    // DPOFUA always; WP if nothing can be written.
    let specific = 0x10 | if unit.is_write_protected() { 0x80 } else { 0 };
    let mut data = if request.long {
        let len = pages.len().saturating_add(descriptor.len()).saturating_add(6);
        let mut head = len16(len).to_vec();
        head.extend_from_slice(&[0, specific, u8::from(request.long_lba && !descriptor.is_empty()), 0]);
        head.extend_from_slice(&len16(descriptor.len()));
        head
    } else {
        let len = pages.len().saturating_add(descriptor.len()).saturating_add(3);
        vec![len8(len), 0, specific, len8(descriptor.len())]
    };
    data.extend_from_slice(&descriptor);
    data.extend_from_slice(&pages);
    Ok(data)
}

fn block_descriptor(unit: &LogicalUnit, long: bool) -> Vec<u8> {
    if long {
        let mut bytes = unit.blocks.to_be_bytes().to_vec();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&unit.geometry.logical_block_bytes.to_be_bytes());
        return bytes;
    }
    let blocks = u32::try_from(unit.blocks).unwrap_or(u32::MAX);
    let mut bytes = blocks.to_be_bytes().to_vec();
    bytes.extend_from_slice(&(unit.geometry.logical_block_bytes & 0x00ff_ffff).to_be_bytes());
    bytes
}

/// The effect of MODE SELECT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selected {
    /// Whether a value changed.
    pub(crate) any: bool,
    /// The write cache was requested to be off, even if it was off before: the flush of an earlier request
    /// may have failed.
    pub(crate) no_cache: bool,
}

/// MODE SELECT (6) and (10). Checks the whole list before anything changes.
pub(crate) fn select(unit: &LogicalUnit, long: bool, list: &[u8]) -> Result<Selected, Fault> {
    let mut selected = Selected::default();
    if list.is_empty() {
        return Ok(selected);
    }
    let short_list = Fault::illegal(Code::PARAMETER_LIST_LENGTH_ERROR);
    let head = if long { 8 } else { 4 };
    if list.len() < head {
        return Err(short_list);
    }
    let (long_lba, descriptor_bytes) = if long {
        (bit_at(list, 4, 0), usize::from(u16_at(list, 6)))
    } else {
        (false, usize::from(u8_at(list, 3)))
    };
    let Some(descriptor) = list.get(head..head.saturating_add(descriptor_bytes)) else {
        return Err(short_list);
    };
    check_descriptor(unit, long_lba, descriptor, head)?;

    let before = unit.mode.values();
    let mut after = before;
    let mut at = head.saturating_add(descriptor_bytes);
    while let Some(bytes) = list.get(at..).filter(|rest| !rest.is_empty()) {
        if bytes.len() < 2 {
            return Err(short_list);
        }
        let here = u16::try_from(at).unwrap_or(u16::MAX);
        let code = u8_at(bytes, 0) & 0x3f;
        let subpage_format = bit_at(bytes, 0, 6);
        let (Some(current), Some(mask), false) =
            (page(code, before), changeable(code, unit.geometry.volatile_cache), subpage_format)
        else {
            return Err(Fault::parameter(here));
        };
        if u8_at(bytes, 1) != u8_at(&current, 1) {
            return Err(Fault::parameter(here.saturating_add(1)));
        }
        let Some(given) = bytes.get(..current.len()) else { return Err(short_list) };
        for index in 2..current.len() {
            if (u8_at(given, index) ^ u8_at(&current, index)) & !u8_at(&mask, index) != 0 {
                let index = u16::try_from(index).unwrap_or(u16::MAX);
                return Err(Fault::parameter(here.saturating_add(index)));
            }
        }
        match code {
            0x08 => {
                after.write_cache = bit_at(given, 2, 2);
                selected.no_cache = unit.geometry.volatile_cache && !after.write_cache;
            }
            0x0a => {
                after.descriptor_sense = bit_at(given, 2, 2);
                after.write_protect = bit_at(given, 4, 3);
            }
            _ => {}
        }
        at = at.saturating_add(current.len());
    }
    unit.mode.set(after);
    selected.any = before != after;
    Ok(selected)
}

/// A block descriptor may contain the present values, or 0 blocks for "unchanged".
fn check_descriptor(unit: &LogicalUnit, long: bool, descriptor: &[u8], at: usize) -> Result<(), Fault> {
    let fault =
        |offset: usize| Fault::parameter(u16::try_from(at.saturating_add(offset)).unwrap_or(u16::MAX));
    let (blocks, block_bytes, whole) = match (long, descriptor.len()) {
        (_, 0) => return Ok(()),
        (false, 8) => {
            let all = u64::from(u32::try_from(unit.blocks).unwrap_or(u32::MAX));
            (u64::from(u32_at(descriptor, 0)), u32_at(descriptor, 4) & 0x00ff_ffff, all)
        }
        (true, 16) => (u64_at(descriptor, 0), u32_at(descriptor, 12), unit.blocks),
        _ => return Err(fault(0)),
    };
    if blocks != 0 && blocks != whole {
        return Err(fault(0));
    }
    if block_bytes != unit.geometry.logical_block_bytes {
        return Err(fault(if long { 12 } else { 5 }));
    }
    Ok(())
}
