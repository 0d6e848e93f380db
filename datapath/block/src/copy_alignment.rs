//! How far into a page memory begins that the kernel copies to others.
//!
//! Some processors copy to an address that is 1 to 16 bytes further into its page than the source at a seventh of their speed (`rep movsb`
//! on AMD's with FSRM: 1.9 GB/s where all other distances have 14). Allocators put large buffers 16 bytes into a page, so
//! that is what a reader of whole pages meets whose buffer is not aligned to one. Measured, because no flag of a processor tells it.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;

const PAGE_BYTES: usize = 4096;
/// A line of the processor's caches: nobody's buffer begins 16 bytes after it, but by chance.
const APART_BYTES: usize = 64;
/// Where allocators put large buffers.
const ALLOCATED_AT: usize = 16;

/// What is copied to measure it, and how often: the fastest counts, for others use the processor too.
const COPIED_BYTES: usize = 64 << 10;
const ROUNDS: usize = 12;
/// How much slower a copy is at least where it is slow.
const SLOW: u32 = 2;

/// How many bytes into its first page memory begins best.
pub(crate) fn lead_bytes() -> usize {
    static LEAD: OnceLock<usize> = OnceLock::new();
    *LEAD.get_or_init(|| match measure() {
        Ok((near, copy_alignment)) if near > copy_alignment * SLOW => {
            tracing::debug!(
                ?near,
                ?copy_alignment,
                "this processor copies slowly to a little further into a page"
            );
            APART_BYTES
        }
        // Where it cannot be measured it is as it always was.
        _ => 0,
    })
}

/// The fastest copy from the start of a page to 16 bytes into one, and to 64.
fn measure() -> std::io::Result<(Duration, Duration)> {
    let source = rustix::fs::memfd_create("headwater-apart", MemfdFlags::CLOEXEC)?;
    let mut memory = vec![1; COPIED_BYTES + 2 * PAGE_BYTES];
    rustix::io::pwrite(&source, memory.get(..COPIED_BYTES).unwrap_or_default(), 0)?;
    let page = memory.as_ptr().align_offset(PAGE_BYTES);
    let mut fastest = [Duration::MAX; 2];
    for _ in 0..ROUNDS {
        for (fastest, distance) in fastest.iter_mut().zip([ALLOCATED_AT, APART_BYTES]) {
            let at = page.saturating_add(distance);
            let into = memory.get_mut(at..at.saturating_add(COPIED_BYTES)).unwrap_or_default();
            *fastest = copy(source.as_fd(), into)?.min(*fastest);
        }
    }
    Ok((fastest[0], fastest[1]))
}

fn copy(source: impl AsFd, into: &mut [u8]) -> std::io::Result<Duration> {
    let started = Instant::now();
    let copied = rustix::io::pread(source, &mut *into, 0)?;
    let took = started.elapsed();
    if copied == into.len() { Ok(took) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_begins_at_a_fast_alignment() {
        assert!(measure().is_ok());
        assert!([0, APART_BYTES].contains(&lead_bytes()));
    }
}
