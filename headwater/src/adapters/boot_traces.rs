//! Boot traces as the API tells of them, and as files for other hosts.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use headwater_api::{BootTrace, ImageVersion, ProblemKind, TracePlace};
use headwater_image::{ImageError, Manifest, Trace};
use headwater_service::backend::BackendError;
use headwater_store::{Store, TRACE_MAX_BYTES};

use crate::adapters::images::{hash_of, image_failed, store_failed};
use crate::adapters::sources;
use crate::failure::image_kind;
use crate::traces::{BOOTS_RECORDED, Place, Traces};

/// A version's trace.
pub fn show(store: &dyn Store, traces: &Traces, version: &ImageVersion) -> Result<BootTrace, BackendError> {
    let (trace, place) = find(traces, version)?;
    told(store, version, &trace, place)
}

/// Takes the trace of a file in.
pub fn merge(
    store: &dyn Store,
    traces: &Traces,
    version: &ImageVersion,
    source: &Path,
) -> Result<BootTrace, BackendError> {
    sources::whole_host(source)?;
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
    let (merged, place) = traces.merge(boots).map_err(image_failed)?;
    told(store, version, &merged, place)
}

/// Writes the trace to a new file.
pub fn save(
    store: &dyn Store,
    traces: &Traces,
    version: &ImageVersion,
    target: &Path,
) -> Result<BootTrace, BackendError> {
    let (trace, place) = find(traces, version)?;
    let written = File::create_new(target).and_then(|mut file| {
        file.write_all(&trace.encode()).and_then(|()| file.sync_all()).inspect_err(|_| {
            // What is half a trace is of no use to anybody.
            let _ = std::fs::remove_file(target);
        })
    });
    written.map_err(|e| BackendError::from_io(format!("cannot write {}", target.display()), e))?;
    told(store, version, &trace, place)
}

/// Forgets the trace.
pub fn remove(store: &dyn Store, traces: &Traces, version: &ImageVersion) -> Result<BootTrace, BackendError> {
    let (trace, place) = find(traces, version)?;
    let gone = told(store, version, &trace, place)?;
    traces.remove(trace.manifest).map_err(image_failed)?;
    Ok(gone)
}

fn find(traces: &Traces, version: &ImageVersion) -> Result<(Trace, Place), BackendError> {
    traces.find(hash_of(version)?).ok_or_else(|| {
        let why = format!("no boot of {}@{} was recorded", version.image, version.number);
        let advice = "the first machine that boots it records one, or 'headwater image trace record'";
        BackendError::new(ProblemKind::NotFound, why).advise(advice)
    })
}

/// Never more than a trace may have.
fn read(source: &Path) -> Result<Vec<u8>, BackendError> {
    let mut bytes = Vec::new();
    // To open anything else may wait for ever: a pipe waits for who writes to it.
    let is_file = std::fs::metadata(source).and_then(|found| {
        if found.is_file() { Ok(()) } else { Err(std::io::Error::other("it is no regular file")) }
    });
    // One byte more, so that what is too long is refused, not cut.
    let read = is_file.and_then(|()| File::open(source)?.take(TRACE_MAX_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|e| BackendError::from_io(format!("cannot read {}", source.display()), e))?;
    Ok(bytes)
}

fn told(
    store: &dyn Store,
    version: &ImageVersion,
    trace: &Trace,
    place: Place,
) -> Result<BootTrace, BackendError> {
    let manifest = store.manifest(hash_of(version)?).map_err(store_failed)?;
    let manifest = Manifest::decode(&manifest).map_err(image_failed)?;
    let chunks = u64::try_from(trace.chunks.len()).unwrap_or(u64::MAX);
    Ok(BootTrace {
        version: version.clone(),
        boots: trace.boots,
        boots_wanted: BOOTS_RECORDED,
        chunks,
        image_bytes: chunks.saturating_mul(u64::from(manifest.chunk_bytes())),
        stored_bytes: trace.stored_bytes(&manifest),
        lasts_ms: trace.chunks.last().map_or(0, |touched| u64::from(touched.at_ms)),
        place: match place {
            Place::Store => TracePlace::Store,
            Place::Host => TracePlace::Host,
        },
    })
}
