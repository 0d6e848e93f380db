//! Reads and checks parts of a long manifest in a directory, with the hash tree that is stored beside it.
//! So a version can be opened without reading its whole manifest.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::hash_tree::{GROUP_BYTES, HashTree, tree_bytes_max};
use crate::local_dir::Inner;
use crate::local_dir::files::{read_small, replace_file};
use crate::local_dir::layout::Layout;
use crate::store::{MANIFEST_MAX_BYTES, Parts};

/// A shorter manifest has no tree, because reading the whole manifest is about as fast as reading the tree.
pub(super) const TREE_FROM_BYTES: u64 = 4 * GROUP_BYTES;

impl Inner {
    /// Writes the tree of a manifest if it is long enough. Without a tree a version only opens more slowly.
    pub(super) fn put_tree(&self, id: Hash, manifest: &[u8]) {
        let is_long = u64::try_from(manifest.len()).is_ok_and(|len| len >= TREE_FROM_BYTES);
        let Some(tree) = is_long.then(|| HashTree::of(manifest)).flatten() else { return };
        let (path, bytes) = (self.layout.tree(id), tree.encode());
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if read_small(&path, len).is_ok_and(|there| there == bytes) {
            return;
        }
        let made = self
            .make_folder(&self.layout.trees())
            .map_err(|e| StoreError::from_os(format!("cannot make {}", self.layout.trees().display()), e));
        if let Err(error) = made.and_then(|()| replace_file(&self.temporary("tree"), &path, &bytes)) {
            tracing::warn!(version = %id.short(), %error, "cannot write the hash tree of a version: without it the version opens more slowly");
        }
    }
}

/// Opens a manifest with its tree. `None`: there is no tree, or it does not belong to this manifest.
pub(super) fn open(layout: &Layout, id: Hash) -> Result<Option<Arc<dyn Parts>>, StoreError> {
    let path = layout.manifest(id);
    let failed = |e| StoreError::from_os(format!("cannot read the manifest {}", path.display()), e);
    let file = File::open(&path).map_err(failed)?;
    let len_bytes = file.metadata().map_err(failed)?.len();
    if !(TREE_FROM_BYTES..=MANIFEST_MAX_BYTES).contains(&len_bytes) {
        return Ok(None);
    }
    let tree = match read_small(&layout.tree(id), tree_bytes_max(len_bytes)) {
        Ok(bytes) => HashTree::decode(&bytes, id, len_bytes),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => {
            tracing::warn!(version = %id.short(), error = %e, "the hash tree of a version cannot be read: its whole manifest is read instead");
            return Ok(None);
        }
    };
    if tree.is_none() {
        tracing::warn!(version = %id.short(), "the hash tree of a version does not belong to its manifest: the whole manifest is read instead");
    }
    Ok(tree.map(|tree| Arc::new(FileParts { path, file, len_bytes, tree }) as Arc<dyn Parts>))
}

struct FileParts {
    path: PathBuf,
    file: File,
    len_bytes: u64,
    tree: HashTree,
}

impl Parts for FileParts {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        if range.start >= range.end {
            return Ok(Vec::new());
        }
        if range.end > self.len_bytes {
            return Err(self.damaged("it is incomplete"));
        }
        let groups = range.start / GROUP_BYTES..range.end.div_ceil(GROUP_BYTES);
        let read = self.read_groups(&self.file, groups.clone());
        // A manifest that was repaired since is another file.
        let mut bytes = read.or_else(|error| {
            let repaired = File::open(&self.path).map_err(|e| self.failed(e));
            repaired.and_then(|file| self.read_groups(&file, groups.clone())).map_err(|_| error)
        })?;
        let index = |byte: u64| usize::try_from(byte - groups.start * GROUP_BYTES).unwrap_or(usize::MAX);
        bytes.truncate(index(range.end));
        bytes.drain(..index(range.start));
        Ok(bytes)
    }
}

impl FileParts {
    /// Reads and checks groups of a manifest.
    fn read_groups(&self, file: &File, groups: Range<u64>) -> Result<Vec<u8>, StoreError> {
        let from = groups.start * GROUP_BYTES;
        let to = groups.end.saturating_mul(GROUP_BYTES).min(self.len_bytes);
        let mut bytes = vec![0; usize::try_from(to - from).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, from).map_err(|e| self.failed(e))?;
        let group_bytes = usize::try_from(GROUP_BYTES).unwrap_or(usize::MAX);
        let numbers = usize::try_from(groups.start).unwrap_or(usize::MAX)..;
        if numbers.zip(bytes.chunks(group_bytes)).all(|(group, bytes)| self.tree.holds(group, bytes)) {
            return Ok(bytes);
        }
        Err(self.damaged("the hash of its bytes is not the one in its name"))
    }

    fn failed(&self, error: std::io::Error) -> StoreError {
        StoreError::from_read(format!("cannot read the manifest {}", self.path.display()), error)
    }

    fn damaged(&self, why: &str) -> StoreError {
        let message = format!("the manifest {} is damaged: {why}", self.path.display());
        StoreError::new(StoreErrorKind::Damaged, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_dir::crash_tests::version;
    use crate::local_dir::{Access, LocalDir};
    use crate::store::Store;

    const MANIFEST: usize = 5 * GROUP_BYTES as usize + 77;

    fn bytes(seed: u8) -> Vec<u8> {
        (0..MANIFEST).map(|at| (at / 3) as u8 ^ seed).collect()
    }

    fn publish(store: &LocalDir, manifest: &[u8]) -> Hash {
        let name = "image".parse().unwrap();
        let new = version(&name, manifest, &[]);
        store.publish().unwrap().commit(new).unwrap().version.manifest
    }

    fn flip(path: &std::path::Path, at: u64) {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    #[test]
    fn any_range_of_a_manifest_can_be_read_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let bytes = bytes(1);
        let id = publish(&store, &bytes);
        let parts = store.manifest_parts(id).unwrap().unwrap();
        let len = bytes.len() as u64;
        assert_eq!(parts.len_bytes(), len);
        let edges = [0, 1, 80, GROUP_BYTES - 1, GROUP_BYTES, GROUP_BYTES + 1, 3 * GROUP_BYTES, len - 1, len];
        for from in edges {
            for to in edges.into_iter().filter(|to| *to >= from) {
                let read = parts.read(from..to).unwrap();
                assert!(read == bytes[from as usize..to as usize], "{from}..{to}");
            }
        }
        assert_eq!(parts.read(0..len + 1).unwrap_err().kind(), StoreErrorKind::Damaged);
        flip(&store.inner.layout.manifest(id), 2 * GROUP_BYTES + 5);
        assert!(parts.read(0..2 * GROUP_BYTES).is_ok() && parts.read(3 * GROUP_BYTES..len).is_ok());
        let error = parts.read(GROUP_BYTES..2 * GROUP_BYTES + 1).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
        // Publishing the same manifest again repairs the tree.
        assert_eq!(publish(&store, &bytes), id);
        assert!(parts.read(0..len).unwrap() == bytes);
        // The manifest was truncated after that.
        File::options().write(true).open(store.inner.layout.manifest(id)).unwrap().set_len(len - 1).unwrap();
        let parts = store.manifest_parts(id).unwrap();
        assert!(parts.is_none(), "the tree is of a longer one");
    }

    #[test]
    fn a_missing_or_damaged_hash_tree_is_not_needed() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let short = publish(&store, &bytes(2)[..TREE_FROM_BYTES as usize - 1]);
        assert!(store.manifest_parts(short).unwrap().is_none());
        assert!(!store.inner.layout.tree(short).exists());
        let id = publish(&store, &bytes(3));
        let tree = store.inner.layout.tree(id);
        flip(&tree, 100);
        assert!(store.manifest_parts(id).unwrap().is_none());
        // Publishing the same manifest again writes the tree again, even in a store without the folder.
        std::fs::remove_dir_all(store.inner.layout.trees()).unwrap();
        assert!(store.manifest_parts(id).unwrap().is_none());
        assert_eq!(publish(&store, &bytes(3)), id);
        assert!(store.manifest_parts(id).unwrap().is_some());
        assert_eq!(store.manifest(id).unwrap(), bytes(3));
        store.remove(&"image".parse().unwrap(), None).unwrap();
        assert!(!tree.exists());
        assert_eq!(store.manifest_parts(id).map(drop).unwrap_err().kind(), StoreErrorKind::NotFound);
    }

    #[test]
    fn a_tree_that_cannot_be_removed_does_not_block_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        let id = publish(&store, &bytes(4));
        let layout = &store.inner.layout;
        let (left, lost) = (layout.tree(Hash::of(b"left")), layout.object(Hash::of(b"lost")));
        std::fs::create_dir(&left).unwrap();
        std::fs::write(&lost, b"lost").unwrap();
        drop(store);
        let store = LocalDir::open(dir.path(), Access::WRITE).unwrap();
        assert!(left.exists() && !lost.exists());
        assert!(store.manifest_parts(id).unwrap().is_some());
    }
}
