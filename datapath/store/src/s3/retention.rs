//! Holds in a bucket: keys that do not lapse, and are set and heeded in the order of marks (see `mark`).

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::name::ImageName;
use crate::refs::{Image, Version};
use crate::retention::{self, ANY_VERSION, RetentionPurpose, RetentionRoot};
use crate::s3::Inner;
use crate::s3::bucket::Entry;
use crate::s3::mark::HOLDS;

/// The longest text that is read of one.
const TEXT_MAX_BYTES: u64 = 4096;

impl Inner {
    pub(super) fn retain(&self, root: &RetentionRoot) -> Result<(), StoreError> {
        self.must_be_writable()?;
        let path = root.path()?;
        let key = format!("{HOLDS}/{path}");
        self.marks.lasting(&key, &Bytes::from(root.text()))?;
        // Whoever removes from here on sees it. Who did so before is done.
        let may_stay = self.may_retain(root, &path);
        // That of an image may be there for other machines. It goes with the next comparison if nobody needs it.
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
            // Nothing else excludes another.
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

    /// All of them, also those of a later release.
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

    /// Refuses to remove what is held of an image, also where another of its versions has the same bytes: holders open theirs by its
    /// number. And the last version of an image that is held as such.
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
            // An edit holds it twice, and that it is one says more.
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
