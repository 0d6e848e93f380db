//! Operations on the boot trace of a version: show, merge from a file, save to a file, remove. A boot trace lists what a boot reads, so
//! that the next boot's reads can be fetched ahead. [`super::images`] calls these functions for the API. Boots are not recorded here, but
//! in `crate::traces`.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use headwater_api::{BootTrace, ImageVersion, ProblemKind, TracePlace};
use headwater_image::{ImageError, Manifest, Trace};
use headwater_service::backend::BackendError;
use headwater_store::{Store, TRACE_MAX_BYTES};

use crate::adapters::disk_host::BootTraces;
use crate::adapters::images::{hash_of, image_failed, store_failed};
use crate::adapters::sources;
use crate::failure::image_kind;
use crate::traces::{BOOTS_RECORDED, Place};

/// The boot trace of a version, for the API.
pub fn show(
    store: &dyn Store,
    traces: &dyn BootTraces,
    version: &ImageVersion,
) -> Result<BootTrace, BackendError> {
    let (trace, place) = find(traces, version)?;
    Ok(boot_trace(&manifest_of(store, version)?, version, &trace, place))
}

/// Merges the boot trace of a file into that of the version.
pub fn merge(
    store: &dyn Store,
    traces: &dyn BootTraces,
    version: &ImageVersion,
    source: &Path,
) -> Result<BootTrace, BackendError> {
    sources::refuse_own_descriptors(source)?;
    let failed = |e: ImageError| {
        BackendError::new(image_kind(e.kind()), format!("cannot use {}: {e}", source.display()))
    };
    let boots = Trace::decode(&read(source)?).map_err(failed)?;
    if boots.manifest != hash_of(version)? {
        let why = format!(
            "{} is the boot trace of version {}, not of {}@{}",
            source.display(),
            boots.manifest.short(),
            version.image,
            version.number
        );
        return Err(BackendError::new(ProblemKind::Invalid, why));
    }
    // Read the manifest before the merge: after an error the user repeats the command, which would count the boots twice.
    let manifest = manifest_of(store, version)?;
    let (merged, place) = traces.merge(boots)?;
    Ok(boot_trace(&manifest, version, &merged, place))
}

/// Writes the trace to a new file.
pub fn save(
    store: &dyn Store,
    traces: &dyn BootTraces,
    version: &ImageVersion,
    target: &Path,
) -> Result<BootTrace, BackendError> {
    let (trace, place) = find(traces, version)?;
    // Read the manifest before the file is created: a failure must not leave a file, because the next attempt would fail on
    // it.
    let manifest = manifest_of(store, version)?;
    let written = File::create_new(target).and_then(|mut file| {
        file.write_all(&trace.encode()).and_then(|()| file.sync_all()).inspect_err(|_| {
            // A partial trace is useless.
            let _ = std::fs::remove_file(target);
        })
    });
    written.map_err(|e| BackendError::from_io(format!("cannot write {}", target.display()), e))?;
    Ok(boot_trace(&manifest, version, &trace, place))
}

/// Removes the boot trace.
pub fn remove(
    store: &dyn Store,
    traces: &dyn BootTraces,
    version: &ImageVersion,
) -> Result<BootTrace, BackendError> {
    let (trace, place) = find(traces, version)?;
    let gone = boot_trace(&manifest_of(store, version)?, version, &trace, place);
    traces.remove(trace.manifest)?;
    Ok(gone)
}

fn find(traces: &dyn BootTraces, version: &ImageVersion) -> Result<(Trace, Place), BackendError> {
    traces.find(hash_of(version)?)?.ok_or_else(|| {
        let why = format!("no boot of {}@{} was recorded", version.image, version.number);
        let advice = "start a machine that boots it, or record one with 'headwater image trace record'";
        BackendError::new(ProblemKind::NotFound, why).advise(advice)
    })
}

/// Reads a file, up to the largest size of a trace.
fn read(source: &Path) -> Result<Vec<u8>, BackendError> {
    let mut bytes = Vec::new();
    // Opening anything else may block forever, for instance a pipe without a writer.
    let is_file = std::fs::metadata(source).and_then(|found| {
        if found.is_file() { Ok(()) } else { Err(std::io::Error::other("it is not a regular file")) }
    });
    // Read one byte more than permitted, so that a file that is too long is refused, not cut.
    let read = is_file.and_then(|()| File::open(source)?.take(TRACE_MAX_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|e| BackendError::from_io(format!("cannot read {}", source.display()), e))?;
    Ok(bytes)
}

fn manifest_of(store: &dyn Store, version: &ImageVersion) -> Result<Manifest, BackendError> {
    let manifest = store.manifest(hash_of(version)?).map_err(store_failed)?;
    Manifest::decode(&manifest).map_err(image_failed)
}

fn boot_trace(manifest: &Manifest, version: &ImageVersion, trace: &Trace, place: Place) -> BootTrace {
    let chunks = u64::try_from(trace.chunks.len()).unwrap_or(u64::MAX);
    BootTrace {
        version: version.clone(),
        boots: trace.boots,
        boots_wanted: BOOTS_RECORDED,
        chunks,
        image_bytes: chunks.saturating_mul(u64::from(manifest.chunk_bytes())),
        stored_bytes: trace.stored_bytes(manifest),
        lasts_ms: trace.chunks.last().map_or(0, |touched| u64::from(touched.at_ms)),
        place: match place {
            Place::Store => TracePlace::Store,
            Place::Host => TracePlace::Host,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use headwater_image::{ChunkCache, ImportOptions, import, null_device};
    use headwater_store::{Access, LocalDir};

    use super::*;
    use crate::traces::Traces;

    #[test]
    fn what_fails_for_the_store_leaves_no_file_and_counts_no_boot() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalDir::open(&dir.path().join("store"), Access::WRITE).unwrap();
        let options = ImportOptions::new("disk".parse().unwrap(), 0);
        let imported = import(null_device(1 << 20).unwrap(), &store, &options, &mut |_| {}).unwrap();
        let manifest = imported.version.manifest;
        let version = ImageVersion {
            image: "disk".to_owned(),
            number: 1,
            hash: manifest.to_string(),
            size_bytes: 1 << 20,
            stored_bytes: 0,
            created_at_ms: 0,
            source: String::new(),
            note: String::new(),
            author: String::new(),
            retired: false,
            keeps_identity: false,
            channels: Vec::new(),
        };
        let traces = Traces::new(Arc::new(store.clone()), ChunkCache::new(16 << 20));
        let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
        std::fs::write(&theirs, Trace::of_boot(manifest, &[(1, 0), (2, 5)]).encode()).unwrap();
        assert_eq!(merge(&store, &traces, &version, &theirs).unwrap().boots, 1);

        // The store has lost the manifest, or does not answer.
        let kept = dir.path().join("store/manifests").join(manifest.to_string());
        let away = dir.path().join("away");
        std::fs::rename(&kept, &away).unwrap();
        save(&store, &traces, &version, &ours).unwrap_err();
        assert!(!ours.exists(), "a file is left of what failed");
        merge(&store, &traces, &version, &theirs).unwrap_err();
        std::fs::rename(&away, &kept).unwrap();
        assert_eq!(merge(&store, &traces, &version, &theirs).unwrap().boots, 2);
        assert_eq!(save(&store, &traces, &version, &ours).unwrap().boots, 2);
        assert!(ours.exists());
    }
}
