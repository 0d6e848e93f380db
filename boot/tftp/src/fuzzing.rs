//! Fuzzing oracle for TFTP: properties that hold for every datagram that reaches a TFTP server. The fuzzers in
//! `fuzz/` and a bounded test run it.

use std::sync::Arc;

use crate::packet::{Packet, Request};
use crate::transfer::{BLOCK_BYTES_MAX, Step, Transfer, WINDOW_MAX};

/// An oracle: takes arbitrary bytes, and panics if a property is violated.
pub type Oracle = fn(&[u8]);

/// All oracles, each with its name and seed inputs.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let options = [("tsize", "0"), ("blksize", "1468"), ("windowsize", "4")];
    let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let request = Request { file: "ipxe.efi".into(), mode: "octet".into(), options };
    let samples = [
        Packet::Read(request.clone()),
        Packet::Ack { block: 1 },
        Packet::Data { block: 2, bytes: vec![1, 2, 3] },
        Packet::OptionsAccepted(request.options),
    ];
    vec![("tftp_packet", tftp_packet, samples.map(|packet| packet.bytes()).to_vec())]
}

/// The oracle for one datagram. A parsed packet survives writing and parsing; each answer fits into a frame, and the
/// transfer ends.
pub fn tftp_packet(bytes: &[u8]) {
    let Ok(packet) = Packet::parse(bytes) else { return };
    // Two exceptions: error text that is not UTF-8 is replaced, and an option without a value is dropped.
    if !matches!(packet, Packet::Error { .. }) {
        assert_eq!(
            Packet::parse(&packet.bytes()).as_ref(),
            Ok(&packet),
            "the packet changes when it is written"
        );
    }
    let Packet::Read(request) = packet else { return };
    let file: Arc<[u8]> = (0..20_000u32).map(|at| at.to_le_bytes()[0]).collect();
    let (mut transfer, mut step) = Transfer::start(&request, Arc::clone(&file));
    let mut got = Vec::new();
    for _ in 0..=file.len() {
        let Step::Send(sent) = step else { break };
        assert!(sent.len() as u64 <= WINDOW_MAX && !sent.is_empty());
        let mut ack = 0;
        for datagram in sent {
            match Packet::parse(&datagram) {
                Ok(Packet::Data { block, bytes }) => {
                    assert!(bytes.len() <= BLOCK_BYTES_MAX);
                    got.extend(bytes);
                    ack = block;
                }
                Ok(Packet::OptionsAccepted(_)) => {}
                other => panic!("{other:?} is sent"),
            }
        }
        step = transfer.received(&Packet::Ack { block: ack });
    }
    assert_eq!(step, Step::Done);
    assert!(got == *file, "the file arrives changed");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_datagram_breaks_a_transfer() {
        let fed = headwater_testkit::mutate::all(targets());
        assert!(fed > 2000, "{fed} inputs");
    }
}
