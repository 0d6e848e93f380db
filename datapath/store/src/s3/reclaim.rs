//! Removes versions, and reclaims space: deletes keys that no version needs, while no publication is in
//! progress.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::ImageName;
use crate::refs::{self, Image, Version};
use crate::retention;
use crate::s3::bucket::{Condition, Entry, Refusal};
use crate::s3::failure::Unchanged;
use crate::s3::mark::{EXCLUSIVE, EXCLUSIVE_WAIT, LOCKS, Mark, PINS, SWEEP_WANTED, WRITER_PREFIX};
use crate::s3::partial_copies::{self, PARTIAL};
use crate::s3::{Inner, image_key, upload};
use crate::store::Removed;

/// How many keys are removed before the exclusive lock is confirmed again.
const REMOVED_AT_ONCE: usize = 32;

impl Inner {
    /// Removes what a dead writer, or a removal during a publication, left.
    pub(super) fn clean_up_after_others(&self) -> Result<(), StoreError> {
        let locks = self.bucket.list(LOCKS)?;
        if locks.is_empty() {
            return Ok(());
        }
        // Marks of writers, and of a process that removed or reclaimed.
        let (_, stale) = self.marks.live_and_stale(LOCKS, "")?;
        let is_wanted = locks.iter().any(|entry| format!("{LOCKS}/{}", entry.name) == SWEEP_WANTED);
        if stale.is_empty() && !is_wanted {
            return Ok(());
        }
        match self.sweep() {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == StoreErrorKind::Damaged || e.kind() == StoreErrorKind::UnknownFormat => {
                tracing::warn!(error = %e, "the store is not cleaned up, because it is unknown which keys are needed");
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Reclaims, unless a process publishes or removes at this time.
    pub(super) fn sweep(&self) -> Result<u64, StoreError> {
        match self.marks.exclusive(Duration::ZERO)? {
            Some(alone) => self.reclaim(&alone),
            None => Ok(0),
        }
    }

    /// Removes manifests, objects and traces that no version needs, unless a publication is in progress. If
    /// an unneeded manifest is still pinned, it stays for a later sweep, with all objects. Returns the bytes
    /// freed.
    fn reclaim(&self, alone: &Mark) -> Result<u64, StoreError> {
        // This check precedes the collection of needed keys. A writer that wakes up later then cannot commit
        // a version that refers to a removed object.
        if self.living_writer(alone, "")?.is_some() {
            self.want_sweep()?;
            return Ok(0);
        }
        let mut going: Vec<String> = Vec::new();
        let needed = self.needed()?;
        let (mut freed_bytes, mut is_postponed) = (0u64, false);
        let pinned = self.pinned()?;
        for folder in ["manifests", "objects", PARTIAL, "traces"] {
            for entry in self.bucket.list(folder)? {
                let hash = match folder {
                    PARTIAL => partial_copies::named(&entry.name).map(|(id, _)| id),
                    _ => entry.name.parse::<Hash>().ok(),
                };
                let Some(hash) = hash.filter(|hash| !needed.contains(hash)) else { continue };
                if folder == "manifests" && pinned.contains(&hash) {
                    is_postponed = true;
                    continue;
                }
                going.push(format!("{folder}/{}", entry.name));
                freed_bytes = freed_bytes.saturating_add(entry.len_bytes);
            }
            // It is not known here to which objects the pinned manifest refers.
            if is_postponed {
                break;
            }
        }
        for batch in going.chunks(REMOVED_AT_ONCE) {
            // A process that considered this one dead may publish by now, and need these keys.
            alone.remove_all(batch.to_vec())?;
        }
        self.forget_abandoned(alone)?;
        alone.confirm()?;
        if is_postponed {
            self.want_sweep()?;
        } else {
            self.bucket.remove(SWEEP_WANTED)?;
        }
        Ok(freed_bytes)
    }

    /// The mark's name of a living writer. If there is none, the stale marks of dead writers are taken over
    /// and removed. A writer that wakes up after that finds that it was considered dead, and does not commit.
    /// Other stale marks with this prefix are removed too.
    fn living_writer(&self, alone: &Mark, prefix: &str) -> Result<Option<String>, StoreError> {
        let (live, stale) = self.marks.live_and_stale(LOCKS, prefix)?;
        if let Some(writer) = live.into_iter().find(|mark| mark.name.starts_with(WRITER_PREFIX)) {
            return Ok(Some(writer.name));
        }
        let with_key = stale.into_iter().map(|mark| (format!("{LOCKS}/{}", mark.name), mark.name));
        let stale: Vec<(String, String)> =
            with_key.filter(|(key, _)| key != EXCLUSIVE && key != SWEEP_WANTED).collect();
        if stale.is_empty() {
            return Ok(None);
        }
        alone.confirm()?;
        // Recorded first: if a later step fails, only these marks would show that dead writers left
        // something.
        self.want_sweep()?;
        for (key, name) in &stale {
            if !self.marks.take_over(key)? {
                // The writer has just woken up.
                return Ok(Some(name.clone()));
            }
        }
        alone.remove_all(stale.into_iter().map(|(key, _)| key).collect())?;
        Ok(None)
    }

    /// The hashes that the versions of all images need. A process that removes an image needs the exclusive
    /// lock, which the caller has. So if an image is listed but missing, the answer is wrong, for example the
    /// 404 of a proxy whose server restarts. Nothing may be removed because of such an answer.
    fn needed(&self) -> Result<HashSet<Hash>, StoreError> {
        let mut needed = HashSet::new();
        for name in self.image_names()? {
            let Some((image, _)) = self.image(&name)? else {
                let shown = self.bucket.shown(&image_key(&name));
                return Err(StoreError::new(
                    StoreErrorKind::Damaged,
                    format!(
                        "cannot find out what image '{name}' needs: {shown} is listed, but the server says that it does not exist"
                    ),
                ));
            };
            for version in image.versions {
                needed.insert(version.manifest);
                needed.extend(version.objects);
            }
        }
        Ok(needed)
    }

    /// Discards the parts of copies that were interrupted long ago. No such copy continues now, because no
    /// publication is in progress.
    fn forget_abandoned(&self, alone: &Mark) -> Result<(), StoreError> {
        for abandoned in self.marks.older_than(upload::STATES, upload::ABANDONED_AFTER)? {
            alone.confirm()?;
            if let Err(e) = upload::forget(&self.bucket.prompt(), &abandoned) {
                tracing::warn!(error = %e, key = abandoned.name, "parts of an interrupted copy stay in S3 for now");
            }
        }
        Ok(())
    }

    /// Manifests that are pinned or have a retention root. A process that pins or retains a manifest from now
    /// on waits for the exclusive lock, which the caller has, and then checks that the manifest exists.
    fn pinned(&self) -> Result<HashSet<Hash>, StoreError> {
        let (live, _) = self.marks.live_and_stale(PINS, "")?;
        let manifest = |mark: &Entry| mark.name.split_once('/')?.0.parse().ok();
        let held = self.holds()?;
        let held = held.iter().filter_map(|entry| retention::manifest_of(&entry.name));
        Ok(live.iter().filter_map(manifest).chain(held).collect())
    }

    /// Records that there is something to reclaim after the publications in progress.
    pub(super) fn want_sweep(&self) -> Result<(), StoreError> {
        match self.bucket.put(SWEEP_WANTED, &Bytes::from_static(b"sweep\n"), &Condition::Any) {
            Err(Refusal::Failed(e)) => Err(e),
            _ => Ok(()),
        }
    }

    fn want_sweep_if_possible(&self) {
        if let Err(e) = self.want_sweep() {
            tracing::warn!(error = %e, "this removal may have left unneeded keys; a later removal reclaims them");
        }
    }

    /// Removes a version or the whole image. With `with_channels`, the image is removed even if its channels
    /// point to versions.
    pub(super) fn remove(
        &self,
        name: &ImageName,
        number: Option<u32>,
        with_channels: bool,
    ) -> Result<Removed, StoreError> {
        self.must_be_writable()?;
        let alone = self.marks.exclusive(EXCLUSIVE_WAIT)?.ok_or_else(|| self.marks.busy())?;
        let changed = self.change_image(name, |image, is_there| {
            if !is_there {
                return Err(refs::no_such_image(name));
            }
            if number.is_some() || !with_channels {
                image.check_removal(number)?;
            }
            let going: Vec<Version> =
                image.versions.iter().filter(|v| number.is_none_or(|n| v.number == n)).cloned().collect();
            for version in &going {
                image.forget(version.number);
            }
            self.must_not_be_held(name, image, &going)?;
            self.must_not_be_pinned(name, image, &going, &alone)?;
            if number.is_none() {
                self.must_have_no_writers(name, &alone)?;
            }
            alone.confirm()?;
            Ok((going, true))
        });
        let going = match changed {
            Err(why @ Unchanged::Unknown(_)) => {
                // The server may still remove the versions from the list, so no process may begin to use them
                // until the lock is stale. The next process that opens the store for writing reclaims the
                // space.
                self.want_sweep_if_possible();
                alone.leave();
                return Err(why.into());
            }
            changed => changed?,
        };
        // The list is empty now, so no other process can change it. No process publishes either, unless one
        // considered this process dead; the list then contains what that process published.
        if number.is_none()
            && let Err(e) = alone.confirm().and_then(|()| self.bucket.remove(&image_key(name)))
        {
            // The versions are removed in any case. The process that has the lock now may not be one that
            // reclaims.
            self.want_sweep_if_possible();
            // The server may still remove the list, and must not remove the list of an image that was created
            // again: the lock must become stale first.
            if e.kind() == StoreErrorKind::Unreachable {
                alone.leave();
            }
            return Err(e);
        }
        let freed_bytes = match self.reclaim(&alone) {
            Ok(freed_bytes) => freed_bytes,
            Err(e) => {
                // The versions are removed in any case. The process that has the lock now may not be one that
                // reclaims.
                tracing::warn!(error = %e, "cannot free the space of unneeded objects now; a later write or removal frees it");
                self.want_sweep_if_possible();
                0
            }
        };
        Ok(Removed { versions: going.iter().map(|v| v.number).collect(), freed_bytes })
    }

    /// Fails if a publication is in progress, before a whole list of versions is removed. Otherwise a version
    /// that is published at this moment would be lost with the list, or the version of a writer that wakes up
    /// between the emptying of the list and its removal.
    fn must_have_no_writers(&self, name: &ImageName, alone: &Mark) -> Result<(), StoreError> {
        let Some(writer) = self.living_writer(alone, WRITER_PREFIX)? else { return Ok(()) };
        let writer = writer.trim_start_matches(WRITER_PREFIX);
        Err(StoreError::new(
            StoreErrorKind::InUse,
            format!(
                "cannot remove image '{name}' now, because {writer} is adding a version of some image to the store {}: try \
                 again when that has finished",
                self.bucket.url()
            ),
        ))
    }

    fn must_not_be_pinned(
        &self,
        name: &ImageName,
        left: &Image,
        going: &[Version],
        alone: &Mark,
    ) -> Result<(), StoreError> {
        let mut still_needed: HashSet<Hash> = left.versions.iter().map(|v| v.manifest).collect();
        for other in self.images()?.into_iter().filter(|other| other.name != *name) {
            still_needed.extend(other.versions.iter().map(|v| v.manifest));
        }
        for version in going.iter().filter(|v| !still_needed.contains(&v.manifest)) {
            let folder = format!("{PINS}/{}", version.manifest);
            let (live, stale) = self.marks.live_and_stale(&folder, "")?;
            if let Some(pin) = live.first() {
                let number = version.number;
                return Err(StoreError::new(
                    StoreErrorKind::InUse,
                    format!("cannot remove {name}@{number}: {} is using it; stop that first", pin.name),
                ));
            }
            alone.remove_all(stale.iter().map(|pin| format!("{folder}/{}", pin.name)).collect())?;
        }
        Ok(())
    }
}
