//! Simulates a process that ends before each change on disk, and checks that nothing in use is lost and no
//! garbage remains.
//!
//! A history of random operations runs until the step where the process "ends". From then on no change
//! reaches the disk. Then a new process opens the store, and its content is compared with a model. All
//! operations that were answered must have happened. The unanswered one must have happened completely or not
//! at all.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use headwater_testkit::rounds;
use proptest::prelude::*;

use crate::copy::{copy, selected};
use crate::hash::Hash;
use crate::holes::{Holes, Needed, ObjectHashing, plan_holes};
use crate::local_dir::parts::TREE_FROM_BYTES;
use crate::local_dir::power_tests::is_durable;
use crate::local_dir::{Access, CHUNK_BYTES_DEFAULT, LocalDir};
use crate::name::ImageName;
use crate::needs::Needs;
use crate::refs::{Channel, Image, Pointer, Version};
use crate::store::{NewVersion, Object, Patch, Pin, Removed, Store};
use crate::{StoreError, StoreErrorKind};

thread_local! {
    /// Changes on disk that this thread may still make.
    pub(super) static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    /// Whether the disk is full.
    pub(super) static IS_FULL: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn step() -> Result<(), Error> {
    LEFT.with(|left| match left.get() {
        0 => Err(Error::other("the process ended")),
        u64::MAX => Ok(()),
        count => {
            left.set(count - 1);
            Ok(())
        }
    })
}

pub(super) fn room() -> Result<(), Error> {
    if IS_FULL.get() { Err(Error::from(ErrorKind::StorageFull)) } else { Ok(()) }
}

pub(super) fn ended() -> bool {
    LEFT.with(|left| left.get() == 0)
}

#[derive(Clone, Debug)]
pub(super) enum Operation {
    /// Imports content into an image: an object of its own, and one that other contents share.
    Publish {
        image: usize,
        content: u8,
    },
    /// Begins a publication and drops it after its object is in place.
    GiveUp {
        content: u8,
    },
    Promote {
        image: usize,
        version: u32,
        channel: bool,
    },
    Schedule {
        image: usize,
        version: u32,
    },
    PromoteDue {
        image: usize,
    },
    Revert {
        image: usize,
        channel: bool,
    },
    Retire {
        image: usize,
        version: u32,
        retired: bool,
    },
    /// A machine runs the version: a pin in the store.
    Run {
        image: usize,
        version: u32,
    },
    Stop,
    RemoveVersion {
        image: usize,
        version: u32,
    },
    RemoveImage {
        image: usize,
    },
    /// Copies a version of another store, with the objects that are missing.
    Copy {
        image: usize,
        version: u32,
    },
    /// Two bytes of a version's object are wrong and are repaired.
    Repair {
        image: usize,
        version: u32,
    },
    /// Sets or removes the boot trace of a version.
    SetTrace {
        image: usize,
        version: u32,
        trace: Option<u8>,
    },
    /// Frees the space of object parts that no version needs.
    Trim,
    /// From now on the disk is full, or has space again.
    Fill(bool),
}

pub(super) fn operation() -> impl Strategy<Value = Operation> {
    use Operation::{
        Copy, Fill, GiveUp, Promote, PromoteDue, Publish, RemoveImage, RemoveVersion, Repair, Retire, Revert,
        Run, Schedule, SetTrace, Stop, Trim,
    };
    let (image, version) = (0..2usize, 1..6u32);
    prop_oneof![
        6 => (image.clone(), 0..6u8).prop_map(|(image, content)| Publish { image, content }),
        1 => (0..6u8).prop_map(|content| GiveUp { content }),
        2 => (image.clone(), version.clone(), any::<bool>())
            .prop_map(|(image, version, channel)| Promote { image, version, channel }),
        1 => (image.clone(), version.clone()).prop_map(|(image, version)| Schedule { image, version }),
        1 => image.clone().prop_map(|image| PromoteDue { image }),
        1 => (image.clone(), any::<bool>()).prop_map(|(image, channel)| Revert { image, channel }),
        1 => (image.clone(), version.clone(), any::<bool>())
            .prop_map(|(image, version, retired)| Retire { image, version, retired }),
        2 => (image.clone(), version.clone()).prop_map(|(image, version)| Run { image, version }),
        1 => Just(Stop),
        4 => (image.clone(), version.clone())
            .prop_map(|(image, version)| RemoveVersion { image, version }),
        3 => (image.clone(), version.clone()).prop_map(|(image, version)| Copy { image, version }),
        1 => (image.clone(), version.clone()).prop_map(|(image, version)| Repair { image, version }),
        2 => (image.clone(), version, prop::option::of(0..3u8))
            .prop_map(|(image, version, trace)| SetTrace { image, version, trace }),
        3 => Just(Trim),
        2 => any::<bool>().prop_map(Fill),
        1 => image.prop_map(|image| RemoveImage { image }),
    ]
}

fn name(image: usize) -> ImageName {
    format!("image-{image}").parse().unwrap()
}

fn own_object(content: u8) -> Vec<u8> {
    vec![content; 40]
}

/// The object that contents with the same remainder share. Each content needs some of a block of its own.
fn shared_object(content: u8) -> Vec<u8> {
    (0..5 * BLOCK + 30).map(|at| 200 + content % 2 + u8::try_from(at / BLOCK).unwrap()).collect()
}

const BLOCK: usize = 4096;

/// The part of a shared object that no content needs.
const UNNEEDED: Range<u64> = 4 * 4096..5 * 4096;

fn needed_of_shared(content: u8) -> Range<u64> {
    let from = BLOCK * (1 + usize::from(content / 2) % 3) + 100;
    from as u64..from as u64 + 50
}

/// What versions need, according to their manifests.
struct Contents;

impl Needs for Contents {
    fn objects(&self, manifest: &[u8]) -> Result<Vec<(Hash, u64)>, StoreError> {
        let (content, objects) = (manifest[0] - 100, usize::from(*manifest.last().unwrap()));
        let all = [shared_object(content), own_object(content)];
        Ok(all.iter().take(objects).map(|bytes| (Hash::of(bytes), bytes.len() as u64)).collect())
    }

    fn stretches(&self, manifest: &[u8], needed: &mut dyn FnMut(Hash, Range<u64>)) -> Result<(), StoreError> {
        let content = manifest[0] - 100;
        for (number, (id, len_bytes)) in self.objects(manifest)?.into_iter().enumerate() {
            needed(id, if number == 0 { needed_of_shared(content) } else { 0..len_bytes });
        }
        Ok(())
    }
}

/// The manifest of a content with this many of its objects. With one object it is another content. Some have
/// a hash tree.
fn manifest(content: u8, objects: usize) -> Vec<u8> {
    let len = if content % 3 == 1 { TREE_FROM_BYTES } else { 20 };
    let mut manifest = vec![100 + content; usize::try_from(len).unwrap()];
    manifest.push(u8::try_from(objects).unwrap());
    manifest
}

fn pointer(channel: bool, version: u32) -> Pointer {
    let channel = if channel { Channel::Production } else { Channel::Test };
    Pointer { channel, version, at_s: 7, author: "anna".into() }
}

pub(super) fn publish(store: &LocalDir, image: usize, content: u8) -> Result<(), StoreError> {
    let mut objects = Vec::new();
    for bytes in [shared_object(content), own_object(content)] {
        // Each object is the own object of one version, as an import makes them. The publisher does not know
        // the holes of an existing object, and writes the object again.
        let needed = if objects.is_empty() { needed_of_shared(content) } else { 0..bytes.len() as u64 };
        if let Ok(there) = store.open_object(Hash::of(&bytes))
            && !there.holes()?.overlap(&needed)
        {
            objects.push(Hash::of(&bytes));
            continue;
        }
        let mut publication = store.publish()?;
        publication.append(&bytes)?;
        let (id, _) = publication.finish_object()?.unwrap();
        objects.push(id);
        commit(publication, image, content, &objects)?;
        if objects.len() == 2 {
            return Ok(());
        }
    }
    commit(store.publish()?, image, content, &objects)
}

fn commit(
    publication: Box<dyn crate::Publication>,
    image: usize,
    content: u8,
    objects: &[Hash],
) -> Result<(), StoreError> {
    publication.commit(version(&name(image), &manifest(content, objects.len()), objects)).map(drop)
}

/// A new version of which only these fields matter.
pub(super) fn version<'a>(name: &'a ImageName, manifest: &'a [u8], objects: &'a [Hash]) -> NewVersion<'a> {
    NewVersion {
        name,
        manifest,
        objects,
        size_bytes: 4096,
        created_at_s: 5,
        source: "",
        note: "",
        author: "",
        unless_newest: false,
        newest_at_most: None,
        is_sealed: false,
        keeps_identity: false,
    }
}

pub(super) fn apply(
    store: &LocalDir,
    operation: &Operation,
    pins: &mut Vec<(Hash, Pin)>,
) -> Result<(), StoreError> {
    let change = |image: usize, change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>| {
        store.change(&name(image), change)
    };
    match *operation {
        Operation::Publish { image, content } => publish(store, image, content),
        Operation::GiveUp { content } => {
            let mut publication = store.publish()?;
            publication.append(&[content, 1, 2])?;
            publication.finish_object().map(drop)
        }
        Operation::Promote { image, version, channel } => {
            change(image, &mut |image| image.promote(pointer(channel, version)).map(drop))
        }
        Operation::Schedule { image, version } => {
            change(image, &mut |image| image.schedule(pointer(true, version)).map(drop))
        }
        Operation::PromoteDue { image } => change(image, &mut |image| {
            image.promote_due(9);
            Ok(())
        }),
        Operation::Revert { image, channel } => {
            change(image, &mut |image| image.revert(pointer(channel, 0).channel).map(drop))
        }
        Operation::Retire { image, version, retired } => {
            change(image, &mut |image| image.retire(version, retired))
        }
        Operation::Run { image, version } => {
            let version = store.resolve(&format!("{}@{version}", name(image)).parse()?)?;
            pins.push((version.manifest, store.pin(version.manifest)?));
            Ok(())
        }
        Operation::Stop => {
            pins.clear();
            Ok(())
        }
        Operation::RemoveVersion { image, version } => store.remove(&name(image), Some(version)).map(drop),
        Operation::RemoveImage { image } => store.remove(&name(image), None).map(drop),
        Operation::Copy { image, version } => {
            let reference = format!("{}@{version}", name(image)).parse()?;
            let what = selected(&Other, &[reference])?;
            copy(&Other, store, &what, &Contents, false, &mut |_| Ok(())).map(drop)
        }
        Operation::Repair { image, version } => {
            let version = store.resolve(&format!("{}@{version}", name(image)).parse()?)?;
            repair_object(store, version.objects[0])
        }
        Operation::SetTrace { image, version, trace } => {
            let version = store.resolve(&format!("{}@{version}", name(image)).parse()?)?;
            store.set_trace(version.manifest, trace.map(trace_bytes).as_deref())
        }
        Operation::Trim => store.trim(&Contents).map(drop),
        Operation::Fill(is_full) => {
            IS_FULL.set(is_full);
            Ok(())
        }
    }
}

/// One of a few traces of different lengths.
fn trace_bytes(trace: u8) -> Vec<u8> {
    vec![trace; 50 + usize::from(trace)]
}

/// Damages two bytes of an object on the disk, and repairs them.
fn repair_object(store: &LocalDir, id: Hash) -> Result<(), StoreError> {
    const WRONG: [usize; 2] = [5, 25];
    let path = store.path().join("objects").join(id.to_string());
    let right = std::fs::read(&path).unwrap();
    let mut damaged = right.clone();
    WRONG.into_iter().for_each(|at| damaged[at] ^= 1);
    std::fs::write(&path, damaged).unwrap();
    is_durable(&path);
    let patch = |at: usize| Patch { offset: at as u64, bytes: vec![right[at]] };
    let outcome = store.repair_object(id, &WRONG.map(patch));
    let found = std::fs::read(&path).unwrap();
    let is_wrong = |at: &usize| found[*at] != right[*at];
    assert_eq!(found.len(), right.len());
    assert!((0..right.len()).filter(is_wrong).all(|at| WRONG.contains(&at)), "the repair damaged something");
    if outcome.is_ok() {
        assert!(found == right, "the repaired object is not right");
    } else {
        // The next process finds the object damaged again, and repairs it as well.
        let left = LEFT.with(|left| left.replace(u64::MAX));
        store.repair_object(id, &WRONG.map(patch)).unwrap();
        LEFT.with(|now| now.set(left));
    }
    outcome
}

/// Another store with five versions of each image. Their contents overlap with those of the versions made
/// here, some under the same number.
struct Other;

impl Other {
    fn content(image: usize, version: u32) -> u8 {
        u8::try_from((image + version as usize) % 6).unwrap()
    }
}

/// An object of the other store. A shared object has a hole at the block that no content needs.
struct InMemory(Vec<u8>);

impl Object for InMemory {
    fn id(&self) -> Hash {
        Hash::of(&self.0)
    }

    fn holes(&self) -> Result<Arc<Holes>, StoreError> {
        let mut needed = Needed::of(self.len_bytes());
        needed.mark(&(0..UNNEEDED.start));
        let planned = plan_holes(&needed, &Holes::default(), &mut |offset, into| {
            into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
            Ok(())
        });
        Ok(Arc::new(planned?.holes))
    }

    fn len_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_range(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let from = usize::try_from(offset).unwrap();
        into.copy_from_slice(&self.0[from..from + into.len()]);
        let gone = |at: &u64| UNNEEDED.contains(at);
        (offset..).zip(into.iter_mut()).filter(|(at, _)| gone(at)).for_each(|(_, byte)| *byte = 0);
        Ok(())
    }
}

fn only_read() -> StoreError {
    StoreError::new(StoreErrorKind::ReadOnly, "the other store is only read")
}

impl Store for Other {
    fn chunk_bytes(&self) -> u32 {
        CHUNK_BYTES_DEFAULT
    }

    fn images(&self) -> Result<Vec<Image>, StoreError> {
        (0..2).map(|number| Ok(self.image(&name(number))?.unwrap())).collect()
    }

    fn image(&self, wanted: &ImageName) -> Result<Option<Image>, StoreError> {
        let Some(image) = (0..2).find(|image| name(*image) == *wanted) else { return Ok(None) };
        let mut there = Image::empty(wanted.clone());
        for number in 1..6 {
            let content = Self::content(image, number);
            there.adopt(&Version {
                number,
                manifest: Hash::of(&manifest(content, 2)),
                created_at_s: 5,
                size_bytes: 4096,
                stored_bytes: 70,
                source: String::new(),
                note: String::new(),
                author: String::new(),
                retired: false,
                keeps_identity: false,
                objects: vec![Hash::of(&shared_object(content)), Hash::of(&own_object(content))],
            })?;
        }
        Ok(Some(there))
    }

    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        let mut all = (0..6).map(|content| manifest(content, 2));
        Ok(all.find(|manifest| Hash::of(manifest) == id).unwrap())
    }

    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        let mut all = (0..6).flat_map(|content| [shared_object(content), own_object(content)]);
        Ok(Arc::new(InMemory(all.find(|bytes| Hash::of(bytes) == id).unwrap())))
    }

    fn pin(&self, _: Hash) -> Result<Pin, StoreError> {
        Ok(Pin::new(()))
    }

    fn publish(&self) -> Result<Box<dyn crate::Publication>, StoreError> {
        Err(only_read())
    }

    fn change(
        &self,
        _: &ImageName,
        _: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        Err(only_read())
    }

    fn remove(&self, _: &ImageName, _: Option<u32>) -> Result<Removed, StoreError> {
        Err(only_read())
    }
}

pub(super) type Lists = BTreeMap<String, Image>;

/// The boot traces of all versions that have one. Each is one of the traces that were set, and complete.
pub(super) fn traces(store: &LocalDir) -> BTreeMap<Hash, Vec<u8>> {
    let listed = lists(store);
    let manifests = listed.values().flat_map(|image| &image.versions).map(|version| version.manifest);
    let kept = manifests.filter_map(|id| Some((id, store.trace(id).unwrap()?)));
    kept.inspect(|(_, trace)| assert!((0..3).any(|kind| *trace == trace_bytes(kind)), "{trace:?}")).collect()
}

/// Checks that the traces of versions that existed before and still exist are unchanged.
pub(super) fn check_traces(
    store: &LocalDir,
    before: &BTreeMap<Hash, Vec<u8>>,
    cut_short: Option<&Operation>,
) {
    let (after, listed) = (traces(store), lists(store));
    if matches!(cut_short, Some(Operation::SetTrace { .. })) {
        return;
    }
    let versions = listed.values().flat_map(|image| &image.versions);
    for id in versions.map(|version| version.manifest).filter(|id| before.contains_key(id)) {
        assert_eq!(after.get(&id), before.get(&id), "a boot trace was lost; cut in {cut_short:?}");
    }
}

pub(super) fn lists(store: &LocalDir) -> Lists {
    store.images().unwrap().into_iter().map(|image| (image.name.to_string(), image)).collect()
}

/// Checks that everything listed is there and complete, that channels point to existing versions, and that
/// there is nothing else.
pub(super) fn check(dir: &Path, store: &LocalDir, nothing_else: bool) {
    let mut needed = std::collections::BTreeSet::new();
    for image in lists(store).values() {
        for version in &image.versions {
            let manifest = store.manifest(version.manifest).unwrap();
            assert_eq!(Hash::of(&manifest), version.manifest);
            if let Some(parts) = store.manifest_parts(version.manifest).unwrap() {
                assert!(parts.read(0..parts.len_bytes()).unwrap() == manifest);
            }
            needed.insert(version.manifest.to_string());
            for id in &version.objects {
                let object = store.open_object(*id).unwrap();
                let mut bytes = vec![0; usize::try_from(object.len_bytes()).unwrap()];
                object.read_range(0, &mut bytes).unwrap();
                let mut hashing = ObjectHashing::new(&object.holes().unwrap(), object.len_bytes());
                hashing.update(&bytes);
                assert_eq!(hashing.finish(), *id);
                needed.insert(id.to_string());
            }
            let needs = &mut |id, stretch| {
                let holes = store.open_object(id).unwrap().holes().unwrap();
                assert!(!holes.overlap(&stretch), "{stretch:?} of {id} is gone, and a version needs it");
            };
            Contents.stretches(&manifest, needs).unwrap();
        }
        for pointer in image.pointers().iter().chain(image.scheduled()) {
            assert!(image.versions.iter().any(|version| version.number == pointer.version), "{pointer:?}");
        }
    }
    if nothing_else {
        for sub in ["manifests", "objects", "holes", "traces", "trees", "tmp"] {
            for entry in std::fs::read_dir(dir.join(sub)).unwrap() {
                let file = entry.unwrap().file_name().into_string().unwrap();
                // An interrupted trace is removed with its version.
                let stem = file.split_once('.').filter(|_| sub == "traces").map_or(&*file, |(stem, _)| stem);
                assert!(needed.contains(stem), "{sub}/{file} is left");
            }
        }
    }
}

/// The image that an operation changes.
pub(super) fn touched(operation: &Operation) -> Option<String> {
    match *operation {
        Operation::GiveUp { .. }
        | Operation::Run { .. }
        | Operation::Stop
        | Operation::Repair { .. }
        | Operation::SetTrace { .. }
        | Operation::Trim
        | Operation::Fill(_) => None,
        Operation::Publish { image, .. }
        | Operation::Promote { image, .. }
        | Operation::Schedule { image, .. }
        | Operation::PromoteDue { image }
        | Operation::Revert { image, .. }
        | Operation::Retire { image, .. }
        | Operation::RemoveVersion { image, .. }
        | Operation::Copy { image, .. }
        | Operation::RemoveImage { image } => Some(name(image).to_string()),
    }
}

/// The lists before a history, and after each of its operations.
fn states(history: &[Operation]) -> Vec<Lists> {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    let mut pins = Vec::new();
    let mut states = vec![lists(&store)];
    for operation in history {
        let _ = apply(&store, operation, &mut pins);
        states.push(lists(&store));
    }
    IS_FULL.set(false);
    states
}

/// Whether an interrupted operation happened completely or not at all. A publication here makes up to two
/// versions, each completely or not at all.
fn is_between(operation: &Operation, before: &Lists, after: &Lists, found: &Lists) -> bool {
    if found == before || found == after {
        return true;
    }
    let (Operation::Publish { .. }, Some(name)) = (operation, touched(operation)) else { return false };
    let (Some(found), Some(after)) = (found.get(&name), after.get(&name)) else { return false };
    let had = before.get(&name).map_or(0, |image| image.versions.len());
    found.versions.len() > had
        && after.versions.starts_with(&found.versions)
        && found.pointers() == after.pointers()
}

/// Runs a history until the process ends at `steps`.
fn run(history: &[Operation], steps: u64) {
    let states = states(history);
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    let mut pins = Vec::new();
    // What the model allows: the lists before the unanswered operation, and all lists that it may have
    // produced.
    let mut before = lists(&store);
    let mut traces_before = traces(&store);
    let mut cut_short = None;
    LEFT.with(|left| left.set(steps));
    for (number, operation) in history.iter().enumerate() {
        let outcome = apply(&store, operation, &mut pins);
        for (manifest, _) in &pins {
            assert!(
                store.manifest(*manifest).is_ok(),
                "the version of a running machine is missing after {operation:?}"
            );
        }
        if ended() {
            cut_short = Some((operation.clone(), states[number + 1].clone()));
            break;
        }
        if let Err(e) = outcome {
            let expected = [StoreErrorKind::NotFound, StoreErrorKind::Invalid, StoreErrorKind::InUse];
            let is_full = IS_FULL.get() && e.kind() == StoreErrorKind::NoSpace;
            assert!(is_full || expected.contains(&e.kind()), "{operation:?}: {e}");
            assert_eq!(lists(&store), before, "{operation:?} failed and changed something");
        }
        before = lists(&store);
        traces_before = traces(&store);
        assert_eq!(before, states[number + 1], "{operation:?} does something else this time");
        check(dir.path(), &store, false);
    }
    // The process ends: its pins and its lock are released, and changes that it had begun do not reach the
    // disk.
    drop((pins, store));
    LEFT.with(|left| left.set(u64::MAX));
    IS_FULL.set(false);

    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    check(dir.path(), &store, true);
    check_traces(&store, &traces_before, cut_short.as_ref().map(|(operation, _)| operation));
    let after = lists(&store);
    match cut_short {
        None => assert_eq!(after, before, "something changed although all was answered"),
        Some((operation, done)) => {
            assert!(
                is_between(&operation, &before, &done, &after),
                "{operation:?}: {before:?} became {after:?}"
            );
            let touched = touched(&operation);
            let others = |lists: &Lists| -> Lists {
                lists
                    .iter()
                    .filter(|(name, _)| Some(*name) != touched.as_ref())
                    .map(|(n, i)| (n.clone(), i.clone()))
                    .collect()
            };
            assert_eq!(others(&after), others(&before), "{operation:?} touched another image");
            // The store continues to work, and numbers never decrease while the image exists.
            if let Some(name) = touched
                && let (Some(was), Some(is)) = (before.get(&name), after.get(&name))
            {
                assert!(is.next_number >= was.next_number);
            }
        }
    }
    store.trim(&Contents).unwrap();
    check(dir.path(), &store, true);
    publish(&store, 0, 9).unwrap();
    check(dir.path(), &store, true);
}

/// How many changes on disk a history makes.
pub(super) fn count_steps(history: &[Operation]) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
    LEFT.with(|left| left.set(u64::MAX - 1));
    let mut pins = Vec::new();
    for operation in history {
        let _ = apply(&store, operation, &mut pins);
    }
    let left = LEFT.with(|left| left.replace(u64::MAX));
    IS_FULL.set(false);
    u64::MAX - 1 - left
}

proptest! {
    #![proptest_config(ProptestConfig { cases: u32::try_from(rounds(144)).unwrap(), ..ProptestConfig::default() })]
    #[test]
    fn a_process_that_ends_anywhere_loses_nothing_and_leaves_nothing(
        history in proptest::collection::vec(operation(), 1..14), at in any::<prop::sample::Index>(),
    ) {
        let steps = count_steps(&history);
        run(&history, at.index(usize::try_from(steps).unwrap() + 1) as u64);
    }
}

#[test]
fn an_interrupted_store_creation_is_completed_by_the_next_process() {
    for steps in 0.. {
        let dir = tempfile::tempdir().unwrap();
        LEFT.set(steps);
        let made = LocalDir::open(dir.path(), Access::WRITE);
        let is_over = !ended();
        LEFT.set(u64::MAX);
        // The process ends, and its lock is released.
        drop(made);
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        publish(&store, 0, 1).unwrap();
        check(dir.path(), &store, true);
        if is_over {
            assert!(steps > 4, "{steps}");
            return;
        }
    }
}

#[test]
fn a_copy_interrupted_before_each_change_is_continued() {
    for steps in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let open =
            || LocalDir::open(dir.path(), Access::Copy { new_chunk_bytes: CHUNK_BYTES_DEFAULT }).unwrap();
        let copy =
            |store: &LocalDir| apply(store, &Operation::Copy { image: 1, version: 4 }, &mut Vec::new());
        let store = open();
        LEFT.set(steps);
        let _ = copy(&store);
        let is_over = !ended();
        LEFT.set(u64::MAX);
        drop(store);
        // Its leftover part stays, because a copy does not empty `tmp`.
        let store = open();
        copy(&store).unwrap();
        check(dir.path(), &store, is_over);
        let holes = store.open_object(Hash::of(&shared_object(5))).unwrap().holes().unwrap();
        assert_eq!(holes.stretches(), std::slice::from_ref(&UNNEEDED));
        if is_over {
            assert!(steps > 15, "{steps}");
            return;
        }
    }
}

/// One history, ended before each of its changes in turn.
#[test]
fn a_process_that_ends_before_each_change_in_turn_loses_nothing() {
    use Operation::{
        Copy, Fill, Promote, Publish, RemoveImage, RemoveVersion, Repair, Revert, Run, Schedule, SetTrace,
        Stop, Trim,
    };
    let history = [
        Publish { image: 0, content: 1 },
        Publish { image: 0, content: 3 },
        Publish { image: 1, content: 1 },
        Promote { image: 0, version: 1, channel: true },
        Promote { image: 0, version: 2, channel: true },
        Revert { image: 0, channel: true },
        Schedule { image: 0, version: 3 },
        SetTrace { image: 0, version: 3, trace: Some(1) },
        SetTrace { image: 0, version: 3, trace: Some(2) },
        Fill(true),
        // It uses up the reserve file, so the second one finds none.
        Operation::PromoteDue { image: 0 },
        Revert { image: 0, channel: true },
        Fill(false),
        Promote { image: 0, version: 3, channel: true },
        Run { image: 0, version: 2 },
        RemoveVersion { image: 0, version: 2 },
        Operation::GiveUp { content: 5 },
        Stop,
        RemoveVersion { image: 0, version: 2 },
        Trim,
        // It needs the hole of the shared object. Here the object is written again; in the other case it is
        // copied.
        Publish { image: 0, content: 5 },
        RemoveVersion { image: 0, version: 5 },
        Trim,
        Copy { image: 1, version: 4 },
        RemoveVersion { image: 1, version: 4 },
        // One of its two objects is here.
        Copy { image: 1, version: 4 },
        Repair { image: 1, version: 4 },
        RemoveVersion { image: 1, version: 4 },
        // Removed, and copied again from the other store.
        Copy { image: 1, version: 4 },
        RemoveImage { image: 1 },
        RemoveImage { image: 0 },
    ];
    let steps = count_steps(&history);
    assert!(steps > 60, "{steps}");
    for at in 0..=steps {
        run(&history, at);
    }
}
