//! Statuses, numbers and binary values are decoded as they were encoded. `src/fuzzing.rs` compares whole
//! headers and texts with an independent implementation of RFC 7143.

use headwater_iscsi::wire::header::{segment_bytes, set_segment_bytes};
use headwater_iscsi::wire::response::*;
use headwater_iscsi::wire::text::{binary, hexadecimal, number};
use headwater_iscsi::wire::{Bhs, Opcode};
use proptest::prelude::*;

proptest! {
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
