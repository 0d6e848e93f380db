//! Which chunks the store has already, and where: the base of storing equal chunks once.
//!
//! Built from the manifests when an import starts, so it cannot disagree with them. It takes about 64 bytes
//! of memory for each distinct chunk of the store (1 GiB for 1 TiB of distinct data at 64 KiB).

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

#[derive(Clone, Copy)]
struct Place {
    object: u32,
    stored_bytes: u32,
    offset: u64,
}

/// The chunks of a store.
pub(crate) struct ChunkIndex {
    objects: Vec<ObjectRef>,
    places: HashTable<Place>,
}

impl ChunkIndex {
    /// Reads all manifests. One that cannot be read is left out: then its chunks are stored once more.
    pub(crate) fn build(store: &dyn Store) -> Result<Self, ImageError> {
        let mut index = Self { objects: Vec::new(), places: HashTable::default() };
        let mut object_numbers: HashTable<u32> = HashTable::default();
        let mut seen: HashTable<()> = HashTable::default();
        for image in store.images()? {
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
                        index.add(store, &manifest, &mut object_numbers);
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

    fn add(&mut self, store: &dyn Store, manifest: &Manifest, numbers: &mut HashTable<u32>) {
        // The number that each of the manifest's objects has here; `None` for one that is not usable.
        let mut translated: Vec<Option<u32>> = Vec::with_capacity(manifest.objects().len());
        for object in manifest.objects() {
            let number = match numbers.entry(object.id) {
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
                self.places.entry(chunk.hash).or_insert(Place {
                    object: *object,
                    stored_bytes: chunk.stored_bytes,
                    offset: chunk.offset,
                });
            }
        }
    }

    /// Where a chunk is; its object is one of [`ChunkIndex::objects`].
    pub(crate) fn find(&self, hash: &Hash) -> Option<ChunkRef> {
        self.places.get(hash).map(|place| ChunkRef {
            hash: *hash,
            object: place.object,
            stored_bytes: place.stored_bytes,
            offset: place.offset,
        })
    }

    /// The objects that the chunks are in.
    pub(crate) fn objects(&self) -> &[ObjectRef] {
        &self.objects
    }
}
