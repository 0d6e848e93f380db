//! Generates the data of writes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Serialize, Serializer};

use headwater_block::BLOCK_BYTES;

use crate::random::Random;

/// A class of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bytes from random offsets of a pool of 16 MiB of random bytes: blocks are rarely equal, and no block is
    /// compressible.
    Incompressible,
    /// The same pseudo-random buffer in all writes, like Iometer 2006: all writes are equal.
    Reused,
    /// Zeroes.
    Zero,
    /// Blocks of a file, for example of a guest's disk.
    Sample(Sample),
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Self::Incompressible => "incompressible",
            Self::Reused => "reused",
            Self::Zero => "zero",
            Self::Sample(_) => "sample",
        })
    }
}

/// Parts of a file, read once and kept until the program ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sample(&'static [u8]);

impl std::fmt::Debug for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sample({} bytes)", self.0.len())
    }
}

/// Length of a part, in bytes.
const PART_BYTES: usize = 64 << 10;

/// The number of parts in a sample: 64 MiB.
const PARTS: u64 = 1024;

/// The fewest parts for a sample. With fewer, blocks would repeat often, and repeated blocks cost a cache nothing.
const LEAST_PARTS: usize = 256;

impl Sample {
    /// Reads up to 64 MiB: the first parts that are not only zeroes, of up to 16,384 parts that are spread evenly
    /// over the file. So of a file that is full of data, only the beginning is read.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_parts(path).with_context(|| format!("cannot use {} as data of writes", path.display()))
    }

    fn read_parts(path: &Path) -> Result<Self> {
        let mut file = File::open(path)?;
        let mut magic = [0; 4];
        if file.read_exact(&mut magic).is_ok() && &magic == b"QFI\xfb" {
            bail!(
                "it is a qcow2 file, whose clusters may be compressed: convert it with qemu-img convert -O raw"
            );
        }
        let len = file.metadata()?.len();
        let all = len / PART_BYTES as u64;
        let mut bytes = Vec::new();
        let mut part = vec![0; PART_BYTES];
        // In a sparse file most parts are zeroes, so more parts are examined.
        let looked_at = all.min(PARTS * 16);
        for number in 0..looked_at {
            file.read_exact_at(&mut part, number * all / looked_at * PART_BYTES as u64)?;
            if part.iter().any(|byte| *byte != 0) {
                bytes.extend_from_slice(&part);
            }
            if bytes.len() == PARTS as usize * PART_BYTES {
                break;
            }
        }
        if bytes.len() < LEAST_PARTS * PART_BYTES {
            bail!(
                "it has {} of data, but at least {} are needed",
                headwater_block::size::format(bytes.len() as u64),
                headwater_block::size::format((LEAST_PARTS * PART_BYTES) as u64)
            );
        }
        Ok(Self(Vec::leak(bytes)))
    }
}

/// The pool of random bytes that incompressible requests are copied from, at random offsets. Generating new bytes for
/// each request would take longer than a write to RAM. Iometer's pattern "full random" does the same.
const POOL_BYTES: usize = 16 << 20;

/// Fills buffers with data of one class.
pub(super) struct Source {
    content: Content,
    random: Random,
    /// The bytes that are copied.
    bytes: Vec<u8>,
}

impl Source {
    /// A source for requests of this length.
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
                // Equal in every run, like Iometer's buffer.
                Random::new(1).fill(&mut bytes);
            }
            Content::Zero | Content::Sample(_) => {}
        }
        Self { content, random, bytes }
    }

    pub(super) fn fill(&mut self, buffer: &mut [u8]) {
        let from = match self.content {
            Content::Incompressible => self.random.below(POOL_BYTES as u64) as usize,
            Content::Reused => 0,
            Content::Zero => return buffer.fill(0),
            Content::Sample(sample) => return self.fill_from(sample.0, buffer),
        };
        buffer.copy_from_slice(&self.bytes[from..from + buffer.len()]);
    }

    /// Copies from a random block of a sample; after its end, continues at its beginning.
    fn fill_from(&mut self, sample: &[u8], buffer: &mut [u8]) {
        let block_bytes = BLOCK_BYTES as usize;
        let mut from = self.random.below((sample.len() / block_bytes) as u64) as usize * block_bytes;
        let mut filled = 0;
        while filled < buffer.len() {
            let count = (buffer.len() - filled).min(sample.len() - from);
            buffer[filled..filled + count].copy_from_slice(&sample[from..from + count]);
            filled += count;
            from = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_differ_in_repeated_blocks() {
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

    #[test]
    fn a_sample_has_the_data_of_a_file_and_none_of_its_holes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.raw");
        let file = File::create(&path).unwrap();
        file.set_len(4 << 30).unwrap();
        assert!(format!("{:#}", Sample::read(&path).unwrap_err()).contains("it has 0 B of data"));
        // Each block contains its number, and the data is in the middle of the file.
        let block = |number: u64| number.to_le_bytes().repeat(512);
        let data: Vec<u8> = (1..=16 * 1024).flat_map(block).collect();
        file.write_all_at(&data, 2 << 30).unwrap();
        let content = Content::Sample(Sample::read(&path).unwrap());
        let mut source = Source::new(content, 8192, 3);
        let (mut first, mut second) = (vec![0; 8192], vec![0; 8192]);
        source.fill(&mut first);
        source.fill(&mut second);
        assert!(first != second);
        for buffer in [first, second] {
            for written in buffer.chunks(4096) {
                let number = u64::from_le_bytes(written[..8].try_into().unwrap());
                assert!((1..=16 * 1024).contains(&number) && written == block(number), "{number}");
            }
        }
        assert_eq!(serde_json::to_string(&content).unwrap(), "\"sample\"");
        std::fs::write(&path, b"QFI\xfb and more").unwrap();
        assert!(format!("{:#}", Sample::read(&path).unwrap_err()).contains("qemu-img convert"));
    }
}
