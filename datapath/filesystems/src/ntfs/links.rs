//! Reparse points that are links: symbolic links, mount points of directories, and the links of WSL.

use super::fields::{place_at, u32_at};
use super::record::push_name;

/// The longest reparse data that Windows takes.
pub(super) const REPARSE_BYTES_MAX: u64 = 16 << 10;

const MOUNT_POINT: u32 = 0xa000_0003;
const SYMBOLIC_LINK: u32 = 0xa000_000c;
const WSL_LINK: u32 = 0xa000_001d;

/// Whether a tag is that of a link.
pub(super) fn is_link(tag: u32) -> bool {
    matches!(tag, MOUNT_POINT | SYMBOLIC_LINK | WSL_LINK)
}

/// The target of a link.
pub(super) fn target(value: &[u8]) -> Option<Vec<u8>> {
    let data = value.get(8..)?;
    let names = match u32_at(value, 0)? {
        // A version, and UTF-8.
        WSL_LINK => return data.get(4..).map(<[u8]>::to_vec),
        MOUNT_POINT => data.get(8..)?,
        SYMBOLIC_LINK => data.get(12..)?,
        _ => return None,
    };
    let name = names.get(place_at(data, 0)?..)?.get(..place_at(data, 2)?)?;
    let mut target = Vec::new();
    // It is a path, which may have slashes.
    for (number, part) in name.as_chunks().0.split(|unit| *unit == [b'/', 0]).enumerate() {
        if number > 0 {
            target.push(b'/');
        }
        push_name(part.as_flattened(), &mut target);
    }
    Some(target)
}
