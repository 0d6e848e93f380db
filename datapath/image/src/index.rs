//! Which chunks the store has already, and where: the base of storing equal chunks once.
//!
//! Built from the manifests when an import starts, so it cannot disagree with them. It takes about 64 bytes
//! of memory for each distinct chunk of the store (1 GiB for 1 TiB of distinct data at 64 KiB), and for each other place where
//! the store has it too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use headwater_store::{Hash, Store};

use crate::error::ImageError;
use crate::manifest::{ChunkRef, Manifest, ObjectRef};
use crate::units::usize_of_u32;

/// A table keyed by hashes, which are random already.
pub(crate) type HashTable<V> = HashMap<Hash, V, BuildHasherDefault<PrefixHasher>>;

/// Takes the first eight bytes of a [`Hash`] as they are.
#[derive(Clone, Copy, Default)]
pub(crate) struct PrefixHasher(u64);

impl Hasher for PrefixHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    }

    // The length that arrays put in front says nothing here.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

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
    /// Where chunks are besides: copies of stores that met, and what was stored again because it was damaged.
    others: HashTable<Vec<Place>>,
}

impl ChunkIndex {
    /// Reads all manifests. One that cannot be read is left out, as is an image whose list of versions is damaged: then its
    /// chunks are stored once more.
    pub(crate) fn build(store: &dyn Store) -> Result<Self, ImageError> {
        let mut index = Self {
            objects: Vec::new(),
            numbers: HashTable::default(),
            places: HashTable::default(),
            others: HashTable::default(),
        };
        let mut seen: HashTable<()> = HashTable::default();
        let listed = store.listed()?;
        for (image, error) in listed.unreadable {
            tracing::warn!(%image, %error, "its chunks are not shared");
        }
        for image in listed.images {
            for version in &image.versions {
                if seen.insert(version.manifest, ()).is_some() {
                    continue;
                }
                let manifest = store
                    .manifest(version.manifest)
                    .map_err(ImageError::from)
                    .and_then(|bytes| Manifest::decode(&bytes));
                match manifest {
                    Ok(manifest) if manifest.chunk_bytes() == store.chunk_bytes() => {
                        index.add(store, &manifest);
                    }
                    Ok(_) => {}
                    Err(e) => {
                        tracing::warn!(image = %image.name, version = version.number, error = %e,
                            "its chunks are not shared");
                    }
                }
            }
        }
        Ok(index)
    }

    fn add(&mut self, store: &dyn Store, manifest: &Manifest) {
        // The number that each of the manifest's objects has here; `None` for one that is not usable.
        let mut translated: Vec<Option<u32>> = Vec::with_capacity(manifest.objects().len());
        for object in manifest.objects() {
            let number = match self.numbers.entry(object.id) {
                Entry::Occupied(known) => Some(*known.get()),
                Entry::Vacant(new) => {
                    // One that is lost or has the wrong length must not be referred to by new versions.
                    let usable =
                        store.open_object(object.id).is_ok_and(|o| o.len_bytes() == object.len_bytes);
                    let number = u32::try_from(self.objects.len()).ok().filter(|_| usable);
                    if let Some(number) = number {
                        self.objects.push(*object);
                        new.insert(number);
                    }
                    number
                }
            };
            translated.push(number);
        }
        for (_, chunk) in manifest.data() {
            if let Some(Some(object)) = translated.get(usize_of_u32(chunk.object)) {
                let (stored_bytes, offset) = (chunk.stored_bytes, chunk.offset);
                let place = Place { object: *object, stored_bytes, offset };
                match self.places.entry(chunk.hash) {
                    Entry::Vacant(new) => {
                        new.insert(place);
                    }
                    Entry::Occupied(first) if *first.get() == place => {}
                    Entry::Occupied(_) => {
                        let others = self.others.entry(chunk.hash).or_default();
                        if !others.contains(&place) {
                            others.push(place);
                        }
                    }
                }
            }
        }
    }

    /// Where a chunk is; its object is one of [`ChunkIndex::objects`].
    pub(crate) fn find(&self, hash: &Hash) -> Option<ChunkRef> {
        self.copies(hash).next()
    }

    /// All places where a chunk is.
    pub(crate) fn copies(&self, hash: &Hash) -> impl Iterator<Item = ChunkRef> {
        let (hash, others) = (*hash, self.others.get(hash).map_or(&[][..], Vec::as_slice));
        self.places.get(&hash).into_iter().chain(others).map(move |place| ChunkRef {
            hash,
            object: place.object,
            stored_bytes: place.stored_bytes,
            offset: place.offset,
        })
    }

    /// The place of a chunk that a manifest of the store names, or another one where its object is not usable.
    pub(crate) fn find_as_in(&self, manifest: &Manifest, chunk: &ChunkRef) -> Option<ChunkRef> {
        let object = manifest.objects().get(usize_of_u32(chunk.object))?;
        match self.numbers.get(&object.id) {
            Some(number) => Some(ChunkRef { object: *number, ..*chunk }),
            None => self.find(&chunk.hash),
        }
    }

    /// An object by its number.
    pub(crate) fn object(&self, number: u32) -> Option<ObjectRef> {
        self.objects.get(usize_of_u32(number)).copied()
    }

    /// The objects that the chunks are in.
    pub(crate) fn objects(&self) -> &[ObjectRef] {
        &self.objects
    }
}
