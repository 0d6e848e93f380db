//! Converts a server's extents, of any length, to extents on logical blocks.

use headwater_block::{Extent, ExtentKind};

use crate::wire::transmission::state;

/// Extents of at most `len` bytes, aligned to `block`. A block with two kinds of extents counts as data. The
/// last block may be incomplete if the answer ends in its middle; it is then left out unless it is the first
/// one.
pub(super) fn aligned(pairs: &[(u32, u32)], len: u64, block: u64, max_extents: usize) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    let mut add = |len: u64, kind: ExtentKind| {
        let full = out.len() >= max_extents;
        match out.last_mut() {
            _ if len == 0 => true,
            Some(last) if last.kind == kind => {
                last.len = last.len.saturating_add(len);
                true
            }
            _ if full => false,
            _ => {
                out.push(Extent { len, kind });
                true
            }
        }
    };
    // Everything before `done` has an extent. The bytes after it are less than a block, of mixed kinds.
    let mut done = 0_u64;
    let mut at = 0_u64;
    for (length, flags) in pairs {
        let end = at.saturating_add(u64::from(*length)).min(len);
        let kind = kind_of(*flags);
        if done < at {
            // The block in which the previous extent ended.
            let block_end = at.next_multiple_of(block).min(len);
            if end < block_end {
                at = end;
                continue;
            }
            if !add(block_end.saturating_sub(done), ExtentKind::Data) {
                return out;
            }
            done = block_end;
        }
        let whole_end =
            if end == len { end } else { end.checked_div(block).unwrap_or(0).saturating_mul(block) };
        if whole_end > done {
            if !add(whole_end.saturating_sub(done), kind) {
                return out;
            }
            done = whole_end;
        }
        at = end;
    }
    if done == 0 && at > 0 {
        // Not even one block is known completely. Data is always a correct answer.
        add(block.min(len), ExtentKind::Data);
    }
    out
}

fn kind_of(flags: u32) -> ExtentKind {
    // If a hole is not reported to read as zeroes, it may contain anything.
    match (flags & state::ZERO != 0, flags & state::HOLE != 0) {
        (true, true) => ExtentKind::Hole,
        (true, false) => ExtentKind::Zero,
        (false, _) => ExtentKind::Data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_of_two_kinds_are_data() {
        let pairs = [(1024, 3), (100, 0), (100, 3), (312, 0), (512, 3), (600, 2), (936, 3)];
        let out: Vec<_> = aligned(&pairs, 3584, 512, 99).iter().map(|e| (e.len, e.kind)).collect();
        let expected = [
            (1024, ExtentKind::Hole),
            (512, ExtentKind::Data),
            (512, ExtentKind::Hole),
            (512, ExtentKind::Zero),
            (512, ExtentKind::Data),
            (512, ExtentKind::Hole),
        ];
        assert_eq!(out, expected);
    }

    proptest! {
        #[test]
        fn every_byte_called_zero_is_zero(
            pairs in prop::collection::vec((1..1500_u32, 0..4_u32), 1..20), blocks in 1..20_u64, max in 1..6_usize,
        ) {
            let len = blocks * 512;
            let out = aligned(&pairs, len, 512, max);
            prop_assert!(!out.is_empty() && out.len() <= max);
            let mut truth: Vec<bool> =
                pairs.iter().flat_map(|(n, f)| std::iter::repeat_n(f & 2 != 0, *n as usize)).collect();
            truth.truncate(len as usize);
            let mut at = 0;
            for extent in &out {
                prop_assert!(extent.len > 0 && extent.len % 512 == 0);
                if extent.kind != ExtentKind::Data {
                    prop_assert!(truth[at..at + extent.len as usize].iter().all(|zero| *zero));
                }
                at += extent.len as usize;
            }
            prop_assert!(at as u64 <= len);
        }
    }
}
