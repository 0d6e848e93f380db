//! What a write brings.

use serde::Serialize;

use crate::random::Random;

/// A class of contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// Bytes from a random place of 16 MiB of random bytes: no two blocks are equal, and none packs.
    Incompressible,
    /// One pseudo-random buffer for all writes, as Iometer 2006 sent: equal blocks.
    Reused,
    /// Zeroes.
    Zero,
}

/// Random bytes that incompressible requests are copied from, beginning anywhere: making new bytes for each request
/// would take longer than a write to RAM does. As Iometer's pattern "full random".
const POOL_BYTES: usize = 16 << 20;

/// Fills buffers of one class.
pub(super) struct Source {
    content: Content,
    random: Random,
    /// What is copied from.
    bytes: Vec<u8>,
}

impl Source {
    /// A source for requests of one length.
    pub(super) fn new(content: Content, request_bytes: usize, seed: u64) -> Self {
        let mut random = Random::new(!seed);
        let mut bytes = Vec::new();
        match content {
            Content::Incompressible => {
                bytes.resize(POOL_BYTES + request_bytes, 0);
                random.fill(&mut bytes);
            }
            Content::Reused => {
                bytes.resize(request_bytes, 0);
                // The same for every run, as Iometer's.
                Random::new(1).fill(&mut bytes);
            }
            Content::Zero => {}
        }
        Self { content, random, bytes }
    }

    pub(super) fn fill(&mut self, buffer: &mut [u8]) {
        let from = match self.content {
            Content::Incompressible => self.random.below(POOL_BYTES as u64) as usize,
            Content::Reused => 0,
            Content::Zero => return buffer.fill(0),
        };
        buffer.copy_from_slice(&self.bytes[from..from + buffer.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_differ_in_what_repeats() {
        let two = |content| {
            let mut source = Source::new(content, 4096, 5);
            let (mut first, mut second) = (vec![9; 4096], vec![9; 4096]);
            source.fill(&mut first);
            source.fill(&mut second);
            (first, second)
        };
        let (first, second) = two(Content::Incompressible);
        assert!(first != second);
        let (first, second) = two(Content::Reused);
        assert!(first == second && first.iter().any(|byte| *byte != first[0]));
        assert_eq!(two(Content::Zero).0, vec![0; 4096]);
    }
}
