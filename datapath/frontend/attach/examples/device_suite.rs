//! Runs the conformance suite of devices on a block device of the kernel: `device_suite DEVICE [SEED
//! [SPAN]]`. It uses `SPAN` bytes, half at the start and half at the end, and overwrites their contents.

use std::path::Path;
use std::sync::Arc;

use headwater_block::{Device, size};
use headwater_testkit::FileDevice;
use headwater_testkit::conformance::{Options, check};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, rest @ ..] = arguments.as_slice() else {
        return Err("usage: device_suite DEVICE [SEED [SPAN]]".into());
    };
    let mut options = Options::default();
    if let Some(seed) = rest.first() {
        options.seed = seed.parse()?;
    }
    if let Some(span) = rest.get(1) {
        options.span_bytes = size::parse(span)?;
    }
    let device =
        FileDevice::open_block_device(Path::new(path)).map_err(|error| format!("{path}: {error}"))?;
    let geometry = device.geometry();
    let device: Arc<dyn Device> = Arc::new(device);
    let model = check(&device, &options);
    println!(
        "{path} of {}, blocks of {} and {} bytes: seed {}, {} threads with {} operations each on {}, as they should be",
        size::format(geometry.size_bytes),
        geometry.logical_block_bytes,
        geometry.physical_block_bytes,
        options.seed,
        options.threads,
        options.operations,
        size::format(model.len() as u64),
    );
    Ok(())
}
