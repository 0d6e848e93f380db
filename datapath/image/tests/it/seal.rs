//! Versions made from a version: only the changes are read and stored. A store that fails at any of its
//! operations has either the old state or the complete new version.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fixture::{disk_of, files, import_bytes, noise, read_all, store};
use headwater_block::ByteRange;
use headwater_image::{
    Basis, Cancel, ChunkCache, ImageError, ImageErrorKind, ImportOptions, Imported, Manifest, VersionReader,
    import, verify,
};
use headwater_store::{
    Access, Adopted, Committed, Hash, Image, ImageName, LocalDir, NewVersion, Object, Pin, Publication,
    Removed, Store, StoreError, StoreErrorKind, Version,
};

const CHUNK: usize = 65_536;
const BLOCK: usize = 4096;

/// The blocks of a disk that differ, reported in small pieces.
fn basis(parent: Hash, old: &[u8], new: &[u8]) -> Basis {
    let blocks: Vec<bool> = old.chunks(BLOCK).zip(new.chunks(BLOCK)).map(|(a, b)| a != b).collect();
    let changes = move |range: ByteRange, max: usize| {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        for block in range.offset() / BLOCK as u64..range.end().div_ceil(BLOCK as u64) {
            let changed = blocks[block as usize];
            let end = ((block + 1) * BLOCK as u64).min(range.end());
            let len = end - (block * BLOCK as u64).max(range.offset());
            let full = runs.len() == max.min(5);
            match runs.last_mut() {
                Some(last) if last.1 == changed => last.0 += len,
                _ if full => break,
                _ => runs.push((len, changed)),
            }
        }
        runs
    };
    Basis { parent, changes: Arc::new(changes) }
}

fn seal(store: &dyn Store, basis: Basis, new: &[u8]) -> Result<Imported, ImageError> {
    let mut options = ImportOptions::new("disk".parse().unwrap(), 1_700_000_100);
    options.basis = Some(basis);
    options.note = "sealed".into();
    options.author = "somebody".into();
    import(disk_of(new.to_vec()), store, &options, &mut |_| {})
}

/// A disk of 40 chunks and a bit, with holes, and a changed copy of it.
fn before_and_after() -> (Vec<u8>, Vec<u8>) {
    let mut old = vec![0; 40 * CHUNK + 1536];
    noise(&mut old, 5);
    old[10 * CHUNK..20 * CHUNK].fill(0);
    let mut new = old.clone();
    new[3 * CHUNK + 512] ^= 1; // one sector
    noise(&mut new[12 * CHUNK..12 * CHUNK + 2 * BLOCK], 6); // in a hole
    new[25 * CHUNK..28 * CHUNK].fill(0); // whole chunks became zero
    let (head, tail) = new.split_at_mut(30 * CHUNK);
    tail[..CHUNK].copy_from_slice(&head[..CHUNK]); // a copy of another chunk
    let end = new.len();
    new[end - 100] ^= 1; // the last chunk, which is cut
    (old, new)
}

fn read_version(store: &LocalDir, version: &Version) -> Vec<u8> {
    let reader = VersionReader::open(store, version.manifest, ChunkCache::new(8 << 20)).unwrap();
    read_all(&*reader)
}

#[test]
fn the_cost_of_a_sealed_version_follows_the_changes() {
    let (_dir, store) = store();
    let (old, new) = before_and_after();
    let parent = import_bytes(&store, "disk", &old).version;
    let sealed = seal(&store, basis(parent.manifest, &old, &new), &new).unwrap();
    assert!(read_version(&store, &sealed.version) == new && read_version(&store, &parent) == old);
    // Chunks 3, 12, 25 to 27, 30 and the last were read. Three of them have new content.
    assert_eq!(sealed.read_bytes, (6 * CHUNK + 1536) as u64);
    let stored = sealed.version.stored_bytes;
    assert!(stored < (CHUNK + 2 * BLOCK + 1536 + 20_000) as u64, "{stored} bytes were stored");
    let version = &sealed.version;
    assert_eq!((version.number, version.note.as_str(), version.author.as_str()), (2, "sealed", "somebody"));
    let manifest = Manifest::decode(&store.manifest(version.manifest).unwrap()).unwrap();
    assert_eq!(manifest.parent(), Some(parent.manifest));
    let found = verify(&store, version.manifest, &Cancel::new(), &mut |_| {}).unwrap();
    assert_eq!((found.damaged_chunks, found.objects.len()), (0, 0));
    // The old version can be removed: what the new one needs of it stays.
    store.remove(&"disk".parse().unwrap(), Some(1)).unwrap();
    assert!(read_version(&store, version) == new);
}

#[test]
fn a_seal_without_changes_or_of_another_disk_is_refused() {
    let (dir, store) = store();
    let (old, new) = before_and_after();
    let parent = import_bytes(&store, "disk", &old).version;
    let before = files(dir.path());
    let mut everything = basis(parent.manifest, &old, &new);
    everything.changes = Arc::new(|range, _| vec![(range.len(), true)]);
    for basis in [basis(parent.manifest, &old, &old), everything] {
        let refused = seal(&store, basis, &old).unwrap_err();
        assert_eq!(refused.kind(), ImageErrorKind::Unchanged);
        assert!(refused.to_string().contains("nothing differs"), "{refused}");
    }
    let refused = seal(&store, basis(parent.manifest, &old, &new), &new[..30 * CHUNK]).unwrap_err();
    assert!(refused.to_string().contains("cannot be based on a version of"), "{refused}");
    assert_eq!(files(dir.path()), before);
    let gone = seal(&store, basis(Hash::of(b"no version"), &old, &new), &new).unwrap_err();
    assert_eq!(gone.kind(), ImageErrorKind::NotFound);
}

/// A store that fails at one operation and at all later ones, as if the process had died.
struct FailingStore {
    store: LocalDir,
    left: Arc<AtomicU64>,
}

fn one_more(left: &AtomicU64) -> Result<(), StoreError> {
    let was = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    was.map(drop).map_err(|_| StoreError::new(StoreErrorKind::Io, "the store failed"))
}

struct FailingPublication {
    inner: Box<dyn Publication>,
    left: Arc<AtomicU64>,
}

impl Publication for FailingPublication {
    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        one_more(&self.left)?;
        self.inner.append(bytes)
    }
    fn finish_object_telling(
        &mut self,
        sent: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<Option<(Hash, u64)>, StoreError> {
        one_more(&self.left)?;
        self.inner.finish_object_telling(sent)
    }
    fn copy_object(
        &mut self,
        object: &dyn Object,
        copied: &mut dyn FnMut(u64) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.inner.copy_object(object, copied)
    }
    fn adopt(
        self: Box<Self>,
        name: &ImageName,
        version: &Version,
        manifest: &[u8],
    ) -> Result<Option<Adopted>, StoreError> {
        self.inner.adopt(name, version, manifest)
    }
    fn commit(self: Box<Self>, version: NewVersion<'_>) -> Result<Committed, StoreError> {
        one_more(&self.left)?;
        let done = self.inner.commit(version)?;
        // The version was published, but the caller gets an error.
        one_more(&self.left)?;
        Ok(done)
    }
}

impl Store for FailingStore {
    fn chunk_bytes(&self) -> u32 {
        self.store.chunk_bytes()
    }
    fn images(&self) -> Result<Vec<Image>, StoreError> {
        one_more(&self.left)?;
        self.store.images()
    }
    fn image(&self, name: &ImageName) -> Result<Option<Image>, StoreError> {
        one_more(&self.left)?;
        self.store.image(name)
    }
    fn manifest(&self, id: Hash) -> Result<Vec<u8>, StoreError> {
        one_more(&self.left)?;
        self.store.manifest(id)
    }
    fn open_object(&self, id: Hash) -> Result<Arc<dyn Object>, StoreError> {
        one_more(&self.left)?;
        self.store.open_object(id)
    }
    fn pin(&self, manifest: Hash) -> Result<Pin, StoreError> {
        self.store.pin(manifest)
    }
    fn publish(&self) -> Result<Box<dyn Publication>, StoreError> {
        one_more(&self.left)?;
        let inner = self.store.publish()?;
        Ok(Box::new(FailingPublication { inner, left: Arc::clone(&self.left) }))
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

#[test]
fn a_failing_store_has_the_old_state_or_the_new_version() {
    let (old, new) = before_and_after();
    let (mut failures, mut unconfirmed) = (0, 0);
    for left in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let parent = import_bytes(&store, "disk", &old).version;
        let before = files(dir.path());
        let dying = FailingStore { store: store.clone(), left: Arc::new(AtomicU64::new(left)) };
        let outcome = seal(&dying, basis(parent.manifest, &old, &new), &new);
        drop((dying, store));
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let image = store.image(&"disk".parse().unwrap()).unwrap().unwrap();
        assert!(read_version(&store, &image.versions[0]) == old, "after {left} operations");
        match (&outcome, image.versions.get(1)) {
            (Ok(_), Some(version)) => {
                assert!(read_version(&store, version) == new);
                break;
            }
            (Err(_), Some(version)) => {
                unconfirmed += 1;
                assert!(read_version(&store, version) == new, "after {left} operations");
            }
            (Err(_), None) => {
                failures += 1;
                assert_eq!(files(dir.path()), before, "something is left after {left} operations");
            }
            (Ok(_), None) => panic!("it was reported as published after {left} operations"),
        }
        // The next attempt succeeds, also on top of the version whose publication returned an error.
        let again = seal(&store, basis(parent.manifest, &old, &new), &new).unwrap();
        assert!(read_version(&store, &again.version) == new);
    }
    assert!(failures > 4 && unconfirmed == 1, "{failures} failures, {unconfirmed} unconfirmed");
}
