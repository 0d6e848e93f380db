//! PDUs and texts, against an oracle that is not the codec: fields at the offsets of RFC 7143, and a parser of texts in the plainest
//! way. Also garbage of all kinds, as a fuzz target would send it; `PROPTEST_CASES` sets how much.

use headwater_iscsi::wire::header::{segment_bytes, set_segment_bytes};
use headwater_iscsi::wire::request::*;
use headwater_iscsi::wire::response::*;
use headwater_iscsi::wire::text::{KEY_BYTES, TextError, VALUE_BYTES, binary, hexadecimal, number, pairs};
use headwater_iscsi::wire::{Bhs, Opcode};
use proptest::prelude::*;

/// Bits of a header that a PDU has: all others are reserved, and sent as zero.
struct Layout {
    opcode: u8,
    immediate: bool,
    /// Bits of byte 1 that count, and those that are always set.
    flags: u8,
    always: u8,
    /// Ranges of bytes that count, from byte 2 on.
    fields: &'static [(usize, usize)],
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

/// The header that must come out when `bytes` come in: what does not count is zero.
fn canonical(layout: &Layout, bytes: &Bhs) -> Bhs {
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
    match layout.opcode {
        // No tag that would have to be sent back, and none of a task.
        0x25 => header[20..24].fill(0xff),
        0x3f => header[16..20].fill(0xff),
        _ => {}
    }
    header
}

proptest! {
    #[test]
    fn headers_survive_decoding_and_encoding_bit_by_bit(bytes in prop::array::uniform32(any::<u8>()), rest in prop::array::uniform16(any::<u8>())) {
        let mut header = [0; 48];
        header[..32].copy_from_slice(&bytes);
        header[32..].copy_from_slice(&rest);
        for layout in &LAYOUTS {
            let mut header = header;
            header[0] = layout.opcode | header[0] & 0xc0;
            // Bits that mean something only with others are tried one by one below.
            match layout.opcode {
                0x21 => header[1] = 0x80,
                0x25 => header[1] &= 0x80,
                _ => {}
            }
            prop_assert_eq!((layout.again)(&header), Some(canonical(layout, &header)), "opcode {:#x}", layout.opcode);
            // Another opcode is refused.
            header[0] ^= 1;
            prop_assert_eq!((layout.again)(&header), None);
        }
    }

    #[test]
    fn residuals_and_statuses_survive(count in any::<u32>(), other in any::<u32>(), status in any::<u8>(), tag in any::<u32>()) {
        let all = |count| [Residual::None, Residual::Underflow(count), Residual::Overflow(count)];
        for residual in all(count) {
            for read_residual in all(other) {
                let response = ScsiResponse { response: 0, status, task_tag: tag, numbers: Numbers::default(), exp_data_sn: other, residual, read_residual };
                let header = response.encode();
                prop_assert_eq!(ScsiResponse::decode(&header), Ok(response));
                let bits = |residual: Residual| match residual { Residual::None => 0, Residual::Underflow(_) => 2, Residual::Overflow(_) => 4 };
                prop_assert_eq!(header[1], 0x80 | bits(residual) | bits(read_residual) << 2);
            }
            let data = DataIn { is_final: true, status: Some((status, residual)), task_tag: tag, numbers: Numbers::default(), data_sn: 1, offset: other };
            let header = data.encode();
            prop_assert_eq!(DataIn::decode(&header), Ok(data));
            prop_assert_eq!(header[3], status);
        }
        let mut both = [0; 48];
        both[..2].copy_from_slice(&[0x21, 0x86]);
        prop_assert!(ScsiResponse::decode(&both).is_err());
    }

    #[test]
    fn lengths_survive(len in 0_usize..0x100_0000) {
        let mut header = [0xff; 48];
        set_segment_bytes(&mut header, len);
        prop_assert_eq!(segment_bytes(&header) as usize, len);
        prop_assert_eq!(header[4], 0xff);
    }

    #[test]
    fn texts_are_parsed_as_the_plainest_parser_does(text in garbage()) {
        prop_assert_eq!(pairs(&text), plain(&text));
    }

    #[test]
    fn numbers_are_those_of_the_standard_library(text in "[0-9a-fxX+-]{0,12}") {
        let expected = if let Some(digits) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
            if digits.contains(['+', '-']) { None } else { u32::from_str_radix(digits, 16).ok() }
        } else if text.contains(['+', '-']) {
            None
        } else {
            text.parse().ok()
        };
        prop_assert_eq!(number(&text), expected);
    }

    #[test]
    fn binary_values_survive_as_digits_and_as_base64(bytes in prop::collection::vec(any::<u8>(), 1..200)) {
        use base64::Engine as _;
        prop_assert_eq!(binary(&hexadecimal(&bytes)), Some(bytes.clone()));
        prop_assert_eq!(binary(&hexadecimal(&bytes).to_uppercase()), Some(bytes.clone()));
        let text = format!("0b{}", base64::engine::general_purpose::STANDARD.encode(&bytes));
        prop_assert_eq!(binary(&text), Some(bytes));
    }
}

/// Texts that are right, nearly right, and not at all.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let key =
        prop_oneof![8 => "[A-Za-z][A-Za-z0-9.@_#+-]{0,20}", 1 => "[ -~]{0,70}", 1 => Just(String::new())];
    let value = prop_oneof![8 => "[ -~]{0,40}", 1 => Just("v".repeat(VALUE_BYTES + 1)), 1 => "\\PC{0,10}"];
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
        found.push((std::str::from_utf8(key).unwrap(), value));
    }
    Ok(found)
}

#[test]
fn opcodes_are_those_of_the_standard() {
    let known: Vec<u8> = (0..64).filter(|opcode| Opcode::of(&header_of(*opcode)).is_some()).collect();
    assert_eq!(
        known,
        [0, 1, 2, 3, 4, 5, 6, 0x10, 0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x31, 0x32, 0x3f]
    );
}

fn header_of(opcode: u8) -> Bhs {
    let mut header = [0; 48];
    header[0] = opcode;
    header
}

#[test]
fn an_asynchronous_message_survives() {
    let message = AsyncMessage {
        event: 1,
        numbers: Numbers { stat_sn: 1, exp_cmd_sn: 2, max_cmd_sn: 3 },
        parameter1: 4,
        parameter2: 5,
        parameter3: 6,
    };
    let header = message.encode();
    assert_eq!(AsyncMessage::decode(&header), Ok(message));
    assert_eq!(header[36..44], [1, 0, 0, 4, 0, 5, 0, 6]);
}
