//! Properties that must hold for every byte sequence that an iSCSI target or initiator may receive: for the
//! fuzzers in `fuzz/`, and for a bounded test.
//!
//! Each function parses the bytes twice: with the code of this crate, and with a simple second parser that
//! follows the tables and the text of RFC 7143. The two must agree on what is refused, and on every bit of
//! what is accepted.

mod session;
mod target;
mod texts;

pub use session::iscsi_session;

use crate::limits::Limits;
use crate::login::keys::{Answer, Parameters, negotiate};
use crate::wire::Bhs;
use crate::wire::request::{
    DataOut, LoginRequest, LogoutRequest, NopOut, ScsiCommand, SnackRequest, TaskManagementRequest,
    TextRequest,
};
use crate::wire::response::{
    DataIn, LoginResponse, LogoutResponse, NopIn, ReadyToTransfer, Reject, ScsiResponse,
    TaskManagementResponse, TextResponse,
};
use crate::wire::text::{KEY_BYTES, TextError, VALUE_BYTES, binary, hexadecimal, number, pairs, put_pair};

pub use headwater_block::fuzzing::Oracle;

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let pdus = LAYOUTS.iter().map(|layout| {
        let mut header = [0; 48];
        (header[0], header[1]) = (layout.opcode, layout.always);
        header.iter_mut().zip(0..).skip(8).for_each(|(byte, number)| *byte = number);
        header.to_vec()
    });
    let login =
        b"InitiatorName=iqn.x:a\0SessionType=Normal\0HeaderDigest=CRC32C,None\0MaxBurstLength=0x40000\0\
        InitialR2T=No\0CHAP_N=a\0CHAP_R=0x00ff\0";
    let mut keys = Vec::new();
    for (key, value) in [
        ("HeaderDigest", "CRC32C,None"),
        ("InitialR2T", "No"),
        ("MaxBurstLength", "65536"),
        ("MaxRecvDataSegmentLength", "0x2000"),
        ("DefaultTime2Wait", "0"),
        ("TaskReporting", "FastAbort,RFC3720"),
        ("MaxOutstandingR2T", "9"),
    ] {
        put_pair(&mut keys, key, value);
    }
    vec![
        ("iscsi_pdu", iscsi_pdu, pdus.collect()),
        ("iscsi_text", iscsi_text, vec![login.to_vec(), b"0x0aFf".to_vec(), b"0bAQID".to_vec()]),
        ("iscsi_login_keys", iscsi_login_keys, vec![keys]),
        ("iscsi_session", iscsi_session, session::samples()),
    ]
}

/// The defined bits of a PDU's header. All others are reserved, and sent as zero.
struct Layout {
    opcode: u8,
    immediate: bool,
    /// The bits of byte 1 that are defined, and those that are always set.
    flags: u8,
    always: u8,
    /// Ranges of bytes that are defined, from byte 2 on.
    fields: &'static [(usize, usize)],
    /// Decodes and encodes a header; `None` if it is refused.
    again: fn(&Bhs) -> Option<Bhs>,
}

macro_rules! again {
    ($kind:ident) => {
        |header| $kind::decode(header).ok().map(|pdu| pdu.encode())
    };
}

const LAYOUTS: [Layout; 17] = [
    Layout {
        opcode: 0x00,
        immediate: true,
        flags: 0,
        always: 0x80,
        fields: &[(8, 32)],
        again: again!(NopOut),
    },
    Layout {
        opcode: 0x01,
        immediate: true,
        flags: 0xe7,
        always: 0,
        fields: &[(8, 48)],
        again: again!(ScsiCommand),
    },
    Layout {
        opcode: 0x02,
        immediate: true,
        flags: 0x7f,
        always: 0x80,
        fields: &[(8, 40)],
        again: again!(TaskManagementRequest),
    },
    Layout {
        opcode: 0x03,
        immediate: false,
        flags: 0xcf,
        always: 0,
        fields: &[(2, 4), (8, 22), (24, 32)],
        again: again!(LoginRequest),
    },
    Layout {
        opcode: 0x04,
        immediate: true,
        flags: 0xc0,
        always: 0,
        fields: &[(8, 32)],
        again: again!(TextRequest),
    },
    Layout {
        opcode: 0x05,
        immediate: false,
        flags: 0x80,
        always: 0,
        fields: &[(8, 24), (28, 32), (36, 44)],
        again: again!(DataOut),
    },
    Layout {
        opcode: 0x06,
        immediate: true,
        flags: 0x7f,
        always: 0x80,
        fields: &[(16, 22), (24, 32)],
        again: again!(LogoutRequest),
    },
    Layout {
        opcode: 0x10,
        immediate: false,
        flags: 0x0f,
        always: 0x80,
        fields: &[(8, 24), (28, 32), (40, 48)],
        again: again!(SnackRequest),
    },
    Layout {
        opcode: 0x20,
        immediate: false,
        flags: 0,
        always: 0x80,
        fields: &[(8, 36)],
        again: again!(NopIn),
    },
    Layout {
        opcode: 0x22,
        immediate: false,
        flags: 0,
        always: 0x80,
        fields: &[(2, 3), (16, 20), (24, 36)],
        again: again!(TaskManagementResponse),
    },
    Layout {
        opcode: 0x23,
        immediate: false,
        flags: 0xcf,
        always: 0,
        fields: &[(2, 4), (8, 20), (24, 38)],
        again: again!(LoginResponse),
    },
    Layout {
        opcode: 0x24,
        immediate: false,
        flags: 0xc0,
        always: 0,
        fields: &[(8, 36)],
        again: again!(TextResponse),
    },
    Layout {
        opcode: 0x26,
        immediate: false,
        flags: 0,
        always: 0x80,
        fields: &[(2, 3), (16, 20), (24, 36), (40, 44)],
        again: again!(LogoutResponse),
    },
    Layout {
        opcode: 0x31,
        immediate: false,
        flags: 0,
        always: 0x80,
        fields: &[(8, 48)],
        again: again!(ReadyToTransfer),
    },
    Layout {
        opcode: 0x21,
        immediate: false,
        flags: 0,
        always: 0x80,
        fields: &[(2, 4), (16, 20), (24, 40)],
        again: again!(ScsiResponse),
    },
    Layout {
        opcode: 0x25,
        immediate: false,
        flags: 0x80,
        always: 0,
        fields: &[(16, 20), (24, 44)],
        again: again!(DataIn),
    },
    Layout {
        opcode: 0x3f,
        immediate: false,
        flags: 0,
        always: 0x80,
        fields: &[(2, 3), (24, 36)],
        again: again!(Reject),
    },
];

/// The header that must result from decoding and encoding `bytes`: undefined bits are zero. `None`: it is
/// refused.
fn canonical(layout: &Layout, bytes: &Bhs) -> Option<Bhs> {
    let mut header = [0; 48];
    let immediate = match layout.opcode {
        0x03 => 0x40,
        _ if layout.immediate => bytes[0] & 0x40,
        _ => 0,
    };
    header[0] = layout.opcode | immediate;
    header[1] = bytes[1] & layout.flags | layout.always;
    for (from, to) in layout.fields {
        header[*from..*to].copy_from_slice(&bytes[*from..*to]);
    }
    // A residual: bit 1 means underflow, bit 2 overflow; they exclude each other, and without either its
    // count is zero.
    let residual = |flags: u8, at: usize, header: &mut Bhs| {
        match flags & 6 {
            6 => return None,
            0 => {}
            _ => header[at..at + 4].copy_from_slice(&bytes[at..at + 4]),
        }
        Some(flags & 6)
    };
    match layout.opcode {
        0x21 => {
            header[1] |= residual(bytes[1], 44, &mut header)?;
            header[1] |= residual(bytes[1] >> 2, 40, &mut header)? << 2;
        }
        0x25 => {
            // No tag that would have to be sent back.
            header[20..24].fill(0xff);
            if bytes[1] & 1 != 0 {
                header[1] |= 1 | residual(bytes[1], 44, &mut header)?;
                header[3] = bytes[3];
            }
        }
        // Not a tag of a task.
        0x3f => header[16..20].fill(0xff),
        _ => {}
    }
    Some(header)
}

/// Checks a basic header segment as each kind of PDU: defined fields survive, reserved bits are dropped,
/// another opcode is refused.
pub fn iscsi_pdu(bytes: &[u8]) {
    let mut given: Bhs = [0; 48];
    for (to, from) in given.iter_mut().zip(bytes) {
        *to = *from;
    }
    for layout in &LAYOUTS {
        let mut header = given;
        let is_its_own = header[0] & 0x3f == layout.opcode;
        assert_eq!((layout.again)(&header).is_some(), is_its_own && canonical(layout, &header).is_some());
        header[0] = layout.opcode | header[0] & 0xc0;
        assert_eq!((layout.again)(&header), canonical(layout, &header), "opcode {:#x}", layout.opcode);
    }
}

/// Checks a text: its pairs equal those of a simple parser, and are parsed again from their encoding. The
/// values are also parsed as numbers and binary data.
pub fn iscsi_text(bytes: &[u8]) {
    let found = pairs(bytes);
    assert_eq!(found, plain(bytes));
    if let Ok(found) = found {
        let mut again = Vec::new();
        for (key, value) in &found {
            put_pair(&mut again, key, value);
            values(value);
        }
        assert_eq!(pairs(&again), Ok(found));
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        values(text);
    }
}

fn values(text: &str) {
    let (digits, base) = match text.as_bytes() {
        [b'0', b'x' | b'X', digits @ ..] => (digits, 16),
        digits => (digits, 10),
    };
    let expected = digits.iter().try_fold(0u64, |number, digit| {
        let digit = char::from(*digit).to_digit(base)?;
        Some(number * u64::from(base) + u64::from(digit)).filter(|number| *number <= u64::from(u32::MAX))
    });
    assert_eq!(
        number(text),
        expected.filter(|_| !digits.is_empty()).and_then(|n| u32::try_from(n).ok()),
        "{text}"
    );
    if let Some(data) = binary(text) {
        assert!(!data.is_empty(), "{text}");
        assert_eq!(binary(&hexadecimal(&data)), Some(data.clone()));
        if base == 16 {
            // An odd number of digits gets a leading zero.
            let canonical = hexadecimal(&data);
            let digits = text.to_ascii_lowercase();
            let pad = if digits.len().is_multiple_of(2) { "0x" } else { "0x0" };
            assert_eq!(canonical, format!("{pad}{}", &digits[2..]));
        }
    }
}

/// The pairs of a text, byte by byte.
fn plain(text: &[u8]) -> Result<Vec<(&str, &str)>, TextError> {
    if !text.is_empty() && text[text.len() - 1] != 0 {
        return Err(TextError::NoEnd);
    }
    let mut found = Vec::new();
    let mut start = 0;
    for at in 0..text.len() {
        if text[at] != 0 {
            continue;
        }
        let pair = &text[start..at];
        start = at + 1;
        if pair.is_empty() {
            continue;
        }
        let Some(equals) = pair.iter().position(|byte| *byte == b'=') else {
            return Err(TextError::NoEquals);
        };
        let (key, value) = (&pair[..equals], &pair[equals + 1..]);
        if key.is_empty()
            || key.len() > KEY_BYTES
            || !key.iter().all(|byte| byte.is_ascii_alphanumeric() || b".-+@_#".contains(byte))
        {
            return Err(TextError::BadKey);
        }
        if value.len() > VALUE_BYTES {
            return Err(TextError::LongValue);
        }
        let Ok(value) = std::str::from_utf8(value) else { return Err(TextError::NotUtf8) };
        found.push((std::str::from_utf8(key).map_err(|_| TextError::BadKey)?, value));
    }
    Ok(found)
}

/// The rule of RFC 7143, section 13, for a key.
enum Rule {
    /// The first of the initiator's list that is `None` or `CRC32C`.
    Digest(fn(&mut Parameters) -> &mut bool),
    /// Yes or No, and the result from the initiator's value.
    Boolean(fn(&mut Parameters, bool), Option<bool>),
    /// The smaller of the initiator's number, which must be in this range, and ours.
    Least(u32, u32, fn(&mut Parameters, &Limits, u32) -> u32),
    /// A declaration: a number from this range.
    Declared(u32, u32, fn(&mut Parameters, u32)),
    Irrelevant,
    Reporting,
    Silence,
}

/// The rule of a key, and whether the key only matters for SCSI and so not in a discovery.
fn rule(key: &str) -> Option<(Rule, bool)> {
    const LONGEST: u32 = (1 << 24) - 1;
    let nothing = |_: &mut Parameters, _: bool| {};
    Some(match key {
        "HeaderDigest" => (Rule::Digest(|p| &mut p.header_digest), false),
        "DataDigest" => (Rule::Digest(|p| &mut p.data_digest), false),
        "InitialR2T" => (Rule::Boolean(|p, yes| p.initial_r2t = yes, None), true),
        "ImmediateData" => (Rule::Boolean(|p, yes| p.immediate_data = yes, None), true),
        "DataPDUInOrder" | "DataSequenceInOrder" => (Rule::Boolean(nothing, Some(true)), true),
        "IFMarker" | "OFMarker" => (Rule::Boolean(nothing, Some(false)), false),
        "IFMarkInt" | "OFMarkInt" => (Rule::Irrelevant, false),
        "MaxRecvDataSegmentLength" => (Rule::Declared(512, LONGEST, |p, n| p.send_segment_bytes = n), false),
        "MaxBurstLength" => (
            Rule::Least(512, LONGEST, |p, limits, theirs| {
                p.max_burst_bytes = theirs.min(limits.max_burst_bytes);
                p.max_burst_bytes
            }),
            true,
        ),
        "FirstBurstLength" => (
            Rule::Least(512, LONGEST, |p, limits, theirs| {
                p.first_burst_bytes = theirs.min(limits.first_burst_bytes).min(p.max_burst_bytes);
                p.first_burst_bytes
            }),
            true,
        ),
        "MaxOutstandingR2T" => (
            Rule::Least(1, 65_535, |p, limits, theirs| {
                p.outstanding_r2t = limits.outstanding_r2t.min(u16::try_from(theirs).unwrap_or(u16::MAX));
                p.outstanding_r2t.into()
            }),
            true,
        ),
        "MaxConnections" => (Rule::Least(1, 65_535, |_, _, _| 1), true),
        "ErrorRecoveryLevel" => (Rule::Least(0, 2, |_, _, _| 0), false),
        "iSCSIProtocolLevel" => (Rule::Least(0, 31, |_, _, theirs| theirs.min(1)), false),
        "DefaultTime2Wait" => (
            Rule::Least(0, 3600, |p, _, theirs| {
                p.time_to_wait_s = u16::try_from(theirs).unwrap_or(u16::MAX);
                theirs
            }),
            false,
        ),
        "DefaultTime2Retain" => (
            Rule::Least(0, 3600, |p, _, _| {
                p.time_to_retain_s = 0;
                0
            }),
            true,
        ),
        "TaskReporting" => (Rule::Reporting, true),
        "NodeArchitecture" => (Rule::Silence, false),
        _ => return None,
    })
}

fn expected_answer(
    p: &mut Parameters,
    limits: &Limits,
    discovery: bool,
    key: &str,
    value: &str,
) -> Option<String> {
    let Some((rule, scsi_only)) = rule(key) else { return Some("NotUnderstood".into()) };
    if discovery && scsi_only {
        return Some("Irrelevant".into());
    }
    let in_range = |from, to| number(value).filter(|number| (from..=to).contains(number));
    let reject = Some("Reject".to_owned());
    let mut choices = value.split(',');
    match rule {
        Rule::Digest(place) => match choices.find(|choice| ["None", "CRC32C"].contains(choice)) {
            Some(choice) => {
                *place(p) = choice == "CRC32C";
                Some(choice.to_owned())
            }
            None => reject,
        },
        Rule::Boolean(set, always) if ["Yes", "No"].contains(&value) => {
            let yes = always.unwrap_or(value == "Yes");
            set(p, yes);
            Some(if yes { "Yes" } else { "No" }.to_owned())
        }
        Rule::Boolean(..) => reject,
        Rule::Least(from, to, result) => match in_range(from, to) {
            Some(theirs) => Some(result(p, limits, theirs).to_string()),
            None => reject,
        },
        Rule::Declared(from, to, set) => match in_range(from, to) {
            Some(theirs) => {
                set(p, theirs);
                None
            }
            None => reject,
        },
        Rule::Irrelevant => Some("Irrelevant".into()),
        Rule::Reporting => choices.find(|choice| *choice == "RFC3720").map(str::to_owned).or(reject),
        Rule::Silence => None,
    }
}

/// Checks the keys of a login, one after the other: each is answered according to its rule, and the resulting
/// parameters follow the rules.
pub fn iscsi_login_keys(bytes: &[u8]) {
    let Ok(found) = pairs(bytes) else { return };
    let limits = Limits::default();
    for discovery in [false, true] {
        let (mut agreed, mut expected) = (Parameters::default(), Parameters::default());
        for (key, value) in &found {
            let answer = match negotiate(&mut agreed, &limits, discovery, key, value) {
                Answer::Silence => None,
                Answer::Value(value) => Some(value),
            };
            assert_eq!(
                answer,
                expected_answer(&mut expected, &limits, discovery, key, value),
                "{key}={value}"
            );
            assert_eq!(agreed, expected, "{key}={value}");
        }
        assert!(agreed.max_burst_bytes <= limits.max_burst_bytes.max(Parameters::default().max_burst_bytes));
        assert!((512..1 << 24).contains(&agreed.send_segment_bytes));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }

    /// Texts that are right, nearly right, and completely wrong.
    fn garbage() -> impl Strategy<Value = Vec<u8>> {
        let key =
            prop_oneof![8 => "[A-Za-z][A-Za-z0-9.@_#+-]{0,20}", 1 => "[ -~]{0,70}", 1 => Just(String::new())];
        let value =
            prop_oneof![8 => "[ -~]{0,40}", 1 => Just("v".repeat(VALUE_BYTES + 1)), 1 => "\\PC{0,10}"];
        let pair = (key, value, any::<bool>())
            .prop_map(|(key, value, equals)| format!("{key}{}{value}", if equals { "=" } else { "" }));
        let structured = prop::collection::vec((pair, 0_usize..3), 0..6).prop_map(|pairs| {
            let mut text = Vec::new();
            for (pair, zeroes) in pairs {
                text.extend_from_slice(pair.as_bytes());
                text.resize(text.len() + zeroes, 0);
            }
            text
        });
        prop_oneof![3 => structured, 1 => prop::collection::vec(any::<u8>(), 0..100)]
    }

    proptest! {
        #[test]
        fn headers_survive_decoding_and_encoding_bit_by_bit(bytes in prop::collection::vec(any::<u8>(), 48)) {
            iscsi_pdu(&bytes);
        }

        #[test]
        fn texts_are_parsed_as_the_plainest_parser_does(text in garbage()) {
            iscsi_text(&text);
        }
    }
}
