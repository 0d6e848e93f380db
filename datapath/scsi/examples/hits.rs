//! Measures what SCSI adds to a command that the device executes at once: nanoseconds for 4 KiB reads and
//! writes.
//!
//! `cargo run --release -p headwater-scsi --example hits`

use std::sync::Arc;
use std::time::Instant;

use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, ExtentKind, Geometry, IoError, Op, Request,
};
use headwater_scsi::{Attribute, Cdb, Command, Identity, Initiator, LogicalUnit, Lun, Now, Options, Target};

const SIZE_BYTES: u64 = 64 << 20;

/// A device that answers at once and does nothing.
struct Nothing;

impl Device for Nothing {
    fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: SIZE_BYTES,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            volatile_cache: true,
        }
    }

    fn try_now(&self, _: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::Done)
    }

    fn submit(&self, request: Request, done: Completion) {
        done.complete(Ok(()), request.into_buffer());
    }

    fn extents(&self, range: ByteRange, _: usize) -> Result<Vec<Extent>, IoError> {
        Ok(vec![Extent { len: range.len(), kind: ExtentKind::Data }])
    }
}

fn main() {
    let identity = Identity {
        vendor: "HEADWATR".into(),
        product: "nothing".into(),
        revision: "1".into(),
        serial: "nothing".into(),
        uuid: [0; 16],
    };
    let options = Options { power_on_attention: false, ..Options::default() };
    let unit = LogicalUnit::new(Arc::new(Nothing), identity, options);
    let initiator =
        Initiator { transport_id: Box::new([0; 24]), target_port: 1, target_port_name: String::new() };
    let nexus = Target::new("nothing", vec![(0, unit)]).nexus(initiator);
    let mut data_in = [0; 4096];
    let data_out = [0; 4096];
    for (name, code) in [("READ (10)", 0x28), ("WRITE (10)", 0x2a), ("READ (16)", 0x88), ("WRITE (16)", 0x8a)]
    {
        let commands: u32 = 20_000_000;
        let mut done: u32 = 0;
        let start = Instant::now();
        for number in 0..commands {
            let lba = (number.wrapping_mul(0x9e37_79b9) >> 16 << 3) % ((SIZE_BYTES / 512) as u32);
            let [a, b, c, d] = lba.to_be_bytes();
            let bytes: [u8; 16] = if code < 0x80 {
                [code, 0, a, b, c, d, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]
            } else {
                [code, 0, 0, 0, 0, 0, a, b, c, d, 0, 0, 0, 8, 0, 0]
            };
            let cdb = Cdb::from(bytes);
            let command = Command {
                lun: Lun([0; 8]),
                attribute: Attribute::Simple,
                cdb: &cdb,
                data_out: &data_out,
                announced_bytes: 4096,
            };
            done += u32::from(matches!(nexus.try_now(&command, &mut data_in), Now::Done { .. }));
        }
        let ns = start.elapsed().as_nanos() / u128::from(commands);
        println!("{name:10} {ns} ns a command ({done} done)");
    }
}
