//! The state machine of one transfer: which packets the server sends at the start, after an acknowledgement, and
//! after a timeout.
//!
//! ```text
//!            start                    ack of all that was sent             ack of the last block
//!   request ------> OptionsAccepted --ack 0--> Data 1 .. window --ack--> .. --------------------> done
//!                   or Data 1                     |    ^
//!                                    part acked,  +----+ from the first block that did not come
//!                                    or silence
//! ```
//! Block numbers count from 1 without bound here; a packet carries their lowest 16 bits.

use std::sync::Arc;

use crate::packet::{ErrorCode, Packet, Request};

/// The longest block: an Ethernet frame without its headers.
pub const BLOCK_BYTES_MAX: usize = 1468;
/// The shortest block that a client may ask for.
const BLOCK_BYTES_MIN: u64 = 8;
/// The block length, unless the client asks for another.
const BLOCK_BYTES: usize = 512;
/// The most blocks that are sent before an acknowledgement must arrive.
pub const WINDOW_MAX: u64 = 16;
/// The number of retransmissions without an answer after which the transfer is given up.
pub const TRIES_MAX: u32 = 6;
/// The timeout for an answer, in seconds, unless the client sets another.
const TIMEOUT_S: u64 = 1;
const TIMEOUT_MAX_S: u64 = 10;

/// What the caller must do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send these datagrams, and wait for an answer.
    Send(Vec<Vec<u8>>),
    /// Continue to wait: the datagram changes nothing.
    Wait,
    /// The client has received the whole file.
    Done,
    /// The client stopped answering, or ended the transfer.
    GivenUp,
}

/// A transfer of one file.
#[derive(Debug)]
pub struct Transfer {
    file: Arc<[u8]>,
    block_bytes: usize,
    window: u64,
    timeout_s: u64,
    /// The answer to the client's options, until the client acknowledges it.
    options: Option<Packet>,
    /// The number of the last block that the client acknowledged.
    arrived: u64,
    /// The number of the last block that was sent.
    sent: u64,
    tries: u32,
}

impl Transfer {
    /// Starts a transfer. Returns it together with the first step.
    pub fn start(request: &Request, file: Arc<[u8]>) -> (Self, Step) {
        let mut taken = Vec::new();
        let mut take = |name: &str, value: u64| {
            taken.push((name.to_owned(), value.to_string()));
            value
        };
        let block_bytes = request.number("blksize").filter(|bytes| *bytes >= BLOCK_BYTES_MIN);
        let block_bytes = block_bytes.map(|bytes| take("blksize", bytes.min(BLOCK_BYTES_MAX as u64)));
        let window = request.number("windowsize").filter(|blocks| *blocks >= 1);
        let window = window.map(|blocks| take("windowsize", blocks.min(WINDOW_MAX)));
        // A timeout option is accepted as it is or not at all.
        let timeout_s = request.number("timeout").filter(|seconds| (1..=TIMEOUT_MAX_S).contains(seconds));
        let timeout_s = timeout_s.map(|seconds| take("timeout", seconds));
        if request.options.iter().any(|(name, _)| name == "tsize") {
            take("tsize", file.len() as u64);
        }
        let mut transfer = Self {
            file,
            block_bytes: block_bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(BLOCK_BYTES),
            window: window.unwrap_or(1),
            timeout_s: timeout_s.unwrap_or(TIMEOUT_S),
            options: (!taken.is_empty()).then_some(Packet::OptionsAccepted(taken)),
            arrived: 0,
            sent: 0,
            tries: 0,
        };
        let step = transfer.send();
        (transfer, step)
    }

    /// The timeout for the next answer, in seconds. It grows with each retransmission.
    pub fn timeout_s(&self) -> u64 {
        (self.timeout_s << self.tries.min(3)).min(TIMEOUT_MAX_S)
    }

    /// Handles a datagram of the client.
    pub fn received(&mut self, packet: &Packet) -> Step {
        match packet {
            Packet::Ack { block } => self.ack(*block),
            Packet::Error { .. } => Step::GivenUp,
            _ => Step::Wait,
        }
    }

    /// Handles a timeout.
    pub fn timed_out(&mut self) -> Step {
        self.tries += 1;
        if self.tries > TRIES_MAX { Step::GivenUp } else { self.send() }
    }

    fn ack(&mut self, block: u16) -> Step {
        if self.options.is_some() {
            if block != 0 {
                return Step::Wait;
            }
            self.options = None;
            self.tries = 0;
            return self.send();
        }
        // The number of newly acknowledged blocks. If the block was never sent, the acknowledgement is stale.
        let newer = u64::from(block.wrapping_sub(self.arrived.low_16()));
        let arrived = self.arrived + newer;
        if arrived > self.sent {
            return Step::Wait;
        }
        // Without a window, a duplicate acknowledgement is ignored: otherwise every later block would be sent twice.
        // With a window, it means that the first block of the window was lost.
        if newer == 0 && self.window == 1 {
            return Step::Wait;
        }
        self.arrived = arrived;
        if newer > 0 {
            self.tries = 0;
        }
        if self.arrived >= self.blocks() { Step::Done } else { self.send() }
    }

    /// The number of blocks. The last block is shorter than the others, and may be empty.
    fn blocks(&self) -> u64 {
        (self.file.len() / self.block_bytes.max(1)) as u64 + 1
    }

    fn send(&mut self) -> Step {
        if let Some(options) = &self.options {
            return Step::Send(vec![options.bytes()]);
        }
        let last = (self.arrived + self.window).min(self.blocks());
        self.sent = last;
        Step::Send((self.arrived + 1..=last).map(|number| self.block(number)).collect())
    }

    fn block(&self, number: u64) -> Vec<u8> {
        let start = usize::try_from(number - 1).unwrap_or(usize::MAX).saturating_mul(self.block_bytes);
        let rest = self.file.get(start..).unwrap_or_default();
        let bytes = rest.get(..self.block_bytes).unwrap_or(rest).to_vec();
        Packet::Data { block: number.low_16(), bytes }.bytes()
    }
}

/// The lowest 16 bits of a number.
trait Low16 {
    fn low_16(self) -> u16;
}

impl Low16 for u64 {
    fn low_16(self) -> u16 {
        let [low, high, ..] = self.to_le_bytes();
        u16::from_le_bytes([low, high])
    }
}

/// The answer to a request that is not supported.
pub fn refusal(code: ErrorCode, text: &str) -> Vec<u8> {
    Packet::Error { code, text: text.to_owned() }.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(options: &[(&str, &str)]) -> Request {
        let options = options.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Request { file: "f".into(), mode: "octet".into(), options }
    }

    fn file(len: usize) -> Arc<[u8]> {
        (0..len).map(|at| (at % 251) as u8).collect()
    }

    /// A client that loses each datagram for which `lost` returns true. Returns the bytes that it received.
    fn fetch(options: &[(&str, &str)], file: &Arc<[u8]>, mut lost: impl FnMut(u64) -> bool) -> Vec<u8> {
        let (mut transfer, mut step) = Transfer::start(&request(options), Arc::clone(file));
        let (mut got, mut expected, mut datagrams) = (Vec::new(), 1u16, 0);
        let mut block_bytes = 512;
        loop {
            let sent = match step {
                Step::Send(sent) => sent,
                Step::Done => return got,
                other => panic!("{other:?} after {} bytes", got.len()),
            };
            let mut ack = None;
            for datagram in sent {
                datagrams += 1;
                if lost(datagrams) {
                    continue;
                }
                match Packet::parse(&datagram).unwrap() {
                    Packet::OptionsAccepted(taken) => {
                        let taken = Request { options: taken, ..request(&[]) };
                        block_bytes = taken.number("blksize").unwrap_or(512) as usize;
                        ack = Some(0);
                    }
                    Packet::Data { block, bytes } => {
                        assert!(bytes.len() <= block_bytes);
                        if block == expected {
                            got.extend(bytes);
                            expected = expected.wrapping_add(1);
                        }
                        ack = Some(expected.wrapping_sub(1));
                    }
                    other => panic!("{other:?}"),
                }
            }
            step = match ack {
                Some(block) => transfer.received(&Packet::Ack { block }),
                None => transfer.timed_out(),
            };
            // A client that sees nothing new waits for a retransmission.
            if step == Step::Wait {
                step = transfer.timed_out();
            }
        }
    }

    #[test]
    fn a_file_of_any_length_arrives_with_any_options() {
        for len in [0, 1, 511, 512, 513, 1024, 100_000] {
            let file = file(len);
            assert_eq!(fetch(&[], &file, |_| false), *file, "{len}");
            let options = [("blksize", "1468"), ("tsize", "0"), ("windowsize", "4")];
            assert_eq!(fetch(&options, &file, |_| false), *file, "{len}");
            assert_eq!(fetch(&options, &file, |number| number % 3 == 1), *file, "{len}, with losses");
            assert_eq!(fetch(&[], &file, |number| number % 4 == 2), *file, "{len}, with losses");
        }
    }

    #[test]
    fn block_numbers_roll_over_to_zero() {
        // 65,537 full blocks and a short one.
        let file = file(8 * 65_537 + 3);
        assert_eq!(fetch(&[("blksize", "8")], &file, |_| false), *file);
        assert_eq!(fetch(&[("blksize", "8"), ("windowsize", "7")], &file, |number| number % 5 == 0), *file);
    }

    #[test]
    fn options_are_taken_within_their_limits() {
        let options =
            [("blksize", "60000"), ("windowsize", "1000"), ("timeout", "200"), ("tsize", "0"), ("x", "1")];
        let (_, step) = Transfer::start(&request(&options), file(77));
        let Step::Send(sent) = step else { panic!("{step:?}") };
        let taken = Packet::parse(&sent[0]).unwrap();
        let expected = [("blksize", "1468"), ("windowsize", "16"), ("tsize", "77")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        assert_eq!(taken, Packet::OptionsAccepted(expected));
    }

    #[test]
    fn an_acknowledgement_that_comes_twice_sends_nothing() {
        let (mut transfer, _) = Transfer::start(&request(&[]), file(5000));
        assert!(matches!(transfer.received(&Packet::Ack { block: 1 }), Step::Send(_)));
        assert_eq!(transfer.received(&Packet::Ack { block: 1 }), Step::Wait);
        // Acknowledgement of a block that was never sent.
        assert_eq!(transfer.received(&Packet::Ack { block: 9 }), Step::Wait);
    }

    #[test]
    fn a_silent_client_is_given_up() {
        let (mut transfer, _) = Transfer::start(&request(&[]), file(5000));
        let waits: Vec<u64> = (0..TRIES_MAX)
            .map(|_| {
                assert!(matches!(transfer.timed_out(), Step::Send(_)));
                transfer.timeout_s()
            })
            .collect();
        assert_eq!(waits, [2, 4, 8, 8, 8, 8]);
        assert_eq!(transfer.timed_out(), Step::GivenUp);
        let (mut transfer, _) = Transfer::start(&request(&[("tsize", "0")]), file(1));
        let enough = Packet::Error { code: ErrorCode::Refused, text: "only the size".into() };
        assert_eq!(transfer.received(&enough), Step::GivenUp);
    }
}
