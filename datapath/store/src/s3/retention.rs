//! Retention roots in a bucket: keys in `holds/` that never become stale. They are set and checked in the
//! same order as marks (see `mark`).

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::name::ImageName;
use crate::refs::{Image, Version};
use crate::retention::{self, ANY_VERSION, RetentionPurpose, RetentionRoot};
use crate::s3::Inner;
use crate::s3::bucket::Entry;
use crate::s3::mark::HOLDS;

/// The longest text of such a key that is read.
const TEXT_MAX_BYTES: u64 = 4096;

impl Inner {
    pub(super) fn retain(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.must_be_writable()?;
        let path = root.path()?;
        let key = format!("{HOLDS}/{path}");
        self.marks.lasting(&key, &Bytes::from(root.text()))?;
        // A process that begins to remove after this write sees the key. A process that began earlier has
        // finished.
        let may_stay = self.may_retain(root, &path);
        // The key of an image may exist for other machines. If nobody needs it, the daemon's next comparison
        // of roots and needs removes it.
        if let Err(e) = &may_stay
            && root.manifest != ANY_VERSION
            && matches!(e.kind(), StoreErrorKind::NotFound | StoreErrorKind::InUse)
        {
            self.bucket.remove(&key)?;
        }
        may_stay
    }

    fn may_retain(&self, root: &RetentionRoot, path: &str) -> Result<(), StoreError> {
        let image = self.image(&root.image)?;
        let mut versions = image.iter().flat_map(|(image, _)| &image.versions);
        if !versions.any(|version| root.manifest == ANY_VERSION || version.manifest == root.manifest) {
            return Err(retention::gone(root));
        }
        if root.purpose != RetentionPurpose::MaintenanceSession {
            // No other purpose is exclusive.
            return Ok(());
        }
        let others = self.holds()?.into_iter().filter(|entry| entry.name != path);
        for other in others {
            if RetentionRoot::parse(&other.name).is_some_and(|other| root.excludes(&other)) {
                let (text, shown) = self.hold_text(&other.name)?;
                return Err(retention::edited(root, &text, &shown));
            }
        }
        Ok(())
    }

    /// All keys in `holds/`, including those of a later release.
    pub(super) fn holds(&self) -> Result<Vec<Entry>, StoreError> {
        self.bucket.list(HOLDS)
    }

    fn hold_text(&self, path: &str) -> Result<(Bytes, String), StoreError> {
        let key = format!("{HOLDS}/{path}");
        let text = self.bucket.get(&key, TEXT_MAX_BYTES)?.map(|(text, _)| text).unwrap_or_default();
        Ok((text, self.bucket.shown(&key)))
    }

    pub(super) fn release(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.must_be_writable()?;
        self.bucket.remove(&format!("{HOLDS}/{}", root.path()?))
    }

    pub(super) fn roots_of(&self, daemon: &str) -> Result<Vec<RetentionRoot>, StoreError> {
        let holds = self.holds()?;
        let holds = holds.iter().filter_map(|entry| RetentionRoot::parse(&entry.name));
        Ok(holds.filter(|root| root.daemon == daemon).collect())
    }

    /// Fails if a version or image with retention roots would be removed. A version stays even if only
    /// another number with the same bytes has a root, because holders open theirs by its number. The last
    /// version of an image whose root names no version stays, too.
    pub(super) fn must_not_be_held(
        &self,
        name: &ImageName,
        left: &Image,
        going: &[Version],
    ) -> Result<(), StoreError> {
        let holds = self.holds()?;
        let refuse = |what: &str, held: &Entry| {
            let (text, shown) = self.hold_text(&held.name)?;
            Err(retention::in_use(what, &held.name, &text, &shown))
        };
        for version in going {
            let of_it = holds.iter().filter(|entry| retention::is_of(&entry.name, version.manifest, name));
            // A version can have a second root besides that of a maintenance session, whose name says more.
            let is_edit = |entry: &&Entry| {
                RetentionRoot::parse(&entry.name)
                    .is_some_and(|root| root.purpose == RetentionPurpose::MaintenanceSession)
            };
            if let Some(held) = of_it.max_by_key(is_edit) {
                return refuse(&format!("{name}@{}", version.number), held);
            }
        }
        let mut of_image = holds.iter().filter(|entry| retention::is_of(&entry.name, ANY_VERSION, name));
        match of_image.next().filter(|_| left.versions.is_empty()) {
            Some(held) => refuse(&format!("all of image '{name}'"), held),
            None => Ok(()),
        }
    }
}
