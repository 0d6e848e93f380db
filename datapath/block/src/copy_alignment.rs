//! Chooses the offset in a page at which a buffer begins, so that the kernel copies fast from it.
//!
//! Some processors copy at a seventh of their speed if the destination's offset in its page is 1 to 16 bytes
//! larger than the source's (`rep movsb` on AMD processors with FSRM: 1.9 GB/s instead of 14). Allocators
//! place large buffers 16 bytes into a page. So whole pages read into an unaligned buffer meet this case. The
//! difference is measured, because no processor flag shows it.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;

const PAGE_BYTES: usize = 4096;
/// A cache line of the processor. A buffer begins 16 bytes after this offset only by chance.
const APART_BYTES: usize = 64;
/// The offset at which allocators place large buffers.
const ALLOCATED_AT: usize = 16;

/// How many bytes are copied for the measurement, and how often. The fastest round counts, because other work
/// uses the processor too.
const COPIED_BYTES: usize = 64 << 10;
const ROUNDS: usize = 12;
/// A processor is treated as affected if the copy is slower at least by this factor.
const SLOW: u32 = 2;

/// The best offset of a buffer in its first page.
pub(crate) fn lead_bytes() -> usize {
    static LEAD: OnceLock<usize> = OnceLock::new();
    *LEAD.get_or_init(|| match measure() {
        Ok((at_16, at_64)) if at_16 > at_64 * SLOW => {
            tracing::debug!(
                ?at_16,
                ?at_64,
                "this processor copies slowly to 16 bytes into a page: buffers begin 64 bytes into one"
            );
            APART_BYTES
        }
        // If it cannot be measured, nothing is shifted.
        _ => 0,
    })
}

/// The shortest time of a copy from a page's start to 16 bytes into a page, and to 64 bytes into a page.
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
