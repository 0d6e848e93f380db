//! The volumes of LVM2, from the text of the newest metadata of a physical volume.
//!
//! ```text
//!   label (in one of 4 sectors) -> header of the physical volume -> area of metadata -> newest text
//!   text: group { extent_size, physical_volumes { pv0 { id, pe_start } }, logical_volumes { root { segment1 { .. } } } }
//! ```
//! Linear volumes are read, also over several physical volumes of the same disk. Striped, mirrored and thin volumes, and volumes on other
//! disks, are listed without being read. The checksums of label and metadata are not checked.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::fields::{has, u32_at, u64_at};
use crate::placement::Placement;
use crate::units::{usize_of, usize_of_u32};
use crate::{Bytes, Fault, Partition, ReadAt, fault};

/// The longest name or number: LVM has 127 bytes for a name.
const WORD_BYTES_MAX: usize = 255;

/// The longest text that is read.
const TEXT_BYTES_MAX: u64 = 4 << 20;
/// The most volumes that are read of a group, and of a disk.
const VOLUMES_MAX: usize = 100;
/// The most values and sections of a text.
const VALUES_MAX: usize = 200_000;
/// The deepest section of a text.
const DEPTH_MAX: usize = 8;
/// The beginning of a physical volume that has its label.
const LABEL_BYTES: usize = 4 * 512;
/// A sector of LVM, whatever the disk has.
const SECTOR_BYTES: u64 = 512;
/// The length of the identity of a physical volume, without dashes.
const ID_BYTES: usize = 32;

/// The sector with the label.
pub(crate) fn label_of(begin: &[u8]) -> Option<Vec<u8>> {
    let mut sectors = begin.chunks_exact(512).take(4);
    let is_label = |sector: &&[u8]| has(sector, 0, b"LABELONE") && has(sector, 24, b"LVM2 001");
    sectors.find(is_label).map(<[u8]>::to_vec)
}

/// The header of a physical volume, which follows its label.
fn header_of(label: &[u8]) -> &[u8] {
    label.get(usize_of_u32(u32_at(label, 20))..).unwrap_or_default()
}

/// The newest metadata of the group of a physical volume.
fn metadata(bytes: &mut Bytes, label: &[u8]) -> Result<Section, Fault> {
    // After its name and size: a list of areas of data, and one of areas of metadata. Both end with zeroes.
    let mut pairs = header_of(label).get(40..).unwrap_or_default().chunks_exact(16);
    pairs.by_ref().find(|pair| u64_at(pair, 0) == 0);
    let area = pairs.next().map_or(0, |pair| u64_at(pair, 0));
    let mut head = [0; 512];
    bytes.read(area, &mut head)?;
    if area == 0 || !has(&head, 4, b" LVM2 x[5A%r0N*>") {
        return Err(fault("it has no LVM metadata area"));
    }
    let (area_bytes, at, len) = (u64_at(&head, 32), u64_at(&head, 40), u64_at(&head, 48));
    if len > TEXT_BYTES_MAX || at >= area_bytes || at < 512 {
        return Err(fault("the header of its LVM metadata area is invalid"));
    }
    // After its header, the area is a ring.
    let first = len.min(area_bytes - at);
    let mut text = vec![0; usize_of(len)];
    let (before, after) = text.split_at_mut(usize_of(first));
    bytes.read(area.saturating_add(at), before)?;
    bytes.read(area.saturating_add(512), after)?;
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    Reader { text, at: 0, left: VALUES_MAX }.section(0)
}

/// The names of the volumes of the group, as `group/volume`.
pub(crate) fn volumes(bytes: &mut Bytes, label: &[u8]) -> Result<Vec<String>, Fault> {
    Ok(Group::of(&metadata(bytes, label)?)?.volumes.into_iter().map(|volume| volume.name).collect())
}

/// A volume of a group, and where it is on a disk.
#[derive(Debug, PartialEq, Eq)]
pub struct LogicalVolume {
    /// Its name, as `group/volume`.
    pub name: String,
    /// Its place. A fault: why the volume is not read.
    pub placement: Result<Placement, Fault>,
}

/// The visible volumes of all groups that have physical volumes on a disk.
pub fn logical_volumes(disk: &Arc<dyn ReadAt>, physical: &[Partition]) -> Vec<LogicalVolume> {
    // Of each group the newest metadata: after a change that broke off, another physical volume may have the older ones.
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    let mut places: BTreeMap<Vec<u8>, Partition> = BTreeMap::new();
    for partition in physical {
        let mut bytes = Bytes::new(Arc::clone(disk), partition);
        let mut begin = vec![0; LABEL_BYTES.min(usize_of(bytes.len()))];
        let Some(label) = bytes.read(0, &mut begin).ok().and_then(|()| label_of(&begin)) else { continue };
        let Some(id) = header_of(&label).get(..ID_BYTES) else { continue };
        places.insert(id.to_vec(), *partition);
        let group = metadata(&mut bytes, &label).and_then(|section| Group::of(&section));
        let Ok(group) = group else { continue };
        if groups.get(&group.name).is_none_or(|other| other.sequence < group.sequence) {
            groups.insert(group.name.clone(), group);
        }
    }
    let placed = |volume: Volume| LogicalVolume {
        placement: volume.pieces.and_then(|pieces| placement(&pieces, &places)),
        name: volume.name,
    };
    let visible = |volume: &Volume| volume.is_visible;
    groups
        .into_values()
        .flat_map(|group| group.volumes)
        .filter(visible)
        .take(VOLUMES_MAX)
        .map(placed)
        .collect()
}

fn placement(pieces: &[Piece], places: &BTreeMap<Vec<u8>, Partition>) -> Result<Placement, Fault> {
    let mut placement = Placement::default();
    for piece in pieces {
        let partition =
            places.get(&piece.physical).ok_or_else(|| fault("a part of it is on another disk"))?;
        let end = piece.start.checked_add(piece.len).filter(|end| *end <= partition.len_bytes);
        if end.is_none() || piece.len == 0 {
            return Err(fault("it reaches past the end of its partition"));
        }
        placement.add(partition.offset_bytes.saturating_add(piece.start), piece.len);
    }
    if placement.len_bytes() == 0 {
        return Err(fault("it has no extents"));
    }
    Ok(placement)
}

/// Bytes of a physical volume.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    physical: Vec<u8>,
    start: u64,
    len: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Volume {
    name: String,
    is_visible: bool,
    pieces: Result<Vec<Piece>, Fault>,
}

#[derive(Debug, PartialEq, Eq)]
struct Group {
    name: String,
    sequence: u64,
    volumes: Vec<Volume>,
}

/// The identity of a physical volume, and where its extents begin.
struct Physical {
    id: Vec<u8>,
    first_byte: u64,
}

impl Group {
    fn of(text: &Section) -> Result<Self, Fault> {
        let mut sections = text.sections();
        let (name, group) = sections.next().ok_or_else(|| fault("its LVM metadata have no volume group"))?;
        let extent_bytes = group.number("extent_size").saturating_mul(SECTOR_BYTES);
        let mut physical = BTreeMap::new();
        if let Some(all) = group.section("physical_volumes") {
            for (name, section) in all.sections() {
                let id: Vec<u8> = section.text("id").bytes().filter(|byte| *byte != b'-').collect();
                let first_byte = section.number("pe_start").saturating_mul(SECTOR_BYTES);
                physical.insert(name.to_owned(), Physical { id, first_byte });
            }
        }
        let volume = |(own, section): (&str, &Section)| {
            let flags = section.list("status");
            let is_visible = flags.is_none_or(|flags| flags.iter().any(|flag| flag.is_text("VISIBLE")));
            Volume {
                name: format!("{name}/{own}"),
                is_visible,
                pieces: pieces(section, &physical, extent_bytes),
            }
        };
        let all = group.section("logical_volumes");
        let volumes = all.into_iter().flat_map(Section::sections).take(VOLUMES_MAX).map(volume).collect();
        Ok(Self { name: name.to_owned(), sequence: group.number("seqno"), volumes })
    }
}

/// The extents of a volume, in order.
fn pieces(
    volume: &Section,
    physical: &BTreeMap<String, Physical>,
    extent_bytes: u64,
) -> Result<Vec<Piece>, Fault> {
    let mut segments: Vec<&Section> = volume.sections().map(|(_, segment)| segment).collect();
    segments.sort_by_key(|segment| segment.number("start_extent"));
    let mut pieces = Vec::new();
    let mut next = 0;
    for segment in segments {
        let (kind, stripes) = (segment.text("type"), segment.number("stripe_count"));
        if kind != "striped" || stripes != 1 {
            let kind =
                if kind == "striped" { format!("striped ({stripes} stripes)") } else { kind.to_owned() };
            return Err(fault(format!("its type is {kind}, and only linear volumes can be read")));
        }
        let count = segment.number("extent_count");
        if segment.number("start_extent") != next || count == 0 {
            return Err(fault("its segments have gaps or overlap"));
        }
        next = next.saturating_add(count);
        let (name, first) = match segment.list("stripes") {
            Some([Value::Text(name), Value::Number(first)]) => (name, *first),
            _ => return Err(fault("one of its segments names no physical volume")),
        };
        let of =
            physical.get(name).ok_or_else(|| fault("one of its segments has an unknown physical volume"))?;
        let bytes =
            |extents: u64| extents.checked_mul(extent_bytes).ok_or_else(|| fault("its size exceeds 64 bits"));
        let start =
            bytes(first)?.checked_add(of.first_byte).ok_or_else(|| fault("its size exceeds 64 bits"))?;
        pieces.push(Piece { physical: of.id.clone(), start, len: bytes(count)? });
    }
    Ok(pieces)
}

/// A value of the text of metadata.
#[derive(Debug, PartialEq, Eq)]
enum Value {
    Number(u64),
    Text(String),
    List(Vec<Value>),
    Section(Section),
}

impl Value {
    fn is_text(&self, text: &str) -> bool {
        matches!(self, Self::Text(own) if own == text)
    }
}

/// Names and their values.
#[derive(Debug, Default, PartialEq, Eq)]
struct Section(Vec<(String, Value)>);

impl Section {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    fn number(&self, name: &str) -> u64 {
        if let Some(Value::Number(number)) = self.get(name) { *number } else { 0 }
    }

    fn text(&self, name: &str) -> &str {
        if let Some(Value::Text(text)) = self.get(name) { text } else { "" }
    }

    fn list(&self, name: &str) -> Option<&[Value]> {
        if let Some(Value::List(list)) = self.get(name) { Some(list) } else { None }
    }

    fn section(&self, name: &str) -> Option<&Self> {
        if let Some(Value::Section(section)) = self.get(name) { Some(section) } else { None }
    }

    fn sections(&self) -> impl Iterator<Item = (&str, &Self)> {
        self.0.iter().filter_map(|(name, value)| match value {
            Value::Section(section) => Some((name.as_str(), section)),
            _ => None,
        })
    }
}

/// Reads a text.
struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    /// How many values there may be.
    left: usize,
}

impl Reader<'_> {
    /// The next byte that is no blank and in no comment.
    fn peek(&mut self) -> Option<u8> {
        loop {
            match self.text.get(self.at).copied()? {
                b'#' => {
                    let rest = self.text.get(self.at..).unwrap_or_default();
                    self.at += rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
                }
                blank if blank.is_ascii_whitespace() => self.at += 1,
                byte => return Some(byte),
            }
        }
    }

    fn takes(&mut self, byte: u8) -> bool {
        let is_it = self.peek() == Some(byte);
        self.at += usize::from(is_it);
        is_it
    }

    fn word(&mut self) -> Result<String, Fault> {
        self.peek();
        let rest = self.text.get(self.at..).unwrap_or_default();
        let is_of_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-+./@:".contains(byte);
        let len = rest.iter().take_while(|byte| is_of_word(byte)).count();
        if len == 0 || len > WORD_BYTES_MAX {
            return Err(fault("its LVM metadata are damaged"));
        }
        self.at += len;
        Ok(String::from_utf8_lossy(rest.get(..len).unwrap_or_default()).into_owned())
    }

    /// Names and values up to the end of the section, or of the text.
    fn section(&mut self, depth: usize) -> Result<Section, Fault> {
        let mut section = Section::default();
        loop {
            match self.peek() {
                None if depth == 0 => return Ok(section),
                Some(b'}') if depth > 0 => {
                    self.at += 1;
                    return Ok(section);
                }
                _ => {}
            }
            let name = self.word()?;
            let value = if self.takes(b'{') {
                self.count(depth)?;
                Value::Section(self.section(depth + 1)?)
            } else if self.takes(b'=') {
                self.value(depth)?
            } else {
                return Err(fault("its LVM metadata are damaged"));
            };
            section.0.push((name, value));
        }
    }

    fn count(&mut self, depth: usize) -> Result<(), Fault> {
        let left = self.left.checked_sub(1).filter(|_| depth < DEPTH_MAX);
        self.left =
            left.ok_or_else(|| fault("its LVM metadata have too many values, or are nested too deeply"))?;
        Ok(())
    }

    fn value(&mut self, depth: usize) -> Result<Value, Fault> {
        self.count(depth)?;
        if self.takes(b'[') {
            let mut list = Vec::new();
            while !self.takes(b']') {
                list.push(self.value(depth + 1)?);
                self.takes(b',');
            }
            return Ok(Value::List(list));
        }
        if !self.takes(b'"') {
            let word = self.word()?;
            return Ok(word.parse().map_or(Value::Text(word), Value::Number));
        }
        let mut text = Vec::new();
        loop {
            let byte = self.text.get(self.at).copied();
            self.at += 1;
            match byte.ok_or_else(|| fault("its metadata break off"))? {
                b'"' => return Ok(Value::Text(String::from_utf8_lossy(&text).into_owned())),
                b'\\' => {
                    text.extend(self.text.get(self.at));
                    self.at += 1;
                }
                byte => text.push(byte),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metadata as `vgcfgbackup` of LVM2 2.03 writes them.
    const TEXT: &str = r#"vg0 {
id = "hX2oZc-7aRk-Q2dJ-6sYf-V3mU-Lw1e-b9TnKp"
seqno = 4
format = "lvm2"
status = ["RESIZEABLE", "READ", "WRITE"]
flags = []
extent_size = 8192
max_lv = 0
metadata_copies = 0

physical_volumes {

pv0 {
id = "AAAAAA-AAAA-AAAA-AAAA-AAAA-AAAA-AAAAAA"
device = "/dev/vda2"

status = ["ALLOCATABLE"]
dev_size = 409600
pe_start = 2048
pe_count = 49
}

pv1 {
id = "BBBBBB-BBBB-BBBB-BBBB-BBBB-BBBB-BBBBBB"
pe_start = 2048
}
}

logical_volumes {

root {
id = "y"
status = ["READ", "WRITE", "VISIBLE"]
segment_count = 2

segment1 {
start_extent = 0
extent_count = 3
type = "striped"
stripe_count = 1	# linear

stripes = [
"pv0", 5
]
}
segment2 {
start_extent = 3
extent_count = 2
type = "striped"
stripe_count = 1
stripes = ["pv1", 0]
}
}

fast {
status = ["READ", "VISIBLE"]
segment1 {
start_extent = 0
extent_count = 2
type = "striped"
stripe_count = 2
stripes = ["pv0", 9, "pv1", 9]
}
}

pool_tdata {
status = ["READ", "WRITE"]
segment1 {
start_extent = 0
extent_count = 1
type = "thin-pool"
}
}
}
}
# Generated by LVM2 version 2.03.16(2): { "quoted }
contents = "Text Format Volume \"Group\""
version = 1
"#;

    fn group(text: &str) -> Result<Group, Fault> {
        let section = Reader { text: text.as_bytes(), at: 0, left: VALUES_MAX }.section(0)?;
        Group::of(&section)
    }

    #[test]
    fn volumes_are_those_of_their_section() {
        let group = group(TEXT).unwrap();
        assert_eq!((group.name.as_str(), group.sequence), ("vg0", 4));
        let names: Vec<_> =
            group.volumes.iter().map(|volume| (volume.name.as_str(), volume.is_visible)).collect();
        assert_eq!(names, [("vg0/root", true), ("vg0/fast", true), ("vg0/pool_tdata", false)]);
        let why: Vec<_> = group.volumes.iter().filter_map(|volume| volume.pieces.as_ref().err()).collect();
        assert!(why[0].to_string().contains("striped (2 stripes)"), "{why:?}");
        assert!(why[1].to_string().contains("thin-pool"), "{why:?}");
    }

    #[test]
    fn a_linear_volume_is_where_its_extents_are() {
        let mut group = group(TEXT).unwrap();
        let pieces = group.volumes.remove(0).pieces.unwrap();
        let (extent, start) = (4 << 20, 1 << 20);
        let place = |id: u8, number, offset_bytes| {
            (vec![id; ID_BYTES], Partition { number, offset_bytes, len_bytes: 100 << 20 })
        };
        let mut places = BTreeMap::from([place(b'A', 2, 64 << 20), place(b'B', 3, 200 << 20)]);
        let mut expected = Placement::default();
        expected.add((64 << 20) + start + 5 * extent, 3 * extent);
        expected.add((200 << 20) + start, 2 * extent);
        assert_eq!(placement(&pieces, &places), Ok(expected));
        places.get_mut(&vec![b'B'; ID_BYTES]).unwrap().len_bytes = 2 * extent;
        assert!(placement(&pieces, &places).unwrap_err().to_string().contains("past the end"));
        places.remove(&vec![b'B'; ID_BYTES]);
        assert!(placement(&pieces, &places).unwrap_err().to_string().contains("another disk"));
    }

    #[test]
    fn a_text_that_makes_no_sense_is_refused() {
        let deep = "a {".repeat(DEPTH_MAX + 1);
        let many = format!("a {{\n{}}}\n", "b = 1\n".repeat(VALUES_MAX + 1));
        for odd in ["", "a", "a {", "a = \"b", "a = [", "a = [1", "= 1", "a { } }", &deep, &many] {
            assert!(group(odd).is_err(), "{:?}", &odd[..odd.len().min(20)]);
        }
        // A gap between two segments.
        let gap = TEXT.replace("start_extent = 3", "start_extent = 4");
        assert!(group(&gap).unwrap().volumes[0].pieces.is_err());
    }
}
