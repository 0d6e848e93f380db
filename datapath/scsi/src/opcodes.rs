//! The table of commands, which REPORT SUPPORTED OPERATION CODES returns.

use crate::cdb::ReportOpcodes;
use crate::sense::Fault;
use crate::wire::{len16, len32};

/// A command. Its usage data begins with the code, and has one bit for each bit of the CDB that is evaluated.
struct Entry {
    action: Option<u16>,
    usage: &'static [u8],
}

const fn plain(usage: &'static [u8]) -> Entry {
    Entry { action: None, usage }
}

const fn with_action(action: u16, usage: &'static [u8]) -> Entry {
    Entry { action: Some(action), usage }
}

/// The CONTROL byte: NACA is evaluated.
const C: u8 = 0x04;
/// A byte of an address or a length.
const F: u8 = 0xff;

/// Sorted by code and service action. It must match [`crate::cdb::parse`]; a test compares the two.
const ENTRIES: &[Entry] = &[
    plain(&[0x00, 0, 0, 0, 0, C]),
    plain(&[0x03, 0x01, 0, 0, F, C]),
    plain(&[0x08, 0x1f, F, F, F, C]),
    plain(&[0x0a, 0x1f, F, F, F, C]),
    plain(&[0x12, 0x01, F, F, F, C]),
    plain(&[0x15, 0x11, 0, 0, F, C]),
    plain(&[0x16, 0x11, 0, 0, 0, C]),
    plain(&[0x17, 0x11, 0, 0, 0, C]),
    plain(&[0x1a, 0x08, F, F, F, C]),
    plain(&[0x1b, 0, 0, 0, 0xf7, C]),
    plain(&[0x1d, 0xe7, 0, F, F, C]),
    plain(&[0x1e, 0, 0, 0, 0x03, C]),
    plain(&[0x25, 0, F, F, F, F, 0, 0, 0x01, C]),
    plain(&[0x28, 0xf8, F, F, F, F, 0, F, F, C]),
    plain(&[0x2a, 0xf8, F, F, F, F, 0, F, F, C]),
    plain(&[0x2e, 0xf6, F, F, F, F, 0, F, F, C]),
    plain(&[0x2f, 0xf6, F, F, F, F, 0, F, F, C]),
    plain(&[0x34, 0x02, F, F, F, F, 0, F, F, C]),
    plain(&[0x35, 0x02, F, F, F, F, 0, F, F, C]),
    plain(&[0x37, 0, 0x1f, 0, 0, 0, 0, F, F, C]),
    plain(&[0x41, 0xfe, F, F, F, F, 0, F, F, C]),
    plain(&[0x42, 0x01, 0, 0, 0, 0, 0, F, F, C]),
    plain(&[0x55, 0x11, 0, 0, 0, 0, 0, F, F, C]),
    plain(&[0x56, 0x13, 0, 0, 0, 0, 0, 0, 0, C]),
    plain(&[0x57, 0x13, 0, 0, 0, 0, 0, 0, 0, C]),
    plain(&[0x5a, 0x18, F, F, 0, 0, 0, F, F, C]),
    with_action(0x00, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, C]),
    with_action(0x01, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, C]),
    with_action(0x02, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, C]),
    with_action(0x03, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, C]),
    with_action(0x00, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x01, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x02, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x03, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x04, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x05, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x06, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, C]),
    with_action(0x00, &[0x83, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, C]),
    with_action(0x00, &[0x84, 0x1f, F, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, C]),
    with_action(0x03, &[0x84, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, C]),
    plain(&[0x88, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x89, 0xf8, F, F, F, F, F, F, F, F, 0, 0, 0, F, 0, C]),
    plain(&[0x8a, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x8b, 0xf8, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x8e, 0xf6, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x8f, 0xf6, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x90, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x91, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0x93, 0xff, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    with_action(0x10, &[0x9e, 0x1f, F, F, F, F, F, F, F, F, F, F, F, F, 0x01, C]),
    with_action(0x12, &[0x9e, 0x1f, F, F, F, F, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0xa0, 0, F, 0, 0, 0, F, F, F, F, 0, C]),
    with_action(0x0c, &[0xa3, 0x1f, 0x87, F, F, F, F, F, F, F, 0, C]),
    with_action(0x0d, &[0xa3, 0x1f, 0x80, 0, 0, 0, F, F, F, F, 0, C]),
    plain(&[0xa8, 0xf8, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0xaa, 0xf8, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0xae, 0xf6, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0xaf, 0xf6, F, F, F, F, F, F, F, F, 0, C]),
    plain(&[0xb7, 0x1f, 0, 0, 0, 0, F, F, F, F, 0, C]),
];

impl Entry {
    fn opcode(&self) -> u8 {
        self.usage.first().copied().unwrap_or(0)
    }
}

/// A command timeouts descriptor without values, because no command has a usual duration.
const TIMEOUTS: [u8; 12] = [0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// REPORT SUPPORTED OPERATION CODES.
pub(crate) fn report(request: &ReportOpcodes) -> Result<Vec<u8>, Fault> {
    match request.options {
        0 => Ok(all(request.timeouts)),
        1 => one(request, |entries| match entries.first() {
            Some(first) if first.action.is_some() => Err(Fault::field(2)),
            first => Ok(first.copied()),
        }),
        2 => one(request, |entries| match entries.first() {
            Some(first) if first.action.is_none() => Err(Fault::field(2)),
            _ => Ok(entries.iter().find(|e| e.action == Some(request.action)).copied()),
        }),
        3 => one(request, |entries| {
            Ok(entries.iter().find(|e| e.action.is_none() || e.action == Some(request.action)).copied())
        }),
        _ => Err(Fault::field(2)),
    }
}

fn all(timeouts: bool) -> Vec<u8> {
    let mut list = Vec::new();
    for entry in ENTRIES {
        let action = entry.action.unwrap_or(0).to_be_bytes();
        let flags = u8::from(entry.action.is_some()) | if timeouts { 2 } else { 0 };
        list.extend_from_slice(&[entry.opcode(), 0]);
        list.extend_from_slice(&action);
        list.extend_from_slice(&[0, flags]);
        list.extend_from_slice(&len16(entry.usage.len()));
        if timeouts {
            list.extend_from_slice(&TIMEOUTS);
        }
    }
    let mut data = len32(list.len()).to_vec();
    data.append(&mut list);
    data
}

fn one(
    request: &ReportOpcodes,
    choose: impl FnOnce(&[&'static Entry]) -> Result<Option<&'static Entry>, Fault>,
) -> Result<Vec<u8>, Fault> {
    let entries: Vec<&'static Entry> = ENTRIES.iter().filter(|e| e.opcode() == request.opcode).collect();
    let Some(entry) = choose(&entries)? else {
        // SUPPORT 001b: not supported.
        return Ok(vec![0, 0x01, 0, 0]);
    };
    // SUPPORT 011b: according to the standard. CTDP at bit 7.
    let support = 0x03 | if request.timeouts { 0x80 } else { 0 };
    let mut data = vec![0, support];
    data.extend_from_slice(&len16(entry.usage.len()));
    // The service action is part of the usage data as a value, like the code.
    let mut usage = entry.usage.to_vec();
    if let (Some(action), Some(byte)) = (entry.action, usage.get_mut(1)) {
        *byte = (*byte & 0xe0) | u8::try_from(action & 0x1f).unwrap_or(0);
    }
    data.extend_from_slice(&usage);
    if request.timeouts {
        data.extend_from_slice(&TIMEOUTS);
    }
    Ok(data)
}
