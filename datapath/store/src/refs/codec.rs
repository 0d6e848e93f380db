//! Encodes and decodes the file that lists the versions of an image.
//!
//! Format 2 is written. Format 1, which has no channels, can be read too; its `note` field contains what
//! format 2 calls `source`.
//!
//! Only the newest positions of a channel are kept. If older positions were dropped, the oldest kept position
//! is written twice in a row. The duplicate is the marker for that (`Image::cut_short`).

use std::collections::HashSet;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::ImageName;
use crate::refs::{
    AUTHOR_MAX_BYTES, CHANNEL_PAST_MAX, Channel, Image, NOTE_MAX_BYTES, Pointer, VERSION_OBJECTS_MAX,
    VERSIONS_MAX, Version,
};

const MAGIC: [u8; 8] = *b"HWREFS\n\0";
const FORMAT: u32 = 2;
const FORMAT_WITHOUT_CHANNELS: u32 = 1;

/// The most pointers in a file: two channels can be set.
const POINTERS_MAX: usize = 2 * CHANNEL_PAST_MAX;
const SCHEDULED_MAX: usize = 2;

/// The flags of a version.
const RETIRED: u32 = 1;
const KEEPS_IDENTITY: u32 = 2;

impl Image {
    /// The file's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, StoreError> {
        let mut out = Vec::with_capacity(256);
        out.extend_from_slice(&MAGIC);
        put_u32(&mut out, FORMAT);
        put_u32(&mut out, self.next_number);
        put_len(&mut out, "versions of an image", self.versions.len(), VERSIONS_MAX)?;
        put_len(&mut out, "bytes of a name", self.name.as_str().len(), crate::name::NAME_MAX)?;
        let positions = self.marked_positions();
        put_len(&mut out, "positions of channels", positions.len(), POINTERS_MAX)?;
        put_len(&mut out, "scheduled promotions", self.scheduled.len(), SCHEDULED_MAX)?;
        out.extend_from_slice(self.name.as_str().as_bytes());
        for pointer in positions.into_iter().chain(&self.scheduled) {
            put_pointer(&mut out, pointer)?;
        }
        for version in &self.versions {
            put_version(&mut out, version)?;
        }
        let sum = Hash::of(&out);
        out.extend_from_slice(&sum.0);
        Ok(out)
    }

    /// Decodes a file in `images/`. `name` is the file's name.
    pub fn decode(name: &ImageName, bytes: &[u8]) -> Result<Self, StoreError> {
        let damaged = |why: &str| {
            StoreError::new(
                StoreErrorKind::Damaged,
                format!("the list of versions of image '{name}' is damaged: {why}"),
            )
        };
        if !bytes.starts_with(&MAGIC) {
            return Err(damaged("its first bytes are wrong"));
        }
        let mut format = Cursor(bytes.get(MAGIC.len()..).unwrap_or_default());
        let has_channels = match format.u32() {
            Some(FORMAT) => true,
            Some(FORMAT_WITHOUT_CHANNELS) => false,
            Some(other) => {
                return Err(StoreError::new(
                    StoreErrorKind::UnknownFormat,
                    format!(
                        "the list of versions of image '{name}' has format {other}; this release reads formats up \
                         to {FORMAT}: use the release that wrote it, or a later one"
                    ),
                ));
            }
            None => return Err(damaged("it is incomplete")),
        };
        let (body, sum) = bytes.split_last_chunk::<32>().ok_or_else(|| damaged("it is incomplete"))?;
        if Hash::of(body).0 != *sum {
            return Err(damaged("its checksum does not match"));
        }
        let mut cursor = Cursor(body.get(MAGIC.len() + 4..).unwrap_or_default());
        let image = take_image(&mut cursor, has_channels)
            .ok_or_else(|| damaged("it is incomplete or has invalid values"))?;
        if image.name != *name {
            return Err(damaged(&format!("it belongs to image '{}'", image.name)));
        }
        if !cursor.0.is_empty() {
            return Err(damaged("it is too long"));
        }
        if image.pointers.iter().chain(&image.scheduled).any(|pointer| !image.has(pointer.version)) {
            return Err(damaged("a channel points to a version that is not listed"));
        }
        Ok(image)
    }

    /// The positions as they are written, with markers.
    fn marked_positions(&self) -> Vec<&Pointer> {
        let mut to_mark = self.cut_short.clone();
        let mut positions = Vec::new();
        for pointer in &self.pointers {
            if to_mark.remove(&pointer.channel) {
                positions.push(pointer);
            }
            positions.push(pointer);
        }
        positions
    }

    fn has(&self, number: u32) -> bool {
        self.versions.binary_search_by_key(&number, |version| version.number).is_ok()
    }
}

fn put_u32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put_len(out: &mut Vec<u8>, what: &str, len: usize, max: usize) -> Result<(), StoreError> {
    match u32::try_from(len) {
        Ok(number) if len <= max => {
            put_u32(out, number);
            Ok(())
        }
        _ => Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!("{what}: {len}, but at most {max} are allowed"),
        )),
    }
}

fn put_pointer(out: &mut Vec<u8>, pointer: &Pointer) -> Result<(), StoreError> {
    put_u32(out, pointer.channel.code());
    put_u32(out, pointer.version);
    out.extend_from_slice(&pointer.at_s.to_le_bytes());
    put_len(out, "bytes of an author", pointer.author.len(), AUTHOR_MAX_BYTES)?;
    out.extend_from_slice(pointer.author.as_bytes());
    Ok(())
}

fn put_version(out: &mut Vec<u8>, version: &Version) -> Result<(), StoreError> {
    put_u32(out, version.number);
    put_len(out, "bytes of a note", version.note.len(), NOTE_MAX_BYTES)?;
    put_len(out, "objects of a version", version.objects.len(), VERSION_OBJECTS_MAX)?;
    out.extend_from_slice(&version.created_at_s.to_le_bytes());
    out.extend_from_slice(&version.size_bytes.to_le_bytes());
    out.extend_from_slice(&version.stored_bytes.to_le_bytes());
    out.extend_from_slice(&version.manifest.0);
    put_len(out, "bytes of a source", version.source.len(), NOTE_MAX_BYTES)?;
    put_len(out, "bytes of an author", version.author.len(), AUTHOR_MAX_BYTES)?;
    let retired = if version.retired { RETIRED } else { 0 };
    let keeps_identity = if version.keeps_identity { KEEPS_IDENTITY } else { 0 };
    put_u32(out, retired | keeps_identity);
    out.extend_from_slice(version.note.as_bytes());
    out.extend_from_slice(version.source.as_bytes());
    out.extend_from_slice(version.author.as_bytes());
    for object in &version.objects {
        out.extend_from_slice(&object.0);
    }
    Ok(())
}

fn take_image(cursor: &mut Cursor<'_>, has_channels: bool) -> Option<Image> {
    let next_number = cursor.u32()?;
    let count = cursor.len(VERSIONS_MAX)?;
    let name_len = cursor.len(crate::name::NAME_MAX)?;
    let (mut pointer_count, mut scheduled_count) = (0, 0);
    if has_channels {
        pointer_count = cursor.len(POINTERS_MAX)?;
        scheduled_count = cursor.len(SCHEDULED_MAX)?;
    }
    let name: ImageName = cursor.text(name_len)?.parse().ok()?;
    let positions = (0..pointer_count).map(|_| take_pointer(cursor)).collect::<Option<Vec<_>>>()?;
    let (pointers, cut_short) = without_markers(positions);
    let scheduled = (0..scheduled_count).map(|_| take_pointer(cursor)).collect::<Option<Vec<_>>>()?;
    let mut versions = Vec::new();
    let mut last = 0;
    for _ in 0..count {
        let version = take_version(cursor, has_channels)?;
        if version.number <= last || version.number >= next_number {
            return None;
        }
        last = version.number;
        versions.push(version);
    }
    Some(Image { name, versions, pointers, cut_short, scheduled, next_number })
}

/// The reverse of [`Image::marked_positions`]. Two positions that differ only in their time are not a marker.
fn without_markers(positions: Vec<Pointer>) -> (Vec<Pointer>, HashSet<Channel>) {
    let (mut pointers, mut cut_short, mut seen) = (Vec::new(), HashSet::new(), HashSet::new());
    let mut positions = positions.into_iter().peekable();
    while let Some(position) = positions.next() {
        if seen.insert(position.channel) && positions.peek() == Some(&position) {
            cut_short.insert(position.channel);
        } else {
            pointers.push(position);
        }
    }
    (pointers, cut_short)
}

fn take_pointer(cursor: &mut Cursor<'_>) -> Option<Pointer> {
    let channel = Channel::from_code(cursor.u32()?)?;
    let version = cursor.u32()?;
    let at_s = cursor.u64()?;
    let author_len = cursor.len(AUTHOR_MAX_BYTES)?;
    let author = cursor.text(author_len)?.to_owned();
    Some(Pointer { channel, version, at_s, author })
}

fn take_version(cursor: &mut Cursor<'_>, has_channels: bool) -> Option<Version> {
    let number = cursor.u32()?;
    let note_len = cursor.len(NOTE_MAX_BYTES)?;
    let object_count = cursor.len(VERSION_OBJECTS_MAX)?;
    let created_at_s = cursor.u64()?;
    let size_bytes = cursor.u64()?;
    let stored_bytes = cursor.u64()?;
    let manifest = cursor.hash()?;
    let (mut source_len, mut author_len, mut flags) = (0, 0, 0);
    if has_channels {
        source_len = cursor.len(NOTE_MAX_BYTES)?;
        author_len = cursor.len(AUTHOR_MAX_BYTES)?;
        flags = cursor.u32()?;
    }
    let mut note = cursor.text(note_len)?.to_owned();
    let mut source = cursor.text(source_len)?.to_owned();
    let author = cursor.text(author_len)?.to_owned();
    if !has_channels {
        std::mem::swap(&mut note, &mut source);
    }
    let objects = (0..object_count).map(|_| cursor.hash()).collect::<Option<Vec<_>>>()?;
    if flags & !(RETIRED | KEEPS_IDENTITY) != 0 {
        return None;
    }
    Some(Version {
        number,
        manifest,
        created_at_s,
        size_bytes,
        stored_bytes,
        source,
        note,
        author,
        retired: flags & RETIRED != 0,
        keeps_identity: flags & KEEPS_IDENTITY != 0,
        objects,
    })
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn text(&mut self, len: usize) -> Option<&'a str> {
        std::str::from_utf8(self.take(len)?).ok()
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn hash(&mut self) -> Option<Hash> {
        self.array().map(Hash)
    }

    fn len(&mut self, max: usize) -> Option<usize> {
        usize::try_from(self.u32()?).ok().filter(|len| *len <= max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Selector;
    use proptest::prelude::*;

    fn version(number: u32, note: &str, objects: &[&[u8]]) -> Version {
        Version {
            number,
            manifest: Hash::of(&number.to_le_bytes()),
            created_at_s: 1_700_000_000,
            size_bytes: 1 << 30,
            stored_bytes: 12_345,
            source: "/a.raw".into(),
            note: note.into(),
            author: "anna".into(),
            retired: number == 3,
            keeps_identity: number >= 2,
            objects: objects.iter().map(|o| Hash::of(o)).collect(),
        }
    }

    fn sample() -> Image {
        let to = |channel, version, at_s| Pointer { channel, version, at_s, author: "ben".into() };
        Image {
            name: "debian".parse().unwrap(),
            versions: vec![version(1, "first", &[b"a"]), version(3, "", &[b"a", b"b"])],
            pointers: vec![to(Channel::Test, 1, 5), to(Channel::Production, 1, 6)],
            cut_short: HashSet::new(),
            scheduled: vec![to(Channel::Test, 3, 7)],
            next_number: 4,
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = sample().encode().unwrap();
        assert_eq!(bytes.len(), 32 + 6 + 3 * (20 + 3) + (80 + 5 + 10 + 32) + (80 + 10 + 64) + 32);
        assert_eq!(
            &bytes[..38],
            b"HWREFS\n\0\x02\0\0\0\x04\0\0\0\x02\0\0\0\x06\0\0\0\x02\0\0\0\x01\0\0\0debian"
        );
        assert_eq!(
            Hash::of(&bytes).to_string(),
            "43cded37a1d97346ac8854892779be7acc52722061ae4c89137bbb715e6713ec",
            "the format changed: give it a new number and read the old ones too"
        );
        assert_eq!(Image::decode(&"debian".parse().unwrap(), &bytes).unwrap(), sample());
    }

    #[test]
    fn a_channels_dropped_history_is_its_oldest_position_written_twice() {
        let plain = sample().encode().unwrap();
        let mut image = sample();
        image.cut_short.insert(Channel::Production);
        let marked = image.encode().unwrap();
        // The positions begin after the name. The second position is production's, and the count includes one
        // more.
        let (second, third) = (38 + 23, 38 + 2 * 23);
        let body = plain.len() - 32;
        let head = [&plain[..24], &[3, 0, 0, 0], &plain[28..third]].concat();
        let expected = [head.as_slice(), &plain[second..third], &plain[third..body]].concat();
        assert!(marked[..marked.len() - 32] == expected);
        assert_eq!(Image::decode(&image.name, &marked).unwrap(), image);
    }

    /// A list as a release without channels wrote it.
    fn format_1() -> Vec<u8> {
        let mut out = b"HWREFS\n\0\x01\0\0\0\x04\0\0\0\x02\0\0\0\x06\0\0\0debian".to_vec();
        for (number, note, objects) in [(1u32, "first", &[b"a"][..]), (3, "", &[b"a", b"b"])] {
            for part in [number, note.len() as u32, objects.len() as u32] {
                out.extend_from_slice(&part.to_le_bytes());
            }
            for part in [1_700_000_000u64, 1 << 30, 12_345] {
                out.extend_from_slice(&part.to_le_bytes());
            }
            out.extend_from_slice(&Hash::of(&number.to_le_bytes()).0);
            out.extend_from_slice(note.as_bytes());
            for object in objects {
                out.extend_from_slice(&Hash::of(*object).0);
            }
        }
        let sum = Hash::of(&out);
        out.extend_from_slice(&sum.0);
        out
    }

    #[test]
    fn the_format_without_channels_is_still_read() {
        let bytes = format_1();
        assert_eq!(
            Hash::of(&bytes).to_string(),
            "495896aac1b7c47cb5f7ae0ceeaf4fdab46871d7ecd7851be6d01a15d9d97180",
            "these are not the bytes that format 1 had"
        );
        let image = Image::decode(&"debian".parse().unwrap(), &bytes).unwrap();
        let [first, second] = &image.versions[..] else { panic!("two versions") };
        assert_eq!((first.source.as_str(), first.note.as_str(), first.author.as_str()), ("first", "", ""));
        assert_eq!((second.number, second.objects.len(), second.retired), (3, 2, false));
        assert_eq!((image.next_number, image.pointers.len()), (4, 0));
        // Written again, it has the new format.
        assert_eq!(Image::decode(&image.name, &image.encode().unwrap()).unwrap(), image);
    }

    #[test]
    fn a_later_format_is_refused_as_such() {
        let mut bytes = sample().encode().unwrap();
        bytes[8] = 3;
        let error = Image::decode(&"debian".parse().unwrap(), &bytes).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::UnknownFormat);
    }

    #[test]
    fn a_list_under_a_wrong_name_is_damaged() {
        let bytes = sample().encode().unwrap();
        assert!(Image::decode(&"other".parse().unwrap(), &bytes).is_err());
    }

    #[test]
    fn a_channel_that_points_nowhere_is_damaged() {
        let mut image = sample();
        image.versions.remove(0);
        let error = Image::decode(&"debian".parse().unwrap(), &image.encode().unwrap()).unwrap_err();
        assert!(error.to_string().contains("points to a version"), "{error}");
    }

    #[test]
    fn an_image_without_versions_keeps_counting() {
        let mut image = sample();
        image.forget(1);
        image.forget(3);
        let read = Image::decode(&"debian".parse().unwrap(), &image.encode().unwrap()).unwrap();
        assert_eq!((read.versions.len(), read.pointers.len(), read.next_number), (0, 0, 4));
        assert!(read.select(&Selector::Default).unwrap_err().to_string().contains("has no versions"));
    }

    #[test]
    fn selecting_versions() {
        let mut image = sample();
        image.retire(3, false).unwrap();
        let select = |text: &str| image.select(&text.parse().unwrap()).map(|v| v.number);
        assert_eq!(image.newest().unwrap().number, 3);
        assert_eq!(select("1").unwrap(), 1);
        let error = select("2").unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::NotFound);
        assert!(error.to_string().contains("it has 1, 3"), "{error}");
        assert_eq!(select(&image.versions[0].manifest.short()).unwrap(), 1);
    }

    proptest! {
        #[test]
        fn any_changed_byte_is_noticed(at in 0usize..1000, flip in 1u8..) {
            let mut bytes = sample().encode().unwrap();
            let at = at % bytes.len();
            bytes[at] ^= flip;
            prop_assert!(Image::decode(&"debian".parse().unwrap(), &bytes).is_err());
        }

        #[test]
        fn any_cut_is_noticed(len in 0usize..1000) {
            let bytes = sample().encode().unwrap();
            let len = len % bytes.len();
            prop_assert!(Image::decode(&"debian".parse().unwrap(), &bytes[..len]).is_err());
        }

        #[test]
        fn no_bytes_make_it_panic(
            format in 1u32..=2, mut body in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            // With a right magic and checksum, so that the parser behind them is reached.
            let mut bytes = MAGIC.to_vec();
            bytes.extend_from_slice(&format.to_le_bytes());
            bytes.append(&mut body);
            let sum = Hash::of(&bytes);
            bytes.extend_from_slice(&sum.0);
            let _ = Image::decode(&"debian".parse().unwrap(), &bytes);
        }
    }
}
