//! An index of the chunks of a store by their hashes, so that an import stores equal chunks once, and a
//! repair finds other copies of a chunk.
//!
//! It is built from the manifests when an import starts, so it cannot disagree with them. It needs about 64
//! bytes of memory for each distinct chunk of the store (1 GiB for 1 TiB of distinct data at 64 KiB), and as
//! much for each further place of a chunk. A repair looks for the chunks of one version only, and needs
//! memory for these alone ([`ChunkIndex::build_for`]).
//!
//! It also knows how much of each data object is needed. In a store that cannot free parts of objects, such
//! as a bucket, a mostly unused object stays for its needed part, unless new versions avoid it
//! ([`ChunkIndex::avoid_sparse`]).

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::{BuildHasher, Hasher};
use std::sync::LazyLock;

use headwater_store::{Hash, Image, Store, Version};

use crate::error::{ImageError, ImageErrorKind};
use crate::manifest::{ChunkRef, Manifest, ObjectRef};
use crate::side_by_side::side_by_side;
use crate::units::{u64_of, usize_of_u32};

/// How many requests a remote store gets at a time, for manifests, which are in memory together, and for
/// lengths of data objects.
const READ_AT_A_TIME: usize = 8;
/// Manifests that are in memory together cover at most this many bytes of disks, unless it is a single
/// manifest: 200 MB of manifests.
const READ_AT_A_TIME_DISKS_BYTES: u64 = 256 << 30;

/// If less than 1 / `SPARSE` of an object is needed, new versions store that part again. With 2, twice as
/// much would be written; with 4, a store would be larger (decision 31).
const SPARSE: u64 = 3;

/// A table keyed by hashes. The hashes come from manifests, whose author may have chosen them. So a million
/// hashes with some bytes in common must not fall into the same slot of the table.
pub(crate) type HashTable<V> = HashMap<Hash, V, Secrets>;

/// Random numbers of this process, one for each eight bytes of a [`Hash`].
static SECRETS: LazyLock<[u64; 4]> = LazyLock::new(|| {
    let random = RandomState::new();
    [0_u8, 1, 2, 3].map(|number| random.hash_one(number))
});

/// A hasher that uses all bytes of a hash and the random numbers of this process.
#[derive(Clone, Copy)]
pub(crate) struct Secrets(&'static [u64; 4]);

impl Default for Secrets {
    fn default() -> Self {
        Self(&SECRETS)
    }
}

impl BuildHasher for Secrets {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        Mixer { secrets: self.0, mixed: 0 }
    }
}

/// Mixes a [`Hash`], and nothing else, with two multiplications, because each lookup of a chunk in memory
/// does this. The sum of products is the NH function of UMAC. For any two hashes, only one in 2^64 of all
/// random numbers makes them collide (proven).
#[derive(Clone, Copy)]
pub(crate) struct Mixer {
    secrets: &'static [u64; 4],
    mixed: u64,
}

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        let ([a, b, c, d], [p, q, r, s]) = (words(bytes), *self.secrets);
        let product = |x: u64, y: u64| u128::from(x).wrapping_mul(u128::from(y));
        let first = product(a.wrapping_add(p), b.wrapping_add(q));
        let sum = first.wrapping_add(product(c.wrapping_add(r), d.wrapping_add(s)));
        // A table takes the slot from the low bits and a tag from the high bits.
        self.mixed = low(sum) ^ low(sum >> 64);
    }

    // The length that arrays write first carries no information here.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.mixed
    }
}

/// The four numbers that make up a hash.
fn words(bytes: &[u8]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

fn low(bits: u128) -> u64 {
    u64::try_from(bits & u128::from(u64::MAX)).unwrap_or_default()
}

/// Called with how many more bytes of manifests were read, possibly none. An error ends the reading.
pub(crate) type OnRead<'a> = dyn FnMut(u64) -> Result<(), ImageError> + 'a;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    object: u32,
    stored_bytes: u32,
    offset: u64,
}

/// The chunks of a store.
pub(crate) struct ChunkIndex {
    objects: Vec<ObjectRef>,
    /// The number of each object.
    numbers: HashTable<u32>,
    places: HashTable<Place>,
    /// Further places of chunks: copies from merged stores, chunks that were stored again because of damage,
    /// and compacted chunks.
    others: HashTable<Vec<Place>>,
    /// For each object, how many of its bytes versions need.
    needed_bytes: Vec<u64>,
    /// For each object, how many bytes the store has of it: its length without its holes.
    kept_bytes: Vec<u64>,
    /// Whether nothing was left out, so that `needed_bytes` is complete.
    is_whole: bool,
    /// For each object, whether new versions avoid it. Empty: none is avoided.
    avoided: Vec<bool>,
}

impl ChunkIndex {
    /// Reads all manifests. A manifest that cannot be read is left out, as is an image whose list of versions
    /// is damaged; their chunks are then stored once more. If the store does not answer whether it has a data
    /// object, the call fails.
    pub(crate) fn build(store: &dyn Store, on_read: &mut OnRead<'_>) -> Result<Self, ImageError> {
        Self::build_of(store, None, on_read)
    }

    /// As [`ChunkIndex::build`], but only with the chunks of one version, so the memory does not depend on
    /// the size of the store. If the store does not answer, the call fails without asking for every manifest.
    pub(crate) fn build_for(
        store: &dyn Store,
        version: &Manifest,
        on_read: &mut OnRead<'_>,
    ) -> Result<Self, ImageError> {
        let wanted: HashTable<()> = version.data().map(|(_, chunk)| (chunk.hash, ())).collect();
        Self::build_of(store, Some(&wanted), on_read)
    }

    fn build_of(
        store: &dyn Store,
        wanted: Option<&HashTable<()>>,
        on_read: &mut OnRead<'_>,
    ) -> Result<Self, ImageError> {
        let mut index = Self {
            objects: Vec::new(),
            numbers: HashTable::default(),
            places: HashTable::default(),
            others: HashTable::default(),
            needed_bytes: Vec::new(),
            kept_bytes: Vec::new(),
            is_whole: wanted.is_none(),
            avoided: Vec::new(),
        };
        let mut seen: HashTable<()> = HashTable::default();
        let listed = store.listed()?;
        for (image, error) in listed.unreadable {
            index.is_whole = false;
            tracing::warn!(%image, %error, "the list of versions of an image cannot be read: chunks of its versions are not found, and may be stored again");
        }
        let versions = listed.images.iter().flat_map(|image| image.versions.iter().map(move |v| (image, v)));
        let versions: Vec<_> =
            versions.filter(|(_, version)| seen.insert(version.manifest, ()).is_none()).collect();
        // Sequential requests would wait for as many round trips.
        let at_a_time = if store.is_remote() { READ_AT_A_TIME } else { 1 };
        let mut left = versions.as_slice();
        while let Some((versions, rest)) = left.split_at_checked(together(left, at_a_time).max(1)) {
            left = rest;
            let read = side_by_side("index", versions, |(_, version)| read_manifest(store, version));
            let read = read.map_err(no_threads)?;
            let (mut manifests, mut read_bytes) = (Vec::with_capacity(versions.len()), 0_u64);
            for ((image, version), manifest) in versions.iter().zip(read) {
                match manifest {
                    Ok((len_bytes, manifest)) if manifest.chunk_bytes() == store.chunk_bytes() => {
                        read_bytes = read_bytes.saturating_add(len_bytes);
                        manifests.push(manifest);
                    }
                    Ok(_) => index.is_whole = false,
                    Err(e) if wanted.is_some() && e.kind() == ImageErrorKind::Io => return Err(e),
                    Err(e) => {
                        index.is_whole = false;
                        tracing::warn!(image = %image.name, version = version.number, error = %e,
                            "the manifest of a version cannot be read: its chunks are not found, and may be stored again");
                    }
                }
            }
            on_read(read_bytes)?;
            index.look_at_objects(store, &manifests, at_a_time, on_read)?;
            manifests.iter().for_each(|manifest| index.add(manifest, wanted));
        }
        Ok(index)
    }

    /// Gives a number to those objects of the manifests that have none yet. New versions must not refer to an
    /// object that is lost or has the wrong length.
    fn look_at_objects(
        &mut self,
        store: &dyn Store,
        manifests: &[Manifest],
        at_a_time: usize,
        on_read: &mut OnRead<'_>,
    ) -> Result<(), ImageError> {
        let mut new: Vec<&ObjectRef> = Vec::new();
        let mut seen: HashTable<u64> = HashTable::default();
        for object in manifests.iter().flat_map(|manifest| manifest.objects()) {
            let is_known = self.numbers.contains_key(&object.id);
            if !is_known && seen.insert(object.id, object.len_bytes) != Some(object.len_bytes) {
                new.push(object);
            }
        }
        for objects in new.chunks(at_a_time) {
            let kept = side_by_side("index", objects, |object| kept_of(store, object));
            for (object, kept_bytes) in objects.iter().zip(kept.map_err(no_threads)?) {
                if let Some(kept_bytes) = kept_bytes?
                    && let (Entry::Vacant(new), Ok(number)) =
                        (self.numbers.entry(object.id), u32::try_from(self.objects.len()))
                {
                    new.insert(number);
                    self.objects.push(**object);
                    self.needed_bytes.push(0);
                    self.kept_bytes.push(kept_bytes);
                }
            }
            on_read(0)?;
        }
        Ok(())
    }

    /// Adds a manifest whose objects were examined; only its wanted chunks if `wanted` is given.
    fn add(&mut self, manifest: &Manifest, wanted: Option<&HashTable<()>>) {
        // The number of each of the manifest's objects in this index; `None` if it is not usable.
        let number = |object: &ObjectRef| self.numbers.get(&object.id).copied();
        let translated: Vec<Option<u32>> = manifest.objects().iter().map(number).collect();
        let is_wanted = |chunk: &ChunkRef| wanted.is_none_or(|wanted| wanted.contains_key(&chunk.hash));
        for (_, chunk) in manifest.data().filter(|(_, chunk)| is_wanted(chunk)) {
            if let Some(Some(object)) = translated.get(usize_of_u32(chunk.object)) {
                let (stored_bytes, offset) = (chunk.stored_bytes, chunk.offset);
                let place = Place { object: *object, stored_bytes, offset };
                let is_new = match self.places.entry(chunk.hash) {
                    Entry::Vacant(new) => {
                        new.insert(place);
                        true
                    }
                    Entry::Occupied(first) if *first.get() == place => false,
                    Entry::Occupied(_) => {
                        let others = self.others.entry(chunk.hash).or_default();
                        let is_new = !others.contains(&place);
                        if is_new {
                            others.push(place);
                        }
                        is_new
                    }
                };
                if is_new && let Some(needed) = self.needed_bytes.get_mut(usize_of_u32(*object)) {
                    *needed = needed.saturating_add(u64::from(stored_bytes));
                }
            }
        }
    }

    /// Avoids data objects of which versions need less than a third from now on. What a new version needs of
    /// them is stored again, so that they can be removed with the older versions. If some versions cannot be
    /// read, the needed bytes are unknown, and nothing is avoided.
    pub(crate) fn avoid_sparse(&mut self) {
        let is_sparse = |(kept, needed): (&u64, &u64)| needed.saturating_mul(SPARSE) < *kept;
        self.avoided = self.kept_bytes.iter().zip(&self.needed_bytes).map(is_sparse).collect();
        if !self.is_whole {
            self.avoided.clear();
        }
    }

    fn is_avoided(&self, object: u32) -> bool {
        self.avoided.get(usize_of_u32(object)).is_some_and(|avoided| *avoided)
    }

    /// The place of a chunk; its object is one of [`ChunkIndex::objects`].
    pub(crate) fn find(&self, hash: &Hash) -> Option<ChunkRef> {
        self.copies(hash).next()
    }

    /// Whether the store has a chunk only in objects that are avoided.
    pub(crate) fn is_only_avoided(&self, hash: &Hash) -> bool {
        self.places.contains_key(hash) && self.find(hash).is_none()
    }

    /// Whether a manifest of the store has a chunk in an object that is avoided.
    pub(crate) fn avoids(&self, manifest: &Manifest, chunk: &ChunkRef) -> bool {
        self.place_in(manifest, chunk).is_some_and(|place| self.is_avoided(place.object))
    }

    /// All places of a chunk except those that are avoided.
    pub(crate) fn copies(&self, hash: &Hash) -> impl Iterator<Item = ChunkRef> {
        self.all_copies(hash).filter(|chunk| !self.is_avoided(chunk.object))
    }

    fn all_copies(&self, hash: &Hash) -> impl Iterator<Item = ChunkRef> {
        let (hash, others) = (*hash, self.others.get(hash).map_or(&[][..], Vec::as_slice));
        self.places.get(&hash).into_iter().chain(others).map(move |place| ChunkRef {
            hash,
            object: place.object,
            stored_bytes: place.stored_bytes,
            offset: place.offset,
        })
    }

    /// The place of a chunk in a manifest of the store; `None` if its object is not usable.
    pub(crate) fn place_in(&self, manifest: &Manifest, chunk: &ChunkRef) -> Option<ChunkRef> {
        let object = manifest.objects().get(usize_of_u32(chunk.object))?;
        let number = self.numbers.get(&object.id)?;
        Some(ChunkRef { object: *number, ..*chunk })
    }

    /// The place of a chunk in a manifest of the store, or another place if its object is not usable.
    pub(crate) fn find_as_in(&self, manifest: &Manifest, chunk: &ChunkRef) -> Option<ChunkRef> {
        self.place_in(manifest, chunk)
            .or_else(|| self.find(&chunk.hash))
            .or_else(|| self.all_copies(&chunk.hash).next())
    }

    /// An object by its number.
    pub(crate) fn object(&self, number: u32) -> Option<ObjectRef> {
        self.objects.get(usize_of_u32(number)).copied()
    }

    /// The objects in which the chunks are.
    pub(crate) fn objects(&self) -> &[ObjectRef] {
        &self.objects
    }
}

/// How many of the versions are read at a time.
fn together(versions: &[(&Image, &Version)], at_a_time: usize) -> usize {
    let mut bytes = 0_u64;
    let fits = |(_, version): &&(&Image, &Version)| {
        bytes = bytes.saturating_add(version.size_bytes);
        bytes <= READ_AT_A_TIME_DISKS_BYTES
    };
    versions.iter().take(at_a_time).take_while(fits).count()
}

/// A manifest and its length.
fn read_manifest(store: &dyn Store, version: &Version) -> Result<(u64, Manifest), ImageError> {
    let bytes = store.manifest(version.manifest)?;
    Ok((u64_of(bytes.len()), Manifest::decode(&bytes)?))
}

/// How many bytes the store has of an object; `None` if new versions must not refer to it. If the store does
/// not answer, the call fails. If the object were considered lost instead, all of its chunks would be stored
/// again, and a version made from one that needs the object would be refused as damaged.
fn kept_of(store: &dyn Store, object: &ObjectRef) -> Result<Option<u64>, ImageError> {
    match store.open_object(object.id).map_err(ImageError::from) {
        Ok(opened) if opened.len_bytes() != object.len_bytes => Ok(None),
        // A remote store has no holes in objects, and a check would need a request.
        Ok(_) if store.is_remote() => Ok(Some(object.len_bytes)),
        Ok(opened) => {
            let gone = opened.holes().map_or(0, |holes| holes.bytes());
            Ok(Some(object.len_bytes.saturating_sub(gone)))
        }
        Err(e) if e.kind().is_damage() => Ok(None),
        Err(e) => Err(e.context("cannot check the data objects of the store")),
    }
}

fn no_threads(error: std::io::Error) -> ImageError {
    ImageError::from_os("cannot start the threads that read the store", &error)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use headwater_block::Device;
    use headwater_store::{
        Access, Image, ImageName, LocalDir, Object, Pin, Publication, Removed, StoreError,
    };
    use headwater_testkit::{ReferenceDisk, ReferenceOptions, Rng};
    use parking_lot::{Condvar, Mutex};

    use super::*;
    use crate::{ImportOptions, import};

    /// Callers wait here until there are two.
    #[derive(Default)]
    struct Meeting {
        came: Mutex<u32>,
        comes: Condvar,
    }

    impl Meeting {
        fn wait(&self) {
            let mut came = self.came.lock();
            *came += 1;
            self.comes.notify_all();
            let late = self.comes.wait_while_for(&mut came, |came| *came < 2, Duration::from_secs(60));
            assert!(!late.timed_out(), "no second request arrives at the same time");
        }
    }

    /// A store on another host that answers only when it gets two requests of one kind at the same time.
    struct Far {
        store: LocalDir,
        manifests: Meeting,
        objects: Meeting,
    }

    impl Store for Far {
        fn chunk_bytes(&self) -> u32 {
            self.store.chunk_bytes()
        }

        fn is_remote(&self) -> bool {
            true
        }

        fn images(&self) -> Result<Vec<Image>, StoreError> {
            self.store.images()
        }

        fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
            self.store.image(name)
        }

        fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
            self.manifests.wait();
            self.store.manifest(id)
        }

        fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
            self.objects.wait();
            self.store.open_object(id)
        }

        fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
            self.store.pin(manifest)
        }

        fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
            self.store.publish()
        }

        fn change(
            &self,
            name: &ImageName,
            change: &mut dyn FnMut(&mut Image) -> Result<(), StoreError>,
        ) -> Result<(), StoreError> {
            self.store.change(name, change)
        }

        fn remove(&self, name: &ImageName, number: Option<u32>) -> Result<Removed, StoreError> {
            self.store.remove(name, number)
        }
    }

    fn disk_of(bytes: &[u8]) -> Arc<dyn Device> {
        let options = ReferenceOptions { read_only: true, ..Default::default() };
        Arc::new(ReferenceDisk::with_contents(bytes.to_vec(), options))
    }

    /// A store with more versions than are read at a time, each with an object of its own, and their
    /// manifests.
    fn many_versions(dir: &Path) -> (LocalDir, Vec<Hash>) {
        let store = LocalDir::open(dir, Access::WRITE).unwrap();
        let mut bytes = Rng::new(1).bytes(1 << 20);
        let mut manifests = Vec::new();
        for n in 0..READ_AT_A_TIME + 4 {
            bytes[n * 65_536..][..65_536].copy_from_slice(&Rng::new(2 + n as u64).bytes(65_536));
            let options = ImportOptions::new(format!("disk-{}", n % 3).parse().unwrap(), 1_700_000_000);
            let imported = import(disk_of(&bytes), &store, &options, &mut |_| {}).unwrap();
            manifests.push(imported.version.manifest);
        }
        (store, manifests)
    }

    #[test]
    fn a_cancelled_import_reads_at_most_one_batch_of_manifests() {
        let dir = tempfile::tempdir().unwrap();
        let (store, manifests) = many_versions(dir.path());
        let far = Far { store, manifests: Meeting::default(), objects: Meeting::default() };
        let options = ImportOptions::new("new".parse().unwrap(), 1_700_000_000);
        options.cancel.cancel();
        let error = import(disk_of(&[1; 4096]), &far, &options, &mut |_| {}).unwrap_err();
        assert_eq!(error.kind(), ImageErrorKind::Cancelled);
        let asked = usize::try_from(*far.manifests.came.lock()).unwrap();
        assert!(asked <= READ_AT_A_TIME && asked < manifests.len(), "{asked} were requested");
        assert_eq!(*far.objects.came.lock(), 0);
    }

    #[test]
    fn hashes_chosen_to_collide_get_slots_of_their_own() {
        const ALIKE: u64 = 200_000;
        let table: HashTable<()> = HashTable::default();
        // Each hash shares three of its four parts with all others: for example the first eight bytes, and
        // sixteen more.
        for part in 0..4 {
            let mixed = |n: u64| {
                let mut hash = Hash::of(b"chosen");
                hash.0[part * 8..][..8].copy_from_slice(&n.to_le_bytes());
                table.hasher().hash_one(hash)
            };
            let all: HashSet<u64> = (0..ALIKE).map(mixed).collect();
            assert_eq!(all.len() as u64, ALIKE, "part {part}");
            // At random, 140,000 of the 262,144 slots of a table for as many would be used.
            let places: HashSet<u64> = all.iter().map(|mixed| mixed % (1 << 18)).collect();
            assert!(places.len() > 50_000, "part {part}: all are in {} places", places.len());
        }
    }

    #[test]
    fn remote_manifests_are_read_concurrently_with_the_same_index() {
        let dir = tempfile::tempdir().unwrap();
        // One manifest is damaged, and one object is lost.
        let (store, manifests) = many_versions(dir.path());
        let decoded: Vec<Manifest> =
            manifests.iter().map(|id| Manifest::decode(&store.manifest(*id).unwrap()).unwrap()).collect();
        std::fs::remove_file(dir.path().join(format!("manifests/{}", manifests[3]))).unwrap();
        let lost = decoded[5].objects().last().unwrap().id;
        std::fs::remove_file(dir.path().join(format!("objects/{lost}"))).unwrap();

        let one_by_one = ChunkIndex::build(&store, &mut |_| Ok(())).unwrap();
        let far = Far { store, manifests: Meeting::default(), objects: Meeting::default() };
        let together = ChunkIndex::build(&far, &mut |_| Ok(())).unwrap();
        assert!(!one_by_one.objects().is_empty() && one_by_one.objects() == together.objects());
        assert!(one_by_one.objects().iter().all(|object| object.id != lost));
        for (_, chunk) in decoded.iter().flat_map(Manifest::data) {
            let copies = |index: &ChunkIndex| index.copies(&chunk.hash).collect::<Vec<_>>();
            assert_eq!(copies(&one_by_one), copies(&together));
        }
        assert_eq!(one_by_one.places.len(), together.places.len());

        // For one version: its chunks, wherever they are, and no others.
        let (wanted, mut read_bytes) = (decoded.last().unwrap(), 0_u64);
        let part = ChunkIndex::build_for(&far.store, wanted, &mut |bytes| {
            read_bytes += bytes;
            Ok(())
        });
        let part = part.unwrap();
        for (_, chunk) in decoded.iter().flat_map(Manifest::data) {
            let is_wanted = wanted.data().any(|(_, of_it)| of_it.hash == chunk.hash);
            let all = one_by_one.copies(&chunk.hash).filter(|_| is_wanted).collect::<Vec<_>>();
            assert_eq!(part.copies(&chunk.hash).collect::<Vec<_>>(), all);
        }
        assert!(part.places.len() < one_by_one.places.len());
        let readable = decoded.iter().enumerate().filter(|(number, _)| *number != 3);
        assert_eq!(read_bytes, readable.map(|(_, manifest)| manifest.encode().len() as u64).sum::<u64>());
        let stopped = ChunkIndex::build_for(&far.store, wanted, &mut |_| {
            Err(ImageError::new(ImageErrorKind::Cancelled, "stopped"))
        });
        assert_eq!(stopped.err().unwrap().kind(), ImageErrorKind::Cancelled);
    }
}
