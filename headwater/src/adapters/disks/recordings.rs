//! Recordings of the requests that machines send to their disks (`headwater run --record`, `machine start --record`), for
//! `headwater-study sizing`. [`super`] begins one when it opens a disk. A recording never contains the data of requests;
//! `headwater_recorder` defines its format.

use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use headwater_api::ProblemKind;
use headwater_block::Device;
use headwater_recorder::Recorder;
use headwater_service::backend::BackendError;
use headwater_volume::Volume;

use crate::streaming::Streamed;

/// The most recordings of one machine that are kept.
const MOST_FILES: u32 = 10_000;

/// A recording under way. It ends when this is dropped.
pub(super) struct Recording {
    machine: String,
    recorder: Arc<Recorder>,
    device: Arc<dyn Device>,
}

/// Begins a recording in the first file `MACHINE-N.rec` that does not exist yet.
pub(super) fn begin(
    dir: &Path,
    machine: &str,
    volume: &Arc<Volume>,
    image: &Weak<Streamed>,
) -> Result<Recording, BackendError> {
    let failed = |e| {
        let message = format!("cannot record the requests of machine '{machine}' in {}", dir.display());
        BackendError::from_io(message, e)
    };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    let sizes = [volume.geometry().size_bytes];
    for number in 1..=MOST_FILES {
        let path = dir.join(format!("{machine}-{number}.rec"));
        match Recorder::create(&path, &sizes, SystemTime::now()) {
            Ok(recorder) => {
                tracing::info!(machine, file = %path.display(), "recording the requests of a machine");
                let base = image.upgrade().map(|image| Arc::clone(&image.reader) as Arc<dyn Device>);
                let device = recorder.device(0, Arc::clone(volume) as Arc<dyn Device>, base);
                return Ok(Recording { machine: machine.to_owned(), recorder, device });
            }
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed(e)),
        }
    }
    let message = format!(
        "cannot record the requests of machine '{machine}': {} has {MOST_FILES} recordings of it",
        dir.display()
    );
    Err(BackendError::new(ProblemKind::Conflict, message).advise("remove some of them"))
}

impl Recording {
    /// The device that the machine uses: it records each request.
    pub(super) fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.device)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(summary) = self.recorder.finish() else { return };
        let (machine, file) = (&self.machine, self.recorder.path().display());
        let (requests, dropped) = (summary.requests, summary.dropped);
        match summary.failure {
            // The failure was logged when it happened; this line is for the end of the machine.
            Some(failure) => {
                tracing::warn!(machine, %file, requests, "the recording of a machine's requests ended early: {failure}")
            }
            None if dropped > 0 => {
                tracing::warn!(machine, %file, requests, dropped, "the recording of a machine's requests lacks some, which arrived faster than they could be written");
            }
            None => {
                tracing::info!(machine, %file, requests, "the recording of a machine's requests is complete")
            }
        }
    }
}
