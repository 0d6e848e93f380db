//! The versions of an image, and the file that lists them.
//!
//! Pure: bytes in, bytes out. The layout is in `docs/format.md`.

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::{ImageName, Selector};

/// The longest note, in bytes of UTF-8.
pub const NOTE_MAX_BYTES: usize = 1024;
/// The most versions that an image can have at a time.
pub const VERSIONS_MAX: usize = 65_536;
/// The most data objects that a version can refer to.
pub const VERSION_OBJECTS_MAX: usize = 65_536;

const MAGIC: [u8; 8] = *b"HWREFS\n\0";
const FORMAT: u32 = 1;

/// One version of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// 1, 2, 3 ...; a number is not used again while the image exists.
    pub number: u32,
    /// BLAKE3 of the manifest: the version's identity.
    pub manifest: Hash,
    /// When it was made, in seconds since 1970.
    pub created_at_s: u64,
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// What this version added to the store, in bytes.
    pub stored_bytes: u64,
    /// A line for people.
    pub note: String,
    /// The data objects it needs, its own and older ones.
    pub objects: Vec<Hash>,
}

/// An image and its versions, oldest first. There is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its name.
    pub name: ImageName,
    /// By number, ascending.
    pub versions: Vec<Version>,
    pub(crate) next_number: u32,
}

pub(crate) fn no_such_image(name: &ImageName) -> StoreError {
    StoreError::new(
        StoreErrorKind::NotFound,
        format!("there is no image '{name}'; 'headwater image list' shows those that there are"),
    )
}

impl Image {
    pub(crate) fn empty(name: ImageName) -> Self {
        Self { name, versions: Vec::new(), next_number: 1 }
    }

    /// The newest version.
    pub fn newest(&self) -> Option<&Version> {
        self.versions.last()
    }

    /// The version that is meant, or an error that says what there is.
    pub fn select(&self, selector: &Selector) -> Result<&Version, StoreError> {
        let missing = |what: String| {
            let numbers: Vec<String> = self.versions.iter().map(|v| v.number.to_string()).collect();
            StoreError::new(
                StoreErrorKind::NotFound,
                format!("image '{}' has no version {what}; it has {}", self.name, numbers.join(", ")),
            )
        };
        match selector {
            Selector::Newest => self.newest().ok_or_else(|| no_such_image(&self.name)),
            Selector::Number(number) => {
                self.versions.iter().find(|v| v.number == *number).ok_or_else(|| missing(number.to_string()))
            }
            Selector::HashPrefix(prefix) => {
                let mut found: Option<&Version> = None;
                for version in &self.versions {
                    if !version.manifest.to_string().starts_with(prefix.as_str()) {
                        continue;
                    }
                    // The same content imported twice has one hash: either number will do.
                    if found.is_some_and(|other| other.manifest != version.manifest) {
                        return Err(StoreError::new(
                            StoreErrorKind::Invalid,
                            format!("more than one version of '{}' starts with {prefix}", self.name),
                        ));
                    }
                    found = Some(version);
                }
                found.ok_or_else(|| missing(prefix.clone()))
            }
        }
    }

    /// The file's bytes.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, StoreError> {
        let too_long = |what: &str, len: usize, max: usize| {
            StoreError::new(StoreErrorKind::Invalid, format!("{what}: {len}, but at most {max} are allowed"))
        };
        if self.versions.len() > VERSIONS_MAX {
            return Err(too_long("versions of an image", self.versions.len(), VERSIONS_MAX));
        }
        let mut out = Vec::with_capacity(256);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&self.next_number.to_le_bytes());
        put_len(&mut out, self.versions.len());
        put_len(&mut out, self.name.as_str().len());
        out.extend_from_slice(self.name.as_str().as_bytes());
        for version in &self.versions {
            if version.note.len() > NOTE_MAX_BYTES {
                return Err(too_long("bytes of a note", version.note.len(), NOTE_MAX_BYTES));
            }
            if version.objects.len() > VERSION_OBJECTS_MAX {
                return Err(too_long("objects of a version", version.objects.len(), VERSION_OBJECTS_MAX));
            }
            out.extend_from_slice(&version.number.to_le_bytes());
            put_len(&mut out, version.note.len());
            put_len(&mut out, version.objects.len());
            out.extend_from_slice(&version.created_at_s.to_le_bytes());
            out.extend_from_slice(&version.size_bytes.to_le_bytes());
            out.extend_from_slice(&version.stored_bytes.to_le_bytes());
            out.extend_from_slice(&version.manifest.0);
            out.extend_from_slice(version.note.as_bytes());
            for object in &version.objects {
                out.extend_from_slice(&object.0);
            }
        }
        let sum = Hash::of(&out);
        out.extend_from_slice(&sum.0);
        Ok(out)
    }

    /// Reads the file's bytes. `name` is what the file is called.
    pub(crate) fn decode(name: &ImageName, bytes: &[u8]) -> Result<Self, StoreError> {
        let damaged = |why: &str| {
            StoreError::new(
                StoreErrorKind::Damaged,
                format!("the list of versions of image '{name}' is damaged: {why}"),
            )
        };
        if !bytes.starts_with(&MAGIC) {
            return Err(damaged("it does not start as such a list does"));
        }
        let mut format = Cursor(bytes.get(MAGIC.len()..).unwrap_or_default());
        match format.u32() {
            Some(FORMAT) => {}
            Some(other) => {
                return Err(StoreError::new(
                    StoreErrorKind::UnknownFormat,
                    format!(
                        "the list of versions of image '{name}' has format {other}; this release reads format \
                         {FORMAT}: use the release that wrote it, or a later one"
                    ),
                ));
            }
            None => return Err(damaged("it is cut short")),
        }
        let (body, sum) = bytes.split_last_chunk::<32>().ok_or_else(|| damaged("it is cut short"))?;
        if Hash::of(body).0 != *sum {
            return Err(damaged("its checksum does not match"));
        }
        let mut cursor = Cursor(body.get(MAGIC.len() + 4..).unwrap_or_default());
        let image = decode_body(&mut cursor).ok_or_else(|| damaged("it is cut short or has odd values"))?;
        if image.name != *name {
            return Err(damaged(&format!("it is that of '{}'", image.name)));
        }
        if !cursor.0.is_empty() {
            return Err(damaged("it is too long"));
        }
        Ok(image)
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    // Every length was checked against a limit far below 2^32.
    out.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
}

fn decode_body(cursor: &mut Cursor<'_>) -> Option<Image> {
    let next_number = cursor.u32()?;
    let count = cursor.len(VERSIONS_MAX)?;
    let name_len = cursor.len(crate::name::NAME_MAX)?;
    let name: ImageName = std::str::from_utf8(cursor.take(name_len)?).ok()?.parse().ok()?;
    let mut versions = Vec::new();
    let mut last = 0;
    for _ in 0..count {
        let number = cursor.u32()?;
        let note_len = cursor.len(NOTE_MAX_BYTES)?;
        let object_count = cursor.len(VERSION_OBJECTS_MAX)?;
        let created_at_s = cursor.u64()?;
        let size_bytes = cursor.u64()?;
        let stored_bytes = cursor.u64()?;
        let manifest = cursor.hash()?;
        let note = std::str::from_utf8(cursor.take(note_len)?).ok()?.to_owned();
        let objects = (0..object_count).map(|_| cursor.hash()).collect::<Option<Vec<_>>>()?;
        if number <= last || number >= next_number {
            return None;
        }
        last = number;
        versions.push(Version { number, manifest, created_at_s, size_bytes, stored_bytes, note, objects });
    }
    Some(Image { name, versions, next_number })
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
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
    use proptest::prelude::*;

    fn sample() -> Image {
        let version = |number: u32, note: &str, objects: &[&[u8]]| Version {
            number,
            manifest: Hash::of(&number.to_le_bytes()),
            created_at_s: 1_700_000_000,
            size_bytes: 1 << 30,
            stored_bytes: 12_345,
            note: note.into(),
            objects: objects.iter().map(|o| Hash::of(o)).collect(),
        };
        Image {
            name: "debian".parse().unwrap(),
            versions: vec![version(1, "first", &[b"a"]), version(3, "", &[b"a", b"b"])],
            next_number: 4,
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = sample().encode().unwrap();
        assert_eq!(bytes.len(), 24 + 6 + (68 + 5 + 32) + (68 + 64) + 32);
        assert_eq!(&bytes[..30], b"HWREFS\n\0\x01\0\0\0\x04\0\0\0\x02\0\0\0\x06\0\0\0debian");
        assert_eq!(
            Hash::of(&bytes).to_string(),
            "495896aac1b7c47cb5f7ae0ceeaf4fdab46871d7ecd7851be6d01a15d9d97180",
            "the format changed: give it a new number and read the old one too"
        );
        assert_eq!(Image::decode(&"debian".parse().unwrap(), &bytes).unwrap(), sample());
    }

    #[test]
    fn a_later_format_is_refused_as_such() {
        let mut bytes = sample().encode().unwrap();
        bytes[8] = 2;
        let error = Image::decode(&"debian".parse().unwrap(), &bytes).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::UnknownFormat);
    }

    #[test]
    fn a_list_under_a_wrong_name_is_damaged() {
        let bytes = sample().encode().unwrap();
        assert!(Image::decode(&"other".parse().unwrap(), &bytes).is_err());
    }

    #[test]
    fn selecting_versions() {
        let image = sample();
        let select = |text: &str| image.select(&text.parse().unwrap()).map(|v| v.number);
        assert_eq!(image.select(&Selector::Newest).unwrap().number, 3);
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
        fn no_bytes_make_it_panic(mut body in proptest::collection::vec(any::<u8>(), 0..400)) {
            // With a right magic and checksum, so that the parser behind them is reached.
            let mut bytes = MAGIC.to_vec();
            bytes.extend_from_slice(&FORMAT.to_le_bytes());
            bytes.append(&mut body);
            let sum = Hash::of(&bytes);
            bytes.extend_from_slice(&sum.0);
            let _ = Image::decode(&"debian".parse().unwrap(), &bytes);
        }
    }
}
