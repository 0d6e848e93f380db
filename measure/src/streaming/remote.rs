//! Measures one sequential reader of an image on a server, over TLS on the loopback interface.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};
use headwater_block::{ByteRange, Device, Request, blocking};

use super::server::{Export, Exported, Offer, Tls};
use super::stores::{Made, without_holes};
use super::{Comparison, Rounds, need_guest};
use crate::Plan;
use crate::iscsi::free_port;
use crate::targets::Goal;

/// The target value.
const GOAL_MB_PER_S: f64 = 600.0;
const READ_BYTES: usize = 1 << 20;

/// Reads the guest's data but not its holes, which would cost nothing.
pub fn run(plan: &Plan) -> Result<Vec<Comparison>> {
    need_guest(plan)?;
    let raw = plan.work_dir.join("dense.raw");
    without_holes(&plan.image, &raw)?;
    let made = Made::import(plan, "remote-tls", &raw, "dense")?;
    std::fs::remove_file(&raw)?;
    let tls = Tls::make(&plan.sockets, &["127.0.0.1"])?;
    let offer = Offer::start(Command::new(&plan.headwater), &made.store(), free_port()?, &tls)?;
    let (from, ca) = (format!("https://127.0.0.1:{}", offer.port()), tls.authority.display().to_string());
    let mut rounds = Rounds::new();
    for round in 0..plan.rounds {
        let what =
            Exported { image: "dense", from: &from, nbd: None, more: &["--ca", &ca, "--boot-trace", "off"] };
        let export = Export::start(plan, Command::new(&plan.headwater), &what)?;
        let disk = export.connect()?;
        let bytes = disk.geometry().size_bytes;
        let mut buffer = vec![0; READ_BYTES];
        let start = Instant::now();
        let mut at = 0;
        while at < bytes {
            let len = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(READ_BYTES);
            buffer.truncate(len);
            let range = ByteRange::new(at, u64::try_from(len)?).context("the image is too large")?;
            buffer = blocking::wait(&*disk, Request::Read { range, buffer })?;
            at += u64::try_from(len)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let megabytes = super::mib(bytes) * 1.048_576;
        let received = headwater_block::size::format(export.counters()?.get("received_bytes")?);
        println!(
            "  round {}/{}  {megabytes:.0} MB in {seconds:.3} s, {:.0} MB/s; {received} received over the network",
            round + 1,
            plan.rounds,
            megabytes / seconds
        );
        rounds.add(Comparison {
            case: "remote-tls",
            figure: "MB/s of the image",
            ours: vec![megabytes / seconds],
            peer: "600 MB/s".into(),
            theirs: vec![GOAL_MB_PER_S],
            goal: Goal::AtLeast(1.0),
        });
    }
    Ok(rounds.0)
}
