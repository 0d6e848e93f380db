//! Whether a volume was unmounted: the flag in `$Volume`, and the restart pages of `$LogFile`.
//!
//! The log is not replayed. What a running Windows changed last may be in the log only, until its lazy writer wrote it.

use super::fields::{place_at, u16_at, u32_at, u64_at};
use super::record::{fix_up, types};
use super::volume::{Volume, unnamed};
use crate::units::usize_of;

const VOLUME_RECORD: u64 = 3;
const LOG_RECORD: u64 = 2;
/// A bit of the flags of `$Volume`.
const DIRTY: u16 = 1;
/// How much of the log is read: its two restart pages.
const PAGE_BYTES_MAX: usize = 64 << 10;
/// A list of clients that has none.
const NO_CLIENT: u16 = 0xffff;
/// A bit of the flags of a restart area.
const CLEAN: u16 = 2;

/// Whether the volume says that it was not unmounted.
pub(super) fn is_dirty(volume: &mut Volume) -> bool {
    let information = volume.contents(VOLUME_RECORD, types::VOLUME_INFORMATION, &unnamed).ok().flatten();
    let value = information.and_then(|information| match information.size_bytes() {
        12..=64 => volume.whole(&information).ok(),
        _ => None,
    });
    let flags = value.and_then(|value| u16_at(&value, 10)).unwrap_or(0);
    flags & DIRTY != 0 || has_open_log(volume)
}

/// Whether somebody had the log open when it was written last.
fn has_open_log(volume: &mut Volume) -> bool {
    let Ok(Some(log)) = volume.contents(LOG_RECORD, types::DATA, &unnamed) else { return false };
    let mut start = vec![0; 2 * PAGE_BYTES_MAX];
    if volume.read(&log, 0, &mut start).is_err() {
        return false;
    }
    let page_bytes = u32_at(&start, 16).map_or(0, |len| usize_of(len.into()));
    if !(512..=PAGE_BYTES_MAX).contains(&page_bytes) || !page_bytes.is_power_of_two() {
        return false;
    }
    let pages = start.chunks_exact_mut(page_bytes).take(2);
    let states = pages.filter_map(|page| {
        fix_up(page, *b"RSTR").ok()?;
        let area = page.get(place_at(page, 24)?..)?;
        let is_open = u16_at(area, 12)? != NO_CLIENT && u16_at(area, 14)? & CLEAN == 0;
        Some((u64_at(area, 0)?, is_open))
    });
    states.max().is_some_and(|(_, is_open)| is_open)
}
