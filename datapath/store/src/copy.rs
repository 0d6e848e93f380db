//! Copying versions from one store to another: what is missing, checked, references last.
//!
//! ```text
//!   1 which objects does the target not have?      2 copy those, hash checked, going on where an earlier copy stopped
//!   3 manifest and boot trace of each version      4 its place in the list of versions, then channels
//! ```
//! While a copy is under way the target reclaims nothing. One that is stopped leaves whole objects, and the beginning
//! of one, for the next copy to go on with; no version appears before all of it is there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::ImageName;
use crate::refs::{Channel, Image, Version};
use crate::store::{Object, Publication, Store};

/// How far a copy is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyProgress {
    /// Bytes of objects that were missing and are there now.
    pub done_bytes: u64,
    /// Bytes of objects that were missing.
    pub total_bytes: u64,
}

/// What a copy did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Versions that are new in the target.
    pub versions: u32,
    /// Versions that were there already.
    pub present: u32,
    /// Objects that were copied.
    pub objects: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// Called now and then; an error ends the copy.
pub type OnProgress<'a> = dyn FnMut(CopyProgress) -> Result<(), StoreError> + 'a;

/// Says which objects a manifest needs. The store does not know what manifests say.
pub type ObjectsOf<'a> = dyn Fn(&[u8]) -> Result<Vec<Hash>, StoreError> + 'a;

/// Copies versions, each under its own number. With `channels`, those of their images are made the source's too. A
/// list of versions has no signature, so what it says of a version's objects must be what the manifest says.
pub fn copy(
    source: &dyn Store,
    target: &dyn Store,
    what: &[(Image, Vec<Version>)],
    objects_of: &ObjectsOf<'_>,
    channels: bool,
    progress: &mut OnProgress<'_>,
) -> Result<Copied, StoreError> {
    if source.chunk_bytes() != target.chunk_bytes() {
        return Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!(
                "cannot copy from {} to {}: their chunk sizes are {} and {} bytes. Export the image and import it \
                 there, or copy to a new store",
                source.shown(),
                target.shown(),
                source.chunk_bytes(),
                target.chunk_bytes()
            ),
        ));
    }
    refuse_conflicts(target, what)?;
    // Held to the end: nothing of what is copied or relied upon is reclaimed meanwhile.
    let mut holder = target.publish()?;
    let missing = missing_objects(source, target, what)?;
    let total_bytes = missing.values().map(|object| object.len_bytes()).sum();
    let mut at = CopyProgress { done_bytes: 0, total_bytes };
    progress(at)?;
    let mut copied = Copied::default();
    for object in missing.values() {
        let before = at.done_bytes;
        copy_object(holder.as_mut(), object.as_ref(), &mut |bytes| {
            at.done_bytes = before.saturating_add(bytes);
            progress(at)
        })?;
        copied.objects = copied.objects.saturating_add(1);
        copied.bytes = copied.bytes.saturating_add(object.len_bytes());
    }
    for (image, versions) in what {
        if channels {
            keep_production(target, image)?;
        }
        for version in versions {
            let manifest = source.manifest(version.manifest)?;
            must_list_all(source, image, version, objects_of(&manifest)?)?;
            let publication = target.publish()?;
            // This one knows only of what was reclaimed since just now. The objects were found or copied earlier, and a host
            // that slept meanwhile may have been taken for dead.
            holder.confirm()?;
            if publication.adopt(&image.name, version, &manifest)? {
                copied.versions = copied.versions.saturating_add(1);
            } else {
                copied.present = copied.present.saturating_add(1);
            }
            copy_trace(source, target, version.manifest);
        }
        if channels && !versions.is_empty() {
            follow(target, image)?;
        }
    }
    drop(holder);
    Ok(copied)
}

/// Where production is not set, machines boot the newest version: so it is set before newer ones come, if it will be.
fn keep_production(target: &dyn Store, image: &Image) -> Result<(), StoreError> {
    let Some(pointer) = image.channel(Channel::Production) else { return Ok(()) };
    let manifest_in = |image: &Image| {
        image.versions.iter().find(|it| it.number == pointer.version && !it.retired).map(|it| it.manifest)
    };
    let is_meant = |there: &Image| {
        there.channel(Channel::Production).is_none()
            && manifest_in(there).is_some()
            && manifest_in(there) == manifest_in(image)
    };
    if !target.image(&image.name)?.as_ref().is_some_and(is_meant) {
        return Ok(());
    }
    target.change(&image.name, &mut |there| {
        // Somebody may have changed it meanwhile.
        if is_meant(there) { there.promote(pointer.clone()).map(drop) } else { Ok(()) }
    })
}

fn follow(target: &dyn Store, image: &Image) -> Result<(), StoreError> {
    target.change(&image.name, &mut |there| {
        there.follow(image);
        Ok(())
    })
}

fn must_list_all(
    source: &dyn Store,
    image: &Image,
    version: &Version,
    needed: Vec<Hash>,
) -> Result<(), StoreError> {
    let needed: BTreeSet<Hash> = needed.into_iter().collect();
    if needed == version.objects.iter().copied().collect() {
        return Ok(());
    }
    Err(StoreError::new(
        StoreErrorKind::Damaged,
        format!(
            "the list of versions of '{}' in {} is wrong: it does not name the data objects that the manifest of version {} \
             needs; it was not copied",
            image.name,
            source.shown(),
            version.number
        ),
    ))
}

/// Copies an object to a store, and once more while what came is wrong and there is somewhere else to read it. `there`
/// is told how many bytes of it are there, and can end the copy with an error.
pub fn copy_object(
    target: &mut dyn Publication,
    object: &dyn Object,
    there: &mut dyn FnMut(u64) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    loop {
        let mut bytes = 0u64;
        let copied = target.copy_object(object, &mut |more| {
            bytes = bytes.saturating_add(more);
            there(bytes)
        });
        match copied {
            Err(e) if e.kind() == StoreErrorKind::Damaged && object.was_wrong() => {
                tracing::warn!(error = %e, "it is copied once more");
            }
            outcome => return outcome,
        }
    }
}

/// A boot trace is advice: without it a boot is slower, and the copy is as good.
fn copy_trace(source: &dyn Store, target: &dyn Store, manifest: Hash) {
    let outcome = target.trace(manifest).and_then(|there| match there {
        Some(_) => Ok(()),
        None => match source.trace(manifest)? {
            Some(trace) => target.set_trace(manifest, Some(&trace)),
            None => Ok(()),
        },
    });
    if let Err(e) = outcome {
        tracing::warn!(error = %e, "the boot trace of version {} is not copied", manifest.short());
    }
}

/// Two stores that each made a version of their own under one number: found before anything is copied.
fn refuse_conflicts(target: &dyn Store, what: &[(Image, Vec<Version>)]) -> Result<(), StoreError> {
    for (image, versions) in what {
        let Some(mut there) = target.image(&image.name)? else { continue };
        for version in versions {
            there.adopt(version)?;
        }
    }
    Ok(())
}

fn missing_objects(
    source: &dyn Store,
    target: &dyn Store,
    what: &[(Image, Vec<Version>)],
) -> Result<BTreeMap<Hash, Arc<dyn Object>>, StoreError> {
    let mut missing = BTreeMap::new();
    let needed = what.iter().flat_map(|(_, versions)| versions).flat_map(|version| &version.objects);
    for id in needed {
        if missing.contains_key(id) {
            continue;
        }
        match target.open_object(*id) {
            Ok(_) => continue,
            Err(e) if e.kind() == StoreErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        missing.insert(*id, source.open_object(*id)?);
    }
    Ok(missing)
}

/// All versions of all images, for [`copy`].
pub fn everything(source: &dyn Store) -> Result<Vec<(Image, Vec<Version>)>, StoreError> {
    let images = source.images()?;
    Ok(images.into_iter().map(|image| (image.clone(), image.versions)).collect())
}

/// As [`everything`], but for images whose list of versions is damaged or of a later release: these, and why they cannot be
/// read, are told apart.
pub fn everything_readable(source: &dyn Store) -> Result<Readable, StoreError> {
    let listed = source.listed()?;
    let what = listed.images.into_iter().map(|image| (image.clone(), image.versions)).collect();
    Ok(Readable { what, unreadable: listed.unreadable })
}

impl Readable {
    /// Leaves out the images whose lists of versions in the target are damaged or of a later release: nothing can be
    /// added to them.
    pub fn writable_in(mut self, target: &dyn Store) -> Result<Self, StoreError> {
        for (name, e) in target.listed()?.unreadable {
            if self.what.iter().any(|(image, _)| image.name == name) {
                self.what.retain(|(image, _)| image.name != name);
                self.unreadable.push((name, e));
            }
        }
        Ok(self)
    }
}

/// What of a store can be read.
pub struct Readable {
    /// All versions of the images, for [`copy`].
    pub what: Vec<(Image, Vec<Version>)>,
    /// The other images, and why not.
    pub unreadable: Vec<(ImageName, StoreError)>,
}

/// The versions that references mean, by image, for [`copy`].
pub fn selected(
    source: &dyn Store,
    references: &[crate::name::ImageReference],
) -> Result<Vec<(Image, Vec<Version>)>, StoreError> {
    let mut by_image: BTreeMap<ImageName, (Image, Vec<Version>)> = BTreeMap::new();
    for reference in references {
        let image = match by_image.get(&reference.name) {
            Some((image, _)) => image.clone(),
            None => match source.image(&reference.name)? {
                Some(image) => image,
                None => {
                    return Err(StoreError::new(
                        StoreErrorKind::NotFound,
                        format!("there is no image '{}' in {}", reference.name, source.shown()),
                    ));
                }
            },
        };
        let version = image.select(&reference.selector)?.clone();
        let (_, versions) =
            by_image.entry(reference.name.clone()).or_insert_with(|| (image.clone(), Vec::new()));
        if !versions.contains(&version) {
            versions.push(version);
        }
    }
    Ok(by_image.into_values().collect())
}
