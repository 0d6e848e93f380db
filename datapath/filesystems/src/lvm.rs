//! The names of the volumes of an LVM2 physical volume, from the text of its newest metadata.
//!
//! ```text
//!   label (in one of 4 sectors) -> header of the physical volume -> area of metadata -> newest text
//! ```
//! Only names are read. The contents of the volumes are not looked into.

use crate::fields::{has, u32_at, u64_at};
use crate::units::{usize_of, usize_of_u32};
use crate::{Bytes, Fault, fault};

/// The longest text that is read.
const TEXT_BYTES_MAX: u64 = 4 << 20;
/// The most volumes that are named.
const VOLUMES_MAX: usize = 100;

/// The sector with the label.
pub(crate) fn label_of(begin: &[u8]) -> Option<Vec<u8>> {
    let mut sectors = begin.chunks_exact(512).take(4);
    let is_label = |sector: &&[u8]| has(sector, 0, b"LABELONE") && has(sector, 24, b"LVM2 001");
    sectors.find(is_label).map(<[u8]>::to_vec)
}

/// The volumes of the group, as `group/volume`.
pub(crate) fn volumes(bytes: &mut Bytes, label: &[u8]) -> Result<Vec<String>, Fault> {
    let header = label.get(usize_of_u32(u32_at(label, 20))..).unwrap_or_default();
    // After its name and size: a list of areas of data, and one of areas of metadata. Both end with zeroes.
    let mut pairs = header.get(40..).unwrap_or_default().chunks_exact(16);
    pairs.by_ref().find(|pair| u64_at(pair, 0) == 0);
    let area = pairs.next().map_or(0, |pair| u64_at(pair, 0));
    let mut head = [0; 512];
    bytes.read(area, &mut head)?;
    if area == 0 || !has(&head, 4, b" LVM2 x[5A%r0N*>") {
        return Err(fault("it has no area of metadata"));
    }
    let (area_bytes, at, len) = (u64_at(&head, 32), u64_at(&head, 40), u64_at(&head, 48));
    if len > TEXT_BYTES_MAX || at >= area_bytes || at < 512 {
        return Err(fault("its metadata make no sense"));
    }
    // The area is a ring behind its header.
    let first = len.min(area_bytes - at);
    let mut text = vec![0; usize_of(len)];
    let (before, after) = text.split_at_mut(usize_of(first));
    bytes.read(area.saturating_add(at), before)?;
    bytes.read(area.saturating_add(512), after)?;
    Ok(names(&String::from_utf8_lossy(&text)))
}

/// The names in a text of metadata: of its first section, and of the sections of its section `logical_volumes`.
fn names(text: &str) -> Vec<String> {
    let mut sections: Vec<String> = Vec::new();
    let mut found = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(name) = line.strip_suffix('{') {
            sections.push(name.trim().to_owned());
            if let [group, list, volume] = &*sections
                && list == "logical_volumes"
                && found.len() < VOLUMES_MAX
            {
                found.push(format!("{group}/{volume}"));
            }
        } else if line == "}" {
            sections.pop();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_those_of_their_section() {
        let text = "vg0 {\nid = \"x\"\nphysical_volumes {\npv0 {\n}\n}\n\n# Generated {\nlogical_volumes {\n\
                    root {\nid = \"y\"\nsegment1 {\n}\n}\nhome {\n}\n}\n}\ncontents = \"Text\"\n";
        assert_eq!(names(text), ["vg0/root", "vg0/home"]);
    }
}
