//! Finds the versions that share damaged chunks or objects with a verified version, so that a report of
//! damage names all versions that are affected. It reads manifests, and no chunks.

use std::collections::{HashMap, HashSet};

use headwater_store::{Hash, Store, StoreErrorKind};

use crate::error::ImageError;
use crate::manifest::Manifest;
use crate::progress::Cancel;
use crate::units::{u64_of, usize_of_u32};
use crate::verify::Verified;
use crate::verify_round::VerifyRound;

/// The versions of a store, as `IMAGE@NUMBER`, that contain one of the damaged chunks or objects. If more
/// chunks of existing data objects are damaged than are listed, versions that need any part of these objects
/// count, too. A version whose manifest, or whose image's list, cannot be read is left out: that is a damage
/// of its own. `progress` gets the number of versions examined, and the total.
pub fn versions_touched(
    store: &dyn Store,
    found: &Verified,
    round: &VerifyRound,
    cancel: &Cancel,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<String>, ImageError> {
    let mut lost: HashSet<Hash> = found.objects.iter().map(|object| object.object).collect();
    if found.unlisted_in_existing_objects() > 0 {
        // Not all damage in these objects is listed.
        lost.extend(&found.objects_with_damaged_chunks);
    }
    let mut damaged: HashMap<Hash, HashSet<u64>> = HashMap::new();
    for chunk in &found.damaged {
        damaged.entry(chunk.object).or_default().insert(chunk.object_offset);
    }
    // Versions with the same contents have one manifest.
    let mut known: HashMap<Hash, bool> = HashMap::new();
    let mut touched = Vec::new();
    let images = match store.listed() {
        // A plain web server has no list, or only a web page.
        Err(e)
            if store.is_remote()
                && matches!(e.kind(), StoreErrorKind::NotFound | StoreErrorKind::Invalid) =>
        {
            return Ok(touched);
        }
        listed => listed?.images,
    };
    let all: u64 = images.iter().map(|image| u64_of(image.versions.len())).sum();
    let mut seen = 0_u64;
    for image in images {
        for version in &image.versions {
            cancel.check("the search for affected versions")?;
            progress(seen, all);
            seen = seen.saturating_add(1);
            let holds = *known.entry(version.manifest).or_insert_with(|| {
                let manifest = store.manifest(version.manifest).map_err(ImageError::from);
                manifest
                    .and_then(|bytes| {
                        round.take(u64_of(bytes.len()), cancel);
                        Manifest::decode(&bytes)
                    })
                    .is_ok_and(|manifest| holds(&manifest, &lost, &damaged))
            });
            if holds {
                touched.push(format!("{}@{}", image.name, version.number));
            }
        }
    }
    Ok(touched)
}

fn holds(manifest: &Manifest, lost: &HashSet<Hash>, damaged: &HashMap<Hash, HashSet<u64>>) -> bool {
    if manifest.objects().iter().any(|object| lost.contains(&object.id)) {
        return true;
    }
    // For each of the manifest's objects, which of its chunks are damaged.
    let places: Vec<Option<&HashSet<u64>>> =
        manifest.objects().iter().map(|object| damaged.get(&object.id)).collect();
    let is_damaged = |object: u32, offset: u64| {
        places.get(usize_of_u32(object)).copied().flatten().is_some_and(|places| places.contains(&offset))
    };
    places.iter().any(Option::is_some)
        && manifest.data().any(|(_, chunk)| is_damaged(chunk.object, chunk.offset))
}
