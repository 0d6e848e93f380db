//! The disks of one `headwater export`: its volumes, and the devices that front-ends serve. A device is the volume
//! itself or, if requests are recorded, a recorder around it.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, bail};
use headwater_block::Device;
use headwater_recorder::{MOST_VOLUMES, Recorder};
use headwater_volume::Volume;

use crate::failure::invalid;
use crate::show;

/// The disks of one export.
pub struct Disks {
    /// The volumes.
    pub volumes: Vec<Arc<Volume>>,
    /// What front-ends serve: the volumes themselves, unless requests are recorded.
    pub devices: Vec<Arc<dyn Device>>,
    recorder: Option<Arc<Recorder>>,
}

impl Disks {
    /// Begins a recording, if a file was given for it. `base` is the device below the volumes.
    pub fn new(
        volumes: Vec<Arc<Volume>>,
        base: &Arc<dyn Device>,
        record: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let recorder = record.map(|path| begin(path, &volumes)).transpose()?;
        let device = |(volume, number): (&Arc<Volume>, u16)| {
            let device = Arc::clone(volume) as Arc<dyn Device>;
            match &recorder {
                Some(recorder) => recorder.device(number, device, Some(Arc::clone(base))),
                None => device,
            }
        };
        let devices = volumes.iter().zip(0..).map(device).collect();
        Ok(Self { volumes, devices, recorder })
    }

    /// Ends the recording, and prints a summary.
    pub fn end_recording(&self) -> anyhow::Result<()> {
        let Some((recorder, summary)) = self.recorder.as_ref().and_then(|r| Some((r, r.finish()?))) else {
            return Ok(());
        };
        let path = recorder.path().display();
        if let Some(failure) = summary.failure {
            bail!("the recording {path} ended early and has only the first requests: {failure}");
        }
        let lacks = if summary.dropped == 0 {
            String::new()
        } else {
            format!("; {} more arrived faster than they could be recorded, and are missing", summary.dropped)
        };
        show::aside(&format!("the recording {path} has {} requests{lacks}", summary.requests));
        Ok(())
    }
}

fn begin(path: &Path, volumes: &[Arc<Volume>]) -> anyhow::Result<Arc<Recorder>> {
    if volumes.len() > MOST_VOLUMES {
        return Err(invalid(format!("--record can record the requests of at most {MOST_VOLUMES} disks")));
    }
    let sizes: Vec<u64> = volumes.iter().map(|volume| volume.geometry().size_bytes).collect();
    Recorder::create(path, &sizes, SystemTime::now()).with_context(|| {
        format!(
            "cannot record requests in {}: name a new file, on a file system with free space",
            path.display()
        )
    })
}
