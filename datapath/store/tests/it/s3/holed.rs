//! Copies of objects with holes in a bucket: what their keys contain, how several copies complete each other,
//! and what happens to damaged ones.

use std::ops::Range;
use std::os::unix::fs::FileExt;

use headwater_store::copy::everything;
use headwater_store::{Copied, Holes, ImageName, Needs, Object, ObjectHashing, Patch};
use headwater_testkit::Rng;

use super::*;

/// The first length is sent in one request, the second one in parts.
const LENGTHS: [usize; 2] = [300_000, (17 << 20) + 5];

/// The ranges that versions of these tests need. There are whole blocks between them.
const ONE: Range<u64> = 20_000..30_000;
const OTHER: Range<u64> = 100_000..110_000;

/// A range that only a version that needs the whole object needs.
const GONE: Range<u64> = 200_000..210_000;

fn manifest(object: &[u8], needed: &Range<u64>) -> Vec<u8> {
    format!("{} {} {} {}\n", Hash::of(object), object.len(), needed.start, needed.end).into_bytes()
}

/// Reads manifests as [`manifest`] makes them. Other manifests need nothing.
pub struct Lines;

impl Lines {
    fn read(manifest: &[u8]) -> Option<(Hash, u64, Range<u64>)> {
        let mut words = std::str::from_utf8(manifest).ok()?.split_whitespace();
        let id = words.next()?.parse().ok()?;
        let mut number = || words.next()?.parse().ok();
        Some((id, number()?, number()?..number()?))
    }
}

impl Needs for Lines {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        Ok(Self::read(manifest).into_iter().map(|(id, len_bytes, _)| (id, len_bytes)).collect())
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        if let Some((id, _, stretch)) = Self::read(manifest) {
            needed(id, stretch);
        }
        Ok(())
    }
}

/// Adds a version that needs a range of an object. The object is sent, or is in the store already.
fn add(store: &dyn Store, image: &str, object: &[u8], is_sent: bool, needed: &Range<u64>) {
    let image: ImageName = name(image);
    let mut publication = store.publish().unwrap();
    if is_sent {
        publication.append(object).unwrap();
        assert_eq!(publication.finish_object().unwrap(), Some((Hash::of(object), object.len() as u64)));
    }
    let new = NewVersion {
        name: &image,
        manifest: &manifest(object, needed),
        objects: &[Hash::of(object)],
        size_bytes: 4096,
        created_at_s: 0,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    };
    publication.commit(new).unwrap();
}

fn all(object: &[u8]) -> Range<u64> {
    0..object.len() as u64
}

/// A directory with one version, which needs the whole object.
pub fn whole(dir: &Path, image: &str, object: &[u8]) -> LocalDir {
    let store = LocalDir::open(dir, Access::WRITE).unwrap();
    add(&store, image, object, true, &all(object));
    store
}

/// A directory with one version. Of the object it has only what that version needs.
pub fn holed(dir: &Path, image: &str, object: &[u8], needed: &Range<u64>) -> LocalDir {
    let store = whole(dir, image, object);
    add(&store, image, object, false, needed);
    store.remove(&name(image), Some(1)).unwrap();
    assert!(store.trim(&Lines).unwrap() > 0, "the file system of the tests has no holes");
    store
}

/// Copies all versions of another store.
pub fn copy_all(source: &dyn Store, target: &dyn Store) -> Result<Copied, StoreError> {
    let copied = headwater_store::copy(source, target, &everything(source)?, &Lines, false, &mut |_| Ok(()))?;
    match copied.failed.first() {
        Some(failed) => Err(failed.error.clone()),
        None => Ok(copied),
    }
}

/// Checks that the object has its original bytes except in its holes, and that no needed range is in a hole.
/// Returns the bytes and the holes.
fn must_have(store: &dyn Store, object: &[u8], needed: &[Range<u64>]) -> (Vec<u8>, Arc<Holes>) {
    let opened = store.open_object(Hash::of(object)).unwrap();
    let holes = opened.holes().unwrap();
    let mut there = vec![0; object.len()];
    opened.read_range(0, &mut there).unwrap();
    let mut hashing = ObjectHashing::new(&holes, opened.len_bytes());
    hashing.update(&there);
    assert_eq!(hashing.finish(), Hash::of(object));
    for stretch in needed {
        assert!(!holes.overlap(stretch), "{stretch:?} is gone");
        let (from, to) = (stretch.start as usize, stretch.end as usize);
        assert!(there[from..to] == object[from..to], "{stretch:?} is another one");
    }
    (there, holes)
}

/// The list of the holes of an object in a directory.
fn list_in(dir: &Path, object: &[u8]) -> Vec<u8> {
    fs::read(dir.join("holes").join(Hash::of(object).to_string())).unwrap()
}

/// The name of the key for a copy with the same holes as in a directory.
fn name_of(source: &Path, object: &[u8]) -> String {
    format!("{}.{}", Hash::of(object), &Hash::of(&list_in(source, object)).to_string()[..32])
}

fn file_of(place: &InBucket, name: &str) -> PathBuf {
    place.dir().join("holed").join(name)
}

/// Checks that the bucket has the whole object.
fn must_be_whole(place: &InBucket, object: &[u8]) {
    let key = place.dir().join("objects").join(Hash::of(object).to_string());
    assert!(fs::read(key).unwrap() == object);
    for folder in ["locks", "tmp"] {
        assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
    }
}

/// Tells whether the bytes that were read are those of the object.
fn right(object: &[u8], stretch: &Range<u64>) -> impl FnMut(&[u8]) -> Result<(), StoreError> + use<> {
    let right = object[stretch.start as usize..stretch.end as usize].to_vec();
    move |bytes: &[u8]| {
        let is_right = bytes == right;
        is_right.then_some(()).ok_or_else(|| StoreError::new(StoreErrorKind::Damaged, "other bytes"))
    }
}

/// Reads a range and checks it, with a thread and without.
fn read_right(opened: &dyn Object, object: &[u8], stretch: &Range<u64>) -> Result<(), StoreError> {
    let mut into = vec![0xaa; (stretch.end - stretch.start) as usize];
    let checked = opened.read_checked(stretch.start, &mut into, &mut right(object, stretch));
    let (mut waiting, mut check) = (Waiting::default(), right(object, stretch));
    into.fill(0xaa);
    let waited = loop {
        match opened.read_or_wait(stretch.start, &mut into, &mut check, &mut waiting) {
            Ok(false) => std::thread::sleep(Duration::from_millis(5)),
            outcome => break outcome,
        }
    };
    assert_eq!(
        checked.as_ref().map_err(StoreError::kind),
        waited.map(drop).as_ref().map_err(StoreError::kind)
    );
    checked
}

/// A bucket into which directories with different holes were copied, the object, and the names of the keys.
fn with_two(seed: u64, len: usize) -> (InBucket, Vec<u8>, [String; 2]) {
    let object = Rng::new(seed).bytes(len);
    let dirs = [0; 2].map(|_| tempfile::tempdir().unwrap());
    let place = InBucket::new(server().address());
    let target = suite::writable(&place);
    copy_all(&holed(dirs[0].path(), "a", &object, &ONE), target.as_ref()).unwrap();
    copy_all(&holed(dirs[1].path(), "b", &object, &OTHER), target.as_ref()).unwrap();
    let names = [&dirs[0], &dirs[1]].map(|dir| name_of(dir.path(), &object));
    (place, object, names)
}

#[test]
fn copies_keep_the_holes_and_have_zeroes_in_them() {
    for len in LENGTHS {
        let object = Rng::new(21).bytes(len);
        let (dir, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let source = holed(dir.path(), "a", &object, &ONE);
        let list = list_in(dir.path(), &object);
        // After a crash the old bytes can be there, or other ones.
        let file = dir.path().join("objects").join(Hash::of(&object).to_string());
        let file = fs::File::options().write(true).open(file).unwrap();
        file.write_all_at(&[0xaa; 7000], GONE.start).unwrap();

        let place = InBucket::new(server().address());
        let target = suite::writable(&place);
        let copied = copy_all(&source, target.as_ref()).unwrap();
        assert_eq!((copied.versions, copied.objects, copied.bytes), (1, 1, len as u64));
        // Releases that do not know partial copies can read every whole object.
        assert_eq!(fs::read(place.dir().join("store")).unwrap()[8], 1);
        assert_eq!(place.keys("objects"), [] as [&str; 0]);
        let key = name_of(dir.path(), &object);
        assert_eq!(place.keys("holed"), [key.as_str()]);
        let (there, holes) = must_have(target.as_ref(), &object, &[ONE]);
        assert!(holes.overlap(&GONE) && holes.overlap(&OTHER));
        let mut golden = object.clone();
        for gone in holes.stretches() {
            golden[gone.start as usize..gone.end as usize].fill(0);
        }
        assert!(there == golden);
        golden.extend_from_slice(&list);
        golden.extend_from_slice(&(list.len() as u64).to_le_bytes());
        assert!(fs::read(file_of(&place, &key)).unwrap() == golden);
        for folder in ["locks", "tmp"] {
            assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
        }
        assert!(target.stored_bytes().unwrap() > golden.len() as u64);

        let access = Access::Copy { new_chunk_bytes: source.chunk_bytes() };
        let other = LocalDir::open(back.path(), access).unwrap();
        assert_eq!(copy_all(target.as_ref(), &other).unwrap().objects, 1);
        assert!(list_in(back.path(), &object) == list);
        must_have(&other, &object, &[ONE]);
        // A copy to another bucket writes the same bytes.
        let further = InBucket::new(server().address());
        copy_all(target.as_ref(), suite::writable(&further).as_ref()).unwrap();
        assert!(fs::read(file_of(&further, &key)).unwrap() == golden);
    }
}

#[test]
fn copies_with_different_holes_complete_each_other_until_a_whole_one_comes() {
    for len in LENGTHS {
        let (place, object, mut names) = with_two(22, len);
        let id = Hash::of(&object);
        let store = suite::writable(&place);
        names.sort();
        assert_eq!(place.keys("holed"), names);
        let (_, holes) = must_have(store.as_ref(), &object, &[ONE, OTHER]);
        assert!(holes.overlap(&GONE));
        let opened = store.open_object(id).unwrap();
        let unseen = store.open_object_of(id, len as u64).unwrap();
        let retrying = store.retrying().unwrap().open_object_of(id, len as u64).unwrap();
        let all_open = [&opened, &unseen, &retrying];
        // Also a read that goes from one range to the other, across a hole of both copies.
        let across = |opened: &Arc<dyn Object>| {
            let mut bytes = vec![0xaa; (OTHER.end - ONE.start) as usize];
            opened.read_range(ONE.start, &mut bytes).unwrap();
            for needed in [ONE, OTHER] {
                let at = (needed.start - ONE.start) as usize..(needed.end - ONE.start) as usize;
                assert!(bytes[at] == object[needed.start as usize..needed.end as usize], "{needed:?}");
            }
            let between = (50_000 - ONE.start) as usize;
            assert!(bytes[between..between + 10_000].iter().all(|byte| *byte == 0));
        };
        let reads_right = || {
            for opened in all_open {
                for needed in [ONE, OTHER, 0..4096] {
                    read_right(opened.as_ref(), &object, &needed).unwrap();
                }
                across(opened);
                assert_eq!(opened.len_bytes(), len as u64);
            }
        };
        reads_right();
        assert!(all_open.iter().all(|opened| *opened.holes().unwrap() == *holes));
        // A version that needs no more than the bucket has uses the object that is there.
        let dir = tempfile::tempdir().unwrap();
        let less = OTHER.start..OTHER.start + 10;
        let copied = copy_all(&holed(dir.path(), "c", &object, &less), store.as_ref()).unwrap();
        assert_eq!((copied.versions, copied.objects), (1, 0));

        let dir = tempfile::tempdir().unwrap();
        let copied = copy_all(&whole(dir.path(), "d", &object), store.as_ref()).unwrap();
        assert_eq!((copied.versions, copied.objects), (1, 1));
        must_be_whole(&place, &object);
        assert_eq!(place.keys("holed"), names, "open readers still work");
        assert!(store.open_object(id).unwrap().holes().unwrap().is_empty());
        reads_right();
        // An object that was opened before, and in which a read finds wrong bytes in a range that only the
        // whole copy has, looks for that copy.
        assert!(all_open.iter().all(|opened| *opened.holes().unwrap() == *holes));
        read_right(unseen.as_ref(), &object, &GONE).unwrap();
        assert!(unseen.holes().unwrap().is_empty());
        assert!(opened.was_wrong() && opened.holes().unwrap().is_empty() && !opened.was_wrong());
        for image in ["a", "b", "c", "d"] {
            assert_eq!(place.keys("objects").len() + place.keys("holed").len(), 3);
            store.remove(&name(image), None).unwrap();
        }
        for folder in ["objects", "holed", "manifests", "locks"] {
            assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
        }
    }
}

#[test]
fn an_import_of_the_same_bytes_makes_an_object_whole() {
    for len in LENGTHS {
        let object = Rng::new(23).bytes(len);
        let dir = tempfile::tempdir().unwrap();
        let place = InBucket::new(server().address());
        let store = suite::writable(&place);
        copy_all(&holed(dir.path(), "a", &object, &ONE), store.as_ref()).unwrap();
        add(store.as_ref(), "b", &object, true, &all(&object));
        must_be_whole(&place, &object);
        must_have(store.as_ref(), &object, &[all(&object)]);
    }
}

#[test]
fn interrupted_copies_continue_or_are_discarded() {
    let (place, relay, _) = behind_a_relay();
    let object = Rng::new(24).bytes(LENGTHS[1]);
    let dir = tempfile::tempdir().unwrap();
    let source = holed(dir.path(), "b", &object, &ONE);
    let opened = source.open_object(Hash::of(&object)).unwrap();
    let target = place.open(Access::Copy { new_chunk_bytes: source.chunk_bytes() }).unwrap();
    let key = name_of(dir.path(), &object);
    let stop = || {
        let stop = |_| Err(StoreError::new(StoreErrorKind::Io, "stopped"));
        target.publish().unwrap().copy_object(opened.as_ref(), &mut { stop }).unwrap_err();
        assert_eq!(place.keys("tmp"), [format!("{key}.upload")]);
        assert_eq!(place.keys("holed"), [] as [&str; 0]);
    };
    stop();
    relay.take_seen();
    let mut reported_bytes = 0;
    let copied = target.publish().unwrap().copy_object(opened.as_ref(), &mut |bytes| {
        reported_bytes += bytes;
        Ok(())
    });
    copied.unwrap();
    assert_eq!(reported_bytes, object.len() as u64);
    let seen = relay.take_seen();
    assert!(!seen.iter().any(|it| it.contains("partNumber")), "{seen:?}");
    assert_eq!((place.keys("tmp"), place.keys("holed")), (vec![], vec![key.clone()]));
    must_have(target.as_ref(), &object, &[ONE]);

    let store = suite::writable(&place);
    publish(store.as_ref(), "c", b"object", &[], b"m").unwrap();
    store.remove(&name("c"), None).unwrap();
    assert_eq!(place.keys("holed"), [] as [&str; 0], "no version needs it");
    stop();
    make_older(&place.dir().join("tmp").join(format!("{key}.upload")), Duration::from_secs(8 * 24 * 3600));
    relay.take_seen();
    store.remove(&name("a"), None).unwrap();
    assert_eq!(place.keys("tmp"), [] as [&str; 0]);
    let (seen, given_back) = (relay.take_seen(), format!("holed/{key}?uploadId="));
    assert!(seen.iter().any(|it| it.starts_with("DELETE") && it.contains(&given_back)), "{seen:?}");
}

#[test]
fn a_source_with_damage_outside_of_holes_is_not_copied() {
    for len in LENGTHS {
        let object = Rng::new(25).bytes(len);
        let dir = tempfile::tempdir().unwrap();
        let source = holed(dir.path(), "a", &object, &ONE);
        let file = dir.path().join("objects").join(Hash::of(&object).to_string());
        let file = fs::File::options().write(true).open(file).unwrap();
        file.write_all_at(&[!object[25_000]], 25_000).unwrap();
        let place = InBucket::new(server().address());
        let target = suite::writable(&place);
        let opened = source.open_object(Hash::of(&object)).unwrap();
        let copied = target.publish().unwrap().copy_object(opened.as_ref(), &mut |_| Ok(()));
        assert_eq!(kind(copied), StoreErrorKind::Damaged);
        for folder in ["objects", "holed", "tmp", "locks"] {
            assert_eq!(place.keys(folder), [] as [&str; 0], "{folder}");
        }
    }
}

#[test]
fn a_damaged_copy_is_reported_only_without_alternatives() {
    let (place, object, names) = with_two(26, LENGTHS[0]);
    let id = Hash::of(&object);
    let store = place.open(Access::Read).unwrap();
    let files = names.each_ref().map(|name| file_of(&place, name));
    let whole = files.each_ref().map(|file| fs::read(file).unwrap());
    // A range that both copies have is damaged in one of them: it is read from the other one.
    for (file, right) in files.iter().zip(&whole) {
        let mut wrong = right.clone();
        wrong[1000] ^= 1;
        fs::write(file, &wrong).unwrap();
        read_right(store.open_object(id).unwrap().as_ref(), &object, &(0..4096)).unwrap();
        // A reader of the whole object is asked to read it again if that can help.
        let opened = store.open_object(id).unwrap();
        let is_right = || {
            let mut bytes = vec![0; object.len()];
            opened.read_range(0, &mut bytes).unwrap();
            let mut hashing = ObjectHashing::new(&opened.holes().unwrap(), object.len() as u64);
            hashing.update(&bytes);
            hashing.finish() == id
        };
        assert!(is_right() || opened.was_wrong() && is_right());
        fs::write(file, right).unwrap();
    }
    // The same with a range that only this copy has.
    let mut wrong = whole[0].clone();
    wrong[25_000] ^= 1;
    fs::write(&files[0], &wrong).unwrap();
    let opened = store.open_object(id).unwrap();
    assert_eq!(kind(read_right(opened.as_ref(), &object, &ONE)), StoreErrorKind::Damaged);
    read_right(opened.as_ref(), &object, &OTHER).unwrap();
    fs::write(&files[0], &whole[0]).unwrap();
    read_right(opened.as_ref(), &object, &ONE).unwrap();

    // A copy whose list is damaged does not show which ranges it has.
    let (len, end) = (object.len(), whole[0].len());
    let mut flipped = whole[0].clone();
    flipped[len + 40] ^= 1;
    let longer = [&whole[0][..end - 8], &u64::MAX.to_le_bytes()].concat();
    let cut = [0, 7, 8, len - 1, len, end - 1].map(|at| whole[0][..at].to_vec());
    for damaged in cut.into_iter().chain([flipped, longer]) {
        fs::write(&files[0], &damaged).unwrap();
        let (_, holes) = must_have(store.as_ref(), &object, &[OTHER]);
        assert!(holes.overlap(&ONE), "{} bytes", damaged.len());
        let unseen = store.open_object_of(id, len as u64).unwrap();
        read_right(unseen.as_ref(), &object, &OTHER).unwrap();
        fs::write(&files[1], &damaged).unwrap();
        assert_eq!(kind(store.open_object(id).map(drop)), StoreErrorKind::Damaged);
        let unseen = store.open_object_of(id, len as u64).unwrap();
        assert_eq!(kind(unseen.holes()), StoreErrorKind::Damaged);
        fs::write(&files[1], &whole[1]).unwrap();
    }
    // The same is true if its length is not that of the version's object.
    let unseen = store.open_object_of(id, len as u64 - 1).unwrap();
    assert_eq!(kind(unseen.read_range(0, &mut [0])), StoreErrorKind::Damaged);
    // Copying the same content again repairs it.
    fs::write(&files[0], &whole[0][..1000]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    copy_all(&holed(dir.path(), "c", &object, &ONE), suite::writable(&place).as_ref()).unwrap();
    assert!(fs::read(&files[0]).unwrap() == whole[0]);
    must_have(store.as_ref(), &object, &[ONE, OTHER]);
}

#[test]
fn uncached_reads_use_the_undamaged_copy() {
    let (place, object, names) = with_two(31, LENGTHS[0]);
    let (id, end) = (Hash::of(&object), object.len() as u64);
    let store = place.open(Access::Read).unwrap();
    let read = |opened: &dyn Object, stretch: Range<u64>, again: Option<Option<u32>>| {
        let mut into = vec![0xaa; (stretch.end - stretch.start) as usize];
        match again {
            None => opened.read_range(stretch.start, &mut into).unwrap(),
            Some(reading) => opened.read_range_past_caches(stretch.start, &mut into, reading).unwrap(),
        }
        into
    };
    let anew = || store.open_object_uncached(id).unwrap();
    let mut were_read_first = 0;
    for file in names.each_ref().map(|name| file_of(&place, name)) {
        let right = fs::read(&file).unwrap();
        let mut wrong = right.clone();
        wrong[1000] ^= 1;
        fs::write(&file, &wrong).unwrap();
        let is_right = |bytes: &[u8]| *bytes == object[..bytes.len()];
        let opened = store.open_object(id).unwrap();
        if !is_right(&read(opened.as_ref(), 0..4096, None)) {
            were_read_first += 1;
            // This works for each reader, whoever read before.
            for _ in 0..3 {
                assert!(is_right(&read(anew().as_ref(), 0..4096, Some(None))));
            }
            // All other readers, and all reads without this option, read as before.
            let opened = anew();
            assert!(!is_right(&read(opened.as_ref(), 0..4096, None)));
            read_right(opened.as_ref(), &object, &(0..4096)).unwrap();
            assert!(opened.was_wrong() && is_right(&read(opened.as_ref(), 0..4096, None)));
        }
        // The same next to a range that only one copy has, for each of the copies.
        for needed in [ONE, OTHER] {
            let stretch = 0..needed.end;
            let (at, to) = (needed.start as usize, needed.end as usize);
            let tries =
                [read(opened.as_ref(), stretch.clone(), None), read(anew().as_ref(), stretch, Some(None))];
            assert!(tries.iter().any(|bytes| is_right(&bytes[..4096]) && bytes[at..to] == object[at..to]));
        }
        // A range that only one copy has comes from that copy, whichever is next in turn. What no copy has is
        // zeroes.
        for needed in [ONE, OTHER] {
            for again in [Some(None), Some(Some(1)), Some(Some(2))] {
                let golden = &object[needed.start as usize..needed.end as usize];
                assert!(read(anew().as_ref(), needed.clone(), again) == golden, "{needed:?} {again:?}");
            }
        }
        assert!(read(anew().as_ref(), GONE, Some(None)).iter().all(|byte| *byte == 0));
        // If the whole object is read twice in pieces, one of the readings is right.
        let readings = [1, 2].map(|reading| {
            let opened = anew();
            let mut hashing = ObjectHashing::new(&opened.holes().unwrap(), end);
            for at in (0..end).step_by(70_000) {
                let piece = at..end.min(at + 70_000);
                hashing.update(&read(opened.as_ref(), piece, Some(Some(reading))));
            }
            hashing.finish() == id
        });
        assert!(readings[0] || readings[1]);
        fs::write(&file, &right).unwrap();
    }
    assert_eq!(were_read_first, 1);
}

#[test]
fn uncached_reads_of_a_whole_object_read_it_again() {
    let object = Rng::new(32).bytes(LENGTHS[0]);
    let dir = tempfile::tempdir().unwrap();
    let place = InBucket::new(server().address());
    let store = suite::writable(&place);
    copy_all(&whole(dir.path(), "a", &object), store.as_ref()).unwrap();
    let opened = store.open_object_uncached(Hash::of(&object)).unwrap();
    let unseen = store.open_object_of(Hash::of(&object), object.len() as u64).unwrap();
    for opened in [opened, unseen] {
        for reading in [None, Some(0), Some(1)] {
            let mut bytes = vec![0; object.len()];
            opened.read_range_past_caches(0, &mut bytes, reading).unwrap();
            assert!(bytes == object);
        }
    }
}

#[test]
fn partial_copies_are_copied_instead_of_repaired() {
    let (place, object, names) = with_two(27, LENGTHS[0]);
    let store = suite::writable(&place);
    let patch = Patch { offset: ONE.start, bytes: object[20_000..20_010].to_vec() };
    let error = store.repair_object(Hash::of(&object), &[patch]).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Damaged);
    assert!(error.to_string().contains("with holes"), "{error}");
    assert_eq!(place.keys("holed").len(), names.len());
    assert_eq!(place.keys("objects"), [] as [&str; 0]);
}

#[test]
fn a_partial_source_can_repair_a_whole_object() {
    for len in LENGTHS {
        let object = Rng::new(28).bytes(len);
        let dirs = [0; 2].map(|_| tempfile::tempdir().unwrap());
        let place = InBucket::new(server().address());
        let store = suite::writable(&place);
        copy_all(&whole(dirs[0].path(), "a", &object), store.as_ref()).unwrap();
        let source = holed(dirs[1].path(), "b", &object, &ONE);
        let opened = source.open_object(Hash::of(&object)).unwrap();
        let key = place.dir().join("objects").join(Hash::of(&object).to_string());
        for (at, is_put_right) in [(ONE.start, true), (GONE.start, false)] {
            let mut damaged = object.clone();
            damaged[at as usize] ^= 1;
            fs::write(&key, &damaged).unwrap();
            let mut reported_bytes = 0;
            let copied = store.publish().unwrap().copy_object(opened.as_ref(), &mut |bytes| {
                reported_bytes += bytes;
                Ok(())
            });
            if is_put_right {
                copied.unwrap();
                assert_eq!(reported_bytes, len as u64);
                must_be_whole(&place, &object);
            } else {
                let error = copied.unwrap_err();
                assert_eq!(error.kind(), StoreErrorKind::Io);
                assert!(error.to_string().contains("the source has only a part of this object"), "{error}");
                assert!(fs::read(&key).unwrap() == damaged);
            }
            assert_eq!(place.keys("holed"), [] as [&str; 0]);
        }
    }
}

#[test]
fn the_search_for_the_wrong_copy_ends_with_the_copy() {
    for len in LENGTHS {
        let (place, relay, _) = behind_a_relay();
        let store = suite::writable(&place);
        let object = Rng::new(33).bytes(len);
        let dirs = [0; 2].map(|_| tempfile::tempdir().unwrap());
        copy_all(&whole(dirs[0].path(), "b", &object), store.as_ref()).unwrap();
        let source = holed(dirs[1].path(), "c", &object, &ONE);
        let opened = source.open_object(Hash::of(&object)).unwrap();
        let key = place.dir().join("objects").join(Hash::of(&object).to_string());
        let mut damaged = object.clone();
        damaged[GONE.start as usize] ^= 1;
        fs::write(&key, &damaged).unwrap();
        // A call with 0 bytes reports no progress: it only shows that the copy continues.
        let copy = |looks: &mut dyn FnMut() -> Result<(), StoreError>| {
            let mut copied = |bytes: u64| if bytes == 0 { looks() } else { Ok(()) };
            let error = store.publish().unwrap().copy_object(opened.as_ref(), &mut copied).unwrap_err();
            (error.kind(), error.to_string())
        };
        let is_blamed = |(kind, says): (StoreErrorKind, String)| {
            kind == StoreErrorKind::Io && says.contains("the source has only a part of this object")
        };
        let mut looks = 0;
        assert!(is_blamed(copy(&mut || {
            looks += 1;
            Ok(())
        })));
        // First the object in the bucket is read, and then the source.
        let here = len.div_ceil(1 << 20);
        assert!(looks > here, "{looks}");

        for last in [1, here + 1] {
            let mut looks = 0;
            let (kind, says) = copy(&mut || {
                looks += 1;
                let stop = || StoreError::new(StoreErrorKind::InUse, "stopped");
                (looks < last).then_some(()).ok_or_else(stop)
            });
            assert_eq!((kind, looks), (StoreErrorKind::InUse, last));
            assert!(says.contains("stopped"), "{says}");
        }

        let (kind, says) = copy(&mut || {
            relay.fail("GET", "/objects/", Fault::Status(403), u32::MAX);
            Ok(())
        });
        relay.heal();
        // The cause is unknown, so the source is not blamed.
        assert!(kind == StoreErrorKind::Io && says.contains("refuses the request"), "{kind:?} {says}");
        assert!(!says.contains("the source has only a part of this object"), "{says}");

        // A damaged object that was cut short is recognised by its length.
        fs::write(&key, &object[..1000]).unwrap();
        assert!(is_blamed(copy(&mut || Ok(()))));
        // So is a source that was cut short: then the object in the bucket is not read.
        let theirs = dirs[1].path().join("objects").join(Hash::of(&object).to_string());
        fs::File::options().write(true).open(theirs).unwrap().set_len(1000).unwrap();
        let (kind, says) = copy(&mut || panic!("what is here is read"));
        assert_eq!(kind, StoreErrorKind::Damaged, "{says}");
    }
}

#[test]
fn failed_lookups_do_not_count_as_lost_objects() {
    let (place, object, _) = with_two(29, LENGTHS[0]);
    let relay = HttpRelay::start(server().address());
    let behind = InBucket {
        url: S3Url { endpoint: Some(format!("http://{}", relay.address())), ..place.url.clone() },
        dir: place.dir.clone(),
        ..place
    };
    let store = behind.open(Access::Read).unwrap();
    let (id, len) = (Hash::of(&object), object.len() as u64);
    for target in ["prefix=some%2Fprefix%2Fholed%2F", "/holed/"] {
        let unseen = store.open_object_of(id, len).unwrap();
        relay.fail("GET", target, Fault::Status(503), u32::MAX);
        assert_eq!(kind(store.open_object(id).map(drop)), StoreErrorKind::Unreachable, "{target}");
        assert_eq!(kind(unseen.read_range(ONE.start, &mut [0; 10])), StoreErrorKind::Unreachable, "{target}");
        assert_eq!(kind(unseen.holes()), StoreErrorKind::Unreachable, "{target}");
        relay.heal();
        read_right(unseen.as_ref(), &object, &ONE).unwrap();
    }
    // Reads of volumes wait.
    let retrying = store.retrying().unwrap();
    let waits = retrying.open_object_of(id, len).unwrap();
    relay.fail("GET", "holed", Fault::Status(503), 7);
    read_right(waits.as_ref(), &object, &OTHER).unwrap();
    assert!(retrying.traffic().unwrap().waits > 0);
    // An object that is in no place is not found.
    assert_eq!(kind(store.open_object(Hash::of(b"none")).map(drop)), StoreErrorKind::NotFound);
    let none = store.open_object_of(Hash::of(b"none"), 5).unwrap();
    assert_eq!(kind(none.read_range(0, &mut [0; 5])), StoreErrorKind::NotFound);
    assert_eq!(kind(none.holes()), StoreErrorKind::NotFound);
}

#[test]
fn a_missing_object_costs_one_listing_and_an_existing_one_none() {
    let (place, relay, _) = behind_a_relay();
    let store = suite::writable(&place);
    for (image, len) in [("b", LENGTHS[0]), ("c", LENGTHS[1])] {
        let object = Rng::new(30).bytes(len);
        let dir = tempfile::tempdir().unwrap();
        let source = whole(dir.path(), image, &object);
        relay.take_seen();
        copy_all(&source, store.as_ref()).unwrap();
        let of_holes = |seen: Vec<String>| -> Vec<String> {
            seen.into_iter().filter(|it| it.contains("holed")).collect()
        };
        let seen = of_holes(relay.take_seen());
        let list = format!("prefix=some%2Fprefix%2Fholed%2F{}.", Hash::of(&object));
        // This is the request before the copy.
        assert!(seen.len() == 1 && seen[0].contains(&list), "{seen:?}");
        let opened = store.open_object(Hash::of(&object)).unwrap();
        assert!(opened.holes().unwrap().is_empty());
        let unseen = store.open_object_of(Hash::of(&object), len as u64).unwrap();
        for opened in [&opened, &unseen] {
            read_right(opened.as_ref(), &object, &ONE).unwrap();
        }
        relay.take_seen();
        assert!(unseen.holes().unwrap().is_empty());
        assert_eq!(relay.take_seen(), [] as [&str; 0]);
        copy_all(&source, store.as_ref()).unwrap();
        add(store.as_ref(), "d", &object, true, &all(&object));
        assert_eq!(of_holes(relay.take_seen()), [] as [&str; 0]);
    }
}
