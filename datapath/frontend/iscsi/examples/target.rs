//! A target with a disk in memory, to try initiators and to measure the protocol alone: `target ADDRESS SIZE
//! [SECONDS]`.

use std::sync::Arc;
use std::time::Duration;

use headwater_block::size;
use headwater_iscsi::{FixedTargets, Limits, Offer, Server};
use headwater_scsi::{Identity, LogicalUnit, Options, Target};
use headwater_testkit::ReferenceDisk;

const NAME: &str = "iqn.2026-01.org.example:memory";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, bytes, rest @ ..] = arguments.as_slice() else {
        return Err("usage: target tcp:HOST[:PORT] SIZE [SECONDS]".into());
    };
    let disk = Arc::new(ReferenceDisk::new(size::parse(bytes)?));
    let identity = Identity {
        vendor: "HEADWATR".into(),
        product: "memory".into(),
        revision: "1".into(),
        serial: "memory".into(),
        uuid: [1; 16],
    };
    let unit = LogicalUnit::new(disk, identity, Options::default());
    let offer = Offer { scsi: Target::new(NAME, vec![(0, unit)]), alias: String::new(), accounts: None };
    let name = NAME.parse()?;
    let server =
        Server::bind(&address.parse()?, FixedTargets::new(vec![(NAME.parse()?, offer)]), Limits::default())?;
    println!("{}", server.url(&name, 0));
    let seconds = rest.first().map_or(Ok(u64::MAX), |text| text.parse())?;
    std::thread::sleep(Duration::from_secs(seconds));
    server.stop();
    Ok(())
}
