//! Seed inputs for the session fuzzer: one function makes each sample.
//!
//! A sample begins with four bytes of negotiated parameters and limits, which `settings` in `session.rs` decodes. Steps follow,
//! which `Bench::steps` decodes. A step is a kind (one of the constants below), a variant, and the arguments of that kind, which
//! the functions in `initiator.rs` decode. If bit 0x80 of the kind is set, the step is sent together with the next one.

/// A SCSI command. Arguments: flags, tag, operation, block, blocks, lengths, data.
const SCSI: u8 = 0;
/// Data that an R2T of the target asks for. Arguments: which R2T, and a length.
const SOLICITED: u8 = 5;
/// Unsolicited data of the last command. The variant has the length, and bit 0 makes the PDU the final one.
const UNSOLICITED: u8 = 7;
/// A NOP-Out. Arguments: tag, length.
const NOP: u8 = 8;
/// A text request. Arguments: flags, which also select the text; tag; length.
const TEXT: u8 = 9;
/// A task management function. Arguments: function, tag, referenced tag, numbers.
const FUNCTION: u8 = 10;
/// A logout (arguments: reason, tag) if the lowest three bits of the variant are 0, else a PDU of arbitrary bytes.
const LOGOUT: u8 = 11;
/// The variant says whether the disk holds its answers back, answers at once, or completes one request.
const DISK: u8 = 12;
/// The variant sets the length of the pieces in which bytes are sent.
const PIECES: u8 = 14;
/// Flips a bit of the next PDU: the variant is the byte, and the argument is the bit.
const FLIP: u8 = 15;

const HOLD: [u8; 2] = [DISK, 0];
const GO_ON: [u8; 2] = [DISK, 1];
const RELEASE: [u8; 2] = [DISK, 2];
const SOLICITED_DATA: [u8; 4] = [SOLICITED, 0, 0, 0];

fn write(tag: u8, lba: u8, blocks: u8, data: u8) -> [u8; 9] {
    [SCSI, 0, 0, tag, 1, lba, blocks, 0, data]
}

fn read(tag: u8, lba: u8, blocks: u8) -> [u8; 9] {
    [SCSI, 0, 0, tag, 0, lba, blocks, 0, 0]
}

/// The step is sent together with the next one.
fn batched(mut step: [u8; 9]) -> [u8; 9] {
    step[0] |= 0x80;
    step
}

/// Reads, writes with all kinds of data, texts, and a logout.
fn plain() -> Vec<u8> {
    [
        &[0, 3, 0x1f, 0x3f][..],
        &write(1, 2, 3, 1),
        &read(2, 1, 8),
        &write(3, 9, 8, 0),
        &SOLICITED_DATA,
        &SOLICITED_DATA,
        // A write whose data is unsolicited.
        &[SCSI, 0, 2, 4, 1, 4, 4, 0, 0],
        &[UNSOLICITED, 0x80],
        &[UNSOLICITED, 0x81],
        &SOLICITED_DATA,
        &[NOP, 0, 5, 9],
        &[TEXT, 0, 0, 1, 0],
        &[TEXT, 0, 8, 1, 200],
        &[TEXT, 0, 14, 1, 0],
        &[TEXT, 0, 4, 1, 9],
        &[LOGOUT, 0, 0, 9],
    ]
    .concat()
}

/// Digests, two of which are wrong, and small pieces.
fn digests() -> Vec<u8> {
    [
        &[0x17, 0, 3, 0][..],
        &batched(write(1, 2, 3, 2)),
        &batched(read(2, 1, 8)),
        &batched(write(3, 2, 2, 0)),
        &[SCSI, 4, 8, 4, 1, 3, 1, 0, 1],
        &SOLICITED_DATA,
        &SOLICITED_DATA,
        // Byte 60 of the next PDU: a bit of its data, behind header and header digest.
        &[FLIP, 60, 1],
        &SOLICITED_DATA,
        &[PIECES, 5],
        &read(5, 0, 9),
        &[FUNCTION, 4, 2, 1, 0, 0],
        // Byte 3 of the next PDU: a bit of its header.
        &[FLIP, 3, 1],
        &[NOP, 0, 5, 9],
    ]
    .concat()
}

/// A disk that waits, and tasks that are aborted meanwhile.
fn aborts() -> Vec<u8> {
    [
        &[0, 0, 0x0f, 0x1b][..],
        &HOLD,
        &write(1, 0, 1, 1),
        &read(2, 0, 2),
        &[SCSI, 0, 0x0c, 3, 1, 1, 1, 0, 1],
        &[FUNCTION, 4, 1, 1, 1, 0],
        &[FUNCTION, 4, 2, 2, 0, 0],
        &RELEASE,
        &RELEASE,
        &GO_ON,
        &RELEASE,
        &write(4, 3, 5, 0),
        &[FUNCTION, 4, 1, 3, 4, 0],
        &write(4, 3, 5, 0),
        &[FUNCTION, 4, 5, 4, 0, 0],
        &read(1, 0, 8),
        &read(1, 0, 8),
    ]
    .concat()
}

/// Commands out of order, additional headers, commands of several steps, a reset.
fn out_of_turn() -> Vec<u8> {
    [
        &[2, 1, 0x0f, 0x3f][..],
        &[SCSI, 1, 0, 1, 0, 0, 1, 0, 0],
        &[SCSI, 1, 0, 1, 0, 0, 1, 0, 0],
        &read(2, 0, 1),
        &[NOP, 1, 5, 9],
        &[SCSI, 1, 8, 2, 1, 0, 9, 0, 0],
        &[FUNCTION, 4, 1, 1, 1, 0x3b],
        &SOLICITED_DATA,
        // Additional headers, and commands that end at once.
        &[SCSI, 0, 3 | 0xe0, 4, 0, 1, 1, 8, 8],
        &[SCSI, 0, 0, 4, 4, 0, 9, 0, 0],
        &[SCSI, 0, 0, 4, 3, 0, 9, 0, 0],
        &[SCSI, 0, 0, 4, 12, 3, 1, 0, 1],
        &[TEXT, 0, 0x43, 1, 0],
        &[TEXT, 0, 1, 1, 0],
        &[TEXT, 0, 2, 1, 0],
        &[FUNCTION, 4, 9, 1, 0, 0xff],
    ]
    .concat()
}

/// All samples.
pub(in super::super) fn samples() -> Vec<Vec<u8>> {
    vec![plain(), digests(), aborts(), out_of_turn()]
}
