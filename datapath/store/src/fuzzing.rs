//! Properties that must hold for every byte sequence that a store may read: for the fuzzers in `fuzz/`, and
//! for a bounded test.
//!
//! Each function reads the bytes, and panics if the result breaks a property. Refusing the bytes is always
//! right.

use crate::hash::Hash;
use crate::hash_tree::{GROUP_BYTES, HashTree};
use crate::holes::{Holes, Needed, ObjectHashing, plan_holes};
use crate::local_dir::{chunk_bytes_of, settings_bytes, settings_bytes_with_holes};
use crate::name::ImageName;
use crate::refs::Image;
use crate::retention::{self, RetentionPurpose, RetentionRoot};
use crate::s3::S3Url;
use crate::s3::upload::Parts;

/// A check that a fuzzer or a test calls with bytes.
pub type Oracle = fn(&[u8]);

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let mut settings = [4096, 65_536, 4 << 20].map(|size| settings_bytes(size).unwrap_or_default()).to_vec();
    settings.extend(settings_bytes_with_holes(65_536));
    vec![
        ("list_of_versions", list_of_versions, lists()),
        ("store_settings", store_settings, settings),
        ("hash_tree", hash_tree, trees()),
        ("list_of_holes", list_of_holes, lists_of_holes()),
        ("root_path", root_path, holds()),
        (
            "store_name",
            store_name,
            vec![b"s3://bucket/a/b?endpoint=http://h:1&region=x&timeout=5&style=host".to_vec()],
        ),
        (
            "upload_state",
            upload_state,
            vec![
                b"headwater upload 2\n16777216\nu-1\n".to_vec(),
                format!("headwater upload 2\n16777216\nu-1\n{0} \"a\"\n{0} \"b\"\n", Hash::of(b"a"))
                    .into_bytes(),
            ],
        ),
    ]
}

fn trees() -> Vec<Vec<u8>> {
    let lengths = [1, 3, 8].map(|groups| usize::try_from(groups * GROUP_BYTES).unwrap_or(0));
    lengths.iter().filter_map(|len| HashTree::of(&vec![7; len + 1])).map(|tree| tree.encode()).collect()
}

/// A hash tree: one tree has one encoding, and it is accepted only for content with its root hash.
pub fn hash_tree(bytes: &[u8]) {
    let len_bytes =
        bytes.get(16..24).and_then(|len| len.first_chunk()).map_or(0, |len| u64::from_le_bytes(*len));
    let Some(tree) = HashTree::parse(bytes, len_bytes) else { return };
    assert!(tree.encode() == bytes, "one tree has two encodings");
    assert!(HashTree::decode(bytes, tree.root(), len_bytes).as_ref() == Some(&tree), "it is not found again");
    assert!(HashTree::decode(bytes, Hash::of(bytes), len_bytes).is_none(), "it was taken for another one's");
    assert!(HashTree::parse(bytes, len_bytes ^ 1).is_none(), "it is that of two lengths");
    assert!(!tree.holds(0, bytes) && !tree.holds(usize::MAX, bytes), "it holds what it was not made of");
}

fn lists_of_holes() -> Vec<Vec<u8>> {
    let object: Vec<u8> = (0..40u8).flat_map(|block| [block; 4096]).collect();
    let needed: [&[(u64, u64)]; 3] = [&[], &[(8_000, 9_000)], &[(50_000, 50_001), (90_000, 140_000)]];
    let list = |stretches: &&[(u64, u64)]| {
        let len_bytes = u64::try_from(object.len()).unwrap_or(0);
        let mut needed = Needed::of(len_bytes);
        stretches.iter().for_each(|(from, to)| needed.mark(&(*from..*to)));
        let mut read = |offset: u64, into: &mut [u8]| {
            let from = usize::try_from(offset).unwrap_or(0);
            let there = object.get(from..).and_then(|rest| rest.get(..into.len()));
            there.into_iter().for_each(|there| into.copy_from_slice(there));
            Ok(())
        };
        let holes = plan_holes(&needed, &Holes::default(), &mut read);
        holes.map_or_else(|_| Vec::new(), |plan| plan.holes.encode(len_bytes))
    };
    needed.iter().map(list).collect()
}

/// The most bytes of an object that [`list_of_holes`] hashes.
const HASHED_MAX: u64 = 1 << 20;

/// A list of holes with a corrected checksum. One list has one encoding, its methods agree with each other,
/// and an object can be hashed to its end with it, whatever lies in its holes.
pub fn list_of_holes(bytes: &[u8]) {
    let len_bytes =
        bytes.get(16..24).and_then(|len| len.first_chunk()).map_or(0, |len| u64::from_le_bytes(*len));
    let _ = Holes::decode("a fuzzer", bytes, len_bytes);
    let Some((body, _)) = bytes.split_last_chunk::<32>() else { return };
    let sealed = [body, &Hash::of(body).0].concat();
    let Ok(holes) = Holes::decode("a fuzzer", &sealed, len_bytes) else { return };
    assert!(holes.encode(len_bytes) == sealed, "one list has two encodings");
    assert!(Holes::decode("a fuzzer", &sealed, len_bytes ^ 1).is_err(), "it is that of two lengths");
    let stretches = holes.stretches();
    let sum = stretches.iter().fold(0_u64, |sum, it| sum.saturating_add(it.end.saturating_sub(it.start)));
    assert!(sum == holes.bytes() && sum <= len_bytes.saturating_sub(4096), "{sum} bytes of {len_bytes}");
    let mut end = 0;
    for stretch in &stretches {
        assert!(stretch.start > end && stretch.end <= len_bytes, "{stretch:?} after {end}");
        assert!(holes.overlap(stretch) && !holes.overlap(&(end..stretch.start)), "{stretch:?}");
        assert!(holes.within(&(stretch.start..stretch.start.saturating_add(1))).len() == 1, "{stretch:?}");
        end = stretch.end;
    }
    assert!(holes.common(&holes) == holes, "it differs from itself");
    assert!(holes.common(&Holes::default()).is_empty());
    if len_bytes > HASHED_MAX {
        return;
    }
    let object = vec![7; usize::try_from(len_bytes).unwrap_or(0)];
    let mut read = ObjectHashing::new(&holes, len_bytes);
    object.chunks(5000).for_each(|piece| read.update(piece));
    let (mut passed, mut at) = (ObjectHashing::new(&holes, len_bytes), 0);
    let there = |from: u64, to: u64| {
        let (from, to) = (usize::try_from(from).unwrap_or(0), usize::try_from(to).unwrap_or(0));
        object.get(from..to).unwrap_or_default()
    };
    for stretch in stretches {
        passed.update(there(at, stretch.start));
        passed.pass(stretch.end.saturating_sub(stretch.start));
        at = stretch.end;
    }
    passed.update(there(at, len_bytes));
    assert!(read.finish() == passed.finish(), "what lies in holes made a difference");
}

fn holds() -> Vec<Vec<u8>> {
    let rests =
        ["deb.12/edit.0f-1.machine.lab_1", "a/disk.d.5", "a/pin.d.image.x", "a/follow.d.image", "a/lend.d.5"];
    rests.map(|rest| format!("{}/{rest}", Hash::of(b"m")).into_bytes()).to_vec()
}

/// The path of a retention root: a second, bytewise parser agrees, and the parsed root gives the same path
/// again.
pub fn root_path(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    let found = RetentionRoot::parse(path);
    let plain = plain_root(bytes);
    assert_eq!(found.is_some(), plain.is_some(), "{path}");
    let (Some(root), Some([manifest, image, purpose, daemon, id])) = (found, plain) else { return };
    let read = [root.image.as_str(), &root.daemon, &root.id].map(str::as_bytes);
    assert_eq!(read, [image, daemon, id], "{path}");
    assert_eq!(root.manifest.to_string().as_bytes(), manifest, "{path}");
    let known: [(&[u8], RetentionPurpose); 4] = [
        (b"disk", RetentionPurpose::Disk),
        (b"edit", RetentionPurpose::MaintenanceSession),
        (b"pin", RetentionPurpose::Pin),
        (b"follow", RetentionPurpose::Follow),
    ];
    assert!(known.contains(&(purpose, root.purpose)), "{path}");
    assert_eq!(root.path().as_deref().ok(), Some(path), "it is noted elsewhere than it was read");
    assert_eq!(retention::manifest_of(path), Some(root.manifest), "{path}");
    assert!(retention::is_of(path, root.manifest, &root.image), "{path}");
    assert!(!retention::is_of(path, Hash::of(bytes), &root.image), "{path} is one of another version");
}

/// Manifest, image, purpose, daemon and id of a retention root, parsed as `docs/format.md` describes.
fn plain_root(path: &[u8]) -> Option<[&[u8]; 5]> {
    let mut folders = path.splitn(3, |byte| *byte == b'/');
    let (manifest, image, name) = (folders.next()?, folders.next()?, folders.next()?);
    let mut words = name.splitn(3, |byte| *byte == b'.');
    let (purpose, daemon, id) = (words.next()?, words.next()?, words.next()?);
    let within = |word: &[u8], most: usize| (1..=most).contains(&word.len());
    let all = |word: &[u8], others: &[u8]| {
        word.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || others.contains(byte))
    };
    let is_hash = manifest.len() == 64 && manifest.iter().all(|byte| b"0123456789abcdef".contains(byte));
    let is_image =
        within(image, 63) && all(image, b"._-") && image.first().is_some_and(u8::is_ascii_alphanumeric);
    let lower = |word: &[u8]| word.to_ascii_lowercase();
    let is_named = within(daemon, 128) && within(id, 128);
    let is_told = all(&lower(daemon), b"-") && all(&lower(id), b"-_.");
    let is_known = [b"disk".as_slice(), b"edit", b"pin", b"follow"].contains(&purpose);
    (is_hash && is_image && is_named && is_told && is_known).then_some([manifest, image, purpose, daemon, id])
}

/// The size of a part in [`upload_state`].
const PART_BYTES: u64 = 16 << 20;

fn lists() -> Vec<Vec<u8>> {
    use crate::refs::{Channel, Pointer, Version};
    let Ok(name) = "disk".parse::<ImageName>() else { return Vec::new() };
    let mut image = Image::empty(name);
    let mut out = vec![image.encode().unwrap_or_default()];
    for number in 1..4u32 {
        let version = Version {
            number,
            manifest: Hash::of(&number.to_le_bytes()),
            created_at_s: 5,
            size_bytes: 4096,
            stored_bytes: 7,
            source: "/a.raw".into(),
            note: "note".into(),
            author: "anna".into(),
            retired: number == 2,
            keeps_identity: number == 3,
            objects: vec![Hash::of(b"x"); usize::try_from(number).unwrap_or(1)],
        };
        if image.adopt(&version).is_err() {
            break;
        }
        let pointer = Pointer { channel: Channel::Test, version: 1, at_s: 3, author: "ben".into() };
        let _ = image.promote(pointer.clone());
        let _ = image.schedule(Pointer { channel: Channel::Production, ..pointer });
        out.push(image.encode().unwrap_or_default());
    }
    out
}

/// A list of versions: what is read is written the same way again, and its content is consistent. The
/// checksum is corrected first, because otherwise hardly any input would pass it. The uncorrected bytes are
/// read, too.
pub fn list_of_versions(bytes: &[u8]) {
    let Ok(name) = "disk".parse::<ImageName>() else { return };
    let _ = Image::decode(&name, bytes);
    let Some((body, _)) = bytes.split_last_chunk::<32>() else { return };
    let sealed = [body, &Hash::of(body).0].concat();
    let Ok(image) = Image::decode(&name, &sealed) else { return };
    let again = image.encode();
    assert!(again.is_ok(), "what was read cannot be written: {again:?}");
    let again = again.unwrap_or_default();
    if sealed.get(8..12) == Some(&[2, 0, 0, 0]) {
        assert!(again == sealed, "one list has two encodings");
    }
    assert!(Image::decode(&name, &again).is_ok_and(|back| back == image), "it reads back as another list");
    let mut last = 0;
    for version in &image.versions {
        assert!(version.number > last && version.number < image.next_number, "numbers are out of order");
        last = version.number;
    }
    for pointer in image.pointers().iter().chain(image.scheduled()) {
        let is_listed = image.versions.iter().any(|version| version.number == pointer.version);
        assert!(is_listed, "a channel points nowhere");
    }
}

/// The file `store`: only what this release writes is accepted.
pub fn store_settings(bytes: &[u8]) {
    let sum_at = bytes.len().min(32);
    let body = bytes.get(..sum_at).unwrap_or_default();
    let sealed = [body, &Hash::of(body).0].concat();
    for bytes in [bytes, &sealed] {
        if let Ok(chunk_bytes) = chunk_bytes_of("a fuzzer", bytes) {
            let written = [settings_bytes(chunk_bytes), settings_bytes_with_holes(chunk_bytes)];
            let is_one = written.into_iter().flatten().any(|written| written == bytes);
            assert!(is_one, "one setting has two encodings");
        }
    }
}

/// The state of an upload to S3: only what is written is accepted, and each of its parts has a name.
pub fn upload_state(bytes: &[u8]) {
    let Some(parts) = Parts::decode(bytes, PART_BYTES) else { return };
    assert!(parts.encode() == bytes, "one state has two encodings");
    assert!(!parts.upload.is_empty() && parts.there.iter().all(|part| !part.name.is_empty()), "no name");
    assert!(Parts::decode(bytes, PART_BYTES + 1).is_none(), "a state of parts of another size was taken");
}

/// The URL of a store in S3: its displayed form parses to the same URL, and shows no secret.
pub fn store_name(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(url) = text.parse::<S3Url>() else { return };
    let shown = url.to_string();
    let back = shown.parse::<S3Url>();
    assert!(
        back.as_ref().is_ok_and(|back| back.bucket == url.bucket && back.prefix == url.prefix),
        "{shown}"
    );
    assert!(!shown.contains('@'), "{shown}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }
}
