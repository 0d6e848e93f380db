//! Seed inputs for the session fuzzer: one function makes each sample.

// A step has its kind and a variant, followed by the arguments of the kind.
const HOLD: [u8; 2] = [12, 0];
const GO_ON: [u8; 2] = [12, 1];
const RELEASE: [u8; 2] = [12, 2];
const ASKED: [u8; 4] = [5, 0, 0, 0];

/// A command: flags, tag, operation, block, blocks, lengths, data.
fn write(tag: u8, lba: u8, blocks: u8, data: u8) -> [u8; 9] {
    [0, 0, 0, tag, 1, lba, blocks, 0, data]
}

fn read(tag: u8, lba: u8, blocks: u8) -> [u8; 9] {
    [0, 0, 0, tag, 0, lba, blocks, 0, 0]
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
        &ASKED,
        &ASKED,
        // Unsolicited data.
        &[0, 0, 2, 4, 1, 4, 4, 0, 0],
        &[7, 0x80],
        &[7, 0x81],
        &ASKED,
        &[8, 0, 5, 9],
        &[9, 0, 0, 1, 0],
        &[9, 0, 8, 1, 200],
        &[9, 0, 14, 1, 0],
        &[9, 0, 4, 1, 9],
        &[11, 0, 0, 9],
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
        &[0, 4, 8, 4, 1, 3, 1, 0, 1],
        &ASKED,
        &ASKED,
        // A bit of the data, then a bit of a header.
        &[15, 60, 1],
        &ASKED,
        &[14, 5],
        &read(5, 0, 9),
        &[10, 4, 2, 1, 0, 0],
        &[15, 3, 1],
        &[8, 0, 5, 9],
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
    .concat()
}

/// Commands out of order, additional headers, commands of several steps, a reset.
fn out_of_turn() -> Vec<u8> {
    [
        &[2, 1, 0x0f, 0x3f][..],
        &[0, 1, 0, 1, 0, 0, 1, 0, 0],
        &[0, 1, 0, 1, 0, 0, 1, 0, 0],
        &read(2, 0, 1),
        &[8, 1, 5, 9],
        &[0, 1, 8, 2, 1, 0, 9, 0, 0],
        &[10, 4, 1, 1, 1, 0x3b],
        &ASKED,
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
    .concat()
}

/// All samples.
pub(in super::super) fn samples() -> Vec<Vec<u8>> {
    vec![plain(), digests(), aborts(), out_of_turn()]
}
