//! Properties that must hold for every byte sequence that a reader of images may get: for the fuzzers in
//! `fuzz/`, and for a bounded test.
//!
//! Each function reads the bytes, and panics if the result breaks a property. Refusing the bytes is always
//! right.

mod file_systems;
mod files;

pub use file_systems::file_systems;
pub use files::{foreign_file, qcow2_file};

use std::ops::Range;
use std::sync::Arc;

use headwater_store::{Hash, Image, Parts, StoreError, StoreErrorKind, settings_bytes};

use crate::chunk::{Packer, unpack};
use crate::chunk_map::ChunkMap;
use crate::disk_cache::Mark;
use crate::disk_cache::stores::{verified, with_checksum};
use crate::manifest::{ChunkRef, Manifest, ManifestBuilder, ObjectRef};
use crate::qcow2::header::Header;
use crate::trace::Trace;
use crate::units::{u64_of, usize_of, usize_of_u32};

/// A check that a fuzzer or a test calls with bytes.
pub type Oracle = fn(&[u8]);

/// The size of a chunk in [`chunk`].
const CHUNK_BYTES: usize = 4096;

/// All checks, each with a name and seed bytes.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let trace = Trace::of_boot(Hash::of(b"m"), &[(3, 1), (1, 2), (2, 900)]).encode();
    vec![
        ("manifest", manifest, manifests()),
        ("chunk", chunk, chunks()),
        ("boot_trace", boot_trace, vec![trace]),
        ("qcow2_header", qcow2_header, vec![qcow2()]),
        ("cached_chunks", cached_chunks, segments()),
        ("cached_stores", cached_stores, cached_lists()),
        ("cache_mark", cache_mark, vec![b"HWCHUNKS\x01\0\0\0\0\0\0\0".to_vec(), vec![0; 16]]),
        ("qcow2_file", qcow2_file, files::qcow2_samples()),
        ("foreign_file", foreign_file, files::foreign_samples()),
        ("file_systems", file_systems, file_systems::samples()),
    ]
}

fn manifests() -> Vec<Vec<u8>> {
    let objects = [b"a", b"b"].map(|name| ObjectRef { id: Hash::of(name), len_bytes: 100_000 });
    let mut out = Vec::new();
    for step in 1..4u64 {
        let mut builder = ManifestBuilder::new(64 << 16, 65_536, (step > 1).then(|| Hash::of(b"parent")));
        for number in 0..6u32 {
            let hash = Hash::of(&number.to_le_bytes());
            let offset = 16 + u64::from(number) * 1000;
            let chunk = ChunkRef { hash, object: number % 2, stored_bytes: 1000, offset };
            builder.push(u64::from(number) * step, chunk);
        }
        out.extend(builder.finish(&objects).map(|manifest| manifest.encode()));
    }
    out
}

fn chunks() -> Vec<Vec<u8>> {
    let mut packed = vec![0; CHUNK_BYTES];
    let content: Vec<u8> = (0..CHUNK_BYTES).map(|n| u8::try_from(n / 64).unwrap_or(0)).collect();
    let Ok(mut packer) = Packer::new(3) else { return Vec::new() };
    let len = packer.pack(&content, &mut packed);
    packed.truncate(len);
    vec![packed, bomb()]
}

/// A zstd frame of a few bytes that decompresses to 128 KiB: far more than a chunk.
fn bomb() -> Vec<u8> {
    zstd::bulk::compress(&[0; 128 << 10], 19).unwrap_or_default()
}

fn segments() -> Vec<Vec<u8>> {
    let record = |content: &[u8]| {
        let len = u32::try_from(content.len()).unwrap_or(0);
        [&b"HWCK"[..], &len.to_le_bytes(), &Hash::of(content).0, &[0; 8], content].concat()
    };
    vec![[record(b"one"), record(&[7; 100]), record(b"three")].concat()]
}

/// Files of `stores/` with the name that [`cached_stores`] looks for.
fn cached_lists() -> Vec<Vec<u8>> {
    let list = "disk".parse().map(|name| Image::empty(name).encode().unwrap_or_default());
    let settings = settings_bytes(65_536).unwrap_or_default();
    [list.unwrap_or_default(), settings].map(|bytes| with_checksum(Hash::of(b"path"), &bytes)).to_vec()
}

/// A cached file of a store: it is accepted only if it was written under this name and is complete and
/// unchanged. Its content is then checked like that of a store.
pub fn cached_stores(bytes: &[u8]) {
    let (id, other) = (Hash::of(b"path"), Hash::of(b"another path"));
    let sum_of = |id: Hash, rest: &[u8]| Hash::of(&[id.0.as_slice(), rest].concat()).0;
    let head = bytes.get(..40).and_then(|head| head.split_last_chunk::<32>());
    let rest = bytes.get(40..).unwrap_or_default();
    let is_sound = head.is_some_and(|(magic, sum)| magic == b"HWSEEN\x01\0" && *sum == sum_of(id, rest));
    assert_eq!(verified(id, bytes), is_sound.then_some(rest));
    assert!(!is_sound || verified(other, bytes).is_none(), "it was accepted as the file of another store");

    let kept = with_checksum(id, rest);
    assert_eq!(kept.get(..8), Some(b"HWSEEN\x01\0".as_slice()));
    assert_eq!(verified(id, &kept), Some(rest), "a file that was written is not found again");
    assert!(
        kept.split_last().is_some_and(|(_, cut)| verified(id, cut).is_none()),
        "a truncated file is accepted"
    );
}

/// The file that marks a directory as a chunk cache: sixteen bytes, or at most as many zeroes.
pub fn cache_mark(bytes: &[u8]) {
    let expected = match bytes {
        [b'H', b'W', b'C', b'H', b'U', b'N', b'K', b'S', 1, 0, 0, 0, 0, 0, 0, 0] => Mark::Ours,
        _ if bytes.len() > 16 || bytes.iter().any(|byte| *byte > 0) => Mark::Foreign,
        _ => Mark::Begun,
    };
    assert_eq!(Mark::of(bytes), expected);
}

fn qcow2() -> Vec<u8> {
    let mut out = b"QFI\xfb\0\0\0\x03".to_vec();
    out.resize(104, 0);
    for (at, value) in [(20usize, 16u32), (36, 1), (96, 4), (100, 104)] {
        if let Some(place) = out.get_mut(at..at + 4) {
            place.copy_from_slice(&value.to_be_bytes());
        }
    }
    if let Some(place) = out.get_mut(24..32) {
        place.copy_from_slice(&(1u64 << 20).to_be_bytes());
    }
    out.resize(512, 0);
    out
}

/// A manifest in memory that is read in parts.
struct InMemory(Vec<u8>);

impl Parts for InMemory {
    fn len_bytes(&self) -> u64 {
        u64_of(self.0.len())
    }

    fn read(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        let part = self.0.get(usize_of(range.start)..usize_of(range.end));
        part.map(<[u8]>::to_vec).ok_or_else(|| StoreError::new(StoreErrorKind::Damaged, "out of range"))
    }
}

/// A manifest that is read in parts: it is accepted or refused like the whole manifest, and no chunk is
/// outside its object.
fn manifest_in_parts(bytes: &[u8], whole: Option<&Manifest>) {
    let Ok(map) = ChunkMap::in_parts(Arc::new(InMemory(bytes.to_vec()))) else {
        return assert!(whole.is_none(), "it is refused only if it is read in parts");
    };
    let outline = map.outline();
    let all = 0..outline.chunks();
    let loaded = map.load(all.clone());
    assert!(whole.is_none() || (loaded.is_ok() && map.has(all)), "a part of it is refused");
    for index in outline.numbers() {
        let Ok(found) = map.chunk(index) else { continue };
        assert!(
            found.is_some_and(|chunk| outline.check_chunk(|| index, chunk).is_ok()),
            "chunk {index} is outside its object"
        );
        assert!(whole.is_none_or(|whole| whole.chunk(index) == found), "chunk {index} differs");
    }
}

/// A manifest: one content has one encoding, and no chunk is outside its object or the image.
pub fn manifest(bytes: &[u8]) {
    let decoded = Manifest::decode(bytes);
    manifest_in_parts(bytes, decoded.as_ref().ok());
    let Ok(manifest) = decoded else { return };
    assert!(manifest.encode() == bytes, "one manifest has two encodings");
    let mut count = 0u64;
    for (index, chunk) in manifest.data() {
        let object = manifest.objects().get(usize_of_u32(chunk.object));
        let end = chunk.offset.checked_add(u64::from(chunk.stored_bytes));
        let fits = object.zip(end).is_some_and(|(object, end)| end <= object.len_bytes);
        assert!(fits && chunk.stored_bytes > 0, "chunk {index} lies outside its object");
        assert!(index < manifest.chunks(), "chunk {index} lies outside the image");
        assert!(manifest.chunk(index) == Some(chunk), "chunk {index} is not found again");
        let (data, len) = manifest.run_at(index);
        assert!(data && len > 0 && index.saturating_add(len) <= manifest.chunks(), "a run leaves the image");
        count += 1;
    }
    assert!(count == manifest.data_chunks(), "chunks are missing from the runs");
    for index in [0, manifest.chunks() - 1, manifest.chunks(), u64::MAX] {
        let _ = (manifest.chunk(index), manifest.run_at(index));
    }
}

/// A stored chunk: the output has the requested hash, and never more than a chunk's bytes.
pub fn chunk(bytes: &[u8]) {
    let mut content = vec![0xaa; CHUNK_BYTES];
    let wanted = Hash::of(&vec![0; CHUNK_BYTES]);
    if unpack(bytes, &mut content, &wanted).is_ok() {
        assert!(Hash::of(&content) == wanted, "wrong bytes were accepted");
    }
    assert!(content.len() == CHUNK_BYTES, "the buffer grew");
}

/// A boot trace: encoding the result again gives the same bytes. Its checksum is corrected first.
pub fn boot_trace(bytes: &[u8]) {
    let _ = Trace::decode(bytes);
    let Some((body, _)) = bytes.split_last_chunk::<32>() else { return };
    let sealed = [body, &Hash::of(body).0].concat();
    let Ok(trace) = Trace::decode(&sealed) else { return };
    assert!(trace.encode() == sealed, "one trace has two encodings");
}

/// A segment of the chunk cache on disk: its records are found, and bytes between them are skipped. The
/// checksums of headers are corrected first, up to the first place where that does not make a record.
pub fn cached_chunks(bytes: &[u8]) {
    let mut sealed = bytes.to_vec();
    let mut expected = Vec::new();
    let mut at = 0;
    while let Some(header) = sealed.get_mut(at..at + 48) {
        let (body, sum) = header.split_at_mut(40);
        sum.copy_from_slice(Hash::of(body).0.first_chunk::<8>().unwrap_or(&[0; 8]));
        let len = body.iter().skip(4).take(4).rev().fold(0u32, |len, byte| len << 8 | u32::from(*byte));
        let start = at + 48;
        let end = start.saturating_add(usize_of_u32(len));
        if !body.starts_with(b"HWCK")
            || !(1..=headwater_store::CHUNK_BYTES_MAX).contains(&len)
            || end > sealed.len()
        {
            break;
        }
        let hash = sealed.get(at + 8..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; 32]);
        expected.push((Hash(hash), u64_of(start), len));
        at = end;
    }
    // A header without data behind it is not a record.
    while let Some(header) = sealed.get(at..at + 48) {
        let (body, sum) = header.split_at(40);
        let len = body.iter().skip(4).take(4).rev().fold(0u32, |len, byte| len << 8 | u32::from(*byte));
        let end = at.saturating_add(48).saturating_add(usize_of_u32(len));
        let is_record = body.starts_with(b"HWCK")
            && (1..=headwater_store::CHUNK_BYTES_MAX).contains(&len)
            && end <= sealed.len()
            && Hash::of(body).0.starts_with(sum);
        if is_record {
            let hash = body.get(8..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; 32]);
            expected.push((Hash(hash), u64_of(at + 48), len));
        }
        at = if is_record { end } else { at + 1 };
    }
    assert_eq!(
        files::with_file(&sealed, |file| crate::disk_cache::segment::scan(file, u64_of(sealed.len()))),
        expected
    );
    // Without correction: each record that is found has the checksum of its header.
    for (hash, start, len) in
        files::with_file(bytes, |file| crate::disk_cache::segment::scan(file, u64_of(bytes.len())))
    {
        let start = crate::units::usize_of(start);
        let header = bytes.get(start - 48..start).unwrap_or_default();
        assert!(
            header.get(8..40) == Some(&hash.0[..]) && header.starts_with(b"HWCK"),
            "a record from nowhere"
        );
        assert!(
            Hash::of(header.get(..40).unwrap_or_default())
                .0
                .starts_with(header.get(40..).unwrap_or_default())
        );
        assert!(start + usize_of_u32(len) <= bytes.len(), "a record past the end");
    }
}

/// The header of a qcow2 file: it is accepted or refused, in memory that does not depend on its claims.
pub fn qcow2_header(bytes: &[u8]) {
    let most = usize::try_from(Header::MAX_BYTES).unwrap_or(usize::MAX);
    let start = bytes.get(..bytes.len().min(most)).unwrap_or_default();
    if let Ok(header) = Header::decode(start) {
        let name = header.backing.as_deref().unwrap_or_default();
        assert!(u64_of(name.len()) <= 1023, "a backing file's name is longer than QEMU allows");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ImageErrorKind;

    /// A small version of the fuzzers' work.
    #[test]
    fn no_bytes_break_a_promise() {
        headwater_testkit::mutate::all(targets());
    }

    #[test]
    fn a_decompression_bomb_is_refused_without_allocating_its_size() {
        let bomb = bomb();
        assert!(bomb.len() < 100, "{}", bomb.len());
        let mut content = vec![0; CHUNK_BYTES];
        let error = unpack(&bomb, &mut content, &Hash::of(b"another")).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Damaged);
        assert!(error.to_string().contains("cannot be decompressed"), "{error}");
        // A frame header that claims 2^63 bytes and has nothing behind it.
        let claim = [0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0, 0, 0, 0, 0, 0, 0, 0x80, 1, 0, 0];
        assert_eq!(unpack(&claim, &mut content, &Hash::of(b"")).unwrap_err().kind(), ImageErrorKind::Damaged);
    }
}
